"""Reading a scenario: names are resolved and the whole is checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from simpar.boundary import reader, toml_value
from simpar.errors import InputError, Violation
from simpar.specs.base import read_toml, validate
from simpar.specs.catalog import scenario_path
from simpar.specs.checks import check_scenario
from simpar.specs.hub import is_hub_name
from simpar.specs.models_io import load_model, model_from_table, preset_called
from simpar.specs.open_values import open_fields
from simpar.specs.reference import FIELD
from simpar.specs.scenario_spec import Published as Published
from simpar.specs.scenario_spec import Scenario as Scenario


def _preset_table(name: str, assignment: str, base: Path | None) -> dict[str, Any]:
    """A shipped model, one of the Hugging Face Hub or one in a file from the folder `base`, as a table to change, without what is
    published of it.

    Raises:
        InputError: `name` is no shipped model and no such file.
    """
    if preset_called(name) is None and not is_hub_name(name) and not (base and (base / name).exists()):
        right = "write it as a [model] table, `simpar models show FILE --json` prints its fields"
        raise InputError([Violation("--set", assignment, f"model = {name!r} is no shipped model whose fields can be set", right)])
    found = load_model(name, base)
    kept = found.model_dump(exclude={"source", "published_parameters"})
    return {**kept, "name": f"{name}, changed"}


def apply_override(table: dict[str, Any], assignment: str, base: Path | None = None) -> None:
    """Set one field of the raw `table`: "plan.pp=8" (values are TOML, bare words are strings).

    A field of a model that is named (`model = "llama3.1-8b"`) changes a copy of that preset, or of the file from the folder `base`.

    Raises:
        InputError: `assignment` is none, or what it goes through is no table.
    """
    path, equals, text = assignment.partition("=")
    if not equals or not path.strip():
        raise InputError(f"--set {assignment}: write it as field=value, such as plan.pp=8")
    value = toml_value(text)
    *parents, last = path.strip().split(".")
    for parent in parents:
        nested = table.setdefault(parent, {})
        if isinstance(nested, str) and path.strip().startswith("model."):
            nested = table[parent] = _preset_table(nested, assignment, base)
        if not isinstance(nested, dict):
            raise InputError(f"--set {assignment}: {parent} is not a table")
        table = nested
    table[last] = value


@reader("path", "a scenario, TOML")
def read_scenario(path: str | Path, overrides: list[str] | None = None) -> Scenario:
    """The scenario in the TOML file at `path`, or the shipped one of that name, with `overrides` ("plan.pp=8") applied, checked.

    Raises:
        InputError: all violations, together.
    """
    file = scenario_path(path)
    return make_scenario(read_table(file, overrides or []), file=str(file))


def read_table(path: str | Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The raw table of a scenario's file, or of the shipped scenario of that name, with `overrides` applied.

    Raises:
        InputError: no such scenario, not TOML, or an override that is no assignment.
    """
    file = scenario_path(path)
    table = read_toml(file)
    if "phases" in table:
        raise InputError(f"{file}: is the plan of a whole run, not a scenario; answer it with `simpar plan {path}`")
    return overridden(table, overrides, file.parent)


def overridden(table: dict[str, Any], assignments: Sequence[str], base: Path | None = None) -> dict[str, Any]:
    """The raw `table` of a scenario, whose models lie in the folder `base`, with `assignments` applied."""
    changed = deepcopy(table)
    for assignment in assignments:
        apply_override(changed, assignment, base)
    return as_published(changed, table)


def as_published(changed: dict[str, Any], table: Mapping[str, Any]) -> dict[str, Any]:
    """`changed`, the raw `table` of a scenario or a plan file with changes, without what is published about that where they change
    what runs."""
    told = {"name", "description", "published", "effects", "deadline", "confidence", "prices", "file"}
    if {k: v for k, v in changed.items() if k not in told} != {k: v for k, v in table.items() if k not in told}:
        changed.pop("published", None)
    return changed


@reader("file", "a scenario")
def make_scenario(table: dict[str, Any], *, file: str = "", undecided: tuple[str, ...] = ()) -> Scenario:
    """A checked scenario from a raw `table`; `model` may be a preset's name, a path to a config.json, or a table.

    Args:
        undecided: beginnings of fields that do not matter yet, such as "plan" where a search is to find it; types are checked.

    Raises:
        InputError: all violations, together.
    """
    table = dict(table)
    if left_open := open_fields(table, file):
        rule = "is left open, which only `simpar simulate` and simpar.simulate answer"
        raise InputError([Violation(f.path, [v for v, _ in f.values], rule, "give one of these values", file) for f in left_open])
    base = Path(file).parent if file else Path()
    wrong_model: list[Violation] = []
    if "model" in table:
        table["model"], wrong_model = _model_table(table["model"], base, file)
    training = table.get("training")
    if isinstance(training, dict) and isinstance(training.get("reference_model"), str | dict):
        beside, wrong = _model_table(training["reference_model"], base, file, FIELD)
        table["training"], wrong_model = {**training, "reference_model": beside}, [*wrong_model, *wrong]
    if isinstance(cluster := table.get("cluster"), dict):
        table["cluster"] = _beside(cluster, base)
        if isinstance(parts := cluster.get("parts"), list | tuple):
            table["cluster"]["parts"] = [_beside(part, base) if isinstance(part, dict) else part for part in parts]
    table.setdefault("name", Path(file).stem if file else "scenario")
    try:
        scenario = validate(Scenario, {**table, "file": file}, file=file)
    except InputError as error:
        raise InputError([*wrong_model, *error.violations]) from None
    violations = wrong_model or [v for v in check_scenario(scenario) if not v.field.startswith(undecided)]
    if violations:
        raise InputError(violations)
    return scenario


def _beside(machines: dict[str, Any], base: Path) -> dict[str, Any]:
    """A table of machines whose profile, where it is a file beside the scenario, is named by its path."""
    name = str(machines.get("hardware", ""))
    relative = base / name
    return {**machines, "hardware": str(relative)} if name.endswith(".toml") and relative.is_file() else dict(machines)


def _model_table(model: object, base: Path, file: str, field: str = "model") -> tuple[dict[str, Any], list[Violation]]:
    """The model named or written by the user as a table, or a stand-in and what is wrong with it."""
    stand_in = {"kind": "mlp", "width": 1, "depth": 1}
    try:
        if isinstance(model, str):
            return load_model(model, base=base).model_dump(), []
        if isinstance(model, dict):
            return model_from_table(model, file=file, prefix=field).model_dump(), []
    except InputError as error:
        return stand_in, list(error.violations) or [Violation(field, model, str(error), file=file)]
    rule = "must be a preset's name, a path, or a table"
    return stand_in, [Violation(field, model, rule, 'such as "llama3.1-8b"', file)]
