"""Measured kernels against their prices: `simpar validate kernels --data DIR`.

Every table format of the folder is read (docs/formulas_kernels.md, section Tables). A time column is priced with the
constants of its own library and power mode where there are any, else with the GPU's defaults; a GPU without a profile is
skipped with the reason. Predictions are arrays, so a folder of half a million rows takes about a minute.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from simpar.errors import InputError
from simpar.evidence import kernel_blocks, kernel_priced
from simpar.evidence.kernel_blocks import Block
from simpar.evidence.kernel_tables import tables
from simpar.evidence.report_tables import percent, table_of
from simpar.specs.base import data_dir
from simpar.statistics import ErrorSummary, summary_of

READERS: tuple[tuple[str, Callable[[Path], Iterable[Block]]], ...] = (
    ("gemm_*.csv", kernel_blocks.gemm_blocks),
    ("attention_*.csv", kernel_blocks.attention_blocks),
    ("simumax_ops*.csv", kernel_priced.training_blocks),
    ("flash_attention_charts*.csv", kernel_priced.chart_blocks),
    ("published_*.csv", kernel_priced.published_blocks),
    ("membound*.csv", kernel_priced.memory_blocks),
)
"""File name pattern -> reader; files of fitted constants (`*_fits.csv`) are no measurements."""


def read_blocks(data: Path) -> list[Block]:
    """Every measured table of a folder (or one file), predicted.

    Raises:
        InputError: no such path, or no table in it.
    """
    if not data.exists():
        raise InputError(f"{data}: no such file or folder of measured kernels")
    blocks: list[Block] = []
    for pattern, reader in READERS:
        paths = tables(data, pattern) if data.is_dir() else [data] if data.match(pattern) else []
        for path in paths:
            if not path.stem.endswith("_fits"):
                blocks += reader(path)
    if not blocks:
        raise InputError(f"{data}: no measured kernel table; known names: {', '.join(pattern for pattern, _ in READERS)}")
    return blocks


def validate_kernels(data: Path) -> Report:
    """Errors of every table in `data` (a folder or one file).

    Raises:
        InputError: no such path, or no table in it.
    """
    blocks = read_blocks(data)
    groups = summarise(blocks)
    return Report(blocks=tuple(blocks), groups=tuple(groups), failures=tuple(judge(groups)))


def _print_json(report: Report) -> None:
    """The report in parts, so that half a million rows never stand in memory as objects."""
    sys.stdout.write('{"rows": [')
    for count, row in enumerate(report.rows()):
        sys.stdout.write((",\n" if count else "") + json.dumps(row))
    rest = {"groups": [g.as_json() for g in report.groups], "failures": list(report.failures)}
    sys.stdout.write("], " + json.dumps(rest)[1:] + "\n")


def _table(groups: Iterable[KernelErrors], title: str) -> Table:
    words = ("table", "op", "dtype", "size")
    lines = []
    for g in groups:
        s, allowed = g.summary, "" if g.allowed is None else f"{100 * g.allowed[0]:g} / {100 * g.allowed[1]:g}"
        figures = map(percent, (s.median, s.p90, s.bias, s.coverage))
        lines.append((*(g.key[name] for name in words), str(s.rows), *figures, allowed))
    return table_of(title, words, ("rows", "median", "p90", "bias", "in interval", "allowed %"), lines)


def run(data: Path | None, as_json: bool) -> int:
    """The command: prints the report, without `data` of the tables that come with simpar; 1 where a group is past its tolerance.

    Raises:
        InputError: no such path, or no table in it.
    """
    report = validate_kernels(data or data_dir("validation") / "kernels")
    if as_json:
        _print_json(report)
        return 1 if report.failures else 0
    console = Console(width=170 if not sys.stdout.isatty() else None)
    console.print(_table((g for g in report.groups if g.allowed is not None), "Kernels inside the stated region"))
    console.print(_table((g for g in report.groups if g.allowed is None), "By size"))
    for block in report.blocks:
        if block.skipped:
            console.print(f"skipped {block.table}: {block.skipped} ({len(block)} rows)")
    for failure in report.failures:
        console.print(f"past tolerance: {failure}")
    return 1 if report.failures else 0


SIZES: Final = (
    (0.0, "< 1 GFLOP"),
    (1e9, "1-10 GFLOP"),
    (1e10, "10-100 GFLOP"),
    (1e11, "0.1-1 TFLOP"),
    (1e12, "1-10 TFLOP"),
    (1e13, ">= 10 TFLOP"),
)
"""Size classes by FLOPs of one op."""
CORE: Final = "core"
"""The region the tolerances are stated for: GEMM m, n, k >= 512; attention s >= 1024; others all rows."""

TOLERANCES: Final[dict[str, tuple[float, float]]] = {
    "gemm": (0.035, 0.10),
    "gemm_cold": (0.035, 0.14),
    "gemm_blackwell": (0.05, 0.14),
    "gemm_fp8": (0.04, 0.11),
    "gemm_fp8_block": (0.05, 0.21),
    "attention": (0.04, 0.11),
    "attention_sustained": (0.055, 0.14),
    "gemm_training": (0.07, 0.35),
    "grouped_gemm": (0.25, 0.65),
    "attention_training": (0.10, 0.35),
    "attention_chart": (0.12, 0.35),
    "memory_bound": (0.05, 0.45),
}
"""Kind of table -> (median, p90) of |predicted / measured - 1| past which the command fails: what a price has to reach, and
where measurements of like shapes fall into two states (cold operands, block-scaled fp8, attention at the power cap), what it
reaches with a margin."""
BLACKWELL: Final = ("b200", "gb200", "b300", "gb300")
FEWEST: Final = 20
"""Rows that a group needs to be judged."""
UNJUDGED: Final = ("peak-scaled", "default")
"""Groups priced with other constants than their own are shown, not judged."""


@dataclass(frozen=True, slots=True)
class KernelErrors:
    """Errors of one group of rows.

    Attributes:
        key: table, op, gpu, dtype, constants, size.
        summary: of predicted / measured - 1.
        allowed: (median, p90), None where the group is not judged.
    """

    key: dict[str, str]
    summary: ErrorSummary
    allowed: tuple[float, float] | None = None

    def as_json(self) -> dict[str, Any]:
        """Flat fields: the key's and the errors."""
        return {**self.key, **self.summary.as_json(), "tolerance": list(self.allowed) if self.allowed else None}


@dataclass(frozen=True, slots=True)
class Report:
    """Blocks of predicted rows, their groups, and the groups past their tolerance."""

    blocks: tuple[Block, ...]
    groups: tuple[KernelErrors, ...]
    failures: tuple[str, ...]

    def rows(self) -> Iterator[dict[str, Any]]:
        """Every row as `simpar validate --json` prints it; large folders have half a million rows."""
        for block in self.blocks:
            yield from block.rows()


def _errors(block: Block, rows: NDArray[np.bool_]) -> ErrorSummary:
    predicted, measured = block.predicted[rows], block.measured[rows]
    ok = np.isfinite(predicted)
    inside = (measured >= block.low[rows]) & (measured <= block.high[rows])
    return summary_of(predicted[ok] / measured[ok] - 1.0, inside[ok], int((~ok).sum()))


def _kind(block: Block) -> str:
    """The key of TOLERANCES."""
    if block.op == "gemm" and block.dtype.startswith("fp8"):
        return "gemm_fp8_block" if block.dtype.endswith("block") else "gemm_fp8"
    if block.op == "gemm" and block.gpu in BLACKWELL:
        return "gemm_blackwell"
    if block.op == "gemm" and "_cold/" in block.constants:
        return "gemm_cold"
    if block.op == "attention" and block.constants.endswith("/sustained"):
        return "attention_sustained"
    return block.op


def summarise(blocks: Sequence[Block]) -> list[KernelErrors]:
    """Per block: the stated region, everything, and each size class."""
    found: list[KernelErrors] = []
    for block in blocks:
        parts = [(CORE, block.core), ("all", np.ones(len(block), dtype=bool))]
        if block.flops.any():
            edges = [*(edge for edge, _ in SIZES), np.inf]
            classes = zip(SIZES, edges[1:], strict=True)
            parts += [(name, (block.flops >= edge) & (block.flops < above)) for (edge, name), above in classes]
        for size, rows in parts:
            if rows.any():
                summary = _errors(block, rows)
                judged = size == CORE and summary.rows >= FEWEST and block.constants not in UNJUDGED
                found.append(KernelErrors(block.key | {"size": size}, summary, TOLERANCES.get(_kind(block)) if judged else None))
    return found


def judge(groups: Sequence[KernelErrors]) -> list[str]:
    """One line per group past its tolerance."""
    lines = []
    for g in groups:
        median, p90 = g.summary.median, g.summary.p90
        if g.allowed is not None and median is not None and p90 is not None and (median > g.allowed[0] or p90 > g.allowed[1]):
            lines.append(
                f"{g.key['table']} {g.key['op']} {g.key['dtype']}: median {median:.1%}, p90 {p90:.1%} "
                f"past {g.allowed[0]:.0%} / {g.allowed[1]:.0%} ({g.summary.rows} rows)"
            )
    return lines
