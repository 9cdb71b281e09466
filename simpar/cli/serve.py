"""The command `simpar serve`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from simpar.cli.options import SiteOption, scenario_completion


def serve(
    host: Annotated[str, typer.Option(help="Address to listen at; any but 127.0.0.1 opens it to the network.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 = any free one.")] = 8050,
    scenario: Annotated[
        Path | None,
        typer.Option(help="A scenario to start from: a file of your own, or a name.", autocompletion=scenario_completion),
    ] = None,
    site: SiteOption = None,
) -> None:
    """A local page to change model, cluster and layout and see what follows."""
    from simpar.api.own_run import own_run
    from simpar.interop.megatron import launch_script
    from simpar.report.serve.app import serve as run_page
    from simpar.specs.catalog import scenario_path

    run_page(host, port, scenario and scenario_path(scenario), launch_script, site, own_run)
