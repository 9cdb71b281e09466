"""A scenario as TOML: what differs from the defaults, in the order of the file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from simpar.specs.models_io import preset_of
from simpar.specs.scenario import Scenario
from simpar.toml import toml


def _differences(spec: BaseModel, keep: tuple[str, ...] = ()) -> dict[str, Any]:
    """Fields that differ from the spec's defaults, and those to keep anyway."""
    found: dict[str, Any] = {}
    for name, field in type(spec).model_fields.items():
        value = getattr(spec, name)
        if name not in keep and value == field.get_default(call_default_factory=True):
            continue
        if value is None:
            continue
        # A quantity is written with its unit.
        found[name] = _plain(spec.model_dump(include={name})[name] if isinstance(value, float) else value)
    return found


def _plain(value: Any) -> Any:
    """Specs at any depth as tables."""
    if isinstance(value, BaseModel):
        return _differences(value, _required(value))
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value


def _required(spec: BaseModel) -> tuple[str, ...]:
    """Fields that a reader looks for: those without a default, and the kind of recomputation."""
    return (*(name for name, field in type(spec).model_fields.items() if field.is_required()), "granularity", *_kind(spec))


def _kind(spec: BaseModel) -> tuple[str, ...]:
    """The field that tells a spec from others in its place; a model without it is a transformer."""
    return ("kind",) if getattr(spec, "kind", "transformer") != "transformer" else ()


def model_text(scenario: Scenario) -> str | dict[str, Any]:
    """The name of the preset that the model is, or its table."""
    return preset_of(scenario.model) or _differences(scenario.model, _required(scenario.model))


def scenario_table(scenario: Scenario) -> dict[str, Any]:
    """The raw table of a scenario."""
    found: dict[str, Any] = {"name": scenario.name}
    if scenario.description:
        found["description"] = scenario.description
    found |= {"model": model_text(scenario), "framework": scenario.framework}
    if scenario.framework_version:
        found["framework_version"] = scenario.framework_version
    if scenario.site is not None:
        near = Path(scenario.file).parent / scenario.site if isinstance(scenario.site, str) and scenario.file else None
        found["site"] = _plain(scenario.site) if near is None or not near.is_file() else str(near.resolve())
    found["cluster"] = _differences(scenario.cluster, ("hardware", "num_nodes"))
    if scenario.cluster.parts:
        del found["cluster"]["hardware"], found["cluster"]["num_nodes"]  # they are the parts'
    keep = ("tp", "cp", "pp", "dp", "zero_stage", "schedule", "recompute")
    found["plan"] = _differences(scenario.plan, keep)
    training = ("sequence_length", "global_batch_size", "micro_batch_size", "precision", "optimizer")
    found["training"] = _differences(scenario.training, training)
    effects = _differences(scenario.effects) if hasattr(scenario, "effects") else {}
    if effects:
        found["effects"] = effects
    return found


def scenario_text(scenario: Scenario) -> str:
    """The scenario as a TOML file."""
    return table_text(scenario_table(scenario))


def table_text(table: dict[str, Any]) -> str:
    """A raw scenario table as a TOML file: tables inside its sections stay on their lines."""
    return toml(table, inline=lambda depth, _: depth > 1)
