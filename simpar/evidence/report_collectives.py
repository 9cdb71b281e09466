"""The tables that `simpar validate collectives` prints."""

from __future__ import annotations

from collections import Counter

from rich.console import Console
from rich.table import Table

from simpar.evidence.collectives import DECADES, CollectiveReport
from simpar.evidence.report_tables import percent, table_of
from simpar.statistics import ErrorSummary


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
