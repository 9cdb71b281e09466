"""A layout to start from: the least model parallelism that fits the memory, in what the framework can run. No search."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from simpar.errors import InputError, Violation
from simpar.searching.abilities import ABILITIES, launched_as
from simpar.specs.framework import framework
from simpar.specs.model import TransformerSpec
from simpar.specs.scenario import Scenario, make_scenario
from simpar.specs.wanted import FIT_PROBABILITY

if TYPE_CHECKING:
    from simpar.result.result import Result

_TRIES = 40
"""Layouts simulated at most, without recomputation and with it; those that break a rule cost nothing and do not count."""
_WORTH = 0.98
"""A larger micro-batch takes at most this share of the step with the one before, or is not tried further (assumed)."""


def first_layout(table: Mapping[str, Any], file: str = "") -> tuple[dict[str, Any], bool]:
    """The raw scenario `table` with a plan and, where it names none, a micro-batch; and whether it fits. What its own plan says is
    kept.

    Few tensor and pipeline ranks before many, tensor ranks inside a node, experts over as many ranks as divide them; of the first
    that is likely to fit without recomputation and the first with it the faster one. Where none is, the fastest of those that fit
    just so; where nothing fits, the plan that comes closest. The micro-batch is doubled as long as that makes the step shorter and
    is likely to fit: with one sequence a small model waits for its host.

    Raises:
        InputError: the scenario breaks a rule that no layout mends.
    """
    from simpar.searching.request import make_template

    template = make_template({**table, "plan": {}}, file)
    given, tried = dict(table.get("plan") or {}), _Tried(table, file)
    for recompute in (given["recompute"],) if "recompute" in given else ("none", "full"):
        before, seen = len(tried.steps), list[dict[str, Any]]()
        for degrees, kinds in _plans(template):
            start = {**degrees, "recompute": recompute, **given}
            if tried.likely and tried.likely[0][1]["plan"].items() >= {**degrees, **given}.items():
                break  # with recomputation it is no faster
            if start in seen:
                continue
            seen.append(start)
            if tried.with_first({**degrees, **kind, "recompute": recompute, **given} for kind in kinds):
                break
            if len(tried.steps) - before >= _TRIES:
                break
    if not tried.steps:
        # What every layout breaks is the scenario's own.
        world, batch = template.world_size, template.training.global_batch_size
        whole = -(-batch // world) * world
        none = f"no layout tried shares it and the model out over {world:,} GPUs"
        right = f"a multiple of {world:,} such as {whole:,}, or another number of GPUs"
        broken = [*(tried.broken or {}).values()]
        raise InputError(broken or [Violation("training.global_batch_size", batch, none, right, file)])
    fitting = tried.likely or [(seconds, best) for seconds, _, best, fits in tried.steps if fits]
    if not fitting:
        return min(tried.steps, key=lambda one: one[1])[2], False
    seconds, best = min(fitting, key=lambda one: one[0])
    size = 2
    while "micro_batch_size" not in (table.get("training") or {}):
        larger = {**best, "training": {**(table.get("training") or {}), "micro_batch_size": size}}
        try:
            result, likely = _simulated(larger, file)
        except InputError:  # it does not divide the batch
            break
        if result.step_time_s > _WORTH * seconds or not likely:
            break
        best, seconds, size = larger, result.step_time_s, 2 * size
    return best, True


class _Tried:
    """Layouts that were tried.

    Attributes:
        steps: (seconds, bytes on the fullest device, table, whether it fits) of those that break no rule.
        likely: (seconds, table) of those that are likely to fit.
        broken: rules that all others break; None before the first of them.
    """

    def __init__(self, table: Mapping[str, Any], file: str) -> None:
        self.table, self.file = table, file
        self.steps: list[tuple[float, float, dict[str, Any], bool]] = []
        self.likely: list[tuple[float, dict[str, Any]]] = []
        self.broken: dict[tuple[str, str], Violation] | None = None

    def with_first(self, plans: Iterable[dict[str, Any]]) -> bool:
        """Try the first of some plans that breaks no rule; whether it is likely to fit."""
        for plan in plans:
            found = {**self.table, "plan": plan}
            try:
                result, likely = _simulated(found, self.file)
            except InputError as error:
                rules = {(v.field, v.rule): v for v in error.violations}
                self.broken = rules if self.broken is None else {key: v for key, v in self.broken.items() if key in rules}
                continue
            self.steps.append((result.step_time_s, result.worst_rank.device_bytes, found, result.fits))
            if likely:
                self.likely.append((result.step_time_s, found))
            return likely
        return False


def _simulated(table: Mapping[str, Any], file: str) -> tuple[Result, bool]:
    """The step of a whole table, and whether it is likely to fit.

    Raises:
        InputError: it breaks a rule.
    """
    from simpar.readings import outcome_of
    from simpar.step import simulate

    result = simulate(make_scenario(dict(table), file=file), detail="stage")
    return result, result.fits and outcome_of(result).chance_to_fit >= FIT_PROBABILITY


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
    """(tp, pp), products that divide the cluster, rising; of one product the most tensor ranks first."""
    for product in (n for n in range(1, min(world, 64 * node) + 1) if world % n == 0):
        for tp in _powers(min(product, node), falling=True):
            if product % tp == 0 and product // tp <= 64:
                yield tp, product // tp


def _powers(most: int, falling: bool = False) -> list[int]:
    """1, 2, 4, ... up to `most`."""
    found = [2**n for n in range(most.bit_length()) if 2**n <= most]
    return found[::-1] if falling else found
