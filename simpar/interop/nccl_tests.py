"""nccl-tests output, as printed or as written by `-J`, to measured collectives.

Formats: nccl-tests src/util.cu (writeBenchmarkLineBody, jsonRankInfo); the text table has a tail of `time algbw busbw #wrong`
for out-of-place and again for in-place, after size, count, type and, by version, redop and root.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from simpar.boundary import parse_json, read_text, reader
from simpar.costs.collectives import ALIASES, COLLECTIVES
from simpar.errors import InputError, Violation
from simpar.interop.profile_parts import Part
from simpar.interop.tune_collectives import CollectiveSeries, fit

_RANK: Final = re.compile(r"#\s+Rank\s+(\d+)\s+(?:Group\s+(\d+)\s+)?Pid\s+\d+\s+on\s+(\S+)\s+device\s+\d+")
_PREFIX: Final = re.compile(r"^(?:\[\d+,\d+\]<std\w+>:|\s*\d+:(?=\s))\s?")
"""What mpirun --tag-output and srun --label put before each line."""
_PROGRAM: Final = re.compile(r"\b(\w+)_perf\b")
_OUT, _IN = "out-of-place", "in-place"


@dataclass(slots=True)
class _Run:
    """One table: its devices and points by buffers."""

    collective: str = ""
    devices: list[tuple[int, str]] = field(default_factory=list)
    points: dict[str, list[tuple[float, float, float]]] = field(default_factory=lambda: {_OUT: [], _IN: []})
    wrong: int = 0
    line: int = 0


def _name(program: str) -> str:
    """simpar's name of a collective in any spelling, or empty."""
    plain = program.lower().removesuffix("_perf")
    plain = ALIASES.get(plain, plain)
    squeezed = {c.replace("_", ""): c for c in COLLECTIVES}
    return squeezed.get(plain.replace("_", "").replace("-", ""), "")


def _from_ratio(run: _Run, ranks: int) -> str:
    """The collective whose bus bandwidth factor the table shows, where only one has it (more than two ranks)."""
    ratios = [bus for points in run.points.values() for size, _, bus in points if size >= 2**20 and bus > 0]
    if not ratios or ranks < 3:
        return ""
    return "all_reduce" if abs(sorted(ratios)[len(ratios) // 2] - 2 * (ranks - 1) / ranks) < 0.02 else ""


def _row(tokens: list[str], tail: list[str], where: str, run: _Run) -> None:
    """Add one line of the table."""
    half = len(tail) // 2
    in_place_only = len(tokens) <= half + 5
    columns, values = (tail[half:], tokens[-half:]) if in_place_only else (tail, tokens[-len(tail) :])
    starts = [i for i, name in enumerate(columns) if name in ("time", "cputime")]
    try:
        if len(tokens) < 3 + half:
            raise ValueError
        size = float(int(tokens[0]))
        for i, buffers in zip(starts, (_IN,) if in_place_only else (_OUT, _IN), strict=True):
            time, alg, bus = (float(v) for v in values[i : i + 3])
            bad = values[i + 3] if len(values) > i + 3 else "0"
            if bad not in ("N/A",) and float(bad) > 0:
                run.wrong += 1
            elif size > 0:
                run.points[buffers].append((size, time * 1e-6, bus / alg if alg > 0 else 0.0))
    except ValueError:
        rule = f"not a line of an nccl-tests table ({' '.join(tokens)[:60]!r})"
        raise InputError(f"{where}: {rule}; expected size count type redop root, then {' '.join(tail)}") from None


def _text_runs(text: str, file: str) -> list[_Run]:
    runs: list[_Run] = []
    run = _Run()
    tail: list[str] = []
    for number, raw in enumerate(text.splitlines(), 1):
        line = _PREFIX.sub("", raw).strip()
        program = _PROGRAM.search(line)
        found = _RANK.search(line)
        if program and _name(program[1]) and "concluded" not in line:
            if tail:
                run, tail = _Run(), []
            run.collective = _name(program[1])
        elif found:
            if tail:
                run, tail = _Run(collective=""), []
            run.devices.append((int(found[2] or 0), found[3]))
        elif line.startswith("#") and "algbw" in line and "size" in line:
            names = line.lstrip("# ").split()
            start = next(i for i, name in enumerate(names) if name in ("time", "cputime"))
            tail, run.line = [n for n in names[start:] if n != "timestamp"], number
            runs.append(run)
        elif tail and line and line[0].isdigit():
            tokens = line.split()
            if "timestamp" in text and re.match(r"\d{4}-\d\d-\d\d$", tokens[-2] if len(tokens) > 1 else ""):
                tokens = tokens[:-2]
            _row(tokens, tail, f"{file}:{number}", run)
    if not runs:
        right = "a table that starts with '# size count type redop root time algbw busbw #wrong ...'"
        raise InputError(f"{file}: no nccl-tests table found; expected {right}, or the JSON of nccl-tests -J")
    return runs


def _json_run(table: Any, file: str) -> _Run:
    """The run in the object that `-J` writes."""
    wrong: list[Violation] = []
    results = table.get("results") if isinstance(table, dict) else None
    if not isinstance(results, list) or not results:
        raise InputError([Violation("results", None, "is required: a list of measurements", "the file of nccl-tests -J", file)])
    run = _Run()
    config = table.get("config")
    devices = (config.get("devices") if isinstance(config, dict) else None) or table.get("devices") or []
    for device in devices:
        run.devices.append((int(device.get("group", 0)), str(device.get("hostname", ""))))
    arguments = table.get("args") or [""]
    run.collective = _name(Path(str(arguments[0])).name)
    for i, row in enumerate(results):
        for key, buffers in (("out_of_place", _OUT), ("in_place", _IN)):
            body = row.get(key) if isinstance(row, dict) else None
            if body is None:
                continue
            try:
                time, alg, bus = float(body.get("time", body.get("cpu_time"))), float(body["alg_bw"]), float(body["bus_bw"])
                if (body.get("nwrong") or 0) > 0:
                    run.wrong += 1
                elif float(row["size"]) > 0:
                    run.points[buffers].append((float(row["size"]), time * 1e-6, bus / alg if alg > 0 else 0.0))
            except (KeyError, TypeError, ValueError, AttributeError):
                wrong.append(Violation(f"results[{i}].{key}", "...", "needs size, time, alg_bw and bus_bw, numbers", "", file))
    if wrong:
        raise InputError(wrong)
    return run


def _series(run: _Run, file: str, collective: str, ranks: int, nodes: int) -> tuple[list[CollectiveSeries], list[str]]:
    group = [host for number, host in run.devices if number == run.devices[0][0]]
    ranks, nodes = ranks or len(group), nodes or len(set(group)) or 1
    where = f"{file}:{run.line}" if run.line else file
    if not ranks:
        raise InputError([Violation("ranks", None, "the output names no '#  Rank' lines", "give --ranks and --nodes", where)])
    chosen = _name(collective) if collective else run.collective or _name_in(Path(file).stem) or _from_ratio(run, ranks)
    if not chosen:
        right = f"give --collective, one of {', '.join(COLLECTIVES)}"
        raise InputError([Violation("collective", collective or None, "the output does not name its collective", right, where)])
    notes = [f"{where}: {run.wrong} rows with wrong results left out"] if run.wrong else []
    source = f"nccl-tests {file}"
    found = [
        fit(chosen, ranks, nodes, [(size, time) for size, time, _ in points], buffers, source)
        for buffers, points in run.points.items() if points
    ]  # fmt: skip
    if not found:
        raise InputError(f"{where}: the table has no measurement with correct results; expected lines of numbers below its header")
    return found, notes


def _name_in(stem: str) -> str:
    """The one collective that a file's name contains."""
    plain = stem.lower().replace("_", "").replace("-", "")
    found = {c for c in COLLECTIVES if c.replace("_", "") in plain}
    found -= {"reduce"} if {"all_reduce", "reduce_scatter"} & found else set()
    found -= {"scatter"} if "reduce_scatter" in found else set()
    found -= {"gather"} if "all_gather" in found else set()
    return found.pop() if len(found) == 1 else ""


@reader("path", "the output of nccl-tests, text or -J")
def read(path: str | Path, *, collective: str = "", ranks: int = 0, nodes: int = 0) -> Part:
    """The measured collectives in the nccl-tests output at `path`, text (one table or more) or JSON.

    Args:
        collective: where the output does not name it (old versions).
        ranks, nodes: where it lists no devices.

    Raises:
        InputError: not such output, with line and what was expected.
    """
    text, file = read_text(path), str(path)
    if collective and not _name(collective):
        raise InputError([Violation("--collective", collective, "unknown", f"one of {', '.join(COLLECTIVES)}")])
    if text.lstrip().startswith("{"):
        runs = [_json_run(parse_json(text, file, "the file of nccl-tests -J"), file)]
    else:
        runs = _text_runs(text, file)
    series: list[CollectiveSeries] = []
    notes: list[str] = []
    for run in runs:
        more, said = _series(run, file, collective, ranks, nodes)
        series, notes = series + more, notes + said
    tables = [run for run in runs for points in run.points.values() if points]
    facts = {"peak_busbw": [_peak(run, one) for run, one in zip(tables, series, strict=True)]}
    return Part("nccl-tests", file, {}, tuple(series), "", facts, tuple(notes))


def _peak(run: _Run, series: CollectiveSeries) -> dict[str, Any]:
    size, seconds, factor = max(run.points[series.buffers], key=lambda p: p[0] * p[2] / p[1])
    return {
        "collective": series.collective, "ranks": series.ranks, "nodes": series.nodes, "buffers": series.buffers,
        "bytes": size, "busbw_bytes_per_s": size * factor / seconds,
    }  # fmt: skip
