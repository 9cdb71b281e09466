"""What a few runs of a cluster say about its three factors, given how much clusters differ.

Each run's predicted step is a straight line in the factors around the point that it was simulated at,

    T(theta) = sum_i part_i exp(theta_i - at_i) + rest,     theta = log of (compute, memory, communication),

theta has a normal prior, and log(measured / T) is Student-t distributed: a run that contradicts all others moves little. The scale
of that t is itself unknown and summed over a grid; what is open about a run (its readings) is summed as a mixture.
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
GRID: Final = np.linspace(-2.0, 2.0, 9)
"""Standard deviations of log(scale) that are summed over."""
ROUNDS: Final = 40


@dataclass(frozen=True, slots=True)
class Prior:
    """How clusters differ, as left-out sources show (`simpar.site.fit_prior`); standard deviations of logarithms.

    Attributes:
        common: of one factor on everything that runs on the device.
        compute, memory, communication: of each factor beside it.
        residual: median over sources of the t's scale of log(measured / predicted) of one source's runs.
        residual_spread: of the logarithm of that scale between sources.
    """

    common: float
    compute: float
    memory: float
    communication: float
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
        at: logarithms of the factors that the parts hold for [3].
    """

    parts: FloatArray
    rest: FloatArray
    weight: FloatArray
    log_measured: FloatArray
    at: FloatArray

    @classmethod
    def of(
        cls, lines: Sequence[Sequence[tuple[float, Sequence[float], float]]], measured: Sequence[float], at: FloatArray
    ) -> Evidence:
        """From (weight, parts, rest) of each run's readings and measured seconds."""
        most = max((len(run) for run in lines), default=1)
        parts, rest, weight = np.zeros((len(lines), most, 3)), np.ones((len(lines), most)), np.zeros((len(lines), most))
        for i, run in enumerate(lines):
            for j, (share, scaled, left) in enumerate(run):
                parts[i, j], rest[i, j], weight[i, j] = scaled, left, share
        weight /= np.maximum(weight.sum(1, keepdims=True), 1e-30)
        return cls(parts, rest, weight, np.log(np.asarray(measured, dtype=float)), np.asarray(at, dtype=float))

    def __len__(self) -> int:
        return len(self.log_measured)

    def only(self, rows: Sequence[int] | NDArray[np.intp] | NDArray[np.bool_]) -> Evidence:
        """Some of the runs."""
        return Evidence(self.parts[rows], self.rest[rows], self.weight[rows], self.log_measured[rows], self.at)

    def log_seconds(self, theta: FloatArray) -> tuple[FloatArray, FloatArray]:
        """log T [..., runs, readings] and its slopes [..., runs, readings, 3] at theta [..., 3]."""
        scaled = self.parts * np.exp(theta - self.at)[..., None, None, :]
        seconds = np.maximum(scaled.sum(-1) + self.rest, 1e-12)
        return np.log(seconds), scaled / seconds[..., None]


@dataclass(frozen=True, slots=True)
class Posterior:
    """What is known after the runs.

    Attributes:
        theta: median logarithms of the factors [3].
        covariance: [3, 3].
        residual: of log(measured / predicted) of a further run once the factors are right: the standard deviation of a normal
            distribution with the same 80 % interval.
        weight: how far each run was believed [runs], 1 = fully.
        log_evidence: of the runs under the prior.
    """

    theta: FloatArray
    covariance: FloatArray
    residual: float
    weight: FloatArray
    log_evidence: float

    def log_half_width(self, slopes: FloatArray) -> FloatArray:
        """Half the 80 % interval of log T of runs with these slopes [..., 3]."""
        variance = np.einsum("...i,ij,...j->...", slopes, self.covariance, slopes)
        return np.asarray(1.2816 * np.sqrt(np.maximum(variance, 0.0) + self.residual**2))


def learn(runs: Evidence, prior: Prior) -> Posterior:
    """The posterior of the factors; without runs the prior, with the factors at 1."""
    scales = np.asarray(prior.residual * np.exp(prior.residual_spread * GRID), dtype=np.float64)
    inverse = np.linalg.inv(prior.covariance)
    theta, hessian, log_post, believed = _modes(runs, inverse, scales)
    _, inverse_log = np.linalg.slogdet(inverse)
    log_evidence = log_post + 0.5 * inverse_log - 0.5 * np.linalg.slogdet(hessian)[1]
    mass = log_evidence - 0.5 * GRID**2
    share = np.exp(mass - mass.max())
    share /= share.sum()
    mean = share @ theta
    within = np.einsum("s,sij->ij", share, np.linalg.inv(hessian))
    off = theta - mean
    covariance = within + np.einsum("s,si,sj->ij", share, off, off)
    residual = float(np.exp(share @ np.log(scales))) * TENTH_OF_T / 1.2816
    total = mass.max() + math.log(np.exp(mass - mass.max()).sum()) - math.log(np.exp(-0.5 * GRID**2).sum())
    return Posterior(mean, covariance, residual, share @ believed, float(total))


def _modes(runs: Evidence, inverse: FloatArray, scales: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    """Most likely theta [scales, 3] for every scale, the curvature there [scales, 3, 3], the log posterior [scales] and how far
    each run is believed [scales, runs]: Gauss-Newton steps of reweighted least squares."""
    theta = np.zeros((len(scales), 3))
    wide = scales[:, None, None]
    log_weight = np.log(np.maximum(runs.weight, 1e-300))
    norm = math.lgamma((FREEDOM + 1) / 2) - math.lgamma(FREEDOM / 2) - 0.5 * math.log(FREEDOM * math.pi)

    def at(theta: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
        log_s, slopes = runs.log_seconds(theta)
        off = (runs.log_measured[:, None] - log_s) / wide
        each = log_weight + norm - np.log(wide) - 0.5 * (FREEDOM + 1) * np.log1p(off**2 / FREEDOM)
        top = each.max(-1, keepdims=True)
        run = top[..., 0] + np.log(np.exp(each - top).sum(-1))
        value = run.sum(-1) - 0.5 * np.einsum("si,ij,sj->s", theta, inverse, theta)
        return value, off, slopes, np.exp(each - run[..., None])

    if not len(runs):
        curve = np.broadcast_to(inverse, (len(scales), 3, 3))
        return theta, np.array(curve), np.zeros(len(scales)), np.zeros((len(scales), 0))
    value, off, slopes, share = at(theta)
    for _ in range(ROUNDS):
        believed = share * (FREEDOM + 1) / (FREEDOM + off**2)
        hessian = inverse + np.einsum("sij,sijk,sijl->skl", believed / wide**2, slopes, slopes)
        gradient = np.einsum("sij,sijk->sk", believed * off / wide, slopes) - theta @ inverse
        step = np.clip(np.linalg.solve(hessian, gradient[..., None])[..., 0], -0.7, 0.7)
        taken = np.ones(len(scales))
        for _ in range(6):
            trial = theta + taken[:, None] * step
            found = at(trial)
            worse = found[0] < value - 1e-12
            if not worse.any():
                break
            taken = np.where(worse, taken / 2.0, taken)
        keep = found[0] >= value - 1e-12
        moved = np.abs(np.where(keep[:, None], trial - theta, 0.0)).max()
        theta = np.where(keep[:, None], trial, theta)
        value, off, slopes, share = at(theta)
        if moved < 1e-7:
            break
    weighted = share * (FREEDOM + 1) / (FREEDOM + off**2)
    hessian = inverse + np.einsum("sij,sijk,sijl->skl", weighted / wide**2, slopes, slopes)
    return theta, hessian, value, np.minimum(weighted.sum(-1) * FREEDOM / (FREEDOM + 1), 1.0)


__all__ = ["FREEDOM", "Evidence", "Posterior", "Prior", "learn"]
