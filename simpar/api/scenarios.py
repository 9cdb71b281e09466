"""A scenario from a file, a name, a table or another scenario, with changes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from pydantic import BaseModel

from simpar.errors import InputError, Violation
from simpar.registry import unknown
from simpar.specs.catalog import scenario_path
from simpar.specs.cluster import ClusterSpec
from simpar.specs.effects import EffectsSpec
from simpar.specs.plan import PlanSpec
from simpar.specs.scenario import Scenario, as_published, make_scenario, read_table
from simpar.specs.training import TrainingSpec

Source: TypeAlias = str | Path | Mapping[str, Any] | Scenario
"""A scenario: a TOML file, the name of a shipped one, a raw table as the file would hold, or one that is loaded."""

TABLES: dict[str, type[BaseModel]] = {"plan": PlanSpec, "training": TrainingSpec, "cluster": ClusterSpec, "effects": EffectsSpec}
"""Tables of a scenario whose fields may be changed by their own name."""


def load(source: Source | None = None, /, **changes: Any) -> Scenario:
    """The checked scenario of `source` with `changes`.

    Args:
        source: none = a scenario that the changes alone describe.
        changes: fields of a scenario (`framework="torchtitan"`, `cluster={"num_nodes": 16}`), or of its plan, training, cluster and
            effects by their own name (`pp=8`, `global_batch_size=512`). A mapping is laid over the table that is there; a `Plan`,
            `Training` or `Cluster` replaces it; None takes a field back to its default. Where the degrees or the cluster change
            and `dp` is not given, it is derived anew.

    Raises:
        InputError: every broken rule, together.
    """
    table, file = raw_table({} if source is None else source)
    return make_scenario(changed(table, changes), file=file)


def raw_table(source: Source) -> tuple[dict[str, Any], str]:
    """The raw table of `source`, and the file that its relative paths start from ("" = none).

    Raises:
        InputError: no such file or name, or not TOML.
    """
    if isinstance(source, Scenario):
        table = source.model_dump(exclude={"file"}, exclude_none=True)
        table["model"] = source.model.model_dump()
        return table, source.file
    if isinstance(source, Mapping):
        table = {key: _plain(key, value) for key, value in source.items() if key != "file"}
        return table, str(source.get("file", ""))
    if isinstance(source, str | Path):
        return read_table(source), str(scenario_path(source))
    raise InputError(f"a scenario is a file, a name, a table or a Scenario, not a {type(source).__name__}")


def _plain(key: str, value: Any) -> Any:
    """A part of a scenario built in code as a raw table, of which single fields may be changed; a model whole."""
    return value.model_dump(exclude_none=key != "model") if isinstance(value, BaseModel) else value


def changed(table: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the raw `table` of a scenario with `changes`, see `load`.

    Raises:
        UnknownNameError: a change that is no field.
    """
    paths = {name if "." in name else f"{_parent(name)}{name}": value for name, value in changes.items()}
    before = _sizes(table)
    found = assigned(table, paths)
    given = paths.get("plan")
    named = (isinstance(given, Mapping) and "dp" in given) or (isinstance(given, PlanSpec) and given.dp is not None)
    if _sizes(found) != before and "plan.dp" not in paths and not named and isinstance(found.get("plan", {}), Mapping):
        found = assigned(found, {"plan.dp": None})
    return as_published(found, table)


def _sizes(table: Mapping[str, Any]) -> list[Any]:
    """What the data-parallel degree follows from."""
    sized = {"plan": ("tp", "cp", "pp"), "cluster": _CLUSTER_SIZE}
    return [part.get(name) for key, names in sized.items() if isinstance(part := table.get(key), Mapping) for name in names]


_CLUSTER_SIZE = ("hardware", "num_nodes", "num_gpus", "gpus_per_node")


def assigned(table: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of any raw `table` with `changes`, whose names are dotted paths; None removes a field.

    Raises:
        InputError: a path leads through what is no table.
    """
    found: dict[str, Any] = {key: dict(value) if isinstance(value, Mapping) else value for key, value in table.items()}
    for name, value in changes.items():
        *parents, field = name.split(".")
        target = found
        for parent in parents:
            below = target.get(parent, {})
            if not isinstance(below, Mapping):
                raise InputError([Violation(name, value, f"{parent} is {below!r}, not a table", f"give all of {parent}")])
            target[parent] = dict(below)
            target = target[parent]
        _assign(target, field, value)
    return found


def _parent(name: str) -> str:
    """ "plan." for a field of the plan, "" for one of the scenario itself."""
    if name in Scenario.model_fields:
        return ""
    for table, spec in TABLES.items():
        if name in spec.model_fields:
            return f"{table}."
    raise unknown(
        "field of a scenario", name, [*Scenario.model_fields, *(f for spec in TABLES.values() for f in spec.model_fields)]
    )


def _assign(table: dict[str, Any], field: str, value: Any) -> None:
    if isinstance(value, BaseModel):
        value = value.model_dump(exclude_none=True)
        table.pop(field, None)
    before = table.get(field)
    if value is None:
        table.pop(field, None)
    elif isinstance(value, Mapping) and isinstance(before, Mapping):
        merged = dict(before)
        for key, part in value.items():
            _assign(merged, key, part)
        table[field] = merged
    else:
        table[field] = dict(value) if isinstance(value, Mapping) else value
