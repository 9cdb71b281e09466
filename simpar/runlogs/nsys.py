"""Nsight Systems' SQLite export as traces of ranks (tables and columns: the exporter's schema in NVIDIA's user guide)."""

from __future__ import annotations

import re
import sqlite3
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from simpar.errors import InputError
from simpar.interop.kineto import collective_of, kernel_class
from simpar.runlogs.rank_trace import MOST_CALLS, UPDATE, Call, Mark, RankTrace, Spans, steps_of

_KERNELS: Final = "CUPTI_ACTIVITY_KIND_KERNEL"
_EXPECTED: Final = "a file of `nsys export --type sqlite` with CUDA kernels"
_STEP: Final = re.compile(r"^(?:ProfilerStep#|iteration\s*|step\s*|train_step\s*|Step\s*#?)(\d+)$", re.IGNORECASE)
_RANK: Final = re.compile(r"rank[_-]?(\d+)", re.IGNORECASE)


@dataclass
class _Process:
    """What one process did on one GPU."""

    spans: Spans = field(default_factory=Spans)
    launched: list[float] = field(default_factory=list)
    calls: list[tuple[str, float, float]] = field(default_factory=list)


def read_nsys(path: Path) -> list[RankTrace]:
    """The export at `path`: one trace for each process and GPU in it, as `nsys profile torchrun ...` records a whole node.

    Raises:
        InputError: no such database, or one without kernels.
    """
    try:
        base = sqlite3.connect(f"file:{path.resolve()}?mode=ro&immutable=1".replace("#", "%23"), uri=True)
    except sqlite3.Error as error:
        raise InputError(f"{path}: cannot be opened ({error}); expected {_EXPECTED}") from None
    try:
        base.execute("PRAGMA trusted_schema=OFF")
        return _read(base, path)
    except (sqlite3.Error, TypeError, ValueError) as error:
        raise InputError(f"{path}: {error}; expected {_EXPECTED}") from None
    finally:
        base.close()


def _columns(base: sqlite3.Connection, table: str) -> set[str]:
    return {row[1] for row in base.execute(f"PRAGMA table_info({table})")}


def _process(columns: set[str]) -> str:
    """SQL for the process of a row: a thread's number without the 24 bits of the thread; 0 where the table does not say."""
    return next((f"{name} & ~16777215" for name in ("globalPid", "globalTid") if name in columns), "0")


def _read(base: sqlite3.Connection, path: Path) -> list[RankTrace]:
    tables = {row[0] for row in base.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if _KERNELS not in tables:
        raise InputError(f"{path}: has no table {_KERNELS}; expected {_EXPECTED}")
    names = dict(base.execute("SELECT id, value FROM StringIds")) if "StringIds" in tables else {}
    zero = base.execute(f"SELECT MIN(start) FROM {_KERNELS}").fetchone()[0]
    if zero is None:
        raise InputError(f"{path}: holds no kernels; expected {_EXPECTED}")
    found = _work(base, tables, names, zero)
    named, updates = _ranges(base, tables, names, zero)
    rank = int(m[1]) if len(found) == 1 and (m := _RANK.search(path.name)) else None
    return [
        _trace(path, rank, process, sorted(named[pid].values(), key=lambda m: m[1]), updates[pid])
        for (_, pid), process in sorted(found.items())
    ]


def _work(base: sqlite3.Connection, tables: set[str], names: dict[Any, Any], zero: int) -> dict[tuple[int, int], _Process]:
    """(GPU, process) -> its kernels, copies and memory sets; correlations count anew in every process."""
    runtime = "CUPTI_ACTIVITY_KIND_RUNTIME"
    launches: dict[tuple[int, int], int] = {}
    if runtime in tables:
        of = _process(_columns(base, runtime))
        launches = {(pid, n): start for pid, n, start in base.execute(f"SELECT {of}, correlationId, start FROM {runtime}")}
    found: dict[tuple[int, int], _Process] = defaultdict(_Process)
    for table in (_KERNELS, "CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET"):
        if table not in tables:
            continue
        columns = _columns(base, table)
        name = next((c for c in ("shortName", "demangledName") if c in columns), "NULL")
        device = "deviceId" if "deviceId" in columns else "0"
        wanted = f"SELECT {device}, {_process(columns)}, start, end, {name}, correlationId FROM {table} ORDER BY start"
        for gpu, pid, start, end, text, correlation in base.execute(wanted):
            process = found[gpu, pid]
            label = str(names.get(text, text))
            wire = table == _KERNELS and kernel_class(label, "kernel", {}) == "nccl"
            a, b = (start - zero) * 1e-9, (end - zero) * 1e-9
            process.spans.add(a, b, wire)
            at = launches.get((pid, correlation))
            process.launched.append(np.nan if at is None else (at - zero) * 1e-9)
            if wire and len(process.calls) < MOST_CALLS:
                process.calls.append((collective_of(label, {}), a, b))
    return found


def _trace(path: Path, rank: int | None, process: _Process, named: list[Mark], updates: list[tuple[float, float]]) -> RankTrace:
    steps, marks, counted = steps_of(process.spans, named, updates, np.array(process.launched), on_device=True)
    if not steps:
        raise InputError(f"{path}: nothing ran inside its NVTX ranges of steps; expected a range around each training step")
    rule = "no NVTX range names a step (iteration 3) and no two are of updates (emit_nvtx: Optimizer.step#AdamW.step)"
    notes = [] if counted else [f"{path}: {rule}: how many steps it holds is not known"]
    bounds = np.array([m[1] for m in marks])
    placed = [(int(np.searchsorted(bounds, a, side="right")) - 1, n, a, b) for n, a, b in process.calls]
    calls = [Call("", n, marks[i][0], a, b) for i, n, a, b in placed if i >= 0]
    return RankTrace(str(path), rank, None, "cuda", steps, calls, notes, counted)


def _ranges(
    base: sqlite3.Connection, tables: set[str], names: dict[Any, Any], zero: int
) -> tuple[dict[int, dict[int, Mark]], dict[int, list[tuple[float, float]]]]:
    """Process -> its ranges that name a step, and those of updates."""
    named: dict[int, dict[int, Mark]] = defaultdict(dict)
    updates: dict[int, list[tuple[float, float]]] = defaultdict(list)
    if "NVTX_EVENTS" not in tables:
        return named, updates
    columns = _columns(base, "NVTX_EVENTS")
    text = "textId" if "textId" in columns else "NULL"
    wanted = f"SELECT {_process(columns)}, start, end, text, {text} FROM NVTX_EVENTS WHERE end IS NOT NULL"
    for pid, start, end, own, key in base.execute(wanted):
        label, a, b = str(own if own is not None else names.get(key, "")), (start - zero) * 1e-9, (end - zero) * 1e-9
        if mark := _STEP.match(label):
            named[pid][int(mark[1])] = (int(mark[1]), a, b)
        elif UPDATE.match(label):
            updates[pid].append((a, b))
    return named, updates
