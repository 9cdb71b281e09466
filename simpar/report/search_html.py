"""A page about a search: the front, the space as parallel coordinates and by bottleneck, the best layouts' Gantts side by side."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from math import exp
from statistics import NormalDist
from typing import Any, Final
from urllib.parse import quote

import numpy as np

from simpar.program.program import COMPUTE_KINDS, OpKind
from simpar.readings import TENTH
from simpar.report.gantt import KINDS
from simpar.report.page import Cards, tiles
from simpar.report.search_points import Point, points_of
from simpar.report.search_view import proof, trade_text, turn
from simpar.report.step_figures import figure
from simpar.report.tables import Table
from simpar.result.categories import title_of
from simpar.result.result import Result
from simpar.searching.answer import Answer
from simpar.searching.objective import dominates
from simpar.searching.runner_up import RunnerUp
from simpar.searching.why import Why
from simpar.specs.scenario import Scenario
from simpar.units import format_bytes, format_seconds

Files = Callable[[Scenario], dict[str, str]]
"""What a layout is run with: file name -> text."""

GANTTS: Final = 4
_RECTANGLES: Final = 3000
# The eight colours of Okabe and Ito, which the colour-blind tell apart, then shapes: no two look alike in grey either.
_BOTTLENECKS: Final = {
    "bubble": ("#0072b2", "circle"), "tp": ("#e69f00", "square"), "cp": ("#56b4e9", "diamond"), "ep": ("#cc79a7", "cross"),
    "dp": ("#d55e00", "triangle-up"), "pp": ("#009e73", "x"), "recompute": ("#f0e442", "triangle-down"),
    "memory_bound": ("#7f7f7f", "pentagon"), "cast": ("#7f7f7f", "star"), "launch": ("#7f7f7f", "hexagram"),
    "optimizer": ("#000000", "hourglass"),
    "interference": ("#0072b2", "bowtie"), "skew": ("#d55e00", "cross-thin-open"), "host": ("#d55e00", "diamond-wide"),
}  # fmt: skip


def search_page(answer: Answer, reasons: list[Why], files: Files | None = None) -> str:
    """The page as HTML; `files`: what a layout is run with."""
    points = points_of(answer)
    best = answer.best
    title = f"Search: {answer.found[0].space.template.name}"
    state = proof(answer.gap, finished=answer.finished, found=best is not None)
    shown = [("layouts in the space", f"{answer.size:,}"), ("best", state), ("objective", answer.wish.objective.replace("_", " "))]
    if best is not None:
        shown += [("step time", format_seconds(best.result.step_time_s)), ("MFU", f"{best.result.mfu:.1%}"),
                  ("memory", format_bytes(best.result.worst_rank.device_bytes))]  # fmt: skip
    limits = "; ".join(str(c) for c in answer.wish.constraints)
    under = f"<p class=soft>with {escape(limits)}</p>" if limits else ""
    front = "The front" if answer.wish.front else "Best layouts"
    cards = Cards(f"<h1>{escape(title)}</h1>{under}{tiles(shown)}")
    if best is not None:
        cards.add(front, _table(answer).html() + _losers(answer) + _next(answer.runner_up))
    if files is not None and best is not None:
        cards.add("Export", _exports(answer, files), "", _EXPORT_NOTE)
    cards.draw("Step time and memory, by bottleneck", _scatter(points, answer), "", _SCATTER_NOTE)
    cards.draw("The space as parallel coordinates", _coordinates(points), "", _LINES_NOTE)
    if best is not None:
        longest = max(c.result.step_time_s for c in answer.candidates[:GANTTS])
        gantts = "".join(
            _gantt(f"{i}. {c.scored.choice}", c.result, longest) for i, c in enumerate(answer.candidates[:GANTTS], start=1)
        )
        body = f'{_legend(answer)}<div id=gantts style="{_GRID}">{gantts}</div>'
        note = "One row per pipeline rank, all on the same scale; hover names the op."
        cards.add("Gantts of the best layouts", body, "", note)
    for reason in reasons:
        cards.add(f"Why not {reason.asked}?" if reason.asked else "Why nothing will do", _why(reason))
    rejected = Table(("layouts", "reason"), [(f"{n:,}", r) for r, n in answer.counts("rejected").items()], (0,))
    evaluated = Table(("layouts", "tier"), [(f"{n:,}", t.replace("_", " ")) for t, n in answer.counts("evaluated").items()], (0,))
    cards.add("Rejected", rejected.html(), "half")
    cards.add("Evaluated", evaluated.html(), "half")
    return cards.html(title)


_GRID = "display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,max(420px,40%)),1fr));gap:14px"
_BUTTONS = (
    "<style>a.button{display:inline-block;margin:4px 6px 4px 0;padding:2px 10px;border:1px solid currentColor;border-radius:6px;"
    "text-decoration:none;color:inherit}ol.exports li{margin-bottom:8px;overflow-wrap:anywhere}</style>"
)
_EXPORT_NOTE = "Saves each layout's scenario, and the files that its framework is launched with where an exporter knows it."
_SCATTER_NOTE = (
    "Ringed: the answer. The others: the best layout of each mesh with everyday schedules and recomputation. Colour and shape: "
    "what costs most beside matmuls and attention. Lower left is better, the line is the front; hover names the layout. "
    "Orange: the chance to fit falls to 99, 90, 50 and 10 % at the edges of the bands."
)
_CHANCES: Final = (0.99, 0.9, 0.5, 0.1)
_LINES_NOTE = "The same layouts, one line each; the answer's first is thick, darker is faster. Hover names the layout."


def _table(answer: Answer) -> Table:
    rows = []
    for i, c in enumerate(answer.candidates, start=1):
        r = c.result
        free = "; ".join(f"{axis} {', '.join(map(str, values))}" for axis, values in c.free.items())
        rows.append((
            f"{i}{'*' if i - 1 in answer.try_these else ''}", c.design, format_seconds(r.step_time_s),
            format_seconds(c.expected_step_time_s), "" if c.best_probability is None else f"{c.best_probability:.0%}",
            f"{c.fit_probability:.0%}", f"{r.mfu:.1%}", format_bytes(r.worst_rank.device_bytes), f"{r.bubble_fraction:.1%}",
            f"{r.world_size:,}", "" if c.measured is None else f"{c.measured:,}", str(c.scored.choice), free,
        ))  # fmt: skip
    heads = (
        "", "design (* = try these)", "step", "expected", "best with", "fits with", "MFU", "memory", "bubble", "GPUs",
        "measured runs", "its best layout", "free in it",
    )  # fmt: skip
    return Table(heads, rows, (2, 3, 4, 5, 6, 7, 8, 9, 10))


def _losers(answer: Answer) -> str:
    """Why each other design is not the first, a line each."""
    if answer.wish.front:
        return ""
    step_s = answer.candidates[0].result.step_time_s
    traded = [(n, c.trade) for n, c in enumerate(answer.candidates, start=1) if c.trade is not None]
    lines = "".join(f"<li value={n}>{escape(trade_text(found, step_s))}</li>" for n, found in traded)
    return f"<p class=soft>Against the first:</p><ol class=losers>{lines}</ol>" if lines else ""


def _exports(answer: Answer, files: Files) -> str:
    """Buttons that save what a layout is run with; everything is in the page."""
    rows = []
    for number, c in enumerate(answer.candidates, start=1):
        links = "".join(
            f'<a class=button role=button download="{escape(f"{number}-{name}")}" '
            f'href="data:text/plain;charset=utf-8,{quote(text)}">{escape(name)}</a>'
            for name, text in files(c.scored.choice.scenario(c.found.space.template)).items()
        )
        rows.append(f"<li>{escape(str(c.scored.choice))}<br>{links}</li>")
    return f"<ol class=exports>{''.join(rows)}</ol>{_BUTTONS}"


def _next(other: RunnerUp | None) -> str:
    if other is None:
        return ""
    turns = " or ".join(turn(n, f) for n, f in other.would_win_if.items())
    text = f"Next design: {other.choice}, {other.slower_by:+.2%}" + (f"; it would win if {turns}" if turns else "")
    return f"<p>{escape(text)}</p>"


def _fit_area(answer: Answer) -> list[dict[str, Any]]:
    """Bands behind the chart of time against memory: the chance to fit falls from 99 % to 10 % over them."""
    best = answer.best
    if best is None:
        return []
    memory, width = best.result.device_memory_bytes, best.result.layout.memory_half_width
    spread, shapes = width / TENTH, []
    edges = [memory * exp(-NormalDist().inv_cdf(chance) * spread) / 2.0**30 for chance in _CHANCES]
    for left, right, shade in zip(edges, [*edges[1:], 1.5 * edges[-1]], (0.06, 0.12, 0.2, 0.3), strict=True):
        shapes.append({
            "type": "rect", "xref": "x", "yref": "paper", "x0": left, "x1": right, "y0": 0, "y1": 1, "layer": "below",
            "line": {"width": 0}, "fillcolor": f"rgba(213,94,0,{shade})",
        })  # fmt: skip
    return shapes


def _scatter(points: list[Point], answer: Answer) -> dict[str, Any] | None:
    if not points:
        return None
    data: list[dict[str, Any]] = []
    gib = 2.0**30
    for name in sorted({p.bottleneck for p in points}):
        mine = [p for p in points if p.bottleneck == name]
        color, symbol = _BOTTLENECKS.get(name, ("#555555", "star"))
        data.append({
            "type": "scatter", "mode": "markers", "name": title_of(name), "x": [p.device_bytes / gib for p in mine],
            "y": [p.step_time_s for p in mine], "text": [p.hover for p in mine], "hovertemplate": "%{text}<extra></extra>",
            "marker": {"size": 10, "color": color, "symbol": symbol, "line": {"width": 1, "color": "#ffffff"}},
        })  # fmt: skip
    answers = [p for p in points if p.chosen]
    ring = {"size": 17, "color": "rgba(0,0,0,0)", "symbol": "circle", "line": {"width": 1.5, "color": "#1c1f23"}}
    data.append({
        "type": "scatter", "mode": "markers", "name": "the answer", "x": [p.device_bytes / gib for p in answers],
        "y": [p.step_time_s for p in answers], "marker": ring, "hoverinfo": "skip",
    })  # fmt: skip
    names = ("step_time_s", "peak_memory_bytes")
    front = [p for p in points if not any(dominates(q.metrics, p.metrics, names) for q in points)]
    front.sort(key=lambda p: p.device_bytes)
    data.append({
        "type": "scatter", "mode": "lines", "name": "front", "x": [p.device_bytes / gib for p in front],
        "y": [p.step_time_s for p in front], "line": {"color": "#1c1f23", "width": 1, "dash": "dot", "shape": "hv"},
        "hoverinfo": "skip",
    })  # fmt: skip
    wide = max(p.step_time_s for p in points) > 4.0 * min(p.step_time_s for p in points)
    layout = {
        "xaxis": {"title": {"text": "peak memory of the fullest device (GiB)"}},
        "yaxis": {"title": {"text": "step time (s)"}, "type": "log" if wide else "linear", **({"dtick": "D1"} if wide else {})},
        "hovermode": "closest", "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        "margin": {"l": 64, "r": 20, "t": 60, "b": 48}, "shapes": _fit_area(answer),
    }  # fmt: skip
    # The bands do not decide how far the axis goes.
    sizes = [p.device_bytes / gib for p in points]
    layout["xaxis"] = {**layout["xaxis"], "range": [0.95 * min(sizes), 1.05 * max(sizes)]}  # type: ignore[dict-item]
    return figure("front", data, layout, 480)


_AXES: Final = {
    "tp": "tp", "cp": "cp", "pp": "pp", "schedule": "schedule", "virtual_stages": "chunks", "ep": "ep", "dp": "dp",
    "micro_batch_size": "micro-batch", "zero_stage": "ZeRO", "recompute": "recompute",
}  # fmt: skip


def _coordinates(points: list[Point]) -> dict[str, Any] | None:
    """One line per layout over the axes that differ; drawn as plain lines, which needs no WebGL."""
    if not points:
        return None
    flats = [p.choice.flat() for p in points]
    columns: list[tuple[str, list[float], list[tuple[float, str]]]] = []
    for axis, title in _AXES.items():
        names = sorted({f[axis] for f in flats})
        if len(names) > 1:
            place = {n: i / (len(names) - 1) for i, n in enumerate(names)}
            ticks = [(place[n], str(n).replace("selective:", "")) for n in names]
            columns.append((title, [place[f[axis]] for f in flats], ticks))
    gib, seconds = [p.device_bytes / 2.0**30 for p in points], [p.step_time_s for p in points]
    for label, values in (("memory (GiB)", gib), ("step time (s)", seconds)):
        low, high = min(values), max(values)
        span = (high - low) or 1.0
        columns.append((label, [(v - low) / span for v in values], [(0.0, f"{low:.4g}"), (1.0, f"{high:.4g}")]))
    # The slowest first, so that the fast ones are drawn over them, and the answer's first over all.
    order = sorted(range(1, len(points)), key=lambda i: -points[i].step_time_s)
    data: list[dict[str, Any]] = []
    for rank, i in enumerate([*order, 0]):
        shade = 1.0 - rank / max(len(order), 1)
        color = "#d55e00" if i == 0 else f"rgba(0,{int(60 + 110 * shade)},{int(120 + 80 * shade)},{0.85 - 0.55 * shade:.2f})"
        data.append({
            "type": "scatter", "mode": "lines", "x": list(range(len(columns))), "y": [c[1][i] for c in columns],
            "line": {"color": color, "width": 4 if i == 0 else 1.3}, "text": [points[i].hover] * len(columns),
            "hovertemplate": "%{text}<extra></extra>", "showlegend": False,
        })  # fmt: skip
    notes = [
        {"x": x, "y": y, "text": text if len(text) < 22 else text[:20] + "…", "showarrow": False, "xanchor": "left",
         "font": {"size": 11}, "bgcolor": "rgba(255,255,255,0.7)"}
        for x, (_, _, ticks) in enumerate(columns) for y, text in ticks
    ]  # fmt: skip
    layout = {
        "xaxis": {"tickvals": list(range(len(columns))), "ticktext": [c[0] for c in columns], "range": [-0.2, len(columns) - 0.3]},
        "yaxis": {"visible": False, "range": [-0.06, 1.06]}, "annotations": notes, "hovermode": "closest",
        "margin": {"l": 20, "r": 60, "t": 14, "b": 60},
    }  # fmt: skip
    return figure("coordinates", data, layout, 460)


def _legend(answer: Answer) -> str:
    kinds = {int(k) for c in answer.candidates[:GANTTS] for k in np.unique(c.result.program.kind)}
    shown = [(KINDS[kind][0], KINDS[kind][1]) for kind in COMPUTE_KINDS if int(kind) in kinds]
    box = "display:inline-block;width:11px;height:11px;margin:0 5px 0 0;background:"
    return (
        "<p class=soft>"
        + "".join(f'<span style="margin-right:16px"><i style="{box}{color}"></i>{escape(name)}</span>' for name, color in shown)
        + "every other micro-batch is paler</p>"
    )


def _gantt(title: str, result: Result, longest_s: float) -> str:
    """One layout's compute streams as SVG; hover names the op."""
    program, timeline = result.program, result.timeline
    roles = max(len(program.role_streams), 1)
    width, row = 900.0, min(26.0, 320.0 / roles)
    scale = width / longest_s
    ops = np.flatnonzero(np.isin(program.kind, [int(k) for k in COMPUTE_KINDS]) & (timeline.seconds * scale >= 0.15))
    if len(ops) > _RECTANGLES:
        # What is too narrow to see goes first.
        ops = np.sort(ops[np.argsort(-timeline.seconds[ops], kind="stable")[:_RECTANGLES]])
    parts = []
    for op in ops.tolist():
        x, w = float(timeline.start[op]) * scale, max(float(timeline.seconds[op]) * scale, 0.2)
        color = KINDS[OpKind(int(program.kind[op]))][1]
        faded = ' fill-opacity=".72"' if int(program.microbatch[op]) % 2 else ""
        begin, length = float(timeline.start[op]), float(timeline.seconds[op])
        hover = f"{program.label(op)}: {format_seconds(length)} from {format_seconds(begin)}"
        parts.append(
            f'<rect x="{x:.2f}" y="{program.role[op] * row:.1f}" width="{w:.2f}" height="{row * 0.9:.1f}" fill="{color}"{faded}>'
            f"<title>{escape(hover)}</title></rect>"
        )
    height = roles * row
    text = f"{format_seconds(result.step_time_s)}, bubble {result.bubble_fraction:.1%}"
    return (
        f"<div><p><b>{escape(title)}</b></p><p class=soft>{escape(text)}</p>"
        f'<svg viewBox="0 0 {width:.0f} {height:.1f}" width="100%" style="background:#eceef1">{"".join(parts)}</svg></div>'
    )


def _why(reason: Why) -> str:
    if reason.scored is None:
        short = reason.shortage
        if short is None:
            return f"<p>It is not in the space: {escape('; '.join(reason.broken) or 'no such combination')}</p>"
        need = f"{format_bytes(short.needed_bytes)} of {format_bytes(short.device_bytes)}"
        text = f"None of its {reason.size:,} layouts fits. The one that needs least, {short.choice}, needs {need}:"
        parts = sorted(short.by_category.items(), key=lambda pair: -pair[1])
        rows = [(name.replace("_", " "), format_bytes(value)) for name, value in parts if value]
        return f"<p>{escape(text)}</p>" + Table(("category", "bytes"), rows, (1,)).html()
    slower = "" if reason.slower_by is None else f" ({reason.slower_by:+.2%})"
    missed = f" It misses {'; '.join(reason.missed)}." if reason.missed else ""
    head = f"Its best: {reason.scored.choice}, {format_seconds(reason.scored.step_time_s)}{slower}.{missed}"
    waterfall = [(name, f"{a:.4g}", f"{b:.4g}", f"{b - a:+.4g}") for name, a, b in reason.waterfall]
    return f"<p>{escape(head)}</p>" + Table(("seconds", "best", "asked", "difference"), waterfall, (1, 2, 3)).html()
