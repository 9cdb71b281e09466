"""`simpar run ...`: the user's own runs. Only parsing and printing; readers are imported inside the command that needs them."""

from __future__ import annotations

import glob
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from simpar.cli.options import chosen_scenario, print_json, scenario_completion

if TYPE_CHECKING:
    from simpar.specs.scenario import Scenario

run_app = typer.Typer(no_args_is_help=True, help="Read your own runs: logs, traces and memory snapshots.")


@run_app.callback()
def _run() -> None:
    """Your own runs."""


def _files(given: list[str] | None, option: str) -> list[Path]:
    """Paths of an option's values; a pattern in quotes stands for all files that fit it, in order."""
    from simpar.errors import InputError

    found: list[Path] = []
    for text in given or []:
        matches = sorted(glob.glob(text, recursive=True)) if glob.has_magic(text) and not Path(text).exists() else [text]
        if not matches:
            raise InputError(f"{option} {text}: no file fits this pattern")
        found += [Path(m) for m in matches]
    return found


@run_app.command("read", epilog="Example: simpar run read scenario.toml --log train.log --out runs.jsonl")
def read(
    scenario: Annotated[
        str,
        typer.Argument(
            help="The scenario that ran: a shipped one, a TOML file, or a configuration `simpar import` reads.",
            autocompletion=scenario_completion,
        ),
    ],
    log: Annotated[list[str] | None, typer.Option("--log", help="Log, event file or folder, CSV, JSON lines; patterns.")] = None,
    trace: Annotated[
        list[str] | None, typer.Option("--trace", help="Kineto traces of ranks, nsys SQLite, flight recorders.")
    ] = None,
    memory: Annotated[list[str] | None, typer.Option("--memory", help="Torch memory snapshots; patterns.")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Add the row to this file, one JSON object a line.")] = None,
    name: Annotated[str, typer.Option("--id", help="Name of the run; none = scenario and file.")] = "",
    log_format: Annotated[str, typer.Option("--format", help="Format of the logs, where several would fit.")] = "",
    hardware: Annotated[str | None, typer.Option(help="Machine, where a configuration does not say.")] = None,
    num_nodes: Annotated[int | None, typer.Option(help="Nodes, where a configuration does not say.", min=1)] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="Override a field: plan.pp=8. Repeatable.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the row as JSON.")] = False,
) -> None:
    """Step times, memory and more of a run you made, as one row that `validate runs --data` and `adapt` read."""
    from simpar.runlogs.read import add_rows, read_run

    made = _scenario(scenario, hardware, num_nodes, overrides or [])
    found = read_run(
        made, _files(log, "--log"), traces=_files(trace, "--trace"), memory=_files(memory, "--memory"), name=name, chosen=log_format
    )
    warnings = add_rows(out, [found.row]) if out is not None else []
    for text in (*found.notes, *warnings):
        typer.echo(f"note: {text}", err=True)
    if as_json:
        print_json(found.row)
        return
    for line in _shown(found.row):
        typer.echo(line)
    if out is not None:
        typer.echo(f"wrote {out}")


def _scenario(text: str, hardware: str | None, num_nodes: int | None, overrides: list[str]) -> Scenario:
    """A scenario, or the configuration of a framework."""
    from simpar.specs.options import RunOptions

    path = Path(text)
    if path.is_file() and not _is_scenario(path):
        from simpar.interop.configs import load_config

        return load_config(path, hardware=hardware, num_nodes=num_nodes).scenario
    return chosen_scenario(path, RunOptions(), overrides)


def _is_scenario(path: Path) -> bool:
    """A TOML file with a cluster and a model name is a scenario; torchtitan's has a table of that name."""
    if path.suffix != ".toml":
        return False
    from simpar.boundary import MOST_CONFIG_BYTES, parse_toml, read_text

    table = parse_toml(read_text(path, MOST_CONFIG_BYTES), path)
    return "cluster" in table or not {"job", "parallelism", "metrics"} & set(table)


def _shown(row: dict[str, Any]) -> list[str]:
    extra = row["extra"]
    lines = [row["id"]]
    if "step_time_s" in row:
        lines.append(f"  step time       {row['step_time_s']:.4g} s (median)")
    if row.get("oom"):
        lines.append("  out of memory   before a step was done")
    if steps := extra.get("step_time"):
        lines.append(
            f"  over            {steps['steps']} steps in {steps['count']} figures, {extra['warm_up_intervals']} dropped: "
            f"{steps['least_s']:.4g} .. {steps['p10_s']:.4g} .. {steps['p90_s']:.4g} .. {steps['most_s']:.4g} s"
        )
    for what, found in extra.get("apart", {}).items():
        lines.append(f"  set apart       {what}: {found['intervals']} figures, {found['extra_s']:.4g} s more than plain steps")
    if "mem_gib" in row:
        lines.append(f"  peak memory     {row['mem_gib']:.4g} GiB ({row['mem_kind']})")
    for key, title in (("loss_scale", "loss scale"), ("moe", "experts"), ("restarts", "restarts"), ("pauses_s", "pauses (s)")):
        if key in extra:
            lines.append(f"  {title:15s} {extra[key]}")
    for part in ("traces", "snapshots"):
        lines += [f"  {text}" for text in extra.get(part, {}).get("text", [])]
    return lines
