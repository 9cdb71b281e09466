"""Figures that no source states: inferred from published runs by `python -m simpar.validation.fit_inferred`, never per run.

Each has a physical meaning (the host's time for one more slice, a rate that kernels of one kind reach) and is the best for all runs
that it shows in, with everything else as it is. `inferred.toml` says how sure it is and how much worse its runs come out without.
"""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path

from simpar.specs.base import Spec, read_toml, validate

FILE = Path(__file__).with_name("inferred.toml")
VARIABLE = "SIMPAR_INFERRED"
"""Environment variable of trials, "name=value ...": other values for the processes of the fit."""


class Inferred(Spec):
    """One figure."""

    name: str
    value: float
    unit: str
    meaning: str
    rows: int = 0
    """Runs in which it shows."""
    sources: tuple[str, ...] = ()
    best: float = 0.0
    """Of the values tried, the one of least error; `value` stays where the gain is within its standard error."""
    low: float = 0.0
    high: float = 0.0
    """Ends of the values whose error is within one standard error of the least."""
    error: float = 0.0
    """Mean |predicted / measured - 1| over these runs."""
    without: float = 0.0
    """The same without it (0, or a factor of 1; of a rate, at its upper limit)."""
    cross_validated: float = 0.0
    """The same where the value was chosen on other models."""


class InferredFile(Spec):
    """inferred.toml."""

    figures: tuple[Inferred, ...] = ()


@lru_cache(maxsize=1)
def figures() -> dict[str, Inferred]:
    """The shipped figures by name."""
    return {f.name: f for f in validate(InferredFile, read_toml(FILE), file=str(FILE)).figures}


@lru_cache(maxsize=1)
def _values() -> dict[str, float]:
    trials = (entry.partition("=") for entry in os.environ.get(VARIABLE, "").split())
    return {name: f.value for name, f in figures().items()} | {name: float(value) for name, _, value in trials}


def inferred(name: str) -> float:
    """The value of a figure."""
    return _values()[name]


__all__ = ["FILE", "VARIABLE", "Inferred", "figures", "inferred"]
