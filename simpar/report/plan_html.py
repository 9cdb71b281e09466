"""`simpar plan --html`: one self-contained page with timeline, losses, cost and time curves, tornado, assumptions."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path

import numpy as np
import plotly.graph_objects as go

from simpar.errors import InputError
from simpar.planning.answer import Answer
from simpar.planning.outcome import Outcome
from simpar.planning.questions import PlanReport
from simpar.planning.study import Study
from simpar.report.palette import BLUE
from simpar.report.palette import VERMILION as ORANGE
from simpar.report.plan_view import HEADLINES

DAY_S = 86400.0
SHOWN_CHECKPOINTS = 400
SHOWN_FAILURES = 60
COLORS = {
    "checkpoint_stall": "#56b4e9", "lost_work": "#d55e00", "detection": "#e69f00", "replacement": "#f0e442",
    "waiting_for_spare": "#cc79a7", "restart": "#0072b2", "initialisation": "#009e73", "checkpoint_load": "#5f9ea0",
    "slow_node": "#999999", "maintenance": "#000000",
}  # fmt: skip
"""Cause -> colour (Okabe and Ito: told apart by colour-blind readers)."""
STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 1280px; padding: 0 1.5rem; color: #1b1b1b; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
table { border-collapse: collapse; margin: .6rem 0; }
td, th { padding: .2rem .9rem .2rem 0; text-align: left; vertical-align: top; }
td.n { text-align: right; font-variant-numeric: tabular-nums; } tr.assumed td { color: #8a4b00; }
.binding { color: #a40000; } .note { color: #555; }
"""


def write_html(report: PlanReport, path: Path) -> None:
    """Write the page.

    Raises:
        InputError: the file cannot be written.
    """
    try:
        path.write_text(page(report), encoding="utf-8")
    except OSError as error:
        raise InputError(f"--html {path}: cannot be written: {error}") from None


def page(report: PlanReport) -> str:
    """The whole page; the plotting code is inside, so that it opens without a network."""
    answer, parts = report.answer, []
    parts.append(f"<h1>{escape(answer.name)}</h1><p>{escape(report.plan.description)}</p>")
    if not answer.feasible:
        parts.append("<p class=binding><b>Not feasible.</b></p>")
    parts += [f"<p class=binding>Binds: {escape(reason)}</p>" for reason in answer.binding]
    parts.append(_numbers(answer))
    for index, (title, note, figure) in enumerate(_figures(report)):
        plot = figure.to_html(full_html=False, include_plotlyjs="inline" if index == 0 else False)
        parts.append(f"<h2>{escape(title)}</h2><p class=note>{escape(note)}</p>{plot}")
    parts += [_published(report), _assumptions(answer)]
    head = f"<meta charset=utf-8><title>{escape(answer.name)}</title><style>{STYLE}</style>"
    return f"<!doctype html><html lang=en><head>{head}</head><body>{''.join(parts)}</body></html>"


def _figures(report: PlanReport) -> Iterator[tuple[str, str, go.Figure]]:
    answer = report.answer
    if answer.sample is not None:
        yield (
            "Timeline of one run",
            f"The repetition of median length. {len(answer.sample.spans)} stretches of training, "
            f"{answer.sample.checkpoints:,} checkpoints (every few of them drawn).",
            timeline(answer, answer.sample),
        )
        yield "Progress and cost over time", "The same run.", progress(answer, answer.sample)
    if answer.lost_time_s:
        yield "Lost time by cause", "Median of all repetitions; whiskers p10 to p90.", ledger(answer)
    for study in report.studies:
        if any(point.answer.days for point in study.points):
            yield f"{study.kind}: {study.question}", study.conclusion, curves(study)
    if report.tornado is not None and report.tornado.base_days is not None:
        note = "Medians with one assumption at its low or high end."
        yield "Which assumption moves the answer most", note, tornado(report)


def _layout(figure: go.Figure, height: int, **axes: str) -> go.Figure:
    figure.update_layout(
        template="plotly_white", height=height, margin={"l": 150, "r": 70, "t": 30, "b": 50},
        legend={"orientation": "h", "y": -0.2}, font={"size": 13},
    )  # fmt: skip
    figure.update_xaxes(title=axes.get("x", ""))
    figure.update_yaxes(title=axes.get("y", ""), automargin=True)
    return figure


def timeline(answer: Answer, sample: Outcome) -> go.Figure:
    """Rows by cause over days; failures as crosses, checkpoints as ticks."""
    figure = go.Figure()
    for cause, color in COLORS.items():
        marks = [mark for mark in sample.marks if mark.kind == cause]
        if marks:
            # Bars shorter than a pixel would vanish: a thin line of the same colour keeps them visible.
            figure.add_bar(
                base=[mark.start_s / DAY_S for mark in marks],
                x=[(mark.end_s - mark.start_s) / DAY_S for mark in marks],
                y=[cause.replace("_", " ")] * len(marks), orientation="h", name=cause.replace("_", " "),
                marker={"color": color, "line": {"color": color, "width": 1}}, showlegend=False,
                hovertext=[f"{m.label} {m.end_s - m.start_s:,.0f} s" for m in marks],
            )  # fmt: skip
    failures = [mark for mark in sample.marks if mark.kind == "detection" and mark.label]
    figure.add_scatter(
        x=[mark.start_s / DAY_S for mark in failures], y=["failure"] * len(failures), mode="markers", name="failure",
        marker={"symbol": "x", "color": ORANGE, "size": 7}, text=[mark.label for mark in failures], showlegend=False,
    )  # fmt: skip
    times = checkpoint_times(answer, sample)
    figure.add_scatter(
        x=times / DAY_S, y=["checkpoint"] * len(times), mode="markers", name="checkpoint", showlegend=False,
        marker={"symbol": "line-ns-open", "color": BLUE, "size": 9},
    )  # fmt: skip
    figure.update_layout(barmode="overlay")
    _layout(figure, 480, x="days")
    if len(failures) > SHOWN_FAILURES:  # start where single failures can be told apart; the slider shows the whole run
        figure.update_xaxes(range=[0.0, failures[SHOWN_FAILURES].start_s / DAY_S], rangeslider={"visible": True})
    return figure


def checkpoint_times(answer: Answer, sample: Outcome) -> np.ndarray:
    """When checkpoints begin, seconds, thinned to what can be drawn; float array [at most SHOWN_CHECKPOINTS]."""
    run = answer.resolved.run
    if run is None or not sample.spans:
        return np.zeros(0)
    interval, stall = run.stages[0].interval_s, run.stages[0].stall_s
    found = [np.arange(start + interval, end, interval + stall) for start, end in sample.spans if np.isfinite(interval)]
    times = np.concatenate(found) if found else np.zeros(0)
    return times[:: max(1, len(times) // SHOWN_CHECKPOINTS)]


def progress(answer: Answer, sample: Outcome) -> go.Figure:
    """Tokens, and money where there are prices, over days."""
    figure = go.Figure()
    days = [t / DAY_S for t, _ in sample.progress]
    tokens = [count / 1e12 for _, count in sample.progress]
    figure.add_scatter(x=days, y=tokens, name="tokens, 10^12", line={"color": BLUE})
    if answer.cost_usd is not None and answer.days is not None:
        rate = answer.cost_usd.p50 / answer.days.p50
        figure.add_scatter(
            x=days, y=[day * rate / 1e6 for day in days], name="cost, million US$", yaxis="y2",
            line={"color": ORANGE, "dash": "dash"},
        )  # fmt: skip
        figure.update_layout(yaxis2={"title": "million US$", "overlaying": "y", "side": "right", "rangemode": "tozero"})
    return _layout(figure, 380, x="days", y="10^12 tokens") if answer.cost_usd is None else _with_second(figure)


def _with_second(figure: go.Figure) -> go.Figure:
    figure.update_layout(
        template="plotly_white", height=380, margin={"l": 90, "r": 90, "t": 30, "b": 50}, font={"size": 13},
        legend={"orientation": "h", "y": -0.2}, xaxis={"title": "days"},
        yaxis={"title": "10^12 tokens", "rangemode": "tozero"},
    )  # fmt: skip
    return figure


def ledger(answer: Answer) -> go.Figure:
    """Hours lost by cause."""
    causes = [cause for cause, quantiles in answer.lost_time_s.items() if quantiles.p90 > 0]
    found = [answer.lost_time_s[cause] for cause in causes]
    figure = go.Figure(
        go.Bar(
            x=[q.p50 / 3600 for q in found], y=[cause.replace("_", " ") for cause in causes], orientation="h",
            marker={"color": [COLORS[cause] for cause in causes]},
            error_x={
                "type": "data", "symmetric": False, "array": [(q.p90 - q.p50) / 3600 for q in found],
                "arrayminus": [(q.p50 - q.p10) / 3600 for q in found],
            },
        )
    )  # fmt: skip
    return _layout(figure, 90 + 38 * len(causes), x="hours")


def curves(study: Study) -> go.Figure:
    """Days with their spread, and cost, over the points of a study."""
    ran = [(point, point.answer.days) for point in study.points if point.answer.days is not None]
    labels = [point.label for point, _ in ran]
    figure = go.Figure()
    figure.add_scatter(
        x=labels, y=[days.p50 for _, days in ran], name="days (p50; p10 to p90)", mode="lines+markers",
        line={"color": BLUE},
        error_y={
            "type": "data", "symmetric": False, "array": [days.p90 - days.p50 for _, days in ran],
            "arrayminus": [days.p50 - days.p10 for _, days in ran],
        },
    )  # fmt: skip
    priced = [(point.label, point.answer.cost_usd.p50 / 1e6) for point, _ in ran if point.answer.cost_usd is not None]
    if priced:
        figure.add_scatter(
            x=[label for label, _ in priced], y=[cost for _, cost in priced], name="cost, million US$", yaxis="y2",
            mode="lines+markers", line={"color": ORANGE, "dash": "dash"},
        )  # fmt: skip
    figure.update_layout(
        template="plotly_white", height=400, margin={"l": 90, "r": 90, "t": 30, "b": 110}, font={"size": 13},
        legend={"orientation": "h", "y": 1.12}, yaxis={"title": "days", "rangemode": "tozero"},
        yaxis2={"title": "million US$", "overlaying": "y", "side": "right", "rangemode": "tozero"},
    )  # fmt: skip
    return figure


def tornado(report: PlanReport) -> go.Figure:
    """Days at both ends of every assumption, widest on top."""
    result = report.tornado
    base = result.base_days if result else None
    figure = go.Figure()
    if result is None or base is None:
        return figure
    shown = [swing for swing in result.swings if None not in swing.days and swing.span_days > 1e-4 * base][:15][::-1]
    for end, color, word in ((0, BLUE, "low"), (1, ORANGE, "high")):
        factors = [(swing.low_factor, swing.high_factor)[end] for swing in shown]
        figure.add_bar(
            y=[swing.name for swing in shown], orientation="h", base=base, name=f"{word} end",
            x=[(swing.days[end] or base) - base for swing in shown], marker={"color": color},
            hovertext=[f"x{f:g}: {swing.days[end]:.2f} days" for swing, f in zip(shown, factors, strict=True)],
        )  # fmt: skip
    figure.update_layout(barmode="overlay")
    figure.add_vline(x=base, line={"color": "#444", "width": 1})
    return _layout(figure, 130 + 30 * len(shown), x="days")


def _row(cells: list[str], numbers: int = 0, kind: str = "") -> str:
    """A table row whose last `numbers` cells are numbers."""
    first = len(cells) - numbers
    body = "".join(f"<td{' class=n' if i >= first else ''}>{escape(cell)}</td>" for i, cell in enumerate(cells))
    return f"<tr{f' class={kind}' if kind else ''}>{body}</tr>"


def _numbers(answer: Answer) -> str:
    rows = []
    for name, label, form in HEADLINES:
        quantiles = getattr(answer, name)
        if quantiles is not None:
            rows.append(_row([label, *(form.format(q) for q in (quantiles.p10, quantiles.p50, quantiles.p90))], 3))
    if not rows:
        return ""
    simulation = answer.simulation
    caption = f"<p class=note>{simulation.repetitions} simulated runs, seed {simulation.seed}.</p>"
    return f"{caption}<table><tr><th></th><th>p10</th><th>p50</th><th>p90</th></tr>{''.join(rows)}</table>"


def _published(report: PlanReport) -> str:
    if not report.published:
        return ""
    rows = [
        _row([
            c.metric, f"{c.published:,.5g}", "" if c.predicted is None else f"{c.predicted:,.5g}",
            "" if c.error is None else f"{c.error:+.1%}", f"{c.source}. {c.note}" if c.note else c.source,
        ])
        for c in report.published
    ]  # fmt: skip
    head = "<tr><th>metric</th><th>published</th><th>predicted</th><th>error</th><th>source</th></tr>"
    return f"<h2>Published figures (never inputs)</h2><table>{head}{''.join(rows)}</table>"


def _assumptions(answer: Answer) -> str:
    rows = [
        _row([a.name, a.value, a.kind, a.source], kind="assumed" if a.kind == "assumed" else "")
        for a in answer.assumptions
    ]
    head = "<tr><th>number</th><th>value</th><th>kind</th><th>source</th></tr>"
    return f"<h2>What this rests on</h2><table>{head}{''.join(rows)}</table>"
