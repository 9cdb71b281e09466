"""Tables of errors on a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.table import Table


def percent(value: float | None) -> str:
    """A share for people; "-" where there is none."""
    return "-" if value is None else f"{value:.1%}"


def table_of(title: str, words: Sequence[str], numbers: Sequence[str], lines: Iterable[Sequence[str]]) -> Table:
    """`lines` below a head of `words`, then of `numbers`."""
    table = Table(title=title)
    for name in words:
        table.add_column(name, overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right")
    for line in lines:
        table.add_row(*line)
    return table
