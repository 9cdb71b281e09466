"""simpar.interop."""
