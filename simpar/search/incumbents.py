"""What a search has found so far, and what can still beat it."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

import numpy as np
from numpy.typing import NDArray

from simpar.program.program import FloatArray
from simpar.search.choice import Choice

SLACK = 1e-9
"""Relative slack of comparisons, for sums in another order; equal layouts are never cut off."""


def rounded(value: float) -> float:
    """To ten significant digits: sums in another order give the same."""
    return float(f"{value:.9e}")


@dataclass(frozen=True, slots=True)
class Scored:
    """A layout that was simulated.

    Attributes:
        choice: the layout.
        step_time_s: on SimPy.
        device_bytes: peak use of the fullest device.
        value: what the search ranks by, less is better; in a front of time and memory the time, or the upper end of its interval in
            the unit of a time (see `parts.examiner`).
    """

    choice: Choice
    step_time_s: float
    device_bytes: float
    value: float

    @property
    def key(self) -> tuple[float, float, str]:
        """Best first; equal layouts by simplicity, then by name, so that the order never depends on the way there."""
        return rounded(self.value), self.choice.complexity, str(self.choice)


@dataclass
class Incumbents:
    """The best layouts so far and the limits that any layout must keep.

    Attributes:
        keep: how many of the best are wanted.
        largest_s: step times above it are not wanted.
        by_memory: rank by memory, then time, instead of time.
        front: keep every layout that no other beats in both time and memory, instead of the best.
        within: of a front: layouts this close, relatively, to one of it in both are not told apart.
        shared: what the best of others must beat, asked anew each time.
    """

    keep: int = 10
    largest_s: float = inf
    by_memory: bool = False
    front: bool = False
    within: float = 0.0
    shared: Callable[[], float] = field(default=lambda: inf)
    best: list[Scored] = field(default_factory=list)

    def rank(self, time_s: float, device_bytes: float) -> float:
        """What layouts are ranked by when nothing else is known of them."""
        # A second more is worth less than any byte that memory is counted in.
        return device_bytes + min(time_s, 1e6) * 1e-9 if self.by_memory else time_s

    @property
    def cutoff(self) -> float:
        """What a layout's value must beat."""
        worst = self.best[-1].value if len(self.best) >= self.keep and not self.front else inf
        return min(worst, self.shared())

    def beats(self, rank: float) -> bool:
        """Whether nothing that ranks at `rank` or behind can be among the best."""
        return rank * (1.0 - SLACK) > self.cutoff

    def outdone(self, time_s: float, device_bytes: float, choice: Choice) -> bool:
        """Whether this layout, with these bounds, cannot be among the best: for equals the order of `Scored.key` decides."""
        if self.front or len(self.best) < self.keep:
            return bool(self.beaten(np.array(time_s), np.array(device_bytes)))
        least = rounded(self.rank(time_s, device_bytes) * (1.0 - 1e-12))
        return (least, choice.complexity, str(choice)) > self.best[-1].key or self.beats(self.rank(time_s, device_bytes))

    def late(self, time_s: FloatArray) -> NDArray[np.bool_]:
        """Which step times are not wanted at all."""
        return np.asarray(time_s * (1.0 - SLACK) > self.largest_s)

    def beaten(self, time_s: FloatArray, device_bytes: FloatArray) -> NDArray[np.bool_]:
        """Which layouts (bounds of them) cannot be among the best."""
        time_s, device_bytes = np.asarray(time_s) * (1.0 - SLACK), np.asarray(device_bytes) * (1.0 - SLACK)
        if self.front:
            found = np.zeros(np.broadcast(time_s, device_bytes).shape, dtype=bool)
            for s in self.best:
                near = 1.0 + self.within
                found |= (s.value <= time_s * near) & (s.device_bytes <= device_bytes * near)
            return found
        if self.by_memory:
            return np.asarray(device_bytes + np.minimum(time_s, 1e6) * 1e-9 > self.cutoff)
        return np.asarray(time_s > self.cutoff)

    def add(self, scored: Scored) -> None:
        """Take a layout in, if it is among the best."""
        if any(s.choice == scored.choice for s in self.best):
            return
        insort(self.best, scored, key=lambda s: s.key)
        if not self.front:
            del self.best[self.keep :]
            return
        self.best = [s for s in self.best if not any(_beats(o, s) for o in self.best)]


def _beats(a: Scored, b: Scored) -> bool:
    """Not worse in anything and better in something, but for rounding; of a front the value is a time (see `Scored.value`)."""
    one, other = ((rounded(s.value), rounded(s.device_bytes)) for s in (a, b))
    return one[0] <= other[0] and one[1] <= other[1] and one != other


__all__ = ["SLACK", "Incumbents", "Scored"]
