"""What a search has found so far, and what can still beat it."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simpar.program.program import FloatArray
from simpar.searching.choice import Choice
from simpar.searching.designs import DesignKey, design_key, family

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


@dataclass(frozen=True, slots=True)
class Followers:
    """Whom a search tells what.

    Attributes:
        on_scored: every simulated layout.
        on_progress: what nothing that is left ranks before.
    """

    on_scored: Callable[[Scored], None] | None = None
    on_progress: Callable[[float], None] | None = None


class Limits(NamedTuple):
    """What layouts must beat.

    Attributes:
        value: of the last that is wanted.
        points: of a front, value and bytes of every layout on it.
    """

    value: float = inf
    points: tuple[tuple[float, float], ...] = ()


NO_LIMITS = Limits()


@dataclass
class Incumbents:
    """The best layouts so far and the limits that any layout must keep.

    Attributes:
        keep: how many of the best are wanted.
        largest_s: step times above it are not wanted.
        by_memory: rank by memory, then time, instead of time.
        front: keep every layout that no other beats in both time and memory, instead of the best.
        within: of a front: layouts this close, relatively, to one of it in both are not told apart.
        level: of a front: bytes that layouts may need now.
        fold: of the layouts of one design only the best is kept.
        reach: layouts that take more than this times the best value are not looked for.
        tolerance: of a known design other settings are only looked at where they may gain more than this, relatively.
        skipped: the least bound of those that were not.
        tried: designs of which a setting was timed.
        shortfall: time over bound of the layout with least of it, by schedule family.
        shared: what the best of others must beat, asked anew each time.
        fastest: see `_fastest_in_level`, and what it was found from.
    """

    keep: int = 10
    largest_s: float = inf
    by_memory: bool = False
    front: bool = False
    within: float = 0.0
    level: float = inf
    fold: bool = False
    reach: float = inf
    tolerance: float = 0.0
    skipped: float = inf
    tried: set[DesignKey] = field(default_factory=set)
    shortfall: dict[str, float] = field(default_factory=dict)
    shared: Callable[[], Limits] = field(default=lambda: NO_LIMITS)
    best: list[Scored] = field(default_factory=list)
    limits: Limits = field(default_factory=Limits)
    fastest: tuple[tuple[object, object, object], tuple[float, float] | None] = ((None, None, None), None)

    def rank(self, time_s: float, device_bytes: float) -> float:
        """What layouts are ranked by when nothing else is known of them."""
        # A second more is worth less than any byte that memory is counted in.
        return device_bytes + min(time_s, 1e6) * 1e-9 if self.by_memory else time_s

    def cutoff(self) -> float:
        """What values must beat; of a front, those of layouts that need no more than `level`."""
        if self.front:
            fastest = self._fastest_in_level()
            return fastest[0] / (1.0 + self.within) if fastest else inf
        return min(self.limits.value, self.shared().value)

    def beats(self, rank: float) -> bool:
        """Whether nothing that ranks at `rank` or behind can be wanted."""
        return rank * (1.0 - SLACK) > self.cutoff()

    def outdone(self, time_s: float, device_bytes: float, choice: Choice) -> bool:
        """Whether this layout, with these bounds, cannot be wanted: for equals the order of `Scored.key` decides."""
        if self.front or (len(self.best) < self.keep and not self.fold):
            return bool(self.beaten(np.array(time_s), np.array(device_bytes)))
        rank = self.rank(time_s, device_bytes)
        if self.beats(rank):
            return True
        if self.fold:
            own = self._of_design(choice)
            if own is not None and self.tolerance and own.value * (1.0 - self.tolerance) < rank < own.value:
                self.skipped = min(self.skipped, rank)
                return True
            return own is not None and (rounded(rank * (1.0 - 1e-12)), choice.complexity, str(choice)) > own.key
        return (rounded(rank * (1.0 - 1e-12)), choice.complexity, str(choice)) > self.best[-1].key

    def timed(self, choice: Choice, bound_s: float, time_s: float) -> None:
        """Remember that a setting of a design was timed, and how far its bound fell short of the time."""
        if self.tolerance and bound_s > 0.0:
            name = family(choice.pipeline.schedule)
            self.shortfall[name] = min(self.shortfall.get(name, inf), time_s / bound_s)
            self.tried.add(design_key(choice))

    def unpromising(self, bound_s: float, choice: Choice) -> bool:
        """Whether another setting of a design that was tried is not expected to gain enough, though its bound alone allows it.

        Expected is the bound times what bounds of its schedule family fell short by at least. The best of all is not decided by
        this: what may beat it by more than the tolerance is always looked at.
        """
        if not (self.tolerance and self.fold and self.best) or bound_s <= self.best[0].value * (1.0 - self.tolerance):
            return False
        if design_key(choice) not in self.tried:
            return False
        own = self._of_design(choice)
        wanted = self.cutoff() if own is None else own.value * (1.0 - self.tolerance)
        if bound_s * self.shortfall.get(family(choice.pipeline.schedule), 1.0) <= wanted:
            return False
        self.skipped = min(self.skipped, bound_s)
        return True

    def late(self, time_s: FloatArray | float) -> NDArray[np.bool_]:
        """Which step times are not wanted at all."""
        return np.asarray(time_s * (1.0 - SLACK) > self.largest_s)

    def beaten(self, time_s: FloatArray, device_bytes: FloatArray) -> NDArray[np.bool_]:
        """Which layouts (bounds of them) cannot be wanted."""
        time_s, device_bytes = np.asarray(time_s) * (1.0 - SLACK), np.asarray(device_bytes) * (1.0 - SLACK)
        if self.by_memory:
            return np.asarray(device_bytes + np.minimum(time_s, 1e6) * 1e-9 > self.cutoff())
        return np.asarray(time_s > self.cutoff())

    def _fastest_in_level(self) -> tuple[float, float] | None:
        """Value and bytes of the fastest of a front, this and others' together, that needs no more than `level`."""
        key = (self.limits, self.shared().points, self.level)
        if any(a is not b for a, b in zip(key, self.fastest[0], strict=True)):
            points = (p for p in (*self.limits.points, *key[1]) if p[1] <= self.level)
            self.fastest = (key, min(points, default=None))
        return self.fastest[1]

    def next_level(self) -> float | None:
        """Bytes below which the next layout of a front is to be found; None where there was none in this level.

        Nothing in this level beats its fastest by more than `within`, which stands for all that need as much as it, or hardly less.
        """
        fastest = self._fastest_in_level()
        return None if fastest is None else fastest[1] / (1.0 + max(self.within, SLACK))

    def add(self, scored: Scored) -> None:
        """Take a layout in, if it is among the best."""
        if any(s.choice == scored.choice for s in self.best):
            return
        if self.fold and (rival := self._of_design(scored.choice)) is not None:
            if rival.key <= scored.key:
                return
            self.best.remove(rival)
        insort(self.best, scored, key=lambda s: s.key)
        if self.front:
            self.best = [s for s in self.best if not any(_beats(o, s) for o in self.best)]
            self.limits = Limits(points=tuple((s.value, s.device_bytes) for s in self.best))
            return
        del self.best[self.keep :]
        value = self.best[-1].value if len(self.best) >= self.keep else inf
        self.limits = Limits(min(value, self.best[0].value * self.reach) if self.fold else value)

    def _of_design(self, choice: Choice) -> Scored | None:
        """The best known layout of the same design."""
        key = design_key(choice)
        return next((s for s in self.best if design_key(s.choice) == key), None)


def _beats(a: Scored, b: Scored) -> bool:
    """Not worse in anything and better in something, but for rounding; of a front the value is a time (see `Scored.value`)."""
    one, other = ((rounded(s.value), rounded(s.device_bytes)) for s in (a, b))
    return one[0] <= other[0] and one[1] <= other[1] and one != other


__all__ = ["SLACK", "Incumbents", "Limits", "Scored"]
