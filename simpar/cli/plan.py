"""The command `simpar plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from simpar.cli.options import HtmlOption, JsonOption, OfflineOption, SetOption, SiteOption, SizeOption, plan_completion


def plan(
    plan_file: Annotated[
        Path, typer.Argument(help="A plan: a TOML file, or a name of `simpar scenarios`.", autocompletion=plan_completion)
    ],
    solve: Annotated[str | None, typer.Option(help="nodes, checkpoint-interval or spares.")] = None,
    deadline: Annotated[str | None, typer.Option(help='For --solve nodes: "60d".')] = None,
    compare: Annotated[str | None, typer.Option(help="Hardware profiles, comma-separated.")] = None,
    sweep: Annotated[list[str] | None, typer.Option(help="field=1,2,4 or field=128..2048x2. Repeatable.")] = None,
    sensitivity: Annotated[bool, typer.Option("--sensitivity", help="Which assumption moves the answer most.")] = False,
    marginal: Annotated[bool, typer.Option("--marginal", help="The value of one more NIC, HBM, links, nodes.")] = False,
    keep_layout: Annotated[bool, typer.Option("--keep-layout", help="Do not search layouts again at each point.")] = False,
    overrides: SetOption = None,
    limit: SizeOption = None,
    as_json: JsonOption = False,
    html: HtmlOption = None,
    offline: OfflineOption = False,
    seed: Annotated[int, typer.Option(help="Of the failures drawn.")] = 0,
    repetitions: Annotated[int, typer.Option(help="Independent runs.")] = 200,
    store: Annotated[Path | None, typer.Option(help="Keep finished repetitions here.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from --store.")] = False,
    site: SiteOption = None,
) -> None:
    """Days, GPU-hours, cost, energy and goodput of a whole run with failures."""
    from simpar.api.plans import step_model
    from simpar.planning.questions import PlanOptions
    from simpar.report.plan_view import Progress
    from simpar.report.plan_view import run as run_plan

    options = PlanOptions(
        solve=solve, deadline=deadline, compare=compare, sweep=tuple(sweep or ()), sensitivity=sensitivity, marginal=marginal,
        keep_layout=keep_layout, overrides=tuple(overrides or ()), json=as_json, html=html, seed=seed, repetitions=repetitions,
        store=store, resume=resume, site=site,
    )  # fmt: skip
    raise typer.Exit(run_plan(plan_file, options, step_model(store, Progress())))
