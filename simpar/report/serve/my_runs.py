"""The user's own runs on the page: a log is dropped, measured stands beside predicted, and every answer can follow from it."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from dash import Dash, Input, Output, State, ctx, dcc, html, no_update

from simpar import boundary
from simpar.errors import InputError, SimparError
from simpar.report.serve.answer import Answers
from simpar.report.serve.attached import pack
from simpar.report.serve.state import of_query
from simpar.units import format_bytes, format_seconds

MOST_ROWS = 20
"""Runs that a tab keeps to learn from."""


class OwnRun(Protocol):
    """What reading a log gives."""

    @property
    def rows(self) -> Sequence[Mapping[str, Any]]:
        """The runs read so far."""

    @property
    def site(self) -> Any:
        """What the runs say about the cluster."""

    def to_dict(self) -> dict[str, Any]:
        """Runs, causes, factors, notes."""


ReadRuns = Callable[..., OwnRun]
"""(text, scenario table, earlier=rows, name=) -> OwnRun; raises InputError for what is no log."""


def panel(*, can_read: bool) -> html.Div:
    """The question about the user's own runs."""
    if not can_read:
        return html.Div(html.P("This page was started without a reader of logs."), className="asked asked-mine")
    return html.Div([
        html.P([
            "Set the page to the run as it was configured, then drop its log: Megatron-LM, NeMo, torchtitan, DeepSpeed, nanotron, "
            "Hugging Face Trainer, or the JSON lines of ", html.Code("simpar run read"), ". The log stays on this machine.",
        ]),
        dcc.Upload(html.Button("Drop a log here, or choose one", type="button"), id="drop-log", max_size=5 * 2**20),
        html.Div(id="mine", **{"aria-live": "polite"}),
        html.Div([
            html.Button("Use it for every answer", id="site-on", type="button", className="main", disabled=True),
            html.Button("Forget my runs", id="site-off", type="button"),
        ], className="buttons"),
    ], className="asked asked-mine")  # fmt: skip


def register_runs(app: Dash, answers: Answers, runs: ReadRuns) -> None:
    """Attach the callbacks of the user's own runs."""

    @app.callback(
        Output("mine", "children"), Output("rows", "data"), Output("learned", "data"), Output("site-on", "disabled"),
        Input("drop-log", "contents"), Input("site-off", "n_clicks"), State("drop-log", "filename"), State("rows", "data"),
        State("query", "data"), prevent_initial_call=True,
    )  # fmt: skip
    def read(contents: str | None, _off: Any, name: str | None, rows: list[dict[str, Any]], query: str | None) -> Any:
        if ctx.triggered_id == "site-off":
            return None, [], "", True
        if not contents:
            return [no_update] * 4
        try:
            table = of_query(query or "", answers.bases).table(answers.bases)
            # Measured against what simpar predicts without the runs, also when their site is in use.
            text = text_of(contents)
            check_rows(text)
            found = runs(text, {**table, "site": None}, earlier=[_bare(row) for row in rows], name=str(name or "log")[:80])
            packed = pack(found.site.model_dump(mode="json", exclude_defaults=True)) if found.site.learned else ""
        except SimparError as error:
            return html.Div(str(error), className="wrong"), no_update, no_update, no_update
        return shown(found.to_dict()), [_bare(row) for row in found.rows][-MOST_ROWS:], packed, not packed

    @app.callback(
        Output("site", "data", allow_duplicate=True), Input("site-on", "n_clicks"), Input("site-off", "n_clicks"),
        State("learned", "data"), prevent_initial_call=True,
    )  # fmt: skip
    def use(_on: Any, _off: Any, learned: str) -> Any:
        return learned if ctx.triggered_id == "site-on" else ""


def text_of(contents: str) -> str:
    """The text of an uploaded file, "data:...;base64,...".

    Raises:
        InputError: it is none.
    """
    try:
        return boundary.text_of(base64.b64decode(contents.partition(",")[2], validate=True), "")
    except (binascii.Error, InputError):
        raise InputError("the file is not text; drop the log itself, not an archive") from None


def check_rows(text: str) -> None:
    """Refuse runs that name a scenario of their own: it could be any file of this machine.

    Raises:
        InputError: a line does.
    """
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("{") and '"scenario"' in line:
            raise InputError(
                f"line {number}: on this page a run is one of the settings shown; leave `scenario` out, or use simpar adapt"
            )


def _bare(row: Mapping[str, Any]) -> dict[str, Any]:
    """A run as the browser keeps it: its scenario is that of the page."""
    return {key: value for key, value in row.items() if key != "scenario"}


def shown(found: Mapping[str, Any]) -> list[Any]:
    """Measured against predicted, causes, factors."""
    parts: list[Any] = [_measured(found["runs"])]
    for run in found["runs"]:
        parts += _causes(run)
    parts += _factors(found["site"])
    parts += [html.P(text, className="soft") for text in found["notes"]]
    return parts


def _measured(runs: Sequence[Mapping[str, Any]]) -> html.Div:
    heads = ("run", "measured", "predicted", "80 % interval", "error", "with your runs", "error")
    rows = []
    for run in runs:
        if run.get("skipped"):
            rows.append(html.Tr([html.Td(run["id"]), html.Td(run["skipped"], colSpan=len(heads) - 1)]))
            continue
        inside = run["low_s"] <= run["measured_s"] <= run["high_s"]
        interval = f"{format_seconds(run['low_s'])} to {format_seconds(run['high_s'])}"
        after = run["with_site_s"]
        cells = [
            run["id"], format_seconds(run["measured_s"]), format_seconds(run["predicted_s"]),
            interval if inside else f"{interval}, outside", f"{run['error']:+.1%}",
            *(("", "") if after is None else (format_seconds(after), f"{run['with_site_error']:+.1%}")),
        ]  # fmt: skip
        rows.append(html.Tr([html.Td(cell, className="bad" if cell.endswith("outside") else "") for cell in cells]))
        if memory := run["memory"]:
            text = f"peak memory {format_bytes(memory['measured_bytes'])}, predicted {format_bytes(memory['predicted_bytes'])}"
            rows.append(html.Tr([html.Td(""), html.Td(text, colSpan=len(heads) - 1)]))
    table = html.Table([html.Thead(html.Tr([html.Th(head) for head in heads])), html.Tbody(rows)])
    return html.Div(table, className="scroll", id="mine-runs", tabIndex=0)


def _causes(run: Mapping[str, Any]) -> list[Any]:
    if not run["causes"]:
        return []
    rows = []
    for cause in run["causes"][:4]:
        gain = f", up to {format_seconds(cause['extra_s'])} of the step" if cause.get("extra_s") else ""
        rows.append(html.Li([html.B(f"{cause['probability']:.0%} {cause['cause']}"), f"{gain}. Next check: {cause['check']}"]))
    told = [html.Li(f"{d['field']}: the scenario says {d['scenario']}, the log says {d['run']}") for d in run["differs"]]
    return [html.H3(f"Why {run['id']} differs"), html.Ul([*told, *rows])]


def _factors(site: Mapping[str, Any]) -> list[Any]:
    rows = [
        html.Li(f"{name} takes x {found['value']:.3f} of what published runs say (80 %: {found['low']:.2f} to {found['high']:.2f})")
        for name, found in site["factors"].items()
    ]
    kinds = [html.Li(f"all of {name}: x {value:.3f}") for name, value in site["kinds"].items()]
    return [html.H3("What your runs say about your cluster"), html.Ul([*rows, *kinds], id="mine-factors")] if rows else []
