"""Robust least squares over positive constants that move in logarithms, each with bounds and a prior; by scipy.

As `simpar.evidence.robust.soft_l1`: sum(weight * rho(residual)) plus the priors, rho quadratic below a scale and linear above.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from simpar.evidence.robust import PRIOR, Array, rooted

NEARLY_L1: Final = 5e-3
"""Scale of `minimise`: log errors below half a percent count alike."""


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


def minimise(residuals: Callable[[Array], Array], parameters: list[Parameter], weights: Array, *, steps: int = 60) -> Array:
    """Values [parameters] that minimise sum(weights |residuals|), nearly, plus the prior.

    Args:
        residuals: values [parameters] -> residuals [rows].
        parameters: what to fit.
        weights: row weights [rows], summing to 1.
        steps: most evaluations of the derivatives.
    """
    from scipy.optimize import least_squares  # an extra: only fits need it

    low, high = np.log([p.low for p in parameters]), np.log([p.high for p in parameters])
    start = np.clip(np.log([p.start for p in parameters]), low, high)
    pull = np.sqrt(PRIOR) / np.array([p.sigma for p in parameters])
    free = high > low

    def values(x: Array) -> Array:
        full = start.copy()
        full[free] = x
        return full

    def whole(x: Array) -> Array:
        full = values(x)
        # Over the scale, so that the sum is of absolute values, as the prior's weight supposes.
        data = rooted(residuals(np.exp(full)), weights / NEARLY_L1, NEARLY_L1)
        return np.concatenate([data, (pull * (full - start))[free]])

    inside = np.clip(start[free], low[free] + 1e-9, high[free] - 1e-9)
    found = least_squares(whole, inside, bounds=(low[free], high[free]), max_nfev=steps, diff_step=1e-4)
    return np.asarray(np.exp(values(found.x)))
