"""The figures of the page as plotly takes them: those of the step report in the page's type and colours."""

from __future__ import annotations

from typing import Any

from simpar.report import memory_plot
from simpar.result.result import Result

CLEAR = "rgba(0,0,0,0)"
_FONT = {"family": "system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif", "size": 13, "color": "#1c1f23"}
_AXIS = {"gridcolor": "#e8eaed", "zerolinecolor": "#b8bec6", "automargin": True}


def styled(layout: dict[str, Any]) -> dict[str, Any]:
    """A layout in the colours and type of the page."""
    page = {
        "font": _FONT, "margin": {"l": 64, "r": 24, "t": 14, "b": 48}, "paper_bgcolor": CLEAR, "plot_bgcolor": CLEAR,
        "template": None, "uirevision": None, **layout,
    }  # fmt: skip
    for axis in ("xaxis", "yaxis"):
        given = layout.get(axis, {})
        page[axis] = {**_AXIS, **given, "title": {**given.get("title", {}), "font": _FONT}}
    return page


Figure = tuple[dict[str, Any], dict[str, str]]
"""What plotly draws, and the style (height) of the element it draws in."""


def _first(figure: dict[str, Any]) -> Figure:
    view = figure["variants"][0]
    return {"data": view["data"], "layout": styled(view["layout"])}, {"height": f"{figure['height']}px"}


def memory(result: Result) -> Figure:
    """What fills each pipeline rank at its peak, against the device."""
    return _first(memory_plot.by_rank(result))
