"""The figures of the page, as plotly takes them: those of the step report, and a pipeline Gantt light enough to drag a slider."""

from __future__ import annotations

from typing import Any

import numpy as np

from simpar.report import memory_plot, step_figures
from simpar.report.encode import packed, time_unit
from simpar.report.gantt import FOLDED, KINDS, Rectangles, lanes_of, thinned
from simpar.report.shown import shown_roles
from simpar.result.result import Result

MAX_RECTANGLES = 10_000
MAX_HOVER = 600
"""Ops with a text under the pointer; more make every change slow in the browser."""
_FONT = {"family": "system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif", "size": 13, "color": "#1c1f23"}
_AXIS = {"gridcolor": "#e8eaed", "zerolinecolor": "#b8bec6", "automargin": True}
_ROW, _FEW = (20, 34), (260, 620)


def styled(layout: dict[str, Any]) -> dict[str, Any]:
    """A layout in the colours and type of the page."""
    page = {
        "font": _FONT, "margin": {"l": 64, "r": 24, "t": 14, "b": 48}, "paper_bgcolor": "#fff", "plot_bgcolor": "#fff",
        "template": None, "uirevision": None, **layout,
    }  # fmt: skip
    for axis in ("xaxis", "yaxis"):
        page[axis] = {**_AXIS, **layout.get(axis, {})}
    return page


Figure = tuple[dict[str, Any], dict[str, str]]
"""What plotly draws, and the style (height) of the element it draws in."""


def _first(figure: dict[str, Any]) -> Figure:
    view = figure["variants"][0]
    return {"data": view["data"], "layout": styled(view["layout"])}, {"height": f"{figure['height']}px"}


def waterfall(result: Result) -> Figure:
    """Where the step goes."""
    return _first(step_figures.waterfall(result))


def memory(result: Result) -> Figure:
    """What fills each pipeline rank at its peak, against the device."""
    return _first(memory_plot.by_rank(result))


def gantt(result: Result) -> tuple[Figure, str]:
    """What every pipeline rank does and when: one filled shape per kind; and a note on what was merged."""
    roles = shown_roles(result)
    lanes = lanes_of(result.program, roles)
    drawn, note = thinned(result, lanes, MAX_RECTANGLES)
    unit, factor = time_unit(result.step_time_s)
    top, bottom = (np.array([getattr(lane, name) for lane in lanes]) for name in ("top", "bottom"))
    kind, odd = result.program.kind[drawn.first], result.program.microbatch[drawn.first] % 2
    end = np.full(len(lanes), result.step_time_s * factor)
    traces = [_shapes("waiting", "#eceef1", np.zeros(len(lanes)), end, top, bottom, True)]
    x0, x1 = drawn.start * factor, drawn.finish * factor
    for which, (name, even, uneven) in [*KINDS.items(), (None, FOLDED)]:
        mine = drawn.folded if which is None else (kind == int(which)) & ~drawn.folded
        first = True
        for parity, color in ((0, even), (1, uneven)):
            at = np.flatnonzero(mine & (odd == parity))
            if len(at):
                lane = drawn.lane[at]
                traces.append(_shapes(name, color, x0[at], x1[at], top[lane], bottom[lane], first))
                first = False
    traces.append(_hover(result, drawn, top, bottom, unit, factor))
    count = max(len(roles), 1)
    step = -(-count // 16)
    height = int(min(max(110 + count * _ROW[1], _FEW[0]), _FEW[1]))
    layout = {
        "xaxis": {"title": {"text": f"time in the step ({unit})"}, "range": [0, result.step_time_s * factor], "showgrid": False,
                  "zeroline": False},
        "yaxis": {"tickvals": [i + 0.5 for i in range(0, count, step)], "range": [count, 0], "showgrid": False, "zeroline": False,
                  "ticktext": [f"rank {roles[i].pipeline_rank}" for i in range(0, len(roles), step)]},
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0}, "hovermode": "closest", "dragmode": "zoom",
        "margin": {"l": 70, "r": 24, "t": 10, "b": 44},
    }  # fmt: skip
    return ({"data": traces, "layout": styled(layout)}, {"height": f"{height}px"}), note


def _shapes(name: str, color: str, x0: Any, x1: Any, top: Any, bottom: Any, legend: bool) -> dict[str, Any]:
    """Rectangles as one filled path; NaN parts them."""
    gap = np.full(len(x0), np.nan)
    x = np.stack([x0, x1, x1, x0, gap], axis=1).ravel()
    y = np.stack([top, top, bottom, bottom, gap], axis=1).ravel()
    return {
        "type": "scatter", "mode": "none", "fill": "toself", "fillcolor": color, "x": packed(x, "float64"), "y": packed(y),
        "name": name, "legendgroup": name, "showlegend": legend, "hoverinfo": "skip",
    }  # fmt: skip


def _hover(result: Result, drawn: Rectangles, top: Any, bottom: Any, unit: str, factor: float) -> dict[str, Any]:
    """Invisible points in the middle of the longest rectangles, with the op's name and times."""
    length = drawn.finish - drawn.start
    at = np.sort(np.argsort(-length)[:MAX_HOVER])

    def text(i: int) -> str:
        name = result.program.label(int(drawn.first[i]))
        return f"{name}<br>start {drawn.start[i] * factor:.5g} {unit}, lasts {length[i] * factor:.4g} {unit}"

    texts = [text(i) for i in at.tolist()]
    lane = drawn.lane[at]
    return {
        "type": "scatter", "mode": "markers", "x": packed((drawn.start + drawn.finish)[at] / 2 * factor, "float64"),
        "y": packed((top[lane] + bottom[lane]) / 2), "text": texts, "hovertemplate": "%{text}<extra></extra>",
        "marker": {"size": 8, "opacity": 0}, "showlegend": False, "name": "ops",
    }  # fmt: skip
