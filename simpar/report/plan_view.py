"""`simpar plan` on the terminal: what a run comes to, where its time goes, answers to questions, assumptions."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from simpar.planning.answer import Answer, Quantiles
from simpar.planning.questions import PlanOptions, PlanReport, ask
from simpar.planning.simulated_steps import SimulatedSteps
from simpar.planning.steps import Search, StepModel
from simpar.planning.study import Study
from simpar.planning.to_json import report_json
from simpar.units import format_seconds

HEADLINES = (
    ("days", "days", "{:,.2f}"),
    ("gpu_hours", "GPU-hours", "{:,.0f}"),
    ("reserved_gpu_hours", "GPU-hours with spares", "{:,.0f}"),
    ("goodput", "goodput", "{:.1%}"),
    ("effective_training_time_ratio", "effective training time", "{:.1%}"),
    ("cost_usd", "cost, US$", "{:,.0f}"),
    ("usd_per_million_tokens", "US$ per million tokens", "{:,.4f}"),
    ("energy_kwh", "energy, kWh", "{:,.0f}"),
    ("carbon_kg", "CO2, kg", "{:,.0f}"),
)
"""(field of the answer, title, format)."""


def run(
    plan_path: str | Path, options: PlanOptions, steps: StepModel | None = None, console: Console | None = None
) -> int:
    """Answer a plan file and print, write or both; returns the exit code (0 answered, 1 nothing feasible).

    Args:
        steps: where step times come from; none = the simulator, with layouts searched where the plan or the question wants it.

    Raises:
        InputError: the plan or an option breaks a rule.
    """
    report = ask(plan_path, options, steps or SimulatedSteps(_search(options)))
    if options.html is not None:
        from simpar.report.plan_html import write_html

        write_html(report, options.html)
    console = console or Console()
    if options.json:
        console.file.write(json.dumps(report_json(report), indent=1) + "\n")
    else:
        console.print(render(report))
        if options.html is not None:
            console.print(f"written: {options.html}", highlight=False)
    return report.exit_code


def _search(options: PlanOptions) -> Search:
    """The layout search, loaded when the first layout is to be searched."""

    @cache
    def loaded() -> Search:
        from simpar.report.plan_search import LayoutSearch

        # Repetitions and layouts have stores of their own, side by side.
        store = options.store and options.store.with_suffix(f".layouts{options.store.suffix}")
        return LayoutSearch(store=store, say=Progress())

    return lambda scenario: loaded()(scenario)


class Progress:
    """The searches of layouts on standard error: a line that changes on a terminal, the last word of each anywhere."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)

    def __call__(self, text: str, last: bool) -> None:
        """Show `text`."""
        width = self._console.width - 1
        if self._console.is_terminal:
            self._console.print(text[:width].ljust(width), end="\n" if last else "\r", markup=False)
        elif last:
            self._console.print(text, markup=False, soft_wrap=True)


def render(report: PlanReport) -> RenderableType:
    """The report as tables."""
    answer = report.answer
    parts: list[RenderableType] = [Text(answer.name, style="bold"), *_verdict(answer)]
    if answer.days is not None:
        parts += [_headline(answer), _ledger(answer)]
    if answer.closed_forms:
        parts.append(_closed_forms(answer))
    if report.published:
        parts.append(_published(report))
    parts += [_study(study) for study in report.studies]
    if report.tornado is not None:
        parts.append(_tornado(report))
    parts.append(_assumptions(answer))
    return Group(*(part for index, part in enumerate(parts) for part in ([Text(""), part] if index else [part])))


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    return table


def _cells(quantiles: Quantiles | None, form: str) -> tuple[str, str, str]:
    if quantiles is None:
        return "", "", ""
    return form.format(quantiles.p10), form.format(quantiles.p50), form.format(quantiles.p90)


def _verdict(answer: Answer) -> list[RenderableType]:
    lines: list[RenderableType] = []
    if answer.deadline_probability is not None:
        lines.append(Text(f"deadline met with probability {answer.deadline_probability:.0%}"))
    if not answer.feasible:
        lines.append(Text("NOT FEASIBLE", style="bold red"))
    lines += [Text(f"binds: {reason}", style="red" if not answer.feasible else "yellow") for reason in answer.binding]
    return lines


def _headline(answer: Answer) -> Table:
    simulation = answer.simulation
    title = f"{simulation.repetitions} simulated runs, seed {simulation.seed}"
    table = _table(title, "", "p10", "p50", "p90")
    for name, label, form in HEADLINES:
        quantiles = getattr(answer, name)
        if quantiles is not None:
            table.add_row(label, *_cells(quantiles, form))
    if len(answer.phase_days) > 1:
        for phase, quantiles in answer.phase_days.items():
            table.add_row(f"  days of {phase}", *_cells(quantiles, "{:,.2f}"))
    return table


def _ledger(answer: Answer) -> Table:
    table = _table("Lost time, hours", "cause", "p10", "p50", "p90", "share of days (p50)")
    wall = answer.days.p50 * 24.0 if answer.days else 1.0
    for cause, quantiles in answer.lost_time_s.items():
        if quantiles.p90 > 0:
            hours = Quantiles(quantiles.p10 / 3600, quantiles.p50 / 3600, quantiles.p90 / 3600)
            table.add_row(cause.replace("_", " "), *_cells(hours, "{:,.2f}"), f"{hours.p50 / wall:.2%}")
    for name, quantiles in answer.failures.items():
        table.add_row(Text(f"failures of {name} (count)", style="dim"), *_cells(quantiles, "{:,.0f}"), "")
    return table


def _closed_forms(answer: Answer) -> Table:
    table = _table("Closed forms (no shortage of spares, no slow nodes, no maintenance)", "", "")
    for name, value in answer.closed_forms.items():
        text = format_seconds(value) if name.endswith("_s") else f"{value:.4g}"
        table.add_row(name.removesuffix("_s").replace("_", " "), text)
    return table


def _published(report: PlanReport) -> Table:
    table = _table("Published figures (never inputs)", "metric", "published", "predicted", "error", "holds", "source")
    for c in report.published:
        predicted = "" if c.predicted is None else f"{c.predicted:,.4g}"
        error = "" if c.error is None else f"{c.error:+.1%}"
        table.add_row(c.metric, f"{c.published:,.4g}", predicted, error, "yes" if c.holds else "NO", c.source)
    return table


def _study(study: Study) -> RenderableType:
    table = _table(f"{study.kind}: {study.question}", "", "days", "goodput", "cost, US$", "MFU", "layout", "binds")
    for index, point in enumerate(study.points):
        answer = point.answer
        table.add_row(
            point.label,
            f"{answer.days.p50:,.2f}" if answer.days else "",
            f"{answer.goodput.p50:.1%}" if answer.goodput else "",
            f"{answer.cost_usd.p50:,.0f}" if answer.cost_usd else "",
            f"{point.mfu:.1%}" if point.mfu is not None else "",
            point.layout,
            "; ".join((*answer.binding, point.note) if point.note else answer.binding),
            style="bold" if index == study.chosen else None,
        )
    return Group(table, Text(f"-> {study.conclusion}", style="bold"))


def _tornado(report: PlanReport) -> Table:
    title = "Sensitivity: medians with one assumption pushed to its ends"
    table = _table(title, "assumption", "ends", "days", "cost, US$")
    tornado = report.tornado
    if tornado is None:
        return table
    for swing in tornado.swings:
        days = " to ".join("never" if d is None else f"{d:,.2f}" for d in swing.days)
        cost = " to ".join("" if c is None else f"{c:,.0f}" for c in swing.cost_usd)
        ends = f"x{swing.low_factor:g} to x{swing.high_factor:g}"
        table.add_row(swing.name, ends, days, "" if cost == " to " else cost)
    return table


def _assumptions(answer: Answer) -> Table:
    table = _table("What this rests on", "number", "value", "kind", "source")
    table.columns[1].justify = table.columns[2].justify = table.columns[3].justify = "left"
    for assumption in answer.assumptions:
        style = "yellow" if assumption.kind == "assumed" else None
        table.add_row(assumption.name, assumption.value, assumption.kind, assumption.source, style=style)
    return table
