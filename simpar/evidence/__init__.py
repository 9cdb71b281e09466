"""Measured runs, kernels and collectives, the predictions beside them, and the fits that they carry."""
