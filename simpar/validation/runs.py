"""`simpar validate runs`: every measured training run of a file against its prediction, in parallel and with
progress."""

from __future__ import annotations

import json
import operator
import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from simpar.errors import InputError, SimparError
from simpar.validation.predicted import Prediction, Predictor, predict
from simpar.validation.ranking import RankingSummary, SweepRanking, rank_sweeps, summarize_rankings
from simpar.validation.row_values import read_values
from simpar.validation.run_rows import Run, read_rows, run_of
from simpar.validation.statistics import (
    Comparison,
    ErrorSummary,
    FitConfusion,
    fit_confusion,
    group_by,
    summarize,
)

CHUNK: Final = 16
FAULT: Final = "a fault in simpar, please report it"
"""Begins the reason of a row whose prediction broke off in a way that simpar does not know."""
GROUPINGS: Final = ("source", "framework", "gpu", "arch", "confidence", "precision", "size", "parallelism")
"""Groupings of the report, beside one over everything."""

_OPERATORS: Final[dict[str, Callable[[Any, Any], bool]]] = {
    "=": operator.eq, "!=": operator.ne, ">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Group:
    """One line of the report: the metric, what its rows share, and their errors."""

    metric: str
    by: dict[str, Any]
    summary: ErrorSummary

    def as_json(self) -> dict[str, Any]:
        """Flat: metric, by, rows, mape, median, p90, bias, coverage."""
        return {"metric": self.metric, "by": self.by, **self.summary.as_json()}


@dataclass(frozen=True, slots=True)
class Report:
    """Everything `validate_runs` found.

    Attributes:
        rows: one comparison per measured value, excluded rows left out.
        groups: errors by metric and grouping.
        fits: confusion of the labelled runs.
        sweeps, ranking: ranking quality.
        skipped: reason -> number of runs that cannot be expressed.
        excluded: the data's own reason -> number of rows.
        seconds: wall time.
    """

    rows: tuple[Comparison, ...]
    groups: tuple[Group, ...]
    fits: FitConfusion
    sweeps: tuple[SweepRanking, ...]
    ranking: RankingSummary
    skipped: dict[str, int]
    excluded: dict[str, int]
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """The object of `simpar validate runs --json`."""
        return {
            "rows": [row.as_json() for row in self.rows],
            "groups": [group.as_json() for group in self.groups],
            "oom": self.fits.as_json(),
            "ranking": {**self.ranking.as_json(), "per_sweep": [sweep.as_json() for sweep in self.sweeps]},
            "skipped": self.skipped,
            "excluded": self.excluded,
            "seconds": self.seconds,
        }


def matches(row: dict[str, Any], conditions: Sequence[str]) -> bool:
    """Whether `row` meets every condition: "source=nanotron" (part of a text, any case), "n_gpus>=64", "oom!=true".

    Raises:
        InputError: a condition that is not key, operator, value.
    """
    for condition in conditions:
        parsed = re.fullmatch(r"\s*(\w+)\s*(!=|>=|<=|=|>|<)\s*(.*?)\s*", condition)
        if parsed is None:
            raise InputError(f"--where {condition}: write it as key=value, such as source=nanotron or n_gpus>=64")
        key, sign, text = parsed[1], parsed[2], parsed[3]
        value = row.get(key)
        if isinstance(value, str) or value is None:
            found = text.lower() in str(value or "").lower()
            if sign not in ("=", "!="):
                return False
            if found != (sign == "="):
                return False
            continue
        try:
            wanted: Any = json.loads(text.lower())
        except json.JSONDecodeError:
            return False
        try:
            met = _OPERATORS[sign](value, wanted)
        except TypeError:  # a list or a table: no order
            return False
        if not met:
            return False
    return True


def compare(run: Run, prediction: Prediction | None, failure: str = "") -> list[Comparison]:
    """One comparison per value that `run` measured."""
    skipped = run.skipped or failure
    measured = run.measured
    details: dict[str, Any] = {"assumptions": list(run.assumptions)} if run.assumptions else {}
    rows = []

    def add(metric: str, value: float | bool, **fields: Any) -> None:
        rows.append(Comparison(run.id, metric, value, fields.pop("predicted", None), group=run.group, skipped=skipped,
                               details=details, **fields))  # fmt: skip

    p = prediction
    if measured.step_time_s is not None:
        fields = {} if p is None else {"predicted": p.step_time_s, "low": p.step_low_s, "high": p.step_high_s}
        add("step_time_s", measured.step_time_s, **fields)
    if measured.peak_memory_bytes is not None:
        add("peak_memory_bytes", measured.peak_memory_bytes, **({} if p is None else _memory(run, p)))
    if measured.bubble_fraction is not None:
        fields = {} if p is None else {"predicted": p.bubble_fraction}
        if p is not None and measured.bubble_of_one_stage:
            fields = {"predicted": p.busiest_bubble_fraction}
        add("bubble_fraction", measured.bubble_fraction, **fields)
    if measured.out_of_memory is not None:
        add("oom", measured.out_of_memory, **({} if p is None else {"predicted": not p.fits}))
    return rows


def _memory(run: Run, p: Prediction) -> dict[str, Any]:
    """Predicted memory of the kind that was measured."""
    kind = run.measured.memory_kind
    allocated, reserved = p.allocated_bytes, p.reserved_bytes
    if run.measured.memory_first_rank:
        allocated, reserved = p.allocated_per_rank[0], p.reserved_per_rank[0]
    value = {"allocated": allocated, "reserved": reserved, "device": p.device_bytes}.get(kind)
    if value is None:
        low, high = allocated, reserved
        return {"predicted": (low + high) / 2, "low": low * p.memory_low, "high": high * p.memory_high, "band": (low, high)}
    return {"predicted": value, "low": value * p.memory_low, "high": value * p.memory_high}


def _validate_chunk(rows: list[tuple[str, dict[str, Any]]], predictor: Predictor) -> list[tuple[Run, list[Comparison]]]:
    """A worker's share: runs without their scenario and row (they are large), and their comparisons."""
    done = []
    for name, row in rows:
        run = run_of(row, name)
        prediction, failure = None, ""
        if run.scenario is not None and not run.skipped:
            try:
                prediction = predictor(run.scenario)
            except SimparError as error:
                failure = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            except Exception as error:  # one row must not cost the others their results
                failure = f"{FAULT}: {type(error).__name__}: {str(error)[:200]}"
        done.append((run, compare(run, prediction, failure)))
    return done


def validate_runs(
    path: Path | str,
    where: Sequence[str] = (),
    workers: int | None = None,
    predictor: Predictor = predict,
    progress: bool = False,
) -> Report:
    """Every run of the JSON-lines file at `path` that meets `where`, predicted and compared.

    Args:
        path: a file in the format of the shared runs.
        where: conditions on the rows, see `matches`.
        workers: processes; none = all cores; 1 = in this process.
        predictor: what predicts; a module-level function.
        progress: show a bar on standard error.

    Raises:
        InputError: the file or a condition is wrong.
    """
    start = time.perf_counter()
    path = Path(path)
    rows = [(f"{path.name}:{number}", row) for number, row in read_rows(path) if matches(read_values(row).row, where)]
    reasons_to_exclude = [read_values(row).row.get("exclude") for _, row in rows]
    excluded = _count(str(reason) for reason in reasons_to_exclude if reason)
    rows = [row for row, reason in zip(rows, reasons_to_exclude, strict=True) if not reason]
    done = _run_all(rows, workers or os.cpu_count() or 1, predictor, progress)
    comparisons = [row for _, part in done for row in part]
    reasons = _count(_reason(run, part) for run, part in done)
    return report_of(comparisons, reasons, excluded, time.perf_counter() - start)


def _reason(run: Run, part: list[Comparison]) -> str:
    return run.skipped or next((row.skipped for row in part if row.skipped), "")


def _count(texts: Iterable[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for text in texts:
        if text:
            counts[text] = counts.get(text, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: -item[1]))


def _run_all(
    rows: list[tuple[str, dict[str, Any]]], workers: int, predictor: Predictor, progress: bool
) -> list[tuple[Run, list[Comparison]]]:
    """All rows through the workers, in the order of the file; neighbours share a worker so that its caches help."""
    chunks = [rows[i : i + CHUNK] for i in range(0, len(rows), CHUNK)]
    results: dict[int, list[tuple[Run, list[Comparison]]]] = {}
    with _bar(len(rows), progress) as advance:
        if workers == 1 or len(chunks) <= 1:
            for index, chunk in enumerate(chunks):
                results[index] = _validate_chunk(chunk, predictor)
                advance(len(chunk))
        else:
            with ProcessPoolExecutor(min(workers, len(chunks))) as pool:
                waiting = {pool.submit(_validate_chunk, chunk, predictor): i for i, chunk in enumerate(chunks)}
                for future in as_completed(waiting):
                    results[waiting[future]] = future.result()
                    advance(len(chunks[waiting[future]]))
    return [pair for index in range(len(chunks)) for pair in results[index]]


class _bar:  # noqa: N801 - used like a function
    """A progress bar on standard error, or nothing."""

    def __init__(self, total: int, show: bool) -> None:
        self.total, self.show = total, show
        self.bar: Any = None

    def __enter__(self) -> Callable[[int], None]:
        if not self.show:
            return lambda _: None
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("runs"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        bar = Progress(*columns, console=Console(stderr=True), transient=True)
        self.bar = bar
        bar.start()
        task = bar.add_task("runs", total=self.total)
        return lambda count: bar.advance(task, count)

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()


def size_class(row: Comparison) -> str:
    """GPUs in powers of eight, as text."""
    gpus = int(row.group.get("n_gpus") or 0)
    for limit in (8, 64, 512, 4096):
        if gpus <= limit:
            return f"up to {limit} GPUs"
    return "more than 4096 GPUs"


def parallelism_class(row: Comparison) -> str:
    """The dimensions in use: "tp+pp", "fsdp", "dp"."""
    degrees = [name for name in ("tp", "pp", "cp", "ep") if int(row.group.get(name) or 1) > 1]
    if row.group.get("zero_stage") == 3:
        degrees.append("fsdp")
    elif int(row.group.get("dp") or 1) > 1 and not degrees:
        degrees.append("dp")
    return "+".join(degrees) or "one GPU"


def report_of(comparisons: Sequence[Comparison], skipped: dict[str, int], excluded: dict[str, int], seconds: float) -> Report:
    """Groups, confusion and rankings over `comparisons`."""
    groups: list[Group] = []
    for metric in dict.fromkeys(row.metric for row in comparisons):
        rows = [row for row in comparisons if row.metric == metric]
        groups.append(Group(metric, {}, summarize(rows)))
        for key in GROUPINGS:
            named = {"size": size_class, "parallelism": parallelism_class}.get(key, key)
            for (value,), members in group_by(rows, key=named).items():
                groups.append(Group(metric, {key: value}, summarize(members)))
    sweeps = rank_sweeps(comparisons)
    return Report(
        tuple(comparisons), tuple(groups), fit_confusion(comparisons), tuple(sweeps), summarize_rankings(sweeps),
        skipped, excluded, seconds,
    )  # fmt: skip


def run(data: Path, as_json: bool = False, html: Path | None = None, where: Sequence[str] = (), workers: int | None = None) -> int:
    """`simpar validate runs --data FILE [--json] [--html OUT] [--where ...]`; returns the exit code.

    Raises:
        InputError: the file or a condition is wrong.
    """
    from simpar.validation.report_runs import print_report, write_html

    report = validate_runs(data, where, workers, progress=not as_json)
    if html is not None:
        write_html(report, Path(html), data)
    print_report(report, as_json)
    return 0
