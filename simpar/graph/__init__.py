"""A layer as a typed graph, and the passes over it."""
