"""Tables on a terminal and in a page, and views that follow a terminal's width."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from html import escape

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table as RichTable


def rich_table(
    title: str, heads: Sequence[str], rows: Iterable[Sequence[RenderableType]] = (), texts: Collection[int] = (0,)
) -> RichTable:
    """A table without lines; the columns of `texts` are set to the left, the others to the right."""
    table = RichTable(title=title or None, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for index, head in enumerate(heads):
        table.add_column(head, justify="left" if index in texts else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


@dataclass(frozen=True, slots=True)
class Table:
    """A table of a terminal and of a page alike: heads, rows of texts, and which columns are numbers, set to the right."""

    heads: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    numbers: tuple[int, ...] = ()

    def rich(self, title: str) -> RichTable:
        """On a terminal."""
        return rich_table(title, self.heads, self.rows, set(range(len(self.heads))) - set(self.numbers))

    def html(self) -> str:
        """In a page, escaped."""

        def row(tag: str, cells: tuple[str, ...]) -> str:
            marks = [" class=n" if i in self.numbers else "" for i in range(len(cells))]
            return "<tr>" + "".join(f"<{tag}{m}>{escape(c)}</{tag}>" for m, c in zip(marks, cells, strict=True)) + "</tr>"

        body = "".join(row("td", cells) for cells in self.rows)
        head = f"<thead>{row('th', self.heads)}</thead>" if any(self.heads) else ""
        return f"<div class=scroll tabindex=0><table>{head}<tbody>{body}</tbody></table></div>"


class ByWidth:
    """A view built when its width is known: what wraps on 80 columns may have room for more on 160."""

    def __init__(self, build: Callable[[int], RenderableType]) -> None:
        self._build = build

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Build for the width there is."""
        yield self._build(options.max_width)
