"""Robust least squares with priors, by scipy: outliers count linearly, a prior settles what the data do not determine.

Kernel laws have parameters with a Gaussian prior each, some as logarithms. What is minimised is sum(weight * rho(residual)) plus
the priors, rho quadratic below a scale and linear above, as plain least squares over sign(r) sqrt(2 rho(r)).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from simpar.specs.base import Spec

Array = NDArray[np.float64]
PRIOR: Final = 2e-3
"""Weight of one sigma of a prior against all rows."""
MOST_STEPS: Final = 25
"""Evaluations of the derivatives in `soft_l1`."""


@dataclass(frozen=True, slots=True)
class Prior:
    """One constant of a kernel law, as known before any row is seen.

    Attributes:
        path: dotted, in the constants: "ridge.3", "heads.0.critical".
        mean: of the constant itself.
        sigma: of its natural logarithm, or of itself where it does not move as one.
        log: whether it moves as a logarithm.
    """

    path: str
    mean: float
    sigma: float
    log: bool = True


def nested(model: Any, values: Mapping[str, float]) -> Any:
    """`model` with what stands at the dotted paths of `values` replaced (no validation: the fit keeps the bounds)."""
    by_head: dict[str, dict[str, float]] = defaultdict(dict)
    for path, value in values.items():
        head, _, rest = path.partition(".")
        by_head[head][rest] = value

    def below(head: str) -> Any:
        return getattr(model, head) if isinstance(model, Spec) else model[int(head) if isinstance(model, tuple) else head]

    own = {head: rest[""] if "" in rest else nested(below(head), rest) for head, rest in by_head.items()}
    if isinstance(model, tuple):
        return tuple(own.get(str(i), value) for i, value in enumerate(model))
    return {**model, **own} if isinstance(model, dict) else model.model_copy(update=own)


def rooted(residuals: Array, weights: Array, scale: float) -> Array:
    """Least-squares residuals whose half squares are weights * scale^2 * (sqrt(1 + (r/scale)^2) - 1)."""
    z = residuals / scale
    # The same as sqrt(2 (sqrt(1 + z^2) - 1)) without the cancellation at small z, so that derivatives stay smooth.
    rooted = z * np.sqrt(2.0 / (np.sqrt(1.0 + z * z) + 1.0))
    return np.asarray(np.sqrt(weights) * scale * rooted)


def soft_l1(
    predict: Callable[[Array], Array], target: Array, start: Array, mean: Array, sigma: Array, *, scale: float = 0.04
) -> Array:
    """Parameters that minimise the soft-L1 of predict(parameters) - target, plus the priors.

    Args:
        predict: parameters [p] -> logarithms of seconds [rows].
        target: measured logarithms [rows].
        start, mean, sigma: first values and priors [p].
        scale: error at which the loss turns linear.
    """
    from scipy.optimize import least_squares  # an extra: only fits need it

    row = np.ones(len(target))
    strength = float(np.sqrt(2.0 * PRIOR * row.sum()))

    def whole(x: Array) -> Array:
        data = rooted(predict(x) - target, 2.0 * row / scale**2, scale)
        return np.concatenate([data, strength * (x - mean) / sigma])

    def slopes(x: Array) -> Array:
        # Steps of a fiftieth of the prior's width: laws with tiles and waves are not smooth at scipy's.
        here, columns = whole(x), []
        for i, width in enumerate(sigma):
            moved = x.copy()
            moved[i] += 0.02 * width
            columns.append((whole(moved) - here) / (0.02 * width))
        return np.array(columns).T

    return np.asarray(least_squares(whole, start, slopes, x_scale=sigma, max_nfev=MOST_STEPS, ftol=5e-5).x)
