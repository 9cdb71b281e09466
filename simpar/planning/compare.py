"""Variants side by side: a field over a range, hardware profiles, and the value of a little more of something."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from simpar.errors import InputError
from simpar.planning.changes import parse_sweep, scaled_field
from simpar.planning.solve import Solver, node_counts
from simpar.planning.speeds import phase_scenario
from simpar.planning.study import Point, Study
from simpar.specs.hardware import HardwareProfile, load_hardware
from simpar.specs.planfile import PlanFile, make_plan

MOST_TRIES = 4
"""Cluster sizes tried for one that has a layout."""


def sweep(solver: Solver, text: str) -> Study:
    """Every value of one field ("cluster.num_nodes=128..2048x2"), all else the same.

    Raises:
        InputError: not a sweep, an unknown field, or values that no plan can have.
    """
    field, values = parse_sweep(text)
    points = tuple(solver.point(f"{field} = {value}", {field: value}) for value in values)
    return Study("sweep", text, points, _fastest(points), _best(points))


def _best(points: tuple[Point, ...]) -> int | None:
    """The cheapest point that runs; without prices, the one of fewest GPU-hours."""
    ran = [i for i, point in enumerate(points) if point.answer.feasible and point.answer.days is not None]

    def cost(i: int) -> float:
        answer = points[i].answer
        quantity = answer.cost_usd or answer.reserved_gpu_hours
        return quantity.p50 if quantity else float("inf")

    return min(ran, key=cost, default=None)


def _fastest(points: tuple[Point, ...]) -> str:
    ran = [(point.answer.days.p50, point) for point in points if point.answer.days is not None]
    if not ran:
        return "no point runs: " + "; ".join(dict.fromkeys(r for p in points for r in p.answer.binding))
    days, fastest = min(ran, key=lambda item: item[0])
    text = f"fastest: {fastest.label}, {days:.4g} days"
    best = _best(points)
    return text if best is None else f"{text}; cheapest: {points[best].label}"


def compare_hardware(solver: Solver, names: list[str]) -> Study:
    """The plan on other hardware with as many GPUs.

    Raises:
        InputError: an unknown profile, or a plan with given speeds, which say nothing about other hardware.
    """
    plan = make_plan(solver.table)
    given = [phase.name or str(i + 1) for i, phase in enumerate(plan.phases) if phase.scenario is None]
    if given:
        raise InputError(
            f"{plan.file}: --compare: the speed of phase {', '.join(given)} is given, which holds for its own hardware "
            "only; give phases.scenario"
        )
    own = phase_scenario(plan, plan.phases[0]).hardware
    gpus = plan.cluster.num_nodes * own.gpus_per_node
    points = []
    for name, profile in [(name, load_hardware(name)) for name in names]:  # none is searched before all are known
        nodes = max(1, round(gpus / profile.gpus_per_node))
        values: dict[str, object] = {"cluster.hardware": name, "cluster.num_nodes": nodes}
        if plan.cluster.gpus_per_node:
            values["cluster.gpus_per_node"] = profile.gpus_per_node
        points.append(solver.point(name, values, _price_note(plan, name)))
    question = f"the same training on {gpus} GPUs of each kind"
    tried = tuple(points)
    return Study("compare", question, tried, _fastest(tried), _best(tried))


def _price_note(plan: PlanFile, name: str) -> str:
    prices = plan.prices.rent or plan.prices.own
    if prices is None or name in prices.by_hardware:
        return ""
    return f"assumed: the plan has no price for {name}; its general one is used"


@dataclass(frozen=True, slots=True)
class _More:
    """A little more of something."""

    label: str
    values: dict[str, object]


def marginal(solver: Solver) -> Study:
    """What one more, or a little more, of each resource is worth against the plan as it is."""
    plan = make_plan(solver.table)
    improved = (solver.point(more.label, more.values) for more in _improvements(plan, solver))
    tried = (solver.point("as planned", {}), *_more_nodes(plan, solver), *improved)
    return Study("marginal", "the value of a little more", tried, _marginal_text(tried), None)


def _marginal_text(points: tuple[Point, ...]) -> str:
    base = points[0].answer.days
    if base is None:
        return "the plan as it is does not run: " + "; ".join(points[0].answer.binding)
    gains = [(base.p50 - p.answer.days.p50, p.label) for p in points[1:] if p.answer.days is not None]
    saved, label = max(gains, default=(0.0, "nothing"))
    return f"most days are saved by {label}: {saved:.3g} of {base.p50:.4g}"


def _more_nodes(plan: PlanFile, solver: Solver) -> list[Point]:
    """The next larger cluster that runs; where none does, the first one tried."""
    nodes = plan.cluster.num_nodes
    larger = [count for count in node_counts(plan) if count >= nodes * 1.05][:MOST_TRIES]
    points: list[Point] = []
    for count in larger:
        points.append(solver.point(f"{count - nodes} more nodes", {"cluster.num_nodes": count}))
        if points[-1].answer.days is not None:
            return points[-1:]
    return points[:1]


def _improvements(plan: PlanFile, solver: Solver) -> Iterator[_More]:
    yield _More("one more spare", {"cluster.spares": plan.cluster.spares + 1})
    scenarios = [phase for phase in plan.phases if phase.scenario is not None]
    if scenarios:
        yield from _hardware_improvements(plan, phase_scenario(plan, scenarios[0]).hardware)
    for path, factor, label in (
        ("checkpoints.write_bandwidth", 2.0, "twice the storage bandwidth"),
        ("reliability.detection", 0.5, "detection in half the time"),
        ("reliability.restart", 0.5, "restart in half the time"),
        ("reliability.repair", 0.5, "repair in half the time"),
    ):
        changed = scaled_field(plan, solver.table, path, factor)
        if changed is not None:
            yield _More(label, {path: _at(changed, path)})
    rates = _fewer_failures(plan)
    if rates:
        yield _More("a tenth fewer failures", rates)


def _hardware_improvements(plan: PlanFile, profile: HardwareProfile) -> Iterator[_More]:
    if profile.nic.count:
        yield _More("one more NIC per node", {"cluster.fabric.nics_per_node": profile.nic.count + 1})
    if profile.fabric.oversubscription > 1:
        yield _More("a fabric without oversubscription", {"cluster.fabric.oversubscription": 1.0})
    for name, label in (
        ("memory_scale", "a quarter more HBM"),
        ("scale_up_bandwidth_scale", "a quarter faster links in the node"),
        ("nic_bandwidth_scale", "a quarter faster NICs"),
    ):
        yield _More(label, {f"cluster.{name}": 1.25 * getattr(plan.cluster, name)})


def _fewer_failures(plan: PlanFile) -> dict[str, object]:
    values: dict[str, object] = {}
    if "failures" not in plan.reliability.model_fields_set:
        return values
    for i, failure in enumerate(plan.reliability.failures):
        for name in ("rate_per_node_day", "rate_per_gpu_day"):
            rate = getattr(failure, name)
            if rate:
                values[f"reliability.failures.{i}.{name}"] = rate * 0.9
    return values


def _at(table: dict[str, object], path: str) -> object:
    current: object = table
    for part in path.split("."):
        current = current[int(part)] if isinstance(current, list) else current[part]  # type: ignore[index]
    return current
