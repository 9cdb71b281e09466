"""Ranks with their clocks and memory on which orders of passes are played, wave after wave.

Between its decisions a wave only adds and takes the later of two times. So once the same waves moved every clock and every pass
on its way by the same constants twice, they go on doing so until a decision turns out otherwise, and each decision's margin tells
when at the soonest: as many waves are left out at once (`Board.run`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

_SLACK = 1e-9
"""Relative tolerance of comparisons of times and of memory."""
_ROUNDED: Final = 1e-13
"""Clocks that differ by no more of the latest one are the same."""
_LONGEST: Final = 8
"""Most waves that are looked at as one period."""
_WORTHWHILE: Final = 80
"""Least waves that are left for a look."""
_MANY: Final = 1e9
"""More waves than any step has."""


@dataclass(frozen=True, slots=True)
class StageTimes:
    """What the heuristic knows of each rank; one stage per rank.

    Attributes:
        f, i, w: durations of forward, input gradient and weight gradient per rank, in any one unit.
        send: from the end of a pass to the start of the next rank's, in the same unit.
        limit: most memory, in activations of one micro-batch.
        kept: fraction of a micro-batch's activation that stays from its input gradient to its weight gradient.
    """

    f: tuple[float, ...]
    i: tuple[float, ...]
    w: tuple[float, ...]
    send: float
    limit: tuple[float, ...]
    kept: tuple[float, ...]

    @property
    def ranks(self) -> int:
        """Pipeline ranks."""
        return len(self.f)


@dataclass(frozen=True, slots=True)
class _Played:
    """A wave of a board.

    Attributes:
        put: phases that each rank put.
        margins: of the decisions, float array.
        state: afterwards clock, idle and held memory of each rank, and ends of passes that the neighbour has not taken up.
        waiting: how many those are, by phase and rank.
    """

    put: tuple[str, ...]
    margins: FloatArray
    state: FloatArray
    waiting: tuple[int, ...]

    @classmethod
    def of(cls, board: Board, phases: Sequence[str]) -> _Played:
        """The last wave of `board`, which put so much."""
        forwards, gradients = board.count["F"], board.count["I"]
        ends, put = [*board.forward_end, *board.gradient_end[1:]], [*forwards, *gradients[1:]]
        taken = [*forwards[1:], gradients[-1], *gradients[:-1]]
        waiting = [each[first:last] for each, first, last in zip(ends, taken, put, strict=True)]
        state = np.array([*board.clock, *board.idle, *board.held, *chain.from_iterable(waiting)])
        return cls(tuple(phases), np.array(board.margins, dtype=np.float64), state, tuple(map(len, waiting)))

    def alike(self, other: _Played) -> bool:
        """Whether both put the same by the same decisions."""
        return (self.put, self.waiting, len(self.margins)) == (other.put, other.waiting, len(other.margins)) and np.array_equal(
            self.margins > 0.0, other.margins > 0.0
        )


def _times(seen: Sequence[_Played], period: int) -> int:
    """How many times more the last of three periods is sure to be played."""
    if not all(map(_Played.alike, seen, seen[period:])):
        return 0
    states = [seen[at * period - 1].state for at in (1, 2, 3)]
    if np.abs(states[2] - 2.0 * states[1] + states[0]).max() > _ROUNDED * states[2].max():
        return 0
    before, margins = (np.concatenate([each.margins for each in part]) for part in (seen[period : 2 * period], seen[2 * period :]))
    change = margins - before
    shrinks = np.flatnonzero(np.where(margins > 0.0, change < 0.0, change > 0.0))
    return int(np.abs(margins[shrinks] / change[shrinks]).min(initial=_MANY)) - 1


class Board:
    """Ranks with their clocks and memory, and the passes put so far; `put` plays one more.

    Attributes:
        rows: phases put by each rank.
        sound: every pass was put behind those that it waits for, so that no rank waits for ever.
        margins: what decided each question since the wave began, positive for yes.
    """

    def __init__(self, times: StageTimes, num_microbatches: int) -> None:
        p, m = times.ranks, num_microbatches
        self.times, self.m, self.last = times, m, p - 1
        self.clock, self.begin, self.idle = [0.0] * p, [-1.0] * p, [0.0] * p
        self.held, self.peak = [0.0] * p, [0.0] * p
        self.most = [limit + _SLACK * p for limit in times.limit]
        self.takes = {"F": times.f, "I": times.i, "W": times.w}
        self.count = {phase: [0] * p for phase in "FIW"}
        self.forward_end = [[0.0] * m for _ in range(p)]
        self.gradient_end = [[0.0] * m for _ in range(p)]
        self.rows, self.sound = [""] * p, True
        self.margins: list[float] = []
        self.tolerance = _SLACK * (max(times.f) + max(times.i) + max(times.w) + times.send)

    def over(self, margin: float) -> bool:
        """Whether `margin` is positive; every decision goes through here."""
        self.margins.append(margin)
        return margin > 0.0

    def arrival(self, rank: int, phase: str) -> float:
        """When the input of the rank's next F or I is there; the neighbour must have put that pass."""
        at = self.count[phase][rank]
        if phase == "F":
            return self.forward_end[rank - 1][at] + self.times.send if rank else 0.0
        return self.forward_end[rank][at] if rank == self.last else self.gradient_end[rank + 1][at] + self.times.send

    def runnable(self, rank: int, phase: str) -> bool:
        """Whether the rank's next pass of this phase exists and has had its inputs put."""
        count = self.count
        done = count[phase][rank]
        if phase == "W":
            # There are no more input gradients than micro-batches.
            self.margins.append(more := count["I"][rank] - done)
            return more > 0
        self.margins.append(self.m - done)
        return done < self.m and self.ready(rank, phase)

    def ready(self, rank: int, phase: str) -> bool:
        """Whether the inputs of the rank's next F or I have been put; of that waves that are alike have as many on their way."""
        count = self.count
        done = count[phase][rank]
        if phase == "F":
            return rank == 0 or count["F"][rank - 1] > done
        return count["F"][rank] > done and (rank == self.last or count["I"][rank + 1] > done)

    def put(self, rank: int, phase: str) -> None:
        """Run the rank's next pass of this phase as soon as its input is there."""
        count = self.count[phase]
        done, clock = count[rank], self.clock[rank]
        start = clock
        if phase != "W":
            start = max(clock, arrival := self.arrival(rank, phase))
            self.margins.append(arrival - clock - self.tolerance)
        if self.begin[rank] < 0:
            self.begin[rank] = start
        else:
            self.idle[rank] += start - clock
        end = self.clock[rank] = start + self.takes[phase][rank]
        if phase == "F":
            self.forward_end[rank][done] = end
            self.held[rank] += 1.0
            self.peak[rank] = max(self.peak[rank], self.held[rank])
        elif phase == "I":
            self.gradient_end[rank][done] = end
            self.held[rank] -= 1.0 - self.times.kept[rank]
        else:
            self.held[rank] -= self.times.kept[rank]
        count[rank] = done + 1
        self.rows[rank] += phase

    def fits(self, rank: int, more: float = 1.0) -> bool:
        """Whether `more` activations stay within the rank's limit."""
        return not self.over(self.held[rank] + more - self.most[rank])

    def idles_longest(self, rank: int, more: float) -> bool:
        """Whether after `more` idle time the rank would have idled longer than any."""
        longest = max(self.idle)
        self.margins += [longest - idle - self.tolerance for idle in self.idle]
        return self.over(self.idle[rank] + more - longest - self.tolerance)

    def run(self, wave: Callable[[], None]) -> None:
        """Play `wave` once for each input gradient that is left, or leave it out where the last ones tell what it does."""
        seen: list[_Played] = []
        while (left := self.m - self.count["I"][0]) > 0:
            self.margins, begins = [], list(map(len, self.rows))
            wave()
            if left < _WORTHWHILE:
                continue
            seen.append(_Played.of(self, [row[begin:] for row, begin in zip(self.rows, begins, strict=True)]))
            for period in range(1, min(_LONGEST, len(seen) // 3) + 1):
                times = min(_times(seen[-3 * period :], period), (self.m - self.count["I"][0]) // period)
                if times > 1:
                    self._leave_out(seen[-period - 1 :], times)
                    seen = []
                    break

    def _leave_out(self, seen: Sequence[_Played], times: int) -> None:
        """Do what the waves of `seen` did so many times more.

        Args:
            seen: a period, behind the moment when it began.
        """
        began, ended = seen[0], seen[-1]
        moved = (ended.state - began.state)[: 3 * len(self.rows)].reshape(3, -1).tolist()
        # The waves to come hold as much or more: they tell the peak.
        for own, changes in zip((self.clock, self.idle, self.held), moved, strict=True):
            own[:] = [value + times * change for value, change in zip(own, changes, strict=True)]
        for rank, row in enumerate(self.rows):
            again = "".join(each.put[rank] for each in seen[1:])
            self.rows[rank] = row + times * again
            for phase, counts in self.count.items():
                done, more = counts[rank], again.count(phase)
                counts[rank] += times * more
                if phase != "W" and more:
                    ends = (self.forward_end if phase == "F" else self.gradient_end)[rank]
                    last: FloatArray = np.array(ends[done - 2 * more : done]).reshape(2, more)
                    further = last[1] + np.arange(1, times + 1)[:, None] * (last[1] - last[0])
                    ends[done : counts[rank]] = further.reshape(-1).tolist()

    @property
    def span(self) -> float:
        """The longest time from a rank's first pass to its last: a step where no rank waits for the others to end."""
        return max(end - begin for end, begin in zip(self.clock, self.begin, strict=True))

    @property
    def makespan(self) -> float:
        """From the first pass of any rank to the last of any."""
        return max(self.clock)
