"""The command `simpar export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from simpar.cli.options import ScenarioFile, SetOption, SizeOption


def export(
    framework: Annotated[
        str, typer.Argument(help="megatron, torchtitan, deepspeed, nanotron, huggingface, axolotl, torchtune; chakra or simai.")
    ],
    scenario: ScenarioFile,
    overrides: SetOption = None,
    limit: SizeOption = None,
    out: Annotated[Path | None, typer.Option("--out", help="A folder for all files, or a file for the main one.")] = None,
) -> None:
    """A scenario as the launch files of a framework; without --out the main one is printed."""
    from simpar.interop.export import export_files, write_files
    from simpar.specs.scenario import read_scenario

    files = export_files(framework, read_scenario(scenario, overrides))
    if out is None:
        print(next(iter(files.values())), end="")
        return
    for path in write_files(files, out):
        print(f"wrote {path}")
