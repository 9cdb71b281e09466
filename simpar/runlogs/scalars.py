"""Named series of numbers over steps, as stores of metrics keep them, and which of their names mean a step's time or memory.

Stores: TensorBoard event files, CSV and JSON-lines exports (W&B, Lightning's metrics.csv, LLaMA-Factory's trainer_log.jsonl, verl),
the Trainer's trainer_state.json.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from simpar.boundary import read_json, read_json_lines, read_records
from simpar.errors import InputError
from simpar.runlogs.lines import number_of
from simpar.runlogs.records import Interval, LogReading, Memory

Meaning = Literal[
    "seconds", "steps_per_s", "tokens_per_s_per_gpu", "samples_per_s", "allocated", "reserved", "active", "loss_scale", "router"
]


@dataclass(frozen=True, slots=True)
class Point:
    """A value at a step; `wall_s` where the store keeps the clock."""

    step: int
    value: float
    wall_s: float | None = None


@dataclass
class Store:
    """Series by name."""

    file: str
    series: dict[str, list[Point]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    count: int = 0

    def add(self, tag: str, point: Point) -> None:
        """Add a point to the series `tag`."""
        self.series.setdefault(tag, []).append(point)
        self.count += 1

    def note(self, text: str) -> None:
        """Tell it once."""
        if text not in self.notes:
            self.notes.append(text)


@dataclass(frozen=True, slots=True)
class Tag:
    """A name of a series: what it means, what turns it into SI units, and whose it is."""

    pattern: str
    meaning: Meaning
    factor: float = 1.0
    framework: str = ""


GIB: Final = 2.0**30
TAGS: Final = (
    Tag(r"iteration-time", "seconds", framework="megatron"),
    Tag(r"train_step_timing in s", "seconds", framework="lightning"),
    Tag(r"time_metrics/end_to_end\(s\)", "seconds", framework="torchtitan"),
    Tag(r"runtime/iteration_time", "seconds", framework="megatron"),
    Tag(r"(?:elapsed_)?time_per_iteration_ms", "seconds", 1e-3, "nanotron"),
    Tag(r"perf/step_time_seconds", "seconds", framework="maxtext"),
    Tag(r"timing_s/update_actor", "seconds", framework="verl"),
    Tag(r"perf/time_per_step|timing_s/step", "seconds", framework="verl"),
    Tag(r"time/forward_backward|time/step", "seconds", framework="prime-rl"),
    Tag(r"step_time", "seconds", framework="transformers"),
    Tag(r"(?:train\|)?device/batches_per_sec|throughput/(?:device/)?batches_per_sec", "steps_per_s", framework="lightning"),
    Tag(r"throughput\(tps\)", "tokens_per_s_per_gpu", framework="torchtitan"),
    Tag(r"throughput/device/(?:TPS|tokens_per_sec)|tokens_per_sec_per_gpu", "tokens_per_s_per_gpu"),
    Tag(r"memory/max_reserved\(GiB\)", "reserved", GIB, "torchtitan"),
    Tag(r"memory/max_active\(GiB\)", "active", GIB, "torchtitan"),
    Tag(r"mem-max-allocated-bytes", "allocated", framework="megatron"),
    Tag(r"mem-reserved-bytes", "reserved", framework="megatron"),
    Tag(r"memory/(?:mem-)?max-allocated-gigabytes|memory/peak_allocated_mem", "allocated", 1e9),
    Tag(r"memory/(?:mem-)?max-reserved-gigabytes|memory/peak_reserved_mem", "reserved", 1e9),
    Tag(r"perf/max_memory_allocated_gb|memory/max_allocated \(GiB\)", "allocated", GIB),
    Tag(r"perf/max_memory_reserved_gb|memory/device_reserved \(GiB\)", "reserved", GIB),
    Tag(r"loss[-_]scale|Train/Samples/loss_scale", "loss_scale"),
    Tag(r".*(?:load_balancing|z_loss|tokens_per_expert|expert_load|moe/).*", "router"),
)
"""The first whose pattern fits a whole name, with or without a prefix that ends in a slash. Sources: docs/runs.md."""
_LOSS: Final = re.compile(r"(?:.*/)?(?:train[_/])?(?:lm |reduced_train_|global_avg_|lm_)?loss")


def tag_of(name: str) -> Tag | None:
    """What a series' name means."""
    plain = name.strip().rpartition(" - ")[2]  # W&B's charts: "run name - metric"
    return next((t for t in TAGS if re.fullmatch(rf"(?:[\w.-]+/)*?(?:{t.pattern})", plain)), None)


def reading_of(store: Store, name: str) -> LogReading:
    """The intervals, memory and further figures of a store.

    Raises:
        InputError: no series says how long a step took, and none has a clock.
    """
    reading = LogReading(store.file, name, notes=[*store.notes])
    timed: dict[int, list[tuple[Tag, list[Point]]]] = {}
    for series, points in store.series.items():
        tag = tag_of(series)
        if tag is None:
            continue
        if tag.meaning in ("allocated", "reserved", "active"):
            reading.memory += [Memory(tag.meaning, p.value * tag.factor) for p in points if p.value > 0]
        elif tag.meaning == "loss_scale":
            _scales(points, reading)
        elif tag.meaning == "router":
            reading.scalars[series] = [p.value for p in points]
        else:
            timed.setdefault(TAGS.index(tag), []).append((tag, points))
    if timed:
        tag, points = timed[min(timed)][0]
        reading.stated["format"] = tag.framework
        reading.intervals = _intervals(tag, points)
    else:
        reading.intervals = _by_clock(store)
        if reading.intervals:
            reading.notes.append("no series of step times: steps are timed by the clock of the losses, with all that lies between")
    if not reading.intervals:
        names = ", ".join(list(store.series)[:8]) or "none"
        raise InputError(
            f"{store.file}: no series says how long a step took (its series: {names}); expected one such as iteration-time"
        )
    return reading


def _intervals(tag: Tag, points: list[Point]) -> list[Interval]:
    found: list[Interval] = []
    last, segment = None, 0
    for p in _last_written(points):
        if not (math.isfinite(p.value) and p.value > 0):
            continue
        segment += last is not None and p.step < last
        start = frozenset({"start"}) if last is None or p.step < last else frozenset()
        count = p.step - last if last is not None and p.step > last else 1
        value = p.value * tag.factor
        kinds: dict[str, float] = {"seconds": 1.0 / value if tag.meaning == "steps_per_s" else value} if tag.meaning in (
            "seconds", "steps_per_s") else {tag.meaning: value}  # fmt: skip
        found.append(Interval(p.step, count, contains=start, segment=segment, wall_s=p.wall_s, **kinds))  # type: ignore[arg-type]
        last = p.step
    return found


def _last_written(points: list[Point]) -> list[Point]:
    """One point a step where a step comes twice in a row."""
    return [p for i, p in enumerate(points) if i + 1 == len(points) or points[i + 1].step != p.step]


def _by_clock(store: Store) -> list[Interval]:
    points = next((p for n, p in store.series.items() if _LOSS.fullmatch(n) and all(x.wall_s for x in p)), [])
    found: list[Interval] = []
    segment = 0
    for index, p in enumerate(points[1:], 1):
        before = points[index - 1]
        if p.step <= before.step:
            segment += 1
            continue
        seconds = ((p.wall_s or 0.0) - (before.wall_s or 0.0)) / (p.step - before.step)
        if seconds > 0:
            start = frozenset({"start"}) if not found or found[-1].segment != segment else frozenset()
            found.append(Interval(p.step, p.step - before.step, seconds, contains=start, segment=segment, wall_s=p.wall_s))
    return found


def _scales(points: Iterable[Point], reading: LogReading) -> None:
    for p in points:
        if not reading.loss_scale or reading.loss_scale[-1][1] != p.value:
            if reading.loss_scale and p.value < reading.loss_scale[-1][1]:
                reading.skipped += 1
            reading.loss_scale.append((p.step, p.value))


# -- files -----------------------------------------------------------------------------------------------------------------


def read_csv_store(path: Path) -> Store:
    """Columns of a CSV export over its column of steps (Step, _step, step, global_step); W&B's ranges (__MIN, __MAX) left out.

    Raises:
        InputError: unreadable, no column of steps, or numbers in another language's writing.
    """
    store = Store(str(path))
    rows = list(read_records(path))
    names = list(rows[0]) if rows else []
    key = next(
        (n for n in ("_step", "Step", "step", "global_step", "train/global_step", "trainer/global_step") if n in names), None
    )
    if key is None:
        raise InputError(f"{path}: no column of steps (its columns: {', '.join(names[:8]) or 'none'}); expected Step or _step")
    clock = next((n for n in ("_timestamp", "_runtime", "wall_time") if n in names), None)
    for line, row in enumerate(rows, 2):
        if not row[key].strip():
            continue
        _add(store, row, (key, clock), f"{path}:{line}")
    return store


def read_lines_store(path: Path) -> Store:
    """Objects of a JSON-lines file with a step in each.

    Raises:
        InputError: unreadable, or no object has a step.
    """
    store = Store(str(path))
    keys = ("_step", "step", "global_step", "current_steps")
    for line, row in read_json_lines(path):
        key = next((k for k in keys if k in row), None)
        if key is None:
            continue
        if "data" in row and isinstance(row["data"], dict):  # verl's file logger
            row = {key: row[key], **row["data"]}
        clock: str | None = next((k for k in ("_timestamp", "_runtime") if k in row), None)
        if isinstance(row.get("elapsed_time"), str):
            row["_elapsed"], clock = _clock_seconds(row["elapsed_time"]), "_elapsed"
        _add(store, row, (key, clock), f"{path}:{line}")
    if not store.series:
        raise InputError(f"{path}: no object has a step ({', '.join(keys)}); expected an export of metrics, one object a line")
    return store


def read_state_store(path: Path) -> Store:
    """log_history of the Trainer's trainer_state.json.

    Raises:
        InputError: unreadable, or without a history.
    """
    history = read_json(path, "the Trainer's trainer_state.json", finite=False).get("log_history")
    if not isinstance(history, list):
        raise InputError(f"{path}: log_history is missing; expected the Trainer's trainer_state.json")
    store = Store(str(path))
    for index, row in enumerate(history):
        if isinstance(row, dict) and "step" in row:
            _add(store, row, ("step", None), f"{path}: log_history[{index}]")
    return store


def _add(store: Store, row: Mapping[str, Any], keys: tuple[str, str | None], where: str) -> None:
    key, clock = keys
    try:
        step = int(float(number_of(str(row[key]))))
        wall = number_of(str(row[clock])) if clock and row.get(clock) not in (None, "") else None
    except (ValueError, OverflowError):  # "inf" is a number, and no whole one
        raise InputError(f"{where}: {key} = {row[key]!r} is no number; expected a whole number of steps") from None
    for name, value in row.items():
        if (
            name in (key, clock)
            or name.endswith(("__MIN", "__MAX"))
            or value in (None, "", "NaN", "nan")
            or isinstance(value, bool)
        ):
            continue
        try:
            store.add(name, Point(step, number_of(str(value)), wall))
        except ValueError:
            if tag_of(name) is not None:
                raise InputError(f"{where}: {name} = {str(value)[:40]!r} is no number; expected one with a decimal point") from None


def _clock_seconds(text: str) -> float:
    days, _, rest = text.rpartition(", ")
    parts = [float(x) for x in rest.split(":")]
    seconds = 86400.0 * float(days.split()[0]) if days else 0.0
    for power, part in enumerate(reversed(parts)):
        seconds += part * 60.0**power
    return seconds
