"""What the tile law leaves: the measured over the priced time of one GEMM library, on octaves of m, n and k.

Libraries choose kernels by rules that nobody publishes, alike for like shapes. Their mean effect stands as natural logarithms
on a coarse grid and is linear between its nodes; below the fitted region it fades out within one octave.
"""

from __future__ import annotations

from functools import lru_cache
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


_COUNTS: Final = np.array(NODES)[:, None]
_STRIDES: Final = np.array([NODES[1] * NODES[2], NODES[2], 1])
_OFFSETS: Final = np.array(list(product((0, 1), repeat=3))) @ _STRIDES


def corners(m: Array, n: Array, k: Array) -> tuple[NDArray[np.int64], Array]:
    """(flat node indices, weights) [shapes, 8] of the cell around each shape; the nearest cell outside the grid."""
    at = np.clip(np.log2(np.stack([m, n, k]) / SMALLEST), 0.0, _COUNTS - 1.0)
    first = np.minimum(at.astype(np.int64), _COUNTS - 2)
    share = at - first
    a, b, c = np.stack([1.0 - share, share], 1)
    weights = a[:, None, None] * b[None, :, None] * c[None, None]
    return (_STRIDES @ first)[:, None] + _OFFSETS, weights.reshape(len(_OFFSETS), -1).T


@lru_cache(maxsize=64)
def _array(grid: tuple[float, ...]) -> Array:
    return np.array(grid)


def correction(grid: tuple[float, ...], m: Array, n: Array, k: Array) -> Array:
    """Natural logarithm [shapes] to add to that of the law's time; `grid` in row-major order of NODES."""
    indices, weights = corners(m, n, k)
    inside = np.clip(np.log2(np.minimum(np.minimum(m, n), k) / (SMALLEST / 2.0)), 0.0, 1.0)
    return np.asarray((_array(grid)[indices] * weights).sum(-1) * inside)
