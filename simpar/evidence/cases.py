"""Published measurements, each a scenario with what was measured and where it is printed; `simpar validate` runs them all.

A file in validation/cases/ holds the cases of one source: a [scenario] table that they share, and one [[case]] per
measurement with its own differences, its figures, and the place they stand. Every case says whether the global constants
were fitted with it (`use = "fit"`) or not (`"test"`), and the tolerance that was set before it was ever predicted.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from simpar.errors import InputError
from simpar.evidence.predicted import BubbleOf, Prediction, Predictor, bubble_of, memory_of, predict
from simpar.evidence.run_workers import Bar, in_order
from simpar.registry import unknown
from simpar.specs.base import Spec, data_dir, read_toml, validate
from simpar.specs.scenario import Scenario, make_scenario
from simpar.statistics import Comparison, ErrorSummary, Group, group_by, summarize
from simpar.units import Bytes, Seconds

Use = Literal["fit", "test"]
CHUNK = 8
"""Cases that one worker takes at a time."""


class MeasuredSpec(Spec):
    """What a source prints."""

    step_time: Seconds | None = None
    derivation: str = ""
    """How the step time follows from what is printed, where it is not printed itself."""
    peak_memory: Bytes | None = None
    memory_kind: Literal["allocated", "reserved", "device", "unstated"] = "allocated"
    """unstated: allocated or reserved, which the source does not say; right is anything between the two."""
    memory_rank: Literal["worst", "first"] = "worst"
    """Which pipeline rank the figure is of: the fullest, or the first (logs of global rank 0)."""
    state_memory: Bytes | None = None
    """Parameters, gradients and optimizer state at rest, per GPU."""
    bubble_fraction: Annotated[float, Field(ge=0, le=1)] | None = None
    bubble_of: BubbleOf = "all"
    fits: bool | None = None
    """False where the source reports running out of memory."""

    @model_validator(mode="after")
    def _something(self) -> MeasuredSpec:
        values = (self.step_time, self.peak_memory, self.state_memory, self.bubble_fraction, self.fits)
        if all(value is None for value in values):
            raise ValueError("measures nothing: give step_time, peak_memory, state_memory, bubble_fraction or fits")
        return self


class CaseSpec(Spec):
    """One published measurement."""

    name: str
    where: str
    """Table and row, figure, or line."""
    note: str = ""
    """What the source leaves open and was assumed."""
    use: Use | None = None
    tolerance: Annotated[float, Field(gt=0)] | None = None
    """Largest absolute error (relative; in points / 100 for shares) that still counts as right."""
    scenario: dict[str, Any] = Field(default_factory=dict)
    """Differences from the file's scenario."""
    measured: MeasuredSpec


class CaseFileSpec(Spec):
    """The cases of one source."""

    source: str
    url: str
    group: str
    """Short name of the line in RESULTS.md."""
    use: Use = "test"
    tolerance: Annotated[float, Field(gt=0)] = 0.1
    scenario: dict[str, Any] = Field(default_factory=dict)
    """What the cases share."""
    case: Annotated[tuple[CaseSpec, ...], Field(min_length=1)]


@dataclass(frozen=True, slots=True)
class Case:
    """A case with everything resolved.

    Attributes:
        id: group/name.
        group, use, tolerance, where, source, url, note: as written.
        scenario: checked.
        measured: as written.
    """

    id: str
    group: str
    use: Use
    tolerance: float
    where: str
    source: str
    url: str
    note: str
    scenario: Scenario
    measured: MeasuredSpec


@dataclass(frozen=True, slots=True)
class CaseReport:
    """All comparisons of the cases.

    Attributes:
        rows: one per measured value.
        outside: ids and metrics whose error is beyond the case's tolerance.
        seconds: wall time.
    """

    rows: tuple[Comparison, ...]
    outside: tuple[Comparison, ...]
    seconds: float

    @property
    def groups(self) -> dict[tuple[str, str], ErrorSummary]:
        """(group, metric) -> errors, in order of appearance."""
        found = group_by(self.rows, group="group", metric=lambda row: row.metric)
        return {(str(key[0]), str(key[1])): summarize(rows) for key, rows in found.items()}

    def as_json(self) -> dict[str, Any]:
        """The object of `simpar validate --json`."""
        return {
            "rows": [row.as_json() for row in self.rows],
            "groups": [Group(metric, {"group": group}, found).as_json() for (group, metric), found in self.groups.items()],
            "outside_tolerance": [f"{row.id} {row.metric}" for row in self.outside],
            "seconds": self.seconds,
        }


def merged(base: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """`base` with `change` laid over it, table by table; a string model replaces a table and the other way round."""
    table = dict(base)
    for key, value in change.items():
        below = table.get(key)
        table[key] = merged(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return table


def load_file(path: Path) -> list[Case]:
    """The cases in the TOML file at `path`.

    Raises:
        InputError: all violations of the file, or of the first scenario that breaks a rule.
    """
    spec = validate(CaseFileSpec, read_toml(path), file=str(path))
    cases = []
    for case in spec.case:
        table = {"name": case.name, **merged(spec.scenario, case.scenario)}
        scenario = make_scenario(table, file=str(path))
        cases.append(
            Case(
                f"{spec.group}/{case.name}", spec.group, case.use or spec.use, case.tolerance or spec.tolerance,
                case.where, spec.source, spec.url, case.note, scenario, case.measured,
            )
        )  # fmt: skip
    return cases


def load_cases(folder: Path | None = None) -> list[Case]:
    """Every case of the files in `folder` (the shipped ones by default), in the order of the files' names.

    Raises:
        InputError: a file that breaks a rule, or two cases of one name.
    """
    folder = folder or data_dir("validation") / "cases"
    cases = [case for path in sorted(folder.glob("*.toml")) for case in load_file(path)]
    seen: set[str] = set()
    for case in cases:
        if case.id in seen:
            raise InputError(f"{folder}: two cases are called {case.id}")
        seen.add(case.id)
    return cases


def compare_case(case: Case, p: Prediction) -> list[Comparison]:
    """One comparison per figure of `case`."""
    m = case.measured
    group = {
        "group": case.group, "source": case.source, "where": case.where, "use": case.use,
        "gpu": case.scenario.hardware.gpu.name, "n_gpus": case.scenario.world_size, "framework": case.scenario.framework,
    }  # fmt: skip
    details = {"tolerance": case.tolerance} | ({"note": case.note} if case.note else {})
    peak, low_end, high_end, band = memory_of(p, m.memory_kind, first_rank=m.memory_rank == "first")
    bubble = 0.0 if m.bubble_fraction is None else bubble_of(p, case.scenario, m.bubble_of)
    found: list[tuple[str, float | bool | None, float | bool, float | None, float | None]] = [
        ("step_time_s", m.step_time, p.step_time_s, p.step_low_s, p.step_high_s),
        ("peak_memory_bytes", m.peak_memory, peak, low_end, high_end),
        ("state_memory_bytes", m.state_memory, p.state_bytes, None, None),
        ("bubble_fraction", m.bubble_fraction, bubble, None, None),
        ("oom", None if m.fits is None else not m.fits, not p.fits, None, None),
    ]
    return [
        Comparison(case.id, metric, measured, predicted, low, high, group=group, details=details,
                   band=band if metric == "peak_memory_bytes" else None)
        for metric, measured, predicted, low, high in found
        if measured is not None
    ]  # fmt: skip


def _run_case(case: Case, predictor: Predictor) -> list[Comparison]:
    return compare_case(case, predictor(case.scenario))


def run_cases(cases: Sequence[Case], workers: int = 1, predictor: Predictor = predict, progress: bool = False) -> CaseReport:
    """Every case predicted and compared; `progress`: show it on standard error.

    Raises:
        InputError: a scenario that cannot be run at all.
    """
    start = time.perf_counter()
    each = partial(_run_case, predictor=predictor)
    parts = in_order(each, cases, workers, Bar(len(cases), progress, "cases"), CHUNK)
    rows = tuple(row for part in parts for row in part)
    outside = tuple(row for row in rows if abs(row.error or 0.0) > row.details["tolerance"])
    return CaseReport(rows, outside, time.perf_counter() - start)


def chosen_cases(cases: Sequence[Case], only: Sequence[str]) -> list[Case]:
    """The cases whose group or id (group/name) is one of `only`.

    Raises:
        UnknownNameError: something in `only` names no case.
    """
    for name in only:
        if not any(name in (case.group, case.id) for case in cases):
            raise unknown("group or case", name, list(dict.fromkeys(case.group for case in cases)))
    return [case for case in cases if case.group in only or case.id in only]
