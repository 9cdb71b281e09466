"""simpar.result."""
