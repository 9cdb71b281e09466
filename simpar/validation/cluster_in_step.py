"""How much longer eager compute takes inside a step than its kernels alone, from steps without communication.

A reference step of each model runs on every core at once, alone on its rank. With P seconds of kernels and N launches it takes
T = f P + l N + U, U the update, measured as a whole. Over the models f and l follow by least squares of the relative error,
f >= 1 and l >= 0. What is in f: operands that other ops drove out of the caches, gradient accumulation, autograd's own work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Reference:
    """One reference step: measured seconds, priced seconds of its kernels, launches, and the rest of the priced step."""

    measured_s: float
    kernels_s: float
    launches: int
    rest_s: float


def fit(references: Sequence[Reference]) -> tuple[float, float]:
    """(f, l); (1, 0) where there are no references, l = 0 where there is one only."""
    if not references:
        return 1.0, 0.0
    target = np.array([1.0 - r.rest_s / r.measured_s for r in references])
    columns = np.array([[r.kernels_s / r.measured_s, r.launches / r.measured_s] for r in references])
    candidates = [(_single(columns[:, 0], target, least=1.0), 0.0)]
    rest = target - columns[:, 0]
    candidates.append((1.0, _single(columns[:, 1], rest, least=0.0)))
    if len(references) > 1:
        f, launch = np.linalg.lstsq(columns, target, rcond=None)[0]
        if f >= 1.0 and launch >= 0.0:
            return float(f), float(launch)
    return min(candidates, key=lambda c: float(np.sum((columns @ np.array(c) - target) ** 2)))


def _single(column: np.ndarray, target: np.ndarray, *, least: float) -> float:
    return max(float(column @ target / (column @ column)), least)
