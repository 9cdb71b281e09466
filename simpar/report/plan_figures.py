"""Figures about a plan: the run in time, its losses, how long and how dear it may become, variants, what moves it most."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from simpar.planning.answer import Answer
from simpar.planning.outcome import Mark, Outcome
from simpar.planning.sensitivity import Swing, Tornado
from simpar.planning.study import Study
from simpar.report.palette import BLUE, GREY, VERMILION
from simpar.report.step_figures import figure

DAY_S: Final = 86400.0
SHOWN_CHECKPOINTS: Final = 400
SHOWN_FAILURES: Final = 60
LONG_LABELS: Final = 110
"""Characters of all labels that still stand side by side."""
MOST_BARS: Final = 120
"""Spans of a run for which the hours lost are added up."""
COLORS: Final = {
    "checkpoint_stall": "#56b4e9", "lost_work": "#d55e00", "detection": "#e69f00", "replacement": "#c9b400",
    "waiting_for_spare": "#cc79a7", "restart": "#0072b2", "initialisation": "#009e73", "checkpoint_load": "#5f9ea0",
    "slow_node": "#999999", "maintenance": "#000000",
}  # fmt: skip
"""Cause -> colour (near Okabe and Ito's; every row and bar is named as well)."""
_ABOVE: Final = {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0}
_SECOND: Final = {"rangemode": "tozero", "showgrid": False, "automargin": True, "tickmode": "auto"}
_ROWS: Final = {"automargin": True, "ticksuffix": "  "}


def _axis(text: str, **more: Any) -> dict[str, Any]:
    return {"title": {"text": text}, "ticks": "outside", "ticklen": 6, "tickcolor": "#fff", **more}


def _upright(x: float, line: dict[str, Any]) -> dict[str, Any]:
    """A line over the whole height."""
    return {"type": "line", "x0": x, "x1": x, "yref": "paper", "y0": 0, "y1": 1, "line": line}


def _words(cause: str) -> str:
    return cause.replace("_", " ")


def whole_run(sample: Outcome) -> dict[str, Any]:
    """Hours in which nothing is trained, by cause, for every day (or longer) of the run, with the number of failures."""
    total = sample.wall_s / DAY_S
    width = max(1.0, total / MOST_BARS)
    edges = np.append(np.arange(0.0, total, width), total)
    middles = ((edges[1:] + edges[:-1]) / 2).tolist()
    per = "day" if width == 1.0 else f"{width:.3g} days"
    traces: list[dict[str, Any]] = []
    for cause, color in COLORS.items():
        marks = [mark for mark in sample.marks if mark.kind == cause]
        if not marks or cause == "slow_node":  # training goes on, slowly
            continue
        traces.append({
            "type": "bar", "name": _words(cause), "x": middles, "y": _hours_in(marks, edges).tolist(), "width": width * 0.9,
            "marker": {"color": color}, "hovertemplate": "%{y:.2f} h",
        })  # fmt: skip
    counts = np.histogram([mark.start_s / DAY_S for mark in _failures(sample)], edges)[0]
    failed = [(x, int(count)) for x, count in zip(middles, counts, strict=True) if count]
    traces.append({
        "type": "scatter", "mode": "markers", "name": "failures", "x": [x for x, _ in failed], "y": [n for _, n in failed],
        "yaxis": "y2", "marker": {"symbol": "x", "color": VERMILION, "size": 7}, "hovertemplate": "%{y}",
    })  # fmt: skip
    layout = {
        "barmode": "stack", "hovermode": "x unified", "legend": _ABOVE, "margin": {"l": 64, "r": 64, "t": 14, "b": 48},
        "xaxis": _axis("day of the run", range=[0.0, total]), "yaxis": _axis(f"hours lost per {per}", rangemode="tozero"),
        "yaxis2": _axis(f"failures per {per}", overlaying="y", side="right", **_SECOND),
    }  # fmt: skip
    return figure("whole-run", traces, layout, 380)


def _hours_in(marks: list[Mark], edges: np.ndarray) -> np.ndarray:
    """Hours of the marks that lie between each two edges (days)."""
    spent = np.array([[mark.start_s, mark.end_s] for mark in marks]) / DAY_S
    # Hours until each edge, as the sum over marks; their differences are what lies between.
    until = np.clip(edges[:, None], spent[None, :, 0], spent[None, :, 1]) - spent[None, :, 0]
    return np.diff(until.sum(axis=1)) * 24.0


def _failures(sample: Outcome) -> list[Mark]:
    return [mark for mark in sample.marks if mark.kind == "detection" and mark.label]


def timeline(answer: Answer, sample: Outcome) -> dict[str, Any]:
    """Rows by cause over days, incident by incident; failures as crosses, checkpoints as ticks. Long runs: their first part."""
    failures = _failures(sample)
    end = sample.wall_s / DAY_S
    if len(failures) > SHOWN_FAILURES:
        end = failures[SHOWN_FAILURES].start_s / DAY_S
    traces = [_row(cause, color, sample, end) for cause, color in COLORS.items()]
    shown = [mark for mark in failures if mark.start_s / DAY_S <= end]
    traces.append({
        "type": "scatter", "mode": "markers", "name": "failure", "x": [mark.start_s / DAY_S for mark in shown],
        "y": ["failure"] * len(shown), "text": [mark.label for mark in shown], "hovertemplate": "%{text}, day %{x:.2f}",
        "marker": {"symbol": "x", "color": VERMILION, "size": 7},
    })  # fmt: skip
    times = checkpoint_times(answer, sample, end * DAY_S) / DAY_S
    traces.append({
        "type": "scatter", "mode": "markers", "name": "checkpoint", "x": times.tolist(), "y": ["checkpoint"] * len(times),
        "marker": {"symbol": "line-ns-open", "color": BLUE, "size": 9}, "hovertemplate": "day %{x:.3f}",
    })  # fmt: skip
    drawn = [trace for trace in traces if trace["x"]]
    layout = {
        "barmode": "overlay", "showlegend": False, "hovermode": "closest", "dragmode": "pan",
        "xaxis": _axis("day of the run", range=[0.0, end]), "yaxis": dict(_ROWS),
    }  # fmt: skip
    return {**figure("timeline", drawn, layout, 110 + 34 * len({trace["y"][0] for trace in drawn})), "zoom": True}


def _row(cause: str, color: str, sample: Outcome, end: float) -> dict[str, Any]:
    """All incidents of one cause until day `end`."""
    marks = [mark for mark in sample.marks if mark.kind == cause and mark.start_s / DAY_S <= end]
    # Bars shorter than a pixel would vanish: a thin line of the same colour keeps them visible.
    return {
        "type": "bar", "orientation": "h", "name": _words(cause), "base": [mark.start_s / DAY_S for mark in marks],
        "x": [(mark.end_s - mark.start_s) / DAY_S for mark in marks], "y": [_words(cause)] * len(marks),
        "marker": {"color": color, "line": {"color": color, "width": 1}}, "hovertemplate": "%{text}",
        "text": [f"{mark.label} {mark.end_s - mark.start_s:,.0f} s" for mark in marks], "textposition": "none",
    }  # fmt: skip


def checkpoint_times(answer: Answer, sample: Outcome, until_s: float = np.inf) -> np.ndarray:
    """When checkpoints begin, seconds, thinned to what can be drawn; float array [at most SHOWN_CHECKPOINTS]."""
    run = answer.resolved.run
    if run is None or not sample.spans:
        return np.zeros(0)
    interval, stall = run.stages[0].interval_s, run.stages[0].stall_s
    spans = [(start, min(end, until_s)) for start, end in sample.spans if start < until_s and np.isfinite(interval)]
    found = [np.arange(start + interval, end, interval + stall) for start, end in spans]
    times = np.concatenate(found) if found else np.zeros(0)
    return times[:: max(1, -(-len(times) // SHOWN_CHECKPOINTS))]


def progress(answer: Answer, sample: Outcome) -> dict[str, Any]:
    """Tokens trained over days, beside what full speed would come to."""
    days = [t / DAY_S for t, _ in sample.progress]
    traces: list[dict[str, Any]] = [{
        "type": "scatter", "mode": "lines", "name": "this run", "x": days, "y": [count / 1e12 for _, count in sample.progress],
        "line": {"color": BLUE}, "hovertemplate": "%{y:.3f}",
    }]  # fmt: skip
    run = answer.resolved.run
    if run is not None and len(run.stages) == 1:
        pieces = run.stages[0].pieces
        ideal = np.cumsum([0.0, *(piece.ideal_s for piece in pieces)]) / DAY_S
        tokens = np.cumsum([0.0, *(piece.tokens for piece in pieces)]) / 1e12
        traces.append({
            "type": "scatter", "mode": "lines", "name": "at full speed, without any loss", "x": ideal.tolist(),
            "y": tokens.tolist(), "line": {"color": VERMILION, "dash": "dash"}, "hovertemplate": "%{y:.3f}",
        })  # fmt: skip
    layout = {
        "xaxis": _axis("day of the run", rangemode="tozero"), "yaxis": _axis("10^12 tokens", rangemode="tozero"), "legend": _ABOVE,
        "hovermode": "x unified",
    }  # fmt: skip
    return figure("progress", traces, layout, 380)


def chance(name: str, values: tuple[float, ...], title: str, limit: float | None = None) -> dict[str, Any] | None:
    """The share of the repetitions that come to at most x, with `limit` as a line; None with fewer than two."""
    if len(values) < 2:
        return None
    share = (np.arange(len(values)) + 1.0) / len(values)
    trace = {
        "type": "scatter", "mode": "lines", "x": list(values), "y": (100.0 * share).tolist(),
        "line": {"color": BLUE, "shape": "hv"}, "hovertemplate": "%{x:,.4g}: %{y:.0f} %<extra></extra>",
    }  # fmt: skip
    low, high = min(values[0], limit or values[0]), max(values[-1], limit or values[-1])
    layout: dict[str, Any] = {
        "showlegend": False, "xaxis": _axis(title, range=[low - 0.04 * (high - low), high + 0.04 * (high - low)]),
        "yaxis": _axis("% of the repetitions", range=[0, 104]),
    }  # fmt: skip
    if limit is not None:
        layout["shapes"] = [_upright(limit, {"color": VERMILION, "dash": "dash", "width": 1.5})]
        right = limit > (low + high) / 2
        layout["annotations"] = [{"x": limit, "yref": "paper", "y": 0.04, "text": "deadline", "showarrow": False,
                                  "xanchor": "right" if right else "left", "font": {"color": VERMILION}}]  # fmt: skip
    return figure(name, [trace], layout, 380)


def ledger(answer: Answer) -> dict[str, Any]:
    """Hours lost by cause."""
    causes = [cause for cause, quantiles in answer.lost_time_s.items() if quantiles.p90 > 0]
    found = [answer.lost_time_s[cause] for cause in causes]
    trace = {
        "type": "bar", "orientation": "h", "x": [q.p50 / 3600 for q in found], "y": [_words(cause) for cause in causes],
        "marker": {"color": [COLORS[cause] for cause in causes]}, "hovertemplate": "%{y}: %{x:.2f} h<extra></extra>",
        "error_x": {
            "type": "data", "symmetric": False, "array": [(q.p90 - q.p50) / 3600 for q in found],
            "arrayminus": [(q.p50 - q.p10) / 3600 for q in found], "color": GREY,
        },
    }  # fmt: skip
    layout = {"showlegend": False, "xaxis": _axis("hours", rangemode="tozero"), "yaxis": {"autorange": "reversed", **_ROWS}}
    return figure("losses", [trace], layout, max(380, 90 + 30 * len(causes)))


def curves(study: Study, name: str) -> dict[str, Any] | None:
    """Days with their spread, and cost, over the points of a study that run; None where none does.

    Points with long names stand below each other, others side by side.
    """
    ran = [(point, point.answer.days) for point in study.points if point.answer.days is not None]
    if not ran:
        return None
    long = sum(len(point.label) for point, _ in ran) > LONG_LABELS
    labels = [point.label for point, _ in ran]
    error = {
        "type": "data", "symmetric": False, "array": [days.p90 - days.p50 for _, days in ran],
        "arrayminus": [days.p50 - days.p10 for _, days in ran],
    }  # fmt: skip
    traces = [_series("days (p50; p10 to p90)", labels, [days.p50 for _, days in ran], BLUE, long=long)]
    traces[0]["error_x" if long else "error_y"] = error
    priced = [(point.label, point.answer.cost_usd.p50 / 1e6) for point, _ in ran if point.answer.cost_usd is not None]
    if priced:
        cost = _series("cost, million US$", [x for x, _ in priced], [usd for _, usd in priced], VERMILION, long=long)
        cost |= {"xaxis" if long else "yaxis": "x2" if long else "y2", "marker": {"symbol": "diamond"}}
        traces.append(cost)
    if long:
        layout = {
            "legend": {"orientation": "h", "y": -70 / (30 * len(ran) + 60), "yanchor": "top", "x": 0}, "hovermode": "y unified",
            "yaxis": {"type": "category", "autorange": "reversed", **_ROWS}, "xaxis": _axis("days"),
            "xaxis2": _axis("million US$", overlaying="x", side="top", showgrid=False, tickmode="auto"),
            "margin": {"l": 64, "r": 40, "t": 60, "b": 48},
        }  # fmt: skip
        return figure(name, traces, layout, 200 + 30 * len(ran))
    layout = {
        "legend": _ABOVE, "hovermode": "x unified", "xaxis": {"type": "category", "automargin": True},
        "yaxis": _axis("days", rangemode="tozero"), "margin": {"l": 64, "r": 64, "t": 14, "b": 48},
        "yaxis2": _axis("million US$", overlaying="y", side="right", **_SECOND),
    }  # fmt: skip
    return figure(name, traces, layout, 420)


def _series(name: str, labels: list[str], values: list[float], color: str, *, long: bool) -> dict[str, Any]:
    """Values by label: along y where labels are long (single marks: the labels have no order), else a line along x."""
    places = {"x": values, "y": labels, "mode": "markers"} if long else {"x": labels, "y": values, "mode": "lines+markers"}
    value = "%{x:,.2f}" if long else "%{y:,.2f}"
    dash = "solid" if color == BLUE else "dash"
    return {"type": "scatter", "name": name, "line": {"color": color, "dash": dash}, "hovertemplate": value, **places}


def tornado(result: Tornado) -> dict[str, Any] | None:
    """Days at both ends of every assumption, widest on top; None where nothing can be pushed."""
    base = result.base_days
    if base is None:
        return None
    shown = [swing for swing in result.swings if None not in swing.days and swing.span_days > 1e-4 * base][:15]
    if not shown:
        return None
    ends = [_end(shown, base, end) for end in (0, 1)]
    layout = {
        "barmode": "overlay", "legend": _ABOVE, "yaxis": {"autorange": "reversed", **_ROWS},
        "xaxis": _axis("days"),
        "shapes": [_upright(base, {"color": "#444", "width": 1})],
    }  # fmt: skip
    return figure("tornado", ends, layout, 130 + 30 * len(shown))


def _end(shown: list[Swing], base: float, end: int) -> dict[str, Any]:
    """The bars of the low (0) or high (1) ends."""
    factors = [(swing.low_factor, swing.high_factor)[end] for swing in shown]
    days = [base if swing.days[end] is None else swing.days[end] or base for swing in shown]
    return {
        "type": "bar", "orientation": "h", "name": ("low end", "high end")[end], "base": base, "y": [swing.name for swing in shown],
        "x": [value - base for value in days], "marker": {"color": (BLUE, VERMILION)[end]},
        "text": [f"x{factor:g}: {value:.4g}" for factor, value in zip(factors, days, strict=True)], "textposition": "none",
        "hovertemplate": "%{y} %{text} days<extra></extra>",
    }  # fmt: skip
