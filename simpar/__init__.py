"""simpar: a discrete-event cluster simulator and planner for training large models in parallel."""

__version__ = "0.1.0"
