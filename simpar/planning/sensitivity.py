"""Which assumption moves the answer most: every one is pushed down and up, all else the same, with the same seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from simpar.planning.answer import Answer, Simulation, answer_resolved
from simpar.planning.resolve import Resolved, resolve
from simpar.planning.run_model import RunModel
from simpar.planning.steps import StepModel
from simpar.specs.planfile import PlanFile

REPETITIONS = 40

Change = Callable[[Resolved, float], Resolved]


@dataclass(frozen=True, slots=True)
class Swing:
    """One assumption pushed to both ends. Values are medians; None where the run becomes impossible.

    Attributes:
        name: the assumption; `low_factor` and `high_factor` what it was multiplied by.
        days, cost_usd: (low end, high end).
    """

    name: str
    low_factor: float
    high_factor: float
    days: tuple[float | None, float | None]
    cost_usd: tuple[float | None, float | None]
    why: str

    @property
    def span_days(self) -> float:
        """How far the days move; infinite where an end is impossible."""
        low, high = self.days
        return float("inf") if low is None or high is None else abs(high - low)

    @property
    def span_usd(self) -> float:
        """How far the cost moves."""
        low, high = self.cost_usd
        return 0.0 if low is None or high is None else abs(high - low)


@dataclass(frozen=True, slots=True)
class Tornado:
    """All swings, widest in days first (then in cost)."""

    base_days: float | None
    swings: tuple[Swing, ...]


def _run(change: Callable[[RunModel, float], RunModel]) -> Change:
    def apply(resolved: Resolved, factor: float) -> Resolved:
        return replace(resolved, run=change(resolved.run, factor)) if resolved.run else resolved

    return apply


def _recovery(name: str) -> Change:
    def change(run: RunModel, factor: float) -> RunModel:
        return replace(run, recovery=replace(run.recovery, **{name: getattr(run.recovery, name) * factor}))

    return _run(change)


def _source(name: str) -> Change:
    def change(run: RunModel, factor: float) -> RunModel:
        sources = tuple(replace(source, **{name: getattr(source, name) * factor}) for source in run.sources)
        return replace(run, sources=sources)

    return _run(change)


def _stage(**factors: bool) -> Change:
    def change(run: RunModel, factor: float) -> RunModel:
        stages = tuple(replace(stage, **{name: getattr(stage, name) * factor for name in factors}) for stage in run.stages)
        stages = tuple(replace(s, interval_s=max(s.interval_s, s.durable_s - s.stall_s)) for s in stages)
        return replace(run, stages=stages)

    return _run(change)


def _economics(name: str) -> Change:
    def apply(resolved: Resolved, factor: float) -> Resolved:
        if resolved.economics is None or not getattr(resolved.economics, name):
            return resolved
        value = getattr(resolved.economics, name) * factor
        return replace(resolved, economics=replace(resolved.economics, **{name: value}))

    return apply


def _own(name: str) -> Change:
    def apply(resolved: Resolved, factor: float) -> Resolved:
        economics = resolved.economics
        if economics is None or economics.own is None:
            return resolved
        own = replace(economics.own, **{name: getattr(economics.own, name) * factor})
        return replace(resolved, economics=replace(economics, own=own))

    return apply


def _spares(run: RunModel, factor: float) -> RunModel:
    return replace(run, hot_spares=round(run.hot_spares * factor), cold_spares=round(run.cold_spares * factor))


def _slow(run: RunModel, factor: float) -> RunModel:
    slow = run.slow_nodes
    if slow is None:
        return run
    share = min(1.0, slow.initial_fraction * factor)
    slow = replace(slow, rate_per_node_s=slow.rate_per_node_s * factor, initial_fraction=share)
    return replace(run, slow_nodes=slow)


def _pause(run: RunModel, factor: float) -> RunModel:
    return replace(run, windows=tuple(replace(w, duration_s=w.duration_s * factor) for w in run.windows))


ASSUMPTIONS: tuple[tuple[str, float, float, Change, str], ...] = (
    ("step time", 0.9, 1.1, _run(lambda run, f: run.scaled(f, 1.0)), "10 % either way"),
    ("failure rate", 0.5, 2.0, _source("rate_per_node_s"), "published fleets differ by a factor of 4"),
    ("detection time", 0.5, 2.0, _source("detection_s"), "half to double"),
    ("repair time", 0.5, 2.0, _source("repair_s"), "half to double"),
    ("replacement time", 0.5, 2.0, _recovery("replacement_s"), "half to double"),
    ("restart time", 0.5, 2.0, _recovery("restart_s"), "half to double"),
    ("initialisation time", 0.5, 2.0, _recovery("initialisation_s"), "half to double"),
    ("checkpoint load time", 0.5, 2.0, _recovery("load_s"), "half to double"),
    ("checkpoint stall", 0.5, 2.0, _stage(stall_s=True), "half to double"),
    ("checkpoint save time", 0.5, 2.0, _stage(stall_s=True, durable_s=True), "storage twice or half as fast"),
    ("checkpoint interval", 0.5, 2.0, _stage(interval_s=True), "half to double"),
    ("spares", 0.5, 2.0, _run(_spares), "half to double"),
    ("slow nodes", 0.5, 2.0, _run(_slow), "half to double"),
    ("maintenance", 0.5, 2.0, _run(_pause), "half to double"),
    ("rent", 0.75, 1.25, _economics("rent_usd_per_gpu_hour"), "25 % either way"),
    ("capital", 0.75, 1.25, _own("usd_per_gpu_all_in"), "25 % either way"),
    ("electricity price", 0.5, 2.0, _own("usd_per_kwh"), "half to double"),
    ("PUE", 0.9, 1.1, _economics("pue"), "10 % either way"),
)  # fmt: skip
"""(assumption, low factor, high factor, change, why these ends)."""


def sensitivity(plan: PlanFile, steps: StepModel, simulation: Simulation) -> Tornado:
    """Push every assumption that the plan has to both ends.

    Raises:
        InputError: the plan contradicts itself.
    """
    resolved = resolve(plan, steps)
    quick = replace(simulation, repetitions=min(REPETITIONS, simulation.repetitions), store=None)
    base = answer_resolved(resolved, quick, record=False)
    swings = sorted(_swings(resolved, quick), key=lambda swing: (-swing.span_days, -swing.span_usd))
    return Tornado(_days(base), tuple(swings))


def _swings(resolved: Resolved, simulation: Simulation) -> Iterator[Swing]:
    for name, low, high, change, why in ASSUMPTIONS:
        ends = [change(resolved, low), change(resolved, high)]
        if ends[0] == ends[1]:
            continue  # the plan has nothing of this kind
        answers = [answer_resolved(end, simulation, record=False) for end in ends]
        days, cost = (_days(answers[0]), _days(answers[1])), (_cost(answers[0]), _cost(answers[1]))
        yield Swing(name, low, high, days, cost, why)


def _days(answer: Answer) -> float | None:
    return answer.days.p50 if answer.days else None


def _cost(answer: Answer) -> float | None:
    return answer.cost_usd.p50 if answer.cost_usd else None
