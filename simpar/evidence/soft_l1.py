"""Robust least squares with priors: Levenberg-Marquardt on the soft-L1 loss of log errors, numpy only, deterministic.

Unlike `robust.py`, parameters are plain numbers with a Gaussian prior each (logarithms are the caller's), because many
terms of the kernel models are signed. The loss is quadratic below `scale` and linear above, so that a library's odd
choices do not move the constants.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def soft_l1(
    predict: Callable[[Array], Array],
    target: Array,
    start: Array,
    mean: Array,
    sigma: Array,
    *,
    weights: Array | None = None,
    scale: float = 0.04,
    prior: float = 2e-3,
    steps: int = 25,
) -> tuple[Array, float]:
    """(parameters, loss) that minimise the soft-L1 of predict(parameters) - target, plus the priors.

    Args:
        predict: parameters [p] -> logarithms of seconds [rows].
        target: measured logarithms [rows].
        start, mean, sigma: first values and priors [p]; sigma = 0 holds a parameter at its start.
        weights: of the rows.
        scale: error at which the loss turns linear.
        prior: weight of one sigma of a prior, in rows over the number of rows.
        steps: most Levenberg-Marquardt steps.
    """
    free = np.flatnonzero(sigma > 0)
    row = np.ones(len(target)) if weights is None else weights
    strength = prior * row.sum()
    x, damping = np.array(start, dtype=float), 1e-2

    def loss(r: Array, at: Array) -> float:
        z = r / scale
        pull = ((at - mean)[free] / sigma[free]) ** 2
        return float((row * 2.0 * (np.sqrt(1.0 + z * z) - 1.0)).sum() + strength * pull.sum())

    r = predict(x) - target
    best = loss(r, x)
    for _ in range(steps):
        jacobian = np.empty((len(r), len(free)))
        for column, i in enumerate(free):
            moved = x.copy()
            moved[i] += 0.02 * sigma[i]
            jacobian[:, column] = (predict(moved) - target - r) / (0.02 * sigma[i])
        w = row / np.sqrt(1.0 + (r / scale) ** 2) / scale**2
        normal = jacobian.T @ (w[:, None] * jacobian) + np.diag(strength / sigma[free] ** 2)
        gradient = jacobian.T @ (w * r) + strength * (x - mean)[free] / sigma[free] ** 2
        for _ in range(8):
            trial = x.copy()
            trial[free] -= np.linalg.solve(normal + damping * np.diag(np.diag(normal)), gradient)
            trial_r = predict(trial) - target
            value = loss(trial_r, trial)
            if np.isfinite(value) and value < best:
                break
            damping *= 4.0
        else:
            break
        gained = (best - value) / best
        x, r, best, damping = trial, trial_r, value, max(damping / 5.0, 1e-6)
        if gained < 5e-5:
            break
    return x, best
