"""The page of `simpar validate runs`: a summary, scatter, histogram and groups per metric, rankings, the worst rows with their
waterfalls, and every run that has no prediction with the reason."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import plotly.graph_objects as go
from plotly.io import to_html

from simpar.evidence.report_runs import ERROR_HEAD, METRIC_TITLES, RANKING_HEAD, error_cells, ranking_lines
from simpar.evidence.report_tables import percent
from simpar.evidence.runs import Report
from simpar.output import plotly_script, write_file
from simpar.ranking import SWEEP_KEYS
from simpar.statistics import ABSOLUTE_METRICS, LABEL_METRICS, Comparison

WORST: Final = 12
"""Rows shown with their waterfall."""
WORST_OF_SOURCE: Final = 3
"""Of them, at most so many of one source."""
COLORS: Final = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#17becf", "#bcbd22")
REST: Final = "#9a9a9a"
"""Of sources that have fewer rows than those with a colour of their own."""
EDGE: Final = 50.0
"""Errors beyond, in per cent, are counted in the last bar of the histogram."""
BARS: Final = 100
NAME: Final = 44
"""Characters of a source's name in a legend."""
UNITS: Final[dict[str, tuple[str, float]]] = {
    "step_time_s": ("step time (s)", 1.0), "peak_memory_bytes": ("peak memory (GiB)", 2.0**-30),
    "bubble_fraction": ("bubble (% of the step)", 100.0),
}  # fmt: skip
_STYLE: Final = (
    "body{font:15px system-ui,sans-serif;max-width:1180px;margin:1.5em auto;padding:0 1em;color:#222}"
    "table{border-collapse:collapse;margin:.5em 0}td,th{padding:.2em .7em;border-bottom:1px solid #ddd;text-align:right;"
    "vertical-align:top}td.t,th.t{text-align:left;overflow-wrap:anywhere}summary{cursor:pointer;margin:.4em 0;font-weight:600}"
    "nav a{margin-right:1em}h2{margin-top:1.6em}h3{margin-bottom:.2em}p{margin:.3em 0}"
)
_CONFIG: Final = {"displaylogo": False, "responsive": True, "displayModeBar": "hover"}


def write_html(report: Report, path: Path, data: Path) -> None:
    """The page at `path`.

    Raises:
        InputError: it cannot be written.
    """
    sections = [("summary", "Summary", _summary(report, data))]
    for metric in dict.fromkeys(row.metric for row in report.rows):
        rows = [row for row in report.rows if row.metric == metric and row.predicted is not None]
        if rows and metric not in LABEL_METRICS:
            sections.append((metric, METRIC_TITLES.get(metric, metric), _metric(report, metric, rows)))
    sections += [
        ("fits", "Does it fit?", _fits(report)), ("ranking", "Ranking", _rankings(report)),
        ("worst", "Worst rows", _worst(report)),
        ("not-expressed", "Runs that cannot be expressed", _named(report.not_expressed)),
        ("excluded", "Rows that the data excludes", _named(report.excluded)),
    ]  # fmt: skip
    write_file(path, _page("Measured training runs against predictions", sections).encode(), "--html")


def _page(title: str, sections: Sequence[tuple[str, str, str]]) -> str:
    links = "".join(f'<a href="#{name}">{html.escape(head)}</a>' for name, head, _ in sections)
    body = "".join(f'<h2 id="{name}">{html.escape(head)}</h2>{text}' for name, head, text in sections)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{_STYLE}</style>{plotly_script()}</head>"
        f"<body><h1>{html.escape(title)}</h1><nav>{links}</nav>{body}</body></html>"
    )


def _figure(figure: go.Figure) -> str:
    return str(to_html(figure, full_html=False, include_plotlyjs=False, config=_CONFIG))


def _table(head: Sequence[str], lines: Sequence[Sequence[str]], texts: int = 1) -> str:
    """An HTML table; the first `texts` columns are words."""

    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(
            f"<{tag}{' class=t' if i < texts else ''}>{html.escape(cell)}</{tag}>" for i, cell in enumerate(cells)
        ) + "</tr>"  # fmt: skip

    return f"<table>{row(head, 'th')}{''.join(row(line, 'td') for line in lines)}</table>"


def _summary(report: Report, data: Path) -> str:
    without = sum(map(len, report.not_expressed.values()))
    excluded = sum(map(len, report.excluded.values()))
    text = (
        f"<p>{html.escape(str(data))}: {report.runs} runs, {without} of which cannot be expressed; {excluded} more are excluded by "
        f"the data. Errors are predicted / measured - 1; bubbles: difference in points. {report.seconds:.0f} s.</p>"
    )
    lines = [[METRIC_TITLES.get(g.metric, g.metric), *error_cells(g.summary)]
             for g in report.groups if not g.by and g.metric not in LABEL_METRICS]  # fmt: skip
    return text + _table(["", *ERROR_HEAD], lines)


def _metric(report: Report, metric: str, rows: Sequence[Comparison]) -> str:
    parts = [_figure(_scatter(metric, rows)), _figure(_histogram(metric, rows))]
    groups = [group for group in report.groups if group.metric == metric and group.by]
    for key in dict.fromkeys(next(iter(group.by)) for group in groups):
        lines = [[str(group.by[key]), *error_cells(group.summary)] for group in groups if key in group.by]
        shown = " open" if key == "source" else ""
        title = f"by {key.replace('_', ' ')} ({len(lines)})"
        parts.append(f"<details{shown}><summary>{title}</summary>{_table([key.replace('_', ' '), *ERROR_HEAD], lines)}</details>")
    return "".join(parts)


def _source(row: Comparison) -> str:
    return str(row.group.get("source") or "source not stated")


def _short(text: str, length: int = NAME) -> str:
    return text if len(text) <= length else text[: length - 1].rstrip() + "…"


def _scatter(metric: str, rows: Sequence[Comparison]) -> go.Figure:
    figure = go.Figure()
    title, scale = UNITS.get(metric, (metric, 1.0))
    counts = Counter(map(_source, rows))
    first = [name for name, _ in counts.most_common(len(COLORS))] if len(counts) > len(COLORS) + 1 else list(counts)
    colors = dict(zip(first, (*COLORS, REST), strict=False))
    rest = [row for row in rows if _source(row) not in colors]
    named = [(name, [row for row in rows if _source(row) == name]) for name in first]
    for name, part in [(f"{len(counts) - len(first)} other sources", rest)] * bool(rest) + named:
        figure.add_scatter(
            x=[scale * float(row.measured) for row in part], y=[scale * float(row.predicted or 0) for row in part], mode="markers",
            name=f"{_short(name)} ({len(part)})", text=[_hover(row) for row in part], hovertemplate="%{text}<extra></extra>",
            marker={"size": 5, "opacity": 0.7, "color": colors.get(name, REST)},
        )  # fmt: skip
    values = [scale * float(value or 0) for row in rows for value in (row.measured, row.predicted)]
    ends = [min(values), max(values)]
    figure.add_scatter(x=ends, y=ends, mode="lines", name="equal", line={"color": "black", "width": 1}, hoverinfo="skip")
    axis = {"type": "linear"} if metric in ABSOLUTE_METRICS else {"type": "log", "dtick": 1 if ends[1] > 30 * ends[0] else "D2"}
    figure.update_layout(
        xaxis={"title": f"measured {title}", **axis}, yaxis={"title": f"predicted {title}", **axis}, height=560,
        template="plotly_white", margin={"t": 30, "r": 10}, legend={"font": {"size": 11}, "itemsizing": "constant"},
    )  # fmt: skip
    return figure


def _shape(row: Comparison) -> str:
    keys = ("n_gpus", "tp", "pp", "cp", "ep", "dp", "micro_batch", "seq_len")
    degrees = [f"{key.replace('_', ' ')} {row.group[key]}" for key in keys if key in row.group]
    return ", ".join([str(row.group.get("model_name") or "model not named"), str(row.group.get("gpu") or ""), *degrees])


def _error_text(row: Comparison) -> str:
    if row.error is None:
        return "-"
    return f"{100 * row.error:+.1f} points" if row.metric in ABSOLUTE_METRICS else f"{row.error:+.1%}"


def _hover(row: Comparison) -> str:
    return f"<b>{html.escape(row.id)}</b> {_error_text(row)}<br>{html.escape(_shape(row))}<br>{html.escape(_source(row))}"


def _histogram(metric: str, rows: Sequence[Comparison]) -> go.Figure:
    """Errors up to EDGE; those beyond stand in the outermost bars."""
    edge = EDGE / 5 if metric in ABSOLUTE_METRICS else EDGE
    width = 2 * edge / BARS
    inside = 0.999999 * edge
    errors = [min(max(100 * row.error, -inside), inside) for row in rows if row.error is not None]
    figure = go.Figure(go.Histogram(x=errors, xbins={"start": -edge, "end": edge, "size": width}))
    unit = "points" if metric in ABSOLUTE_METRICS else "%"
    ticks = [-edge, -edge / 2, 0.0, edge / 2, edge]
    words = [f"≤ {-edge:g}", f"{-edge / 2:g}", "0", f"{edge / 2:g}", f"≥ {edge:g}"]
    figure.update_layout(
        xaxis={"title": f"error ({unit})", "range": [-edge - width, edge + width], "tickvals": ticks, "ticktext": words},
        yaxis_title="rows", height=280, template="plotly_white", margin={"t": 20}, bargap=0.05,
    )  # fmt: skip
    return figure


def _fits(report: Report) -> str:
    fits = report.fits
    if not fits.rows:
        return "<p>No run is labelled.</p>"
    lines = [
        ["ran", str(fits.fits_called_fits), str(fits.fits_called_oom)],
        ["ran out of memory", str(fits.oom_called_fits), str(fits.oom_called_oom)],
    ]
    wrong = [row for row in report.rows if row.metric == "oom" and row.error]
    names = [[row.id, "ran out of memory" if row.measured else "ran", _shape(row), _source(row)] for row in wrong]
    told = _table(["run", "measured", "layout", "source"], names, texts=4)
    return (
        f"<p>{percent(fits.accuracy)} of {fits.rows} labelled runs told right.</p>"
        + _table(["measured", "called fitting", "called out of memory"], lines)
        + (f"<details><summary>told wrong ({len(wrong)})</summary>{told}</details>" if wrong else "")
    )


_SWEEP_COLUMNS: Final = tuple(name for name in SWEEP_KEYS if name != "workload")
"""What a reader can tell sweeps by; the workload is a digest."""


def _rankings(report: Report) -> str:
    summary = report.ranking
    if not summary.sweeps:
        return "<p>No three runs differ in their layout alone.</p>"
    lines = []
    for sweep in report.sweeps:
        tau = "-" if sweep.tau is None else f"{sweep.tau:.3f}"
        key = ["-" if sweep.key.get(name) is None else str(sweep.key[name]) for name in _SWEEP_COLUMNS]
        lines.append([*key, str(sweep.layouts), tau, percent(sweep.regret_1), percent(sweep.regret_5), f"{1 + sweep.spread:.1f}x"])
    head = [*(name.replace("_", " ") for name in _SWEEP_COLUMNS), "layouts", "tau", "regret", "of five", "worst / best"]
    tau = "-" if summary.mean_tau is None else f"{summary.mean_tau:.3f}"
    return (
        f"<p>{summary.sweeps} sweeps: mean Kendall tau {tau}, mean regret of the predicted best "
        f"{percent(summary.mean_regret_1)}, of the best among the predicted five {percent(summary.mean_regret_5)}.</p>"
        + _table(RANKING_HEAD, ranking_lines(report.sweeps))
        + f"<details><summary>every sweep ({summary.sweeps})</summary>{_table(head, lines, texts=2)}</details>"
    )


def _named(reasons: Mapping[str, Sequence[str]]) -> str:
    lines = [[reason, ", ".join(ids), str(len(ids))] for reason, ids in reasons.items()]
    return _table(["reason", "runs", "number"], lines, texts=2) if lines else "<p>None.</p>"


def worst_rows(report: Report) -> list[Comparison]:
    """The rows whose step time is furthest off, worst first, no more than WORST_OF_SOURCE of one source."""
    rows = [row for row in report.rows if row.metric == "step_time_s" and row.error is not None]
    found: list[Comparison] = []
    taken: Counter[str] = Counter()
    for row in sorted(rows, key=lambda row: -abs(row.error or 0.0)):
        if taken[_source(row)] < WORST_OF_SOURCE:
            taken[_source(row)] += 1
            found.append(row)
    return found[:WORST]


def _worst(report: Report) -> str:
    parts = [f"<p>The step times furthest off, at most {WORST_OF_SOURCE} of a source.</p>"]
    for row in worst_rows(report):
        parts.append(f"<h3>{html.escape(row.id)}: {_error_text(row)}</h3>")
        parts.append(f"<p>{html.escape(_shape(row))}<br>{html.escape(_source(row))}</p>")
        parts.append(f"<p>measured {row.measured:.4g} s, predicted {row.predicted:.4g} s</p>")
        if assumed := row.details.get("assumptions"):
            parts.append(f"<p>assumed: {html.escape('; '.join(assumed))}</p>")
        if waterfall := row.details.get("waterfall_s"):
            parts.append(_figure(_waterfall(waterfall, float(row.measured))))
    return "".join(parts)


def _waterfall(parts: Mapping[str, Any], measured: float) -> go.Figure:
    values = [float(seconds) for seconds in parts.values()]
    gap = measured - sum(values)
    amounts = [*values, sum(values), gap, measured]
    figure = go.Figure(
        go.Waterfall(
            orientation="h", y=[*parts, "predicted", "gap", "measured"], x=[*values, 0.0, gap, 0.0],
            measure=["relative"] * len(values) + ["total", "relative", "total"],
            text=[f"{amount:+.3g}" if name == "gap" else f"{amount:.3g}"
                  for name, amount in zip([*parts, "predicted", "gap", "measured"], amounts, strict=True)],
            textposition="outside", cliponaxis=False,
        )
    )  # fmt: skip
    figure.update_layout(
        xaxis_title="seconds", height=90 + 24 * (len(values) + 3), template="plotly_white", showlegend=False,
        yaxis={"autorange": "reversed", "automargin": True}, margin={"t": 10, "r": 60},
    )  # fmt: skip
    return figure
