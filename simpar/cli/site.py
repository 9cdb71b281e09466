"""The commands that learn from a cluster's own runs, and choose the next one: adapt, tune."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from simpar.cli.options import FrameworkOption, JsonOption, ScenarioFile, SetOption, SiteOption, at_site, print_json, say_written
from simpar.errors import InputError


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


def tune(
    scenario: ScenarioFile,
    framework: FrameworkOption = None,
    budget: Annotated[int, typer.Option(help="Trials at most.")] = 6,
    folder: Annotated[Path, typer.Option(help="Of the state and the trials; an earlier tuning there goes on.")] = Path("tune"),
    run_command: Annotated[
        str, typer.Option("--run-command", help="Runs a trial: a command with {folder}, {scenario} or {launch} in it.")
    ] = "",
    worth: Annotated[float, typer.Option(help="No trial below this share of the step.", min=0.0)] = 0.003,
    top: Annotated[int, typer.Option(help="Layouts of the search to choose from.", min=2)] = 24,
    overrides: SetOption = None,
    site: SiteOption = None,
    fix: Annotated[list[str] | None, typer.Option(help="One value of an axis: pp=1. Repeatable.")] = None,
    allow: Annotated[list[str] | None, typer.Option(help="Values of an axis: schedule=1f1b,interleaved. Repeatable.")] = None,
    as_json: JsonOption = False,
) -> None:
    """The trial runs worth most, one after the other: search, run, learn, until another is not worth its time."""
    import sys

    from simpar.api.tuning import tune as go_on
    from simpar.specs.catalog import scenario_path
    from simpar.specs.scenario import read_table

    table = {**read_table(scenario, at_site(overrides, site)), "file": str(scenario_path(scenario))}
    settings = {"fix": dict(_pairs(fix)), "allow": {axis: value.split(",") for axis, value in _pairs(allow)}}
    state = go_on(
        table, framework=framework, budget=budget, folder=folder, run_command=run_command, worth=worth, top=top,
        say=lambda text: print(f"simpar: {text}", file=sys.stderr), **{key: value for key, value in settings.items() if value},
    )  # fmt: skip
    if as_json:
        print_json(state.to_dict())
        return
    from simpar.report.site_view import tuning_report
    from simpar.report.step_table import show

    show(tuning_report(state.to_dict()))


def _pairs(given: list[str] | None) -> list[tuple[str, str]]:
    """ "pp=1" as ("pp", "1")."""
    found = []
    for text in given or []:
        axis, sign, value = text.partition("=")
        if not sign or not axis or not value:
            raise InputError(f"{text}: write it as axis=value, such as pp=1")
        found.append((axis, value))
    return found
