"""Options that several commands share."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from simpar.specs.options import RunOptions
    from simpar.specs.scenario import Scenario

PREDICT, SEARCH, MEASURE, FILES, SHIPPED = (
    "Predict", "Search and plan", "Compare with measurements", "Files of other programs", "What is shipped",
)  # fmt: skip
"""Panels of the help."""


def _completion(module: str, names: str) -> Callable[[str], list[str]]:
    """For the shell: what `names` of a module lists, and files, that begin so; the module is imported when it is asked."""

    def complete(incomplete: str) -> list[str]:
        listed: list[str] = getattr(import_module(module), names)()
        return [name for name in listed if name.startswith(incomplete)] + _files(incomplete)

    return complete


def _files(incomplete: str) -> list[str]:
    folder, _, start = incomplete.rpartition("/")
    try:
        found = sorted(Path(folder or ".").iterdir())
    except OSError:
        return []
    prefix = f"{folder}/" if folder or incomplete.startswith("/") else ""
    kept = (p for p in found if p.name.startswith(start) and (p.is_dir() or p.suffix in (".toml", ".json")))
    return [f"{prefix}{p.name}/" if p.is_dir() else f"{prefix}{p.name}" for p in kept]


scenario_completion = _completion("simpar.specs.catalog", "scenario_names")
plan_completion = _completion("simpar.specs.catalog", "plan_names")
model_completion = _completion("simpar.specs.models_io", "model_names")
profile_completion = _completion("simpar.specs.hardware", "profile_names")
ScenarioFile = Annotated[
    Path, typer.Argument(help="A scenario: a TOML file, or a name of `simpar scenarios`.", autocompletion=scenario_completion)
]
MaybeScenario = Annotated[
    Path | None,
    typer.Argument(
        help="A scenario: a TOML file, or a name of `simpar scenarios`; or none, with --model and the others.",
        autocompletion=scenario_completion,
    ),
]
SetOption = Annotated[list[str] | None, typer.Option("--set", help="Override one field: plan.pp=8. Repeatable.")]


def _raise_limits(values: list[str] | None) -> None:
    """For this process and those that it starts."""
    if values:
        import os

        from simpar.specs.size import VARIABLE, limits

        os.environ[VARIABLE] = ",".join(filter(None, [os.environ.get(VARIABLE, ""), *values]))
        limits()


SizeOption = Annotated[
    list[str] | None,
    typer.Option(
        "--limit", callback=_raise_limits, expose_value=False,
        help="Raise a limit on size: ops=5e7, layers=5000, ranks=2e7. Repeatable.",
    ),
]  # fmt: skip
SiteOption = Annotated[
    Path | None, typer.Option("--site", help="What `simpar adapt` learned from a cluster's own runs; as site = in the scenario.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
HtmlOption = Annotated[Path | None, typer.Option("--html", help="Write a page.")]


def _keep_offline(ctx: typer.Context, wanted: bool) -> None:
    if wanted:
        from simpar.output import offline

        ctx.with_resource(offline())


OfflineOption = Annotated[
    bool,
    typer.Option(
        "--offline", callback=_keep_offline, expose_value=False,
        help="The page of --html has everything inside (5 MB more) and needs no network.",
    ),
]  # fmt: skip
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="A preset (`simpar models`), the name of a model at the Hugging Face Hub, or the path of a config.json.",
        autocompletion=model_completion,
    ),
]
HardwareOption = Annotated[
    str | None,
    typer.Option("--hardware", help="A profile (`simpar profiles`) or the path of one.", autocompletion=profile_completion),
]
NodesOption = Annotated[int | None, typer.Option("--num-nodes", help="Machines.", min=1)]
GpusOption = Annotated[
    int | None, typer.Option("--num-gpus", help="GPUs, instead of --num-nodes: part of a node, or the nodes that they fill.", min=1)
]
SequenceOption = Annotated[int | None, typer.Option("--sequence-length", help="Tokens per sequence.", min=1)]
BatchOption = Annotated[int | None, typer.Option("--global-batch", help="Sequences per step.", min=1)]
FrameworkOption = Annotated[str | None, typer.Option("--framework", help="Whose semantics: megatron-core, torchtitan, ...")]


def at_site(overrides: list[str] | None, site: Path | None) -> list[str]:
    """`overrides` with the site, which is one more field of a scenario.

    Raises:
        InputError: no such file, or not a site's.
    """
    found = list(overrides or [])
    if site is not None:
        from simpar.specs.site import read_site

        read_site(site)
        found.append(f"site={json.dumps(str(site.resolve()))}")
    return found


def print_json(value: object) -> None:
    """Print one JSON object; numbers that JSON does not have are a bug."""
    sys.stdout.write(json.dumps(value, indent=2, allow_nan=False) + "\n")


def say_written(path: Path) -> None:
    """Tell a person, beside the answer, that a file is there."""
    print(f"wrote {path}", file=sys.stderr)


def chosen_scenario(scenario: Path | None, options: RunOptions, overrides: Sequence[str]) -> Scenario:
    """The checked scenario of a file or name with options and overrides; without either the options stand for one, whose layout,
    unless overrides give degrees, is the first that fits.

    Raises:
        InputError: every broken rule, together.
    """
    from simpar.specs.scenario import make_scenario

    table, file = chosen_table(scenario, options, overrides)
    return make_scenario(table, file=file)


def chosen_table(scenario: Path | None, options: RunOptions, overrides: Sequence[str]) -> tuple[dict[str, Any], str]:
    """The raw table of `chosen_scenario`, and the file that its relative paths start from.

    Raises:
        InputError: no such file or name, or options that contradict each other.
    """
    table, file = options.table(scenario, overrides)
    if scenario is None and not {"tp", "cp", "pp", "dp", "ep"} & set(table.get("plan", {})):
        from simpar.api.first_plan import first_layout

        table, fits = first_layout(table, file)
        which = "the first layout that fits" if fits else "no layout fits; the closest"
        said = {**table["plan"], "micro_batch_size": table["training"].get("micro_batch_size", 1)}
        print(f"simpar: {which}: {plan_text(said)}; `simpar search` finds the best", file=sys.stderr)
    return table, file


def plan_text(plan: dict[str, Any]) -> str:
    """A plan in one line: "tp 8, pp 4, zero_stage 1"."""
    return ", ".join(f"{name} {value}" for name, value in plan.items() if value is not True and value not in (1, "none")) or "tp 1"
