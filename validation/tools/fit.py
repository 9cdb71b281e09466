"""`python -m validation.tools.fit kernels|collectives [--data DIR] [--out DIR]`: fitted constants from measured tables."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

from simpar.errors import InputError
from simpar.specs.base import data_dir

MODULES = {"kernels": "validation.tools.fit_kernels", "collectives": "validation.tools.fit_collectives"}
"""Subcommand -> module with `run(data: Path, out: Path) -> int`."""


def main(arguments: list[str] | None = None) -> int:
    """The command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m validation.tools.fit", description=__doc__)
    parser.add_argument("what", choices=sorted(MODULES))
    parser.add_argument("--data", type=Path, default=None, help="folder of measured tables (those that come with simpar)")
    parser.add_argument("--out", type=Path, default=None, help="where to write (hardware_profiles/fitted)")
    chosen = parser.parse_args(arguments)
    try:
        out = chosen.out or data_dir("hardware_profiles") / "fitted"
        return int(importlib.import_module(MODULES[chosen.what]).run(chosen.data or data_dir("validation") / chosen.what, out))
    except InputError as error:
        print(error, file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
