"""A layout to start from: the least model parallelism that fits the memory, in what the framework can run. No search."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from simpar.errors import InputError, Violation
from simpar.searching.abilities import ABILITIES, launched_as
from simpar.specs.framework import framework
from simpar.specs.model import TransformerSpec
from simpar.specs.scenario import Scenario, make_scenario

if TYPE_CHECKING:
    from simpar.result.result import Result

_TRIES = 40
"""Layouts simulated at most, without recomputation and with it; those that break a rule cost nothing and do not count."""
_WORTH = 0.98
"""A larger micro-batch takes at most this share of the step with the one before, or is not tried further."""
_LIKELY = 0.9
"""Least chance that it fits, as a search asks for."""


def first_layout(table: Mapping[str, Any], file: str = "") -> tuple[dict[str, Any], bool]:
    """The raw scenario `table` with a plan and, where it names none, a micro-batch; and whether it fits.

    The micro-batch is doubled as long as that makes the step shorter and is likely to fit: with one sequence a small model waits
    for its host.

    Raises:
        InputError: the scenario breaks a rule that no layout mends.
    """
    from simpar.readings import outcome_of
    from simpar.step import simulate

    plan, fits = first_plan(table, file)
    best: dict[str, Any] = {**table, "plan": plan}
    training = dict(table.get("training") or {})
    if not fits or "micro_batch_size" in training:
        return best, fits
    seconds, size = simulate(make_scenario(best, file=file), detail="stage").step_time_s, 2
    while True:
        larger = {**best, "training": {**training, "micro_batch_size": size}}
        try:
            result = simulate(make_scenario(larger, file=file), detail="stage")
        except InputError:  # it does not divide the batch
            return best, True
        if result.step_time_s > _WORTH * seconds or outcome_of(result).chance_to_fit < _LIKELY:
            return best, True
        best, seconds, size = larger, result.step_time_s, 2 * size


def first_plan(table: Mapping[str, Any], file: str = "") -> tuple[dict[str, Any], bool]:
    """A plan for the raw scenario `table`, and whether it fits. What the table's own plan says is kept.

    Few tensor and pipeline ranks before many, tensor ranks inside a node, experts over as many ranks as divide them; of the first
    that is likely to fit without recomputation and the first with it the faster one. Where none is, the fastest of those that fit
    just so; where nothing fits, the plan that comes closest.

    Raises:
        InputError: the scenario breaks a rule that no layout mends.
    """
    from simpar.readings import outcome_of
    from simpar.searching.request import make_template

    template = make_template({**table, "plan": {}}, file)
    tried = _Tried(table, file)
    found: list[tuple[float, dict[str, Any]]] = []
    tight: list[tuple[float, dict[str, Any]]] = []
    for recompute in ("none", "full"):
        before = len(tried.simulated)
        for degrees, kinds in _plans(template):
            if found and found[0][1].items() >= {**degrees, **tried.given}.items():
                break  # with recomputation it is no faster
            result = next(filter(None, (tried.simulate({**degrees, **kind, "recompute": recompute}) for kind in kinds)), None)
            if result is not None and result.fits:
                likely = outcome_of(result).chance_to_fit >= _LIKELY
                (found if likely else tight).append((result.step_time_s, tried.simulated[-1][1]))
                if likely:
                    break
            if len(tried.simulated) - before >= _TRIES:
                break
    if found or tight:
        return min(found or tight, key=lambda one: one[0])[1], True
    if not tried.simulated:
        # What every layout breaks is the scenario's own.
        broken = [*tried.broken.values()] if tried.broken else None
        raise InputError(broken or "no layout of up to 64 pipeline stages divides the model, the batch and the cluster")
    return min(tried.simulated, key=lambda one: one[0])[1], False


class _Tried:
    """Plans that were tried.

    Attributes:
        simulated: (bytes on the fullest device, plan) of those that break no rule.
        broken: rules that all others break; None before the first of them.
    """

    def __init__(self, table: Mapping[str, Any], file: str) -> None:
        self.table, self.file = table, file
        self.given = dict(table.get("plan") or {})
        self.simulated: list[tuple[float, dict[str, Any]]] = []
        self.broken: dict[tuple[str, str], Violation] | None = None
        self._seen: list[dict[str, Any]] = []

    def simulate(self, start: dict[str, Any]) -> Result | None:
        """The step with this plan; None where it breaks a rule or was tried before."""
        from simpar.step import simulate

        plan = {**start, **self.given}
        if plan in self._seen:
            return None
        self._seen.append(plan)
        try:
            result = simulate(make_scenario({**self.table, "plan": plan}, file=self.file), detail="stage")
        except InputError as error:
            rules = {(v.field, v.rule): v for v in error.violations}
            self.broken = rules if self.broken is None else {key: v for key, v in self.broken.items() if key in rules}
            return None
        self.simulated.append((result.worst_rank.device_bytes, plan))
        return result


def _plans(scenario: Scenario) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """(degrees, what may go with them: the first that breaks no rule) to try, in order."""
    name = launched_as(scenario.framework)
    can = ABILITIES[name].values if name else {}
    allowed = can.get("zero_stage", (1, 3))
    # One GPU has nobody to share with: sharding is what its framework sets up anyway.
    usual = (framework(scenario.framework, scenario.framework_version).data.zero_stage_default,) if scenario.world_size == 1 else ()
    zeros = [stage for stage in dict.fromkeys((*usual, 1, 3)) if stage in allowed] or [*allowed]
    sequence_parallel = True in can.get("sequence_parallel", (True,))
    experts = 1
    if isinstance(scenario.model, TransformerSpec) and scenario.model.moe:
        experts = scenario.model.moe.num_experts
    node, world = scenario.hardware.gpus_per_node, scenario.world_size
    for zero in zeros:
        for tp, pp in _degrees(node, world):
            if zero == 3 and pp > 1:
                continue
            degrees: dict[str, Any] = {"tp": tp, "pp": pp, "zero_stage": zero}
            if tp > 1:
                degrees["sequence_parallel"] = sequence_parallel
            over = [{"ep": ep} if ep > 1 else {} for ep in _powers(min(experts, world), falling=True)]
            whole = [{**degrees, **kind} for kind in over]
            kinds = [k for k, plan in zip(over, whole, strict=True) if all(v in can[n] for n, v in plan.items() if n in can)]
            if kinds:
                yield degrees, kinds


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
