"""simpar.workload."""
