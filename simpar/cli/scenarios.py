"""The commands `simpar scenarios ...`: what is shipped to run, shown and copied."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from simpar.cli.listing import print_table
from simpar.cli.options import JsonOption, plan_completion, print_json, scenario_completion

scenarios_app = typer.Typer(no_args_is_help=False, invoke_without_command=True)


def _names(incomplete: str) -> list[str]:
    return scenario_completion(incomplete) + plan_completion(incomplete)


NameArgument = Annotated[str, typer.Argument(help="A shipped scenario or plan.", autocompletion=_names)]


@scenarios_app.callback()
def scenarios(ctx: typer.Context, as_json: JsonOption = False) -> None:
    """Scenarios (for simulate, search, ...) and plans (for plan) that come with simpar; without a subcommand, list them."""
    if ctx.invoked_subcommand is not None:
        return
    from simpar.specs.base import read_toml
    from simpar.specs.catalog import plan_names, plan_path, scenario_names, scenario_path

    runs = [_scenario_row(name, read_toml(scenario_path(name))) for name in scenario_names()]
    plans = [{"name": name, "about": read_toml(plan_path(name)).get("name", "")} for name in plan_names()]
    if as_json:
        print_json({"scenarios": runs, "plans": plans})
        return
    heads = ("scenario", "model", "machine", "nodes", "layout", "framework")
    print_table(heads, [tuple(str(row[head]) for head in ("name", *heads[1:])) for row in runs], texts=6)
    print()
    print_table(("plan", "about"), [(row["name"], row["about"]) for row in plans], texts=2)


def _scenario_row(name: str, table: dict[str, Any]) -> dict[str, Any]:
    model, plan, cluster = table["model"], table.get("plan", {}), table["cluster"]
    machines = cluster.get("parts", [cluster])
    degrees = [f"{key}{plan[key]}" for key in ("tp", "cp", "pp", "ep") if plan.get(key, 1) > 1]
    return {
        "name": name, "title": table.get("name", name), "model": model if isinstance(model, str) else model.get("name", "own"),
        "machine": " + ".join(m["hardware"] for m in machines), "nodes": sum(m["num_nodes"] for m in machines),
        "layout": " ".join(degrees) or "dp", "framework": table.get("framework", "megatron-core"),
    }  # fmt: skip


@scenarios_app.command("show")
def show(name: NameArgument, as_json: JsonOption = False) -> None:
    """The file of a shipped scenario or plan."""
    path = _shipped(name)
    if as_json:
        from simpar.specs.base import read_toml

        print_json(read_toml(path))
    else:
        print(path.read_text(encoding="utf-8"), end="")


@scenarios_app.command("copy")
def copy(
    name: NameArgument,
    out: Annotated[Path | None, typer.Option("--out", help="File to write; without it NAME.toml in this folder.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
) -> None:
    """Copy a shipped scenario or plan, to change it."""
    from simpar.cli.new import write_new

    source = _shipped(name)
    write_new(out or Path(source.name), source.read_text(encoding="utf-8"), force)


def _shipped(name: str) -> Path:
    from simpar.registry import unknown
    from simpar.specs.catalog import plan_names, plan_path, scenario_names, scenario_path

    if name in scenario_names():
        return scenario_path(name)
    if name in plan_names():
        return plan_path(name)
    raise unknown("scenario or plan", name, [*scenario_names(), *plan_names()], "simpar scenarios")
