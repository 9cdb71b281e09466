"""Measured kernels against their prices: `simpar validate kernels --data DIR`.

Every table format of the folder is read (docs/formulas_kernels.md, section Tables). A time column is priced with the
constants of its own library and power mode where there are any, else with the GPU's defaults; a GPU without a profile is
skipped with the reason. Predictions are arrays, so a folder of half a million rows takes about a minute.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from simpar.errors import InputError
from simpar.evidence import kernel_blocks, kernel_priced
from simpar.evidence.kernel_blocks import Block
from simpar.evidence.kernel_groups import KernelErrors, Report, judge, summarise
from simpar.evidence.report_tables import percent, table_of
from simpar.evidence.tables import tables
from simpar.specs.base import data_dir

READERS: tuple[tuple[str, Callable[[Path], list[Block]]], ...] = (
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
