"""What the page does when something changes. Every callback is a pure function of its inputs; the server keeps only caches."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from dash import ALL, Dash, Input, Output, State, ctx, dcc, html, no_update

from simpar.boundary import parse_json
from simpar.errors import InputError, SimparError
from simpar.report.serve import downloads, figures, tables
from simpar.report.serve.answer import Answer, Answers
from simpar.report.serve.attached import model_of, pack
from simpar.report.serve.fields import FIELDS, OWN_MODEL, SLIDERS
from simpar.report.serve.gantt_canvas import SCRIPT, canvas_data
from simpar.report.serve.my_runs import ReadRuns, register_runs, text_of
from simpar.report.serve.nearest import nearest
from simpar.report.serve.page import slider_id, value_id
from simpar.report.serve.preview import Preview
from simpar.report.serve.questions import FIRST, QUESTIONS, said, said_early
from simpar.report.serve.search_job import Jobs
from simpar.report.serve.search_view import register_search
from simpar.report.serve.state import check_words, of_controls, of_query
from simpar.report.serve.style import ADDRESS, ASKED, CLOSING, NEAREST
from simpar.specs.scenario import Scenario

MAX_PINS = 5
_CONTROLS = [*(f.key for f in FIELDS)]


def register(app: Dash, answers: Answers, export: Callable[[Scenario], str] | None = None, runs: ReadRuns | None = None) -> Jobs:
    """Attach all callbacks; returns the searches that they start."""
    for field in SLIDERS:
        app.clientside_callback(
            NEAREST.replace("STOPS", repr(list(field.stops))),
            Output(slider_id(field.key), "value"), Output(value_id(field.key), "value"),
            Input(slider_id(field.key), "value"), Input(value_id(field.key), "value"),
        )  # fmt: skip
    app.clientside_callback(
        ADDRESS,
        Output("address", "data"),
        Input("query", "data"),
        Input("pins", "data"),
        Input("ask", "value"),
    )
    app.clientside_callback(ASKED, Output("asked", "data"), Input("ask", "value"))
    app.clientside_callback(SCRIPT, Output("gantt-drawn", "data"), Input("gantt-data", "data"))
    _register_load(app, answers)
    _register_compute(app, answers)
    _register_pins(app, answers)
    _register_downloads(app, answers, export)
    _register_own(app, answers)
    if runs is not None:
        register_runs(app, answers, runs)
    app.clientside_callback(CLOSING, Output("closing", "data"), Input("tab", "data"))
    return register_search(app, answers)


class Latest:
    """Which request of a browser tab is its newest: while one is computed, only the newest of those waiting is worth it."""

    def __init__(self) -> None:
        self._newest: dict[str, int] = {}
        self._lock = threading.Lock()

    def ticket(self, tab: str) -> int:
        """A number larger than all before."""
        with self._lock:
            if len(self._newest) > 1000:
                self._newest.clear()
            # By the clock: a tab's requests may be answered in several processes.
            self._newest[tab] = max(self._newest.get(tab, 0) + 1, time.monotonic_ns())
            return self._newest[tab]

    def outdated(self, tab: str, ticket: int) -> bool:
        """Whether a newer request of the tab has come in."""
        return self._newest.get(tab, 0) > ticket


def _control_outputs(**extra: Any) -> list[Output]:
    return [Output(value_id(k), "value", allow_duplicate=True, **extra) for k in _CONTROLS]


def _register_load(app: Dash, answers: Answers) -> None:
    """Address, scenario chosen, reset, restored pin, layout found: each sets all controls."""

    @app.callback(
        Output("base", "value"), Output("more", "value"), Output("pins", "data"), Output("notice", "children"),
        Output("config", "data", allow_duplicate=True), Output("site", "data", allow_duplicate=True), Output("ask", "value"),
        *_control_outputs(), Input("url", "search"), Input("base", "value"), Input("reset", "n_clicks"),
        Input({"type": "restore", "index": ALL}, "n_clicks"), Input({"type": "use", "index": ALL}, "n_clicks"),
        Input({"type": "near", "index": ALL}, "n_clicks"), State("pins", "data"), State("found", "data"), State("near", "data"),
        prevent_initial_call="initial_duplicate",
    )  # fmt: skip
    def load(search: str | None, base: str, *others: Any) -> list[Any]:
        *_, pins, found, near = others
        cause = ctx.triggered_id
        query, keep = f"scenario={base}", True
        if cause in (None, "url"):
            query, keep = (search or "").lstrip("?"), False
        elif isinstance(cause, dict):
            source = {"restore": pins, "use": found, "near": [near]}[cause["type"]]
            if not ctx.triggered[0]["value"] or not 0 <= int(cause["index"]) < len(source):
                return [no_update] * (7 + len(_CONTROLS))
            query = source[int(cause["index"])]
        problem: Any = None
        try:
            state = of_query(query, answers.bases)
            check_words(state, answers.bases)
        except InputError as error:
            state, problem = of_query("", answers.bases), tables.refused(error)
        kept: Any = no_update if keep else pins_of(search or "")
        # What was learned from the user's runs holds for every scenario, the question too.
        own = [no_update] * 3 if keep else [state.config, state.site, ask_of(search or "")]
        own[0] = state.config or own[0]
        return [state.base, "\n".join(state.more), kept, problem, *own, *[state.values.get(k) for k in _CONTROLS]]


def pins_of(search: str) -> list[str]:
    """The pinned configurations in an address."""
    from urllib.parse import parse_qsl

    return [text for key, text in parse_qsl(search.lstrip("?")) if key == "pin"][:MAX_PINS]


def ask_of(search: str) -> str:
    """The question in an address."""
    from urllib.parse import parse_qsl

    found = dict(parse_qsl(search.lstrip("?"))).get("ask", FIRST)
    return found if found in QUESTIONS else FIRST


_RESULTS = (
    ("wrong", "children"), ("results", "className"), ("about", "children"), ("tiles", "children"), ("query", "data"),
    ("gantt-note", "children"), ("gantt-data", "data"), ("answers", "children"), ("waterfall", "children"),
    ("memory", "figure"), ("memory", "style"),
)  # fmt: skip
_HINT = "Shades alternate by micro-batch; drag or + to zoom, double-click or Home to see the whole step. "


def _register_compute(app: Dash, answers: Answers) -> None:
    """The controls' state, simulated: at once, or a first answer and then the whole step."""
    latest = Latest()
    controls = [Input(value_id(k), "value") for k in _CONTROLS]
    results = [Output(*r) for r in _RESULTS]

    @app.callback(
        *results, Output("whole", "data"), Input("base", "value"), Input("more", "value"), Input("config", "data"),
        Input("site", "data"), State("tab", "data"), *controls,
    )  # fmt: skip
    def compute(base: str, more: str | None, config: str | None, site: str | None, tab: str, *values: Any) -> list[Any]:
        ticket = latest.ticket(str(tab))
        state = of_controls(base, dict(zip(_CONTROLS, values, strict=True)), more, config, site)
        try:
            early = None if answers.known(state) else answers.early(state, lambda: latest.outdated(str(tab), ticket))
            if early is not None:
                return [*_shown_early(early), {"query": state.query(answers.bases), "ticket": ticket}]
            answer = answers(state, lambda: latest.outdated(str(tab), ticket))
        except InputError as error:
            return [tables.wrong(error), "body stale", *[no_update] * (len(results) - 2), None]
        return [*([no_update] * len(results) if answer is None else _shown(answer)), None]

    again = [Output(*r, allow_duplicate=True) for r in _RESULTS]

    @app.callback(*again, Input("whole", "data"), State("tab", "data"), prevent_initial_call=True)
    def finish(whole: dict[str, Any] | None, tab: str) -> list[Any]:
        none = [no_update] * len(again)
        if not whole:
            return none
        try:
            state = of_query(str(whole["query"]), answers.bases)
            answer = answers(state, lambda: latest.outdated(str(tab), int(whole["ticket"])))
        except InputError as error:
            return [tables.wrong(error), "body stale", *none[2:]]
        return none if answer is None or latest.outdated(str(tab), int(whole["ticket"])) else _shown(answer)


def _shown(answer: Answer) -> list[Any]:
    """Values of _RESULTS."""
    chart, note = canvas_data(answer.result)
    return [
        None, "body", tables.about(answer), tables.tiles(answer), answer.query, _HINT + note, chart,
        tables.answers(said(answer)), tables.waterfall(answer.result.waterfall(), answer.result.step_time_s),
        *figures.memory(answer.result),
    ]  # fmt: skip


def _shown_early(early: Preview) -> list[Any]:
    """The same of a first answer; the state is taken up with the whole one."""
    chart, _ = canvas_data(early.short)
    few, every = early.microbatches
    note = f"The whole step of {every} micro-batches is being simulated; this is one of {few}."
    return [
        None, "body", "", tables.early_tiles(early), no_update, note, chart, tables.answers(said_early(early)),
        tables.waterfall(early.waterfall, early.step_time_s, "step, about"), *figures.memory(early.short),
    ]  # fmt: skip


def _register_own(app: Dash, answers: Answers) -> None:
    """A dropped model, and the nearest layout that fits."""

    @app.callback(
        Output("config", "data"), Output("dropped", "children"), Output(value_id("model"), "value", allow_duplicate=True),
        Input("drop-model", "contents"), State("drop-model", "filename"), prevent_initial_call=True,
    )  # fmt: skip
    def drop(contents: str | None, name: str | None) -> Any:
        if not contents:
            return [no_update] * 3
        try:
            packed = pack(parse_json(text_of(contents), str(name)))
            model = model_of(packed)
        except SimparError as error:
            return no_update, html.Span(str(error), className="bad"), no_update
        return packed, f"{str(name)[:60]}: {model.get('name', 'a model')}", OWN_MODEL

    @app.callback(Output("nearest", "children"), Output("near", "data"), Input("query", "data"), prevent_initial_call=True)
    def near(query: str | None) -> Any:
        if not query:
            return None, ""
        try:
            answer = _state_of(query, answers)
            if answer.result.fits:
                return None, ""
            found = nearest(answer.state, answers.bases)
        except SimparError as error:
            return str(error), ""
        return tables.nearest_fit(found), found.state.query(answers.bases) if found else ""


def _state_of(query: str | None, answers: Answers) -> Answer:
    """The answer to a query of the page."""
    found = answers(of_query(query or "", answers.bases))
    assert found is not None, "nothing outdates a request of its own"
    return found


def _register_pins(app: Dash, answers: Answers) -> None:
    @app.callback(
        Output("pins", "data", allow_duplicate=True), Input("pin", "n_clicks"), Input({"type": "drop", "index": ALL}, "n_clicks"),
        State("query", "data"), State("pins", "data"), prevent_initial_call=True,
    )  # fmt: skip
    def pin(_pin: Any, _drop: Any, query: str | None, pins: list[str]) -> Any:
        cause = ctx.triggered_id
        if isinstance(cause, dict):
            if not ctx.triggered[0]["value"]:
                return no_update
            return [p for i, p in enumerate(pins) if i != cause["index"]]
        if not query or query in pins:
            return no_update
        return [*pins, query][-MAX_PINS:]

    @app.callback(Output("pinned", "children"), Input("pins", "data"), Input("query", "data"))
    def show(pins: list[str], query: str | None) -> Any:
        if not pins or not query:
            return None
        columns, buttons = [], []
        for index, text in enumerate([query, *pins]):
            columns.append(_column("now: " if not index else "", text, answers))
            buttons.append(_pin_buttons(index - 1) if index else html.Span())
        return tables.side_by_side(columns, buttons)


def _column(prefix: str, query: str, answers: Answers) -> tuple[str, Answer | str]:
    try:
        answer = _state_of(query, answers)
    except SimparError as error:
        return prefix + query[:80], str(error)
    return prefix + tables.title_of(answer.state, answers.bases), answer


def _pin_buttons(index: int) -> html.Div:
    def button(text: str, kind: str) -> html.Button:
        label = {"aria-label": f"{text} pinned configuration {index + 1}"}
        return html.Button(text, id={"type": kind, "index": index}, type="button", **label)

    return html.Div([button("Use", "restore"), button("Remove", "drop")], className="buttons")


def _register_downloads(app: Dash, answers: Answers, export: Callable[[Scenario], str] | None) -> None:
    @app.callback(
        Output("download", "data"), Output("said", "children"), Input("toml", "n_clicks"), Input("html", "n_clicks"),
        Input("flags", "n_clicks"), State("query", "data"), prevent_initial_call=True,
    )  # fmt: skip
    def download(_toml: Any, _html: Any, _flags: Any, query: str | None) -> Any:
        try:
            answer = _state_of(query, answers)
            if ctx.triggered_id == "toml":
                name, text = downloads.file_name(answer, ".toml"), downloads.scenario_toml(answer, answers.bases)
            elif ctx.triggered_id == "html":
                name, text = downloads.file_name(answer, ".html"), downloads.report_html(answer)
            else:
                name, text = downloads.file_name(answer, ".sh"), downloads.launch_flags(answer, export)
        except SimparError as error:
            return no_update, str(error)
        return dcc.send_string(text, name), f"{name} is downloaded."
