"""simpar.program."""
