"""What a search tells of itself: where every layout went, what its designs came to, how far it is."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from simpar.searching.choice import Choice
from simpar.searching.incumbents import Scored


@dataclass
class Account:
    """Where every layout of the space went."""

    rejected: Counter[str] = field(default_factory=Counter)
    evaluated: Counter[str] = field(default_factory=Counter)
    kept: int = 0
    """Simulated and neither rejected for memory nor for a constraint: with `rejected` they add up to the space."""

    def merge(self, other: Account) -> None:
        """Add another part's account."""
        self.rejected.update(other.rejected)
        self.evaluated.update(other.evaluated)
        self.kept += other.kept


@dataclass(frozen=True, slots=True)
class Glimpse:
    """The fastest layout of a pipeline that fits, by its bounds: the space as a page shows it."""

    choice: Choice
    bound_s: float
    device_bytes: float


@dataclass
class Progress:
    """What a search reports while it runs."""

    incumbent: Scored | None
    bound: float
    open_nodes: int
    simulated: int
    seconds: float

    @property
    def gap(self) -> float:
        """(incumbent - bound) / incumbent; infinite without an incumbent."""
        if self.incumbent is None:
            return float("inf")
        return max(0.0, 1.0 - self.bound / self.incumbent.value)


__all__ = ["Account", "Glimpse", "Progress"]
