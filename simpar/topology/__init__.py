"""simpar.topology."""
