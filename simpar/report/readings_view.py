"""A table of the readings of a scenario with open facts."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table

from simpar.readings import Open
from simpar.units import format_seconds

MOST_LINES = 8
"""Readings that are shown; --json has all."""


def readings_report(answer: Open) -> RenderableType:
    """The mixture, its readings, what was dropped, and the fact that would narrow it most."""
    step = answer.step
    title = (f"Open facts: step time {format_seconds(step.seconds)} "
             f"(80 %: {format_seconds(step.low)} to {format_seconds(step.high)}) over {len(answer.readings)} readings")  # fmt: skip
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in ("reading", "weight", "step time", "80 % interval", "fits"):
        table.add_column(column, justify="left" if column == "reading" else "right")
    for reading in answer.readings[:MOST_LINES]:
        named = ", ".join(f"{path} = {_text(value)}" for path, value in reading.values)
        interval = f"{format_seconds(reading.low)} to {format_seconds(reading.high)}"
        table.add_row(named, f"{reading.weight:.0%}", format_seconds(reading.seconds), interval, f"{reading.chance_to_fit:.0%}")
    notes = []
    if len(answer.readings) > MOST_LINES:
        notes.append(f"... and {len(answer.readings) - MOST_LINES} more with --json")
    for values, reason in answer.dropped[:3]:
        notes.append(f"dropped: {', '.join(f'{p} = {_text(v)}' for p, v in values)}: {reason}")
    if len(answer.dropped) > 3:
        notes.append(f"... and {len(answer.dropped) - 3} more that cannot have run")
    if answer.look_up:
        path, width = answer.look_up[0]
        notes.append(f"Look up {path}: the interval would span {width - 1.0:.0%} instead of {step.high / step.low - 1.0:.0%}.")
    notes.append("What follows is the likeliest reading.")
    return Group(table, *notes, "")


def _text(value: object) -> str:
    return value if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else str(value)
