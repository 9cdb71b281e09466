"""`simpar diff --html`: the difference by cause and both timelines of a rank as one self-contained page."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any, Final

from simpar.live.trace_diff import GROUPS, TraceDiff
from simpar.live.trace_slices import Slice
from simpar.report.diff_view import CAUSES, cause_table, collective_table, headline, late_table, op_table, ratio, signed
from simpar.report.encode import time_unit
from simpar.report.page import Cards, tiles
from simpar.report.step_figures import figure, waterfall_bars
from simpar.report.tables import Table
from simpar.units import format_seconds

COLORS: Final = {
    "gemm": "#0072b2", "attention": "#e69f00", "memory_bound": "#009e73", "optimizer": "#000000", "tp": "#cc79a7", "cp": "#6f4c9b",
    "ep": "#d55e00", "dp": "#7a3b12", "pp": "#56b4e9", "other": "#8c8c8c", "copy": "#b0b0b0", "launch": "#d8c800",
}  # fmt: skip
_COMPUTE: Final = frozenset({"gemm", "attention", "memory_bound", "optimizer", "copy", "launch"})
MAX_SHAPES: Final = 6_000
"""Rectangles per view and timeline; beyond, neighbours of one kind are drawn as one."""
ZOOM: Final = 40
"""Further views show this part of the step."""
_LANES: Final = (("predicted compute", 0), ("predicted communication", 1), ("measured compute", 2), ("measured communication", 3))


def diff_page(diff: TraceDiff) -> str:
    """The page as HTML text."""
    cards = Cards(_head(diff))
    cards.draw("From the predicted to the measured step", _waterfall(diff), "half")
    rule = "Every moment has one cause: a running kernel, else an exposed collective, a copy, a late host, a wait."
    cards.tabulate("Seconds of this rank by cause", cause_table(diff), "half", rule)
    rule = "Drag to zoom, double-click to see the whole view. Both begin with the step."
    cards.draw("Both timelines", timelines(diff), "", rule)
    if diff.lag:
        rule = "A slope is where time is lost, a jump one late op."
        cards.draw("How much later each op began than predicted", _lag(diff), "", rule)
    cards.tabulate("Compute, op by op", op_table(diff, 20))
    cards.tabulate("Collectives", collective_table(diff))
    rule = "Their excess over the prediction stands out from that of the others of their kind."
    cards.tabulate("Late collectives", late_table(diff), "", rule)
    cards.add("Longest kernels of the trace, per step", _kernels(diff))
    cards.tell("Notes", diff.notes)
    return cards.html(f"{diff.scenario}: trace")


def _head(diff: TraceDiff) -> str:
    change = diff.measured_step_s - diff.predicted_step_s
    shown = [("measured step", format_seconds(diff.measured_step_s), f"mean of {diff.steps}"),
             ("predicted step", format_seconds(diff.predicted_step_s), ""),
             ("difference", signed(change), ratio(diff.predicted_step_s, diff.measured_step_s))]  # fmt: skip
    shown += [(name, signed(diff.group(name)), "of the difference") for name in GROUPS if abs(diff.group(name)) > 1e-9]
    about = f"rank {diff.rank}, pipeline rank {diff.pipeline_rank}; {diff.file}"
    return (
        f"<h1>{escape(diff.scenario)}: predicted and measured</h1><p>{escape(headline(diff))}</p>"
        f"<p class=soft>{escape(about)}</p>{tiles(shown)}"
    )  # fmt: skip


def _waterfall(diff: TraceDiff) -> dict[str, Any]:
    unit, factor = time_unit(max(diff.measured_step_s, diff.predicted_step_s))
    moved = [c for c in diff.causes if abs(c.difference_s) > 1e-4 * diff.predicted_step_s]
    rest = diff.measured_step_s - diff.predicted_step_s - sum(c.difference_s for c in moved)
    names = ["predicted step", *(CAUSES[c.name] for c in moved), "all the rest", "measured step"]
    values = [diff.predicted_step_s, *(c.difference_s for c in moved), rest, diff.measured_step_s]
    texts = [f"{v * factor:.4g} {unit}" for v in values]
    texts[1:-1] = [("+" if v >= 0 else "") + t for v, t in zip(values[1:-1], texts[1:-1], strict=True)]
    steps = list(zip(names, (v * factor for v in values), texts, strict=True))
    return waterfall_bars("difference", steps, {"title": {"text": f"step of this rank ({unit})"}}, right=120)


def timelines(diff: TraceDiff) -> dict[str, Any]:
    """Compute and communication of both, in the whole step and, in detail, at its begin, middle and end."""
    longest = max(diff.predicted_step_s, diff.shown_step_s)
    unit, factor = time_unit(longest)
    part = longest / ZOOM
    begin = min((s.start_s for s in diff.predicted), default=0.0)
    views = [("the whole step", 0.0, longest)]
    views += [("the first part", 0.0, part), ("the middle", (longest - part) / 2, (longest + part) / 2)]
    views.append(("the end", longest - part, longest))
    variants = []
    for label, a, b in views:
        data = _drawn(diff.predicted, 0, a + begin, b + begin, begin, factor) + _drawn(diff.measured, 2, a, b, 0.0, factor)
        seen: set[str] = set()
        for trace in data:
            trace["showlegend"] = trace["legendgroup"] not in seen
            seen.add(trace["legendgroup"])
        layout = {
            "xaxis": {"title": {"text": f"time in the step ({unit})"}, "range": [a * factor, b * factor], "showgrid": False},
            "yaxis": {"tickvals": [i + 0.5 for _, i in _LANES], "ticktext": [name for name, _ in _LANES], "range": [4, 0],
                      "showgrid": False, "zeroline": False},
            "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0}, "hovermode": "closest", "dragmode": "zoom",
        }  # fmt: skip
        variants.append({"label": label, "data": data, "layout": layout})
    notes = [f"Where there are more than {MAX_SHAPES:,} ops, neighbours of one kind are drawn as one."]
    return {"id": "timelines", "variants": variants, "height": 420, "choose": "Show", "zoom": True, "notes": notes}


def _drawn(slices: Sequence[Slice], lane: int, begin: float, end: float, zero: float, factor: float) -> list[dict[str, Any]]:
    """One filled shape per kind, with the ops' names under the pointer."""
    shown = [s for s in slices if s.end_s > begin and s.start_s < end]
    merged = _merged(shown, (end - begin) / 4000 if len(shown) > MAX_SHAPES else 0.0)
    traces: list[dict[str, Any]] = []
    for kind, color in COLORS.items():
        mine = [m for m in merged if m[3] == kind]
        if not mine:
            continue
        top = lane + (0.08 if kind in _COMPUTE else 1.08)
        x: list[float | None] = []
        y: list[float | None] = []
        for a, b, _, _ in mine:
            left, right = round((max(a, begin) - zero) * factor, 9), round((min(b, end) - zero) * factor, 9)
            x += [left, right, right, left, None]
            y += [top, top, top + 0.84, top + 0.84, None]
        title = CAUSES[kind].partition(",")[0].partition(":")[0]
        traces.append({"type": "scatter", "mode": "none", "fill": "toself", "fillcolor": color, "x": x, "y": y, "name": title,
                       "legendgroup": kind, "hoverinfo": "skip"})  # fmt: skip
        centres = [((max(a, begin) + min(b, end)) / 2 - zero) * factor for a, b, _, _ in mine]
        texts = [f"{name}<br>{format_seconds(b - a)}" for a, b, name, _ in mine]
        traces.append({"type": "scatter", "mode": "markers", "x": [round(c, 9) for c in centres], "y": [top + 0.42] * len(mine),
                       "text": texts, "hovertemplate": "%{text}<extra></extra>", "marker": {"opacity": 0, "size": 12},
                       "legendgroup": kind, "showlegend": False, "name": kind})  # fmt: skip
    return [t for t in traces if t["mode"] == "none"] + [t for t in traces if t["mode"] != "none"]


def _merged(slices: Sequence[Slice], within: float) -> list[tuple[float, float, str, str]]:
    """(begin, end, name, kind); neighbours of one kind closer than `within` as one."""
    found: list[tuple[float, float, str, str]] = []
    last: dict[str, int] = {}
    for item in sorted(slices, key=lambda s: s.start_s):
        at = last.get(item.kind)
        if within and at is not None and item.start_s - found[at][1] < within:
            a, b, name, kind = found[at]
            found[at] = (a, max(b, item.end_s), name if name == item.name else f"{CAUSES[kind]}", kind)
            continue
        last[item.kind] = len(found)
        found.append((item.start_s, item.end_s, item.name[:90], item.kind))
    return found


def _lag(diff: TraceDiff) -> dict[str, Any]:
    unit, factor = time_unit(max(diff.measured_step_s, diff.predicted_step_s))
    step = max(len(diff.lag) // 4000, 1)
    points = sorted(diff.lag)[::step]
    trace = {
        "type": "scatter", "mode": "lines", "x": [a * factor for a, _ in points], "y": [b * factor for _, b in points],
        "line": {"color": "#0072b2", "width": 1.5},
        "hovertemplate": f"predicted %{{x:.4g}} {unit}: %{{y:.4g}} {unit} later<extra></extra>",
    }  # fmt: skip
    layout = {"xaxis": {"title": {"text": f"predicted begin of the op ({unit})"}}, "yaxis": {"title": {"text": f"later ({unit})"}},
              "showlegend": False}  # fmt: skip
    return figure("lag", [trace], layout, 320)


def _kernels(diff: TraceDiff) -> str:
    longest = sorted(((kind, *row) for kind, rows in diff.kernels.items() for row in rows), key=lambda row: -row[3])
    rows = [
        (CAUSES[kind].partition(",")[0], name[:110], f"{count:,.4g}", format_seconds(seconds))
        for kind, name, count, seconds in longest[:24]
    ]
    return Table(("class", "kernel", "launches", "time"), rows, (2, 3)).html()
