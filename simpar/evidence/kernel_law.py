"""A kernel law fitted on measured rows, and tried on rows that the fit did not see."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Generic, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from simpar.evidence.robust import Prior, nested, soft_l1
from simpar.specs.base import Spec

Array = NDArray[np.float64]
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
