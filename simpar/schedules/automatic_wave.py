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

from simpar.schedules.automatic_board import Board, StageTimes


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
        self.tolerance = self.board.tolerance

    def run(self) -> Board:
        """Play all micro-batches."""
        self.warm_up()
        self.board.run(self.wave)
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
                board.sound &= board.ready(rank, "F")
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

    def wave(self) -> None:
        """At most one forward and one input gradient on every rank."""
        self.forwards()
        self.gradients()

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
        over, done = self.board.over, self.board.count["F"]
        self.board.margins += [self.m - count for count in done]
        wanted = [count < self.m for count in done]
        if self.choices.skip:
            for rank in self.ranks[:-1]:
                if wanted[rank] and over(done[rank] - done[rank + 1] - 1) and self.may_skip(rank):
                    wanted[rank] = False
                    self.mattered.add("skip")
        for rank in reversed(self.ranks[:-1]):
            wanted[rank] = wanted[rank] and (wanted[rank + 1] or done[rank + 1] == self.m)
        return wanted

    def may_skip(self, rank: int) -> bool:
        """Whether the rank's forward would end after the next rank's gradient arrives, and leaving it out costs little."""
        board, times = self.board, self.times
        gradient = board.clock[rank + 1] + times.f[rank + 1] + times.i[rank + 1] + times.send
        clock, held, pending = board.clock[rank], board.held[rank] + 1.0, board.count["I"][rank] - board.count["W"][rank]
        if board.over(clock - gradient + self.tolerance):
            return True
        while board.over(held - board.most[rank]) and board.over(pending):
            held, pending, clock = held - times.kept[rank], pending - 1, clock + times.w[rank]
        if not board.over(clock + times.f[rank] - gradient - self.tolerance):
            return False
        return not board.idles_longest(rank, gradient - board.clock[rank])

    def gradients(self) -> None:
        """The wave's input gradient on every rank, from the last."""
        board = self.board
        for rank in reversed(self.ranks):
            if rank < self.times.ranks - 1:
                self.fill_wait(rank, "I")
            if rank == 0 and not board.over(self.m - board.count["F"][0]):
                # Nobody waits for the first rank's gradients: those that are left do not delay its weight gradients.
                while board.runnable(0, "W"):
                    board.put(0, "W")
            board.sound &= board.ready(rank, "I")
            board.put(rank, "I")

    def fill_wait(self, rank: int, phase: str) -> None:
        """Weight gradients while the input of the rank's next pass is on its way."""
        board = self.board
        if not board.runnable(rank, "W"):
            return
        until, w = board.arrival(rank, phase), self.times.w[rank]
        while board.runnable(rank, "W") and not board.over(board.clock[rank] + w - until - self.tolerance):
            board.put(rank, "W")
        wait = until - board.clock[rank]
        if board.runnable(rank, "W") and board.over(wait - self.tolerance):
            longest = board.idles_longest(rank, wait)
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


def play(times: StageTimes, num_microbatches: int, rows: Sequence[str]) -> Board:
    """A given order of phases per rank on the same clocks, micro-batches in order within each phase."""
    board = Board(times, num_microbatches)

    def put(ends: Sequence[int]) -> None:
        """Every rank's row up to its end among `ends`."""
        left = set(range(times.ranks))
        while left:
            for rank in sorted(left):
                while (at := len(board.rows[rank])) < ends[rank] and board.runnable(rank, rows[rank][at]):
                    board.put(rank, rows[rank][at])
                if at == ends[rank]:
                    left.discard(rank)

    board.run(lambda: put([row.index("I", len(done)) + 1 for row, done in zip(rows, board.rows, strict=True)]))
    put(list(map(len, rows)))
    return board
