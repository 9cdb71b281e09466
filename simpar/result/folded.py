"""Steps of many equal micro-batches from two shorter ones.

A pipeline repeats itself: past its warm-up every further round of micro-batches adds the same time. Two steps that differ by one
round show whether it does (`repeats`): then any number of further rounds adds what that one did. Tests compare with whole steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import Final

from simpar.parallel.layout import Layout, recomputed_flops
from simpar.result.accounting import Ledger, bubble_fraction
from simpar.result.interval import Moved
from simpar.result.memory import RankMemory
from simpar.result.result import Result
from simpar.result.shorter_steps import SAME
from simpar.schedules import SCHEDULES
from simpar.schedules.family import ScheduleFamily
from simpar.specs.counts import microbatches, resolved_dp
from simpar.specs.scenario import Scenario

WARM_ROUNDS: Final = 3
"""Rounds of micro-batches (one per pipeline rank) after which most schedules repeat themselves; a step that does not yet says how
many that takes."""
SEVERAL_ROUNDS: Final = 5
"""Where weight gradients use up slack, or a rank holds several stages that do not take turns round by round: of 25 such cases
(Llama 3.1 405B over 16 ranks) 3 do for 11 and 5 for 20."""
MORE: Final = 2.0
"""By how much a longer step is longer, where the shorter one says nothing."""
WORTHWHILE: Final = 1.5
"""Least ratio of all micro-batches to those simulated twice."""
Counts = tuple[int, int, int]
"""Micro-batches per rank of two shorter steps and of the whole."""


def shorter_counts(scenario: Scenario, allowed: Callable[[int], bool], least: float = 0.0) -> Counts | None:
    """(few, more, all) micro-batches per rank; None where all is not many.

    They are as near each other as is allowed, a micro-batch of each copy of the model or a round: the less two steps differ by, the
    sooner both of their ends leave something between them that repeats itself.

    Args:
        allowed: whether the schedule can have so many.
        least: of the shorter one; none = a few rounds.
    """
    plan, total, family = scenario.plan, microbatches(scenario), _family(scenario)
    group, copies = plan.microbatch_group_size or plan.pp, family.replicas if family else 1
    for apart in (copies, group):
        several = copies > 1 or (apart < group and plan.virtual_stages > 1)
        rounds = SEVERAL_ROUNDS if several or (family and family.splits_backward) else WARM_ROUNDS
        few = ceil(least or rounds * group)
        few += (total - few) % apart
        if total >= WORTHWHILE * (2 * few + apart) and allowed(few) and allowed(few + apart):
            return few, few + apart, total
    return None


def _family(scenario: Scenario) -> ScheduleFamily | None:
    """The schedule's entry in the table; None where it is chosen by itself."""
    known = scenario.plan.schedule in SCHEDULES  # an unknown name is an error of the table
    return SCHEDULES[scenario.plan.schedule] if known else None


def with_microbatches(scenario: Scenario, count: int) -> Scenario:
    """`scenario` with `count` micro-batches per data-parallel rank."""
    training = scenario.training
    batch = count * training.micro_batch_size * resolved_dp(scenario)
    return scenario.model_copy(update={"training": training.model_copy(update={"global_batch_size": batch})})


def can_fold(scenario: Scenario) -> bool:
    """Whether a long step of `scenario` can repeat itself: a schedule of the table, no chance, no shared links."""
    named = scenario.plan.schedule == "auto" or scenario.plan.schedule in SCHEDULES
    return named and not is_drawn(scenario) and not scenario.effects.needs_network


def wants_times(scenario: Scenario) -> bool:
    """Whether the order of passes hangs on what they take: one sought for more micro-batches need not go on as that for fewer."""
    family = _family(scenario)
    return family is not None and family.wants_times


def is_drawn(scenario: Scenario) -> bool:
    """Whether chance decides what ops of a step take."""
    effects = scenario.effects
    return effects.is_random or effects.repetitions > 1 or scenario.training.routing.kind in ("zipf", "uniform")


# -- the step of all of them ---------------------------------------------------------------------------------------------


def extended(first: Result, second: Result, counts: tuple[int, int, int], layout: Layout, *, exact: bool) -> Result:
    """The step of all micro-batches.

    Args:
        first, second: steps of few and of more.
        counts: micro-batches of `first`, of `second`, and of all.
        layout: of the whole step.
        exact: each round is known to add the same.
    """
    few, more, every = counts
    times = (every - few) / (more - few)

    def along(a: float, b: float) -> float:
        return a + (b - a) * times

    def tables(a: Mapping[str, float], b: Mapping[str, float]) -> dict[str, float]:
        return {name: along(a.get(name, 0.0), b.get(name, 0.0)) for name in dict.fromkeys([*a, *b])}

    one: Ledger = first.accounting.ledger
    accounting = one.along(second.accounting.ledger, times).settled()
    moved = Moved(second.moved.names, first.moved.spans + (second.moved.spans - first.moved.spans) * times)
    how = "each further round adds the same" if exact else "nearly each further round adds the same"
    note = (
        f"{every:,} micro-batches: {how}, so steps of {few} and {more} are simulated and extended; the timeline is that of {more}"
    )
    breakdown = tables(_without_waits(first), _without_waits(second))
    for name, waited in accounting.waits.items():
        breakdown[name] = breakdown.get(name, 0.0) + float(waited.mean())
    return replace(
        second, layout=layout, accounting=accounting, moved=moved,
        step_interval=moved.interval(layout, accounting.makespan, breakdown),
        memory=tuple(_memory(a, b, along) for a, b in zip(first.memory, second.memory, strict=True)),
        breakdown=breakdown, bubble_fraction=bubble_fraction(accounting),
        communication_s=tables(first.communication_s, second.communication_s),
        hardware_flops=layout.model_flops + recomputed_flops(layout), notes=(*second.notes, note),
    )  # fmt: skip


def _without_waits(result: Result) -> dict[str, float]:
    """The breakdown of the compute ops alone."""
    waits = result.accounting.waits
    return {n: seconds - (float(waits[n].mean()) if n in waits else 0.0) for n, seconds in result.breakdown.items()}


def _memory(first: RankMemory, second: RankMemory, along: Callable[[float, float], float]) -> RankMemory:
    """Where something is held for every micro-batch (receive buffers, outputs), it grows; else it is that of `second`."""
    before, after = first.at_peak, second.at_peak
    growth = {n: along(before.get(n, 0.0), value) - value for n, value in after.items() if value > before.get(n, 0.0)}
    if not any(growth.values()) or abs(second.allocated_bytes - first.allocated_bytes) <= SAME * second.allocated_bytes:
        return second
    static = dict(second.static)
    for name, more in growth.items():
        static[name] = static.get(name, 0.0) + more
    return replace(second, static=tuple(static.items()), replays=_ReservedAlike(second))


@dataclass(frozen=True, slots=True)
class _ReservedAlike:
    """What the allocator reserves in a step of all micro-batches, worked out when asked for: as much of what is allocated as in the
    longer of the two. What it reserves more in that one than in the other is a whole segment or none."""

    second: RankMemory

    def reserved_bytes(self, rank: int, allocated: float, fragmentation: float, room_bytes: float) -> float:
        """As of `Replays`."""
        return allocated * max(self.second.reserved_bytes / self.second.allocated_bytes, 1.0)
