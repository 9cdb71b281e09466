"""A page about a search: the front, the space as parallel coordinates and by bottleneck, the best layouts' Gantts side by side."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from simpar.program.program import COMPUTE_KINDS, OpKind
from simpar.report.gantt import KINDS
from simpar.report.page import Table, card, page, plot
from simpar.report.step_figures import figure
from simpar.result.result import Result
from simpar.search.answer import Answer
from simpar.search.choice import Choice
from simpar.search.find import Found
from simpar.search.why import Why
from simpar.simulate import interpret, prepare, run
from simpar.units import format_bytes, format_seconds

DESIGNS = 60
"""Designs that are simulated for the page."""
GANTTS = 4
_RECTANGLES = 3000
_BOTTLENECKS = {
    "bubble": ("pipeline bubble", "#0072b2"), "tp": ("tensor parallel", "#e69f00"), "cp": ("context parallel", "#56b4e9"),
    "ep": ("expert parallel", "#cc79a7"), "dp": ("data parallel", "#d55e00"), "pp": ("pipeline sends", "#009e73"),
    "recompute": ("recomputation", "#f0e442"), "memory_bound": ("memory-bound kernels", "#7f7f7f"), "launch": ("launch gaps", "#a65628"),  # noqa: E501
    "optimizer": ("optimizer", "#000000"), "interference": ("compute slowed by collectives", "#8c6bb1"),
    "offload": ("offload", "#b15928"), "communication": ("collectives in blocks", "#4daf4a"),
}  # fmt: skip


@dataclass(frozen=True)
class Point:
    """One simulated design of the page."""

    choice: Choice
    step_time_s: float
    device_bytes: float
    bottleneck: str
    mfu: float
    num_gpus: int

    @property
    def hover(self) -> str:
        """Shown under the pointer."""
        name = _BOTTLENECKS.get(self.bottleneck, (self.bottleneck, ""))[0]
        return (
            f"{self.choice}<br>{format_seconds(self.step_time_s)}, MFU {self.mfu:.1%}, {format_bytes(self.device_bytes)}"
            f"<br>{self.num_gpus:,} GPUs, most lost to: {name}"
        )


def bottleneck(result: Result) -> str:
    """The category that costs most beside matmuls and attention."""
    others = {n: s for n, s in result.breakdown.items() if n not in ("matmul", "attention", "expert_matmul")}
    return max(others, key=lambda n: others[n], default="")


def points_of(answer: Answer) -> list[Point]:
    """The best layouts, and the best of other designs simulated, each design once."""
    found = [_point(c.scored.choice, c.result) for c in answer.candidates]
    seen = {_design(p.choice) for p in found}
    for each in answer.found:
        for glimpse in sorted(each.glimpses, key=lambda g: g.bound_s):
            if len(found) >= DESIGNS:
                break
            if _design(glimpse.choice) not in seen:
                seen.add(_design(glimpse.choice))
                found.append(_point(glimpse.choice, _simulated(each, glimpse.choice)))
    return [p for p in found if p.step_time_s > 0]


def _design(choice: Choice) -> tuple[object, ...]:
    g, p = choice.group, choice.pipeline
    return (g.tp, g.cp, g.pp, g.dp, g.ep, g.etp, p.schedule)


def _simulated(found: Found, choice: Choice) -> Result:
    priced = prepare(choice.scenario(found.space.template), detail="stage")
    return interpret(priced, run(priced, interference=True))


def _point(choice: Choice, result: Result) -> Point:
    bytes_ = result.worst_rank.device_bytes
    return Point(choice, result.step_time_s, bytes_, bottleneck(result), result.mfu, result.world_size)


def search_page(answer: Answer, reasons: list[Why]) -> str:
    """The page as HTML."""
    points = points_of(answer)
    figures = [f for f in (_scatter(points), _coordinates(points)) if f]
    best = answer.best
    title = "Search" if best is None else f"Search: {best.result.layout.scenario.name}"
    gap = answer.gap
    proof = "interrupted" if gap is None else "proven" if gap == 0 else f"gap {gap:.2%}"
    tiles = [("layouts in the space", f"{answer.size:,}"), ("best", proof)]
    if best is not None:
        tiles += [("step time", format_seconds(best.result.step_time_s)), ("MFU", f"{best.result.mfu:.1%}"),
                  ("memory", format_bytes(best.result.worst_rank.device_bytes))]  # fmt: skip
    shown = "".join(f"<div class=tile><span>{escape(n)}</span><b>{escape(v)}</b></div>" for n, v in tiles)
    cards = [card("Best layouts", _table(answer).html())]
    if figures:
        note = "Each point is the best layout of one design that fits; hover names it. Lower left is better; the line is the front."
        cards.append(card("Step time and memory, by bottleneck", plot(figures[0]), "half", note))
        cards.append(card("Designs as parallel coordinates", plot(figures[1]), "half", "One line per design; the best is drawn thick. Hover names it."))  # noqa: E501
    gantts = "".join(_gantt(f"{i}. {c.scored.choice}", c.result) for i, c in enumerate(answer.candidates[:GANTTS], start=1))
    cards.append(card("Gantts of the best layouts", f'<div style="{_GRID}">{gantts}</div>', "", "One row per pipeline rank, same scale."))  # noqa: E501
    cards += [card(f"Why not {r.asked}?", _why(r)) for r in reasons]
    rejected = Table(("layouts", "reason"), [(f"{n:,}", r) for r, n in answer.counts("rejected").items()], (0,))
    evaluated = Table(("layouts", "tier"), [(f"{n:,}", t.replace("_", " ")) for t, n in answer.counts("evaluated").items()], (0,))
    cards += [card("Rejected", rejected.html(), "half"), card("Evaluated", evaluated.html(), "half")]
    body = f"<h1>{escape(title)}</h1><div class=tiles>{shown}</div><div class=cards>{''.join(cards)}</div>"
    return page(title, body, figures)


_GRID = "display:grid;grid-template-columns:repeat(auto-fit,minmax(460px,1fr));gap:14px"


def _table(answer: Answer) -> Table:
    rows = []
    for i, c in enumerate(answer.candidates, start=1):
        r = c.result
        rows.append((
            f"{i}{'=' if c.tied else ''}", format_seconds(r.step_time_s), f"{r.mfu:.1%}", f"{r.tokens_per_s_per_gpu:,.1f}",
            format_bytes(r.worst_rank.device_bytes), f"{r.bubble_fraction:.1%}", f"{r.world_size:,}", str(c.scored.choice),
        ))  # fmt: skip
    heads = ("", "step", "MFU", "tokens/s/GPU", "memory", "bubble", "GPUs", "layout (= tied with the best)")
    return Table(heads, rows, (1, 2, 3, 4, 5, 6))


def _scatter(points: list[Point]) -> dict[str, Any] | None:
    if not points:
        return None
    data: list[dict[str, Any]] = []
    gib = 2.0**30
    for name in sorted({p.bottleneck for p in points}):
        mine = [p for p in points if p.bottleneck == name]
        label, color = _BOTTLENECKS.get(name, (name, "#555555"))
        data.append({
            "type": "scatter", "mode": "markers", "name": label, "x": [p.device_bytes / gib for p in mine],
            "y": [p.step_time_s for p in mine], "text": [p.hover for p in mine], "hovertemplate": "%{text}<extra></extra>",
            "marker": {"size": 9, "color": color, "line": {"width": 0.5, "color": "#ffffff"}},
        })  # fmt: skip
    front = sorted((p for p in points if not any(_beats(q, p) for q in points)), key=lambda p: p.device_bytes)
    data.append({
        "type": "scatter", "mode": "lines", "name": "front", "x": [p.device_bytes / gib for p in front],
        "y": [p.step_time_s for p in front], "line": {"color": "#1c1f23", "width": 1, "dash": "dot", "shape": "hv"}, "hoverinfo": "skip",  # noqa: E501
    })  # fmt: skip
    layout = {
        "xaxis": {"title": {"text": "peak memory of the fullest device (GiB)"}}, "yaxis": {"title": {"text": "step time (s)"}},
        "hovermode": "closest", "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0}, "margin": {"l": 64, "r": 20, "t": 60, "b": 48},  # noqa: E501
    }  # fmt: skip
    return figure("front", data, layout, 460)


def _beats(a: Point, b: Point) -> bool:
    better = a.step_time_s < b.step_time_s or a.device_bytes < b.device_bytes
    return better and a.step_time_s <= b.step_time_s and a.device_bytes <= b.device_bytes


def _coordinates(points: list[Point]) -> dict[str, Any] | None:
    """One line per design over the axes that differ; drawn as plain lines, which needs no WebGL."""
    if not points:
        return None
    flats = [p.choice.flat() for p in points]
    columns: list[tuple[str, list[float], list[tuple[float, str]]]] = []
    for axis in ("tp", "cp", "pp", "virtual_stages", "ep", "dp", "micro_batch_size", "zero_stage", "schedule", "recompute"):
        names = sorted({f[axis] for f in flats}) if isinstance(flats[0][axis], int) else sorted({str(f[axis]) for f in flats})
        if len(names) > 1:
            place = {str(n): i / (len(names) - 1) for i, n in enumerate(names)}
            ticks = [(place[str(n)], str(n).replace("selective:", "")) for n in names]
            columns.append((axis.replace("_", " "), [place[str(f[axis])] for f in flats], ticks))
    for label, values in (("memory (GiB)", [p.device_bytes / 2.0**30 for p in points]), ("step time (s)", [p.step_time_s for p in points])):  # noqa: E501
        low, high = min(values), max(values)
        span = (high - low) or 1.0
        columns.append((label, [(v - low) / span for v in values], [(0.0, f"{low:.4g}"), (1.0, f"{high:.4g}")]))
    order = sorted(range(len(points)), key=lambda i: -points[i].step_time_s)
    data: list[dict[str, Any]] = []
    for rank, i in enumerate(order):
        best = rank == len(order) - 1
        shade = 1.0 - rank / max(len(order) - 1, 1)
        color = "#d55e00" if best else f"rgba(0,{int(90 + 90 * shade)},{int(150 + 70 * shade)},{0.75 - 0.5 * shade:.2f})"
        data.append({
            "type": "scatter", "mode": "lines", "x": list(range(len(columns))), "y": [c[1][i] for c in columns],
            "line": {"color": color, "width": 3 if best else 1.3}, "text": [points[i].hover] * len(columns),
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


def _gantt(title: str, result: Result) -> str:
    """One layout's compute streams as SVG; hover names the op."""
    program, timeline = result.program, result.timeline
    roles = max(len(program.role_streams), 1)
    width, row = 900.0, min(26.0, 320.0 / roles)
    scale = width / result.step_time_s
    ops = np.flatnonzero(np.isin(program.kind, [int(k) for k in COMPUTE_KINDS]) & (timeline.seconds * scale >= 0.15))
    if len(ops) > _RECTANGLES:
        # What is too narrow to see goes first.
        ops = np.sort(ops[np.argsort(-timeline.seconds[ops], kind="stable")[:_RECTANGLES]])
    parts = []
    for op in ops.tolist():
        x, w = float(timeline.start[op]) * scale, max(float(timeline.seconds[op]) * scale, 0.2)
        _, color, _ = KINDS[OpKind(int(program.kind[op]))]
        faded = ' fill-opacity=".72"' if int(program.microbatch[op]) % 2 else ""
        hover = f"{program.label(op)}: {format_seconds(float(timeline.seconds[op]))} from {format_seconds(float(timeline.start[op]))}"  # noqa: E501
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
        causes = "; ".join(reason.broken) or ", ".join(f"{n:,} {r}" for r, n in reason.account.rejected.items() if n)
        return f"<p>{escape(causes or 'no such layout')}</p>"
    rows = [(name, f"{a:.4g}", f"{b:.4g}", f"{b - a:+.4g}") for name, a, b in reason.waterfall]
    slower = "" if reason.slower_by is None else f" ({reason.slower_by:+.2%})"
    head = f"Its best: {reason.scored.choice}, {format_seconds(reason.scored.step_time_s)}{slower}"
    return f"<p>{escape(head)}</p>" + Table(("seconds", "best", "asked", "difference"), rows, (1, 2, 3)).html()


def write_search_html(answer: Answer, reasons: list[Why], path: Path) -> None:
    """Write the page."""
    path.write_text(search_page(answer, reasons), encoding="utf-8")


__all__ = ["bottleneck", "points_of", "search_page", "write_search_html"]
