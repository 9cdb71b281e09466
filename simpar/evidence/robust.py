"""Least absolute deviations by iteratively reweighted Levenberg-Marquardt steps, numpy only, deterministic.

Parameters are positive and move in log space, so that a step is a relative change; a weak prior pulls each towards its
start, which settles the ones that the data do not determine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Parameter:
    """One positive constant of a law.

    Attributes:
        name: dotted path in the constants.
        start: first value and centre of the prior.
        low, high: bounds.
        sigma: width of the prior in natural logarithms.
    """

    name: str
    start: float
    low: float
    high: float
    sigma: float = 2.0


def _objective(residuals: Array, weights: Array, pull: Array) -> float:
    return float((weights * np.abs(residuals)).sum() + 0.5 * (pull**2).sum())


def minimise(
    residuals: Callable[[Array], Array],
    parameters: list[Parameter],
    weights: Array,
    *,
    steps: int = 60,
    prior: float = 2e-3,
) -> Array:
    """Values [parameters] that minimise sum(weights |residuals|) plus the prior.

    Args:
        residuals: values [parameters] -> residuals [rows].
        parameters: what to fit.
        weights: row weights [rows], summing to 1.
        steps: most steps taken.
        prior: weight of one parameter's prior against the whole data.
    """
    low, high = np.log([p.low for p in parameters]), np.log([p.high for p in parameters])
    start = np.clip(np.log([p.start for p in parameters]), low, high)
    scale = np.sqrt(prior) / np.array([p.sigma for p in parameters])
    x, damping = start.copy(), 1e-2
    r = residuals(np.exp(x))
    best = _objective(r, weights, scale * (x - start))
    for _ in range(steps):
        jacobian = np.empty((len(r), len(x)))
        for i in range(len(x)):
            moved = x.copy()
            moved[i] += 1e-4 if x[i] + 1e-4 <= high[i] else -1e-4
            jacobian[:, i] = (residuals(np.exp(moved)) - r) / (moved[i] - x[i])
        w = weights / np.maximum(np.abs(r), 5e-3)
        normal = jacobian.T @ (w[:, None] * jacobian) + np.diag(scale**2)
        gradient = jacobian.T @ (w * r) + scale**2 * (x - start)
        improved = False
        for _ in range(8):
            step = np.linalg.solve(normal + damping * np.diag(np.diag(normal)) + 1e-12 * np.eye(len(x)), -gradient)
            trial = np.clip(x + np.clip(step, -0.7, 0.7), low, high)
            trial_r = residuals(np.exp(trial))
            value = _objective(trial_r, weights, scale * (trial - start))
            if value < best:
                improved = best - value > 1e-7
                x, r, best, damping = trial, trial_r, value, max(1e-6, damping / 3)
                break
            damping *= 4
        if not improved:
            break
    return np.exp(x)
