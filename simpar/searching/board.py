"""What layouts must beat, told by one process to others, any of which may die at any moment."""

from __future__ import annotations

from typing import Any, Final

from simpar.searching.incumbents import Limits

_WIDTH: Final = 9
"""Numbers of a `Limits`: two values and the degrees and micro-batch of a design."""
_NOBODY: Final = -1
_POINTS: Final = 512
"""Layouts of a front that are told at most; the fastest."""


class Board:
    """What layouts must beat, written by one process and read by others."""

    def __init__(self, context: Any) -> None:
        self._numbers = context.RawArray("d", 2 * _WIDTH)
        # Of a front: its number, how many points, the points, its number again.
        self._front = context.RawArray("d", 2 * _POINTS + 3)
        self._read, self._seen, self._points = Limits(), 0.0, Limits().points
        self.write(self._read)

    def write(self, limits: Limits) -> None:
        """Replace it. It stands there twice: a reader that finds both alike has not read it half written."""
        row = (limits.value, limits.other, *(limits.of or (_NOBODY,) * (_WIDTH - 2)))
        if tuple(self._numbers[:_WIDTH]) != row:
            self._numbers[:_WIDTH] = row
            self._numbers[_WIDTH:] = row
        points = limits.points[:_POINTS]
        if points != self._points:
            self._points, number = points, self._front[0] + 1.0
            self._front[0] = number
            self._front[1] = len(points)
            self._front[2 : 2 + 2 * len(points)] = [x for point in points for x in point]
            self._front[-1] = number

    def read(self) -> Limits:
        """The last that was whole."""
        second = tuple(self._numbers[_WIDTH:])
        if second == tuple(self._numbers[:_WIDTH]):
            value, other, *of = second
            self._read = Limits(value, other, None if of[0] == _NOBODY else tuple(map(int, of)), self._told())
        return self._read

    def _told(self) -> tuple[tuple[float, float], ...]:
        """The last front that was whole."""
        number = self._front[-1]
        if number != self._seen:
            flat = self._front[2 : 2 + 2 * int(self._front[1])]
            if self._front[0] == number:
                self._seen, self._points = number, tuple(zip(flat[::2], flat[1::2], strict=True))
        return self._points


__all__ = ["Board"]
