"""simpar.calibration."""
