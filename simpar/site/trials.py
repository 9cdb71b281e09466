"""Which run to try next: the one after which the best known layout is expected to be better by most.

Every candidate's step time is a posterior: the site's factors and kinds (`posterior`), learned from the trials so far, and what is
left of each layout; alike layouts share their kinds' part. A trial is worth what it lets one choose: the expected fall of the
smallest expected step time once its outcome is known (the knowledge gradient; Frazier et al. 2009). It holds both a try of what may
be fastest and of what tells most about the others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from simpar.site.observed import Line
from simpar.site.posterior import FACTORS, Evidence, FloatArray, Posterior, Prior, learn
from simpar.specs.kinds import UNKNOWN, Kind, interpolated

NOISE: Final = 0.01
"""Standard deviation of the logarithm of a measured step: the same layout measured again."""
DRAWS: Final = 64
"""Outcomes of a trial that are looked at: quantiles of its normal distribution."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A layout that could be tried.

    Attributes:
        name: of the layout.
        lines: its predicted step as straight lines in the factors.
        axes: name -> value of what tells layouts apart.
        kind: of run (`simpar.model.kind`).
    """

    name: str
    lines: tuple[Line, ...]
    axes: Mapping[str, Any]
    kind: Kind = UNKNOWN


@dataclass(frozen=True, slots=True)
class Outcome:
    """A trial that was run: its step in seconds; None where it failed (out of memory, a crash)."""

    name: str
    seconds: float | None


@dataclass(frozen=True, slots=True)
class Belief:
    """What is known of every candidate after the trials.

    Attributes:
        seconds: median step [candidates].
        covariance: of its logarithm [candidates, candidates].
        tried: whether it was run [candidates]. failed: whether it then did not work.
    """

    seconds: FloatArray
    covariance: FloatArray
    tried: np.ndarray[Any, np.dtype[np.bool_]]
    failed: np.ndarray[Any, np.dtype[np.bool_]]

    @property
    def best(self) -> int:
        """The candidate expected to be fastest."""
        return int(np.argmin(np.where(self.failed, np.inf, self.seconds)))


def believe(candidates: Sequence[Candidate], outcomes: Sequence[Outcome], prior: Prior) -> Belief:
    """The posterior of all candidates' steps, given what the trials measured."""
    place = {candidate.name: index for index, candidate in enumerate(candidates)}
    done = [(place[o.name], o.seconds) for o in outcomes if o.name in place and o.seconds]
    lost = {place[o.name] for o in outcomes if o.name in place and not o.seconds}
    runs = Evidence.of(
        [[(line.weight, line.parts, line.rest) for line in c.lines] for c in candidates], [1.0] * len(candidates),
        np.zeros(FACTORS), [c.kind for c in candidates],
    )  # fmt: skip
    tried = np.zeros(len(candidates), dtype=bool)
    tried[[index for index, _ in done] + sorted(lost)] = True
    failed = np.zeros(len(candidates), dtype=bool)
    failed[sorted(lost)] = True
    seen = np.array([index for index, _ in done], dtype=np.intp)
    measured = np.log([seconds for _, seconds in done])
    given = runs.only(seen)
    found = learn(Evidence(given.parts, given.rest, given.weight, measured, given.kinds, given.at), prior)
    medians, slopes, new = _at(runs, found)
    shared = slopes @ found.covariance @ slopes.T + new
    left = found.residual**2 * np.eye(len(candidates))
    covariance = shared + left
    if len(seen):
        # What is left of the tried layouts is known now.
        noise = NOISE**2 * np.eye(len(seen))
        gain = np.linalg.solve(left[np.ix_(seen, seen)] + noise, left[seen]).T
        medians = medians + gain @ (measured - medians[seen])
        both = shared - gain @ shared[seen] - shared[:, seen] @ gain.T + gain @ shared[np.ix_(seen, seen)] @ gain.T
        covariance = both + left - gain @ left[seen]
    return Belief(np.exp(medians), (covariance + covariance.T) / 2.0, tried, failed)


def _at(runs: Evidence, found: Posterior) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Log medians, slopes in the posterior's parameters, covariance of what no run of their kind has told, of every candidate."""
    alike, left = interpolated(runs.kinds, found.kinds, found.reach)
    log_s, slopes = runs.log_seconds(found.theta, alike)
    slope = (runs.weight[..., None] * slopes).sum(-2)
    scaled = found.kind * slope[:, :FACTORS].sum(-1)
    return (runs.weight * log_s).sum(-1), slope, left * np.outer(scaled, scaled)


def worth(belief: Belief) -> FloatArray:
    """Expected fall of the smallest expected step, as a share of it, if a candidate is run next [candidates]; 0 for those run."""
    usable = ~belief.failed
    log_s, count = np.log(belief.seconds), len(belief.seconds)
    quantiles = (np.arange(DRAWS) + 0.5) / DRAWS
    normal = _normal_quantiles(quantiles)
    now = log_s[usable].min()
    found = np.zeros(count)
    for index in np.flatnonzero(~belief.tried):
        variance = belief.covariance[index, index] + NOISE**2
        moved = belief.covariance[index] / math.sqrt(variance)
        after = log_s[usable][None, :] + normal[:, None] * moved[usable][None, :]
        found[index] = max(now - float(after.min(axis=1).mean()), 0.0)
    return found


def _normal_quantiles(shares: FloatArray) -> FloatArray:
    from statistics import NormalDist

    return np.array([NormalDist().inv_cdf(float(share)) for share in shares])


def next_trial(belief: Belief) -> tuple[int, float] | None:
    """(Candidate worth most, what it is worth as a share of the step); none where all were run.

    The first is the one expected to be fastest: whatever is found later has to beat it.
    """
    if belief.tried.all():
        return None
    value = worth(belief)
    index = int(np.argmax(np.where(belief.tried, -1.0, value + 1e-9 / belief.seconds))) if belief.tried.any() else belief.best
    return index, float(value[index])
