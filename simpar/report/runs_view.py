"""The page of `simpar validate runs`: a summary, scatter, histogram and groups per metric, rankings, the worst rows with their
waterfalls, and every run that has no prediction with the reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, Final

from simpar.evidence.report_runs import ERROR_HEAD, METRIC_TITLES, RANKING_HEAD, error_cells, ranking_lines
from simpar.evidence.report_tables import percent
from simpar.evidence.runs import Report
from simpar.ranking import SWEEP_KEYS
from simpar.report.page import Cards
from simpar.report.palette import BLUE, GREEN, GREY, ORANGE
from simpar.report.step_figures import figure
from simpar.report.tables import Table
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


def runs_page(report: Report) -> str:
    """The page as HTML text."""
    cards = Cards("<h1>Measured training runs against predictions</h1>")
    cards.add("Summary", _summary(report))
    for metric in dict.fromkeys(row.metric for row in report.rows):
        rows = [row for row in report.rows if row.metric == metric and row.predicted is not None]
        if rows and metric not in LABEL_METRICS:
            title = METRIC_TITLES.get(metric, metric)
            cards.draw(title, _scatter(metric, rows))
            cards.draw(f"{title}: errors", _histogram(metric, rows), below=_groups(report, metric))
    cards.add("Does it fit?", _fits(report))
    cards.add("Ranking", _rankings(report))
    cards.add("Worst rows", f"<p>The step times furthest off, at most {WORST_OF_SOURCE} of a source.</p>")
    for number, row in enumerate(worst_rows(report)):
        waterfall = row.details.get("waterfall_s")
        title, about = f"{row.id}: {_error_text(row)}", _about(row)
        if waterfall:
            cards.draw(title, _waterfall(f"worst-{number}", waterfall, float(row.measured)), below=about)
        else:
            cards.add(title, about)
    cards.add("Runs that cannot be expressed", _named(report.not_expressed))
    cards.add("Rows that the data excludes", _named(report.excluded))
    return cards.html("simpar validate runs")


def _table(head: Sequence[str], lines: Sequence[Sequence[str]], texts: int = 1) -> str:
    """A table whose first `texts` columns are words."""
    return Table(tuple(head), [tuple(line) for line in lines], tuple(range(texts, len(head)))).html()


def _folded(title: str, body: str, shown: bool = False) -> str:
    return f"<details{' open' if shown else ''}><summary>{escape(title)}</summary>{body}</details>"


def _summary(report: Report) -> str:
    without = sum(map(len, report.not_expressed.values()))
    excluded = sum(map(len, report.excluded.values()))
    text = (
        f"<p>{escape(str(report.path))}: {report.runs} runs, {without} of which cannot be expressed; {excluded} more are "
        f"excluded by the data. Errors are predicted / measured - 1; bubbles: difference in points. {report.seconds:.0f} s.</p>"
    )
    lines = [[METRIC_TITLES.get(g.metric, g.metric), *error_cells(g.summary)]
             for g in report.groups if not g.by and g.metric not in LABEL_METRICS]  # fmt: skip
    return text + _table(["", *ERROR_HEAD], lines)


def _groups(report: Report, metric: str) -> str:
    groups = [group for group in report.groups if group.metric == metric and group.by]
    parts = []
    for key in dict.fromkeys(next(iter(group.by)) for group in groups):
        lines = [[str(group.by[key]), *error_cells(group.summary)] for group in groups if key in group.by]
        name = key.replace("_", " ")
        parts.append(_folded(f"by {name} ({len(lines)})", _table([name, *ERROR_HEAD], lines), shown=key == "source"))
    return "".join(parts)


def _source(row: Comparison) -> str:
    return str(row.group.get("source") or "source not stated")


def _short(text: str) -> str:
    return text if len(text) <= NAME else text[: NAME - 1].rstrip() + "…"


def _scatter(metric: str, rows: Sequence[Comparison]) -> dict[str, Any]:
    title, scale = UNITS.get(metric, (metric, 1.0))
    counts = Counter(map(_source, rows))
    first = [name for name, _ in counts.most_common(len(COLORS))] if len(counts) > len(COLORS) + 1 else list(counts)
    colors = dict(zip(first, (*COLORS, REST), strict=False))
    rest = [row for row in rows if _source(row) not in colors]
    named = [(name, [row for row in rows if _source(row) == name]) for name in first]
    data: list[dict[str, Any]] = [
        {
            "type": "scatter", "mode": "markers", "name": f"{_short(name)} ({len(part)})",
            "x": [scale * float(row.measured) for row in part], "y": [scale * float(row.predicted or 0) for row in part],
            "text": [_hover(row) for row in part], "hovertemplate": "%{text}<extra></extra>",
            "marker": {"size": 5, "opacity": 0.7, "color": colors.get(name, REST)},
        }
        for name, part in [(f"{len(counts) - len(first)} other sources", rest)] * bool(rest) + named
    ]  # fmt: skip
    values = [scale * float(value or 0) for row in rows for value in (row.measured, row.predicted)]
    ends = [min(values), max(values)]
    line = {"color": GREY, "width": 1}
    data.append({"type": "scatter", "mode": "lines", "name": "equal", "x": ends, "y": ends, "line": line, "hoverinfo": "skip"})
    axis = {"type": "linear"} if metric in ABSOLUTE_METRICS else {"type": "log", "dtick": 1 if ends[1] > 30 * ends[0] else "D2"}
    layout = {
        **{f"{name}axis": {"title": {"text": f"{word} {title}"}, **axis} for name, word in (("x", "measured"), ("y", "predicted"))},
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "font": {"size": 11}, "itemsizing": "constant"},
    }  # fmt: skip
    return {**figure(f"scatter-{metric}", data, layout, 560), "zoom": True}


def _shape(row: Comparison) -> str:
    keys = ("n_gpus", "tp", "pp", "cp", "ep", "dp", "micro_batch", "seq_len")
    degrees = [f"{key.replace('_', ' ')} {row.group[key]}" for key in keys if key in row.group]
    return ", ".join([str(row.group.get("model_name") or "model not named"), str(row.group.get("gpu") or ""), *degrees])


def _error_text(row: Comparison) -> str:
    if row.error is None:
        return "-"
    return f"{100 * row.error:+.1f} points" if row.metric in ABSOLUTE_METRICS else f"{row.error:+.1%}"


def _hover(row: Comparison) -> str:
    return f"<b>{escape(row.id)}</b> {_error_text(row)}<br>{escape(_shape(row))}<br>{escape(_source(row))}"


def _histogram(metric: str, rows: Sequence[Comparison]) -> dict[str, Any]:
    """Errors up to EDGE; those beyond stand in the outermost bars."""
    edge = EDGE / 5 if metric in ABSOLUTE_METRICS else EDGE
    width = 2 * edge / BARS
    inside = 0.999999 * edge
    errors = [min(max(100 * row.error, -inside), inside) for row in rows if row.error is not None]
    bins = {"start": -edge, "end": edge, "size": width}
    unit = "points" if metric in ABSOLUTE_METRICS else "%"
    ticks = [-edge, -edge / 2, 0.0, edge / 2, edge]
    words = [f"≤ {-edge:g}", f"{-edge / 2:g}", "0", f"{edge / 2:g}", f"≥ {edge:g}"]
    axis = {"title": {"text": f"error ({unit})"}, "range": [-edge - width, edge + width], "tickvals": ticks, "ticktext": words}
    layout = {"xaxis": axis, "yaxis": {"title": {"text": "rows"}}, "bargap": 0.05}
    return figure(f"errors-{metric}", [{"type": "histogram", "x": errors, "xbins": bins, "marker": {"color": BLUE}}], layout, 280)


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
        + (_folded(f"told wrong ({len(wrong)})", told) if wrong else "")
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
        + _folded(f"every sweep ({summary.sweeps})", _table(head, lines, texts=2))
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


def _about(row: Comparison) -> str:
    texts = [_shape(row), _source(row), f"measured {row.measured:.4g} s, predicted {row.predicted:.4g} s"]
    if assumed := row.details.get("assumptions"):
        texts.append(f"assumed: {'; '.join(assumed)}")
    return "".join(f"<p>{escape(text)}</p>" for text in texts)


def _waterfall(name: str, parts: Mapping[str, Any], measured: float) -> dict[str, Any]:
    """What the predicted step consists of, and what is missing to the measured one."""
    values = [float(seconds) for seconds in parts.values()]
    gap = measured - sum(values)
    steps = [*parts, "predicted", "gap", "measured"]
    amounts = [*values, sum(values), gap, measured]
    trace = {
        "type": "waterfall", "orientation": "h", "y": steps, "x": [*values, 0.0, gap, 0.0],
        "measure": ["relative"] * len(values) + ["total", "relative", "total"],
        "text": [f"{amount:+.3g}" if step == "gap" else f"{amount:.3g}" for step, amount in zip(steps, amounts, strict=True)],
        "textposition": "outside", "cliponaxis": False, "totals": {"marker": {"color": GREY}},
        "increasing": {"marker": {"color": ORANGE}}, "decreasing": {"marker": {"color": GREEN}},
    }  # fmt: skip
    layout = {
        "xaxis": {"title": {"text": "seconds"}}, "yaxis": {"autorange": "reversed"}, "showlegend": False,
        "margin": {"l": 64, "r": 60, "t": 10, "b": 48},
    }  # fmt: skip
    return figure(name, [trace], layout, 90 + 24 * len(steps))
