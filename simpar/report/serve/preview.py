"""A first answer for long steps: the line through two short ones, shown until the whole step is simulated."""

from __future__ import annotations

from dataclasses import dataclass

from simpar.errors import SimparError
from simpar.report.serve.answer import Run, actions_of, run_for
from simpar.result.result import Result
from simpar.simulate import simulate
from simpar.specs.checks import resolved_dp
from simpar.specs.scenario import Scenario
from simpar.validation.predicted import with_microbatches

LONG = 15_000
"""Passes of a step beyond which it is previewed: what one simulates in about half a second."""
WORTH = 2.0
"""Least ratio of all micro-batches to those of the two short steps together."""


@dataclass(frozen=True, slots=True)
class Preview:
    """What is known early.

    Attributes:
        step_time_s: on the line through two short steps, past the warm-up of the pipeline.
        short: the longer of the two; its memory is that of the whole step, because the peak lies in the first rounds.
    """

    step_time_s: float
    short: Result
    tokens_per_s: float
    run: Run


def preview(scenario: Scenario, tokens: float, usd_per_gpu_hour: float, goodput: float) -> Preview | None:
    """The first answer; None where the step is short or its schedule cannot have so few micro-batches."""
    counts = short_counts(scenario)
    if counts is None:
        return None
    few, more, every = counts
    try:
        first, second = (simulate(with_microbatches(scenario, n), detail="stage") for n in (few, more))
    except SimparError:
        return None
    step = first.step_time_s + (second.step_time_s - first.step_time_s) * (every - few) / (more - few)
    training = scenario.training
    rate = training.global_batch_size * training.sequence_length / step
    return Preview(step, second, rate, run_for(rate, second.world_size, tokens, usd_per_gpu_hour, goodput))


def short_counts(scenario: Scenario) -> tuple[int, int, int] | None:
    """(few, more, all) micro-batches: one round of the pipeline, and a little more; None where all is not many."""
    plan, training = scenario.plan, scenario.training
    every = training.global_batch_size // (training.micro_batch_size * resolved_dp(scenario))
    group = plan.microbatch_group_size or plan.pp
    # Interleaving repeats itself by whole groups of micro-batches, schedules of one chunk by single ones (DualPipe by two).
    few, extra = (group + every % group, group) if plan.virtual_stages > 1 else (group, 2)
    return (few, few + extra, every) if actions_of(scenario) > LONG and every >= WORTH * (2 * few + extra) else None
