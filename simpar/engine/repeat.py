"""Many runs of one program with different random draws: step time as a distribution."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from simpar.engine.discrete_event import NO_EFFECTS, Effects, run
from simpar.engine.longest_path import longest_path_by_op
from simpar.engine.timeline import Timeline
from simpar.program.program import FloatArray, PriceTable, Program


@dataclass(frozen=True, slots=True, eq=False)
class Repetitions:
    """Step times of independent runs.

    Attributes:
        makespans_s: float array [runs], in the order of the repetitions.
        peak_memory_bytes: float array [runs], peak of the fullest device where expert load was drawn; None where memory is
            the same in every run.
    """

    makespans_s: FloatArray
    peak_memory_bytes: FloatArray | None = None

    def quantile(self, q: float) -> float:
        """The q-quantile of the step time, seconds, q in 0..1."""
        return float(np.quantile(self.makespans_s, q))

    @property
    def p50(self) -> float:
        """Median, seconds."""
        return self.quantile(0.5)

    @property
    def p90(self) -> float:
        """Seconds that nine runs in ten do not exceed."""
        return self.quantile(0.9)

    @property
    def p99(self) -> float:
        """Seconds that 99 runs in a hundred do not exceed."""
        return self.quantile(0.99)

    @property
    def mean(self) -> float:
        """Mean step time, seconds: what a long job pays per step."""
        return float(self.makespans_s.mean())


def repeat(
    program: Program,
    prices: PriceTable,
    repetitions: int,
    effects: Effects = NO_EFFECTS,
    *,
    first: Timeline | None = None,
    step_s: Callable[[Timeline], float] | None = None,
) -> Repetitions:
    """`repetitions` runs that differ in their draws of noise and expert load.

    Without contention and interference they run as batches of longest paths, bit-identical to as many calls of
    `discrete_event.run` with `repetition` = 0, 1, ...

    Args:
        first: repetition 0 under the same arguments, where it has run already.
        step_s: what a run's step takes, where that is not the finish of its last op.

    Raises:
        InputError: what `run` raises.
        DeadlockError: the program has a cycle.
    """
    took = step_s or (lambda timeline: timeline.makespan)
    done = [] if first is None else [took(first)]
    if step_s is None and not effects.elastic(prices):

        def seconds(index: int) -> FloatArray:
            return effects.seconds(program, prices, len(done) + index)

        rest = longest_path_by_op(program, seconds, repetitions - len(done))
        return Repetitions(np.concatenate([done, rest]))
    done += [took(run(program, prices, effects, repetition=r)) for r in range(len(done), repetitions)]
    return Repetitions(np.array(done))
