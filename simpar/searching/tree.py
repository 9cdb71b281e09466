"""A branch and bound: sets of layouts wait by their bounds, the least is opened first, every layout is accounted for."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from math import inf
from typing import Any, Final

from simpar.searching.account import Account, Glimpse
from simpar.searching.choice import Choice
from simpar.searching.incumbents import Followers, Incumbents, Scored

MEMORY: Final = "does not fit the memory"
BOUND: Final = "cannot beat the best"
DOMINATED: Final = "offloads more than it needs"
SIMULATED_MEMORY: Final = "does not fit when simulated"
CONSTRAINT: Final = "misses a constraint"


class Tree:
    """What every branch and bound is; of a subclass ``open_KIND(bound, payload, count)`` splits a set of `count` layouts of that
    kind, or simulates the one that it is.

    Args:
        incumbents: limits and what is known already.
        followers: who follows it.
    """

    def __init__(self, incumbents: Incumbents, followers: Followers) -> None:
        self.incumbents = incumbents
        self.on_scored, self.on_progress = followers.on_scored, followers.on_progress
        self.examine: Callable[[Choice, float, float], float | None] | None = None
        """Value of a simulated layout (None: it misses a constraint); none = its step time."""
        self.account, self.glimpses = Account(), dict[object, Glimpse]()
        self.heap: list[tuple[float, float, int, str, Any, int, float]] = []
        self._tick = itertools.count()
        self._proven_s = 0.0

    @property
    def best(self) -> list[Scored]:
        """The best so far, best first."""
        return self.incumbents.best

    def push(self, bound: float, kind: str, payload: Any, count: int, device_bytes: float = 0.0, simplicity: float = 0.0) -> None:
        """A set of `count` layouts, none faster than `bound` nor smaller than `device_bytes`.

        Of equals the simplest goes first.
        """
        reason = self._reject(bound, device_bytes)
        if reason:
            self._settle(reason, count)
        else:
            key = self._rank(bound, device_bytes)
            heapq.heappush(self.heap, (key, simplicity, next(self._tick), kind, payload, count, bound))

    def _rank(self, bound: float, device_bytes: float) -> float:
        """What nothing in a set ranks before."""
        return self.incumbents.rank(bound, device_bytes)

    def _reject(self, bound: float, device_bytes: float) -> str:
        if self.incumbents.late(bound):
            return CONSTRAINT
        return BOUND if self.incumbents.beats(self._rank(bound, device_bytes)) else ""

    def _settle(self, reason: str, count: int) -> None:
        """Account for layouts: rejected, or kept where there is no reason."""
        if reason:
            self.account.rejected[reason] += count
        else:
            self.account.kept += count

    def go_on(self, until: float = inf) -> float:
        """Search until all that waits is behind `until`, or nothing can beat the best; the least of what is left, infinite then."""
        while self.heap:
            if self.heap[0][0] > until:
                return self.heap[0][0]
            key, _, _, kind, payload, count, bound = heapq.heappop(self.heap)
            self._popped(kind)
            if self.incumbents.beats(key):
                self._settle(BOUND, count + self._forget())
                break
            getattr(self, f"open_{kind}")(bound, payload, count)
            if self.on_progress is not None:
                self.on_progress(max(key, self._proven_s))
        return inf

    def _popped(self, kind: str) -> None:
        """A set of this kind waits no longer."""

    def _forget(self) -> int:
        """Drop all that waits; how many layouts that were."""
        count = sum(entry[5] for entry in self.heap)
        self.heap.clear()
        return count

    def _found(self, choice: Choice, time_s: float, device_bytes: float) -> str:
        """Value a simulated layout that fits; why it does not count, or nothing."""
        value = self.incumbents.rank(time_s, device_bytes) if self.examine is None else self.examine(choice, time_s, device_bytes)
        if value is None or self.incumbents.late(time_s):
            return CONSTRAINT
        scored = Scored(choice, time_s, device_bytes, value)
        if self.on_scored is not None:
            self.on_scored(scored)
        self.incumbents.add(scored)
        return ""


__all__ = ["BOUND", "CONSTRAINT", "DOMINATED", "MEMORY", "SIMULATED_MEMORY", "Tree"]
