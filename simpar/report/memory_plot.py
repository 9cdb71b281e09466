"""Figures of memory: over the step by category, and at each rank's peak."""

from __future__ import annotations

from typing import Any

import numpy as np

from simpar.program.program import FloatArray, IntArray
from simpar.report.encode import packed, time_unit
from simpar.report.shown import drawn_s
from simpar.result.memory import CATEGORIES, RankMemory
from simpar.result.result import Result

GIB = 2.0**30
MAX_POINTS = 1200
"""Per rank over time; more events are drawn as highest and lowest of each of a third as many spans."""
MAX_RANKS = 16
"""Whose memory over time is in the page."""
_LEGEND = {"orientation": "h", "y": -0.27, "yanchor": "top", "x": 0}
_HEIGHT = 430
COLORS = {
    "parameters": "#0072b2", "gradients": "#56b4e9", "optimizer": "#009e73", "fsdp_buffers": "#5cc4a3",
    "activations": "#e69f00", "recompute": "#f5c767", "gradients_in_flight": "#d55e00", "logits": "#cc79a7",
    "communication_buffers": "#6f4c9b", "workspaces": "#8c6d46", "fragmentation": "#b0b0b0",
    "context": "#707070", "nccl": "#404040",
}  # fmt: skip


def shown_ranks(memory: tuple[RankMemory, ...]) -> list[RankMemory]:
    """All ranks, or the first, the last, the fullest and evenly spaced others; the fullest first."""
    worst = max(memory, key=lambda m: m.device_bytes)
    spaced = np.unique(np.linspace(0, len(memory) - 1, MAX_RANKS - 1).round().astype(int))
    chosen = memory if len(memory) <= MAX_RANKS else [memory[i] for i in spaced]
    return [worst, *(m for m in chosen if m is not worst)]


def envelope(times: FloatArray, total: FloatArray, limit: int = MAX_POINTS) -> IntArray:
    """Indices of at most about `limit` events that keep the curve's peaks and troughs, first, last and peak included."""
    if len(times) <= limit:
        return np.arange(len(times))
    edges = np.linspace(times[0], times[-1], limit // 3 + 1)
    group = np.clip(np.searchsorted(edges, times, side="right") - 1, 0, limit // 3 - 1)
    order = np.lexsort((total, group))
    ends = np.flatnonzero(np.append(np.diff(group[order]) != 0, True))
    starts = np.append(0, ends[:-1] + 1)
    last = np.flatnonzero(np.append(np.diff(group) != 0, True))
    return np.unique(np.concatenate([order[starts], order[ends], last, [0, int(np.argmax(total))]]))


def over_time(result: Result) -> dict[str, Any]:
    """Allocated bytes by category, stacked, with capacity and peak; one variant per pipeline rank."""
    variants = [_rank_over_time(result, memory) for memory in shown_ranks(result.memory)]
    return {"id": "memory-time", "variants": variants, "choose": "pipeline rank", "height": _HEIGHT, "zoom": True}


def _rank_over_time(result: Result, memory: RankMemory) -> dict[str, Any]:
    unit, factor = time_unit(drawn_s(result))
    keep = envelope(memory.times, memory.total)
    moments = packed(np.append(memory.times[keep], drawn_s(result)) * factor, "float64")
    base = np.zeros(len(keep) + 1)
    traces: list[dict[str, Any]] = []
    for name, values in _layers(memory, keep):
        base = base + values
        traces.append({
            "type": "scatter", "mode": "lines", "name": name.replace("_", " "), "x": moments, "y": packed(base / GIB),
            "customdata": packed(values / GIB), "line": {"shape": "hv", "width": 0}, "fillcolor": COLORS.get(name, "#999999"),
            "fill": "tozeroy" if not traces else "tonexty",
            "hovertemplate": "%{customdata:.2f} GiB",
        })  # fmt: skip
    device, capacity = memory.device_bytes / GIB, result.device_memory_bytes / GIB
    in_view = device > 0.15 * capacity
    top = max(capacity, device) if in_view else device
    shapes = [_line(device, "#404040", "dash")] + ([_line(capacity, "#c00000", "solid")] if in_view else [])
    text = f"device {capacity:.1f} GiB" + ("" if in_view else " (far above this plot)")
    notes = [
        _note(capacity if in_view else top * 1.08, text, "#c00000", below=in_view and capacity < device),
        _note(device, f"peak use of the device {device:.2f} GiB (reserved + context + NCCL)", "#404040", below=device <= capacity),
    ]
    peak, share = memory.allocated_bytes / GIB, memory.peak_time_s / drawn_s(result) if result.step_time_s else 0.0
    side = "left" if share < 0.3 else "right" if share > 0.7 else "center"
    notes.append({
        "x": memory.peak_time_s * factor, "y": peak, "text": f"peak {peak:.2f} GiB at {memory.peak_time_s * factor:.4g} {unit}",
        "xanchor": side, "showarrow": True, "arrowhead": 2, "ax": 0, "ay": 34,
        "bgcolor": "rgba(255,255,255,.85)", "bordercolor": "#404040",
    })  # fmt: skip
    layout = {
        "xaxis": {"title": {"text": f"time in the step ({unit})"}, "range": [0, drawn_s(result) * factor]},
        "yaxis": {"title": {"text": "allocated (GiB)"}, "range": [0, top * 1.14]},
        "hovermode": "x unified", "shapes": shapes, "annotations": notes, "legend": _LEGEND,
    }  # fmt: skip
    return {"label": f"{memory.rank}", "data": traces, "layout": layout}


def _layers(memory: RankMemory, keep: IntArray) -> list[tuple[str, FloatArray]]:
    """(category, bytes [events kept + 1]) of every category in use, what rests at the bottom; the last value goes on."""
    again = np.append(keep, keep[-1])
    moving = {n: memory.dynamic[again, i] for i, n in enumerate(CATEGORIES) if memory.dynamic[:, i].any()}
    found: dict[str, FloatArray] = {}
    for name, amount in memory.static:
        if amount:
            found[name] = found.get(name, np.zeros(len(again))) + amount
    for name, values in moving.items():
        found[name] = found.get(name, np.zeros(len(again))) + values
    return list(found.items())


def _line(y: float, color: str, dash: str) -> dict[str, Any]:
    return {
        "type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": y, "y1": y, "line": {"color": color, "width": 1.5, "dash": dash},
    }  # fmt: skip


def _note(y: float, text: str, color: str, *, below: bool = False) -> dict[str, Any]:
    return {
        "xref": "paper", "x": 0.0, "y": y, "text": text, "showarrow": False, "xanchor": "left",
        "yanchor": "top" if below else "bottom", "font": {"color": color, "size": 12}, "bgcolor": "rgba(255,255,255,.7)",
    }  # fmt: skip


def device_parts(memory: RankMemory) -> dict[str, float]:
    """Bytes of the device at the rank's peak, by category, fragmentation and what lies outside the allocator included."""
    reserve = {"fragmentation": memory.reserved_bytes - memory.allocated_bytes}
    return {name: amount for name, amount in {**memory.at_peak, **reserve, **dict(memory.outside)}.items() if amount}


def by_rank(result: Result) -> dict[str, Any]:
    """What fills each pipeline rank's device at its peak, as stacked bars with the capacity."""
    parts = [device_parts(memory) for memory in result.memory]
    names = [n for n in COLORS if any(n in p for p in parts)] + sorted({n for p in parts for n in p} - COLORS.keys())
    ranks = [memory.rank for memory in result.memory]
    traces = [
        {
            "type": "bar", "name": name.replace("_", " "), "x": ranks, "y": [p.get(name, 0.0) / GIB for p in parts],
            "marker": {"color": COLORS.get(name, "#999999")}, "hovertemplate": "%{y:.2f} GiB",
        }
        for name in names
    ]  # fmt: skip
    capacity = result.device_memory_bytes / GIB
    used = result.worst_rank.device_bytes / GIB
    in_view = used > 0.15 * capacity
    top = max(capacity, used) if in_view else used
    text = f"device {capacity:.1f} GiB" + ("" if in_view else " (far above this plot)")
    layout = {
        "barmode": "stack", "hovermode": "x unified", "bargap": 0.15, "legend": _LEGEND,
        "xaxis": {"title": {"text": "pipeline rank"}, "dtick": max(len(ranks) // 16, 1)},
        "yaxis": {"title": {"text": "at the rank's peak (GiB)"}, "range": [0, top * 1.14]},
        "shapes": [_line(capacity, "#c00000", "solid")] if in_view else [],
        "annotations": [_note(max(capacity, used) if in_view else top * 1.04, text, "#c00000")],
    }  # fmt: skip
    return {"id": "memory-ranks", "variants": [{"label": "", "data": traces, "layout": layout}], "height": _HEIGHT}
