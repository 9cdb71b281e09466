"""`simpar run read`: a scenario and what its run wrote, to one row."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, Final

from simpar.boundary import read_json_lines
from simpar.errors import InputError
from simpar.output import write_file
from simpar.runlogs.compare import check_same_job
from simpar.runlogs.formats import read_log
from simpar.runlogs.records import LogReading, Memory
from simpar.runlogs.row import columns_of, with_scenario
from simpar.runlogs.steady import Steady, in_seconds, steady
from simpar.specs.scenario import Scenario

_ALIKE: Final = 0.2
"""Two runs of one configuration whose step times differ by more contradict each other."""
_RANK_NAME: Final = re.compile(r"(?:rank|worker|globalrank-)[_-]?(\d+)", re.IGNORECASE)
_MEASURED: Final = frozenset({"id", "source", "source_ref", "confidence", "notes", "step_time_s", "mem_gib", "mem_kind",
                              "mem_unit_as_stated", "oom", "extra"})  # fmt: skip
"""Columns of a row that do not say what ran."""


@dataclass(frozen=True, slots=True)
class RunRow:
    """A run read.

    Attributes:
        row: in the evidence's schema.
        notes: for the reader.
    """

    row: dict[str, Any]
    notes: tuple[str, ...] = ()


@dataclass
class _Found:
    columns: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def read_run(
    scenario: Scenario,
    logs: Sequence[Path] = (),
    *,
    traces: Sequence[Path] = (),
    memory: Sequence[Path] = (),
    name: str = "",
    chosen: str = "",
) -> RunRow:
    """The row of one run of `scenario`.

    Args:
        logs: its logs: of several ranks, or of the starts of a job that was restarted.
        traces: Kineto traces, one a rank, nsys exports, flight recorders.
        memory: torch memory snapshots, one a rank.
        name: id of the row; none = the first file's name.
        chosen: format of the logs, where several would fit.

    Raises:
        InputError: nothing was given, a file cannot be read, or it is of another job.
    """
    if not (logs or traces or memory):
        raise InputError("nothing to read: give --log, --trace or --memory")
    found = _Found()
    if logs:
        _logs(scenario, [read_log(path, chosen) for path in logs], found)
    if traces:
        from simpar.runlogs.traces import read_traces

        report = read_traces(traces, scenario)
        found.extra["traces"] = report.as_json()
        found.notes += report.notes
        if "step_time_s" not in found.columns and report.step_s is not None:
            found.columns["step_time_s"] = report.step_s
            found.notes.append("step time of the traced steps, profiler's cost included")
    if memory:
        from simpar.runlogs.snapshots import read_snapshots

        snapshots = read_snapshots(memory, scenario)
        found.extra["snapshots"] = snapshots.as_json()
        found.notes += snapshots.notes
        found.columns |= {"mem_gib": round(snapshots.peak_bytes / 2**30, 4), "mem_kind": "max allocated (torch memory snapshot)"}
    given = (*logs, *traces, *memory)
    columns = columns_of(scenario)
    row = {
        "id": name or f"{scenario.name}: {given[0].name}",
        "source": "own runs", "source_ref": ", ".join(str(p) for p in given[:8]), "confidence": "high",
        **columns, **found.columns,
    }  # fmt: skip
    row = with_scenario(row, scenario)
    return RunRow({**row, "extra": found.extra}, tuple(dict.fromkeys(found.notes)))


# -- logs ------------------------------------------------------------------------------------------------------------------


def _logs(scenario: Scenario, readings: list[LogReading], found: _Found) -> None:
    for reading in readings:
        check_same_job(reading, scenario)
    failed = [r for r in readings if r.stated.get("out_of_memory")]
    readings = [r for r in readings if r not in failed]
    if not readings:
        found.columns["oom"] = True
        found.notes.append(f"{failed[0].file}: out of memory before a step was done")
        return
    training = scenario.training
    tokens = float(training.global_batch_size * training.sequence_length)
    steps = _joined(readings)
    intervals = in_seconds(steps, tokens, float(training.global_batch_size), scenario.world_size)
    result = steady(intervals, readings[0].file)
    found.columns["step_time_s"] = round(result.steps.median, 6)
    found.extra |= _timing(result, readings, steps)
    found.notes += [f"{r.file}: {note}" for r in readings for note in _shortened(r.notes)]
    _memory([m for r in readings for m in r.memory], found)


def _joined(readings: list[LogReading]) -> LogReading:
    """All logs as one: the same steps are those of several ranks, others of a job that went on."""
    whole = LogReading(readings[0].file, readings[0].format)
    spans = [{i.step for i in r.intervals} for r in readings]
    together = len(readings) > 1 and all(len(spans[0] & s) > 0.5 * min(len(spans[0]), len(s)) for s in spans[1:])
    for index, reading in enumerate(readings):
        rank = int(m[1]) if (m := _RANK_NAME.search(Path(reading.file).name)) else index
        shift = 0 if together else whole.segments
        for i in reading.intervals:
            whole.intervals.append(replace(i, segment=i.segment + shift, rank=rank if together and i.rank is None else i.rank))
        whole.skipped += reading.skipped
    return whole


def _shortened(notes: Sequence[str]) -> list[str]:
    return [*notes[:3], *([f"and {len(notes) - 3} more such"] if len(notes) > 3 else [])]


def _timing(result: Steady, readings: list[LogReading], steps: LogReading) -> dict[str, Any]:
    found: dict[str, Any] = {
        "log_format": readings[0].stated.get("format") or readings[0].format,
        "step_time": result.steps.as_json(),
    }
    found["warm_up_intervals"] = result.warm_up
    if steps.segments > 1:
        found["restarts"] = steps.segments - 1
    if result.apart:
        found["apart"] = {what: {"intervals": n, "extra_s": round(s, 3)} for what, (n, s) in sorted(result.apart.items())}
    if result.pause_s is not None:
        found["pauses_s"] = round(result.pause_s, 3)
    if result.by_rank:
        found["step_time_by_rank_s"] = {str(r): round(s, 6) for r, s in result.by_rank.items()}
    scale = [pair for r in readings for pair in r.loss_scale]
    if steps.skipped or len(scale) > 1:
        found["loss_scale"] = {"skipped_updates": steps.skipped, "changes": [[s, v] for s, v in scale[:100]]}
    scalars: dict[str, list[float]] = {}
    for reading in readings:
        for key, values in reading.scalars.items():
            scalars.setdefault(key, []).extend(values)
    timers = {k.removeprefix("timer "): round(median(v), 3) for k, v in scalars.items() if k.startswith("timer ")}
    router = {k: round(median(v), 6) for k, v in scalars.items() if not k.startswith(("timer ", "global batch", "allocator"))}
    found |= {key: table for key, table in (("timers", timers), ("moe", router)) if table}
    if retries := scalars.get("allocator retries"):
        found["allocator_retries"] = max(retries)
    if parameters := next((r.stated["parameters"] for r in readings if "parameters" in r.stated), None):
        found["parameters_by_model_rank"] = parameters
    return found


def _memory(peaks: Sequence[Memory], found: _Found) -> None:
    """The worst rank's peak, of allocated bytes where both are known."""
    by_kind: dict[str, dict[int | None, float]] = {}
    for m in peaks:
        ranks = by_kind.setdefault(m.kind, {})
        ranks[m.rank] = max(ranks.get(m.rank, 0.0), m.peak_bytes)
    if not by_kind:
        return
    kind = next((k for k in ("allocated", "active", "reserved") if k in by_kind), "device")
    ranks = by_kind[kind]
    words = {"active": "max allocated", "device": "nvidia-smi (whole device)"}.get(kind, f"max {kind}")
    if all(m.first_step for m in peaks if m.kind == kind):
        words += " in the first step"
    if set(ranks) == {0}:
        words += ", logging rank 0"
    found.columns |= {"mem_gib": round(max(ranks.values()) / 2**30, 4), "mem_kind": words, "mem_unit_as_stated": "GiB"}
    found.extra["memory_gib"] = {
        k: {"all" if r is None else str(r): round(v / 2**30, 4) for r, v in sorted(table.items(), key=lambda x: x[0] or 0)}
        for k, table in by_kind.items()
    }


# -- the file of runs ------------------------------------------------------------------------------------------------------


def add_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Add `rows` to the runs file at `path`; one of the same id is replaced.

    Returns:
        Warnings: runs of one configuration that contradict each other.

    Raises:
        InputError: the file holds something else, or cannot be written.
    """
    old = [row for _, row in read_json_lines(path)] if path.exists() else []
    names = {row["id"] for row in rows}
    kept = [row for row in old if row.get("id") not in names]
    warnings = [text for row in rows if (text := _contradiction(row, kept))]
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in (*kept, *rows))
    write_file(path, lines.encode(), "--out")
    return warnings


def _contradiction(row: Mapping[str, Any], kept: Sequence[Mapping[str, Any]]) -> str:
    own = row.get("step_time_s")
    if not isinstance(own, int | float):
        return ""
    what = _configuration(row)
    alike = [other for other in kept if isinstance(other.get("step_time_s"), int | float) and _configuration(other) == what]
    others = [o for o in alike if max(own, o["step_time_s"]) > (1.0 + _ALIKE) * min(own, o["step_time_s"])]
    if not others:
        return ""
    named = _shortened([f"{other.get('id')!r} took {other['step_time_s']:.4g} s" for other in others])
    said = f"{row['id']!r} took {own:.4g} s a step, but of the same configuration {', '.join(named)}"
    return f"{said}: they contradict each other; all stay in the file"


def _configuration(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in _MEASURED}
