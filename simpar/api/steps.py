"""`simulate`, `compare`, `sweep` and `explain`: one training step, two, a grid of them, and why one takes what it takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

from simpar.api.result import Comparison, Result
from simpar.api.scenarios import Source, changed, raw_table
from simpar.api.table import Cell, Table
from simpar.errors import InputError
from simpar.result.result import Result as StepResult
from simpar.specs.scenario import Scenario, make_scenario
from simpar.units import format_seconds

Detail = Literal["stage", "layer", "op"]


def simulate(source: Source, /, *, detail: Detail = "layer", **changes: Any) -> Result:
    """Predict one training step.

    Args:
        source: a scenario: TOML file, shipped name, raw table or `Scenario`.
        detail: of the timeline: per pipeline stage (fastest), per layer, or per op.
        changes: as for `load`: `pp=8`, `cluster={"num_nodes": 16}`.

    Raises:
        InputError: every broken rule, together. A layout that does not fit the memory is a result.
    """
    if detail not in ("stage", "layer", "op"):
        raise InputError(f"detail {detail!r}: choose stage, layer or op")
    table, file = raw_table(source)
    return simulated(changed(table, changes), file, detail=detail)


def simulated(
    table: Mapping[str, Any], file: str = "", *, detail: Detail = "layer", arrange: Callable[[Scenario], Scenario] | None = None
) -> Result:
    """The result of a raw scenario table, whose fields may be left open.

    Args:
        arrange: applied to every scenario before it is simulated.

    Raises:
        InputError: every broken rule, together; or no reading of the open fields can run.
    """
    from simpar.readings import simulate_open
    from simpar.step import simulate as run

    def one(scenario: Scenario) -> StepResult:
        return run(arrange(scenario) if arrange else scenario, detail=detail)

    found, readings = simulate_open(table, file, simulate=one)
    return Result(found, readings)


def compare(first: Source | Result, second: Source | Result, /, **changes: Any) -> Comparison:
    """Two scenarios side by side; `changes` apply to the second.

    Raises:
        InputError: as `simulate`.
    """
    start = first if isinstance(first, Result) else simulate(first)
    if isinstance(second, Result):
        return Comparison(start, simulate(second.scenario, **changes) if changes else second)
    return Comparison(start, simulate(second, **changes))


@dataclass(frozen=True, slots=True, repr=False)
class Sweep(Table):
    """A table with a row per combination of the swept values; those that cannot run say why in `reason`.

    Attributes:
        results: of each row, None where it cannot run.
    """

    results: tuple[Result | None, ...] = field(default=(), kw_only=True)

    @property
    def best(self) -> Result | None:
        """The fastest that fits, by tokens per second and GPU; None where none does."""
        fitting = [r for r in self.results if r is not None and r.fits]
        return max(fitting, key=lambda r: r.tokens_per_s_per_gpu, default=None)


def sweep(source: Source, /, *, detail: Detail = "layer", **values: Any) -> Sweep:
    """Simulate every combination of the lists in `values`: `sweep("70b.toml", pp=[2, 4, 8], tp=[4, 8])`.

    Args:
        source: as for `simulate`.
        detail: as for `simulate`.
        values: as for `load`, but a list (or a range) is swept; a field whose value is itself a list is given as a list of lists.

    Raises:
        InputError: no list, an unknown field, or a source that cannot be read. A combination that cannot run is a row.
    """
    from simpar.step import simulate as run

    axes = {name: list(given) for name, given in values.items() if isinstance(given, list | tuple | range)}
    if not axes or not all(axes.values()):
        raise InputError("a sweep needs lists of values, such as pp=[2, 4, 8]")
    table, file = raw_table(source)
    base = changed(table, {name: given for name, given in values.items() if name not in axes})
    rows: list[dict[str, Cell]] = []
    results: list[Result | None] = []
    for point in product(*axes.values()):
        setting = dict(zip(axes, point, strict=True))
        shown: dict[str, Cell] = {
            name: v if isinstance(v, str | int | float | bool | None) else str(v) for name, v in setting.items()
        }
        wanted = changed(base, setting)
        try:
            result = Result(run(make_scenario(wanted, file=file), detail=detail))
        except InputError as error:
            rows.append({**shown, **dict.fromkeys(_SWEPT), "fits": False, "reason": _reason(error)})
            results.append(None)
            continue
        numbers: dict[str, Cell] = {name: getattr(result, name) for name in _SWEPT}
        rows.append({**shown, **numbers, "fits": result.fits, "reason": "" if result.fits else "does not fit the memory"})
        results.append(result)
    plain = Table.of(rows)
    return Sweep(plain.columns, plain.rows, str(base.get("name", "")), results=tuple(results))


def _reason(error: InputError) -> str:
    """The first broken rule, without the file, which all rows share."""
    return str(replace(error.violations[0], file="") if error.violations else error).splitlines()[0]


_SWEPT = ("step_time_s", "tokens_per_s_per_gpu", "mfu", "bubble_fraction", "peak_memory_bytes")
"""Numbers of a sweep's row."""


@dataclass(frozen=True, slots=True, repr=False)
class Explanation:
    """Why a step takes what it takes.

    Attributes:
        result: the step.
        found: the object of `simpar explain --json`.
    """

    result: Result
    found: Mapping[str, Any]

    def table(self) -> Table:
        """Layouts one change away, fastest first; those that do not fit or cannot run say why."""
        rows: list[dict[str, Cell]] = [
            {"change": n["change"], "step_time_s": n["step_time_s"], "fits": n["fits"], "reason": n["reason"]}
            for n in self.found["neighbours"]
        ]
        return Table.of(rows, f"{self.result.name}: one change away from {format_seconds(self.result.step_time_s)}")

    def to_dict(self) -> dict[str, Any]:
        """The object of `simpar explain --json`."""
        return dict(self.found)

    def __repr__(self) -> str:
        return f"<simpar.Explanation of {self.result!r}>"

    def _repr_html_(self) -> str:
        return self.result._repr_html_() + self.table()._repr_html_()


def explain(
    source: Source | Result,
    /,
    *,
    measured: Mapping[str, float] | None = None,
    runs: Iterable[str | Path | Mapping[str, Any]] = (),
    **changes: Any,
) -> Explanation:
    """Why a step takes what it takes; with measured values, where the gap most probably lies; with runs, what made them slow.

    Args:
        measured: SI values: `{"step_time": 12.3, "reserved": 71e9}` (step_time, mem, allocated, reserved, device).
        runs: of this scenario: JSON-lines files as `simpar run read` writes them, or rows.
        changes: as for `load`.

    Raises:
        InputError: as `simulate`; or a measured name that is not known or a value not above 0.
    """
    from simpar.report.explain import MEASURES
    from simpar.report.explain import explain as explanation

    given = dict(measured or {})
    for name, value in given.items():
        if name not in MEASURES or not value > 0:
            raise InputError(f"measured {name!r} = {value!r}: a value above 0 of {', '.join(MEASURES)}")
    if isinstance(source, Result) and not changes:
        result = source
    else:
        result = simulate(source.scenario if isinstance(source, Result) else source, **changes)
    found = explanation(result.details, given)
    if rows := _rows(runs):
        from simpar.site.explained import explain_run, job_of

        job = job_of(result.details)
        found["runs"] = [explain_run(row, result.details, job, name).as_json() for name, row in rows]
    return Explanation(result, found)


def _rows(runs: Iterable[str | Path | Mapping[str, Any]]) -> list[tuple[str, Mapping[str, Any]]]:
    """(Name, row) of every run in files and tables."""
    from simpar.evidence.run_rows import read_rows

    found: list[tuple[str, Mapping[str, Any]]] = []
    for each in runs:
        if isinstance(each, Mapping):
            found.append((f"row {len(found) + 1}", each))
        else:
            found += read_rows(Path(each))
    return found
