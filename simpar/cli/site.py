"""The commands that learn from a cluster's own runs: adapt."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from simpar.cli.options import JsonOption, print_json, say_written


def adapt(
    runs: Annotated[list[Path], typer.Argument(help="JSON lines: of `simpar run read`, or rows of scenario and step_time_s.")],
    out: Annotated[Path | None, typer.Option("--out", help="Write the site as TOML.")] = None,
    name: Annotated[str, typer.Option(help="What to call the site.")] = "site",
    hardware: Annotated[str | None, typer.Option("--hardware", help="A profile for all runs, such as a calibrated one.")] = None,
    workers: Annotated[int, typer.Option(help="Processes.", min=1)] = 1,
    as_json: JsonOption = False,
) -> None:
    """Learn a cluster's factors from its own runs; --site then uses them in every command."""
    from simpar.api.sites import adapt as learned
    from simpar.output import check_writable

    if out is not None:
        check_writable(out, "--out")
    found = learned(runs, name=name, hardware=hardware, workers=workers, progress=not as_json)
    if out is not None:
        found.save(out)
    if as_json:
        print_json(found.to_dict())
    else:
        from simpar.report.site_view import site_report
        from simpar.report.step_table import show

        show(site_report(found.details))
    if out is not None:
        say_written(out)
