"""Where a run begins as another one did.

Two programs of which some ops are alike run alike until the first other op starts: up to then a run is read off the other one, and
resumed there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from simpar.engine.timeline import Timeline
from simpar.program.program import FloatArray, IntArray, PriceTable, Program


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """The beginning of a run.

    Attributes:
        until: ops that started before this moment are known.
        start, finish: of those, also where they finish later; NaN for the others. Float arrays [ops].
    """

    until: float
    start: FloatArray
    finish: FloatArray

    @property
    def done(self) -> int:
        """Ops that have finished by then."""
        return int(np.count_nonzero(self.finish < self.until))

    def begun(self, program: Program) -> tuple[list[int], list[int], list[float], list[float]]:
        """(unfinished predecessors per op, ops that run at that moment, start and finish per op)."""
        begins, before = program.predecessors
        op = np.repeat(np.arange(program.num_ops), np.diff(begins))
        waiting = np.bincount(op[~(self.finish < self.until)[before]], minlength=program.num_ops)
        running = np.flatnonzero(self.finish >= self.until)
        return waiting.tolist(), running.tolist(), self.start.tolist(), self.finish.tolist()

    def ready(self, waiting: Sequence[int]) -> list[int]:
        """Ops that wait for nothing and have not begun."""
        return np.flatnonzero((np.array(waiting) == 0) & np.isnan(self.start)).tolist()


def nothing(program: Program) -> Head:
    """The beginning of a run of which nothing is known."""
    unknown = np.full(program.num_ops, np.nan)
    return Head(0.0, unknown, unknown)


def head_of(program: Program, prices: PriceTable, other: Timeline, others: PriceTable, image: IntArray) -> Head:
    """How `program` begins, from the run of another one.

    Args:
        others: prices of the other program.
        image: int array [ops], ascending where not negative: the same op of the other program, on the same streams; -1: none known.
    """
    begins, before = program.predecessors
    its_begins, its_before = other.program.predecessors
    alike = image >= 0
    ops = np.flatnonzero(alike)
    own, its = program.price[ops], other.program.price[image[ops]]
    alike[ops] = (
        (prices.seconds[own] == others.seconds[its])
        & (prices.interference[own] == others.interference[its])
        & (np.diff(begins)[ops] == np.diff(its_begins)[image[ops]])
    )
    # Whoever waits for something else is another op.
    waits = np.repeat(np.arange(program.num_ops), np.diff(begins))
    edges = np.flatnonzero(alike[waits])
    place = its_begins[image[waits[edges]]] + edges - begins[waits[edges]]
    alike[waits[edges[its_before[place] != image[before[edges]]]]] = False
    others_left = np.ones(other.program.num_ops, dtype=bool)
    others_left[image[alike]] = False
    # No other op starts before what it waits for has ended; one that waits for another such op starts behind that.
    ready = np.zeros(program.num_ops)
    np.maximum.at(ready, waits, np.where(alike[before], other.finish[image[before]], np.inf))
    until = min(other.start[others_left].min(initial=np.inf), ready[~alike].min(initial=np.inf))
    # What runs at that moment may run on otherwise: the run is resumed before it starts.
    until = min(until, other.start[~others_left & (other.finish >= until)].min(initial=np.inf))
    known = alike & (other.start[image] < until)
    return Head(float(until), *(np.where(known, times[image], np.nan) for times in (other.start, other.finish)))
