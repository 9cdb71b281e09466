"""Nsight Systems' SQLite export as a rank's trace (tables and columns: the exporter's schema in NVIDIA's user guide)."""

from __future__ import annotations

import re
import sqlite3
from pathlib import Path
from typing import Any, Final

import numpy as np

from simpar.errors import InputError
from simpar.interop.kineto import collective_name, kernel_class
from simpar.runlogs.rank_trace import MOST_CALLS, Call, RankTrace, Spans

_EXPECTED: Final = "a file of `nsys export --type sqlite` with CUDA kernels"
_STEP: Final = re.compile(r"^(?:ProfilerStep#|iteration\s*|step\s*|train_step\s*|Step\s*#?)(\d+)$", re.IGNORECASE)
_RANK: Final = re.compile(r"rank[_-]?(\d+)", re.IGNORECASE)


def read_nsys(path: Path) -> RankTrace:
    """The export at `path`.

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


def _read(base: sqlite3.Connection, path: Path) -> RankTrace:
    tables = {row[0] for row in base.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    kernels = "CUPTI_ACTIVITY_KIND_KERNEL"
    if kernels not in tables:
        raise InputError(f"{path}: has no table {kernels}; expected {_EXPECTED}")
    name = "shortName" if "shortName" in _columns(base, kernels) else "demangledName"
    names = dict(base.execute("SELECT id, value FROM StringIds")) if "StringIds" in tables else {}
    zero = base.execute(f"SELECT MIN(start) FROM {kernels}").fetchone()[0]
    if zero is None:
        raise InputError(f"{path}: holds no kernels; expected {_EXPECTED}")
    spans = Spans()
    launched: list[float] = []
    calls: list[tuple[str, float, float]] = []
    runtime = "CUPTI_ACTIVITY_KIND_RUNTIME"
    launches: dict[int, int] = dict(base.execute(f"SELECT correlationId, start FROM {runtime}")) if runtime in tables else {}
    for start, end, text, correlation in base.execute(f"SELECT start, end, {name}, correlationId FROM {kernels} ORDER BY start"):
        label = str(names.get(text, text))
        wire = kernel_class(label, "kernel", {}) == "nccl"
        a, b = (start - zero) * 1e-9, (end - zero) * 1e-9
        spans.add(a, b, wire)
        at = launches.get(correlation)
        launched.append(np.nan if at is None else (at - zero) * 1e-9)
        if wire and len(calls) < MOST_CALLS:
            calls.append((collective_name(re.sub(r"^(?:nccl|rccl)(?:Dev)?Kernel_([A-Za-z]+).*", r"\1", label)), a, b))
    for kind in ("CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET"):
        if kind in tables:
            for start, end in base.execute(f"SELECT start, end FROM {kind}"):
                spans.add((start - zero) * 1e-9, (end - zero) * 1e-9, communication=False)
                launched.append(np.nan)
    marks = _marks(base, tables, names, zero)
    notes = []
    if not marks:
        marks = [(0, min(spans.starts), max(spans.ends))]
        notes.append(f"{path}: no NVTX range names a step (ProfilerStep#3, iteration 3): all of it counts as one step")
    steps = spans.steps(marks, np.array(launched), on_device=True)
    rank = int(m[1]) if (m := _RANK.search(path.name)) else None
    bounds = np.array([m[1] for m in marks])
    placed = [(max(int(np.searchsorted(bounds, a, side="right")) - 1, 0), n, a, b) for n, a, b in calls]
    return RankTrace(str(path), rank, None, "cuda", steps, [Call("", n, marks[i][0], a, b) for i, n, a, b in placed], notes)


def _marks(base: sqlite3.Connection, tables: set[str], names: dict[Any, Any], zero: int) -> list[tuple[int, float, float]]:
    if "NVTX_EVENTS" not in tables:
        return []
    columns = _columns(base, "NVTX_EVENTS")
    text = "textId" if "textId" in columns else "NULL"
    found = {}
    for start, end, own, key in base.execute(f"SELECT start, end, text, {text} FROM NVTX_EVENTS WHERE end IS NOT NULL"):
        if mark := _STEP.match(str(own if own is not None else names.get(key, ""))):
            found[int(mark[1])] = (int(mark[1]), (start - zero) * 1e-9, (end - zero) * 1e-9)
    return sorted(found.values(), key=lambda m: m[1])


__all__ = ["read_nsys"]
