"""Tables of what is shipped."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def print_table(heads: Sequence[str], rows: Sequence[Sequence[str]], texts: int = 1) -> None:
    """Print rows under heads (none, where they are empty); the first `texts` columns are set to the left, the others to the right.

    On a terminal the table keeps to its width; a pipe gets a line per row.
    """
    if not sys.stdout.isatty():
        shown = [tuple(heads), *map(tuple, rows)] if any(heads) else [*map(tuple, rows)]
        widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
        for line in shown:
            cells = (text.ljust(w) if i < texts else text.rjust(w) for i, (text, w) in enumerate(zip(line, widths, strict=True)))
            print("  ".join(cells).rstrip())
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=any(heads))
    for index, head in enumerate(heads):
        table.add_column(head, justify="left" if index < texts else "right", no_wrap=index == 0, overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console().print(table, highlight=False, markup=False)
