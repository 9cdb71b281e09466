"""Which intervals are steps like the others: warm-up dropped; evaluation, checkpoints, skipped updates and stalls set apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median, quantiles
from typing import Any, Final

from simpar.errors import InputError
from simpar.runlogs.records import Interval, LogReading

_MAD: Final = 1.4826
"""Median absolute deviation -> standard deviation of a normal spread."""
_WARM: Final = (0.05, 6.0)
"""Intervals at the start belong to the warm-up while they lie above the median by this share and as many deviations."""
_STALL: Final = (0.3, 8.0)
"""The same for a stall in between."""
_MOST_WARM: Final = 0.5
"""Share of a segment that can be warm-up."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """Seconds of the steps that count.

    Attributes:
        count: figures; an interval's mean is one.
        steps: that they cover.
    """

    count: int
    steps: int
    least: float
    p10: float
    median: float
    p90: float
    most: float
    mean: float

    @classmethod
    def of(cls, values: Sequence[float], steps: int) -> Distribution:
        """Of at least one value."""
        tenths = quantiles(values, n=10, method="inclusive") if len(values) > 1 else [values[0]] * 9
        return cls(len(values), steps, min(values), tenths[0], median(values), tenths[8], max(values), sum(values) / len(values))

    def as_json(self) -> dict[str, Any]:
        """Flat, seconds rounded to microseconds."""
        names = ("least", "p10", "median", "p90", "most", "mean")
        return {"count": self.count, "steps": self.steps, **{f"{n}_s": round(getattr(self, n), 6) for n in names}}


@dataclass
class Steady:
    """The steps of a run.

    Attributes:
        steps: distribution of those that count.
        by_rank: rank -> median seconds, where ranks print their own.
        apart: what was set apart -> (intervals, extra seconds over the median).
        warm_up: intervals dropped at the start of each segment.
        pause_s: wall time between lines that no interval holds (stopped clocks: evaluation, checkpoints), where lines have a clock.
    """

    steps: Distribution
    by_rank: dict[int, float] = field(default_factory=dict)
    apart: dict[str, tuple[int, float]] = field(default_factory=dict)
    warm_up: int = 0
    pause_s: float | None = None


def in_seconds(reading: LogReading, tokens: float, sequences: float, gpus: int) -> list[Interval]:
    """The intervals with seconds per step; rates are turned into times of a step of `tokens` in `sequences` on `gpus` GPUs."""
    found = []
    for i in reading.intervals:
        if i.seconds is not None:
            found.append(i)
        elif i.tokens_per_s_per_gpu:
            found.append(replace(i, seconds=tokens / (i.tokens_per_s_per_gpu * gpus)))
        elif i.samples_per_s:
            found.append(replace(i, seconds=sequences / i.samples_per_s))
    return found


def steady(intervals: Sequence[Interval], file: str) -> Steady:
    """The steps that count.

    Raises:
        InputError: nothing is left after the start.
    """
    per_step = _slowest_rank(intervals)
    warm, rest = _without_warm_up(per_step)
    kept: list[tuple[Interval, float]] = []
    special: list[tuple[str, Interval, float]] = []
    for interval, seconds in rest:
        what = next((w for w in ("checkpoint", "evaluation", "profiler", "skipped") if w in interval.contains), "")
        if what:
            special.append((what, interval, seconds))
        else:
            kept.append((interval, seconds))
    if not kept:
        rule = f"has {len(per_step)} line(s) of steps, all within start-up, evaluation, checkpoints or skipped updates"
        raise InputError(f"{file}: {rule}; expected at least two more intervals of plain steps")
    limit = _limit([s for _, s in kept], _STALL)
    plain = [(i, s) for i, s in kept if s <= limit]
    special += [("stall", i, s) for i, s in kept if s > limit]
    middle = median(s for _, s in plain)
    apart: dict[str, tuple[int, float]] = {}
    for what, interval, seconds in special:
        count, extra = apart.get(what, (0, 0.0))
        apart[what] = (count + 1, extra + max(seconds - middle, 0.0) * interval.count)
    steps = Distribution.of([s for _, s in plain], sum(i.count for i, _ in plain))
    return Steady(steps, _by_rank(intervals, {i.step for i, _ in plain}), apart, warm, _pauses(per_step))


def _slowest_rank(intervals: Sequence[Interval]) -> list[tuple[Interval, float]]:
    """One figure a step: where several ranks print theirs, the mean, as every one of them holds the whole step."""
    groups: dict[tuple[int, int], list[Interval]] = {}
    for i in intervals:
        if i.seconds is not None:
            groups.setdefault((i.segment, i.step), []).append(i)
    return [
        (replace(g[0], contains=frozenset().union(*(i.contains for i in g))), sum(i.seconds or 0.0 for i in g) / len(g))
        for g in groups.values()
    ]


def _limit(values: Sequence[float], rule: tuple[float, float]) -> float:
    middle = median(values)
    spread = _MAD * median(abs(v - middle) for v in values)
    return middle + max(rule[0] * middle, rule[1] * spread)


def _without_warm_up(steps: list[tuple[Interval, float]]) -> tuple[int, list[tuple[Interval, float]]]:
    """(intervals dropped, the rest): the first of each segment, and what follows it until steps are like the later ones."""
    dropped, rest = 0, []
    for segment in dict.fromkeys(i.segment for i, _ in steps):
        mine = [(i, s) for i, s in steps if i.segment == segment]
        # The first line covers the start; a first line of a single step does not reset Megatron's clock, so the next holds it too.
        first = 1 if "start" in mine[0][0].contains else 0
        if first and mine[0][0].count == 1 and len(mine) > 2 and mine[1][0].count > 1:
            first = 2
        left = mine[first:]
        most = int(len(left) * _MOST_WARM)
        tail = [s for i, s in left[len(left) // 2 :] if not i.contains]
        limit = _limit(tail, _WARM) if len(tail) > 2 else float("inf")
        skip = 0
        while skip < most and left[skip][1] > limit:
            skip += 1
        dropped += first + skip
        rest += left[skip:]
    return dropped, rest


def _by_rank(intervals: Sequence[Interval], steps: set[int]) -> dict[int, float]:
    ranks: dict[int, list[float]] = {}
    for i in intervals:
        if i.rank is not None and i.seconds is not None and i.step in steps:
            ranks.setdefault(i.rank, []).append(i.seconds)
    return {rank: median(values) for rank, values in sorted(ranks.items())} if len(ranks) > 1 else {}


def _pauses(steps: Sequence[tuple[Interval, float]]) -> float | None:
    total, known = 0.0, False
    for (before, _), (interval, seconds) in pairwise(steps):
        if interval.segment == before.segment and interval.wall_s is not None and before.wall_s is not None:
            known = True
            between = interval.wall_s - before.wall_s - seconds * interval.count
            # A stamp has whole seconds in older logs.
            total += between if between > max(1.5, 0.1 * seconds * interval.count) else 0.0
    return total if known else None
