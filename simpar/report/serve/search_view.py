"""The search on the page: start, progress, what it found, and using one of them."""

from __future__ import annotations

from typing import Any

from dash import Dash, Input, Output, State, ctx, html, no_update

from simpar.errors import InputError
from simpar.report.serve.answer import Answers
from simpar.report.serve.search_job import Job, Jobs
from simpar.report.serve.state import State as PageState
from simpar.report.serve.state import of_query
from simpar.units import format_bytes, format_seconds

_FREE = "Free: tp, pp, virtual stages, micro-batch, recomputation (none, selective, full), 1F1B or interleaved; all else as set."


def register_search(app: Dash, answers: Answers) -> Jobs:
    """Attach the callbacks of the search; returns what runs for them."""
    jobs = Jobs(answers.bases)

    @app.callback(
        Output("search", "children"), Output("tick", "disabled"), Output("found", "data"), Output("stop", "disabled"),
        Input("start", "n_clicks"), Input("stop", "n_clicks"), Input("tick", "n_intervals"), State("query", "data"),
        State("tab", "data"), prevent_initial_call=True,
    )  # fmt: skip
    def search(_start: Any, _stop: Any, _tick: Any, query: str | None, tab: str) -> Any:
        if ctx.triggered_id == "start":
            try:
                job: Job | None = jobs.start(str(tab), of_query(query or "", answers.bases))
            except InputError as error:
                return html.Div(str(error), className="wrong"), True, no_update, True
        else:
            job = jobs.of(str(tab))
        if job is None:
            return no_update, True, no_update, True
        if ctx.triggered_id == "stop":
            job.stop()
        found = [_query(job.state, best["settings"], answers) for best in job.report.get("best", [])]
        return shown(job), not job.running, found, not job.running

    return jobs


def _query(state: PageState, settings: dict[str, Any], answers: Answers) -> str:
    return PageState(state.base, {**state.values, **settings}, state.more).query(answers.bases)


def shown(job: Job) -> html.Section:
    """Progress and the best layouts so far."""
    report = job.report
    parts: list[Any] = [html.H2("Layout search"), html.P(_FREE, className="soft"), _progress(job)]
    if "error" in report:
        parts.append(html.Div(report["error"], className="wrong"))
    if report.get("best"):
        parts.append(html.Div(_table(report["best"]), className="scroll"))
    elif report.get("done") and "error" not in report:
        parts.append(html.P("No layout of this space can run: " + _counts(report["rejected"]), id="search-none"))
    return html.Section(parts, className="card")


def _progress(job: Job) -> html.Div:
    report = job.report
    if not report:
        return html.Div([html.Progress(**{"aria-label": "search"}), " starting"])
    if "size" not in report:
        return html.Div()
    evaluated = report["evaluated"]
    counts = f"{report['size']:,} layouts; simulated {evaluated.get('simulated', 0)}, " + _counts(report["rejected"])
    counts += f"; {report['seconds']:.1f} s"
    gap = report["gap"]
    if job.running:
        proven = html.Progress(value=f"{1 - gap:.3f}", max="1", **{"aria-label": "search"}) if gap is not None else html.Progress()
        text = f" lower bound {format_seconds(report['bound_s'])}" + ("" if gap is None else f", gap {gap:.1%}") + f", {counts}"
        return html.Div([proven, text])
    word = "Stopped" if job.stopped else "Done"
    sound = all(best.get("fits", True) for best in report["best"])
    proof = "" if job.stopped or gap is None or not sound else ": the best of this space, proven"
    return html.Div(html.Span(f"{word}{proof}. {counts}.", id="search-done"))


def _counts(rejected: dict[str, int]) -> str:
    return ", ".join(f"{n:,} {reason}" for reason, n in rejected.items() if n)


def _memory(item: dict[str, Any]) -> html.Td:
    """Of the fullest rank, once the search is done and the layout simulated."""
    if "fits" not in item:
        return html.Td("")
    text = format_bytes(item["device_bytes"]) + ("" if item["fits"] else ", DOES NOT FIT when simulated")
    return html.Td(text, className="" if item["fits"] else "bad")


def _table(best: list[dict[str, Any]]) -> html.Table:
    heads = ("", "step time", "memory", "layout")
    rows = []
    for index, item in enumerate(best):
        button = html.Button("Use", id={"type": "use", "index": index}, type="button", **{"aria-label": f"Use layout {index + 1}"})
        rows.append(html.Tr([
            html.Td(button), html.Td(format_seconds(item["step_time_s"])), _memory(item), html.Td(item["text"]),
        ]))  # fmt: skip
    return html.Table([html.Thead(html.Tr([html.Th(h) for h in heads])), html.Tbody(rows)])
