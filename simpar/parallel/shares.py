"""Work shared out so that all take as long: layers over pipeline stages, micro-batches over replicas of unequal speed."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise, product
from math import floor, inf

Line = tuple[float, float]
"""Seconds that a step takes with no micro-batch, and with each more."""


def shared_microbatches(
    replicas: Sequence[int], total: int, lines: Sequence[Line], allowed: Callable[[int, int], bool]
) -> tuple[int, ...] | None:
    """Micro-batches of each replica of every kind, so that the slowest kind's step is the shortest; None where no whole numbers do.

    Args:
        replicas: of each kind.
        total: micro-batches of all of them.
        lines: of each kind.
        allowed: whether a kind's pipeline can run so many.

    >>> shared_microbatches((1, 1), 12, ((0.0, 1.0), (0.0, 2.0)), lambda kind, count: True)
    (8, 4)
    """
    # Equal times t give (t - base) / each micro-batches to a replica; those of all add up to the total.
    rate = sum(n / each for n, (_, each) in zip(replicas, lines, strict=True))
    at = (total + sum(n * base / each for n, (base, each) in zip(replicas, lines, strict=True))) / rate
    reach = 2 * max(replicas) + 2
    wanted = [floor((at - base) / each) for base, each in lines[:-1]]
    ranges = [range(max(w - reach, 1), w + reach + 1) for w in wanted]
    best: tuple[float, tuple[int, ...]] = (inf, ())
    for counts in product(*ranges):
        left = total - sum(n * m for n, m in zip(replicas[:-1], counts, strict=True))
        found = (*counts, left // replicas[-1])
        if left < replicas[-1] or left % replicas[-1] or not all(allowed(kind, m) for kind, m in enumerate(found)):
            continue
        slowest = max(base + each * m for (base, each), m in zip(lines, found, strict=True))
        best = min(best, (slowest, found))
    return best[1] or None


def shared_layers(costs: Sequence[Sequence[float]], ends: Sequence[float], most: Sequence[int]) -> tuple[int, ...] | None:
    """Layers of each stage, a run of them each, so that the slowest stage is the fastest and the others are as even as can be.

    Args:
        costs: seconds of every layer on each stage, float [stages][layers].
        ends: seconds that a stage takes beside its layers (embedding, head).
        most: layers that a stage has memory for.

    Returns:
        None where the stages have no room for all layers.

    >>> shared_layers([[1.0] * 9, [2.0] * 9], [0.0, 0.0], [9, 9])
    (6, 3)
    """
    sums = [[0.0, *accumulate(row)] for row in costs]
    slowest = _slowest(sums, ends, most)
    if slowest == inf:
        return None
    limit = slowest * (1.0 + 1e-12)
    # A stage ends no later than if all before it take as much as they can, no earlier than those behind it need.
    latest = _reached(sums, ends, most, slowest * (1.0 + 1e-9))
    turned = [[row[-1] - value for value in reversed(row)] for row in reversed(sums)]
    behind = _reached(turned, ends[::-1], most[::-1], slowest * (1.0 + 1e-9))
    layers = len(costs[0])
    earliest = [max(layers - reach, 0) for reach in reversed([0, *behind[:-1]])]
    spread, begins = {0: 0.0}, list[dict[int, int]]()
    for stage, row in enumerate(sums):
        after, begin = dict[int, float](), dict[int, int]()
        for end in range(earliest[stage], latest[stage] + 1):
            for first in range(max(end - most[stage], 0), end + 1):
                seconds = ends[stage] + row[end] - row[first]
                if first in spread and seconds <= limit and (value := spread[first] + seconds**2) < after.get(end, inf):
                    after[end], begin[end] = value, first
        spread = after
        begins.append(begin)
    cuts = [layers]
    for begin in reversed(begins):
        cuts.append(begin[cuts[-1]])
    return tuple(b - a for a, b in pairwise(cuts[::-1]))


def _slowest(sums: Sequence[Sequence[float]], ends: Sequence[float], most: Sequence[int]) -> float:
    """The least seconds of the slowest stage; infinite where the stages have no room."""
    low, high = 0.0, 2.0 * (sum(ends) + sum(row[-1] for row in sums))
    if _reached(sums, ends, most, high)[-1] < len(sums[0]) - 1:
        return inf
    while high - low > 1e-13 * high:
        middle = (low + high) / 2.0
        low, high = (low, middle) if _reached(sums, ends, most, middle)[-1] == len(sums[0]) - 1 else (middle, high)
    return high


def _reached(sums: Sequence[Sequence[float]], ends: Sequence[float], most: Sequence[int], limit: float) -> list[int]:
    """Layers up to the end of each stage if every one takes as many as it can within `limit`; -1 where one takes too long empty."""
    found, at = [], 0
    for row, beside, room in zip(sums, ends, most, strict=True):
        fits = at >= 0 and beside <= limit
        at = min(at + room, bisect_right(row, limit - beside + row[at]) - 1) if fits else -1
        found.append(at)
    return found
