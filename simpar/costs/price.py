"""A price: seconds with an 80 % interval and where they come from."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Provenance(StrEnum):
    """How a price is known, best first."""

    MEASURED = "measured"
    """This very shape was measured on this GPU."""
    INTERPOLATED = "interpolated"
    """Between measured shapes."""
    MODEL = "model"
    """A model whose constants were fitted on this GPU or machine."""
    PUBLISHED = "published"
    """A model whose constants are published figures."""
    SCALED = "peak-scaled"
    """Constants of another GPU, scaled by peaks."""
    ASSUMED = "assumed"
    """Nothing measured behind it."""


@dataclass(frozen=True, slots=True)
class Price:
    """Duration of one op.

    Attributes:
        seconds: the point estimate.
        low, high: ends of the 80 % interval, seconds.
        provenance: the worst provenance among the constants used.
        terms: ledger, path name -> seconds; sums to `seconds` unless the terms overlap (a roofline's max).
    """

    seconds: float
    low: float
    high: float
    provenance: Provenance
    terms: tuple[tuple[str, float], ...] = ()


ZERO = Price(0.0, 0.0, 0.0, Provenance.MEASURED)
