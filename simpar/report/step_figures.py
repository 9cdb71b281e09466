"""Figures of time: the waterfall, communication busy and exposed, what widens the interval."""

from __future__ import annotations

from typing import Any

from simpar.report.encode import time_unit
from simpar.report.palette import BLUE, GREEN, GREY, ORANGE
from simpar.result.result import Result


def figure(name: str, data: list[dict[str, Any]], layout: dict[str, Any], height: int) -> dict[str, Any]:
    """A figure with one view."""
    return {"id": name, "variants": [{"label": "", "data": data, "layout": layout}], "height": height}


def waterfall(result: Result) -> dict[str, Any]:
    """From the ideal step to the predicted one, cause by cause."""
    return waterfall_of(result.waterfall(), result.step_time_s)


def waterfall_of(entries: list[tuple[str, float]], step_time_s: float) -> dict[str, Any]:
    """The same from its entries, seconds that add up to the step."""
    unit, factor = time_unit(step_time_s)
    steps = [*entries, ("predicted step", step_time_s)]
    share = [seconds / step_time_s if step_time_s else 0.0 for _, seconds in steps]
    bars = [(n, s * factor, f"{s * factor:.4g} {unit} ({part:.1%})") for (n, s), part in zip(steps, share, strict=True)]
    axis = {"title": {"text": f"mean over pipeline ranks ({unit})"}, "range": [0, step_time_s * factor * 1.02]}
    return waterfall_bars("waterfall", bars, axis, right=160)


def waterfall_bars(name: str, steps: list[tuple[str, float, str]], axis: dict[str, Any], right: int) -> dict[str, Any]:
    """A waterfall of (title, value, text): the first absolute, the last the total, between them what leads from one to the other.

    Args:
        right: pixels beside the plot for the texts.
    """
    names, values, texts = (list(column) for column in zip(*steps, strict=True))
    trace = {
        "type": "waterfall", "orientation": "h", "y": names, "x": values, "customdata": texts,
        "measure": ["absolute", *["relative"] * (len(steps) - 2), "total"],
        "hovertemplate": "%{y}: %{customdata}<extra></extra>",
        "totals": {"marker": {"color": GREY}}, "increasing": {"marker": {"color": ORANGE}},
        "decreasing": {"marker": {"color": GREEN}}, "connector": {"line": {"color": "#b0b0b0", "width": 1}},
    }  # fmt: skip
    # The numbers stand in a column beside the plot: at the bars they would run into each other and over the edge.
    column = [
        {"xref": "paper", "x": 1.0, "xanchor": "left", "y": title, "text": text, "showarrow": False} for title, _, text in steps
    ]
    layout = {
        "xaxis": axis, "yaxis": {"autorange": "reversed", "automargin": True}, "showlegend": False, "annotations": column,
        "margin": {"l": 64, "r": right, "t": 14, "b": 48},
    }  # fmt: skip
    return figure(name, [trace], layout, 110 + 30 * len(names))


def communication(result: Result) -> dict[str, Any] | None:
    """Per dimension: how long its collectives run, and how long compute waits for them. None without communication."""
    unit, factor = time_unit(result.step_time_s)
    busy, exposed = result.communication_s, result.exposed_communication_s
    names = [n for n in ("tp", "cp", "ep", "pp", "dp") if busy.get(n, 0.0) + exposed.get(n, 0.0) > 0.0]
    if not names:
        return None
    long = {"tp": "tensor", "cp": "context", "ep": "expert", "pp": "pipeline", "dp": "data"}
    shown = [f"{long[n]} ({n})" for n in names]

    def bars(title: str, values: dict[str, float], color: str) -> dict[str, Any]:
        lengths = [values.get(n, 0.0) * factor for n in names]
        return {
            "type": "bar", "orientation": "h", "name": title, "y": shown, "x": lengths, "marker": {"color": color},
            "text": [f"{v:.3g} {unit}" for v in lengths], "textposition": "outside", "cliponaxis": False,
            "hovertemplate": "%{y}: %{text}",
        }  # fmt: skip

    most = max(max(busy.get(n, 0.0), exposed.get(n, 0.0)) for n in names) * factor
    layout = {
        "barmode": "group",
        "xaxis": {"title": {"text": f"seconds per step, mean over pipeline ranks ({unit})"}, "range": [0, most * 1.22]},
        "yaxis": {"autorange": "reversed", "automargin": True},
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
    }  # fmt: skip
    data = [bars("running", busy, BLUE), bars("exposed: compute waits", exposed, ORANGE)]
    return figure("communication", data, layout, 150 + 60 * len(names))


def interval(result: Result) -> dict[str, Any] | None:
    """The 80 % interval of the step, and the categories whose constants widen it most. None where nothing is known."""
    unit, factor = time_unit(result.step_time_s)
    wide = result.step_interval.dominated_by
    if not wide:
        return None
    values = [seconds * factor for _, seconds in wide]
    trace = {
        "type": "bar", "orientation": "h", "y": [name.replace("_", " ") for name, _ in wide], "x": values,
        "marker": {"color": BLUE}, "text": [f"± {v:.3g} {unit}" for v in values], "textposition": "outside",
        "cliponaxis": False, "hovertemplate": "%{y}: %{text}<extra></extra>",
    }  # fmt: skip
    layout = {
        "xaxis": {"title": {"text": f"half-width of the step's 80 % interval ({unit})"}, "range": [0, max(values) * 1.25]},
        "yaxis": {"autorange": "reversed", "automargin": True}, "showlegend": False,
    }  # fmt: skip
    return figure("interval", [trace], layout, 110 + 34 * len(wide))
