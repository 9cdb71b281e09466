"""simpar.schedules."""
