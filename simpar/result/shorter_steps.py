"""Steps of a scenario with fewer micro-batches, and whether those repeat themselves."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Final

from simpar.engine.timeline import Timeline
from simpar.parallel.layout import Layout
from simpar.program.pipelines import Detail
from simpar.program.program import Program
from simpar.program.shorter import leave_out, rounds
from simpar.result.interpret import Priced, interpret
from simpar.result.memory import RankMemory
from simpar.result.regime import Step, extends, foreseen, may_extend
from simpar.schedules import Schedule
from simpar.schedules.order import goes_on

SAME: Final = 1e-11
"""Times that differ by no more of the step are the same."""
Lowering = Callable[..., Program]


class ShorterSteps:
    """Each is prepared, played and interpreted once."""

    def __init__(
        self, prepare: Callable[[int, Detail, Lowering], Priced], play: Callable[[Priced], Timeline], lower: Lowering
    ) -> None:
        """
        Args:
            prepare: number of micro-batches, detail and lowering -> the priced program.
            play: replays it.
            lower: turns (layout, schedule, detail, expand=...) into a program.
        """
        self._prepare, self._play, self._lower = prepare, play, lower
        self._played: dict[tuple[int, Detail], tuple[Priced, Timeline]] = {}
        self._step = cache(lambda count, how: Step.of(self.played(count, how)[1]))
        self.result = cache(lambda count, how: interpret(*self.played(count, how)))

    def played(self, count: int, how: Detail) -> tuple[Priced, Timeline]:
        """The priced program of `count` micro-batches and when it runs."""
        if (count, how) not in self._played:
            longer = next((each[0] for at, each in self._played.items() if at[1] == how and at[0] > count), None)
            priced = self._prepare(count, how, self._lower if longer is None else self._lowering(longer))
            self._played[count, how] = (priced, self._play(priced))
        return self._played[count, how]

    def _lowering(self, longer: Priced) -> Lowering:
        """The program of a longer step without a round, where that is the one of the shorter step."""

        def lowered(layout: Layout, schedule: Schedule, detail: Detail, *, expand: bool) -> Program:
            found = None if expand else rounds(schedule, longer.schedule)
            fewer = (longer.schedule.num_microbatches - schedule.num_microbatches) // schedule.replicas
            left = found and leave_out(longer.program, longer.schedule, found, fewer)
            return left or self._lower(layout, schedule, detail, expand=expand)

        return lowered

    def repeat(self, few: int, more: int, every: int, how: Detail) -> bool:
        """Whether each further round up to `every` adds to a step of `more` micro-batches what it adds to one of `few`, in time and
        memory."""
        priced, second = self.played(more, how)
        copies, tolerance = priced.schedule.replicas, SAME * second.makespan
        needed, late = self.foreseen(few, more, every, how) or (0.0, False)
        if (late and needed > more) or not may_extend(self._step(more, how), few // copies, more // copies, tolerance=tolerance):
            return False
        slowed = bool((second.seconds > priced.table.seconds[priced.program.price] + tolerance).any())
        further = (every - more) / (more - few)
        first = self._step(few, how)
        if not extends(first, self._step(more, how), interference=slowed, tolerance=tolerance, further=further):
            return False
        return all(map(_memory_extends, self.result(few, how).memory, self.result(more, how).memory))

    def order_goes_on(self, few: int, more: int, how: Detail, every: Schedule) -> bool:
        """Whether `every` goes on with the order of the two steps."""
        short, longer = (self.played(count, how)[0].schedule.rows for count in (few, more))
        return goes_on(short, longer, every.rows)

    def foreseen(self, few: int, more: int, every: int, how: Detail) -> tuple[float, bool] | None:
        """(how many micro-batches a step has that repeats itself, whether as a slack lasts until then), as far as that of `more`
        says; None where that says nothing."""
        priced, timeline = self.played(more, how)
        copies = priced.schedule.replicas
        passes = ((more - few) // copies, more // copies, every // copies)
        found = foreseen(self._step(more, how), *passes, tolerance=SAME * timeline.makespan)
        return None if found is None else (found[0] * copies, found[1])


def _memory_extends(first: RankMemory, second: RankMemory) -> bool:
    """Whether the peak grows as fast as anything that grows at all, if something does: it stays the peak."""
    grown = second.dynamic.max(axis=0) - first.dynamic.max(axis=0)
    return abs(second.allocated_bytes - first.allocated_bytes - float(grown.sum())) <= SAME * second.allocated_bytes
