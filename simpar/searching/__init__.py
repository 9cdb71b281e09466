"""The search for layouts."""
