"""Predicted against measured collectives: per series (hardware, nodes, collective), above and below 1 MiB, and bias by size.

Understands the tables of measured collectives (nccl-tests columns) and of DeepEP exchanges; a folder is every such table in it.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.console import Console
from rich.table import Table

from simpar.boundary import read_records, reader
from simpar.costs.collective_defaults import shipped
from simpar.costs.collectives import CollectiveModel
from simpar.costs.price import Price
from simpar.errors import InputError
from simpar.evidence.collective_rows import Row, harness_costs, parse
from simpar.evidence.expert_kernels import KernelRow, expert_rows
from simpar.evidence.kernel_tables import tables
from simpar.evidence.report_tables import percent, table_of
from simpar.output import finite
from simpar.specs.base import data_dir
from simpar.specs.hardware import HardwareProfile
from simpar.statistics import Comparison, ErrorSummary, Group, summarize

LARGE: Final = 2**20
DECADES: Final = ((0, "below 64 KiB"), (2**16, "64 KiB - 1 MiB"), (2**20, "1 - 16 MiB"), (2**24, "16 - 256 MiB"),
                  (2**28, "256 MiB and more"))  # fmt: skip
TOLERANCE_LARGE: Final = 0.08
TOLERANCE_SMALL: Final = 0.20
"""Mean over series of the mean |predicted / measured - 1| that the fitted tables keep."""
KERNEL_TOLERANCE: Final = 0.25
"""The same for kernels of libraries."""


@dataclass(frozen=True, slots=True)
class CollectiveReport:
    """What `validate_collectives` found.

    Attributes:
        rows: one for each measured value.
        groups: all; by size class; by series and size class; by size decade.
        seconds: wall time.
    """

    rows: tuple[Comparison, ...]
    groups: tuple[Group, ...]
    seconds: float

    def mean_over_series(self, size: str) -> float | None:
        """Mean over series, equal weight, of the MAPE of `size` (">=1MiB" or "<1MiB")."""
        found = [g.summary.mape for g in self.groups if g.by.get("group") == "series" and g.by.get("size") == size]
        kept = [m for m in found if m is not None]
        return float(np.mean(kept)) if kept else None

    @property
    def within_tolerance(self) -> bool:
        """Whether the means over series keep the stated tolerances."""
        kernels = all(str(r.group.get("collective", "")).startswith("expert") for r in self.rows)
        limits = ((">=1MiB", KERNEL_TOLERANCE if kernels else TOLERANCE_LARGE),
                  ("<1MiB", KERNEL_TOLERANCE if kernels else TOLERANCE_SMALL))  # fmt: skip
        means = [(self.mean_over_series(size), limit) for size, limit in limits]
        return all(mean is None or mean <= limit for mean, limit in means)

    def as_json(self) -> dict[str, Any]:
        """The object of `simpar validate collectives --json`."""
        return {
            "rows": [row.as_json() for row in self.rows],
            "groups": [group.as_json() for group in self.groups],
            "mean_over_series": {size: self.mean_over_series(size) for size in (">=1MiB", "<1MiB")},
            "tolerance": {">=1MiB": TOLERANCE_LARGE, "<1MiB": TOLERANCE_SMALL},
            "within_tolerance": self.within_tolerance,
            "seconds": self.seconds,
        }


class _Models:
    """One model for each machine and option, so that prices are shared by rows."""

    def __init__(self) -> None:
        self._found: dict[tuple[HardwareProfile, str, bool, bool], CollectiveModel] = {}

    def of(self, hardware: HardwareProfile, variant: str = "", *, nvls: bool = True, sharp: bool = False) -> CollectiveModel:
        key = (hardware, variant, nvls, sharp)
        if key not in self._found:
            self._found[key] = CollectiveModel(_with_variant(hardware, variant), nvls=nvls, sharp=sharp)
        return self._found[key]


def _with_variant(hardware: HardwareProfile, variant: str) -> HardwareProfile:
    """`hardware` with the constants of a fabric that its NIC kind does not tell apart, where there are fitted ones."""
    if not variant:
        return hardware
    found = next((c for key, c in shipped().items() if key[3:] == (variant,)), None)
    return hardware.model_copy(update={"collectives": found}) if found is not None else hardware


def _price(row: Row, models: _Models) -> Price:
    assert row.hardware is not None
    assert row.placement is not None
    model = models.of(row.hardware, row.variant, nvls=row.nvls, sharp=row.sharp)
    price = model.time(row.collective, row.bytes_, row.placement)
    added, rate = harness_costs().get(row.harness, (0.0, 1.0))
    seconds = added + price.seconds / rate
    scale = seconds / price.seconds
    return Price(seconds, price.low * scale, price.high * scale, price.provenance, price.terms)


def _compared(row: Row | KernelRow, models: _Models) -> Comparison:
    if row.skipped:
        return Comparison(row.row_id, "time_s", row.measured_s, None, group=row.group, skipped=row.skipped)
    if isinstance(row, KernelRow):
        group, price = row.keys, row.price(models.of(row.on[0]))
    else:
        group, price = row.group, _price(row, models)
    details = {"provenance": str(price.provenance), "law": price.terms[0][0].rsplit("/", 1)[0] if price.terms else ""}
    return Comparison(row.row_id, "time_s", row.measured_s, price.seconds, price.low, price.high, group, details=details)


Reader = Callable[[Mapping[str, str], str], Iterable[Row | KernelRow]]
FORMATS: Final[tuple[tuple[frozenset[str], Reader], ...]] = (
    (frozenset({"hardware", "gpus", "collective", "bytes", "time_us"}), lambda raw, row_id: (parse(raw, row_id),)),
    (frozenset({"hardware", "mode", "node_num", "num_token", "dispatch_transmit_us"}), expert_rows),
)
"""Columns that tell a format, and its reader; the first that fits holds."""


def _files(data: Path) -> list[Path]:
    if not data.exists():
        raise InputError(f"{data}: no such file or folder")
    return tables(data, "*.csv") if data.is_dir() else [data]


def _read(path: Path, models: _Models) -> Iterator[Comparison]:
    """The comparisons of one file; nothing for a table of another kind.

    Raises:
        InputError: not a CSV file, or a cell that is no number.
    """
    reader = None
    for line, raw in enumerate(read_records(path, empty=True), 2):
        reader = reader or next((known for needed, known in FORMATS if needed <= set(raw)), None)
        if reader is None:
            return
        try:
            yield from (_compared(row, models) for row in reader(raw, raw.get("id") or f"{path.name}:{line}"))
        except (ValueError, TypeError, KeyError, ArithmeticError) as error:
            raise InputError(f"{path}, line {line}: cannot be read: {error}") from None


def size_class(row: Comparison) -> str:
    """The two classes that tolerances are stated for."""
    return ">=1MiB" if int(row.group.get("bytes", 0)) >= LARGE else "<1MiB"


def decade(row: Comparison) -> str:
    """The size decade of a row."""
    size = int(row.group.get("bytes", 0))
    return next(name for start, name in reversed(DECADES) if size >= start)


def _groups(rows: Sequence[Comparison]) -> tuple[Group, ...]:
    by: dict[tuple[tuple[str, Any], ...], list[Comparison]] = defaultdict(list)
    for row in rows:
        series = {k: row.group.get(k) for k in ("hardware", "nodes", "collective")}
        size = size_class(row)
        by[("group", "all"),].append(row)
        by[("group", "size"), ("size", size)].append(row)
        by[("group", "decade"), ("decade", decade(row))].append(row)
        by[("group", "series"), ("size", "all"), *series.items()].append(row)
        by[("group", "series"), ("size", size), *series.items()].append(row)
    return tuple(Group("time_s", dict(keys), summarize(members)) for keys, members in by.items())


@reader("data", "tables of measured collectives, CSV")
def validate_collectives(data: Path) -> CollectiveReport:
    """Every measured collective of the file or folder `data` beside its prediction.

    Raises:
        InputError: no such file, not a CSV file, or no table of a known format.
    """
    start, models = time.perf_counter(), _Models()
    rows = [row for path in _files(Path(data)) for row in _read(path, models)]
    if not rows:
        known = "; ".join(", ".join(sorted(columns)) for columns, _ in FORMATS)
        raise InputError(f"{data}: no table of measured collectives; the columns of one are {known}")
    return CollectiveReport(tuple(rows), _groups(rows), time.perf_counter() - start)


def _series_table(report: CollectiveReport) -> Table:
    parts: dict[tuple[str, ...], dict[str, ErrorSummary]] = {}
    for group in report.groups:
        if group.by["group"] == "series":
            key = tuple(str(group.by.get(k)) for k in ("hardware", "nodes", "collective"))
            parts.setdefault(key, {})[str(group.by["size"])] = group.summary
    lines = []
    for key, sizes in sorted(parts.items()):
        both = sizes["all"]
        large, small = (sizes[s].mape if s in sizes else None for s in (">=1MiB", "<1MiB"))
        lines.append((*key, str(both.rows), *map(percent, (large, small, both.bias, both.coverage))))
    words, head = ("hardware", "nodes", "collective"), ("rows", "≥1 MiB", "<1 MiB", "bias", "covered")
    return table_of("Collectives: mean |predicted / measured - 1| by series", words, head, lines)


def _decade_table(report: CollectiveReport) -> Table:
    found = {group.by["decade"]: group.summary for group in report.groups if group.by["group"] == "decade"}
    lines = [
        (name, str(s.rows), *map(percent, (s.mape, s.median, s.p90, s.bias, s.coverage)))
        for _, name in DECADES
        if (s := found.get(name))
    ]
    return table_of("By message size", (), ("size", "rows", "mean", "median", "p90", "bias", "covered"), lines)


def print_report(report: CollectiveReport) -> None:
    """Series, size decades and totals on standard output."""
    console = Console()
    console.print(_series_table(report))
    console.print(_decade_table(report))
    large, small = report.mean_over_series(">=1MiB"), report.mean_over_series("<1MiB")
    console.print(f"Mean over series, equal weight: {percent(large)} at 1 MiB and more, {percent(small)} below")
    for reason, count in Counter(row.skipped for row in report.rows if row.skipped).most_common():
        console.print(f"skipped: {count} x {reason}", markup=False)
    console.print(f"{len(report.rows)} values in {report.seconds:.1f} s")


def run(data: Path | None, as_json: bool = False) -> int:
    """`simpar validate collectives [--data FILE] [--json]`; exit code 1 past the stated tolerance.

    Without a file: the tables that come with simpar.

    Raises:
        InputError: see `validate_collectives`.
    """
    report = validate_collectives(data or data_dir("validation") / "collectives")
    if as_json:
        sys.stdout.write(json.dumps(finite(report.as_json())) + "\n")
    else:
        print_report(report)
    return 0 if report.within_tolerance else 1
