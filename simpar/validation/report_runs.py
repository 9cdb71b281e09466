"""The report of `simpar validate runs`: tables for a terminal, JSON, and an HTML page with plots."""

from __future__ import annotations

import html
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import plotly.graph_objects as go
from plotly.io import to_html
from rich.console import Console
from rich.table import Table

from simpar.validation.predicted import Predictor, predict
from simpar.validation.run_rows import read_runs
from simpar.validation.runs import Group, Report
from simpar.validation.statistics import ABSOLUTE_METRICS, LABEL_METRICS, Comparison

METRIC_TITLES: Final = {
    "step_time_s": "Step time", "peak_memory_bytes": "Peak memory", "bubble_fraction": "Bubble fraction",
    "oom": "Out of memory",
}  # fmt: skip
WORST: Final = 12
"""Rows shown with their waterfall."""


def print_report(report: Report, as_json: bool) -> None:
    """The report on standard output, as JSON or as tables."""
    if as_json:
        sys.stdout.write(json.dumps(_finite(report.as_json())) + "\n")
        return
    console = Console()
    for metric in dict.fromkeys(group.metric for group in report.groups):
        if metric not in LABEL_METRICS:
            console.print(_table(metric, [group for group in report.groups if group.metric == metric]))
    fits = report.fits
    if fits.rows:
        console.print(
            f"Out of memory: {fits.accuracy:.1%} of {fits.rows} labelled runs told right "
            f"(ran, called fitting {fits.fits_called_fits}; ran, called OOM {fits.fits_called_oom}; "
            f"OOM, called OOM {fits.oom_called_oom}; OOM, called fitting {fits.oom_called_fits})"
        )
    ranking = report.ranking
    if ranking.sweeps and ranking.mean_tau is not None and ranking.mean_regret_1 is not None:
        console.print(
            f"Ranking over {ranking.sweeps} sweeps: Kendall tau {ranking.mean_tau:.3f}, regret of the predicted best "
            f"{ranking.mean_regret_1:.2%}, of the best of five {ranking.mean_regret_5:.2%}"
        )
    for reason, count in report.skipped.items():
        console.print(f"not expressed: {count} x {reason}", markup=False)
    for reason, count in report.excluded.items():
        console.print(f"excluded by the data: {count} x {reason}", markup=False)
    console.print(f"{len(report.rows)} values in {report.seconds:.1f} s")


def _finite(value: Any) -> Any:
    """`value` with every number that JSON cannot hold as None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def percent(value: float | None) -> str:
    """A share for people; "-" where there is none."""
    return "-" if value is None else f"{value:.1%}"


def _table(metric: str, groups: Sequence[Group]) -> Table:
    unit = " (points)" if metric in ABSOLUTE_METRICS else ""
    table = Table(title=METRIC_TITLES.get(metric, metric) + unit)
    table.add_column("group", overflow="fold")
    for name in ("rows", "skipped", "mape", "median", "p90", "bias", "in interval"):
        table.add_column(name, justify="right")
    for group in groups:
        s = group.summary
        label = ", ".join(f"{key} {value}" for key, value in group.by.items()) or "all"
        table.add_row(label, str(s.rows), str(s.skipped), *map(percent, (s.mape, s.median, s.p90, s.bias, s.coverage)))
    return table


def write_html(report: Report, path: Path, data: Path, predictor: Predictor = predict) -> None:
    """The page at `path`: scatter, histogram and groups per metric, rankings, the worst rows with their waterfalls."""
    parts = []
    for metric in dict.fromkeys(row.metric for row in report.rows):
        rows = [row for row in report.rows if row.metric == metric and row.predicted is not None]
        if rows and metric not in LABEL_METRICS:
            parts.append(f"<h2>{METRIC_TITLES.get(metric, metric)}</h2>")
            figures = [_scatter(metric, rows), _histogram(metric, rows)]
            parts += [to_html(figure, full_html=False, include_plotlyjs=False) for figure in figures]
            parts.append(_html_groups([group for group in report.groups if group.metric == metric]))
    parts.append(_html_fits(report))
    parts.append(_html_rankings(report))
    parts.append(_html_worst(report, data, predictor))
    parts.append(_html_counts("Runs that cannot be expressed", report.skipped))
    parts.append(_html_counts("Rows that the data excludes", report.excluded))
    path.write_text(_page("Measured training runs against predictions", "\n".join(parts)), encoding="utf-8")


def _page(title: str, body: str) -> str:
    from plotly.offline import get_plotlyjs

    style = (
        "body{font:15px system-ui,sans-serif;max-width:1100px;margin:2em auto;padding:0 1em;color:#222}"
        "table{border-collapse:collapse}td,th{padding:.2em .7em;border-bottom:1px solid #ddd;text-align:right}"
        "td:first-child,th:first-child{text-align:left}"
    )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{style}</style><script>{get_plotlyjs()}</script></head>"
        f"<body><h1>{html.escape(title)}</h1>{body}</body></html>"
    )


def _scatter(metric: str, rows: Sequence[Comparison]) -> go.Figure:
    figure = go.Figure()
    for source in sorted({str(row.group.get("source", "")) for row in rows}):
        part = [row for row in rows if str(row.group.get("source", "")) == source]
        figure.add_scatter(
            x=[float(row.measured) for row in part], y=[float(row.predicted or 0) for row in part], mode="markers",
            name=source[:40], text=[_hover(row) for row in part], hovertemplate="%{text}<extra></extra>", marker={"size": 5},
        )  # fmt: skip
    ends = [min(float(row.measured) for row in rows), max(float(row.measured) for row in rows)]
    figure.add_scatter(x=ends, y=ends, mode="lines", name="equal", line={"color": "black", "width": 1})
    kind = "linear" if metric in ABSOLUTE_METRICS else "log"
    figure.update_layout(
        xaxis={"title": f"measured {metric}", "type": kind}, yaxis={"title": f"predicted {metric}", "type": kind},
        height=620, template="plotly_white",
    )  # fmt: skip
    return figure


def _hover(row: Comparison) -> str:
    error = row.error
    keys = ("model_name", "gpu", "n_gpus", "tp", "pp", "cp", "ep", "dp", "micro_batch")
    shape = ", ".join(f"{key} {row.group[key]}" for key in keys if key in row.group)
    return html.escape(f"{row.id}: {shape}: {error:+.1%}" if error is not None else row.id)


def _histogram(metric: str, rows: Sequence[Comparison]) -> go.Figure:
    errors = [100 * row.error for row in rows if row.error is not None]
    figure = go.Figure(go.Histogram(x=errors, nbinsx=80))
    unit = "points" if metric in ABSOLUTE_METRICS else "%"
    figure.update_layout(xaxis_title=f"error ({unit})", yaxis_title="rows", height=320, template="plotly_white")
    return figure


def _html_table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    cells = "".join(f"<th>{html.escape(text)}</th>" for text in head)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(text)}</td>" for text in line) + "</tr>" for line in lines)
    return f"<table><tr>{cells}</tr>{body}</table>"


def _html_groups(groups: Sequence[Group]) -> str:
    lines = []
    for group in groups:
        s = group.summary
        label = ", ".join(f"{key} {value}" for key, value in group.by.items()) or "all"
        lines.append([label, str(s.rows), *map(percent, (s.mape, s.median, s.p90, s.bias, s.coverage))])
    return _html_table(["group", "rows", "mape", "median", "p90", "bias", "in interval"], lines)


def _html_fits(report: Report) -> str:
    fits = report.fits
    lines = [
        ["ran", str(fits.fits_called_fits), str(fits.fits_called_oom)],
        ["ran out of memory", str(fits.oom_called_fits), str(fits.oom_called_oom)],
    ]
    table = _html_table(["measured", "called fitting", "called out of memory"], lines)
    return f"<h2>Does it fit?</h2><p>{percent(fits.accuracy)} of {fits.rows} labelled runs told right.</p>{table}"


def _html_rankings(report: Report) -> str:
    lines = [
        [
            ", ".join(str(value) for value in sweep.key.values()), str(sweep.layouts),
            "-" if sweep.tau is None else f"{sweep.tau:.3f}",
            percent(sweep.regret_1), percent(sweep.regret_5), percent(sweep.spread),
        ]
        for sweep in report.sweeps
    ]  # fmt: skip
    return "<h2>Ranking</h2>" + _html_table(["sweep", "layouts", "tau", "regret", "regret of five", "spread"], lines)


def _html_counts(title: str, counts: dict[str, int]) -> str:
    return f"<h2>{title}</h2>" + _html_table(["reason", "rows"], [[reason, str(n)] for reason, n in counts.items()])


def _html_worst(report: Report, data: Path, predictor: Predictor) -> str:
    """The rows whose step time is furthest off, each with the parts of its prediction."""
    rows = [row for row in report.rows if row.metric == "step_time_s" and row.error is not None]
    worst = {row.id: row for row in sorted(rows, key=lambda row: -abs(row.error or 0.0))[:WORST]}
    parts = ["<h2>Worst rows</h2>"]
    for run in read_runs(data):
        if run.id not in worst or run.scenario is None:
            continue
        row = worst[run.id]
        parts.append(f"<h3>{_hover(row)}</h3><p>measured {row.measured:.4g} s, predicted {row.predicted:.4g} s</p>")
        if run.assumptions:
            parts.append(f"<p>assumed: {html.escape('; '.join(run.assumptions))}</p>")
        waterfall = predictor(run.scenario).waterfall
        if waterfall:
            parts.append(to_html(_waterfall(waterfall, float(row.measured)), full_html=False, include_plotlyjs=False))
    return "\n".join(parts)


def _waterfall(parts: Any, measured: float) -> go.Figure:
    names, values = list(parts), [float(parts[name]) for name in parts]
    figure = go.Figure(
        go.Waterfall(
            x=[*names, "predicted", "gap", "measured"], y=[*values, 0.0, measured - sum(values), 0.0],
            measure=["relative"] * len(values) + ["total", "relative", "total"],
        )
    )  # fmt: skip
    figure.update_layout(yaxis_title="seconds", height=340, template="plotly_white", showlegend=False)
    return figure
