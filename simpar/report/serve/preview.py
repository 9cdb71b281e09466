"""A first answer for steps that take long to simulate: a short step of the same layout, extended; the whole step replaces it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from simpar.errors import SimparError
from simpar.program.program import COMPUTE_KINDS, FloatArray, OpKind
from simpar.report.serve.answer import Run, actions_of, run_for
from simpar.report.serve.programs import Programs, priced_step, step_of
from simpar.result.folded import with_microbatches
from simpar.result.result import Result
from simpar.specs.counts import microbatches
from simpar.specs.scenario import Scenario

CHEAP = 4_000
"""Passes up to which a second short step is simulated, for the exact slope of the first."""
_ONCE = frozenset({"dp", "skew", "optimizer", "host"})
"""Categories that a step has once; the others it has for every micro-batch."""
_DATA = (int(OpKind.GATHER_PARAMETERS), int(OpKind.REDUCE_GRADIENTS))
_COMPUTE = tuple(int(kind) for kind in COMPUTE_KINDS)


@dataclass(frozen=True, slots=True)
class Preview:
    """What is known early.

    Attributes:
        step_time_s: of the whole step, about.
        short: a step of fewer micro-batches; its memory is about that of the whole one, because the peak lies in the first rounds.
        microbatches: of the short step, and of the whole.
        waterfall: of the whole step, about; the entries add up to it.
    """

    step_time_s: float
    short: Result
    microbatches: tuple[int, int]
    tokens_per_s: float
    run: Run
    waterfall: list[tuple[str, float]]


def preview(scenario: Scenario, tokens: float, usd_per_gpu_hour: float, goodput: float, lowering: Programs) -> Preview | None:
    """The first answer; None where a step with so few micro-batches is not possible."""
    every = microbatches(scenario)
    for few in _counts(scenario, every):
        try:
            short, once = _quick(scenario, few, lowering)
        except SimparError:
            continue
        slope = _slope(scenario, short, once, (few, every), lowering)
        step = short.step_time_s + slope * (every - few)
        training = scenario.training
        rate = training.global_batch_size * training.sequence_length / step
        run = run_for(rate, short.world_size, tokens, usd_per_gpu_hour, goodput)
        return Preview(step, short, (few, every), rate, run, _extended(short, step, every / few, float(once.mean())))
    return None


def _counts(scenario: Scenario, every: int) -> list[int]:
    """Micro-batches of a short step: one round of the pipeline, two where a schedule needs more, or all."""
    plan = scenario.plan
    group = plan.microbatch_group_size or plan.pp
    over = every % group if plan.virtual_stages > 1 else every % 2
    return list(dict.fromkeys(min(n, every) for n in (group + over, 2 * group + over, every)))


def _quick(scenario: Scenario, microbatches: int, lowering: Programs) -> tuple[Result, FloatArray]:
    """A short step, its allocator not replayed: the framework's typical fragmentation stands for it; and what of its compute is
    had once (`_slowed_once`)."""
    result, seconds = priced_step(with_microbatches(scenario, microbatches), lowering)
    return replace(result, memory=tuple(replace(rank, replays=None) for rank in result.memory)), _slowed_once(result, seconds)


def _slowed_once(short: Result, seconds: FloatArray | None) -> FloatArray:
    """Seconds by which reductions and gathers that a step has once slow each role's compute, however many micro-batches: float
    array [roles].

    Args:
        seconds: float array [ops], unslowed; None: nothing is known.
    """
    program, timeline = short.program, short.timeline
    found = np.zeros(len(short.accounting.busy))
    if seconds is None:
        return found
    data = np.flatnonzero(np.isin(program.kind, _DATA))
    # Full sharding gathers and reduces a block for every micro-batch.
    _, which, times = np.unique(
        np.stack([program.kind, program.stage, program.layer])[:, data], axis=1, return_inverse=True, return_counts=True
    )
    once = np.zeros(program.num_ops, dtype=bool)
    once[data] = times[which.ravel()] == 1
    slowed = timeline.seconds - seconds
    for role in range(len(found)):
        beside = timeline.stream_ops(role)
        beside, own = beside[once[beside]], timeline.stream_ops(role, ("compute",))
        own = own[np.isin(program.kind[own], _COMPUTE)]
        begins, ends = _joined(timeline.start[beside], timeline.finish[beside])
        after = np.searchsorted(ends, timeline.start[own], side="right")
        meets = np.append(begins, np.inf)[after] < timeline.finish[own]
        found[role] = slowed[own[meets]].sum()
    return found


def _joined(start: FloatArray, finish: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Begins and ends of the times in which at least one span is under way; spans are sorted by start."""
    last = np.maximum.accumulate(finish)
    opens = np.append(True, start[1:] > last[:-1])[: len(start)]
    return start[opens], last[np.append(opens[1:], True)[: len(start)]]


def _slope(scenario: Scenario, short: Result, once: FloatArray, counts: tuple[int, int], lowering: Programs) -> float:
    """Seconds that each further micro-batch takes: measured on a second short step, or what keeps the busiest rank busy."""
    few, every = counts
    if every == few:
        return 0.0
    plan = scenario.plan
    more = few + (2 if plan.virtual_stages == 1 else plan.microbatch_group_size or plan.pp)
    if more < every and 2 * actions_of(with_microbatches(scenario, more)) <= CHEAP:
        try:
            longer = step_of(with_microbatches(scenario, more), lowering)
            return (longer.step_time_s - short.step_time_s) / (more - few)
        except SimparError:
            pass
    return float((short.accounting.busy - once).max()) / few


def _extended(short: Result, step_s: float, times: float, once: float) -> list[tuple[str, float]]:
    """The waterfall of the whole step: what every micro-batch has, `times` as long; what is left is the pipeline's bubble.

    Args:
        once: seconds of the interference that a step has once.
    """
    grown = {name: s * (1.0 if name in _ONCE else times) for name, s in short.breakdown.items()}
    if "interference" in grown:
        grown["interference"] -= once * (times - 1.0)
    grown["bubble"] = step_s - sum(s for name, s in grown.items() if name != "bubble")
    scaled = replace(short, breakdown=grown)
    found = scaled.waterfall()
    # The ideal of the short step, and the two entries that are told from it.
    ideal = short.ideal_s
    (first, _), (second, below), *rest = found
    return [(first, ideal * times), (second, below + ideal - ideal * times), *rest]
