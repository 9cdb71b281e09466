"""simpar.planning."""
