"""Widths of intervals from errors on unseen sources: split-conformal factors by group, pulled to the group around.

A step's interval is the parts' own intervals and the expected error in quadrature, in logarithms, times a factor. The factor of a
group is the 80 % quantile of |log(measured / predicted)| over that width, on runs whose source no fit had seen; a peak's interval
is the same quantile of the log error itself.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Final

import numpy as np

from simpar.evidence.pooled import LEAST_SOURCES, architectures_of, described
from simpar.evidence.samples import Data, FloatArray, Peak, Sample
from simpar.result.interval import HALF_WIDTH
from simpar.specs.calibration import ANY, BOUNDS, UNFAMILIAR, Constant, Name

LEVEL: Final = 0.8
"""Share of runs that an interval is to cover."""
SHRINK: Final = 2.0
"""Weight of the group around in the factor of a group, in sources."""
TELLING: Final = 0.125
"""Least difference (of logarithms) from the group around that a group has a value of its own for."""


def width_of(sample: Sample, expected_error: float, off: float) -> float:
    """Half-width of a run's interval before its factor, in log seconds, on the side of `off` = log(measured / predicted)."""
    return math.hypot(sample.up if off > 0 else sample.down, math.log1p(HALF_WIDTH * expected_error))


def scores(data: Data, unseen: FloatArray, expected_error: float) -> FloatArray:
    """|log(measured / predicted)| over the half-width before its factor [rows]; unseen: predicted / measured - 1."""
    off = -np.log1p(unseen)
    return np.array([abs(o) / width_of(s, expected_error, o) for s, o in zip(data.samples, off, strict=True)])


def expected_error_of(data: Data, unseen: FloatArray) -> float:
    """Median over sources of the median absolute error of their runs."""
    return float(np.median([np.median(np.abs(unseen[data.source_index == i])) for i in range(len(data.sources))]))


def quantile(values: Sequence[float], sources: Sequence[str], power: float = 0.5) -> float:
    """The weighted `LEVEL` quantile of `values`; one of a source of n rows weighs n ** -power.

    A value beyond all those seen is as likely as one among them: one more row, of unknown value, counts as the largest.
    """
    counts = Counter(sources)
    weight = np.array([counts[s] ** -power for s in sources])
    order = np.argsort(values)
    share = np.cumsum(weight[order]) / (weight.sum() * (1.0 + 1.0 / len(values)))
    return float(np.asarray(values)[order][min(int(np.searchsorted(share, LEVEL)), len(values) - 1)])


def nested(name: Name, rows: Sequence[Sample], values: FloatArray) -> list[Constant]:
    """The `LEVEL` quantile of `values` in every group of at least `LEAST_SOURCES` sources, the group of all runs first.

    A group whose value is that of the group around it, as far as one can tell, has none of its own.

    Args:
        rows: runs, one for each of `values`.
    """
    groups = {(ANY, ANY)} | {(r.family, ANY) for r in rows} | {(r.family, r.architecture) for r in rows}
    found: list[Constant] = []
    for family, architecture in sorted(groups):
        entry = Constant(name=name, family=family, architecture=architecture, value=0.0, status="interval")
        inside = [i for i, r in enumerate(rows) if entry.holds(r.family, r.architecture, r.gpu)]
        sources = [rows[i].source for i in inside]
        count = len(set(sources))
        if family != ANY and count < LEAST_SOURCES:
            continue
        own = quantile([float(values[i]) for i in inside], sources)
        around = next((e.value for e in reversed(found) if _around(e, entry)), None)
        value = own if around is None else pulled(own, count, around)
        if around is not None and abs(math.log(value / around)) < TELLING:
            continue
        listed = {"rows": len(inside), "sources": tuple(sorted(set(sources)))}
        found.append(entry.model_copy(update={"value": clipped(name, value), **listed}))
    return found


def pulled(own: float, count: int, around: float) -> float:
    """The width of a group of `count` sources, pulled to that of the group around it."""
    return math.exp((count * math.log(max(own, 1e-3)) + SHRINK * math.log(max(around, 1e-3))) / (count + SHRINK))


def clipped(name: Name, value: float) -> float:
    """`value` within the bounds of a constant."""
    low, high = BOUNDS[name]
    return min(max(value, low), high)


def _around(wide: Constant, narrow: Constant) -> bool:
    """Whether `wide` is a group around `narrow`."""
    return wide.family in (ANY, narrow.family) and wide.architecture in (ANY, narrow.architecture)


def interval_entries(data: Data, unseen: FloatArray, unfamiliar: FloatArray) -> list[Constant]:
    """Expected error of all runs, factors by group, and the factor of a family that no fit has seen.

    Args:
        unseen, unfamiliar: predicted / measured - 1 [rows], fitted without the row's source, and without its whole family.
    """
    error = expected_error_of(data, unseen)
    first = Constant(name="expected_error", value=error, status="interval")
    first = first.model_copy(update={"architectures": architectures_of(data, first)})
    factors = nested("interval_factor", data.samples, scores(data, unseen, error))
    factors = [e.model_copy(update={"architectures": architectures_of(data, e)}) for e in factors]
    sources = [s.source for s in data.samples]
    strange = max(quantile(scores(data, unfamiliar, error).tolist(), sources), factors[0].value)
    other = described(data, first.model_copy(update={"name": "interval_factor", "value": strange}))
    return [described(data, first), *factors, other.model_copy(update={"family": UNFAMILIAR})]


PEAKS: Final[dict[bool, Name]] = {False: "memory_error", True: "expert_memory_error"}
"""Whether a model has experts -> the width of the interval of its peak of memory."""


def memory_entries(peaks: Sequence[Peak]) -> list[Constant]:
    """Log half-widths of predicted peaks, of models without and with experts, each pulled to that of all.

    Each source weighs the same: most have few peaks, and rows of one source are off alike. What a figure counts (allocated,
    reserved, the whole device) and the family of frameworks were groups as well: on left-out sources they cover less and score
    worse.
    """

    def width(rows: Sequence[Peak]) -> float:
        return quantile([abs(p.off) for p in rows], [p.source for p in rows], power=1.0)

    found = []
    for experts, name in PEAKS.items():
        rows = [p for p in peaks if p.experts == experts]
        sources = tuple(sorted({p.source for p in rows}))
        if rows:
            value = pulled(width(rows), len(sources), width(peaks))
            found.append(Constant(name=name, value=clipped(name, value), status="interval", rows=len(rows), sources=sources))
    return found


def peaks_covered(peaks: Sequence[Peak]) -> tuple[FloatArray, FloatArray]:
    """(Whether each peak lies in its interval, its interval score) [peaks], the widths those of all other sources."""
    widths = np.zeros(len(peaks))
    for source in {p.source for p in peaks}:
        known = {e.name: e.value for e in memory_entries([p for p in peaks if p.source != source])}
        for i, peak in enumerate(peaks):
            if peak.source == source:
                widths[i] = known.get(PEAKS[peak.experts], max(known.values(), default=0.0))
    return scored(np.array([p.off for p in peaks]), widths, widths)


def held_out_factors(data: Data, unseen: FloatArray) -> FloatArray:
    """The factor of each row's group [rows], from the scores of all other sources."""
    error = expected_error_of(data, unseen)
    values = scores(data, unseen, error)
    found = np.ones(len(values))
    for source in data.sources:
        inside = np.array([s.source == source for s in data.samples])
        others, _ = data.split([source])
        entries = nested("interval_factor", others.samples, values[~inside])
        for entry in entries:  # wide groups first, so that the narrowest stays
            found[inside & data.members(entry)] = entry.value
    return found


def covered(data: Data, unseen: FloatArray, factors: FloatArray) -> tuple[FloatArray, FloatArray]:
    """(Whether each row lies in its interval, its interval score) [rows]."""
    error = expected_error_of(data, unseen)
    off = -np.log1p(unseen)
    up, down = (np.array([width_of(s, error, side) for s in data.samples]) * factors for side in (1.0, -1.0))
    return scored(off, up, down)


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
