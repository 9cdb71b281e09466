"""Steps of a scenario with fewer micro-batches, and whether those repeat themselves."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Final

import numpy as np

from simpar.engine.resume import Head, head_of
from simpar.engine.timeline import Timeline
from simpar.parallel.layout import Layout
from simpar.program.pipelines import Detail
from simpar.program.program import IntArray, Program
from simpar.program.shorter import LeftOut, kinds, leave_out, rounds
from simpar.result.interpret import Priced, interpret
from simpar.result.memory import RankMemory
from simpar.result.regime import extends, foreseen, may_extend
from simpar.schedules import Schedule

SAME: Final = 1e-11
"""Times that differ by no more of the step are the same."""
Lowering = Callable[..., Program]


class ShorterSteps:
    """Each is prepared, played and interpreted once.

    Each is played from where it differs from the one before, or a shorter one from where it differs from the longer.
    """

    def __init__(
        self, prepare: Callable[[int, Detail, Lowering], Priced], play: Callable[[Priced, Head | None], Timeline], lower: Lowering
    ) -> None:
        """
        Args:
            prepare: number of micro-batches, detail and lowering -> the priced program.
            play: replays it, from where its head ends.
            lower: turns (layout, schedule, detail, expand=...) into a program.
        """
        self._prepare, self._play, self._lower = prepare, play, lower
        self._played: dict[tuple[int, Detail], tuple[Priced, Timeline]] = {}
        self.result = cache(lambda count, how: interpret(*self.played(count, how)))

    def played(self, count: int, how: Detail) -> tuple[Priced, Timeline]:
        """The priced program of `count` micro-batches and when it runs."""
        if (count, how) not in self._played:
            priced = self._prepare(count, how, self._lower)
            last = next((each for at, each in reversed(self._played.items()) if at[1] == how and len(each[0].program.begins)), None)
            self._played[count, how] = (priced, self._play(priced, last and _head(priced, *last, same_rows(priced, last[0]))))
        return self._played[count, how]

    def repeat(self, few: int, more: int, every: int, how: Detail) -> bool:
        """Whether each further round up to `every` adds to a step of `more` micro-batches what it adds to one of `few`, in time and
        memory."""
        priced, second = self.played(more, how)
        tolerance = SAME * second.makespan
        if not self.read_off(few, more, every, how):
            return False
        first = self.played(few, how)[1]
        slowed = bool((second.seconds > priced.table.seconds[priced.program.price] + tolerance).any())
        further = (every - more) / (more - few)
        if not extends(first, second, interference=slowed, tolerance=tolerance, further=further):
            return False
        return all(map(_memory_extends, self.result(few, how).memory, self.result(more, how).memory))

    def read_off(self, few: int, more: int, every: int, how: Detail) -> bool:
        """Have the step of `few` micro-batches read off that of `more`, else played; False where no round can repeat itself."""
        if (few, how) in self._played:
            return True
        if not self.may_repeat(few, more, every, how):
            return False
        longer, timeline = self.played(more, how)
        tried: list[LeftOut | None] = []

        def lowered(layout: Layout, schedule: Schedule, detail: Detail, *, expand: bool) -> Program:
            found = None if expand else rounds(schedule, longer.schedule)
            if found is None:
                return self._lower(layout, schedule, detail, expand=expand)
            tried.append(leave_out(longer.program, longer.schedule, found, (more - few) // schedule.replicas))
            return tried[0].program if tried[0] else longer.program

        shorter = self._prepare(few, how, lowered)
        if not tried:
            self._played[few, how] = (shorter, self._play(shorter, _head(shorter, longer, timeline, same_rows(shorter, longer))))
        elif not np.array_equal(shorter.table.seconds, longer.table.seconds):
            self.played(few, how)  # What comes once a step, as a reduction, is shared out among its micro-batches.
        elif tried[0]:
            self._played[few, how] = (shorter, self._play(shorter, _head(shorter, longer, timeline, tried[0].kept)))
        return (few, how) in self._played

    def may_repeat(self, few: int, more: int, every: int, how: Detail) -> bool:
        """Whether `repeat` can be true, as far as the step of `more` says: no slack outlasts it."""
        priced, timeline = self.played(more, how)
        copies = priced.schedule.replicas
        if not may_extend(timeline, few // copies, more // copies, tolerance=SAME * timeline.makespan):
            return False
        needed, late = self.foreseen(few, more, every, how) or (0.0, False)
        return not (late and needed > more)

    def foreseen(self, few: int, more: int, every: int, how: Detail) -> tuple[float, bool] | None:
        """(how many micro-batches a step has that repeats itself, whether as a slack lasts until then), as far as that of `more`
        says; None where that says nothing."""
        priced, timeline = self.played(more, how)
        copies = priced.schedule.replicas
        passes = ((more - few) // copies, more // copies, every // copies)
        found = foreseen(timeline, *passes, tolerance=SAME * timeline.makespan)
        return None if found is None else (found[0] * copies, found[1])


def _head(priced: Priced, other: Priced, timeline: Timeline, image: IntArray) -> Head:
    return head_of(priced.program, priced.table, timeline, other.table, image)


def same_rows(priced: Priced, other: Priced) -> IntArray:
    """The op of another step that each op is as far as every row runs alike; -1 for the others. Int array [ops]."""
    image, count = np.full(priced.program.num_ops, -1), int(priced.program.begins[0])
    if count == other.program.begins[0]:
        image[:count] = np.arange(count)
    at, its = 0, 0
    while at < len(priced.program.begins) - 1:
        for row, other_row in zip(priced.schedule.rows, other.schedule.rows, strict=True):
            pairs = enumerate(zip(kinds(row), kinds(other_row), strict=False))
            same = next((n for n, (a, b) in pairs if a != b), min(len(row), len(other_row)))
            begins, its_begins = priced.program.begins[at : at + same + 1], other.program.begins[its : its + same + 1]
            # The last of its kind may be followed by more.
            ends = np.flatnonzero(begins - begins[0] != its_begins - its_begins[0])
            last = int(ends[0]) - 1 if len(ends) else same
            image[begins[0] : begins[last]] = np.arange(its_begins[0], its_begins[last])
            at, its = at + len(row), its + len(other_row)
    return image


def _memory_extends(first: RankMemory, second: RankMemory) -> bool:
    """Whether the peak grows as fast as anything that grows at all, if something does: it stays the peak."""
    grown = second.dynamic.max(axis=0) - first.dynamic.max(axis=0)
    return abs(second.allocated_bytes - first.allocated_bytes - float(grown.sum())) <= SAME * second.allocated_bytes
