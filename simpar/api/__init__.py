"""The public Python API: what `import simpar` offers, and what the command line is a user of. See docs/python.md."""
