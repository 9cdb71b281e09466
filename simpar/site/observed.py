"""A measured run as straight lines in a site's factors: simulated at a point and a little away from it in each factor."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import numpy as np

from simpar.errors import SimparError
from simpar.evidence.predicted import AtSite, Prediction, predict_at, stalled
from simpar.evidence.run_type import Measured, Run
from simpar.evidence.spread import predict_run
from simpar.model.kind import group_of, kind_of
from simpar.readings import Open
from simpar.site.posterior import Evidence, FloatArray
from simpar.specs.calibration import SITE_FACTORS
from simpar.specs.kinds import UNKNOWN, Kind
from simpar.specs.scenario import Scenario
from simpar.specs.site import Site

STEP: Final = 0.1
"""Change of a factor's logarithm between the two simulations that its slope is read from."""
NEUTRAL: Final = Site()


@dataclass(frozen=True, slots=True)
class Line:
    """One reading of a run: its weight, the seconds that each factor scales, the rest, and the open facts that it settles."""

    weight: float
    parts: tuple[float, ...]
    rest: float
    facts: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """The predicted step."""
        return sum(self.parts) + self.rest


@dataclass(frozen=True, slots=True)
class Observed:
    """A run that says something about its site.

    Attributes:
        id: the row's.
        seconds: measured.
        lines: one for each reading of what the row leaves open.
        predicted: the step over all readings, its 80 % interval.
        memory: (measured, predicted) bytes of a peak; none where none was measured.
        group, kind: what it is one of (`simpar.model.kind`).
    """

    id: str
    seconds: float
    lines: tuple[Line, ...]
    predicted: tuple[float, float, float]
    memory: tuple[float, float] | None = None
    group: str = ""
    kind: Kind = UNKNOWN

    def as_table(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(replace(self, kind=UNKNOWN)), "kind": self.kind.model_dump()}

    @classmethod
    def of_table(cls, table: Mapping[str, Any]) -> Observed:
        """The inverse of `as_table`."""
        lines = tuple(Line(each["weight"], tuple(each["parts"]), each["rest"], tuple(each["facts"])) for each in table["lines"])
        memory = table["memory"] and tuple(table["memory"])
        given = {"lines": lines, "predicted": tuple(table["predicted"]), "memory": memory, "kind": Kind(**table["kind"])}
        return cls(**{**table, **given})


@dataclass(frozen=True, slots=True)
class Unused:
    """A run that says nothing, and why."""

    id: str
    reason: str


def observe(run: Run, at: Site = NEUTRAL) -> Observed | Unused:
    """What `run` says around the factors of `at`."""
    measured = run.measured.step_time_s
    reason = run.excluded or run.skipped
    if not reason and run.measured.out_of_memory:
        reason = "ran out of memory"
    if not reason and measured is None:
        reason = "no step time"
    if reason or run.scenario is None or measured is None:
        return Unused(run.id, reason or "no scenario")
    try:
        return _observed(run, run.scenario, measured, at)
    except SimparError as error:
        return Unused(run.id, str(error).splitlines()[0])


def _observed(run: Run, scenario: Scenario, measured: float, at: Site) -> Observed | Unused:
    found, answer = predict_run(run, AtSite(at))
    if stalled(found, scenario, measured):
        return Unused(run.id, "about half a second lost at every blocking send: stalled sends, not the site's speed")
    lines = _lines(run, found, answer, at)
    return Observed(run.id, measured, lines, (found.step_time_s, found.step_low_s, found.step_high_s), run.measured.peaks(found),
                    group_of(scenario), kind_of(scenario, found.step_time_s))  # fmt: skip


def _lines(run: Run, found: Prediction, answer: Open | None, at: Site) -> tuple[Line, ...]:
    """The run's readings, each simulated again a little away in every factor."""
    readings = {"": (1.0, found.step_time_s)} if answer is None else {r.key: (r.weight, r.seconds) for r in answer.readings}
    facts = {} if answer is None else {r.key: r.facts for r in answer.readings}
    slopes: dict[str, list[float]] = {key: [] for key in readings}
    for name in SITE_FACTORS:
        moved = at.model_copy(update={name: getattr(at, name) * math.exp(STEP)})
        other, again = predict_run(run, AtSite(moved))
        seconds = {"": other.step_time_s} if again is None else {r.key: r.seconds for r in again.readings}
        for key, (_, before) in readings.items():
            slopes[key].append(max(seconds.get(key, before) - before, 0.0) / math.expm1(STEP))
    lines = []
    for key, (weight, before) in readings.items():
        # A step is the later of host and device again and again: where they are close, slopes upwards add up to more than the step.
        total = sum(slopes[key])
        parts = tuple(part * min(before / total, 1.0) if total else 0.0 for part in slopes[key])
        lines.append(Line(weight, parts, max(before - sum(parts), 0.0), facts.get(key, ())))
    return tuple(lines)


def lines_of(scenario: Scenario) -> tuple[Line, ...]:
    """The straight line of a scenario that nobody ran yet.

    Raises:
        InputError: the plan cannot be run at all.
    """
    run = Run(scenario.name, {}, Measured(), scenario, "", "", (), {})
    return _lines(run, predict_at(NEUTRAL, scenario), None, NEUTRAL)


def evidence_of(observed: Iterable[Observed], at: Site = NEUTRAL) -> Evidence:
    """The runs' straight lines as arrays."""
    kept = list(observed)
    lines = [[(line.weight, line.parts, line.rest) for line in run.lines] for run in kept]
    facts = [[line.facts for line in run.lines] for run in kept]
    return Evidence.of(lines, [run.seconds for run in kept], log_factors(at), [run.kind for run in kept], facts)


def log_factors(site: Site) -> FloatArray:
    """Logarithms of the four factors [4]."""
    return np.log([getattr(site, name) for name in SITE_FACTORS])
