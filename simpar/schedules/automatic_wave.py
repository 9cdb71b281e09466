"""The automatic zero-bubble heuristic: one wave per micro-batch, forwards down the ranks and input gradients back up.

Every wave runs at most one forward per rank, then the micro-batch's input gradient on every rank; weight gradients fill the
waits and free memory where the limit is reached. Before the first gradient each rank runs as many forwards as fit. Three
yes-or-no choices are left open; the caller tries all and keeps the best (Qi et al. 2023, arXiv 2401.10241, section 3.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import product
from typing import Final

_SLACK = 1e-9
"""Relative tolerance of comparisons of times and of memory."""


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
class Choices:
    """The open questions of the heuristic.

    Attributes:
        late_start: a forward may begin before the first gradient arrives and end after it.
        skip: a rank that is ahead of the next by two forwards or more leaves one out where that delays nobody.
        fill: a weight gradient fills every wait, also one shorter than itself; else only where the rank's idle time would
            otherwise become the longest.
    """

    late_start: bool
    skip: bool
    fill: bool


CHOICES: Final = tuple(field.name for field in fields(Choices))


class Board:
    """Ranks with their clocks and memory, and the passes put so far; `put` plays one more."""

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
        self.rows: list[list[str]] = [[] for _ in range(p)]

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
        if done == self.m:
            return False
        if phase == "F":
            return rank == 0 or count["F"][rank - 1] > done
        if phase == "W":
            return count["I"][rank] > done
        return count["F"][rank] > done and (rank == self.last or count["I"][rank + 1] > done)

    def put(self, rank: int, phase: str) -> None:
        """Run the rank's next pass of this phase as soon as its input is there."""
        count = self.count[phase]
        done, clock = count[rank], self.clock[rank]
        start = clock if phase == "W" else max(clock, self.arrival(rank, phase))
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
        self.rows[rank].append(phase)

    def fits(self, rank: int, more: float = 1.0) -> bool:
        """Whether `more` activations stay within the rank's limit."""
        return self.held[rank] + more <= self.most[rank]

    @property
    def span(self) -> float:
        """The longest time from a rank's first pass to its last: a step where no rank waits for the others to end."""
        return max(end - begin for end, begin in zip(self.clock, self.begin, strict=True))

    @property
    def makespan(self) -> float:
        """From the first pass of any rank to the last of any."""
        return max(self.clock)


class Wave:
    """One run of the heuristic.

    Attributes:
        mattered: choices answered yes without which the run would have been another.
    """

    def __init__(self, times: StageTimes, num_microbatches: int, choices: Choices) -> None:
        self.board = Board(times, num_microbatches)
        self.times, self.m, self.choices = times, num_microbatches, choices
        self.mattered: set[str] = set()
        self.ranks = range(times.ranks)
        self.tolerance = _SLACK * (max(times.f) + max(times.i) + max(times.w) + times.send)

    def run(self) -> Board:
        """Play all micro-batches."""
        self.warm_up()
        for _ in range(1, self.m):
            self.forwards()
            self.gradients()
        for rank in self.ranks:
            while self.board.runnable(rank, "W"):
                self.board.put(rank, "W")
        return self.board

    def warm_up(self) -> None:
        """Forwards until the first gradient arrives, then that gradient on every rank."""
        board = self.board
        for rank in self.ranks:
            board.put(rank, "F")
        late = self.choices.late_start
        more = self.extra_forwards(late_start=late)
        if late and more != self.extra_forwards(late_start=False):
            self.mattered.add("late_start")
        for rank in self.ranks:
            for _ in range(more[rank]):
                board.put(rank, "F")
        for rank in reversed(self.ranks):
            board.put(rank, "I")

    def extra_forwards(self, *, late_start: bool) -> list[int]:
        """Forwards beyond the first that each rank runs before its first gradient."""
        board, times = self.board, self.times
        last = times.ranks - 1
        more = [0] * times.ranks
        first_gradient = board.clock[last] + times.i[last]
        for rank in reversed(self.ranks[:-1]):
            arrival, clock = first_gradient + times.send, board.clock[rank]
            begun = 0.0 if late_start else times.f[rank]
            while 1 + more[rank] < self.m and board.fits(rank, more[rank] + 1.0):
                if clock + begun > arrival + self.tolerance or clock >= arrival - self.tolerance:
                    break
                clock += times.f[rank]
                more[rank] += 1
            first_gradient = max(clock, arrival) + times.i[rank]
        # A rank stays ahead of the next, else its forwards would only wait.
        for rank in self.ranks[1:]:
            while more[rank] > 0 and more[rank] >= more[rank - 1] and 1 + more[rank] < self.m:
                more[rank] -= 1
        return more

    def forwards(self) -> None:
        """At most one forward on every rank."""
        board = self.board
        for rank, wanted in enumerate(self.wanted()):
            if not wanted or not board.runnable(rank, "F"):
                continue
            while not board.fits(rank) and board.runnable(rank, "W"):
                board.put(rank, "W")
            if not board.fits(rank):
                continue
            self.fill_wait(rank, "F")
            board.put(rank, "F")

    def wanted(self) -> list[bool]:
        """Which ranks run a forward in this wave."""
        done = self.board.count["F"]
        wanted = [count < self.m for count in done]
        if self.choices.skip:
            for rank in self.ranks[:-1]:
                if wanted[rank] and done[rank] >= done[rank + 1] + 2 and self.may_skip(rank):
                    wanted[rank] = False
                    self.mattered.add("skip")
        for rank in reversed(self.ranks[:-1]):
            wanted[rank] = wanted[rank] and (wanted[rank + 1] or done[rank + 1] == self.m)
        return wanted

    def may_skip(self, rank: int) -> bool:
        """Whether the rank's forward would end after the next rank's gradient arrives, and leaving it out costs little."""
        board, times = self.board, self.times
        gradient = board.clock[rank + 1] + times.f[rank + 1] + times.i[rank + 1] + times.send
        clock, over, pending = board.clock[rank], board.held[rank] + 1.0, board.count["I"][rank] - board.count["W"][rank]
        if clock >= gradient - self.tolerance:
            return True
        while over > board.most[rank] and pending > 0:
            over, pending, clock = over - times.kept[rank], pending - 1, clock + times.w[rank]
        if clock + times.f[rank] <= gradient + self.tolerance:
            return False
        return gradient - board.clock[rank] <= max(board.idle) - board.idle[rank] + self.tolerance

    def gradients(self) -> None:
        """The wave's input gradient on every rank, from the last."""
        board = self.board
        for rank in reversed(self.ranks):
            if rank < self.times.ranks - 1:
                self.fill_wait(rank, "I")
            if rank == 0 and board.count["F"][0] == self.m:
                # Nobody waits for the first rank's gradients: those that are left do not delay its weight gradients.
                while board.runnable(0, "W"):
                    board.put(0, "W")
            board.put(rank, "I")

    def fill_wait(self, rank: int, phase: str) -> None:
        """Weight gradients while the input of the rank's next pass is on its way."""
        board = self.board
        if not board.runnable(rank, "W"):
            return
        until = board.arrival(rank, phase)
        while board.runnable(rank, "W") and board.clock[rank] + self.times.w[rank] <= until + self.tolerance:
            board.put(rank, "W")
        wait = until - board.clock[rank]
        if board.runnable(rank, "W") and wait > self.tolerance:
            longest = wait > max(board.idle) - board.idle[rank] + self.tolerance
            if not longest and self.choices.fill:
                self.mattered.add("fill")
            if longest or self.choices.fill:
                board.put(rank, "W")


def waves(times: StageTimes, num_microbatches: int) -> list[Board]:
    """The heuristic under every combination of choices, all of them no first; a run is that of each choice that did not matter."""
    found: dict[Choices, Board] = {}
    for answers in product((True, False), repeat=3):
        if Choices(*answers) in found:
            continue
        wave = Wave(times, num_microbatches, Choices(*answers))
        board = wave.run()
        same = ({answer, answer and name in wave.mattered} for name, answer in zip(CHOICES, answers, strict=True))
        found.update((Choices(*others), board) for others in product(*same))
    return [found[Choices(*answers)] for answers in product((False, True), repeat=3)]


def play(times: StageTimes, num_microbatches: int, rows: Sequence[Sequence[str]]) -> Board:
    """A given order of phases per rank on the same clocks, micro-batches in order within each phase."""
    board = Board(times, num_microbatches)
    left = set(range(times.ranks))
    while left:
        for rank in sorted(left):
            row, position = rows[rank], len(board.rows[rank])
            while position < len(row) and board.runnable(rank, row[position]):
                board.put(rank, row[position])
                position += 1
            if position == len(row):
                left.discard(rank)
    return board
