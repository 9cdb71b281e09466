"""Run-level constants, one of a name for an architecture.

Each constant is an architecture's deviation from kernels and links as measured alone, pulled towards none (partial pooling): a
Gaussian prior, `SPREAD`, says how far architectures differ. Runs of one source are alike, so a source of n runs weighs
n / (n tau^2 + sigma^2): hardly more than one run. The fit is robust least squares on log errors (scipy, a pseudo-Huber loss).

The gate asks the group itself. A constant stays only where the error of the sources of its own group, each left out of the fit,
falls by more than the standard error of that gain; the least useful one goes first, and all others are refitted. Of one that pays
for all together, a family takes the share that its own left-out sources make it probable to help them (`Constant.shares`): all or
nothing would let one source of the family decide. A run that is off by more than `WORST` has another cause, and tells nothing
there: a few such runs of a family would else carry a factor that harms its next source. Left-out errors while constants are dropped
come from the linearised fit, which is exact for the prior and one step from the robust optimum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from simpar.specs.calibration import FACTORS, KNOWN, Constant
from validation.tools.samples import Data, FloatArray

SPREAD: Final[dict[str, float]] = {"compute": 0.1, "memory": 0.3}
"""Standard deviation of log(constant) between architectures (assumed before any fit, and not tuned). What is not listed was tried
and gained nothing on left-out sources: communication, host seconds per pass and per step, a factor for all runs together, factors
for a software family or a family on one GPU (with those on offer the choice repeated without each source is 0.2 % worse)."""
TAU: Final = 0.2
"""Standard deviation of what a source's runs have in common that no constant explains, in log seconds: that of the medians of 213
stored sources with nothing fitted is 0.15 by their median deviation and 0.25 as it is. (Assumed before: 0.1, with which left-out
sources are predicted worse, 16.7 % instead of 16.3; halving each fitted logarithm instead gives 16.3 too.)"""
SIGMA: Final = 0.1
"""Standard deviation of single runs around that."""
HUBER: Final = 0.1
"""Log error up to which errors count squared; beyond it they count linearly."""
LEAST_SOURCES: Final = 3
"""Fewest sources of a group with run-level constants of its own, and of a family with a share of its own."""
LEAST_GAIN: Final = 0.0025
"""Least gain of a constant, a quarter of a point of error: less is not worth a number."""
ROUNDS: Final = 3
"""Times that shares of families and values of constants are found in turn."""
WORST: Final = 0.3
"""Largest absolute relative error that a row counts with in a gain. No constant within two standard deviations of its prior
explains more: 1.22 times the compute, or 1.8 times the memory-bound third of a step."""


def candidates(data: Data) -> list[Constant]:
    """Every constant that could be fitted: those of architectures with enough sources, neutral."""
    chips = sorted({s.architecture for s in data.samples})
    found = [Constant(name=name, value=KNOWN[name].neutral, architecture=chip) for chip in chips for name in SPREAD]
    return [entry for entry in found if len(data.sources_of(entry)) >= LEAST_SOURCES]


@dataclass(frozen=True)
class Problem:
    """Log seconds of all rows as a function of the logarithms of the constants.

    Attributes:
        data: the rows.
        group: how much of a constant holds for a row [rows, constants].
        column: index into the parts that a constant scales [constants].
        spread: of its prior [constants].
        weight: of each row [rows].
    """

    data: Data
    group: FloatArray
    column: np.ndarray[tuple[int], np.dtype[np.intp]]
    spread: FloatArray
    weight: FloatArray

    @classmethod
    def of(cls, data: Data, entries: Sequence[Constant]) -> Problem:
        """The problem of fitting `entries`, factors all, on `data`."""
        group = np.array([data.shares(e) for e in entries]).reshape(len(entries), len(data.samples)).T
        column = np.array([FACTORS.index(e.name) for e in entries], dtype=np.intp)
        spread = np.array([SPREAD[e.name] for e in entries])
        weight = np.asarray(1.0 / (data.rows_of_source * TAU**2 + SIGMA**2), dtype=np.float64)
        return cls(data, group, column, spread, weight)

    def log_seconds(self, values: FloatArray) -> tuple[FloatArray, FloatArray]:
        """(Log seconds [rows], their derivatives [rows, constants]) at the logarithms `values` [constants]."""
        terms = self.data.parts[:, : len(FACTORS)].copy()
        for index in range(len(FACTORS)):
            here = self.column == index
            terms[:, index] *= np.exp(self.group[:, here] @ values[here])
        total = np.maximum(terms.sum(1) + self.data.rest, 1e-9)
        return np.log(total), self.group * terms[:, self.column] / total[:, None]

    def residuals(self, values: FloatArray) -> FloatArray:
        """Pseudo-Huber residuals of the rows, then those of the priors [rows + constants]."""
        off = (self.log_seconds(values)[0] - np.log(self.data.measured)) / HUBER
        robust = np.sign(off) * np.sqrt(2.0 * (np.sqrt(1.0 + off * off) - 1.0)) * HUBER
        return np.concatenate([np.sqrt(self.weight) * robust, values / self.spread])

    def jacobian(self, values: FloatArray) -> FloatArray:
        """Derivatives of `residuals` [rows + constants, constants]."""
        seconds, slopes = self.log_seconds(values)
        off = (seconds - np.log(self.data.measured)) / HUBER
        root = np.sqrt(1.0 + off * off)
        # d robust / d off = off / (root * robust), which tends to 1 at 0.
        robust = np.sqrt(2.0 * (root - 1.0))
        chain = np.where(robust > 1e-6, np.abs(off) / np.maximum(root * robust, 1e-12), 1.0)
        return np.vstack([(np.sqrt(self.weight) * chain)[:, None] * slopes, np.diag(1.0 / self.spread)])


def fit(data: Data, entries: Sequence[Constant]) -> tuple[Constant, ...]:
    """`entries` with the values that meet `data` best, pulled towards neutral."""
    from scipy.optimize import least_squares  # an extra: only fits need it

    if not entries:
        return ()
    problem = Problem.of(data, entries)
    low, high = (np.log([KNOWN[e.name].bounds[end] for e in entries]) for end in (0, 1))
    found = least_squares(problem.residuals, np.zeros(len(entries)), problem.jacobian, bounds=(low, high), x_scale=problem.spread)
    return tuple(e.model_copy(update={"value": float(math.exp(v))}) for e, v in zip(entries, found.x, strict=True))


@dataclass(frozen=True)
class LeftOut:
    """A fit linearised at its optimum: the errors of every source left out, for any subset of its constants and of their families.

    Attributes:
        data: what was fitted.
        slopes, target: derivatives [rows, constants] and log errors to be explained [rows].
        weight: of each row [rows].
        precision: of the priors [constants].
        rows: those of each source.
    """

    data: Data
    slopes: FloatArray
    target: FloatArray
    weight: FloatArray
    precision: FloatArray
    rows: tuple[np.ndarray[tuple[int], np.dtype[np.intp]], ...]

    @classmethod
    def of(cls, data: Data, fitted: Sequence[Constant]) -> LeftOut:
        """The linearisation of `fit(data, ...)` at its result."""
        problem = Problem.of(data, fitted)
        values = np.log([e.value for e in fitted]) if fitted else np.zeros(0)
        seconds, slopes = problem.log_seconds(values)
        off = np.log(data.measured) - seconds
        weight = problem.weight / np.sqrt(1.0 + (off / HUBER) ** 2)
        rows = tuple(np.flatnonzero(data.source_index == i) for i in range(len(data.sources)))
        return cls(data, slopes, off + slopes @ values, weight, 1.0 / problem.spread**2, rows)

    def without(self, entries: Sequence[int], rows: NDArray[np.bool_]) -> LeftOut:
        """The same where some constants do not hold for some rows [rows]."""
        slopes = self.slopes.copy()
        slopes[np.ix_(rows, np.array(entries))] = 0.0
        return replace(self, slopes=slopes)

    def errors(self, kept: Sequence[int]) -> FloatArray:
        """Absolute relative error of each row [rows] with the constants `kept` fitted without its source."""
        found = np.abs(np.expm1(-self.target))
        if len(kept):
            k = np.asarray(kept)
            slopes = self.slopes[:, k]
            heavy = slopes * self.weight[:, None]
            normal = np.array([heavy[i].T @ slopes[i] for i in self.rows])
            pull = np.array([heavy[i].T @ self.target[i] for i in self.rows])
            normal = normal.sum(0) + np.diag(self.precision[k]) - normal
            values = np.linalg.solve(normal, (pull.sum(0) - pull)[:, :, None])[:, :, 0]
            for inside, own in zip(self.rows, values, strict=True):
                found[inside] = np.abs(np.expm1(np.clip(slopes[inside] @ own - self.target[inside], -3.0, 1.0)))
        return np.minimum(found, WORST)

    def gain(self, saved: FloatArray, members: NDArray[np.bool_]) -> tuple[float, float]:
        """(Mean over the sources of `members` of the error saved on their rows, its standard error)."""
        by_source = np.array([saved[inside[members[inside]]].mean() for inside in self.rows if members[inside].any()])
        return float(by_source.mean()), float(by_source.std() / math.sqrt(len(by_source)))


def gated(data: Data, entries: Sequence[Constant]) -> tuple[Constant, ...]:
    """Those of `entries` that pay on the left-out sources of their own group, fitted on all of `data`, each with its gain.

    First families take their shares of an architecture's constants; then what does not pay beside the others goes.
    """
    found = list(entries)
    for _ in range(ROUNDS):
        found = _shared(data, fit(data, found))
    left = LeftOut.of(data, fit(data, found))
    kept, gains = _paying(left, list(range(len(found))))
    chosen = fit(data, [found[k] for k in kept])
    return tuple(described(data, e, gains[k]) for k, e in zip(kept, chosen, strict=True))


def _paying(left: LeftOut, kept: list[int]) -> tuple[list[int], dict[int, tuple[float, float]]]:
    """(Constants that pay beside each other, their gains with standard errors); the least useful one goes first."""
    while True:
        now = left.errors(kept)
        members = left.slopes != 0.0
        gains = {k: left.gain(left.errors([j for j in kept if j != k]) - now, members[:, k]) for k in kept if members[:, k].any()}
        surplus = {k: min(gain - doubt, gain - LEAST_GAIN) for k, (gain, doubt) in gains.items()}
        worst = min(kept, key=lambda k: surplus.get(k, -1.0), default=None)
        if worst is None or surplus.get(worst, -1.0) > 0.0:
            return kept, gains
        kept = [k for k in kept if k != worst]


def _shared(data: Data, fitted: Sequence[Constant]) -> list[Constant]:
    """`fitted`, each family of `LEAST_SOURCES` sources or more with the share of an architecture's constants that it should take.

    That is the probability that they help it, the gain of its left-out sources under the constants as a whole being as uncertain as
    its standard error says.
    """
    every, found = range(len(fitted)), []
    for chip in sorted({e.architecture for e in fitted}):
        own = [k for k in every if fitted[k].architecture == chip]
        inside = data.members(fitted[own[0]])
        shares = []
        for name in sorted({s.family for s, here in zip(data.samples, inside, strict=True) if here}):
            rows = np.array([s.family == name for s in data.samples])
            members = inside & rows
            if members.sum() == inside.sum() or len(set(data.source_index[members].tolist())) < LEAST_SOURCES:
                continue
            whole = [e.model_copy(update={"shares": tuple(s for s in e.shares if s[0] != name)}) for e in fitted]
            left = LeftOut.of(data, whole)
            gain, doubt = left.gain(left.without(own, rows).errors(every) - left.errors(every), members)
            shares.append((name, round(_positive(gain, doubt), 2)))
        found += [(k, fitted[k].model_copy(update={"shares": tuple(shares)})) for k in own]
    return [entry for _, entry in sorted(found, key=lambda each: each[0])]


def _positive(gain: float, doubt: float) -> float:
    """How probable a gain of this standard error is to be above 0."""
    return 0.5 * (1.0 + math.erf(gain / (math.sqrt(2.0) * doubt))) if doubt > 0.0 else float(gain > 0.0)


def described(data: Data, entry: Constant, gain: tuple[float, float] = (0.0, 0.0)) -> Constant:
    """`entry` with its rows, sources and gain."""
    rows = int(data.members(entry).sum())
    update = {"rows": rows, "sources": tuple(data.sources_of(entry)), "gain": gain[0], "gain_se": gain[1]}
    return entry.model_copy(update=update)


def regained(data: Data, entries: Sequence[Constant]) -> tuple[Constant, ...]:
    """`entries` as they are, each with its rows, sources and gain on `data`, where the others are fitted beside it."""
    left = LeftOut.of(data, fit(data, entries))
    every = range(len(entries))
    now, members = left.errors(every), left.slopes != 0.0
    saved = [left.errors([j for j in every if j != k]) - now for k in every]
    return tuple(described(data, entry, left.gain(saved[k], members[:, k])) for k, entry in enumerate(entries))


def select(data: Data) -> tuple[Constant, ...]:
    """The constants that pay, fitted on all of `data`."""
    return gated(data, candidates(data))
