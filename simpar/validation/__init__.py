"""simpar.validation."""
