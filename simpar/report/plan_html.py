"""`simpar plan --html`: one self-contained page with timeline, losses, time and cost curves, tornado, assumptions."""

from __future__ import annotations

from dataclasses import replace
from html import escape

from simpar.planning.answer import Answer
from simpar.planning.questions import PlanReport
from simpar.planning.study import Study
from simpar.report import plan_figures as figures
from simpar.report import plan_tables as plan
from simpar.report.page import Cards, tiles

_TILES = (
    ("days", "days", ""), ("gpu_hours", "GPU-hours", ""), ("goodput", "goodput", "%"), ("cost_usd", "cost", "US$"),
    ("energy_kwh", "energy", "kWh"), ("carbon_kg", "CO2", "kg"),
)  # fmt: skip
"""(field of the answer, title, unit)."""


def plan_page(report: PlanReport) -> str:
    """The page as HTML text."""
    answer = report.answer
    cards = Cards(_head(report))
    if answer.days is not None:
        _numbers(cards, answer)
    for index, study in enumerate(report.studies):
        _study(cards, study, f"study-{index}")
    if report.tornado is not None:
        note = f"Medians with one assumption at its low or high end; as planned {report.tornado.base_days or 0.0:,.4g} days."
        cards.draw("Which assumption moves the answer most", figures.tornado(report.tornado), "half", note)
        cards.tabulate("The same in numbers", plan.tornado_table(report.tornado), "half")
    cards.tabulate(plan.PUBLISHED_TITLE, plan.published_table(report))
    cards.tabulate(plan.CLOSED_FORMS_TITLE, plan.closed_forms_table(answer), "half")
    cards.tabulate(plan.STORAGE_TITLE, plan.storage_table(answer), "half")
    note = 'Numbers of the kind "assumed" are nobody\'s measurement: replace them by your own.'
    cards.tabulate("What this rests on", plan.assumption_table(answer), "", note)
    return cards.html(answer.name)


def _head(report: PlanReport) -> str:
    """Name, verdict and headline numbers."""
    answer = report.answer
    parts = [f"<h1>{escape(answer.name)}</h1><p>{escape(report.plan.description)}</p>"]
    if not answer.feasible:
        parts.append("<p class=warn><b>NOT FEASIBLE</b></p>")
    parts += [f"<p class=warn>warning: {escape(reason)}</p>" for reason in answer.warnings]
    parts += [f"<p class=warn>binds: {escape(reason)}</p>" for reason in answer.binding]
    shown = []
    for name, title, unit in _TILES:
        found = getattr(answer, name)
        if found is not None:
            low, middle, high = (_short(value, unit) for value in (found.p10, found.p50, found.p90))
            shown.append((title, f"{middle} {unit}" if unit not in ("", "%") else middle, f"80 %: {low} to {high}"))
    if answer.deadline_probability is not None:
        days = (report.plan.deadline or 0.0) / figures.DAY_S
        chance = f"{answer.deadline_probability:.0%} of the repetitions end within the deadline of {days:,.4g} days"
        parts.append(f"<p>{chance}</p>")
    return "".join([*parts, tiles(shown)])


def _short(value: float, unit: str) -> str:
    """A number for a tile."""
    if unit == "%":
        return f"{value:.1%}"
    scale, name = next(((scale, name) for scale, name in ((1e9, " bn"), (1e6, " M")) if abs(value) >= scale), (1.0, ""))
    return f"{value / scale:,.4g}{name}" if abs(value) < 1e3 or name else f"{value:,.0f}"


def _numbers(cards: Cards, answer: Answer) -> None:
    """The run itself: timelines, curves, losses."""
    sample = answer.sample
    if sample is not None:
        text = (
            f"The repetition of median length: {sample.checkpoints:,} checkpoints, {sum(sample.failures.values()):,} failures. "
            "Hours in which nothing is trained; work that is lost and done again is in the table of lost time."
        )
        cards.draw("Timeline of one run", figures.whole_run(sample), "", text)
        text = f"The first {figures.SHOWN_FAILURES} failures of the same run at most; drag to move, the signs at the right zoom. "
        cards.draw("Incident by incident", figures.timeline(answer, sample), "", text + "Every few of the checkpoints are drawn.")
        cards.draw("Progress of the same run", figures.progress(answer, sample), "half")
    cards.draw("Lost time by cause", figures.ledger(answer), "half", "Median of all repetitions; whiskers p10 to p90.")
    deadline = answer.resolved.plan.deadline
    days = figures.chance("chance-days", answer.all_days, "days", None if deadline is None else deadline / figures.DAY_S)
    cards.draw("How long it may take", days, "half", "Share of the repetitions that are done by then.")
    dear = figures.chance("chance-cost", tuple(usd / 1e6 for usd in answer.all_costs_usd), "million US$")
    cards.draw("What it may cost", dear, "half", "Share of the repetitions that cost no more.")
    cards.tabulate(plan.runs_title(answer), plan.headline_table(answer), "half")
    lost = plan.ledger_table(answer)
    cards.tabulate("Lost time, hours", replace(lost, rows=[*lost.rows, *plan.failure_rows(answer)]), "half")


def _study(cards: Cards, study: Study, name: str) -> None:
    """A question: its curve, then every point with what it rests on."""
    title = f"{study.kind}: {study.question}"
    cards.draw(title, figures.curves(study, name), "", study.conclusion)
    cards.tabulate(f"{study.kind}: every point", plan.study_table(study), "", study.conclusion)
