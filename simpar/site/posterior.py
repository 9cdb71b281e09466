"""What a few runs of a cluster say about its factors, given how much clusters differ.

Each run's predicted step is a straight line in the factors around the point that it was simulated at,

    T(theta) = sum_i part_i exp(theta_i + kind - at_i) + rest,     theta = log of (compute, memory, communication),

theta has a normal prior, and so has what is common to the runs of one kind (a model in a precision): a cluster's runs of one model
do not say all about those of another. log(measured / T) is Student-t distributed: a run that contradicts all others moves little.
The scale of that t is itself unknown and summed over a grid; what is open about a run (its readings) is summed as a mixture.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
FREEDOM: Final = 4.0
"""Degrees of freedom of the t: at 4 an outlier three scales away weighs a third of a run that agrees (Lange et al. 1989)."""
TENTH_OF_T: Final = 1.533
"""The t's 90 % quantile at four degrees of freedom."""
TENTH: Final = 1.2816
"""A normal distribution's."""
GRID: Final[FloatArray] = np.linspace(-2.0, 2.0, 9)
"""Standard deviations of log(scale) that are summed over."""
ROUNDS: Final = 40


@dataclass(frozen=True, slots=True)
class Prior:
    """How clusters differ, as left-out sources show (`simpar.site.fit_prior`); standard deviations of logarithms.

    Attributes:
        common: of one factor on everything that runs on the device.
        compute, memory, communication: of each factor beside it.
        kind: of the same between kinds of runs of one cluster.
        residual: median over sources of the t's scale of log(measured / predicted) of one source's runs.
        residual_spread: of the logarithm of that scale between sources.
    """

    common: float
    compute: float
    memory: float
    communication: float
    kind: float
    residual: float
    residual_spread: float

    @property
    def covariance(self) -> FloatArray:
        """Of the logarithms of the three factors [3, 3]."""
        own = np.diag(np.square([self.compute, self.memory, self.communication]))
        return np.asarray(own + self.common**2)


@dataclass(frozen=True, slots=True)
class Evidence:
    """Runs as straight lines in the factors; the second axis counts the readings of a run, weight 0 where there are fewer.

    Attributes:
        parts: seconds that each factor scales [runs, readings, 3], at theta = `at`.
        rest: seconds that none scales [runs, readings].
        weight: of each reading [runs, readings], adding up to 1 for a run.
        log_measured: [runs].
        kinds: what each run is of.
        at: logarithms of the factors that the parts hold for [3].
    """

    parts: FloatArray
    rest: FloatArray
    weight: FloatArray
    log_measured: FloatArray
    kinds: tuple[str, ...]
    at: FloatArray

    @classmethod
    def of(
        cls,
        lines: Sequence[Sequence[tuple[float, Sequence[float], float]]],
        measured: Sequence[float] | FloatArray,
        at: FloatArray,
        kinds: Sequence[str] = (),
    ) -> Evidence:
        """From (weight, parts, rest) of each run's readings and measured seconds; without `kinds` all are of one."""
        most = max((len(run) for run in lines), default=1)
        parts, rest, weight = np.zeros((len(lines), most, 3)), np.ones((len(lines), most)), np.zeros((len(lines), most))
        for i, run in enumerate(lines):
            for j, (share, scaled, left) in enumerate(run):
                parts[i, j], rest[i, j], weight[i, j] = scaled, left, share
        weight /= np.maximum(weight.sum(1, keepdims=True), 1e-30)
        named = tuple(kinds) or ("",) * len(lines)
        return cls(parts, rest, weight, np.log(np.asarray(measured, dtype=float)), named, np.asarray(at, dtype=float))

    def __len__(self) -> int:
        return len(self.log_measured)

    def only(self, rows: Sequence[int] | NDArray[np.intp]) -> Evidence:
        """Some of the runs."""
        index = np.asarray(rows, dtype=np.intp)
        kinds = tuple(self.kinds[i] for i in index)
        return Evidence(self.parts[index], self.rest[index], self.weight[index], self.log_measured[index], kinds, self.at)

    def member(self, kinds: Sequence[str]) -> FloatArray:
        """1 where a run is of a kind [runs, kinds]."""
        return np.array([[float(own == kind) for kind in kinds] for own in self.kinds]).reshape(len(self), len(kinds))

    def log_seconds(self, theta: FloatArray, member: FloatArray) -> tuple[FloatArray, FloatArray]:
        """log T [..., runs, readings] and its slopes [..., runs, readings, 3 + kinds] at theta [..., 3 + kinds]."""
        factors = (theta[..., :3] - self.at)[..., None, :] + (theta[..., 3:] @ member.T)[..., None]
        scaled = self.parts * np.exp(factors)[..., :, None, :]
        seconds = np.maximum(scaled.sum(-1) + self.rest, 1e-12)
        slopes = scaled / seconds[..., None]
        return np.log(seconds), np.concatenate([slopes, slopes.sum(-1, keepdims=True) * member[:, None, :]], axis=-1)


@dataclass(frozen=True, slots=True)
class Posterior:
    """What is known after the runs.

    Attributes:
        theta: median logarithms of the factors, then of each kind [3 + kinds].
        covariance: of them.
        kinds: that had runs.
        kind: spread of a kind that had none.
        residual: of log(measured / predicted) of a further run once the factors are right: the standard deviation of a normal
            distribution with the same 80 % interval.
        weight: how far each run was believed [runs], 1 = fully.
        log_evidence: of the runs under the prior.
    """

    theta: FloatArray
    covariance: FloatArray
    kinds: tuple[str, ...]
    kind: float
    residual: float
    weight: FloatArray
    log_evidence: float

    def predict(self, runs: Evidence) -> tuple[FloatArray, FloatArray]:
        """Median seconds of runs and half the 80 % interval of their logarithm [runs]."""
        member = runs.member(self.kinds)
        log_s, slopes = runs.log_seconds(self.theta, member)
        slope = (runs.weight[..., None] * slopes).sum(-2)
        variance = np.einsum("ri,ij,rj->r", slope, self.covariance, slope)
        new = np.where(member.sum(-1) > 0.0, 0.0, self.kind * slope[:, :3].sum(-1))
        half = TENTH * np.sqrt(np.maximum(variance, 0.0) + new**2 + self.residual**2)
        return np.exp((runs.weight * log_s).sum(-1)), half


def learn(runs: Evidence, prior: Prior) -> Posterior:
    """The posterior of the factors; without runs the prior, with the factors at 1."""
    kinds = tuple(sorted(set(runs.kinds)))
    scales = np.asarray(prior.residual * np.exp(prior.residual_spread * GRID), dtype=np.float64)
    inverse = np.zeros((3 + len(kinds),) * 2)
    inverse[:3, :3] = np.linalg.inv(prior.covariance)
    inverse[range(3, 3 + len(kinds)), range(3, 3 + len(kinds))] = prior.kind**-2
    theta, hessian, log_post, believed = _modes(runs, kinds, inverse, scales)
    log_evidence = log_post + 0.5 * np.linalg.slogdet(inverse)[1] - 0.5 * np.linalg.slogdet(hessian)[1]
    mass = log_evidence - 0.5 * GRID**2
    share = np.exp(mass - mass.max())
    share /= share.sum()
    mean = share @ theta
    within = np.einsum("s,sij->ij", share, np.linalg.inv(hessian))
    off = theta - mean
    covariance = within + np.einsum("s,si,sj->ij", share, off, off)
    residual = float(np.exp(share @ np.log(scales))) * TENTH_OF_T / TENTH
    total = mass.max() + math.log(np.exp(mass - mass.max()).sum()) - math.log(np.exp(-0.5 * GRID**2).sum())
    return Posterior(mean, covariance, kinds, prior.kind, residual, share @ believed, float(total))


def _modes(
    runs: Evidence, kinds: Sequence[str], inverse: FloatArray, scales: FloatArray
) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    """Most likely theta [scales, size] for every scale, the curvature there, the log posterior [scales] and how far each run is
    believed [scales, runs]: Gauss-Newton steps of reweighted least squares."""
    theta, member = np.zeros((len(scales), len(inverse))), runs.member(kinds)
    wide = scales[:, None, None]
    log_weight = np.log(np.maximum(runs.weight, 1e-300))
    norm = math.lgamma((FREEDOM + 1) / 2) - math.lgamma(FREEDOM / 2) - 0.5 * math.log(FREEDOM * math.pi)

    def at(theta: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
        log_s, slopes = runs.log_seconds(theta, member)
        off = (runs.log_measured[:, None] - log_s) / wide
        each = log_weight + norm - np.log(wide) - 0.5 * (FREEDOM + 1) * np.log1p(off**2 / FREEDOM)
        top = each.max(-1, keepdims=True)
        run = top[..., 0] + np.log(np.exp(each - top).sum(-1))
        value = run.sum(-1) - 0.5 * np.einsum("si,ij,sj->s", theta, inverse, theta)
        share = np.exp(each - run[..., None])
        return value, off, slopes, share * (FREEDOM + 1) / (FREEDOM + off**2)

    if not len(runs):
        return theta, np.repeat(inverse[None], len(scales), 0), np.zeros(len(scales)), np.zeros((len(scales), 0))
    value, off, slopes, believed = at(theta)
    for _ in range(ROUNDS):
        hessian = inverse + np.einsum("sij,sijk,sijl->skl", believed / wide**2, slopes, slopes)
        gradient = np.einsum("sij,sijk->sk", believed * off / wide, slopes) - theta @ inverse
        step = np.clip(np.linalg.solve(hessian, gradient[..., None])[..., 0], -0.7, 0.7)
        taken, better = np.ones(len(scales)), np.zeros(len(scales), dtype=bool)
        for _ in range(6):
            better = at(theta + taken[:, None] * step)[0] >= value - 1e-12
            if better.all():
                break
            taken = np.where(better, taken, taken / 2.0)
        moved = np.where(better[:, None], taken[:, None] * step, 0.0)
        theta = theta + moved
        value, off, slopes, believed = at(theta)
        if np.abs(moved).max() < 1e-6:
            break
    hessian = inverse + np.einsum("sij,sijk,sijl->skl", believed / wide**2, slopes, slopes)
    return theta, hessian, value, np.minimum(believed.sum(-1) * FREEDOM / (FREEDOM + 1), 1.0)


__all__ = ["FREEDOM", "TENTH", "TENTH_OF_T", "Evidence", "Posterior", "Prior", "learn"]
