"""The page's elements: controls on the left, results on the right."""

from __future__ import annotations

import uuid
from typing import Any

from dash import dcc, html

from simpar.report.serve.downloads import NO_FLAGS
from simpar.report.serve.fields import AS_WRITTEN, FIELDS, GROUPS, LAYOUT, MODEL, OWN_GPU, Field, Value
from simpar.report.serve.my_runs import panel
from simpar.report.serve.questions import FIRST, QUESTIONS
from simpar.report.serve.state import Base, Bases

GRAPH = {"displaylogo": False, "responsive": True, "displayModeBar": False}
_SIDE_NOTE = {
    "Run: cost and days": "Closed form: days = tokens / (tokens per second × goodput); cost = GPUs × hours × price. "
    "1T tokens, $2 and 0.9 are assumed until you say otherwise; `simpar plan` simulates failures and checkpoints.",
    OWN_GPU: "Replaces figures of the hardware chosen above; empty boxes keep its own.",
}


def value_id(key: str) -> str:
    """Id of the element that holds a field's value."""
    return f"v-{key}"


def slider_id(key: str) -> str:
    """Id of a field's slider."""
    return f"r-{key}"


def page(bases: Bases, *, can_export: bool = False, can_read: bool = False) -> html.Div:
    """The whole page, at the first scenario."""
    base = bases[bases.first]
    stores = [
        dcc.Location(id="url", refresh=False), dcc.Store(id="query"), dcc.Store(id="pins", data=[]), dcc.Store(id="address"),
        dcc.Store(id="tab", data=uuid.uuid4().hex), dcc.Store(id="found", data=[]), dcc.Store(id="whole"),
        dcc.Store(id="closing"), dcc.Store(id="gantt-data"), dcc.Store(id="gantt-drawn"),
        dcc.Store(id="config", data=""), dcc.Store(id="site", data=""), dcc.Store(id="rows", data=[]),
        dcc.Store(id="learned", data=""),
        dcc.Store(id="near", data=""), dcc.Store(id="asked"),
        dcc.Download(id="download"), dcc.Interval(id="tick", interval=400, disabled=True),
    ]  # fmt: skip
    side = html.Div([_start(bases), *[_group(name, base) for name in GROUPS], _more()], className="side")
    return html.Div([*stores, html.Div([_head(can_export, can_read), side, _results()], className="page")], role="main")


def _start(bases: Bases) -> html.Fieldset:
    return html.Fieldset([
        html.Legend("Start from a scenario"),
        dcc.Dropdown(list(bases.paths), bases.first, id="base", clearable=False, maxHeight=420),
        html.Div([html.Button("Reset to it", id="reset", type="button")], className="buttons"),
    ])  # fmt: skip


def _group(name: str, base: Base) -> html.Details:
    rows: list[Any] = [html.Summary(name), *[_row(f, base.values[f.key]) for f in FIELDS if f.group == name]]
    if name == MODEL:
        button = html.Button("Drop a config.json, or choose one", type="button")
        rows += [dcc.Upload(button, id="drop-model", accept=".json", max_size=2**20), html.P(id="dropped", className="soft")]
    if name in _SIDE_NOTE:
        rows.append(html.P(_SIDE_NOTE[name], className="soft"))
    # Everything but the user's own GPU, whose boxes are mostly empty; a phone closes the others (OPENED).
    return html.Details(rows, open=name != OWN_GPU, className="group" if name in (MODEL, LAYOUT) else "group less")


def options_of(field: Field) -> list[str]:
    """Choices of a word, with one for what the scenario says in a table of its own."""
    return [*field.choices, *([AS_WRITTEN] if field.key in ("model", "hardware", "recompute", "schedule") else [])]


def _row(field: Field, value: Value) -> html.Div:
    name = value_id(field.key)
    label = html.Label(field.label, htmlFor=name)
    if field.key == "recompute":
        return html.Div([label, dcc.RadioItems(options_of(field), value, id=name, inline=True, className="radio")], className="row")
    if field.kind == "word":
        return html.Div([label, dcc.Dropdown(options_of(field), value, id=name, clearable=False, maxHeight=360)], className="row")
    number: dict[str, Any] = {"type": "number", "step": "any", "inputMode": "decimal"} if field.kind != "text" else {"type": "text"}
    box = dcc.Input(id=name, value=value, debounce=True, autoComplete="off", **number)
    hint = [html.Span(field.hint, className="soft")] if field.hint else []
    if not field.stops:
        return html.Div([label, html.Div([box, *hint], className="unit")], className="row")
    slider = dcc.Input(id=slider_id(field.key), type="range", min=0, max=len(field.stops) - 1, step=1, value=0, className="range")
    unseen = html.Label(f"{field.label}, slider", htmlFor=slider_id(field.key), className="unseen")
    marked = html.Div([unseen, slider, box], className="pair")
    return html.Div([html.Div([label, *[html.Div(h) for h in hint]]), marked], className="row")


def _more() -> html.Fieldset:
    return html.Fieldset([
        html.Legend("More overrides"),
        html.Label("one per line, as --set takes them: plan.cp_style=ulysses", htmlFor="more", className="soft"),
        dcc.Textarea(id="more", value="", rows=3, spellCheck="false"),
    ])  # fmt: skip


def _head(can_export: bool, can_read: bool) -> html.Div:
    """The question, its answer, and what can be done with it."""
    options = [{"label": text, "value": key} for key, text in QUESTIONS.items()]
    return html.Div([
        html.Div([html.H1("simpar: what if"), html.P(id="about", className="soft")], className="title"),
        html.Fieldset([
            html.Legend("Question", className="unseen"),
            dcc.RadioItems(options, FIRST, id="ask", inline=True, className="ask"),
        ], className="questions"),
        html.Div(id="notice", role="alert"), html.Div(id="wrong", role="alert"),
        html.Div([
            html.Div(id="answers", role="status"), html.Div(id="nearest", className="asked asked-fit asked-fast asked-long"),
            panel(can_read=can_read), _actions(can_export),
        ], className="card answer"),
    ], className="head body")  # fmt: skip


def _results() -> html.Div:
    return html.Div([
        html.Div([
            html.Div(id="tiles", className="tiles", role="status"),
            html.Div(id="search", **{"aria-live": "polite"}),
            html.Div(id="pinned"),
            html.Div([
                _card("Pipeline: what every rank does, and when", "gantt", "wide", drawing=html.Div(id="gantt")),
                _card("Where the step goes", "waterfall", drawing=html.Div(id="waterfall")),
                _card("Memory by pipeline rank, against the device", "memory"),
            ], className="figures"),
        ], id="results", className="body"),
    ], className="body rest")  # fmt: skip


def _actions(can_export: bool) -> html.Div:
    def button(name: str, text: str, style: str = "", **more: Any) -> html.Button:
        return html.Button(text, id=name, type="button", className=style, **more)

    return html.Div([
        html.Div([
            button("pin", "Pin this configuration", "main"), button("start", "Search the layout"),
            button("stop", "Stop", disabled=True),
            button("toml", "Scenario (TOML)"), button("html", "Report (HTML)"),
            button("flags", "Launch flags", disabled=not can_export, title="" if can_export else NO_FLAGS),
        ], className="buttons"),
        html.P(id="said", className="soft", role="status"),
    ])  # fmt: skip


def _card(title: str, name: str, width: str = "", drawing: html.Div | None = None) -> html.Section:
    if drawing is None:  # a Dash element without children is false
        graph = dcc.Graph(id=name, config=GRAPH, figure={}, style={"height": "300px"})
    else:
        graph = drawing
    return html.Section([
        html.H2(title), html.P("", className="soft", id=f"{name}-note"), graph,
    ], className=f"card {width} card-{name}", **{"aria-label": title})  # fmt: skip
