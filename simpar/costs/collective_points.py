"""Collectives measured on this very machine: exact sizes as measured, others between them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from math import log

from simpar.costs.price import Price, Provenance
from simpar.specs.collective_constants import MeasuredCollective

_SAME = 1.0 + 1e-6


@dataclass(frozen=True, slots=True)
class MeasuredTimes:
    """Points by (collective, ranks), each list by size."""

    tables: dict[tuple[str, int], tuple[MeasuredCollective, ...]]

    @classmethod
    def of(cls, points: Sequence[MeasuredCollective]) -> MeasuredTimes:
        """The points sorted."""
        keys = {(p.collective, p.ranks) for p in points}
        return cls({k: tuple(sorted((p for p in points if (p.collective, p.ranks) == k), key=lambda p: p.bytes)) for k in keys})

    def has(self, collective: str, ranks: int) -> bool:
        """Whether that collective was measured on as many ranks."""
        return (collective, ranks) in self.tables

    def _around(self, collective: str, ranks: int, bytes_: float) -> tuple[MeasuredCollective, MeasuredCollective, float]:
        """The neighbours of a size and how far between them it lies (0..1 on a logarithmic scale)."""
        points = self.tables[collective, ranks]
        at = bisect_left([p.bytes for p in points], bytes_ / _SAME)
        if at == len(points) or at == 0 or points[at].bytes <= bytes_ * _SAME:
            same = points[min(at, len(points) - 1)]
            return same, same, 0.0
        left, right = points[at - 1], points[at]
        return left, right, log(bytes_ / left.bytes) / log(right.bytes / left.bytes)

    def price(self, collective: str, ranks: int, bytes_: float) -> Price:
        """Seconds: a power law between neighbours, the largest one's rate above, the smallest one's time below."""
        left, right, share = self._around(collective, ranks, bytes_)
        s = left.seconds ** (1.0 - share) * right.seconds**share
        exact = left is right and left.bytes / _SAME <= bytes_ <= left.bytes * _SAME
        if left is right and bytes_ > left.bytes * _SAME:
            s *= bytes_ / left.bytes
        spread = max(left.spread, right.spread)
        kind = Provenance.MEASURED if exact else Provenance.INTERPOLATED
        return Price(s, s * (1.0 - spread), s * (1.0 + spread), kind, ((f"{collective}/measured", s),))

    def cores(self, collective: str, ranks: int, bytes_: float) -> float:
        """Cores that a rank keeps busy."""
        left, right, share = self._around(collective, ranks, bytes_)
        return left.cores + share * (right.cores - left.cores)
