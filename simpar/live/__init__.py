"""Real runs on the user's machine: calibration, torch.distributed steps, single ranks, traces."""
