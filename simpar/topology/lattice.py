"""Groups of ranks as lattices: base + sum of c_i * stride_i. Everything a placement needs follows by arithmetic.

Ranks are mixed-radix numbers, so the strides of a group's axes grow, each at least the span of the axes inside it, and
listing the members with the last axis slowest lists them in ascending order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd, prod

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Axis:
    """`size` steps of `stride` ranks."""

    size: int
    stride: int


Axes = tuple[Axis, ...]


def merged(axes: Sequence[Axis]) -> Axes:
    """The same lattice with as few axes as possible, smallest stride first; axes of size 1 vanish."""
    result: list[Axis] = []
    for axis in sorted((a for a in axes if a.size > 1), key=lambda a: a.stride):
        if result and result[-1].size * result[-1].stride == axis.stride:
            result[-1] = Axis(result[-1].size * axis.size, result[-1].stride)
        else:
            result.append(axis)
    return tuple(result)


def complement(axes: Axes, world: int) -> Axes:
    """The lattice of the bases: with it, the translates of a merged lattice cover 0 .. world - 1 once."""
    gaps, reached = [], 1
    for axis in axes:
        gaps.append(Axis(axis.stride // reached, reached))
        reached = axis.size * axis.stride
    gaps.append(Axis(world // reached, reached))
    return tuple(a for a in gaps if a.size > 1)


def split(axes: Axes, size: int) -> tuple[Axes, Axes] | None:
    """`axes` (fastest first) cut into an inner lattice of `size` points and the rest; None if it does not divide."""
    inner: list[Axis] = []
    for position, axis in enumerate(axes):
        if size % axis.size == 0:
            inner.append(axis)
            size //= axis.size
            continue
        if axis.size % size:
            return None
        outer = Axis(axis.size // size, axis.stride * size)
        return (*inner, Axis(size, axis.stride)), (outer, *axes[position + 1 :])
    return (tuple(inner), ()) if size == 1 else None


def count(axes: Sequence[Axis]) -> int:
    """Points of the lattice."""
    return prod(a.size for a in axes)


def span(axes: Sequence[Axis]) -> int:
    """Distance from the lowest to the highest point."""
    return sum((a.size - 1) * a.stride for a in axes)


def points(axes: Sequence[Axis], base: int = 0) -> IntArray:
    """Every point, int array [count], ascending when the strides are."""
    result = np.full(1, base, dtype=np.int64)
    for axis in axes:
        result = (np.arange(axis.size, dtype=np.int64)[:, None] * axis.stride + result).ravel()
    return result


def base_of(ranks: IntArray, axes: Sequence[Axis]) -> IntArray:
    """The lowest point of the translate of the lattice that each rank lies on, int array like `ranks`."""
    result = ranks.copy()
    for axis in axes:
        result -= ranks // axis.stride % axis.size * axis.stride
    return result


def is_uniform(axes: Axes, unit: int) -> bool:
    """Whether every translate of a merged lattice meets windows of `unit` ranks alike, so that one stands for all."""
    for axis in reversed(axes):
        block = axis.size * axis.stride
        if unit % block == 0 or (unit % axis.stride == 0 and block % unit == 0):
            # The axes inside it repeat within each of its strides.
            return True
        if axis.stride % unit:
            return False
        # Its points lie in windows of their own, each with the axes inside it at the same offset.
    return True


@lru_cache(maxsize=4096)
def _repeated(value: int, times: int) -> tuple[int, ...]:
    """One object for equal tuples: thousands of layouts of 25,000 nodes would fill the memory with ones."""
    return (value,) * times


def per_window(axes: Axes, base: int, unit: int) -> tuple[int, ...]:
    """How many points of a merged lattice lie in each window [k unit, (k+1) unit) that holds any, in order."""
    if not axes:
        return (1,)
    if base // unit == (base + span(axes)) // unit:
        return (count(axes),)
    if len(axes) == 1:
        size, stride = axes[0].size, axes[0].stride
        if stride >= unit:
            return _repeated(1, size)
        if unit % stride == 0 and base % unit < stride and size * stride % unit == 0:
            return _repeated(unit // stride, size * stride // unit)
    windows = points(axes, base) // unit
    edges = np.flatnonzero(np.diff(windows, prepend=-1, append=-1))
    return tuple(np.diff(edges).tolist())


def residues(axes: Sequence[Axis], modulus: int, offset: int = 0) -> tuple[IntArray, IntArray]:
    """A point for each residue modulo `modulus` that the lattice, moved by `offset`, meets, and how many share it."""
    values, weights = np.full(1, offset, dtype=np.int64), np.ones(1, dtype=np.int64)
    for axis in axes:
        period = modulus // gcd(axis.stride, modulus)
        steps = np.arange(min(axis.size, period), dtype=np.int64)
        repeats = axis.size // period + (steps < axis.size % period)
        sums = ((steps * axis.stride)[:, None] + values).ravel()
        _, first, where = np.unique(sums % modulus, return_index=True, return_inverse=True)
        weights = np.bincount(where.ravel(), weights=(repeats[:, None] * weights).ravel()).astype(np.int64)
        values = sums[first]
    return values, weights
