"""`simpar plan` on the terminal: what a run comes to, where its time goes, answers to questions, assumptions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from simpar.planning.answer import Answer
from simpar.planning.questions import PlanOptions, PlanReport, ask
from simpar.planning.steps import StepModel
from simpar.planning.study import Study
from simpar.planning.to_json import report_json
from simpar.report import plan_tables as plan

INTERRUPTED: Final = 130


def run(plan_path: str | Path, options: PlanOptions, steps: StepModel, console: Console | None = None) -> int:
    """Answer a plan file and print, write or both; returns the exit code (0 answered, 1 nothing feasible, 130 interrupted).

    Args:
        steps: where step times come from.

    Raises:
        InputError: the plan or an option breaks a rule.
    """
    try:
        report = ask(plan_path, options, steps)
    except KeyboardInterrupt:
        kept = "nothing is kept; --store FILE would keep what is finished"
        if options.store is not None:
            kept = f"what was finished is kept: the same command with --store {options.store} --resume goes on"
        Console(stderr=True, highlight=False).print(f"simpar: interrupted; {kept}", markup=False, soft_wrap=True)
        return INTERRUPTED
    if options.html is not None:
        from simpar.output import write_page
        from simpar.report.plan_html import plan_page

        write_page(options.html, plan_page(report))
    console = console or Console()
    if options.json:
        console.file.write(json.dumps(report_json(report), indent=1) + "\n")
    else:
        console.print(render(report))
        if options.html is not None:
            console.print(f"written: {options.html}", highlight=False)
    return report.exit_code


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
        parts += [plan.headline_table(answer).rich(plan.runs_title(answer)), _ledger(answer)]
    titled = (
        (plan.STORAGE_TITLE, plan.storage_table(answer)), (plan.CLOSED_FORMS_TITLE, plan.closed_forms_table(answer)),
        (plan.PUBLISHED_TITLE, plan.published_table(report)),
    )  # fmt: skip
    parts += [table.rich(title) for title, table in titled if table.rows]
    parts += [_study(study) for study in report.studies]
    if report.tornado is not None:
        title = "Sensitivity: medians with one assumption pushed to its ends"
        parts.append(plan.tornado_table(report.tornado).rich(title))
    parts.append(_assumptions(answer))
    return Group(*(part for index, part in enumerate(parts) for part in ([Text(""), part] if index else [part])))


def _verdict(answer: Answer) -> list[RenderableType]:
    lines: list[RenderableType] = []
    if answer.deadline_probability is not None:
        lines.append(Text(f"deadline met with probability {answer.deadline_probability:.0%}"))
    if not answer.feasible:
        lines.append(Text("NOT FEASIBLE", style="bold red"))
    lines += [Text(f"warning: {reason}", style="yellow") for reason in answer.warnings]
    lines += [Text(f"binds: {reason}", style="red" if not answer.feasible else "yellow") for reason in answer.binding]
    return lines


def _ledger(answer: Answer) -> Table:
    table = plan.ledger_table(answer).rich("Lost time, hours")
    for name, *counts in plan.failure_rows(answer):
        table.add_row(Text(name, style="dim"), *counts)
    return table


def _study(study: Study) -> RenderableType:
    table = plan.study_table(study).rich(f"{study.kind}: {study.question}")
    if study.chosen is not None:
        table.rows[study.chosen].style = "bold"
    return Group(table, Text(f"-> {study.conclusion}", style="bold"))


def _assumptions(answer: Answer) -> Table:
    table = plan.assumption_table(answer).rich("What this rests on")
    for row, assumption in zip(table.rows, answer.assumptions, strict=True):
        row.style = "yellow" if assumption.kind == "assumed" else None
    return table
