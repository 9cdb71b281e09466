"""Quantities with units: "80 GiB", "400 Gb/s", "3.35 TB/s", "989 TFLOP/s", "30 us" parse at the boundary to SI floats.

Bits and bytes, decimal and binary prefixes are told apart: ``Gb`` is 1e9 bits, ``GB`` 1e9 bytes, ``GiB`` 2**30 bytes.
A bare number where a quantity is wanted is an error, because a missing unit is the commonest planning mistake.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Final

from pydantic import BeforeValidator, PlainSerializer

_DECIMAL: Final = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_BINARY: Final = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50}
_SECONDS: Final = {
    "ns": 1e-9,
    "us": 1e-6,
    "µs": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "min": 60.0,
    "h": 3600.0,
    "d": 86400.0,
    "day": 86400.0,
    "days": 86400.0,
    "hours": 3600.0,
}
_NUMBER: Final = re.compile(r"^\s*([+-]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*(.*?)\s*$")
_EXAMPLES: Final = {
    "bytes": '"80 GB" or "80 GiB"',
    "bytes_per_s": '"3.35 TB/s" or "400 Gb/s"',
    "seconds": '"5 us" or "2 min"',
    "flops_per_s": '"989 TFLOP/s"',
    "watts": '"700 W"',
}


def _data_bytes(unit: str) -> float | None:
    """Bytes per `unit` ("GB", "GiB", "Gb", "Gbit"), or None."""
    for suffix, scale in (("bit", 1 / 8), ("B", 1.0), ("b", 1 / 8)):
        if unit.endswith(suffix):
            prefix = unit[: -len(suffix)]
            factor = _BINARY.get(prefix, _DECIMAL.get(prefix))
            return None if factor is None else factor * scale
    return None


def _scale(unit: str, dimension: str) -> float | None:
    if dimension == "bytes":
        return _data_bytes(unit)
    if dimension == "bytes_per_s":
        if unit.endswith("/s"):
            return _data_bytes(unit[:-2])
        return _data_bytes(unit[:-2] + "b") if unit.endswith("bps") else None
    if dimension == "seconds":
        return _SECONDS.get(unit)
    suffixes = {"flops_per_s": ("FLOP/s", "FLOPS", "FLOPs/s"), "watts": ("W",)}[dimension]
    for suffix in suffixes:
        if unit.endswith(suffix):
            return _DECIMAL.get(unit[: -len(suffix)])
    return None


def parse(text: object, dimension: str, *, allow_negative: bool = False) -> float:
    """The SI value of `text`, a string with a unit of `dimension`.

    >>> parse("400 Gb/s", "bytes_per_s")
    50000000000.0

    Raises:
        ValueError: no unit, an unknown unit, a negative or non-finite value.
    """
    example = _EXAMPLES[dimension]
    if isinstance(text, bool) or not isinstance(text, str):
        raise ValueError(f"a quantity with a unit is needed, such as {example}")
    match = _NUMBER.match(text)
    if match is None:
        raise ValueError(f"not a quantity; write it as {example}")
    number, unit = float(match.group(1).replace("_", "")), match.group(2)
    if not unit:
        raise ValueError(f"the unit is missing; write it as {example}")
    scale = _scale(unit, dimension)
    if scale is None:
        raise ValueError(f"unknown unit {unit!r} for {dimension}; write it as {example}")
    if number < 0 and not allow_negative:
        raise ValueError("must not be negative")
    if not math.isfinite(number * scale):
        raise ValueError("is too large")
    return number * scale


def format_bytes(value: float) -> str:
    """`value` bytes for people, in GiB, MiB or KiB."""
    for unit, size in (("TiB", 2.0**40), ("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10)):
        if abs(value) >= size:
            return f"{value / size:.2f} {unit}"
    return f"{value:.0f} B"


def format_seconds(value: float) -> str:
    """`value` seconds for people, from ns to days."""
    for unit, size in (("d", 86400.0), ("h", 3600.0), ("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(value) >= size:
            return f"{value / size:.3g} {unit}" if unit in ("d", "h") else f"{value / size:.4g} {unit}"
    return f"{value * 1e9:.3g} ns" if value else "0 s"


def _annotated(dimension: str) -> tuple[BeforeValidator, PlainSerializer]:
    unit = {"bytes": "B", "bytes_per_s": "B/s", "seconds": "s", "flops_per_s": "FLOP/s", "watts": "W"}[dimension]
    return (
        BeforeValidator(lambda v: parse(v, dimension)),
        PlainSerializer(lambda v: f"{v!r} {unit}", return_type=str),
    )


Bytes = Annotated[float, *_annotated("bytes")]
BytesPerSecond = Annotated[float, *_annotated("bytes_per_s")]
Seconds = Annotated[float, *_annotated("seconds")]
FlopsPerSecond = Annotated[float, *_annotated("flops_per_s")]
Watts = Annotated[float, *_annotated("watts")]
