"""How much slower real training is than its priced parts, per framework and GPU generation: fitted on published runs.

Kernel tables are measured one kernel at a time; in a training step clocks sag, launches straggle, ranks wait for the slowest of
them, and small ops that nobody lists add up. Each constant scales one physical part of the step and was fitted on all runs of
its framework and architecture together (`python -m simpar.validation.fit_runs`), never per run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from pathlib import Path
from typing import Annotated

from pydantic import Field

from simpar.specs.base import Spec, read_toml, validate
from simpar.specs.framework import family_of

FILE = Path(__file__).with_name("run_calibration.toml")
Factor = Annotated[float, Field(gt=0)]
BOUNDS = {"compute": (0.95, 1.6), "memory": (0.9, 3.0), "communication": (0.9, 4.0), "pass_s": (0.0, 20e-3), "step_s": (0.0, 2.0)}
"""Least and most of each constant. A part cannot run much faster inside a step than alone; a little, because shared tables
differ from a run's own libraries."""


class RunCalibration(Spec):
    """Constants of one framework on one GPU architecture."""

    framework: str
    """Its name, "family NAME" for all frameworks that descend from one, "*" for all."""
    architecture: str
    """A GPU's name as in its profile, or an architecture for all its GPUs together."""
    since: str = "2000-01"
    """First month of the framework's behaviour that it holds for."""
    compute: Factor = 1.0
    """factor on seconds of matmul and attention: clocks and power under sustained mixed load, waiting for the slowest rank"""
    memory: Factor = 1.0
    """factor on seconds of memory-bound kernels and the optimizer: the small kernels that an op list leaves out"""
    communication: Factor = 1.0
    """factor on seconds of collectives and sends (DeepEP's and HybridEP's exchanges apart): link efficiency under load, arrival
    skew"""
    pass_s: Annotated[float, Field(ge=0)] = 0.0
    """host seconds that the device waits for per stage pass, a forward or a backward of one micro-batch"""
    step_s: Annotated[float, Field(ge=0)] = 0.0
    """host seconds per step: logging, data, gradient norm, synchronisation"""
    rows: int = 0
    sources: tuple[str, ...] = ()
    median_before: float = 0.0
    median_after: float = 0.0
    median_cross_validated: float = 0.0
    """Median |predicted / measured - 1| of rows that the constants were not fitted on (left-out sources, or fifths)."""
    expected_error: float = 0.0
    """The same for the next run: drawn towards that of the group around, all the more the fewer rows there are."""
    without: dict[str, float] = {}
    """Constant -> cross-validated median when it alone is left at its neutral value."""


class CalibrationFile(Spec):
    """run_calibration.toml."""

    entries: tuple[RunCalibration, ...] = ()


NEUTRAL = RunCalibration(framework="", architecture="")
UNSEEN_ERROR = 0.162
"""Error expected of a run on an architecture that no constants were fitted for: that of sources left out wholly, without constants
(validation/fit_runs.py)."""
_OTHERS: ContextVar[tuple[RunCalibration, ...] | None] = ContextVar("calibrations", default=None)
"""Constants in place of the shipped ones."""


@lru_cache(maxsize=1)
def calibrations() -> tuple[RunCalibration, ...]:
    """The shipped constants."""
    return read_calibrations(FILE) if FILE.is_file() else ()


def read_calibrations(path: Path) -> tuple[RunCalibration, ...]:
    """The constants of a file that `fit_runs` wrote.

    Raises:
        InputError: unreadable, or an entry that breaks a rule.
    """
    return validate(CalibrationFile, read_toml(path), file=str(path)).entries


@contextmanager
def uncalibrated() -> Iterator[None]:
    """Prices as the parts alone give them, for fitting and for reports without the constants."""
    with calibrated_by(()):
        yield


@contextmanager
def calibrated_by(entries: tuple[RunCalibration, ...]) -> Iterator[None]:
    """These constants instead of the shipped ones."""
    token = _OTHERS.set(entries)
    try:
        yield
    finally:
        _OTHERS.reset(token)


def family_name(framework: str) -> str:
    """What the entries of all frameworks of the same descent are called."""
    return f"family {family_of(framework)}"


def calibration_for(framework: str, since: tuple[int, int], architecture: str, gpu: str = "") -> RunCalibration:
    """The constants in force: of the framework on this GPU; else the framework's (its family's, everybody's) on the architecture,
    moved by what the family's constants on this GPU differ from those on its architecture.
    """
    month = 12 * since[0] + since[1]
    if (own := _generation(framework, gpu, month)) is not None:
        return own
    family = family_name(framework)
    around = (_generation(name, architecture, month) for name in (framework, family, "*"))
    found = next((entry for entry in around if entry is not None), _unseen())
    here, everywhere = _generation(family, gpu, month), _generation(family, architecture, month)
    if here is None or everywhere is None:
        return found
    moved = {name: getattr(found, name) + getattr(here, name) - getattr(everywhere, name) for name in BOUNDS}
    return found.model_copy(update={name: min(max(moved[name], low), high) for name, (low, high) in BOUNDS.items()})


def _unseen() -> RunCalibration:
    """Neutral constants; with the error of a run that nothing is known about, where constants are in use at all."""
    return NEUTRAL.model_copy(update={"expected_error": UNSEEN_ERROR}) if _entries() else NEUTRAL


def _entries() -> tuple[RunCalibration, ...]:
    others = _OTHERS.get()
    return calibrations() if others is None else others


def _generation(name: str, chip: str, month: int) -> RunCalibration | None:
    """The latest entry not after `month` (counted from year 0), or one that begins within a year of it."""
    found = [c for c in _entries() if c.framework == name and c.architecture == chip]
    past = [c for c in found if _month(c) <= month]
    if past:
        return max(past, key=_month)
    return min((c for c in found if _month(c) - month <= 12), key=_month, default=None)


def _month(entry: RunCalibration) -> int:
    year, month = entry.since.split("-")
    return 12 * int(year) + int(month)
