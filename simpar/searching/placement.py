"""Rank placement: which order of the dimensions over consecutive ranks makes the step fastest on this fabric."""

from __future__ import annotations

from itertools import permutations

from rich.console import Console
from rich.table import Table

from simpar.errors import InputError
from simpar.specs.plan import PlanSpec
from simpar.specs.scenario import Scenario
from simpar.step import simulate
from simpar.topology.mesh import Mesh
from simpar.units import format_seconds

DIMENSIONS = ("tp", "cp", "ep", "dp", "pp")


def placements(plan: PlanSpec, world_size: int) -> list[str]:
    """Orders that put at least one group elsewhere, each once; dimensions of degree 1 keep their usual place."""
    degrees = {"tp": plan.tp, "cp": plan.cp, "ep": plan.ep, "dp": Mesh.of(plan, world_size).dp, "pp": plan.pp}
    wide = [d for d in DIMENSIONS if degrees[d] > 1]
    narrow = [d for d in DIMENSIONS if degrees[d] == 1]
    found = []
    for order in permutations(wide):
        text = "-".join((*order[:-1], *narrow, order[-1])) if order else "-".join(DIMENSIONS)
        try:
            Mesh.of(plan.model_copy(update={"placement": text}), world_size)
        except InputError:
            # Dense and expert layers would disagree about the pipeline ranks.
            continue
        found.append(text)
    return found


def ranked_placements(scenario: Scenario) -> list[tuple[float, str]]:
    """(step seconds, order) of every placement, fastest first; the scenario's own effects apply (contention, faults)."""
    found = []
    for text in placements(scenario.plan, scenario.world_size):
        plan = scenario.plan.model_copy(update={"placement": text})
        found.append((simulate(scenario.model_copy(update={"plan": plan}), detail="stage").step_time_s, text))
    return sorted(found)


def best_placement(scenario: Scenario) -> Scenario:
    """The scenario with its fastest placement; prints how the others do on stderr."""
    ranked = ranked_placements(scenario)
    table = Table("placement", "step time", box=None, title="rank placement, fastest first", title_justify="left")
    for seconds, text in ranked[:8]:
        table.add_row(text, format_seconds(seconds))
    Console(stderr=True).print(table)
    plan = scenario.plan.model_copy(update={"placement": ranked[0][1]})
    return scenario if plan == scenario.plan else scenario.model_copy(update={"plan": plan, "published": ()})
