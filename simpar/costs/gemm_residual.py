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

from simpar.costs.gemm_tiles import Array

SMALLEST: Final = 512.0
"""First node of every axis and edge of the fitted region."""
NODES: Final = (7, 8, 8)
"""Octaves of m (to 32,768), of n and of k (to 65,536)."""
LARGEST: Final = 0.35
"""Bound of a logarithm."""


_LAST: Final = np.array(NODES, dtype=float)[:, None] - 1.0
_STRIDES: Final = np.array([NODES[1] * NODES[2], NODES[2], 1])
_OFFSETS: Final = np.array(list(product((0, 1), repeat=3))) @ _STRIDES


def _cells(logs: Array) -> tuple[NDArray[np.int64], Array]:
    """(flat index of each shape's first corner [shapes], its share of the way across [axes, shapes]) of logs [axes, shapes]."""
    at = np.minimum(np.maximum(logs, 0.0), _LAST)
    first = np.minimum(np.floor(at), _LAST - 1.0)
    return _STRIDES @ first.astype(np.int64), at - first


def corners(m: Array, n: Array, k: Array) -> tuple[NDArray[np.int64], Array]:
    """(flat node indices, weights) [shapes, 8] of the cell around each shape; the nearest cell outside the grid."""
    first, share = _cells(np.log2(np.array((m, n, k)) / SMALLEST))
    a, b, c = np.stack([1.0 - share, share], 1)
    weights = a[:, None, None] * b[None, :, None] * c[None, None]
    return first[:, None] + _OFFSETS, weights.reshape(len(_OFFSETS), -1).T


@lru_cache(maxsize=256)
def _array(grid: tuple[float, ...]) -> Array:
    """`grid` as an array."""
    return np.array(grid)


def correction(grid: tuple[float, ...], m: Array, n: Array, k: Array) -> Array:
    """Natural logarithm [shapes] to add to that of the law's time; `grid` in row-major order of NODES."""
    logs = np.log2(np.array((m, n, k)) / SMALLEST)
    first, (x, y, z) = _cells(logs)
    corner = _array(grid)[first + _OFFSETS[:, None]]
    edge = corner[:4] + x * (corner[4:] - corner[:4])
    side = edge[:2] + y * (edge[2:] - edge[:2])
    inside = np.minimum(np.maximum(logs.min(0) + 1.0, 0.0), 1.0)
    return np.asarray((side[0] + z * (side[1] - side[0])) * inside)
