"""A layout to start from: the least model parallelism that fits the memory, in what the framework can run. No search."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import count, product
from typing import TYPE_CHECKING, Any

from simpar.errors import InputError, Violation
from simpar.searching.abilities import ABILITIES, launched_as
from simpar.specs.framework import framework
from simpar.specs.scenario import Scenario, make_scenario
from simpar.specs.wanted import FIT_PROBABILITY

if TYPE_CHECKING:
    from simpar.result.result import Result

_FURTHER = 2
"""So many times the model parallelism of the first layout that fits is tried too: it may be faster, as pipeline stages that keep an
exchange of tokens inside a node."""
_WORTH = 0.98
"""A larger micro-batch takes at most this share of the step with the one before, or is not tried further (assumed)."""


def first_layout(table: Mapping[str, Any], file: str = "") -> tuple[dict[str, Any], bool]:
    """The raw scenario `table` with a plan and, where it names none, a micro-batch; and whether it fits. What its own plan says is
    kept.

    Few tensor and pipeline ranks before many, tensor ranks inside a node, experts over as many ranks of one scale-up domain as
    divide them and over all; of those with the least model parallelism that is likely to fit, or twice it, without recomputation or
    with it, the fastest. Where none is likely to fit, the fastest of those that fit just so; where nothing fits, the plan that
    comes closest. The micro-batch is doubled as long as that makes the step shorter and is likely to fit: with one sequence a small
    model waits for its host. Then experts spread over half the ranks, as long as that is no slower.

    Raises:
        InputError: the scenario breaks a rule that no layout mends.
    """
    from simpar.searching.request import make_template

    template = make_template({**table, "plan": {}}, file)
    given, tried = dict(table.get("plan") or {}), _Tried(table, file)
    most = math.inf
    for recompute in (given["recompute"],) if "recompute" in given else ("none", "full"):
        for zero, experts in _families(template):
            least, seen, ways = 1.0, list[list[dict[str, Any]]](), [*_degrees(template, zero)]
            for ranks, splits in ways:
                if not least <= ranks <= most:
                    continue
                plans = [
                    [
                        {**split, "zero_stage": zero, **spread, "recompute": recompute, **given}
                        for spread in experts
                        if template.world_size % (split["pp"] * spread.get("ep", 1)) == 0
                    ]
                    for split in splits
                ]
                needs = [tried.with_first(each) for each in plans if each not in seen]
                seen += plans
                if any(share == 0.0 for share in needs):
                    most = min(most, _FURTHER * ranks)
                # So many times as much model parallelism needs no less than its part of the memory.
                least = min(ranks * min((share for share in needs if share), default=1.0), ways[-1][0])
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
    training, ranks = table.get("training") or {}, best["plan"].get("ep", 1)
    if "micro_batch_size" not in training:
        larger = ({**best, "training": {**training, "micro_batch_size": 2**power}} for power in count(1))
        best, seconds = _last_better(best, seconds, larger, _WORTH, file)
    if "ep" not in given:
        halves = (ranks >> power for power in range(1, (ranks & -ranks).bit_length()))
        fewer = ({**best, "plan": {**best["plan"], "ep": half}} for half in halves)
        best, _ = _last_better(best, seconds, fewer, 1.0, file)
    return best, True


def _last_better(
    best: dict[str, Any], seconds: float, others: Iterable[dict[str, Any]], worth: float, file: str
) -> tuple[dict[str, Any], float]:
    """The last layout of a row, and its seconds, before one that takes more than `worth` of the step before it, breaks a rule (a
    micro-batch that does not divide the batch) or is not likely to fit."""
    for other in others:
        try:
            result, likely = _simulated(other, file)
        except InputError:
            break
        if result.step_time_s > worth * seconds or not likely:
            break
        best, seconds = other, result.step_time_s
    return best, seconds


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

    def with_first(self, plans: Iterable[dict[str, Any]]) -> float | None:
        """Try the first of some plans that breaks no rule: 0 where it is likely to fit, else what it needs over what there is; none
        where all break one."""
        for plan in plans:
            found = {**self.table, "plan": plan}
            try:
                result, likely = _simulated(found, self.file)
            except InputError as error:
                rules = {(v.field, v.rule): v for v in error.violations}
                self.broken = rules if self.broken is None else {key: v for key, v in self.broken.items() if key in rules}
                continue
            needed = result.worst_rank.device_bytes
            self.steps.append((result.step_time_s, needed, found, result.fits))
            if likely:
                self.likely.append((result.step_time_s, found))
            return 0.0 if likely else needed / result.device_memory_bytes
        return None


def _simulated(table: Mapping[str, Any], file: str) -> tuple[Result, bool]:
    """The step of a whole table, and whether it is likely to fit.

    Raises:
        InputError: it breaks a rule.
    """
    from simpar.readings import outcome_of
    from simpar.step import simulate

    result = simulate(make_scenario(dict(table), file=file), detail="stage")
    return result, result.fits and outcome_of(result).chance_to_fit >= FIT_PROBABILITY


def _families(scenario: Scenario) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """(ZeRO stage, numbers of expert ranks: the first that breaks no rule) to try, in order."""
    can = _abilities(scenario)
    allowed = can.get("zero_stage", (1, 3))
    # One GPU has nobody to share with: sharding is what its framework sets up anyway.
    usual = (framework(scenario.framework, scenario.framework_version).data.zero_stage_default,) if scenario.world_size == 1 else ()
    zeros = [stage for stage in dict.fromkeys((*usual, 1, 3)) if stage in allowed] or [*allowed]
    moe = getattr(scenario.model, "moe", None)
    spread = _powers(min(moe.num_experts if moe else 1, scenario.world_size))
    near = [ep for ep in spread if ep <= scenario.hardware.domain_size]
    for zero, among in product(zeros, (near, spread) if len(near) < len(spread) else (near,)):
        yield zero, [{"ep": ep} if ep > 1 else {} for ep in among if ep == 1 or ep in can.get("ep", (ep,))]


def _degrees(scenario: Scenario, zero: int) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """(Tensor and pipeline ranks, ways to split them), numbers that divide the cluster, rising; the most tensor ranks first."""
    can, node, world = _abilities(scenario), scenario.hardware.gpus_per_node, scenario.world_size
    for ranks in (n for n in range(1, min(world, 64 * node) + 1) if world % n == 0):
        splits = [{"tp": tp, "pp": ranks // tp} for tp in _powers(min(ranks, node)) if ranks % tp == 0 and ranks // tp <= 64]
        found = [s for s in splits if (zero < 3 or s["pp"] == 1) and all(v in can[n] for n, v in s.items() if n in can)]
        sequence_parallel = {"sequence_parallel": True in can.get("sequence_parallel", (True,))}
        if found:
            yield ranks, [s | (sequence_parallel if s["tp"] > 1 else {}) for s in found]


def _abilities(scenario: Scenario) -> Mapping[str, Any]:
    """Field of a plan -> values that the framework can run."""
    name = launched_as(scenario.framework)
    return ABILITIES[name].values if name else {}


def _powers(most: int) -> list[int]:
    """..., 4, 2, 1, from `most` at most."""
    return [2**n for n in range(most.bit_length()) if 2**n <= most][::-1]
