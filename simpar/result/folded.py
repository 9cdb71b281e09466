"""Steps of very many equal micro-batches from two shorter ones.

A pipeline repeats itself: past its warm-up every further round of micro-batches adds the same time. A step that is too long to be
built whole is simulated twice with few rounds and extended along the straight line through the two; tests compare with whole steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from simpar.parallel.layout import Layout, recomputed_flops
from simpar.result.accounting import Accounting, bubble_fraction
from simpar.result.memory import RankMemory
from simpar.result.result import Interval, Result
from simpar.schedules import SCHEDULES
from simpar.specs.scenario import Scenario

WARM_ROUNDS: Final = 3
"""Rounds of micro-batches (one per pipeline rank) after which a schedule repeats itself."""
LONG_ROUNDS: Final = 24
"""Rounds of the shorter step where so many are cheap."""
WORTHWHILE: Final = 1.5
"""Least ratio of all micro-batches to those simulated twice."""


def shorter_counts(scenario: Scenario, rounds: int = WARM_ROUNDS) -> tuple[int, int, int] | None:
    """(few, more, all) micro-batches per rank, few and more enough for the steady state; None where all is not many.

    Args:
        rounds: of the shorter one; more of them bring what is no straight line (an interval's half-width) nearer to it.
    """
    plan, training = scenario.plan, scenario.training
    dp = plan.dp or scenario.world_size // (plan.tp * plan.cp * plan.pp)
    total = training.global_batch_size // (training.micro_batch_size * dp)
    group = plan.microbatch_group_size or plan.pp
    few = rounds * group + total % group
    more = few + group
    return (few, more, total) if total >= WORTHWHILE * (few + more) else None


def with_microbatches(scenario: Scenario, count: int) -> Scenario:
    """`scenario` with `count` micro-batches per data-parallel rank."""
    plan, training = scenario.plan, scenario.training
    dp = plan.dp or scenario.world_size // (plan.tp * plan.cp * plan.pp)
    batch = count * training.micro_batch_size * dp
    return scenario.model_copy(update={"training": training.model_copy(update={"global_batch_size": batch})})


def can_fold(scenario: Scenario) -> bool:
    """Whether a long step of `scenario` repeats itself: a schedule of a rule, no chance, no shared links."""
    plan, effects = scenario.plan, scenario.effects
    ruled = plan.schedule == "auto" or (plan.schedule in SCHEDULES and not SCHEDULES[plan.schedule].wants_times)
    random = effects.is_random or effects.repetitions > 1 or scenario.training.routing.kind in ("zipf", "uniform")
    return ruled and not random and not effects.needs_network


def extended(first: Result, second: Result, counts: tuple[int, int, int], layout: Layout) -> Result:
    """The step of all micro-batches.

    Args:
        first, second: steps of few and of more.
        counts: micro-batches of `first`, of `second`, and of all.
        layout: of the whole step.
    """
    few, more, every = counts
    times = (every - few) / (more - few)

    def along(a: float, b: float) -> float:
        return a + (b - a) * times

    def tables(a: Mapping[str, float], b: Mapping[str, float]) -> dict[str, float]:
        return {name: along(a.get(name, 0.0), b.get(name, 0.0)) for name in dict.fromkeys([*a, *b])}

    one, two = first.accounting, second.accounting
    waits = {n: one.waits[n] + (two.waits[n] - one.waits[n]) * times for n in two.waits if n in one.waits}
    accounting = Accounting(
        one.busy + (two.busy - one.busy) * times,
        waits,
        along(one.makespan, two.makespan),
        along(one.pipeline_s, two.pipeline_s),
        one.phase_bubble + (two.phase_bubble - one.phase_bubble) * times,
    )
    low, high = (along(getattr(first.step_interval, end), getattr(second.step_interval, end)) for end in ("low", "high"))
    widths = tables(dict(first.step_interval.dominated_by), dict(second.step_interval.dominated_by))
    note = (
        f"{every:,} micro-batches are more than are built op by op: steps of {few} and {more} are simulated and extended, and the "
        f"timeline is that of {more}"
    )
    return replace(
        second, layout=layout, accounting=accounting,
        memory=tuple(_memory(a, b, along) for a, b in zip(first.memory, second.memory, strict=True)),
        breakdown=tables(first.breakdown, second.breakdown), bubble_fraction=bubble_fraction(accounting),
        step_interval=Interval(low, high, tuple(sorted(widths.items(), key=lambda w: -w[1]))),
        communication_s=tables(first.communication_s, second.communication_s),
        hardware_flops=layout.model_flops + recomputed_flops(layout), notes=(*second.notes, note),
    )  # fmt: skip


def _memory(first: RankMemory, second: RankMemory, along: Callable[[float, float], float]) -> RankMemory:
    """Where something is held for every micro-batch (receive buffers, outputs), it grows; else it is that of `second`."""
    before, after = first.at_peak, second.at_peak
    growth = {n: along(before.get(n, 0.0), value) - value for n, value in after.items() if value > before.get(n, 0.0)}
    if not any(growth.values()):
        return second
    static = dict(second.static)
    for name, more in growth.items():
        static[name] = static.get(name, 0.0) + more
    return replace(second, static=tuple(static.items()), replays=None, fragmentation=second.reserved_bytes / second.allocated_bytes)


__all__ = ["LONG_ROUNDS", "WARM_ROUNDS", "WORTHWHILE", "can_fold", "extended", "shorter_counts", "with_microbatches"]
