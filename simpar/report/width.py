"""Tables of a terminal, and views that follow its width."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table


def rich_table(
    title: str, heads: Sequence[str], rows: Iterable[Sequence[RenderableType]] = (), texts: Collection[int] = (0,)
) -> Table:
    """A table without lines; the columns of `texts` are set to the left, the others to the right."""
    table = Table(title=title or None, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for index, head in enumerate(heads):
        table.add_column(head, justify="left" if index in texts else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


class ByWidth:
    """A view built when its width is known: what wraps on 80 columns may have room for more on 160."""

    def __init__(self, build: Callable[[int], RenderableType]) -> None:
        self._build = build

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Build for the width there is."""
        yield self._build(options.max_width)
