"""What layouts must beat, told by one process to others, any of which may die at any moment."""

from __future__ import annotations

from typing import Any, Final

from simpar.search.incumbents import Limits

_WIDTH: Final = 9
"""Numbers of a `Limits`: two values and the degrees and micro-batch of a design."""
_NOBODY: Final = -1


class Board:
    """What layouts must beat, written by one process and read by others."""

    def __init__(self, context: Any) -> None:
        self._numbers = context.RawArray("d", 2 * _WIDTH)
        self._read = Limits()
        self.write(self._read)

    def write(self, limits: Limits) -> None:
        """Replace it. It stands there twice: a reader that finds both alike has not read it half written."""
        row = (limits.value, limits.other, *(limits.of or (_NOBODY,) * (_WIDTH - 2)))
        if tuple(self._numbers[:_WIDTH]) != row:
            self._numbers[:_WIDTH] = row
            self._numbers[_WIDTH:] = row

    def read(self) -> Limits:
        """The last that was whole."""
        second = tuple(self._numbers[_WIDTH:])
        if second == tuple(self._numbers[:_WIDTH]):
            value, other, *of = second
            self._read = Limits(value, other, None if of[0] == _NOBODY else tuple(map(int, of)))
        return self._read


__all__ = ["Board"]
