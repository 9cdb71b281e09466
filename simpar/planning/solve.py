"""Questions with one unknown: how many nodes for a deadline, how often a checkpoint, how many spares."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from simpar.errors import InputError
from simpar.planning.answer import Quantiles, Simulation, closed_forms
from simpar.planning.changes import with_value
from simpar.planning.closed_forms import DAY_S, poisson_tail, spares_for
from simpar.planning.resolve import resolve
from simpar.planning.speeds import phase_scenario
from simpar.planning.steps import StepModel
from simpar.planning.study import Point, Study, try_point
from simpar.specs.planfile import Phase, PlanFile, make_plan
from simpar.units import format_seconds

SEARCH_REPETITIONS = 50
MOST_NODES = 65536
MOST_LARGER = 20
"""Sizes tried with all repetitions, upwards from the one that the search found."""


@dataclass(frozen=True, slots=True)
class Solver:
    """A raw plan table, and what answers its variants."""

    table: dict[str, Any]
    steps: StepModel
    simulation: Simulation

    def point(self, label: str, values: dict[str, object], note: str = "", *, quick: bool = True) -> Point:
        """The plan with `values` changed; `quick` points take fewer repetitions and no store."""
        table = self.table
        for path, value in values.items():
            table = with_value(table, path, value)
        simulation = replace(self.simulation, store=None)
        if quick:
            simulation = replace(simulation, repetitions=min(SEARCH_REPETITIONS, simulation.repetitions))
        return try_point(table, self.steps, simulation, label, values, note)


def solve_nodes(solver: Solver) -> Study:
    """The fewest nodes that meet the plan's deadline with its confidence.

    Raises:
        InputError: the plan has no deadline.
    """
    plan = make_plan(solver.table)
    if plan.deadline is None:
        raise InputError(f"{plan.file}: --solve nodes needs a deadline: give deadline in the plan or --deadline 60d")
    sizes = node_counts(plan)
    tried: dict[int, Point] = {}

    def enough(point: Point) -> bool:
        return point.answer.feasible and (point.answer.deadline_probability or 0.0) >= plan.confidence

    def meets(index: int) -> bool:
        nodes = sizes[index]
        if nodes not in tried:
            tried[nodes] = solver.point(f"{nodes} nodes", {"cluster.num_nodes": nodes})
        return enough(tried[nodes])

    found = _first(meets, sizes, _start(plan, sizes))
    # All repetitions may say otherwise than the few of the search did: then the next larger sizes are asked.
    for nodes in () if found is None else sizes[found : found + MOST_LARGER]:
        tried[nodes] = solver.point(f"{nodes} nodes", {"cluster.num_nodes": nodes}, quick=False)
        if enough(tried[nodes]):
            break
    points = tuple(tried[nodes] for nodes in sorted(tried))
    question = f"fewest nodes for {plan.deadline / DAY_S:g} days with {plan.confidence:.0%} probability"
    if found is None or not enough(tried[nodes]):
        return Study("solve nodes", question, points, _no_nodes(points))
    days = tried[nodes].answer.days
    text = f"{nodes} nodes; {days.p50:.4g} days, 90 % within {days.p90:.4g}" if days else f"{nodes} nodes"
    return Study("solve nodes", question, points, text, points.index(tried[nodes]), {"num_nodes": float(nodes)})


def _start(plan: PlanFile, sizes: Sequence[int]) -> int:
    """Index of the plan's own size, or of the closest one."""
    return min(range(len(sizes)), key=lambda i: abs(sizes[i] - plan.cluster.num_nodes))


def _first(meets: Callable[[int], bool], sizes: Sequence[int], start: int) -> int | None:
    """The first index that meets the deadline, by doubling away from `start` and then halving the interval.

    Sizes that cannot run count as too small, which is right where divisibility or memory keeps small ones out.
    """
    last = len(sizes) - 1
    if meets(start):
        low, high, stride = start, start, 1
        while low > 0 and meets(low):
            high, low, stride = low, max(0, low - stride), stride * 2
        if meets(low):
            return low
    else:
        low, high, stride = start, min(last, start + 1), 2
        while not meets(high):
            if high == last:
                return None
            low, high, stride = high, min(last, high + stride), stride * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if meets(middle) else (middle, high)
    return high


def _no_nodes(points: Sequence[Point]) -> str:
    ran = [point for point in points if point.answer.days is not None]
    if not ran:
        reasons = dict.fromkeys(reason for point in points for reason in point.answer.binding)
        return f"no cluster size runs: {'; '.join(list(reasons)[:3])}"
    best = min(ran, key=lambda point: point.answer.days.p90 if point.answer.days else math.inf)
    days = best.answer.days
    binds = "; ".join(best.answer.binding)
    p90 = days.p90 if days else math.inf
    return f"no number of nodes meets it; the fastest is {best.label} with {p90:.4g} days (p90). {binds}"


def node_counts(plan: PlanFile) -> list[int]:
    """Cluster sizes worth trying, ascending: any where speeds are given, those the layouts divide where simulated."""
    allowed: set[int] | None = None
    for phase in plan.phases:
        if phase.scenario is not None:
            sizes = _searchable() if phase.layout == "search" else _divisible(plan, phase)
            allowed = sizes if allowed is None else allowed & sizes
    if allowed is None:
        return _fine()
    if not allowed:
        raise InputError(f"{plan.file}: no cluster size suits the layouts of all phases")
    return sorted(allowed)


def _fine() -> list[int]:
    """Every count up to 256, then in steps of about half a percent."""
    counts = list(range(1, 257))
    while counts[-1] < MOST_NODES:
        counts.append(counts[-1] + max(1, counts[-1] // 200))
    return counts


def _searchable() -> set[int]:
    """Powers of two, and three times them."""
    return {factor * 2**k for k in range(17) for factor in (1, 3) if factor * 2**k <= MOST_NODES}


def _divisible(plan: PlanFile, phase: Phase) -> set[int]:
    """Sizes on which data parallelism divides the batch and those of its ramp, with the scenario's other degrees."""
    scenario = phase_scenario(plan, phase)
    layout, training = scenario.plan, scenario.training
    model = layout.tp * layout.pp * layout.cp
    batches = (training.global_batch_size, *(step.global_batch_size for step in phase.batch_ramp))
    replicas = math.gcd(*batches) // training.micro_batch_size
    per_node = scenario.hardware.gpus_per_node
    return {
        dp * model // per_node
        for dp in range(1, replicas + 1)
        if replicas % dp == 0 and dp * model % per_node == 0 and dp * model // per_node <= MOST_NODES
    }


def _median(quantiles: Quantiles | None) -> float:
    return math.inf if quantiles is None else quantiles.p50


def solve_checkpoint_interval(solver: Solver) -> Study:
    """The checkpoint interval with the shortest run: simulated on a grid around the exact optimum."""
    plan = make_plan(solver.table)
    resolved = resolve(plan, solver.steps)
    if resolved.run is None:
        return Study("solve checkpoint-interval", "shortest run", (), "; ".join(resolved.binding))
    numbers = closed_forms(resolved)
    exact = numbers["exact_interval_s"]
    if math.isinf(exact):
        return Study("solve checkpoint-interval", "shortest run", (), "nothing fails: checkpoints are not needed", None)
    shortest = resolved.run.stages[0].durable_s - resolved.run.stages[0].stall_s
    least = max(shortest, plan.checkpoints.least_interval)
    grid = sorted({round(max(max(exact, least) * 2.0**k, least), 3) for k in range(-3, 6)})
    points = tuple(solver.point(f"every {value:.4g} s", {"checkpoints.interval": f"{value!r} s"}) for value in grid)
    ran = [i for i, point in enumerate(points) if point.answer.goodput is not None]
    names = ("young_interval_s", "daly_interval_s", "exact_interval_s", "mtti_s")
    numbers = {name: numbers[name] for name in names}
    question = "checkpoint interval of the shortest run"
    if not ran:
        return Study("solve checkpoint-interval", question, points, "; ".join(resolved.binding), None, numbers)
    best = min(ran, key=lambda i: _median(points[i].answer.days))
    text = (
        f"{points[best].label} on the grid; closed forms: Young {numbers['young_interval_s']:.4g} s, "
        f"Daly {numbers['daly_interval_s']:.4g} s, exact {exact:.4g} s"
    )
    if shortest > exact:
        text += f"; storage binds: a save takes {shortest:.4g} s, longer than the optimum"
    elif least > exact:
        text += f"; shorter ones than checkpoints.least_interval, {format_seconds(least)}, were not tried"
    numbers["checkpoint_interval_s"] = grid[best]
    return Study("solve checkpoint-interval", question, points, text, best, numbers)


def solve_spares(solver: Solver) -> Study:
    """The fewest spares that are enough with the plan's confidence (Poisson tail), and what others would mean."""
    plan = make_plan(solver.table)
    resolved = resolve(plan, solver.steps)
    run = resolved.run
    question = f"fewest spares that are enough with {plan.confidence:.0%} probability"
    if run is None:
        return Study("solve spares", question, (), "; ".join(resolved.binding))
    nodes = max(stage.nodes for stage in run.stages)
    mean = nodes * sum(source.rate_per_node_s * source.nodes_hit * source.repair_s for source in run.sources)
    needed = spares_for(mean, plan.confidence)
    counts = sorted({0, needed // 2, max(0, needed - 1), needed, needed + max(1, needed // 4), needed * 2})
    points = tuple(solver.point(f"{k} spares", {"cluster.spares": k}) for k in counts)
    tail = poisson_tail(needed, mean)
    text = f"{needed} spares: {mean:.3g} nodes are in repair on average, more than {needed} with {tail:.2%}"
    biggest = max((source.nodes_hit for source in run.sources), default=0)
    if biggest > 1:
        text += f"; {biggest} nodes can go at once, which the Poisson tail does not see: look at the waiting time below"
    priced = [p for p in points if p.answer.cost_usd is not None]
    if priced:
        cheapest = min(priced, key=lambda p: _median(p.answer.cost_usd))
        text += f"; the cheapest run tried has {cheapest.label}"
    return Study("solve spares", question, points, text, counts.index(needed), {"spares": float(needed), "mean_in_repair": mean})


SOLVERS: dict[str, Callable[[Solver], Study]] = {
    "nodes": solve_nodes,
    "checkpoint-interval": solve_checkpoint_interval,
    "spares": solve_spares,
}
"""Unknown -> its solver."""
