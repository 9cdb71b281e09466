"""A layout to start from: the least model parallelism that fits the memory, in what the framework can run. No search."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from simpar.errors import InputError, Violation
from simpar.searching.abilities import ABILITIES, launched_as
from simpar.specs.framework import framework
from simpar.specs.model import TransformerSpec
from simpar.specs.scenario import Scenario, make_scenario

_TRIES = 60
"""Layouts simulated at most; those that break a rule cost nothing and do not count."""


def first_plan(table: Mapping[str, Any], file: str = "") -> tuple[dict[str, Any], bool]:
    """A plan for the raw scenario `table`, and whether it fits. What the table's own plan says is kept.

    Without recomputation before with it, few tensor and pipeline ranks before many, tensor ranks inside a node, experts over as
    many ranks as divide them. Where nothing fits, the plan that comes closest.

    Raises:
        InputError: the scenario breaks a rule that no layout mends.
    """
    from simpar.searching.request import make_template
    from simpar.step import simulate

    template = make_template({**table, "plan": {}}, file)
    closest: tuple[float, dict[str, Any]] | None = None
    tries = 0
    broken: dict[tuple[str, str], Violation] | None = None
    given = dict(table.get("plan") or {})
    seen: list[dict[str, Any]] = []
    for start in _plans(template):
        plan = {**start, **given}
        if plan in seen:
            continue
        seen.append(plan)
        try:
            result = simulate(make_scenario({**table, "plan": plan}, file=file), detail="stage")
        except InputError as error:
            found = {(v.field, v.rule): v for v in error.violations}
            broken = found if broken is None else {key: v for key, v in broken.items() if key in found}
            continue
        if result.fits:
            return plan, True
        if closest is None or result.worst_rank.device_bytes < closest[0]:
            closest = result.worst_rank.device_bytes, plan
        tries += 1
        if tries == _TRIES:
            break
    if closest is None:
        # What every layout breaks is the scenario's own.
        raise InputError(
            [*broken.values()] if broken else "no layout of up to 64 pipeline stages divides the model, the batch and the cluster"
        )
    return closest[1], False


def _plans(scenario: Scenario) -> Iterator[dict[str, Any]]:
    """Plans to try, in order."""
    name = launched_as(scenario.framework)
    can = ABILITIES[name].values if name else {}
    allowed = can.get("zero_stage", (1, 3))
    # One GPU has nobody to share with: sharding is what its framework sets up anyway.
    usual = (framework(scenario.framework, scenario.framework_version).data.zero_stage_default,) if scenario.world_size == 1 else ()
    zeros = [stage for stage in dict.fromkeys((*usual, 1, 3, *allowed)) if stage in allowed]
    sequence_parallel = True in can.get("sequence_parallel", (True,))
    experts = 1
    if isinstance(scenario.model, TransformerSpec) and scenario.model.moe:
        experts = scenario.model.moe.num_experts
    node, world = scenario.hardware.gpus_per_node, scenario.world_size
    for recompute in ("none", "full"):
        for zero in zeros:
            for tp, pp in _degrees(node, world):
                for ep in _powers(min(experts, world), falling=True):
                    degrees = {"tp": tp, "pp": pp, "ep": ep}
                    if any(degree not in can.get(axis, (degree,)) for axis, degree in degrees.items()):
                        continue
                    plan: dict[str, Any] = {"tp": tp, "pp": pp, "zero_stage": zero, "recompute": recompute}
                    if tp > 1:
                        plan["sequence_parallel"] = sequence_parallel
                    if ep > 1:
                        plan["ep"] = ep
                    if zero < 3 or pp == 1:
                        yield plan


def _degrees(node: int, world: int) -> Iterator[tuple[int, int]]:
    """(tp, pp), products rising; of one product the most tensor ranks first."""
    for product in _powers(min(world, 64 * node)):
        for tp in _powers(min(product, node), falling=True):
            if product // tp <= 64:
                yield tp, product // tp


def _powers(most: int, falling: bool = False) -> list[int]:
    """1, 2, 4, ... up to `most`."""
    found = [2**n for n in range(most.bit_length()) if 2**n <= most]
    return found[::-1] if falling else found
