"""Tiles, the list of what is wrong, pinned configurations side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dash import html

from simpar.errors import InputError
from simpar.report.serve.answer import Answer, Run
from simpar.report.serve.nearest import Nearest
from simpar.report.serve.preview import Preview
from simpar.report.serve.questions import Said
from simpar.report.serve.state import Bases, State
from simpar.report.step_table import unit_of
from simpar.searching.choice import recompute_text
from simpar.units import format_bytes, format_seconds

Row = tuple[str, str, bool]
"""Label, text, whether it is bad news."""


def headline(answer: Answer) -> list[tuple[str, str, str, str]]:
    """(id, label, number, more) of every tile."""
    result, run = answer.result, answer.run
    low, high = result.step_interval.low, result.step_interval.high
    worst = result.worst_rank
    verdict = "fits" if result.fits else "DOES NOT FIT"
    return [
        ("step", "step time", format_seconds(result.step_time_s), f"80 %: {format_seconds(low)} to {format_seconds(high)}"),
        ("rate", f"{unit_of(result)}/s", f"{result.tokens_per_s:,.0f}", f"{result.tokens_per_s_per_gpu:,.1f} per GPU"),
        ("mfu", "MFU", f"{result.mfu:.1%}", f"{result.model_flops_per_s_per_gpu / 1e12:,.0f} TFLOP/s per GPU"),
        ("bubble", "pipeline bubble", f"{result.bubble_fraction:.1%}", f"{result.layout.num_microbatches} micro-batches"),
        ("memory", f"memory: {verdict}", format_bytes(worst.device_bytes),
         f"of {format_bytes(result.device_memory_bytes)}, rank {worst.rank}"),
        *_paid(run, result.fits),
    ]  # fmt: skip


def _paid(run: Run | None, fits: bool) -> list[tuple[str, str, str, str]]:
    """Days and cost, of what fits only."""
    if run is None or not fits:
        return [("days", "days", "none", "it does not run"), ("cost", "cost", "none", "it does not run")]
    return [
        ("days", "days", short(run.days), f"{short(run.gpu_hours)} GPU-hours"),
        ("cost", "cost", f"${short(run.cost_usd)}", "rent of the GPUs"),
    ]


def short(value: float) -> str:
    """A large number in a few characters."""
    for scale, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= scale:
            return f"{value / scale:,.3g} {letter}" if value < 1e15 else f"{value:.3g}"
    return f"{value:.3g}"


def tiles(answer: Answer) -> list[html.Div]:
    """The headline, as tiles."""
    found = []
    for name, label, number, more in headline(answer):
        style = ("good" if answer.result.fits else "bad") if name == "memory" else ""
        parts = [html.Span(label), html.B(number, id=f"tile-{name}"), html.Span(more)]
        found.append(html.Div(parts, className=f"tile {style}"))
    return found


def early_tiles(early: Preview) -> list[html.Div]:
    """The first answer for a long step, marked as about."""
    short_step, run = early.short, early.run
    flops = short_step.model_flops_per_s_per_gpu * early.tokens_per_s / short_step.tokens_per_s
    rows = [
        ("step", "step time, about", format_seconds(early.step_time_s), "the whole step is being simulated"),
        ("rate", "per second, about", f"{early.tokens_per_s:,.0f}", f"{early.tokens_per_s / short_step.world_size:,.1f} per GPU"),
        ("mfu", "MFU, about", f"{flops / short_step.peak_flops_per_s:.1%}", f"{flops / 1e12:,.0f} TFLOP/s per GPU"),
        ("memory", "memory: " + ("fits" if short_step.fits else "DOES NOT FIT"), format_bytes(short_step.worst_rank.device_bytes),
         f"of {format_bytes(short_step.device_memory_bytes)}"),
        *((name, f"{label}, about", number, more) for name, label, number, more in _paid(run, short_step.fits)),
    ]  # fmt: skip
    return [html.Div([html.Span(a), html.B(b, id=f"tile-{i}"), html.Span(c)], className="tile early") for i, a, b, c in rows]


def about(answer: Answer) -> str:
    """One line: what is simulated."""
    result, plan = answer.result, answer.scenario.plan
    degrees = [f"tp {plan.tp}", f"cp {plan.cp}", f"pp {plan.pp}", f"dp {result.layout.mesh.dp}"]
    degrees += [f"ep {plan.ep}"] if plan.ep > 1 else []
    degrees += [f"virtual stages {plan.virtual_stages}"] if plan.virtual_stages > 1 else []
    gpus = f"{result.world_size:,} × {result.layout.hardware.gpu.name}"
    more = f"ZeRO {plan.zero_stage}, {result.schedule_name}, recompute {recompute_text(plan.recompute)}"
    return f"{gpus}: {', '.join(degrees)}, {more}; computed in {answer.seconds * 1e3:.0f} ms"


def wrong(error: InputError) -> html.Div:
    """Everything that is wrong, in the words of the command line."""
    return _told("This cannot be simulated. ", "The numbers below are of the last settings that could:", error)


def refused(error: InputError) -> html.Div:
    """What is wrong with an address."""
    return _told("The address is not one of this page's. ", "The first scenario is shown instead:", error)


def _told(what: str, then: str, error: InputError) -> html.Div:
    texts = [str(v).removeprefix(f"{v.file}: ") for v in error.violations] or str(error).splitlines()
    return html.Div([html.B(what), then, html.Ul([html.Li(text) for text in texts])], className="wrong")


def title_of(state: State, bases: Bases) -> str:
    """What tells a pinned configuration apart: what was changed of its scenario."""
    start = bases[state.base].values
    words = [f"{k} {v}" for k, v in state.values.items() if v != start.get(k)] + list(state.more)
    return state.base + (": " + ", ".join(words) if words else "")


def side_by_side(columns: Sequence[tuple[str, Answer | str]], remove: Sequence[Any]) -> html.Section:
    """Columns of numbers, the present settings first; a column that cannot be simulated says why.

    Args:
        remove: an element under each title.
    """
    rows: dict[str, list[Any]] = {}
    for position, (_, answer) in enumerate(columns):
        if isinstance(answer, str):
            rows.setdefault("step time", [""] * len(columns))[position] = html.Td(answer, className="bad")
            continue
        for label, text, bad in _facts(answer):
            rows.setdefault(label, [""] * len(columns))[position] = html.Td(text, className="bad" if bad else "")
    heads = [html.Th("")] + [html.Th([title, html.Br(), button]) for (title, _), button in zip(columns, remove, strict=True)]
    body = [html.Tr([html.Th(name, scope="row"), *[c or html.Td("") for c in cells]]) for name, cells in rows.items()]
    table = html.Table([html.Thead(html.Tr(heads)), html.Tbody(body)])
    return html.Section([html.H2("Side by side"), html.Div(table, className="scroll")], className="card")


def _facts(answer: Answer) -> list[Row]:
    result = answer.result
    found: list[Row] = [(label.partition(":")[0], number, False) for _, label, number, _ in headline(answer)]
    found.insert(2, ("per GPU", f"{result.tokens_per_s_per_gpu:,.1f}", False))
    found.append(("fits", "yes" if result.fits else "NO", not result.fits))
    found.append(("GPUs", f"{result.world_size:,}", False))
    return found


def waterfall(parts: Sequence[tuple[str, float]], step_s: float, step: str = "predicted step") -> html.Div:
    """Where the step goes: a bar for each part, from the ideal to the step."""
    rows, at = [], 0.0
    for index, (name, seconds) in enumerate([*parts, (step, step_s)]):
        last = index == len(parts)
        low = 0.0 if last else min(at, at + seconds)
        place = {"left": f"{100 * low / step_s:.2f}%", "width": f"{max(100 * abs(seconds) / step_s, 0.25):.2f}%"}
        bar = html.I(className="ends" if last or not index else "", style=place)
        share = f"{format_seconds(seconds)} ({seconds / step_s:.1%})"
        rows.append(html.Li([html.Span(name), html.Span(bar, className="bar"), html.Span(share, className="number")]))
        at += seconds
    return html.Ul(rows, className="falls")


def answers(found: Mapping[str, Said]) -> list[html.Div]:
    """The answer to every question; the page shows the one that is asked."""
    parts = []
    for key, each in found.items():
        reasons = html.Ul([html.Li(text) for text in each.why])
        verdict = html.P(each.verdict, className="verdict bad" if each.bad else "verdict", id=f"verdict-{key}")
        parts.append(html.Div([verdict, reasons], className=f"asked asked-{key}"))
    return parts


def nearest_fit(found: Nearest | None) -> list[Any]:
    """The nearest layout that fits, and a button that takes it over."""
    if found is None:
        return [html.P("None of the layouts near this one fits. Try more nodes, or search the layout.")]
    changed = ", ".join(f"{label} {value}" for label, value in found.changes.items())
    takes = f"{format_seconds(found.step_time_s)} a step and {format_bytes(found.device_bytes)}"
    text = f"The nearest layout that fits: {changed}. It takes {takes}. "
    return [html.P([text, html.Button("Use it", id={"type": "near", "index": 0}, type="button")])]
