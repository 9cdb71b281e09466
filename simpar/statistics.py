"""Errors of predictions over any grouping, and how well "does it fit" and idle shares are told.

Errors are relative, predicted / measured - 1, so a positive bias means that predictions are too slow or too large.
Shares
(bubble fractions) are compared by their difference, in points of the step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

ABSOLUTE_METRICS: Final = frozenset({"bubble_fraction"})
"""Metrics whose error is a difference, not a ratio."""
LABEL_METRICS: Final = frozenset({"oom"})
"""Metrics that are true or false."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One measured value beside its prediction.

    Attributes:
        id: the data's own identity of the row.
        metric: step_time_s, peak_memory_bytes, bubble_fraction or oom.
        measured: the value in SI units; a bool for oom.
        predicted: None where the row could not be expressed.
        low, high: ends of the 80 % interval.
        group: the row's own identifying keys.
        skipped: why there is no prediction, "" when there is one.
        band: two predictions between which every measured value counts as right (memory whose kind is not stated).
        details: what else is worth showing: assumptions, the predicted parts.
    """

    id: str
    metric: str
    measured: float | bool
    predicted: float | bool | None
    low: float | None = None
    high: float | None = None
    group: Mapping[str, Any] = field(default_factory=dict)
    skipped: str = ""
    band: tuple[float, float] | None = None
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def error(self) -> float | None:
        """Relative error, difference for a share, 0 or 1 for a label; None without a prediction."""
        if self.predicted is None:
            return None
        if self.metric in LABEL_METRICS:
            return float(bool(self.predicted) != bool(self.measured))
        if self.metric in ABSOLUTE_METRICS:
            return float(self.predicted) - float(self.measured)
        if self.band is not None:
            nearest = min(max(float(self.measured), self.band[0]), self.band[1])
            return nearest / float(self.measured) - 1.0
        return float(self.predicted) / float(self.measured) - 1.0

    @property
    def covered(self) -> bool | None:
        """Whether the measured value lies in the interval; None without one."""
        if self.predicted is None or self.low is None or self.high is None:
            return None
        return self.low <= float(self.measured) <= self.high

    def as_json(self) -> dict[str, Any]:
        """The row of `simpar validate --json`."""
        table: dict[str, Any] = {
            "id": self.id, "metric": self.metric, "measured": self.measured, "predicted": self.predicted,
            "low": self.low, "high": self.high, "group": dict(self.group), "skipped": self.skipped or None,
        }  # fmt: skip
        if self.band is not None:
            table["band"] = list(self.band)
        if self.details:
            table["details"] = dict(self.details)
        return table


@dataclass(frozen=True, slots=True)
class ErrorSummary:
    """Errors of one group of comparisons.

    Attributes:
        rows: comparisons with a prediction.
        skipped: comparisons without one.
        mape: mean absolute error (relative; in points / 100 for shares; share of wrong labels for oom).
        median, p90, max: of the absolute error.
        bias: mean signed error.
        coverage: share of measured values inside their 80 % interval; None where there are no intervals.
    """

    rows: int
    skipped: int
    mape: float | None
    median: float | None
    p90: float | None
    max: float | None
    bias: float | None
    coverage: float | None

    def as_json(self) -> dict[str, Any]:
        """Field name -> value."""
        return asdict(self)


def summarize(comparisons: Iterable[Comparison]) -> ErrorSummary:
    """The errors of `comparisons` together."""
    rows = list(comparisons)
    errors = np.array([row.error for row in rows if row.error is not None], dtype=float)
    inside = np.array([row.covered for row in rows if row.covered is not None])
    return summary_of(errors, inside, len(rows) - errors.size)


def summary_of(errors: NDArray[np.float64], inside: NDArray[np.bool_], skipped: int) -> ErrorSummary:
    """The summary of signed `errors`, of the values that have an interval `inside` it or not, and of `skipped` comparisons."""
    if not errors.size:
        return ErrorSummary(0, skipped, None, None, None, None, None, None)
    size = np.abs(errors)
    return ErrorSummary(
        rows=int(errors.size),
        skipped=skipped,
        mape=float(size.mean()),
        median=float(np.median(size)),
        p90=float(np.quantile(size, 0.9)),
        max=float(size.max()),
        bias=float(errors.mean()),
        coverage=float(np.mean(inside)) if inside.size else None,
    )


@dataclass(frozen=True, slots=True)
class Group:
    """One line of a report: the metric, what its rows share, and their errors."""

    metric: str
    by: Mapping[str, Any]
    summary: ErrorSummary

    def as_json(self) -> dict[str, Any]:
        """Flat: metric, by, rows, skipped, mape, median, p90, max, bias, coverage."""
        return {"metric": self.metric, "by": dict(self.by), **self.summary.as_json()}


Key = str | Callable[[Comparison], Any]


def _value(row: Comparison, key: Key) -> Any:
    return key(row) if callable(key) else row.group.get(key)


def group_by(comparisons: Sequence[Comparison], **keys: Key) -> dict[tuple[Any, ...], list[Comparison]]:
    """`comparisons` by the values of `keys`: a key of the row's group, or a function of the comparison."""
    groups: dict[tuple[Any, ...], list[Comparison]] = defaultdict(list)
    for row in comparisons:
        groups[tuple(_value(row, key) for key in keys.values())].append(row)
    return dict(groups)


@dataclass(frozen=True, slots=True)
class FitConfusion:
    """Labelled runs by what happened and what was predicted.

    Attributes:
        fits_called_fits, fits_called_oom: runs that ran.
        oom_called_oom, oom_called_fits: runs that ran out of memory.
    """

    fits_called_fits: int
    fits_called_oom: int
    oom_called_oom: int
    oom_called_fits: int

    @property
    def rows(self) -> int:
        """Labelled runs with a prediction."""
        return self.fits_called_fits + self.fits_called_oom + self.oom_called_oom + self.oom_called_fits

    @property
    def accuracy(self) -> float | None:
        """Share told right."""
        return (self.fits_called_fits + self.oom_called_oom) / self.rows if self.rows else None

    def as_json(self) -> dict[str, Any]:
        """Counts and accuracy."""
        return {**asdict(self), "rows": self.rows, "accuracy": self.accuracy}


def fit_confusion(comparisons: Iterable[Comparison]) -> FitConfusion:
    """The confusion table of the `oom` comparisons among `comparisons`."""
    counts = {(m, p): 0 for m in (False, True) for p in (False, True)}
    for row in comparisons:
        if row.metric == "oom" and row.predicted is not None:
            counts[bool(row.measured), bool(row.predicted)] += 1
    return FitConfusion(counts[False, False], counts[False, True], counts[True, True], counts[True, False])


CHANCES: Final = (0.0, 0.02, 0.1, 0.25, 0.5, 0.75, 0.9, 0.98, 1.0)
"""Ends of the bands of the chance to fit."""


@dataclass(frozen=True, slots=True)
class ChanceBand:
    """Runs whose chance to fit lies in [low, high): how many ran, and how many ran out of memory."""

    low: float
    high: float
    ran: int
    out_of_memory: int


def chances_to_fit(comparisons: Iterable[Comparison]) -> dict[str, tuple[float, bool]]:
    """Run -> (chance to fit, whether it ran out of memory), of runs with a measured step or a label."""
    found: dict[str, tuple[float, bool]] = {}
    for row in comparisons:
        if "fit_probability" in row.details:
            failed = found.get(row.id, (0.0, False))[1] or (row.metric == "oom" and bool(row.measured))
            found[row.id] = (row.details["fit_probability"], failed)
    return found


def fit_by_chance(chances: Iterable[tuple[float, bool]]) -> tuple[ChanceBand, ...]:
    """How often runs of each band of chances ran, bands without runs left out; a chance of 1 belongs to the last."""
    counts = {low: [0, 0] for low in CHANCES[:-1]}
    for chance, failed in chances:
        counts[max(low for low in counts if low <= max(chance, 0.0))][failed] += 1
    return tuple(ChanceBand(low, high, *counts[low]) for low, high in pairwise(CHANCES) if any(counts[low]))
