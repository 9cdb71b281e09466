"""The residual grid of a GEMM library: penalised robust least squares, numpy only, deterministic."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from simpar.costs.gemm_residual import LARGEST, NODES, corners

Array = NDArray[np.float64]
SMOOTH = 0.1
"""Weight of the squared difference of neighbouring nodes, in rows."""
SHRINK = 0.1
"""Weight of the squared value of a node, in rows."""
SCALE = 0.04
"""Error at which the loss turns linear."""
STEPS = 8


def _roughness() -> Array:
    nodes = np.arange(np.prod(NODES)).reshape(NODES)
    found = np.zeros((nodes.size, nodes.size))
    for axis, count in enumerate(NODES):
        a, b = (np.take(nodes, range(s, count - 1 + s), axis).ravel() for s in (0, 1))
        for first, second, sign in ((a, a, 1.0), (b, b, 1.0), (a, b, -1.0), (b, a, -1.0)):
            np.add.at(found, (first, second), sign)
    return found


def fit_grid(m: Array, n: Array, k: Array, logs: Array) -> tuple[float, ...]:
    """The grid that takes most of `logs` = log(measured / priced) [rows]; outliers count little."""
    indices, weights = corners(m, n, k)
    size = int(np.prod(NODES))
    pairs = (indices[:, :, None] * size + indices[:, None, :]).ravel()
    products = weights[:, :, None] * weights[:, None, :]
    penalty = SMOOTH * _roughness() + SHRINK * np.eye(size)
    grid: Array = np.zeros(size)
    for _ in range(STEPS):
        left = logs - (grid[indices] * weights).sum(1)
        row = 1.0 / np.sqrt(1.0 + (left / SCALE) ** 2)
        normal = np.bincount(pairs, (products * row[:, None, None]).ravel(), size * size).reshape(size, size)
        right = np.bincount(indices.ravel(), (weights * (row * logs)[:, None]).ravel(), size)
        grid = np.asarray(np.linalg.solve(normal + penalty, right), dtype=float)
    return tuple(round(float(v), 4) for v in np.clip(grid, -LARGEST, LARGEST))
