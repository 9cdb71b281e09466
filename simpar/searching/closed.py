"""Designs that a search is through with: what a search in a store keeps of a part that is not done yet.

A part of a large space takes many seconds. Inside it the work is done design by design (a pipeline in a variant of a mesh), each
in milliseconds; once every layout of a design is simulated or rejected, better incumbents cannot change that. So a search that
is killed and resumed passes over the designs that it had closed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass, field

from simpar.searching.account import Account, Glimpse
from simpar.searching.incumbents import Scored
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
        account: of its layouts; what the whole search had skipped up to here; its fastest layout by bounds.
    """

    name: str
    account: Account = field(default_factory=Account)


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
            self._open[design][0].account.glimpses = [glimpse]

    def settle(self, design: Design, reason: str, count: int, skipped: float) -> None:
        """`count` layouts of a design are rejected, or kept where there is no reason; `skipped`: see `Account`."""
        if design not in self._open:
            return
        found, left = self._open[design]
        if reason:
            found.account.rejected[reason] += count
        else:
            found.account.kept += count
        left[0] -= count
        if left[0] <= 0:
            found.account.skipped = skipped
            self._closed.append(found)
            del self._open[design]

    def take(self) -> list[Closed]:
        """Designs closed since they were last asked for."""
        found, self._closed = self._closed, []
        return found


@dataclass(frozen=True, slots=True)
class Followers:
    """Whom a search tells what.

    Attributes:
        on_scored: every simulated layout.
        on_progress: what nothing that is left ranks before.
        closing: follows designs until they are closed, and knows those that were closed before; none = nobody asks.
    """

    on_scored: Callable[[Scored], None] | None = None
    on_progress: Callable[[float], None] | None = None
    closing: Closing | None = None


__all__ = ["Closed", "Closing", "Followers", "name_of"]
