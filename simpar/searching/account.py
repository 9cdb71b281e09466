"""What a search tells of itself: where every layout went, what its designs came to, how far it is."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from math import inf
from typing import Any

from simpar.searching.choice import Choice


@dataclass(frozen=True, slots=True)
class Glimpse:
    """The fastest layout of a pipeline that fits, by its bounds: the space as a page shows it."""

    choice: Choice
    bound_s: float
    device_bytes: float


@dataclass
class Account:
    """Where every layout of a space, or of a part of it, went.

    Attributes:
        rejected, evaluated: reason -> count, tier -> count.
        kept: simulated and neither rejected for memory nor for a constraint: with `rejected` they add up to the space.
        skipped: nothing that was left out for gaining too little takes less than this.
        glimpses: the best of its designs, by their bounds.
    """

    rejected: Counter[str] = field(default_factory=Counter)
    evaluated: Counter[str] = field(default_factory=Counter)
    kept: int = 0
    skipped: float = inf
    glimpses: list[Glimpse] = field(default_factory=list)

    def merge(self, other: Account) -> None:
        """Add another part's account."""
        self.rejected.update(other.rejected)
        self.evaluated.update(other.evaluated)
        self.kept += other.kept
        self.skipped = min(self.skipped, other.skipped)
        self.glimpses += other.glimpses

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        seen = [{"choice": g.choice.flat(), "bound_s": g.bound_s, "device_bytes": g.device_bytes} for g in self.glimpses]
        skipped = None if self.skipped == inf else self.skipped
        return {
            "rejected": dict(self.rejected), "evaluated": dict(self.evaluated), "kept": self.kept, "skipped": skipped,
            "glimpses": seen,
        }  # fmt: skip

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Account:
        """The inverse of `to_json`.

        Raises:
            KeyError, TypeError, ValueError: it is none.
        """
        seen = [Glimpse(Choice.from_flat(g["choice"]), g["bound_s"], g["device_bytes"]) for g in data["glimpses"]]
        skipped = inf if data["skipped"] is None else float(data["skipped"])
        return cls(Counter(data["rejected"]), Counter(data["evaluated"]), int(data["kept"]), skipped, seen)


__all__ = ["Account", "Glimpse"]
