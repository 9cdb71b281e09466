"""What the tile law leaves: the measured over the priced time of one GEMM library, on octaves of m, n and k.

Libraries choose kernels by rules that nobody publishes, alike for like shapes. Their mean effect stands as natural logarithms
on a coarse grid and is linear between its nodes; below the fitted region it fades out within one octave.
"""

from __future__ import annotations

from itertools import product
from typing import Final

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
SMALLEST: Final = 512.0
"""First node of every axis and edge of the fitted region."""
NODES: Final = (7, 8, 8)
"""Octaves of m (to 32,768), of n and of k (to 65,536)."""
LARGEST: Final = 0.35
"""Bound of a logarithm."""


def corners(m: Array, n: Array, k: Array) -> tuple[NDArray[np.int64], Array]:
    """(flat node indices, weights) [shapes, 8] of the cell around each shape; the nearest cell outside the grid."""
    low, share = [], []
    for size, count in zip((m, n, k), NODES, strict=True):
        at = np.clip(np.log2(np.asarray(size, dtype=float) / SMALLEST), 0.0, count - 1.0)
        first = np.minimum(at.astype(np.int64), count - 2)
        low.append(first)
        share.append(at - first)
    indices, weights = [], []
    for step in product((0, 1), repeat=3):
        i, j, h = (first + s for first, s in zip(low, step, strict=True))
        a, b, c = (part if s else 1.0 - part for part, s in zip(share, step, strict=True))
        indices.append((i * NODES[1] + j) * NODES[2] + h)
        weights.append(a * b * c)
    return np.stack(indices, -1), np.stack(weights, -1)


def correction(grid: tuple[float, ...], m: Array, n: Array, k: Array) -> Array:
    """Natural logarithm [shapes] to add to that of the law's time; `grid` in row-major order of NODES."""
    indices, weights = corners(m, n, k)
    inside = np.clip(np.log2(np.minimum(np.minimum(m, n), k) / (SMALLEST / 2.0)), 0.0, 1.0)
    return np.asarray((np.array(grid)[indices] * weights).sum(-1) * inside)
