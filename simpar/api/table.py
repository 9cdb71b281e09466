"""A small table: rows of named cells that print, show in a notebook, and become a pandas or polars frame."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, TypeAlias

from simpar.errors import InputError
from simpar.registry import unknown

Cell: TypeAlias = str | int | float | bool | None
_SHOWN = 60
"""Rows that are printed; a longer table says how many there are."""


@dataclass(frozen=True, slots=True, repr=False)
class Table:
    """Rows of equal columns.

    Attributes:
        columns: their names, with the unit at the end.
        rows: a cell per column each; None where there is no value.
        title: what it is a table of.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    title: str = ""

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, Cell]], title: str = "") -> Table:
        """A table of mappings; its columns in the order in which they first appear."""
        columns = tuple(dict.fromkeys(name for row in rows for name in row))
        return cls(columns, tuple(tuple(row.get(name) for name in columns) for row in rows), title)

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[dict[str, Cell]]:
        return (dict(zip(self.columns, row, strict=True)) for row in self.rows)

    def __getitem__(self, index: int) -> dict[str, Cell]:
        return dict(zip(self.columns, self.rows[index], strict=True))

    def column(self, name: str) -> tuple[Cell, ...]:
        """One column, top to bottom.

        Raises:
            UnknownNameError: no column is called that.
        """
        if name not in self.columns:
            raise unknown("column", name, list(self.columns))
        at = self.columns.index(name)
        return tuple(row[at] for row in self.rows)

    def to_dicts(self) -> list[dict[str, Cell]]:
        """A dictionary per row."""
        return list(self)

    def to_pandas(self) -> Any:
        """A pandas.DataFrame.

        Raises:
            InputError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError:
            raise InputError("to_pandas() needs pandas: pip install pandas") from None
        return pandas.DataFrame.from_records(list(self.rows), columns=list(self.columns))

    def to_polars(self) -> Any:
        """A polars.DataFrame.

        Raises:
            InputError: polars is not installed.
        """
        try:
            import polars
        except ImportError:
            raise InputError("to_polars() needs polars: pip install polars") from None
        return polars.DataFrame(list(self), infer_schema_length=None)

    def __repr__(self) -> str:
        shown = [tuple(_text(cell) for cell in row) for row in self.rows[:_SHOWN]]
        widths = [max(map(len, column)) for column in zip(self.columns, *shown, strict=True)]
        right = [all(isinstance(row[i], int | float | None) for row in self.rows) for i in range(len(self.columns))]
        lines = [self.title] if self.title else []
        for row in (self.columns, *shown):
            cells = (text.rjust(w) if r else text.ljust(w) for text, w, r in zip(row, widths, right, strict=True))
            lines.append("  ".join(cells).rstrip())
        if len(self.rows) > _SHOWN:
            lines.append(f"... {len(self.rows)} rows")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{escape(name)}</th>" for name in self.columns)
        body = "".join("<tr>" + "".join(f"<td>{escape(_text(cell))}</td>" for cell in row) + "</tr>" for row in self.rows[:_SHOWN])
        caption = f"<caption>{escape(self.title)}</caption>" if self.title else ""
        more = f"<p>... {len(self.rows)} rows</p>" if len(self.rows) > _SHOWN else ""
        return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{more}"


class Shown:
    """What results share: a notebook shows their table, and those that have a page write it."""

    __slots__ = ()

    def table(self) -> Table:
        """The headline numbers."""
        raise NotImplementedError

    def _page(self) -> str:
        """The page of the command's --html."""
        raise NotImplementedError

    def save_html(self, path: str | Path, *, offline: bool = False) -> Path:
        """Write the page that the command writes with --html.

        Args:
            offline: the page has everything inside (5 MB more) and needs no network.

        Raises:
            InputError: the file cannot be written, or there is no page of this result.
        """
        from simpar import output

        with output.offline(offline):
            output.write_page(Path(path), self._page())
        return Path(path)

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


def _text(cell: Cell) -> str:
    if cell is None:
        return ""
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, float):
        return f"{cell:,.0f}" if 1e4 <= abs(cell) < 1e12 else f"{cell:.4g}"
    return f"{cell:,}" if isinstance(cell, int) else cell
