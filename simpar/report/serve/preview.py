"""A first answer for steps that take long to simulate: a short step of the same layout, extended; the whole step replaces it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from simpar.errors import SimparError
from simpar.report.serve.answer import Run, actions_of, run_for
from simpar.report.serve.programs import Programs, step_of
from simpar.result.folded import with_microbatches
from simpar.result.result import Result
from simpar.specs.counts import resolved_dp
from simpar.specs.scenario import Scenario

CHEAP = 4_000
"""Passes up to which a second short step is simulated, for the exact slope of the first."""
_ONCE = frozenset({"dp", "skew", "optimizer", "host"})
"""Categories that a step has once; the others it has for every micro-batch."""


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
    every = _microbatches(scenario)
    for few in _counts(scenario, every):
        try:
            short = _quick(scenario, few, lowering)
        except SimparError:
            continue
        slope = _slope(scenario, short, few, every, lowering)
        step = short.step_time_s + slope * (every - few)
        training = scenario.training
        rate = training.global_batch_size * training.sequence_length / step
        run = run_for(rate, short.world_size, tokens, usd_per_gpu_hour, goodput)
        return Preview(step, short, (few, every), rate, run, _extended(short, step, every / few))
    return None


def _microbatches(scenario: Scenario) -> int:
    training = scenario.training
    return training.global_batch_size // (training.micro_batch_size * resolved_dp(scenario))


def _counts(scenario: Scenario, every: int) -> list[int]:
    """Micro-batches of a short step: one round of the pipeline, two where a schedule needs more, or all."""
    plan = scenario.plan
    group = plan.microbatch_group_size or plan.pp
    over = every % group if plan.virtual_stages > 1 else every % 2
    return list(dict.fromkeys(min(n, every) for n in (group + over, 2 * group + over, every)))


def _quick(scenario: Scenario, microbatches: int, lowering: Programs) -> Result:
    """A short step, its allocator not replayed: the framework's typical fragmentation stands for it."""
    result = step_of(with_microbatches(scenario, microbatches), lowering)
    return replace(result, memory=tuple(replace(rank, replays=None) for rank in result.memory))


def _slope(scenario: Scenario, short: Result, few: int, every: int, lowering: Programs) -> float:
    """Seconds that each further micro-batch takes: measured on a second short step, or what keeps the busiest rank busy."""
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
    return float(max(short.accounting.busy)) / few


def _extended(short: Result, step_s: float, times: float) -> list[tuple[str, float]]:
    """The waterfall of the whole step: what every micro-batch has, `times` as long; what is left is the pipeline's bubble."""
    grown = {name: s * (1.0 if name in _ONCE else times) for name, s in short.breakdown.items()}
    grown["bubble"] = step_s - sum(s for name, s in grown.items() if name != "bubble")
    scaled = replace(short, breakdown=grown)
    found = scaled.waterfall()
    # The ideal of the short step, and the two entries that are told from it.
    ideal = short.ideal_s
    (first, _), (second, below), *rest = found
    return [(first, ideal * times), (second, below + ideal - ideal * times), *rest]
