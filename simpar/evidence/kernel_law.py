"""A kernel law fitted on measured rows and tried on rows that the fit did not see: its errors, and the intervals from them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Generic, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from simpar.evidence.robust import Array, Prior, nested, soft_l1
from simpar.specs.base import Spec
from simpar.specs.kernel_constants import Band, FitRecord

Mask = NDArray[np.bool_]
T = TypeVar("T")
Shapes = TypeVar("Shapes")
Constants = TypeVar("Constants", bound=Spec)
CLIPPED = {"overlap_power": (0.5, 20.0), "reread": (0.0, 1.5), "remote_share": (0.0, np.inf)}
"""Ends of constants that a step of the fit may not leave."""


@dataclass(frozen=True)
class Rows(Generic[Shapes]):
    """Measured kernels: their shapes, and seconds [rows]."""

    shapes: Shapes
    seconds: Array


def where(mask: Mask, values: T) -> T:
    """`values`, a table or a dataclass of arrays [rows, ...], at the rows of `mask`; what is not by rows stays."""
    found: Any = values
    if isinstance(values, np.ndarray):
        found = values[mask] if values.shape[:1] == mask.shape else values
    elif isinstance(values, dict):
        found = {name: where(mask, value) for name, value in values.items()}
    elif is_dataclass(values) and not isinstance(values, type):
        found = replace(values, **{f.name: where(mask, getattr(values, f.name)) for f in fields(values)})
    return cast(T, found)


@dataclass(frozen=True, slots=True)
class Law(Generic[Constants]):
    """A law with what is known of its constants beforehand.

    Attributes:
        base: its constants; those without a prior stay.
        priors: of the others.
        seconds_of: constants and rows -> seconds [rows].
        scale: log error at which the loss turns linear.
    """

    base: Constants
    priors: Sequence[Prior]
    seconds_of: Callable[[Constants, Any], Array]
    scale: float = 0.04

    def fit(self, rows: Rows[Any], first: Array | None = None) -> tuple[Constants, Array]:
        """The constants that bring the law closest to `rows`, and their parameters; it starts at `first`, or at the priors."""
        mean = np.array([np.log(p.mean) if p.log else p.mean for p in self.priors])
        sigma = np.array([p.sigma for p in self.priors])

        def predict(x: Array) -> Array:
            return np.asarray(np.log(self.seconds_of(self._at(x), rows)))

        x = soft_l1(predict, np.log(rows.seconds), mean if first is None else first, mean, sigma, scale=self.scale)
        return self._at(x), x

    def errors(self, c: Constants, rows: Rows[Any]) -> Array:
        """log(predicted / measured) [rows] under the constants `c`."""
        return np.asarray(np.log(self.seconds_of(c, rows)) - np.log(rows.seconds))

    def held_out(self, rows: Rows[Any], groups: Iterable[Mask], first: Array | None = None) -> Array:
        """log(predicted / measured) [rows], each of `groups`, which are all rows together, by a fit without it."""
        found = np.empty(len(rows.seconds))
        for own in groups:
            found[own] = self.errors(self.fit(where(~own, rows), first)[0], where(own, rows))
        return found

    def _at(self, x: Array) -> Constants:
        values = {p.path: float(np.exp(v)) if p.log else float(v) for p, v in zip(self.priors, x, strict=True)}
        values |= {path: min(max(values[path], low), high) for path, (low, high) in CLIPPED.items() if path in values}
        return cast(Constants, nested(self.base, values))


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
