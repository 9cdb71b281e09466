"""Sets of half-open time intervals, sorted and disjoint."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The least sorted disjoint intervals that cover `intervals`."""
    found: list[Interval] = []
    for start, end in sorted(i for i in intervals if i[1] > i[0]):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def length(intervals: Sequence[Interval]) -> float:
    """Total length of disjoint `intervals`."""
    return sum(end - start for start, end in intervals)


def common(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """What two sorted disjoint sequences share."""
    found, i, j = [], 0, 0
    while i < len(first) and j < len(second):
        start, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if start < end:
            found.append((start, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return found


def inside(intervals: Sequence[Interval], moment: float) -> bool:
    """Whether `moment` lies in one of the sorted `intervals`."""
    at = bisect_right(intervals, (moment, float("inf"))) - 1
    return at >= 0 and moment < intervals[at][1]
