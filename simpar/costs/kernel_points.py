"""Prices read off measured points, and the intervals of modelled ones."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from simpar.costs.kernel_choice import band_at
from simpar.costs.price import Price, Provenance
from simpar.specs.kernel_constants import Band, MeasuredPoint

Array = NDArray[np.float64]


def banded(seconds: float, band: tuple[float, float], provenance: Provenance, terms: tuple[tuple[str, float], ...]) -> Price:
    """A price with the interval `band` (measured / predicted), which always holds the price itself."""
    return Price(seconds, seconds * min(band[0], 1.0), seconds * max(band[1], 1.0), provenance, terms)


def measured_memory(points: Sequence[MeasuredPoint]) -> dict[str, tuple[MeasuredPoint, ...]]:
    """Memory-bound points of each kernel class, by size. Calibrations that know no `loss_chain` measured it as cross_entropy."""
    classes = {p.kernel for p in points if p.op == "memory"}
    found = {c: tuple(sorted((p for p in points if p.op == "memory" and p.kernel == c), key=lambda p: p.shape)) for c in classes}
    return {"loss_chain": found["cross_entropy"], **found} if "cross_entropy" in found else found


def between(points: Sequence[MeasuredPoint], bytes_moved: float) -> Price:
    """Between the measured sizes by a power law, past them in proportion (above) or at the smallest one's time (below)."""
    sizes = [float(p.shape[0]) for p in points]
    at = next((i for i, size in enumerate(sizes) if size >= bytes_moved * (1.0 - 1e-6)), len(points))
    exact = at < len(points) and sizes[at] <= bytes_moved * (1.0 + 1e-6)
    if exact or at == 0:
        return measured(points[min(at, len(points) - 1)])
    left, right = points[at - 1], points[min(at, len(points) - 1)]
    if at == len(points):
        s = left.seconds * bytes_moved / sizes[-1]
    else:
        share = math.log(bytes_moved / sizes[at - 1]) / math.log(sizes[at] / sizes[at - 1])
        s = left.seconds ** (1.0 - share) * right.seconds**share
    spread = max(left.spread, right.spread)
    return Price(s, s * (1 - spread), s * (1 + spread), Provenance.INTERPOLATED, (("interpolated", s),))


def measured(point: MeasuredPoint) -> Price:
    """The point's own time."""
    s = point.seconds
    return Price(s, s * (1 - point.spread), s * (1 + point.spread), Provenance.MEASURED, (("measured", s),))


def band_arrays(
    bands: Sequence[Band], small: Sequence[Band], inside: NDArray[np.bool_], sizes: Array, spread: float
) -> tuple[Array, Array]:
    """(low, high) [shapes] of measured / predicted, by size and by being inside the fitted region."""
    low, high = np.empty(sizes.shape), np.empty(sizes.shape)
    for own, region in ((bands, inside), (small or bands, ~inside)):
        for i, edge in enumerate([b.from_size for b in own] or [0.0]):
            here = region & (sizes >= edge) if i else region
            low[here], high[here] = band_at(own, edge, spread)
    return low, high
