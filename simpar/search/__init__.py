"""simpar.search."""
