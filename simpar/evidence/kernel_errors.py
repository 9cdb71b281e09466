"""Errors, held-out splits and intervals of fitted kernel constants."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from simpar.specs.kernel_constants import Band, FitRecord

Array = NDArray[np.float64]
EDGES = (0.0, 1e8, 1e9, 1e10, 1e11, 1e12, 1e13)
"""FLOPs at which the interval changes."""
FEWEST = 60
"""Rows that an interval of its own needs."""


def halves(*keys: Array) -> NDArray[np.bool_]:
    """A fixed half of the distinct key tuples, as a mask over the rows."""
    mixed = np.zeros(len(keys[0]))
    for i, key in enumerate(keys):
        mixed = mixed * 1.3247179572 + np.asarray(key, dtype=float) * (0.6180339887 + 0.1 * i)
    return np.asarray(np.mod(mixed, 1.0) < 0.5)


def record(source: str, fitted: Array, held: Array, held_m: Array | None = None) -> FitRecord:
    """The error record of log errors [rows], of the final fit and held out."""

    def of(logs: Array) -> tuple[float, float]:
        e = np.abs(np.expm1(logs))
        return (round(float(np.median(e)), 5), round(float(np.quantile(e, 0.9)), 5)) if e.size else (0.0, 0.0)

    median, p90 = of(fitted)
    held_median, held_p90 = of(held)
    m_median, m_p90 = of(held_m) if held_m is not None else (0.0, 0.0)
    return FitRecord(
        source=source,
        rows=len(fitted),
        median=median,
        p90=p90,
        bias=round(float(np.expm1(fitted).mean()), 5),
        held_out_median=held_median,
        held_out_p90=held_p90,
        held_out_m_median=m_median,
        held_out_m_p90=m_p90,
    )


def interval(logs: Array, from_size: float = 0.0, digits: int | None = None) -> Band:
    """The 80 % interval of measured / predicted, of log errors log(predicted / measured)."""
    low, high = np.exp(np.quantile(-logs, [0.1, 0.9])).tolist()
    return Band(from_size=from_size, low=round(low, digits) if digits else low, high=round(high, digits) if digits else high)


def bands(flops: Array, held: Array) -> tuple[Band, ...]:
    """80 % intervals of measured / predicted by size class, from held-out log errors log(predicted / measured)."""
    found: list[Band] = []
    if not len(held):
        return ()
    for low, high in zip(EDGES, (*EDGES[1:], np.inf), strict=True):
        here = held[(flops >= low) & (flops < high)]
        if len(here) < FEWEST and (found or low < EDGES[-1]):
            continue
        found.append(interval(here, low, digits=4))
    first = found[0].model_copy(update={"from_size": 0.0}) if found else interval(held)
    return (first, *found[1:])
