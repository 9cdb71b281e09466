"""Tables that follow the width of the terminal."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult


class ByWidth:
    """A view built when its width is known: what wraps on 80 columns may have room for more on 160."""

    def __init__(self, build: Callable[[int], RenderableType]) -> None:
        self._build = build

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Build for the width there is."""
        yield self._build(options.max_width)
