"""`simpar plan`: the plan's answer and the questions asked about it, as one report."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from simpar.errors import InputError
from simpar.planning.answer import DEFAULT_REPETITIONS, Answer, Simulation, answer
from simpar.planning.changes import assigned
from simpar.planning.compare import compare_hardware, marginal, sweep
from simpar.planning.published import Comparison, compare_published
from simpar.planning.sensitivity import Tornado, sensitivity
from simpar.planning.solve import SOLVERS, Solver
from simpar.planning.steps import StepModel
from simpar.planning.study import Study
from simpar.registry import unknown
from simpar.specs.planfile import PlanFile, make_plan, read_plan_table
from simpar.specs.scenario import as_published
from simpar.specs.site import read_site


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """The command line of `simpar plan`.

    Attributes:
        solve: nodes, checkpoint-interval or spares.
        deadline: replaces the plan's ("60d").
        compare: hardware profiles, separated by commas.
        sweep: "field=128..2048x2" or "field=1,2,4,7", each one.
        keep_layout: numbers of nodes, comparisons, sweeps and marginal values keep the layouts of simulated phases; otherwise
            every point has its layouts searched again, which is what a planner would do with other machines.
        overrides: --set, such as "cluster.num_nodes=256".
        json, html: what comes out; without them a table.
        store, resume: keep finished repetitions in SQLite, and take them from there.
        site: what was learned from the cluster's own runs, for every simulated phase.
    """

    solve: str | None = None
    deadline: str | None = None
    compare: str | None = None
    sweep: tuple[str, ...] = ()
    sensitivity: bool = False
    marginal: bool = False
    keep_layout: bool = False
    overrides: tuple[str, ...] = ()
    json: bool = False
    html: Path | None = None
    seed: int = 0
    repetitions: int = DEFAULT_REPETITIONS
    store: Path | None = None
    resume: bool = False
    site: Path | None = None


@dataclass(frozen=True, slots=True)
class PlanReport:
    """Everything `simpar plan` found out."""

    answer: Answer
    published: tuple[Comparison, ...]
    studies: tuple[Study, ...] = ()
    tornado: Tornado | None = None

    @property
    def plan(self) -> PlanFile:
        """The plan itself."""
        return self.answer.resolved.plan

    @property
    def exit_code(self) -> int:
        """0 when the question has an answer (the plan itself, when nothing else is asked); 1 otherwise."""
        answered = all(_answered(study) for study in self.studies) if self.studies else self.answer.feasible
        return 0 if answered and all(comparison.holds for comparison in self.published) else 1


def _answered(study: Study) -> bool:
    if study.kind == "solve checkpoint-interval" and not study.points:
        return bool(study.numbers) or "not needed" in study.conclusion
    if study.kind.startswith("solve"):
        return study.chosen is not None
    return any(point.answer.days is not None for point in study.points)


def ask(source: str | Path | Mapping[str, Any], options: PlanOptions, steps: StepModel) -> PlanReport:
    """Read the plan (a file, a shipped plan's name or its raw table), answer it, then every question of `options`.

    Raises:
        InputError: a plan, an option or a scenario that breaks a rule.
    """
    if options.repetitions < 1:
        raise InputError(f"--repetitions {options.repetitions}: at least 1 is needed")
    if options.seed < 0:
        raise InputError(f"--seed {options.seed}: must not be negative")
    if options.resume and options.store is None:
        raise InputError("--resume needs --store FILE, where the finished repetitions are")
    if options.solve is not None and options.solve not in SOLVERS:
        raise unknown("question for --solve", options.solve, list(SOLVERS))
    table = dict(source) if isinstance(source, Mapping) else read_plan_table(source)
    changed = table
    for assignment in options.overrides:
        changed = assigned(changed, assignment)
    if options.site is not None:
        changed = at_site(dict(changed), options.site)
    table = as_published(dict(changed), table)
    if options.deadline is not None:
        table["deadline"] = options.deadline
    simulation = Simulation(options.repetitions, options.seed, options.store, options.resume)
    plan = make_plan(table)
    found = answer(plan, steps, simulation)
    studies = _studies(table, options, Solver(table, steps, replace(simulation, store=None)))
    tornado = sensitivity(plan, steps, simulation) if options.sensitivity else None
    return PlanReport(found, compare_published(found), studies, tornado)


def at_site(table: dict[str, Any], site: Path) -> dict[str, Any]:
    """A copy of the raw plan `table` in which every simulated phase runs at `site`.

    Raises:
        InputError: no such site, or no phase of the plan is simulated.
    """
    read_site(site)
    changed = copy.deepcopy(table)
    simulated = [phase for phase in changed.get("phases", []) if phase.get("scenario")]
    if not simulated and changed.get("phases"):
        raise InputError(f"--site {site}: the speeds of this plan's phases are given, none is simulated; a site changes nothing")
    for phase in simulated:
        phase["set"] = [*phase.get("set", ()), f"site={json.dumps(str(site.resolve()))}"]
    return changed


def with_searched_layouts(table: dict[str, Any]) -> dict[str, Any]:
    """A copy of the raw plan `table` in which the layout of every simulated phase is searched."""
    changed = copy.deepcopy(table)
    for phase in changed.get("phases", []):
        if phase.get("scenario"):
            phase["layout"] = "search"
    return changed


def _studies(table: dict[str, Any], options: PlanOptions, solver: Solver) -> tuple[Study, ...]:
    studies: list[Study] = []
    searching = solver if options.keep_layout else replace(solver, table=with_searched_layouts(table))
    if options.solve is not None:
        # Another number of nodes wants another layout; intervals and spares are asked of the plan's own cluster.
        studies.append(SOLVERS[options.solve](searching if options.solve == "nodes" else solver))
    solver = searching
    if options.compare is not None:
        names = [name.strip() for name in options.compare.split(",") if name.strip()]
        if not names:
            raise InputError("--compare: name hardware profiles, such as dgx-h100,dgx-h200")
        studies.append(compare_hardware(solver, names))
    studies.extend(sweep(solver, text) for text in options.sweep)
    if options.marginal:
        studies.append(marginal(solver))
    return tuple(studies)
