"""simpar.report."""
