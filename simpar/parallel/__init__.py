"""simpar.parallel."""
