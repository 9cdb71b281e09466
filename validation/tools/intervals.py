"""Widths of intervals from errors on unseen sources: split-conformal factors by group, pulled to the group around.

A step's interval is the parts' own intervals and the expected error in quadrature, in logarithms, times one factor above and one
below. The factor of a group, a family of frameworks on an architecture, is the 90 % quantile of log(measured / predicted) over that
width, or of its negative, on runs whose source no fit had seen: what nobody foresees makes steps longer more often than shorter. A
peak's interval is the 80 % quantile of the log error's size.

Runs that leave facts open say nothing of either: an answer with open facts spreads over its readings (`simpar.readings`), so that a
factor with their guesses in it would count them twice.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from simpar.result.interval import HALF_WIDTH
from simpar.specs.calibration import ANY, UNFAMILIAR, Constant, width_in_force, within
from validation.tools.pooled import LEAST_SOURCES, described
from validation.tools.samples import Data, FloatArray, Peak, Sample

LEVEL: Final = 0.8
"""Share of runs that an interval is to cover."""
SIDES: Final[dict[str, float]] = {"interval_up": 1.0, "interval_down": -1.0}
"""Factor on one half of a step's interval -> sign of log(measured / predicted) there."""
SHRINK: Final = 5.0
"""Weight of all runs in the width of a group, in sources (of 1, 3, 5 and 8 the one of the best interval score on left-out runs and
sources together)."""


def architectures_of(data: Data, entry: Constant) -> tuple[str, ...]:
    """Architectures that at least `LEAST_SOURCES` sources of a width's group ran on."""
    sources: dict[str, set[str]] = defaultdict(set)
    for sample, inside in zip(data.samples, data.members(entry), strict=True):
        if inside:
            sources[sample.architecture].add(sample.source)
    return tuple(sorted(name for name, found in sources.items() if len(found) >= LEAST_SOURCES))


def scores(data: Data, unseen: FloatArray, expected_error: float, side: float) -> FloatArray:
    """log(measured / predicted) towards `side` over the half-width there before its factor [rows].

    Args:
        unseen: predicted / measured - 1 [rows].
        side: 1 above, -1 below.
    """
    return -side * np.log1p(unseen) / widths(data, expected_error, side)


def widths(data: Data, expected_error: float, side: float) -> FloatArray:
    """Half-widths of intervals on one side (1 above, -1 below) before their factor, in log seconds [rows]."""
    own = math.log1p(HALF_WIDTH * expected_error)
    return np.array([math.hypot(s.up if side > 0 else s.down, own) for s in data.samples])


def expected_error_of(data: Data, unseen: FloatArray) -> float:
    """Median over sources of the median absolute error of their runs."""
    return float(np.median([np.median(np.abs(unseen[data.source_index == i])) for i in range(len(data.sources))]))


def quantile(values: Sequence[float], sources: Sequence[str], level: float) -> float:
    """The weighted `level` quantile of `values`; one of a source of n rows weighs 1 / sqrt(n).

    A value beyond all those seen is as likely as one among them: one more row, of unknown value, counts as the largest.
    """
    counts = Counter(sources)
    weight = np.array([counts[s] ** -0.5 for s in sources])
    order = np.argsort(values)
    share = np.cumsum(weight[order]) / (weight.sum() * (1.0 + 1.0 / len(values)))
    return float(np.asarray(values)[order][min(int(np.searchsorted(share, level)), len(values) - 1)])


def stated(data: Data) -> NDArray[np.bool_]:
    """Whether each run states all that its step depends on [rows]."""
    return np.array([not s.open for s in data.samples], dtype=bool)


def grouped(name: str, rows: Sequence[Sample], values: FloatArray) -> list[Constant]:
    """The quantile of `values` that leaves a tenth above: of all runs, then of each family on each architecture, pulled to that of
    all, with at least `LEAST_SOURCES` sources.

    Args:
        rows: runs, one for each of `values`.
    """
    found: list[Constant] = []
    for family, architecture in ((ANY, ANY), *sorted({(r.family, r.architecture) for r in rows})):
        entry = Constant(name=name, family=family, architecture=architecture, value=0.0, status="interval")
        inside = [i for i, r in enumerate(rows) if entry.holds(r.family, r.architecture)]
        sources = [rows[i].source for i in inside]
        count = len(set(sources))
        if found and count < LEAST_SOURCES:
            continue
        value = within(name, quantile([float(values[i]) for i in inside], sources, (1.0 + LEVEL) / 2.0))
        if found:
            value = pulled(value, count, found[0].value)
        listed = {"rows": len(inside), "sources": tuple(sorted(set(sources)))}
        found.append(entry.model_copy(update={"value": within(name, value), **listed}))
    return found


def pulled(own: float, count: int, around: float) -> float:
    """The width of a group of `count` sources, pulled to that of all runs."""
    return math.exp((count * math.log(max(own, 1e-3)) + SHRINK * math.log(max(around, 1e-3))) / (count + SHRINK))


def interval_entries(data: Data, unseen: FloatArray, unfamiliar: FloatArray) -> list[Constant]:
    """Expected error of all runs, factors by group, and the factor of a family that no fit has seen.

    Args:
        unseen, unfamiliar: predicted / measured - 1 [rows], fitted without the row's source, and without its whole family.
    """
    error, told = expected_error_of(data, unseen), stated(data)
    first = Constant(name="expected_error", value=error, status="interval")
    first = first.model_copy(update={"architectures": architectures_of(data, first)})
    found, rows = [described(data, first)], [s for s, kept in zip(data.samples, told, strict=True) if kept]
    for name, side in SIDES.items():
        factors = grouped(name, rows, scores(data, unseen, error, side)[told])
        found += [e.model_copy(update={"architectures": architectures_of(data, e)}) for e in factors]
        far = scores(data, unfamiliar, error, side)[told].tolist()
        strange = within(name, quantile(far, [s.source for s in rows], (1.0 + LEVEL) / 2.0))
        other = described(data, first.model_copy(update={"name": name, "value": max(strange, factors[0].value)}))
        found.append(other.model_copy(update={"family": UNFAMILIAR}))
    return found


PEAKS: Final[dict[bool, str]] = {False: "memory_error", True: "expert_memory_error"}
"""Whether a model has experts -> the width of the interval of its peak of memory."""


def memory_entries(peaks: Sequence[Peak]) -> list[Constant]:
    """Log half-widths of predicted peaks, of models without and with experts, each pulled to that of all.

    What a figure counts (allocated, reserved, the whole device) and the family of frameworks were groups as well: on left-out
    sources they cover less and score worse.
    """

    def width(rows: Sequence[Peak]) -> float:
        return quantile([abs(p.off) for p in rows], [p.source for p in rows], LEVEL)

    found, peaks = [], [p for p in peaks if not p.open]
    for experts, name in PEAKS.items():
        rows = [p for p in peaks if p.experts == experts]
        sources = tuple(sorted({p.source for p in rows}))
        if rows:
            value = pulled(width(rows), len(sources), width(peaks))
            found.append(Constant(name=name, value=within(name, value), status="interval", rows=len(rows), sources=sources))
    return found


def peaks_covered(peaks: Sequence[Peak]) -> tuple[FloatArray, FloatArray]:
    """(Whether each peak lies in its interval, its interval score) [peaks], the widths those of all other sources."""
    half = np.zeros(len(peaks))
    for source in {p.source for p in peaks}:
        known = {e.name: e.value for e in memory_entries([p for p in peaks if p.source != source])}
        for i, peak in enumerate(peaks):
            if peak.source == source:
                half[i] = known.get(PEAKS[peak.experts], max(known.values(), default=0.0))
    return scored(np.array([p.off for p in peaks]), half, half)


def held_out_widths(data: Data, unseen: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Half-widths of each row's interval above and below, in log seconds [rows], with the factors of all other sources."""
    error, told = expected_error_of(data, unseen), stated(data)
    found = {}
    for name, side in SIDES.items():
        values, factors = scores(data, unseen, error, side), np.ones(len(data.samples))
        for index in range(len(data.sources)):
            inside = data.source_index == index
            others = ~inside & told
            rows = [s for s, kept in zip(data.samples, others, strict=True) if kept]
            known = grouped(name, rows, values[others])
            for i in np.flatnonzero(inside):
                factors[i] = width_in_force(known, name, data.samples[i].family, data.samples[i].architecture)
        found[name] = factors * widths(data, error, side)
    return found["interval_up"], found["interval_down"]


def covered(data: Data, unseen: FloatArray) -> tuple[FloatArray, FloatArray]:
    """(Whether each row lies in its interval, its interval score) [rows], the factors those of all other sources."""
    return scored(-np.log1p(unseen), *held_out_widths(data, unseen))


def scored(off: FloatArray, up: FloatArray, down: FloatArray) -> tuple[FloatArray, FloatArray]:
    """(Whether each value lies in its interval, its interval score) [values].

    The interval score of an 80 % interval in logarithms is its width plus ten times what lies outside (Gneiting and Raftery 2007,
    eq. 43): lower is better, wide and wrong alike cost.

    Args:
        off: log(measured / predicted) [values].
        up, down: half-widths of the interval above and below [values].
    """
    outside = np.maximum(off - up, 0.0) + np.maximum(-off - down, 0.0)
    return (outside <= 0.0).astype(float), up + down + outside * 2.0 / (1.0 - LEVEL)
