"""The best layout of another mesh or micro-batch than the winner's, and what would have to change for it to win."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from simpar.result.result import Result
from simpar.searching.choice import Choice
from simpar.searching.find import Found


@dataclass(frozen=True)
class RunnerUp:
    """The next design.

    Attributes:
        choice, result: its best layout.
        slower_by: of the step time, as a fraction of the winner's.
        differs_in: axis -> (winner's, its).
        would_win_if: see `turning_points`; empty where time does not decide.
        proven: it is the best of all other meshes and micro-batches, not only the best found.
    """

    choice: Choice
    result: Result
    slower_by: float
    differs_in: dict[str, tuple[Any, Any]]
    would_win_if: dict[str, float]
    proven: bool

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "text": str(self.choice), "choice": self.choice.flat(), "step_time_s": self.result.step_time_s,
            "peak_memory_bytes": self.result.worst_rank.device_bytes, "slower_by": self.slower_by,
            "differs_in": {axis: list(pair) for axis, pair in self.differs_in.items()}, "would_win_if": self.would_win_if,
            "proven": self.proven,
        }  # fmt: skip


def runner_up(found: Found, best: Result, winner: Choice, simulated: Callable[[Choice], Result]) -> RunnerUp | None:
    """The best that was found beside the winner's design.

    Args:
        found: the search of the winner's cluster size.
        best, winner: the winner.
        simulated: the result of a layout.
    """
    rest = [s for s in found.best if s.choice.mesh_key != winner.mesh_key]
    if not rest:
        return None
    choice = min(rest, key=lambda s: s.key).choice
    result = simulated(choice)
    # Where it is faster, the winner was preferred for being simpler or for another metric.
    behind = result.step_time_s > best.step_time_s
    turns = turning_points(best, result) if behind and not found.wish.by_memory else {}
    return RunnerUp(choice, result, result.step_time_s / best.step_time_s - 1.0, differences(winner, choice), turns, found.finished)


_OF_DEGREE = {"etp": "ep", "cp_style": "cp"}
"""Axis -> the degree without which it follows from the others or does nothing."""


def differences(a: Choice, b: Choice) -> dict[str, tuple[Any, Any]]:
    """Axis -> (value of a, value of b) where they differ; without axes that mean nothing at a degree of 1."""
    mine, theirs = a.flat(), b.flat()
    idle = {axis for axis, degree in _OF_DEGREE.items() if mine[degree] == 1 or theirs[degree] == 1}
    return {name: (mine[name], theirs[name]) for name in mine if mine[name] != theirs[name] and name not in idle}


def turning_points(best: Result, other: Result) -> dict[str, float]:
    """Category -> factor on its seconds in both layouts at which `other` would be as fast as `best`, nearest first.

    To first order: a category's seconds on the compute streams scale, everything else stays. Factors below 0.1 or above 10 are
    left out.
    """
    behind = other.step_time_s - best.step_time_s
    found: dict[str, float] = {}
    for name in {*best.breakdown, *other.breakdown}:
        more = other.breakdown.get(name, 0.0) - best.breakdown.get(name, 0.0)
        if more and behind:
            factor = 1.0 - behind / more
            if 0.1 <= factor <= 10.0:
                found[name] = factor
    return dict(sorted(found.items(), key=lambda pair: (abs(pair[1] - 1.0), pair[0]))[:4])


LEAST_SHARE: Final = 0.001
"""Of the step: categories that differ by less are no reason."""


@dataclass(frozen=True)
class Trade:
    """What a layout costs and saves against the best.

    Attributes:
        step_time_s, peak_memory_bytes, bubble_fraction: its own less the best's.
        by_category_s: category of time -> its seconds less the best's, the widest three, widest first.
    """

    step_time_s: float
    peak_memory_bytes: float
    bubble_fraction: float
    by_category_s: dict[str, float]


def trade(best: Result, other: Result) -> Trade:
    """Why `other` is not the best, and what it would save."""
    names = {*best.breakdown, *other.breakdown}
    more = {name: other.breakdown.get(name, 0.0) - best.breakdown.get(name, 0.0) for name in names}
    reasons = sorted((n for n in names if abs(more[n]) > LEAST_SHARE * best.step_time_s), key=lambda n: (-abs(more[n]), n))
    memory = other.worst_rank.device_bytes - best.worst_rank.device_bytes
    bubble = other.bubble_fraction - best.bubble_fraction
    return Trade(other.step_time_s - best.step_time_s, memory, bubble, {name: more[name] for name in reasons[:3]})


def waterfalls(best: Result, other: Result) -> list[tuple[str, float, float]]:
    """(entry, seconds of the best, seconds of the other), every entry that either has."""
    mine, theirs = dict(best.waterfall()), dict(other.waterfall())
    return [(name, mine.get(name, 0.0), theirs.get(name, 0.0)) for name in {**mine, **theirs}]


__all__ = ["RunnerUp", "Trade", "differences", "runner_up", "trade", "turning_points", "waterfalls"]
