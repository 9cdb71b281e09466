"""Who follows a search while it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from simpar.searching.account import Progress
from simpar.searching.closed import Closing
from simpar.searching.incumbents import Scored


@dataclass(frozen=True, slots=True)
class Followers:
    """Whom a search tells what.

    Attributes:
        on_scored: every simulated layout.
        on_progress: how far it is.
        closing: follows designs until they are closed, and knows those that were closed before; none = nobody asks.
    """

    on_scored: Callable[[Scored], None] | None = None
    on_progress: Callable[[Progress], None] | None = None
    closing: Closing | None = None


__all__ = ["Followers"]
