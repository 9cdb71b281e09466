"""When it happens: programs replayed on SimPy, or their longest paths in numpy. docs/semantics.md says what that means."""
