"""The tables that `simpar validate collectives` prints."""

from __future__ import annotations

from collections import Counter

from rich.console import Console
from rich.table import Table

from simpar.evidence.collectives import DECADES, CollectiveGroup, CollectiveReport


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _series_table(report: CollectiveReport) -> Table:
    table = Table(title="Collectives: mean |predicted / measured - 1| by series")
    for name in ("hardware", "nodes", "collective", "rows", "≥1 MiB", "<1 MiB", "bias", "covered"):
        table.add_column(name, justify="left" if name in ("hardware", "collective") else "right")
    parts: dict[tuple[str, ...], dict[str, CollectiveGroup]] = {}
    for group in report.groups:
        if group.keys["group"] == "series":
            key = tuple(str(group.keys.get(k)) for k in ("hardware", "nodes", "collective"))
            parts.setdefault(key, {})[str(group.keys["size"])] = group
    for key, sizes in sorted(parts.items()):
        both = sizes["all"].summary
        large, small = (sizes[s].summary.mape if s in sizes else None for s in (">=1MiB", "<1MiB"))
        table.add_row(*key, str(both.rows), _percent(large), _percent(small), _percent(both.bias), _percent(both.coverage))
    return table


def _decade_table(report: CollectiveReport) -> Table:
    table = Table(title="By message size")
    for name in ("size", "rows", "mean", "median", "p90", "bias", "covered"):
        table.add_column(name, justify="right")
    found = {g.keys["decade"]: g.summary for g in report.groups if g.keys["group"] == "decade"}
    for _, name in DECADES:
        if name in found:
            s = found[name]
            table.add_row(name, str(s.rows), *(_percent(v) for v in (s.mape, s.median, s.p90, s.bias, s.coverage)))
    return table


def print_report(report: CollectiveReport) -> None:
    """Series, size decades and totals on standard output."""
    console = Console()
    console.print(_series_table(report))
    console.print(_decade_table(report))
    large, small = report.mean_over_series(">=1MiB"), report.mean_over_series("<1MiB")
    console.print(f"Mean over series, equal weight: {_percent(large)} at 1 MiB and more, {_percent(small)} below")
    for reason, count in Counter(row.skipped for row in report.rows if row.skipped).most_common():
        console.print(f"skipped: {count} x {reason}", markup=False)
    console.print(f"{len(report.rows)} values in {report.seconds:.1f} s")
