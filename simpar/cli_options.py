"""Options that several commands share."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

ScenarioFile = Annotated[Path, typer.Argument(help="A scenario, TOML.")]
SetOption = Annotated[list[str] | None, typer.Option("--set", help="Override one field: plan.pp=8. Repeatable.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
HtmlOption = Annotated[Path | None, typer.Option("--html", help="Write a self-contained page.")]


def print_json(value: object) -> None:
    """Print one JSON object; numbers that JSON does not have are a bug."""
    sys.stdout.write(json.dumps(value, indent=2, allow_nan=False) + "\n")
