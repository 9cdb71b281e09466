"""The command `simpar export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from simpar.cli.options import ScenarioFile, SetOption, SizeOption


def export(
    framework: Annotated[str, typer.Argument(help="The format, such as megatron or huggingface; docs/export.md lists them.")],
    scenario: ScenarioFile,
    overrides: SetOption = None,
    limit: SizeOption = None,
    out: Annotated[Path | None, typer.Option("--out", help="A folder for all files, or a file for the main one.")] = None,
) -> None:
    """A scenario as the launch files of a framework; without --out the main one is printed."""
    from simpar.interop.export import FORMATS, export_files, write_files
    from simpar.registry import unknown
    from simpar.specs.scenario import read_scenario

    if framework not in (known := [*FORMATS, "chakra", "simai"]):
        raise unknown("export format", framework, known)
    made = read_scenario(scenario, overrides)
    if framework == "chakra":
        from simpar.interop.chakra import write

        if out is None:
            raise typer.BadParameter("chakra writes a file for every rank: --out FOLDER")
        paths = write(made, out)
        print(f"wrote {paths[0]} to {paths[-2].name} and {paths[-1].name} in {out}")
        return
    if framework == "simai":
        from simpar.interop.simai import export as workload

        files = workload(made)
    else:
        files = export_files(framework, made)
    if out is None:
        print(next(iter(files.values())), end="")
        return
    for path in write_files(files, out):
        print(f"wrote {path}")
