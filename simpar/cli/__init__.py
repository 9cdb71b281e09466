"""The command line, one file per group of commands."""

from simpar.cli.app import app, main

__all__ = ["app", "main"]
