"""What a search says: the best layouts as `simulate` sees them, ties, what the runner-up lacks, the account, as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import Any

from simpar.result.result import Result
from simpar.search.find import Found
from simpar.search.incumbents import Scored
from simpar.search.objective import Measure
from simpar.search.parts import measure_of
from simpar.search.pricing import Pricing
from simpar.simulate import simulate

LARGEST_TIE = 0.02
"""Layouts further apart than this, relatively, are told apart whatever the uncertainty."""


@dataclass(frozen=True)
class Candidate:
    """A layout of the answer.

    Attributes:
        scored: as the search saw it.
        result: as `simulate` sees it.
        metrics: simple metrics.
        tied: with the best, within the model's uncertainty.
    """

    scored: Scored
    result: Result
    metrics: dict[str, float]
    tied: bool

    def to_json(self) -> dict[str, Any]:
        """The object of `simulate`, and how the search got there."""
        return {
            **self.result.to_json(), "choice": self.scored.choice.flat(), "text": str(self.scored.choice), "tied": self.tied,
            "metrics": self.metrics, "value": self.scored.value,
        }  # fmt: skip


@dataclass(frozen=True)
class Answer:
    """The whole answer of one search (or of one over several cluster sizes)."""

    candidates: tuple[Candidate, ...]
    found: tuple[Found, ...]
    runner_up: dict[str, Any] | None

    @property
    def best(self) -> Candidate | None:
        """What to run."""
        return self.candidates[0] if self.candidates else None

    @property
    def size(self) -> int:
        """Layouts in all spaces."""
        return sum(f.size for f in self.found)

    @property
    def gap(self) -> float | None:
        """The widest gap that could matter."""
        gaps = [f.gap for f in self.found if f.gap is not None]
        return max(gaps, default=None) if gaps else None

    @property
    def finished(self) -> bool:
        """Nothing was left out."""
        return all(f.finished for f in self.found)

    def counts(self, what: str) -> dict[str, int]:
        """rejected or evaluated, over all spaces, largest first."""
        total: dict[str, int] = {}
        for found in self.found:
            for name, count in getattr(found.account, what).items():
                total[name] = total.get(name, 0) + count
        return dict(sorted(((n, c) for n, c in total.items() if c), key=lambda pair: -pair[1]))

    def to_json(self) -> dict[str, Any]:
        """The public object, DESIGN section 7."""
        wish = self.found[0].wish if self.found else None
        return {
            "best": [c.to_json() for c in self.candidates], "optimality_gap": self.gap, "space_size": self.size,
            "rejected": self.counts("rejected"), "evaluated": self.counts("evaluated"),
            "kept": sum(f.account.kept for f in self.found),
            "objective": wish.objective if wish else None, "robust": bool(wish and wish.robust),
            "constraints": [str(c) for c in wish.constraints] if wish else [], "front": bool(wish and wish.front),
            "finished": self.finished, "seconds": sum(f.seconds for f in self.found),
            "num_gpus": [f.space.template.world_size for f in self.found], "runner_up": self.runner_up,
        }  # fmt: skip


def answer(found: list[Found]) -> Answer:
    """Interpret what was found: simulate the best, find ties, put the simplest of them first, explain the runner-up."""
    wish = found[0].wish
    pairs: list[tuple[float, Scored, Found, Measure]] = []
    for each in found:
        if each.best:
            measure = measure_of(each.space, wish, Pricing(each.space))
            for scored in each.best:
                value = scored.value
                if len(found) > 1:
                    value = measure.value(wish.metric, scored.step_time_s, scored.device_bytes)
                pairs.append((value, scored, each, measure))
    pairs.sort(key=lambda p: (p[0], p[1].key))
    if not wish.front:
        del pairs[wish.keep :]
    results = [simulate(p[1].choice.scenario(p[2].space.template)) for p in pairs]
    ties = [_tied(results[0], r, pairs[0][0], p[0]) and not wish.front for p, r in zip(pairs, results, strict=True)]
    candidates = [
        Candidate(p[1], r, p[3].metrics(r.step_time_s, r.worst_rank.device_bytes), tie)
        for p, r, tie in zip(pairs, results, ties, strict=True)
    ]
    tied = sorted((c for c in candidates if c.tied), key=lambda c: (c.scored.choice.complexity, c.scored.value))
    rest = [c for c in candidates if not c.tied]
    ordered = (*tied, *rest)
    return Answer(ordered, tuple(found), _runner_up(ordered) if not wish.front else None)


def _tied(best: Result, other: Result, value: float, other_value: float) -> bool:
    """Whether the difference of two layouts is within the model's uncertainty of that difference.

    Errors of one category are common to both layouts (a slow network slows both), so only the part by which the category's
    share differs counts: the widths of the two 80 % intervals are subtracted category by category, then added in quadrature.
    """
    if other is best or value == other_value:
        return True
    if abs(other_value - value) > LARGEST_TIE * abs(value):
        return False
    mine, theirs = dict(best.step_interval.dominated_by), dict(other.step_interval.dominated_by)
    spread = sqrt(sum((mine.get(n, 0.0) - theirs.get(n, 0.0)) ** 2 for n in {*mine, *theirs}))
    return abs(other.step_time_s - best.step_time_s) <= spread


def _runner_up(candidates: tuple[Candidate, ...]) -> dict[str, Any] | None:
    """The best layout of another mesh or schedule, and what would have to change for it to win."""
    if not candidates:
        return None
    best = candidates[0]
    first = best.scored.choice

    def design(c: Candidate) -> tuple[object, ...]:
        g, p = c.scored.choice.group, c.scored.choice.pipeline
        return (g.tp, g.cp, g.pp, g.ep, g.etp, c.scored.choice.micro_batch_size, p.schedule, p.virtual_stages)

    others = [c for c in candidates if design(c) != design(best)]
    if not others:
        return None
    other = min(others, key=lambda c: c.scored.value)
    return {
        "text": str(other.scored.choice), "choice": other.scored.choice.flat(),
        "slower_by": other.result.step_time_s / best.result.step_time_s - 1.0,
        "differs_in": _differences(first.flat(), other.scored.choice.flat()),
        "would_win_if": turning_points(best.result, other.result),
    }  # fmt: skip


def _differences(a: dict[str, Any], b: dict[str, Any]) -> dict[str, list[Any]]:
    return {name: [a[name], b[name]] for name in a if a[name] != b[name]}


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
    return dict(sorted(found.items(), key=lambda pair: abs(pair[1] - 1.0))[:4])


def waterfalls(best: Result, other: Result) -> list[tuple[str, float, float]]:
    """(entry, seconds of the best, seconds of the other), every entry that either has."""
    mine, theirs = dict(best.waterfall()), dict(other.waterfall())
    return [(name, mine.get(name, 0.0), theirs.get(name, 0.0)) for name in {**mine, **theirs}]


__all__ = ["Answer", "Candidate", "answer", "turning_points", "waterfalls"]
