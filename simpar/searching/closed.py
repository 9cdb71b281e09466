"""Designs that a search is through with: what a search in a store keeps of a part that is not done yet.

A part of a large space takes many seconds. Inside it the work is done design by design (a pipeline in a variant of a mesh), each
in milliseconds; once every layout of a design is simulated or rejected, better incumbents cannot change that. So a search that
is killed and resumed passes over the designs that it had closed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import astuple, dataclass, field
from math import inf
from typing import Any

from simpar.searching.account import Glimpse
from simpar.searching.choice import Choice
from simpar.searching.open_layouts import Design


def name_of(design: Design) -> str:
    """A design's name, the same in every process."""
    values = (*astuple(design.group), design.batch, design.m, *astuple(design.variant), *astuple(design.pipeline))
    return " ".join(str(value) for value in values)


@dataclass
class Closed:
    """A design whose layouts are all accounted for.

    Attributes:
        name: see `name_of`.
        rejected, kept: as in `Account`.
        skipped: as in `Incumbents`, of the whole search up to here.
        glimpse: its fastest layout by bounds.
    """

    name: str
    rejected: Counter[str] = field(default_factory=Counter)
    kept: int = 0
    skipped: float = inf
    glimpse: Glimpse | None = None

    def to_json(self) -> dict[str, Any]:
        """All but the name, as plain data."""
        found: dict[str, Any] = {"rejected": dict(self.rejected), "kept": self.kept}
        if self.skipped != inf:
            found["skipped"] = self.skipped
        if self.glimpse is not None:
            seen = self.glimpse
            found["glimpse"] = {"choice": seen.choice.flat(), "bound_s": seen.bound_s, "device_bytes": seen.device_bytes}
        return found

    @classmethod
    def from_json(cls, name: str, data: dict[str, Any]) -> Closed:
        """The inverse of `to_json`.

        Raises:
            KeyError, TypeError, ValueError: it is none.
        """
        seen = data.get("glimpse")
        glimpse = Glimpse(Choice.from_flat(seen["choice"]), seen["bound_s"], seen["device_bytes"]) if seen else None
        return cls(name, Counter(data["rejected"]), int(data["kept"]), float(data.get("skipped", inf)), glimpse)


class Closing:
    """Follows designs from their opening until the last of their layouts is accounted for.

    Args:
        known: designs closed before, by name.
    """

    def __init__(self, known: Iterable[Closed] = ()) -> None:
        self.known = {closed.name: closed for closed in known}
        self._open: dict[Design, tuple[Closed, list[int]]] = {}
        self._closed: list[Closed] = []

    def open(self, design: Design, count: int) -> Closed | None:
        """Begin with a design of `count` layouts; its account, if it was closed before."""
        found = Closed(name_of(design))
        if found.name in self.known:
            return self.known[found.name]
        self._open[design] = (found, [count])
        return None

    def glimpsed(self, design: Design, glimpse: Glimpse) -> None:
        """The fastest of a design, by its bounds."""
        if design in self._open:
            self._open[design][0].glimpse = glimpse

    def settle(self, design: Design, reason: str, count: int, skipped: float) -> None:
        """`count` layouts of a design are rejected, or kept where there is no reason; `skipped`: see `Closed`."""
        if design not in self._open:
            return
        found, left = self._open[design]
        if reason:
            found.rejected[reason] += count
        else:
            found.kept += count
        left[0] -= count
        if left[0] <= 0:
            found.skipped = skipped
            self._closed.append(found)
            del self._open[design]

    def take(self) -> list[Closed]:
        """Designs closed since they were last asked for."""
        found, self._closed = self._closed, []
        return found


__all__ = ["Closed", "Closing", "name_of"]
