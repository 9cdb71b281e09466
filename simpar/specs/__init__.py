"""simpar.specs."""
