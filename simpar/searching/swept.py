"""Layouts of one program: which of their prices are the same, whose step time is known, and what follows from it for others."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from simpar.program.program import FloatArray, IntArray


@dataclass(frozen=True)
class Columns:
    """Which of a program's prices are the same by construction.

    Attributes:
        parts: (memo scope, number of its description) of each distinct price.
        keys: one price key of each.
        index: int array [price keys], the distinct price of each.
    """

    parts: tuple[tuple[str, int], ...]
    keys: tuple[object, ...]
    index: IntArray


class Swept:
    """Layouts of one program whose step time is known, and what follows from it for others.

    Attributes:
        rows: float array [known, prices].
        values: step times [known].
    """

    def __init__(self, width: int) -> None:
        self.rows = np.zeros((0, width))
        self.values = np.zeros(0)

    def sort_out(self, prices: FloatArray) -> tuple[IntArray, dict[int, int]]:
        """Rows of `prices` to sweep, and for the others the position (after they are added) of one that undercuts it."""
        chosen: list[int] = []
        below: dict[int, int] = {}
        count = len(self.rows)
        for row in np.argsort(prices.sum(axis=1), kind="stable").tolist():
            under = np.flatnonzero((self.rows <= prices[row]).all(axis=1))
            if len(under):
                below[row] = int(under[np.argmax(self.values[under])])
                continue
            inside = (prices[chosen] <= prices[row]).all(axis=1)
            if inside.any():
                below[row] = count + int(np.argmax(inside))
            else:
                chosen.append(row)
        return np.array(chosen, dtype=np.int64), below

    def bound(self, prices: FloatArray) -> float:
        """The longest of what is known to be undercut by nothing of these prices, float array [prices]."""
        return float(self.values[(self.rows <= prices).all(axis=1)].max(initial=0.0))

    def add(self, rows: FloatArray, values: FloatArray) -> None:
        """Remember swept rows."""
        self.rows = np.concatenate([self.rows, rows])
        self.values = np.concatenate([self.values, values])
