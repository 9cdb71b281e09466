"""The answer to a plan: seeded repetitions of the run, and their quantiles."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from simpar.errors import InputError, Violation
from simpar.planning.closed_forms import (
    DAY_S,
    daly_interval_s,
    exact_interval_s,
    expected_ettr,
    goodput_exact,
    goodput_first_order,
    poisson_tail,
    spares_needed,
    young_interval_s,
)
from simpar.planning.economics import HOUR_S
from simpar.planning.notes import Assumption
from simpar.planning.outcome import Outcome
from simpar.planning.resolve import Resolved, resolve
from simpar.planning.run_model import CAUSES, RunModel
from simpar.planning.run_simulation import simulate_run
from simpar.planning.steps import StepEstimate, StepModel
from simpar.planning.store import RepetitionStore, run_key
from simpar.specs.planfile import PlanFile
from simpar.specs.size import limits

DEFAULT_REPETITIONS = 200
_COMMIT_EVERY = 20
_FEW = 4


@dataclass(frozen=True, slots=True)
class Quantiles:
    """A quantity over the repetitions."""

    p10: float
    p50: float
    p90: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Quantiles:
        """The quantiles of `values`."""
        return cls(*(float(q) for q in np.quantile(np.fromiter(values, float), (0.1, 0.5, 0.9))))


@dataclass(frozen=True, slots=True)
class Simulation:
    """How the repetitions are made."""

    repetitions: int = DEFAULT_REPETITIONS
    seed: int = 0
    store: Path | None = None
    resume: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """What a plan comes to. The quantities are None where the plan cannot run; `binding` says what holds it back.

    Attributes:
        goodput: time the tokens take at full speed over wall-clock time.
        effective_training_time_ratio: time spent in training that counts, slowed or not, over wall-clock time.
        gpu_hours: of the GPUs in the job; `reserved_gpu_hours` with the spares.
        checkpoints, written_bytes: saves of the whole run, and what they write; None where their size is not known.
        lost_time_s: by cause; with the productive time they add up to the wall-clock time.
        closed_forms: name -> value, for comparison with the simulation.
        deadline_probability: share of the repetitions within the deadline, None without one.
        sample: a recorded repetition of median length.
        all_days, all_costs_usd: of every repetition, ascending.
    """

    name: str
    resolved: Resolved
    feasible: bool
    binding: tuple[str, ...]
    simulation: Simulation
    days: Quantiles | None = None
    gpu_hours: Quantiles | None = None
    reserved_gpu_hours: Quantiles | None = None
    goodput: Quantiles | None = None
    effective_training_time_ratio: Quantiles | None = None
    cost_usd: Quantiles | None = None
    usd_per_million_tokens: Quantiles | None = None
    energy_kwh: Quantiles | None = None
    carbon_kg: Quantiles | None = None
    checkpoints: Quantiles | None = None
    written_bytes: Quantiles | None = None
    lost_time_s: dict[str, Quantiles] = field(default_factory=dict)
    failures: dict[str, Quantiles] = field(default_factory=dict)
    phase_days: dict[str, Quantiles] = field(default_factory=dict)
    closed_forms: dict[str, float] = field(default_factory=dict)
    deadline_probability: float | None = None
    sample: Outcome | None = None
    all_days: tuple[float, ...] = ()
    all_costs_usd: tuple[float, ...] = ()

    @property
    def assumptions(self) -> tuple[Assumption, ...]:
        """What the answer rests on."""
        return self.resolved.assumptions

    @property
    def warnings(self) -> tuple[str, ...]:
        """What runs but nobody would do."""
        return self.resolved.warnings

    @property
    def storage(self) -> dict[str, float]:
        """What checkpoints ask of the storage: bytes, bandwidths, the share of the time; see `checkpoints.storage_load`."""
        return dict(self.resolved.storage)

    @property
    def steps(self) -> tuple[tuple[str, StepEstimate], ...]:
        """The simulated steps."""
        return self.resolved.steps


def answer(plan: PlanFile, steps: StepModel, simulation: Simulation = Simulation(), *, record: bool = True) -> Answer:
    """Resolve and simulate `plan`.

    Raises:
        InputError: the plan contradicts itself.
    """
    return answer_resolved(resolve(plan, steps), simulation, record=record)


def answer_resolved(resolved: Resolved, simulation: Simulation = Simulation(), *, record: bool = True) -> Answer:
    """Simulate a resolved plan; `record` adds the timeline of a median repetition."""
    plan, run = resolved.plan, resolved.run
    if run is None or not resolved.feasible:
        return Answer(plan.name, resolved, False, resolved.binding, simulation, closed_forms=closed_forms(resolved) if run else {})
    outcomes = _unless_hopeless(run, simulation) or repetitions(run, simulation)
    stuck = [outcome for outcome in outcomes if not outcome.finished]
    if stuck:
        reason = _stuck_reason(stuck, len(outcomes))
        return Answer(
            plan.name,
            resolved,
            False,
            (*resolved.binding, reason),
            simulation,
            lost_time_s=_lost(stuck),
            closed_forms=closed_forms(resolved),
        )
    return _summary(resolved, run, outcomes, simulation, record=record)


def _unless_hopeless(run: RunModel, simulation: Simulation) -> list[Outcome] | None:
    """The first few repetitions when none of them comes to an end: the others would not either, and take long."""
    _check_incidents(run, simulation.repetitions)
    few = replace(simulation, repetitions=min(_FEW, simulation.repetitions))
    outcomes = repetitions(run, few)
    if any(outcome.finished for outcome in outcomes):
        return outcomes if few == simulation else None
    return outcomes


def _check_incidents(run: RunModel, count: int) -> None:
    """Refuse what would be simulated for hours.

    Raises:
        InputError: more failures and maintenance windows in all repetitions than the limit.
    """
    each = 1.0
    for index, stage in enumerate(run.stages):
        seconds = sum(piece.tokens / piece.tokens_per_s for piece in stage.pieces)
        slow = run.slow_nodes.rate_per_node_s * stage.nodes if run.slow_nodes is not None else 0.0
        each += seconds * (run.failure_rate_per_s(index) + slow + sum(1.0 / w.every_s for w in run.windows if w.every_s))
    most = limits()["incidents"]
    if each * count > most:
        rule = f"about {each:.3g} incidents in each of {count:,} repetitions are more than {most:,}"
        right = f"fewer repetitions or tokens, lower failure rates, or --limit incidents={each * count:.0e}"
        raise InputError([Violation("--repetitions", count, rule, right)])


def _summary(resolved: Resolved, run: RunModel, outcomes: Sequence[Outcome], simulation: Simulation, *, record: bool) -> Answer:
    def over(value: Callable[[Outcome], float]) -> Quantiles:
        return Quantiles.of(value(outcome) for outcome in outcomes)

    plan, economics = resolved.plan, resolved.economics
    priced = economics is not None and (economics.rent_usd_per_gpu_hour is not None or economics.own is not None)
    costs = sorted(economics.cost_usd(run, o) or 0.0 for o in outcomes) if economics and priced else []
    cost = Quantiles.of(costs) if costs else None
    energy = over(lambda o: economics.energy_kwh(run, o)) if economics else None
    deadline = plan.deadline
    met = None if deadline is None else sum(o.wall_s <= deadline for o in outcomes) / len(outcomes)
    late = _late_reason(plan, run, outcomes, met)
    names = sorted({name for outcome in outcomes for name in outcome.failures})
    saves, size = over(lambda o: o.checkpoints), resolved.checkpoints.bytes if resolved.checkpoints else None
    return Answer(
        name=plan.name,
        resolved=resolved,
        feasible=not late,
        binding=(*resolved.binding, *late),
        simulation=simulation,
        days=over(lambda o: o.wall_s / DAY_S),
        gpu_hours=over(lambda o: o.gpu_s / HOUR_S),
        reserved_gpu_hours=over(lambda o: o.node_s * resolved.gpus_per_node / HOUR_S),
        goodput=over(lambda o: o.productive_s / o.wall_s),
        effective_training_time_ratio=over(lambda o: (o.productive_s + o.lost_s["slow_node"]) / o.wall_s),
        cost_usd=cost,
        usd_per_million_tokens=cost and _scaled(cost, 1e6 / run.tokens),
        energy_kwh=energy,
        carbon_kg=energy and _scaled(energy, plan.power.carbon_kg_per_kwh),
        checkpoints=saves,
        written_bytes=None if size is None else _scaled(saves, size),
        lost_time_s=_lost(outcomes),
        failures={name: over(lambda o, n=name: o.failures.get(n, 0)) for name in names},  # type: ignore[misc]
        phase_days={
            name: over(lambda o, i=i: o.phase_s[i] / DAY_S)  # type: ignore[misc]
            for i, name in enumerate(run.phases)
        },
        closed_forms=closed_forms(resolved),
        deadline_probability=met,
        sample=_sample(run, outcomes, simulation) if record else None,
        all_days=tuple(sorted(o.wall_s / DAY_S for o in outcomes)),
        all_costs_usd=tuple(costs),
    )


def _lost(outcomes: Sequence[Outcome]) -> dict[str, Quantiles]:
    return {cause: Quantiles.of(o.lost_s[cause] for o in outcomes) for cause in CAUSES}


def _scaled(quantiles: Quantiles, factor: float) -> Quantiles:
    return Quantiles(quantiles.p10 * factor, quantiles.p50 * factor, quantiles.p90 * factor)


def _sample(run: RunModel, outcomes: Sequence[Outcome], simulation: Simulation) -> Outcome:
    """The repetition of median length, simulated once more with its timeline."""
    order = sorted(range(len(outcomes)), key=lambda i: outcomes[i].wall_s)
    return simulate_run(run, simulation.seed, order[len(order) // 2], record=True)


def _stuck_reason(stuck: Sequence[Outcome], count: int) -> str:
    totals = {cause: sum(o.lost_s[cause] for o in stuck) for cause in CAUSES}
    worst = max(totals, key=lambda cause: totals[cause])
    share = totals[worst] / sum(o.wall_s for o in stuck)
    return f"no progress: {len(stuck)} of {count} repetitions came to no end; {share:.0%} of the time went to {worst}"


def _late_reason(plan: PlanFile, run: RunModel, outcomes: Sequence[Outcome], met: float | None) -> tuple[str, ...]:
    """Why the deadline is missed: the speed alone, or the largest loss."""
    if met is None or met >= plan.confidence or plan.deadline is None:
        return ()
    head = f"deadline: {plan.deadline / DAY_S:.4g} days are met with probability {met:.0%}, {plan.confidence:.0%} wanted; "
    if run.ideal_s > plan.deadline:
        return (
            f"{head}speed binds: even without any loss the tokens take {run.ideal_s / DAY_S:.4g} days at "
            f"{run.tokens / run.ideal_s:,.0f} tokens/s",
        )
    totals = {cause: sum(o.lost_s[cause] for o in outcomes) / len(outcomes) for cause in CAUSES}
    worst = max(totals, key=lambda cause: totals[cause])
    return (f"{head}the largest loss is {worst}, {totals[worst] / DAY_S:.3g} days on average",)


def repetitions(run: RunModel, simulation: Simulation) -> list[Outcome]:
    """All repetitions of `run`; with a store, finished ones are kept and, resumed, not made again."""
    if simulation.store is None:
        return [simulate_run(run, simulation.seed, i) for i in range(simulation.repetitions)]
    key, seed = run_key(run), simulation.seed
    with RepetitionStore(simulation.store) as store:
        known = store.load(key, seed) if simulation.resume else {}
        for i in range(simulation.repetitions):
            if i in known:
                continue
            known[i] = simulate_run(run, seed, i)
            store.save(key, seed, i, known[i])
            if i % _COMMIT_EVERY == _COMMIT_EVERY - 1:
                store.commit()
    return [known[i] for i in range(simulation.repetitions)]


def closed_forms(resolved: Resolved) -> dict[str, float]:
    """What the formulas say about the first stage's cluster; without spare shortage, slow nodes and maintenance."""
    run = resolved.run
    if run is None:
        return {}
    stage, mtti, recovery = run.stages[0], run.mtti_s(), run.mean_recovery_s()
    rate = DAY_S * sum(source.rate_per_node_s for source in run.sources)
    repair = max((source.repair_s for source in run.sources if source.nodes_hit), default=0.0)
    swaps = run.repair_rate_per_node_day()
    spares = run.hot_spares + run.cold_spares
    return {
        "mtti_s": mtti,
        "recovery_s": recovery,
        "checkpoint_interval_s": stage.interval_s,
        "checkpoint_stall_s": stage.stall_s,
        "young_interval_s": young_interval_s(stage.stall_s, mtti),
        "daly_interval_s": daly_interval_s(stage.stall_s, mtti),
        "exact_interval_s": exact_interval_s(stage.stall_s, mtti),
        "goodput_first_order": goodput_first_order(stage.interval_s, stage.stall_s, recovery, mtti),
        "goodput_exact": goodput_exact(stage.interval_s, stage.stall_s, recovery, mtti),
        "expected_ettr": expected_ettr(stage.nodes, rate, recovery, stage.interval_s, stage.stall_s),
        "spares_needed": float(spares_needed(stage.nodes, swaps, repair, resolved.plan.confidence)),
        "probability_spares_short": poisson_tail(spares, stage.nodes * swaps * repair / DAY_S),
    }
