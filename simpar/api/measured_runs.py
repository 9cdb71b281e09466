"""How many measured runs of the evidence have the combination of a layout: what nobody has run is as yet a prediction alone."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from simpar.errors import SimparError
from simpar.searching.choice import recompute_text
from simpar.searching.designs import family, recompute_kind
from simpar.specs.base import stored_runs
from simpar.specs.framework import family_of, framework
from simpar.specs.hardware import load_hardware
from simpar.specs.plan import PlanSpec
from simpar.specs.scenario import Scenario
from simpar.specs.stage_plan import is_mixed

Combination = tuple[object, ...]


def combination(name: str, plan: Mapping[str, Any], training: Mapping[str, Any]) -> Combination:
    """What of a run decides, with the GPU's architecture, which mechanisms meet in it: framework, dimensions in use, schedule,
    what is kept.

    Args:
        plan, training: as in a scenario, with defaults filled in; an unknown value equals no other.
    """
    schedule = framework(name).pipeline.named(plan["schedule"], 2, 1 if plan["virtual_stages"] == 1 else 2)
    used = tuple(_more_than_one(plan[name]) for name in ("tp", "cp", "pp", "ep"))
    again = plan["recompute"] if isinstance(plan["recompute"], str) else str(dict(plan["recompute"]).get("granularity", "?"))
    offload, precision = dict(plan["offload"]), training.get("precision", "bf16")
    return (
        family_of(name), *used, family(str(schedule)) if used[2] else "", recompute_kind(again),
        plan["zero_stage"] == 3, _more_than_one(1 + offload.get("activations", 0.0)), bool(offload.get("optimizer")),
        precision if isinstance(precision, str) else "?", training.get("trainable", "all"),
    )  # fmt: skip


def _more_than_one(value: Any) -> bool:
    return isinstance(value, int | float) and value > 1


@lru_cache(maxsize=1)
def _counted() -> dict[Combination, Counter[str]]:
    """Combinations of all shipped runs with a measured step time: how many on which hardware."""
    found: dict[Combination, Counter[str]] = {}
    usual = PlanSpec().model_dump()
    for path in sorted(stored_runs().glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            scenario = row.get("scenario")
            if scenario and "step_time_s" in row.get("measured", {}) and not row.get("exclude"):
                name = combination(scenario["framework"], {**usual, **scenario["plan"]}, scenario["training"])
                found.setdefault(name, Counter())[str(scenario["cluster"]["hardware"])] += 1
    return found


@lru_cache(maxsize=64)
def _architecture(hardware: str) -> str:
    try:
        return load_hardware(hardware).gpu.architecture
    except SimparError:
        return ""


def measured_nearby(scenario: Scenario) -> int:
    """Measured runs of the evidence with the combination of `scenario`."""
    if is_mixed(scenario):
        return 0  # the evidence has no run over machines of several kinds
    plan = scenario.plan.model_dump()
    plan["recompute"] = recompute_text(scenario.plan.recompute)
    training = {"precision": scenario.training.precision, "trainable": scenario.training.trainable}
    counted: Mapping[str, int] = _counted().get(combination(scenario.framework, plan, training), {})
    # Profiles are read of the few machines alone that have run it.
    return sum(count for name, count in counted.items() if _architecture(name) == scenario.hardware.gpu.architecture)
