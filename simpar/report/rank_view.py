"""`simpar validate rank` on a terminal and as a page."""

from __future__ import annotations

import math
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from simpar.live.rank import TOLERANCE, Row
from simpar.live.rank_command import RankReport
from simpar.report.page import Cards
from simpar.report.palette import BLUE, ORANGE
from simpar.report.step_figures import figure
from simpar.report.tables import Table, rich_table
from simpar.units import format_bytes, format_seconds

TITLES = {
    "parameters": "parameters", "state_bytes": "states (weights, moments)", "saved_bytes": "saved activations", "flops": "FLOPs",
    "wire_bytes": "bytes on the wire", "allocated_bytes": "peak allocated", "reserved_bytes": "peak reserved",
    "step_time_s": "step of the rank alone", "published_time_s": "with what published clusters add",
    "block_time_s": "single block",
    "class_time_s": "kernels",
}  # fmt: skip
HEADS = ("layout", "figure", "", "predicted", "measured", "error", "tolerance", "")


def _value(metric: str, value: float | None) -> str:
    if value is None:
        return "-"
    if metric.endswith("_bytes"):
        return format_bytes(value)
    if metric.endswith("_s"):
        return format_seconds(value)
    return f"{value / 1e12:,.3f} TFLOP" if metric == "flops" else f"{value:,.0f}"


def _error(row: Row) -> str:
    if row.error is None:
        return "-"
    return "none predicted" if math.isinf(row.error) else f"{row.error:+.2%}" if row.error else "exact"


def table_rows(report: RankReport) -> list[tuple[str, ...]]:
    """One per figure."""
    found: list[tuple[str, ...]] = []
    for row in report.rows:
        limit = TOLERANCE[row.metric]
        wanted = "shown" if math.isinf(limit) else "exact" if limit < 1e-5 else f"{limit:.0%}"
        found.append((row.layout, TITLES[row.metric], row.part, _value(row.metric, row.predicted), _value(row.metric, row.measured),
                      _error(row), wanted, "" if row.within else "OUTSIDE"))  # fmt: skip
    return found


def rank_report(report: RankReport) -> RenderableType:
    """A table per layout, then what they were measured on."""
    parts: list[RenderableType] = []
    rows = table_rows(report)
    for layout in dict.fromkeys(row[0] for row in rows):
        table = rich_table(f"{layout}: {report.devices.get(layout, '')}", ("", *HEADS[3:]), texts=(0, 5))
        for row in rows:
            if row[0] == layout:
                table.add_row(f"{row[1]}: {row[2]}" if row[2] else row[1], *row[3:], style="bold red" if row[-1] else "")
        parts += [table, Text("")]
    inside = sum(row.within for row in report.rows)
    parts.append(Text(f"{inside} of {len(report.rows)} figures within tolerance", style="bold"))
    parts += [Text(f"note: {note}", style="yellow") for note in report.notes]
    return Group(*parts)


def rank_page(report: RankReport) -> str:
    """The page as HTML text."""
    cards = Cards("<h1>One rank of large layouts: predicted and measured</h1>")
    drawn = (
        ("allocated_bytes", "Peak allocated memory"),
        ("step_time_s", "Step of the rank alone"),
        ("block_time_s", "Single blocks"),
    )
    for metric, title in drawn:
        rows = [r for r in report.rows if r.metric == metric and r.measured and r.predicted]
        if rows:
            cards.draw(title, _bars(metric, rows), "half")
    cards.add("All figures", Table(HEADS, table_rows(report), (3, 4, 5, 6)).html())
    measured_on = [f"{name}: {device}" for name, device in report.devices.items()]
    cards.tell("Measured on, and notes", [*measured_on, *report.notes])
    return cards.html("validate rank")


def _bars(metric: str, rows: list[Row]) -> dict[str, Any]:
    unit, factor = ("GiB", 2.0**-30) if metric.endswith("_bytes") else ("s", 1.0)
    names = [r.part or r.layout for r in rows]
    data = [
        {"type": "bar", "orientation": "h", "name": title, "y": names, "x": [(getattr(r, field) or 0.0) * factor for r in rows],
         "marker": {"color": color}, "hovertemplate": f"%{{y}}: %{{x:.4g}} {unit}"}
        for title, field, color in (("predicted", "predicted", BLUE), ("measured", "measured", ORANGE))
    ]  # fmt: skip
    layout = {
        "barmode": "group", "xaxis": {"title": {"text": unit}}, "yaxis": {"autorange": "reversed", "automargin": True},
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
    }  # fmt: skip
    return figure(metric.replace("_", "-"), data, layout, 140 + 34 * len(names))
