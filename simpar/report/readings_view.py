"""A table of the readings of a scenario with open facts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Group, RenderableType

from simpar.readings import Open
from simpar.report.tables import rich_table
from simpar.units import format_seconds

MOST_LINES = 8
"""Readings that are shown; --json has all."""


def readings_report(answer: Open) -> RenderableType:
    """The mixture, its readings, what was dropped, and the fact that would narrow it most."""
    step = answer.step
    title = (f"Open facts: step time {format_seconds(step.seconds)} "
             f"(80 %: {format_seconds(step.low)} to {format_seconds(step.high)}) over {len(answer.readings)} readings")  # fmt: skip
    table = rich_table(title, ("reading", "weight", "step time", "80 % interval", "fits"))
    for reading in answer.readings[:MOST_LINES]:
        named = _named(reading.values)
        interval = f"{format_seconds(reading.low)} to {format_seconds(reading.high)}"
        table.add_row(named, f"{reading.weight:.0%}", format_seconds(reading.seconds), interval, f"{reading.chance_to_fit:.0%}")
    notes = []
    if len(answer.readings) > MOST_LINES:
        notes.append(f"... and {len(answer.readings) - MOST_LINES} more with --json")
    because = _by_reason(answer)
    for reason, named in list(because.items())[:3]:
        notes.append(f"dropped: {named}: {reason}")
    if len(because) > 3:
        notes.append(f"... and {len(because) - 3} more reasons why readings cannot have run with --json")
    if answer.look_up:
        path, width = answer.look_up[0]
        notes.append(f"Look up {path}: the interval would span {width - 1.0:.0%} instead of {step.high / step.low - 1.0:.0%}.")
    notes.append("What follows is the likeliest reading.")
    return Group(table, *notes, "")


def _by_reason(answer: Open) -> dict[str, str]:
    """Why readings were dropped -> what all of those have in common, and how many they are where that is more than one."""
    groups: dict[str, list[tuple[tuple[str, Any], ...]]] = {}
    for values, reason in answer.dropped:
        groups.setdefault(reason, []).append(values)
    found = {}
    for reason, group in groups.items():
        common = _named(pair for pair in group[0] if all(pair in values for values in group))
        found[reason] = common if len(group) == 1 else f"{common or 'any'} ({len(group)} readings)"
    return found


def _named(values: Iterable[tuple[str, Any]]) -> str:
    return ", ".join(f"{path} = {_text(value)}" for path, value in values)


def _text(value: object) -> str:
    return value if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else str(value)
