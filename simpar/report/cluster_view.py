"""`simpar validate cluster` on a terminal and as a page: what was measured beside what was predicted."""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console

from simpar.live.cluster_compare import DISTURBED, ClusterReport
from simpar.report.page import Cards
from simpar.report.palette import BLUE, GREY, ORANGE
from simpar.report.step_figures import figure
from simpar.report.tables import Table
from simpar.statistics import Comparison

HEADS = ("layout", "ranks", "measured", "spread", "predicted", "error", "corrected", "bubble measured", "predicted", "bytes",
         "memory error")  # fmt: skip


def _table(report: ClusterReport) -> Table:
    return Table(HEADS, lines(report), tuple(range(1, len(HEADS))))


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
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 140)
    console.print(_table(report).rich(""))
    for text in summary_lines(report):
        console.print(text)


def cluster_page(report: ClusterReport) -> str:
    """The page as HTML text."""
    cards = Cards("<h1>Real runs against predictions</h1>")
    cards.tell("What they amount to", summary_lines(report))
    cards.tabulate("Layouts, slowest first", _table(report))
    cards.draw("Step time", _step_times(report))
    cards.draw("Idle share of the pipeline phase", _idle(report))
    return cards.html("simpar validate cluster")


def _step_times(report: ClusterReport) -> dict[str, Any]:
    """Predicted over measured, and where they would be equal."""
    steps = [row for row in report.rows if row.metric == "step_time_s"]
    data: list[dict[str, Any]] = []
    for ranks in sorted({report.measured[r.id].layout.world_size for r in steps}):
        own = [r for r in steps if report.measured[r.id].layout.world_size == ranks]
        data.append({
            "type": "scatter", "mode": "markers+text", "name": f"{ranks} ranks",
            "x": [1e3 * float(r.measured) for r in own], "y": [1e3 * float(r.predicted or 0.0) for r in own],
            "text": [r.id for r in own], "textposition": "top center",
            "error_x": {"type": "data", "array": [1e3 * float(r.measured) * report.measured[r.id].spread for r in own]},
        })  # fmt: skip
    top = max([1e3 * max(float(r.measured), float(r.predicted or 0.0)) for r in steps], default=1.0) * 1.1
    equal = {
        "type": "scatter",
        "mode": "lines",
        "name": "equal",
        "x": [0, top],
        "y": [0, top],
        "line": {"dash": "dot", "color": GREY},
    }
    axes = {f"{axis}axis": {"title": {"text": f"{word} (ms)"}} for axis, word in (("x", "measured"), ("y", "predicted"))}
    return figure("step-times", [*data, equal], axes, 620)


def _idle(report: ClusterReport) -> dict[str, Any] | None:
    """None without a pipeline."""
    bubbles = [row for row in report.rows if row.metric == "bubble_fraction"]
    labels = [f"{row.id} rank {stage}" for row in bubbles for stage in range(len(row.details["measured_per_stage"]))]
    data = [
        {"type": "bar", "name": name, "x": labels, "marker": {"color": color},
         "y": [100 * share for row in bubbles for share in row.details[f"{name}_per_stage"]]}
        for name, color in (("predicted", BLUE), ("measured", ORANGE))
    ]  # fmt: skip
    layout = {"barmode": "group", "yaxis": {"title": {"text": "% of the phase"}}}
    return figure("idle", data, layout, 420) if labels else None
