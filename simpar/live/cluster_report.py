"""The report of `simpar validate cluster`: a table for a terminal, and a page with what was measured beside what was predicted."""

from __future__ import annotations

import html
import sys
from collections.abc import Sequence

import plotly.graph_objects as go
from plotly.io import to_html
from rich.console import Console
from rich.table import Table

from simpar.live.cluster_compare import DISTURBED, ClusterReport
from simpar.statistics import Comparison

HEADS = ("layout", "ranks", "measured", "spread", "predicted", "error", "corrected", "bubble measured", "predicted", "bytes",
         "memory error")  # fmt: skip
_STYLE = """body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 1100px; color: #1c1f23; }
table { border-collapse: collapse; } th, td { padding: 3px 14px 3px 0; text-align: right; border-bottom: 1px solid #eee; }
th:first-child, td:first-child { text-align: left; } .soft { color: #5b636d; }"""


def lines(report: ClusterReport) -> list[tuple[str, ...]]:
    """A line a layout, slowest first."""
    by_layout: dict[str, dict[str, Comparison]] = {}
    for row in report.rows:
        by_layout.setdefault(row.id, {})[row.metric] = row
    order = sorted(by_layout, key=lambda name: -report.measured[name].median_s)
    return [_line(report, name, by_layout[name]) for name in order]


def _line(report: ClusterReport, name: str, rows: dict[str, Comparison]) -> tuple[str, ...]:
    m, step = report.measured[name], rows["step_time_s"]
    bubble, bytes_, memory = (rows.get(k) for k in ("bubble_fraction", "communication_bytes", "peak_memory_bytes"))
    return (
        name, str(m.layout.world_size), f"{1e3 * m.median_s:.1f} ms", f"{100 * m.spread:.0f} %",
        f"{1e3 * float(step.predicted or 0):.1f} ms", _percent(step.error), _percent(report.corrected(name)), *_shares(bubble),
        "" if bytes_ is None else "exact" if bytes_.measured == bytes_.predicted else f"{100 * (bytes_.error or 0.0):+.2f} %",
        "" if memory is None else _percent(memory.error),
    )  # fmt: skip


def _shares(bubble: Comparison | None) -> tuple[str, str]:
    if bubble is None:
        return "", ""
    return f"{100 * float(bubble.measured):.1f} %", f"{100 * float(bubble.predicted or 0):.1f} %"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:+.1f} %"


def summary_lines(report: ClusterReport) -> list[str]:
    """What the table amounts to."""
    step, bubble = report.summary("step_time_s"), report.summary("bubble_fraction")
    exact, layouts = report.volumes_exact
    found = []
    if step.mape is not None and step.bias is not None and step.max is not None:
        more = f"bias {100 * step.bias:+.1f} %, worst {100 * step.max:.1f} %"
        found.append(f"step time: mean error {100 * step.mape:.1f} % over {step.rows} layouts ({more})")
        disturbed = report.foreign >= DISTURBED and report.beside_foreign is not None
        if disturbed and report.beside_foreign is not None:
            text = f"other processes kept {report.foreign:.2f} cores busy: corrected for what they took, the mean error is"
            found.append(f"{text} {100 * report.beside_foreign:.1f} %")
        which = "the corrected error decides" if disturbed else "this error decides"
        found.append(f"{which}: {'within' if report.passed else 'outside'} the tolerance of {100 * report.tolerance:g} %")
    if report.tau is not None:
        found.append(f"ordering of layouts: Kendall's tau {report.tau:.2f}")
    if bubble.mape is not None and bubble.max is not None:
        rows = [row for row in report.rows if row.metric == "bubble_fraction"]
        worst = max(rows, key=lambda row: abs(float(row.predicted or 0.0) - float(row.measured)))
        steps = worst.details["measured_per_step"]
        low, high = (steps[round(share * (len(steps) - 1))] for share in (0.1, 0.9))
        found.append(f"bubble: mean error {100 * bubble.mape:.1f} points, worst {100 * bubble.max:.1f} ({worst.id}, whose steps "
                     f"range over {100 * (high - low):.1f})")  # fmt: skip
    if (memory := report.summary("peak_memory_bytes")).mape is not None and memory.max is not None:
        found.append(f"peak memory: mean error {100 * memory.mape:.1f} %, worst {100 * memory.max:.1f} %")
    if layouts:
        found.append(f"bytes on the wire: exact for {exact} of {layouts} layouts")
    between = max((m.between for m in report.measured.values()), default=0.0)
    noise = f"steps of one layout vary by +- {100 * report.noise:.1f} % (median), rounds by up to {100 * between:.0f} %"
    found.append(f"noise: {noise}")
    if report.probe is not None:
        seconds, apart = report.probe
        text = f"took {1e3 * seconds:.2f} ms, slowest and fastest {100 * apart:.0f} % apart"
        found.append(f"a fixed product beside the layouts {text}")
    for ranks, inside in sorted(report.in_step.items()):
        factors = ", ".join(f"{factor:.2f} times as long ({model})" for model, factor in inside.factors.items())
        text = f"kernels take {factors or 'as long as alone'}, and {1e6 * inside.launch_s:.0f} us a launch"
        sharded = f"; fully_shard takes {1e3 * inside.shard_s:.1f} ms of the host a call" if inside.shard_s else ""
        found.append(f"inside a step of {ranks} ranks: {text}{sharded}")
    return found


def print_report(report: ClusterReport) -> None:
    """To the terminal."""
    table = Table(box=None, pad_edge=False)
    for index, head in enumerate(HEADS):
        table.add_column(head, justify="right" if index else "left")
    for line in lines(report):
        table.add_row(*line)
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 140)
    console.print(table)
    for text in summary_lines(report):
        console.print(text)


def cluster_page(report: ClusterReport) -> str:
    """The page."""
    rows = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in line) + "</tr>" for line in lines(report))
    head = "".join(f"<th>{html.escape(name)}</th>" for name in HEADS)
    notes = "".join(f"<p>{html.escape(text)}</p>" for text in summary_lines(report))
    figures = "".join(
        to_html(figure, full_html=False, include_plotlyjs="inline" if index == 0 else False)
        for index, figure in enumerate((_scatter(report), _idle(report)))
    )
    return (
        f"<!doctype html><html lang=en><head><meta charset=utf-8><title>simpar validate cluster</title><style>{_STYLE}</style>"
        f"</head><body><h1>Real runs against predictions</h1>{notes}<table><tr>{head}</tr>{rows}</table>{figures}</body></html>"
    )


def _steps(report: ClusterReport) -> Sequence[Comparison]:
    return [row for row in report.rows if row.metric == "step_time_s"]


def _scatter(report: ClusterReport) -> go.Figure:
    figure = go.Figure()
    rows = _steps(report)
    for ranks in sorted({report.measured[r.id].layout.world_size for r in rows}):
        own = [r for r in rows if report.measured[r.id].layout.world_size == ranks]
        figure.add_scatter(
            x=[1e3 * float(r.measured) for r in own], y=[1e3 * float(r.predicted or 0.0) for r in own], mode="markers+text",
            text=[r.id for r in own], textposition="top center", name=f"{ranks} ranks",
            error_x={"array": [1e3 * float(r.measured) * report.measured[r.id].spread for r in own]},
        )  # fmt: skip
    top = max([1e3 * max(float(r.measured), float(r.predicted or 0.0)) for r in rows], default=1.0) * 1.1
    figure.add_scatter(x=[0, top], y=[0, top], mode="lines", name="equal", line={"dash": "dot", "color": "gray"})
    axes = {"xaxis_title": "measured", "yaxis_title": "predicted"}
    figure.update_layout(title="Step time, ms", height=620, template="plotly_white", **axes)
    return figure


def _idle(report: ClusterReport) -> go.Figure:
    figure = go.Figure()
    rows = [row for row in report.rows if row.metric == "bubble_fraction"]
    labels, measured, predicted = [], [], []
    for row in rows:
        for stage, (m, p) in enumerate(zip(row.details["measured_per_stage"], row.details["predicted_per_stage"], strict=True)):
            labels.append(f"{row.id} rank {stage}")
            measured.append(100 * m)
            predicted.append(100 * p)
    figure.add_bar(x=labels, y=measured, name="measured")
    figure.add_bar(x=labels, y=predicted, name="predicted")
    figure.update_layout(title="Idle share of the pipeline phase, %", barmode="group", height=420, template="plotly_white")
    return figure
