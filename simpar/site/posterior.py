"""What a few runs of a cluster say about its factors, given how much clusters differ.

Each run's predicted step is a straight line in the factors around the point that it was simulated at,

    T(theta) = sum_i part_i exp(theta_i + kind - at_i) + rest,     theta = log of (compute, memory, communication, host),

theta is multivariate t: most clusters are close to the published ones, a few are far off, and then runs that agree with each other
are followed all the way. What is off in one run is not all off in the next: `kind` is a Gaussian process over runs, those of like
jobs and layouts share it (`simpar.specs.kinds`), and its scale goes with the residual's.
log(measured / T) is Student-t distributed too: a run that contradicts all others moves little. How far a cluster is off (the
stretch of the prior) and how much its runs scatter (the scale of the likelihood) are unknown and summed over a grid; what is open
about a run (its readings) is summed as a mixture, and what the runs say of an open fact holds for the site's others too (`facts`):
expectation maximisation of a Dirichlet prior.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from simpar.specs.kinds import JITTER, UNKNOWN, Kind, Reach, correlation, interpolated

FloatArray = NDArray[np.float64]
FACTORS: Final = 4
"""Compute, memory, communication, host (`simpar.specs.calibration.SITE_FACTORS`)."""
FREEDOM: Final = 4.0
"""Degrees of freedom of the t: at 4 an outlier three scales away weighs a third of a run that agrees (Lange et al. 1989)."""
TENTH_OF_T: Final = 1.533
"""The t's 90 % quantile at four degrees of freedom."""
TENTH: Final = 1.2816
"""A normal distribution's."""
GRID: Final[FloatArray] = np.linspace(-2.0, 2.0, 5)
"""Standard deviations of log(scale) that are summed over."""
STRETCH: Final[FloatArray] = np.array([3.2820, 1.5324, 0.9443, 0.5545])
"""Equally likely factors on the prior's covariance: quantiles of 4 / chi^2 (4 degrees of freedom), so that it is a t of four."""
ROUNDS: Final = 40
ALONE: Final = 0.5
"""Runs' worth of belief that what a run leaves open is not what the site's other runs had (assumed)."""
AGAIN: Final = 4
"""Times that open facts and factors are settled in turn."""
CLOSE: Final = 1e-5
"""Change of a logarithm at which the mode is found."""


@dataclass(frozen=True, slots=True)
class Prior:
    """How clusters differ, as left-out sources show (`validation.tools.fit_prior`); scales of logarithms.

    Attributes:
        common: of one factor on everything.
        compute, memory, communication, host: of each factor beside it.
        kind: of the same between unlike runs of one cluster, in units of the residual's scale.
        reach: doublings between two jobs over which they stop being alike.
        layout_reach: doublings between two layouts over which they do.
        residual: median over sources of the t's scale of log(measured / predicted) of one source's runs.
        residual_spread: of the logarithm of that scale between sources.
    """

    common: float
    compute: float
    memory: float
    communication: float
    host: float
    kind: float
    reach: float
    layout_reach: float
    residual: float
    residual_spread: float

    @property
    def reaches(self) -> Reach:
        """How far runs are alike."""
        return Reach(self.reach, self.layout_reach)

    @property
    def covariance(self) -> FloatArray:
        """Of the logarithms of the four factors, before it is stretched [4, 4]."""
        own = np.diag(np.square([self.compute, self.memory, self.communication, self.host]))
        return np.asarray(own + self.common**2)

    @property
    def usual_covariance(self) -> FloatArray:
        """The same at the median stretch [4, 4]."""
        return self.covariance * float(np.median(STRETCH))


@dataclass(frozen=True, slots=True)
class Evidence:
    """Runs as straight lines in the factors; the second axis counts the readings of a run, weight 0 where there are fewer.

    Attributes:
        parts: seconds that each factor scales [runs, readings, 4], at theta = `at`.
        rest: seconds that none scales [runs, readings].
        weight: of each reading [runs, readings], adding up to 1 for a run.
        log_measured: [runs].
        kinds: what each run is of.
        at: logarithms of the factors that the parts hold for [4].
        facts: of each reading of each run, what it takes for true ("plan.recompute = full").
    """

    parts: FloatArray
    rest: FloatArray
    weight: FloatArray
    log_measured: FloatArray
    kinds: tuple[Kind, ...]
    at: FloatArray
    facts: tuple[tuple[tuple[str, ...], ...], ...] = ()

    @classmethod
    def of(
        cls,
        lines: Sequence[Sequence[tuple[float, Sequence[float], float]]],
        measured: Sequence[float] | FloatArray,
        at: FloatArray,
        kinds: Sequence[Kind] = (),
        facts: Sequence[Sequence[Sequence[str]]] = (),
    ) -> Evidence:
        """From (weight, parts, rest) of each run's readings and measured seconds; without `kinds` all are of one."""
        most = max((len(run) for run in lines), default=1)
        parts, rest, weight = np.zeros((len(lines), most, FACTORS)), np.ones((len(lines), most)), np.zeros((len(lines), most))
        for i, run in enumerate(lines):
            for j, (share, scaled, left) in enumerate(run):
                parts[i, j], rest[i, j], weight[i, j] = scaled, left, share
        weight /= np.maximum(weight.sum(1, keepdims=True), 1e-30)
        named = tuple(kinds) or (UNKNOWN,) * len(lines)
        known = tuple(tuple(tuple(reading) for reading in run) for run in facts) or ((),) * len(lines)
        return cls(parts, rest, weight, np.log(np.asarray(measured, dtype=float)), named, np.asarray(at, dtype=float), known)

    def __len__(self) -> int:
        return len(self.log_measured)

    def only(self, rows: Sequence[int] | NDArray[np.intp]) -> Evidence:
        """Some of the runs."""
        index = np.asarray(rows, dtype=np.intp)
        kinds, facts = tuple(self.kinds[i] for i in index), tuple(self.facts[i] for i in index)
        return Evidence(self.parts[index], self.rest[index], self.weight[index], self.log_measured[index], kinds, self.at, facts)

    def believing(self, facts: Mapping[str, float]) -> Evidence:
        """The same with readings as likely as their facts are."""
        if not facts:
            return self
        weight = self.weight.copy()
        for run, readings in enumerate(self.facts):
            weight[run, : len(readings)] *= [math.prod(facts.get(fact, 1.0) for fact in reading) for reading in readings]
        return replace(self, weight=weight / np.maximum(weight.sum(1, keepdims=True), 1e-30))

    def log_seconds(self, theta: FloatArray, alike: FloatArray) -> tuple[FloatArray, FloatArray]:
        """log T [..., runs, readings] and its slopes [..., runs, readings, 4 + kinds] at theta [..., 4 + kinds].

        Args:
            alike: what each kind's share is in each run [runs, kinds].
        """
        factors = (theta[..., :FACTORS] - self.at)[..., None, :] + (theta[..., FACTORS:] @ alike.T)[..., None]
        scaled = self.parts * np.exp(factors)[..., :, None, :]
        seconds = np.maximum(scaled.sum(-1) + self.rest, 1e-12)
        slopes = scaled / seconds[..., None]
        return np.log(seconds), np.concatenate([slopes, slopes.sum(-1, keepdims=True) * alike[:, None, :]], axis=-1)


@dataclass(frozen=True, slots=True)
class Posterior:
    """What is known after the runs.

    Attributes:
        theta: median logarithms of the factors, then of each kind [4 + kinds].
        covariance: of them.
        kinds: that had runs.
        kind: spread of a kind that is like none of them.
        reach: the prior's.
        residual: of log(measured / predicted) of a further run once the factors are right: the standard deviation of a normal
            distribution with the same 80 % interval.
        weight: how far each run was believed [runs], 1 = fully.
        facts: factors on how likely an open fact is.
    """

    theta: FloatArray
    covariance: FloatArray
    kinds: tuple[Kind, ...]
    kind: float
    reach: Reach
    residual: float
    weight: FloatArray
    facts: Mapping[str, float] = field(default_factory=dict)

    def predict(self, runs: Evidence) -> tuple[FloatArray, FloatArray]:
        """Median seconds of runs and half the 80 % interval of their logarithm [runs]."""
        runs = runs.believing(self.facts)
        alike, left = interpolated(runs.kinds, self.kinds, self.reach)
        log_s, slopes = runs.log_seconds(self.theta, alike)
        slope = (runs.weight[..., None] * slopes).sum(-2)
        variance = np.einsum("ri,ij,rj->r", slope, self.covariance, slope)
        new = np.maximum(np.diag(left), 0.0) * (self.kind * slope[:, :FACTORS].sum(-1)) ** 2
        half = TENTH * np.sqrt(np.maximum(variance, 0.0) + new + self.residual**2)
        return np.exp((runs.weight * log_s).sum(-1)), half


def learn(runs: Evidence, prior: Prior) -> Posterior:
    """The posterior of the factors and of what runs leave open; without runs the prior, with the factors at 1."""
    facts: dict[str, float] = {}
    found, shares = _believing(runs, prior)
    for _ in range(AGAIN if any(map(len, runs.facts)) else 0):
        facts = told(runs, shares)
        found, shares = _believing(runs.believing(facts), prior)
    return replace(found, facts=facts)


def told(runs: Evidence, shares: FloatArray) -> dict[str, float]:
    """Factors on how likely open facts are at a site.

    Args:
        shares: how likely each reading is, given the run [runs, readings].
    """
    before: dict[str, float] = defaultdict(float)
    after: dict[str, float] = defaultdict(float)
    runs_of: dict[str, set[int]] = defaultdict(set)
    for run, readings in enumerate(runs.facts):
        for index, reading in enumerate(readings):
            for fact in reading:
                before[fact] += runs.weight[run, index]
                after[fact] += shares[run, index]
                runs_of[fact.split(" = ")[0]].add(run)
    found = {}
    for fact, expected in before.items():
        count = len(runs_of[fact.split(" = ")[0]])
        usual = max(expected / count, 1e-9)
        found[fact] = (ALONE * usual + after[fact]) / ((ALONE + count) * usual)
    return found


def _believing(runs: Evidence, prior: Prior) -> tuple[Posterior, FloatArray]:
    """The posterior with the weights of readings as they are, and how likely each reading then is [runs, readings]."""
    kinds = tuple(dict.fromkeys(runs.kinds))
    scales, stretch = (axis.ravel() for axis in np.meshgrid(prior.residual * np.exp(prior.residual_spread * GRID), STRETCH))
    inverse = np.zeros((len(stretch), *(FACTORS + len(kinds),) * 2))
    inverse[:, :FACTORS, :FACTORS] = np.linalg.inv(prior.covariance) / stretch[:, None, None]
    between = correlation(kinds, kinds, prior.reaches) + JITTER * np.eye(len(kinds))
    inverse[:, FACTORS:, FACTORS:] = np.linalg.inv(between) / (prior.kind * scales[:, None, None]) ** 2
    theta, hessian, log_post, believed, shares = _modes(runs, kinds, inverse, scales)
    log_evidence = log_post + 0.5 * np.linalg.slogdet(inverse)[1] - 0.5 * np.linalg.slogdet(hessian)[1]
    mass = log_evidence - 0.5 * np.tile(GRID**2, len(STRETCH))
    share = np.exp(mass - mass.max())
    share /= share.sum()
    mean = share @ theta
    within = np.einsum("s,sij->ij", share, np.linalg.inv(hessian))
    off = theta - mean
    covariance = within + np.einsum("s,si,sj->ij", share, off, off)
    scale = math.sqrt(float(share @ scales**2))  # a mixture's variance is the mean of its parts'
    residual = scale * TENTH_OF_T / TENTH
    found = Posterior(mean, covariance, kinds, prior.kind * scale, prior.reaches, residual, share @ believed)
    return found, np.asarray(np.tensordot(share, shares, 1))


def _modes(
    runs: Evidence, kinds: Sequence[Kind], inverse: FloatArray, scales: FloatArray
) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray, FloatArray]:
    """Most likely theta [scales, size] for every scale and its prior `inverse` [scales, size, size], the curvature there, the log
    posterior [scales], how far each run is believed [scales, runs] and how likely its readings are [scales, runs, readings]:
    Gauss-Newton steps of reweighted least squares."""
    theta = np.zeros(inverse.shape[:2])
    alike = np.array([[float(own == kind) for kind in kinds] for own in runs.kinds]).reshape(len(runs), len(kinds))
    wide = scales[:, None, None]
    log_weight = np.log(np.maximum(runs.weight, 1e-300))
    norm = math.lgamma((FREEDOM + 1) / 2) - math.lgamma(FREEDOM / 2) - 0.5 * math.log(FREEDOM * math.pi)

    def at(theta: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray, FloatArray]:
        log_s, slopes = runs.log_seconds(theta, alike)
        off = (runs.log_measured[:, None] - log_s) / wide
        each = log_weight + norm - np.log(wide) - 0.5 * (FREEDOM + 1) * np.log1p(off**2 / FREEDOM)
        top = each.max(-1, keepdims=True)
        run = top[..., 0] + np.log(np.exp(each - top).sum(-1))
        value = run.sum(-1) - 0.5 * np.einsum("si,sij,sj->s", theta, inverse, theta)
        share = np.exp(each - run[..., None])
        return value, off, slopes, share * (FREEDOM + 1) / (FREEDOM + off**2), share

    if not len(runs):
        return theta, inverse, np.zeros(len(scales)), np.zeros((len(scales), 0)), np.zeros((len(scales), *runs.weight.shape))

    def curvature(slopes: FloatArray, believed: FloatArray) -> FloatArray:
        flat = slopes.reshape(len(scales), -1, slopes.shape[-1])
        weight = (believed / wide**2).reshape(len(scales), -1, 1)
        return inverse + np.swapaxes(flat * weight, 1, 2) @ flat

    value, off, slopes, believed, share = at(theta)
    for _ in range(ROUNDS):
        gradient = np.einsum("sij,sijk->sk", believed * off / wide, slopes) - (theta[:, None, :] @ inverse)[:, 0]
        step = np.clip(np.linalg.solve(curvature(slopes, believed), gradient[..., None])[..., 0], -0.7, 0.7)
        taken, better, there = np.ones(len(scales)), np.zeros(len(scales), dtype=bool), None
        for _ in range(6):
            there = at(theta + taken[:, None] * step)
            better = there[0] >= value - 1e-12
            if better.all():
                break
            taken = np.where(better, taken, taken / 2.0)
        moved = np.where(better[:, None], taken[:, None] * step, 0.0)
        theta = theta + moved
        value, off, slopes, believed, share = there if there is not None and better.all() else at(theta)
        if np.abs(moved).max() < CLOSE:
            break
    return theta, curvature(slopes, believed), value, np.minimum(believed.sum(-1) * FREEDOM / (FREEDOM + 1), 1.0), share
