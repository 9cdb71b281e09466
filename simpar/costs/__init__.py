"""simpar.costs."""
