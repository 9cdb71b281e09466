"""simpar.engine."""
