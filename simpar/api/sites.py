"""`adapt`: what a cluster's own runs say about it; `own_run`: one log dropped on a scenario, measured against predicted, the
causes, and what a site learns from it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simpar.api.result import Result
from simpar.api.scenarios import Source, raw_table
from simpar.api.steps import simulate
from simpar.api.table import Cell, Table
from simpar.errors import InputError
from simpar.specs.scenario import Scenario
from simpar.specs.site import Site

if TYPE_CHECKING:
    from simpar.site.learned import Adapted


@dataclass(frozen=True, slots=True, repr=False)
class SiteResult:
    """A site learned from runs.

    Attributes:
        details: the internal result. Not part of the stable interface.
    """

    details: Adapted

    @property
    def site(self) -> Site:
        """What `site=` of a scenario takes."""
        return self.details.site

    def save(self, path: str | Path) -> Path:
        """Write site.toml.

        Raises:
            InputError: the file cannot be written.
        """
        from simpar.site.learned import write_site

        write_site(self.site, Path(path))
        return Path(path)

    def table(self) -> Table:
        """The runs learned from: measured, predicted without and with the site, and how far each was believed."""
        rows: list[dict[str, Cell]] = [
            {"run": r.id, "measured_s": r.measured_s, "before_s": r.before_s, "after_s": r.after_s, "weight": r.weight}
            for r in self.site.runs
        ]
        return Table.of(rows, f"{self.site.name}: {len(rows)} runs")

    def to_dict(self) -> dict[str, Any]:
        """The object of `simpar adapt --json`."""
        return self.details.as_json()

    def __repr__(self) -> str:
        factors = ", ".join(f"{name} x {value:.3g}" for name, value in self.site.factors.items())
        return f"<simpar.SiteResult: {len(self.site.runs)} runs, {factors}>"

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


def adapt(
    runs: str | Path | Iterable[str | Path | Mapping[str, Any]], /, *, name: str = "site", hardware: str | None = None,
    workers: int = 1, progress: bool = False,
) -> SiteResult:  # fmt: skip
    """Learn a site from a cluster's own runs.

    Args:
        runs: JSON-lines files, or rows: what `simpar run read` writes, or `{"scenario": ..., "step_time_s": 12.3}`.
        hardware: a profile to take for the machines of all runs, such as one that `simpar calibrate` wrote.
        workers: processes.

    Raises:
        InputError: a file is missing or unreadable.
    """
    from simpar.evidence.run_rows import run_of, runs_in
    from simpar.site.learned import adapt as learned

    given = [runs] if isinstance(runs, str | Path) else list(runs)
    files = [Path(each) for each in given if not isinstance(each, Mapping)]
    rows = [run_of(each, f"row {index + 1}") for index, each in enumerate(given) if isinstance(each, Mapping)]
    found = [*runs_in(files, hardware), *rows]
    return SiteResult(learned(found, name=name, workers=workers, progress=progress))


MEASURES = ("step_time_s", "oom", "mem_gib")
"""A JSON line with one of these is a run; other JSON lines are a store of metrics that a log reader knows."""


@dataclass(frozen=True, slots=True)
class OwnRun:
    """What one's own runs of a scenario say.

    Attributes:
        rows: the runs, as tables: give them as `earlier` with the next log.
        learned: the site that they add up to.
        runs: one object for each run, see `to_dict`.
        notes: of the log's reader.
    """

    rows: tuple[dict[str, Any], ...]
    learned: SiteResult
    runs: tuple[dict[str, Any], ...]
    notes: tuple[str, ...]

    @property
    def site(self) -> Site:
        """What `site=` of a scenario takes."""
        return self.learned.site

    def to_dict(self) -> dict[str, Any]:
        """`runs` (measured and predicted seconds, causes), `site` (the object of `simpar adapt --json`), `notes`."""
        return {"runs": list(self.runs), "site": self.learned.to_dict(), "notes": list(self.notes)}


def own_run(text: str, source: Source, /, *, earlier: Sequence[Mapping[str, Any]] = (), name: str = "log") -> OwnRun:
    """Read a log of a scenario's run, explain it, and learn from it.

    Args:
        text: of a framework's log, or JSON lines of runs, `{"step_time_s": 4.05}`.
        source: the scenario that ran.
        earlier: runs that were read before and count as well (`OwnRun.rows`).
        name: of the log in messages, and of its run.

    Raises:
        InputError: scenario or log are wrong, or the log is another job's.
    """
    from simpar.site.explained import explain_run, job_of

    table, file = raw_table(source)
    plain = simulate({**{key: value for key, value in table.items() if key != "site"}, "file": file}, detail="stage")
    scenario = plain.scenario
    rows, notes = _rows(text, scenario, Path(name).name or "log")
    names = {row["id"] for row in rows}
    rows = [*(dict(row) for row in earlier if row.get("id") not in names), *rows]
    job = job_of(plain.details)
    explained = [explain_run(row, plain.details, job, str(row["id"])) for row in rows]
    own = {**table, "file": file}
    learned = adapt([row if found.differs or "scenario" in row else {**row, "scenario": own}
                     for row, found in zip(rows, explained, strict=True) if not found.differs])  # fmt: skip
    before = _step(plain)
    here = _step(simulate({**own, "site": learned.site}, detail="stage")) if learned.site.learned else None
    believed = {run.id: run for run in learned.site.runs}
    runs = []
    for row, found in zip(rows, explained, strict=True):
        used, measured = believed.get(str(row["id"])), found.measured_s
        with_site = None if here is None or used is None or measured is None else here
        runs.append({
            **found.as_json(), "low_s": before[1], "high_s": before[2],
            "error": None if measured is None else found.predicted_s / measured - 1.0,
            "with_site_s": with_site and with_site[0], "with_site_low_s": with_site and with_site[1],
            "with_site_high_s": with_site and with_site[2],
            "with_site_error": with_site and measured and with_site[0] / measured - 1.0,
            "believed": used and used.weight, "memory": _memory(learned, str(row["id"])),
        })  # fmt: skip
    return OwnRun(tuple(rows), learned, tuple(runs), notes)


def _step(result: Result) -> tuple[float, float, float]:
    """Seconds of the step with its 80 % interval."""
    return result.step_time_s, *result.step_time_interval_s


def _memory(learned: SiteResult, name: str) -> dict[str, float] | None:
    """Measured and predicted peak of a run that the site was learned from."""
    peak = next((run.memory for run in learned.details.runs if run.id == name), None)
    return None if peak is None else {"measured_bytes": peak[0], "predicted_bytes": peak[1]}


def _rows(text: str, scenario: Scenario, name: str) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """The runs in a dropped text, each with an id, and the notes of the log's reader."""
    from simpar.runlogs.read import read_run

    if (lines := _json_lines(text, name)) is not None:
        return [{"id": f"{name} {index + 1}" if len(lines) > 1 else name, **row} for index, row in enumerate(lines)], ()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_text(text, encoding="utf-8")
        try:
            found = read_run(scenario, [path], name=name)
        except InputError as error:
            raise InputError(str(error).replace(str(path), name)) from None
        notes = tuple(note.replace(str(path), name) for note in found.notes)
    return [{**found.row, "source_ref": name}], notes


def _json_lines(text: str, name: str) -> list[dict[str, Any]] | None:
    """Runs as JSON lines; none where the text is something else."""
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines or not lines[0].lstrip().startswith("{"):
        return None
    found = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            if number == 1:
                return None
            raise InputError(f"{name}, line {number}: is no JSON ({error.msg})") from None
        if not isinstance(row, dict) or not any(measure in row for measure in MEASURES):
            if number == 1:
                return None
            raise InputError(f"{name}, line {number}: a run has one of {', '.join(MEASURES)}")
        found.append(row)
    return found
