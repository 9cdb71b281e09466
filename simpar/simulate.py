"""The main path: a scenario becomes a layout, a schedule, a program, prices, a timeline, a result."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

from simpar.costs.collectives import CollectiveModel
from simpar.costs.kernels import KernelModel
from simpar.costs.pricer import KeyPrice, LayoutPricer
from simpar.engine import discrete_event
from simpar.engine.cluster_network import ClusterNetwork
from simpar.engine.contention import Contention
from simpar.engine.faults import link_fault
from simpar.engine.imbalance import Imbalance, Routing
from simpar.engine.jitter import Noise
from simpar.engine.longest_path import longest_path, longest_path_batch
from simpar.engine.repeat import Repetitions, repeat
from simpar.engine.timeline import Timeline
from simpar.errors import InputError, Violation
from simpar.parallel.layout import Layout
from simpar.program.lower import Detail, lower
from simpar.program.program import FloatArray, PriceTable, Program
from simpar.program.transfers import with_transfers
from simpar.result.accounting import account, bubble_fraction
from simpar.result.memory import memory_over_time
from simpar.result.result import Interval, Result, mean_breakdown
from simpar.schedules import SCHEDULES, Schedule, build_schedule
from simpar.schedules.csv import read_csv
from simpar.specs.hardware import HardwareProfile, load_hardware
from simpar.specs.model import TransformerSpec
from simpar.specs.scenario import Scenario
from simpar.topology.cluster import Cluster

Engine = Literal["discrete_event", "longest_path"]


@dataclass(frozen=True, slots=True)
class Priced:
    """A program with its prices, ready for an engine."""

    layout: Layout
    schedule: Schedule
    program: Program
    prices: tuple[KeyPrice, ...]
    table: PriceTable
    held: dict[int, list[int]]
    expanded: bool = False


def schedule_of(scenario: Scenario, num_microbatches: int) -> Schedule:
    """The pipeline schedule of a scenario.

    Raises:
        InputError: the schedule does not exist or cannot have this shape.
    """
    plan = scenario.plan
    name = plan.schedule
    if name.endswith(".csv"):
        path = Path(scenario.file).parent / name if scenario.file else Path(name)
        return read_csv(path if path.is_file() else Path(name))
    if name == "auto":
        name = "1f1b" if plan.virtual_stages == 1 else "interleaved"
    family = SCHEDULES[name]
    options = {"microbatch_group_size": plan.microbatch_group_size} if plan.microbatch_group_size else {}
    # A schedule with a fixed number of chunks needs none said; another number is an error that its requirements name.
    virtual = None if family.virtual_stages is not None and plan.virtual_stages == 1 else plan.virtual_stages
    found = family.requirements(plan.pp, num_microbatches, virtual, **options)
    if found:
        raise InputError([Violation(f"plan.{v.field}", v.value, v.rule, v.right, scenario.file) for v in found])
    return build_schedule(name, plan.pp, num_microbatches, virtual, **options)


@lru_cache(maxsize=32)
def _models(hardware: str) -> tuple[KernelModel, CollectiveModel]:
    profile = load_hardware(hardware)
    return KernelModel(profile), CollectiveModel(profile)


def cost_models(scenario: Scenario, profile: HardwareProfile) -> tuple[KernelModel, CollectiveModel]:
    """Kernel and collective models of the scenario's machine; shared between scenarios of one profile."""
    kernels, collectives = _models(scenario.cluster.hardware)
    if profile is not load_hardware(scenario.cluster.hardware):
        return kernels, CollectiveModel(profile)
    return kernels, collectives


def prepare(
    scenario: Scenario, *, detail: Detail = "layer", load_factor: float | None = None, expand: bool = False,
    transfers: bool = False,
) -> Priced:
    """Everything but the run: layout, schedule, program, prices.

    Args:
        load_factor: tokens of the fullest expert rank over the mean; none = what the scenario's routing implies.
        expand: one set of streams per rank instead of one role per pipeline rank.
        transfers: attach what each op moves between which ranks (for contention).
    """
    load_factor = expected_load_factor(scenario) if load_factor is None else load_factor
    probe = Layout.of(scenario, 1, load_factor=load_factor)
    schedule = schedule_of(scenario, probe.num_microbatches)
    layout = Layout.of(scenario, schedule.stages_per_model, schedule.replicas, load_factor)
    model_stage = tuple(schedule.model_stage(s) for s in range(schedule.num_stages))
    program = lower(layout, schedule, detail, expand=expand)
    if transfers:
        program = with_transfers(layout, program, schedule.stage_to_rank[: schedule.stages_per_model], expand=expand)
    kernels, collectives = cost_models(scenario, layout.hardware)
    pricer = LayoutPricer(layout, kernels, collectives).bind(schedule.stage_to_rank, model_stage)
    prices = tuple(pricer.price(key) for key in program.price_keys)  # type: ignore[arg-type]
    table = PriceTable(np.array([p.seconds for p in prices]), np.array([p.interference for p in prices]))
    return Priced(layout, schedule, program, prices, table, pricer.stages_of_rank, expand)


def run(priced: Priced, engine: Engine = "discrete_event", **effects: Any) -> Timeline:
    """Replay the program; `effects` go to the discrete-event engine (interference, contention, noise, seed, ...)."""
    if engine == "longest_path":
        return longest_path(priced.program, priced.table)
    return discrete_event.run(priced.program, priced.table, **{"interference": True, **effects})


def simulate(scenario: Scenario, *, detail: Detail = "layer", engine: Engine = "discrete_event") -> Result:
    """Predict one training step of a checked scenario, with the effects it asks for.

    Args:
        detail: stage, layer or op.
        engine: discrete_event (SimPy) or longest_path (numpy: no effects, a lower bound of the other).

    Raises:
        InputError: the plan cannot be run at all (a plan that does not fit the memory is a result).
    """
    wanted = scenario.effects
    priced = prepare(scenario, detail=detail, expand=wanted.expand, transfers=wanted.needs_network)
    if engine == "longest_path":
        return interpret(priced, run(priced, engine))
    effects = engine_effects(priced)
    result = interpret(priced, run(priced, **effects, seed=wanted.seed))
    if wanted.repetitions > 1 or wanted.is_random:
        result = replace(result, repetitions=repetitions_of(priced, effects))
    return result


def engine_effects(priced: Priced) -> dict[str, Any]:
    """The scenario's effects as the discrete-event engine's arguments."""
    wanted = priced.layout.scenario.effects
    found: dict[str, Any] = {"interference": wanted.interference, "slow_factors": wanted.slow_ranks or None}
    if wanted.needs_network:
        found["contention"] = contention_of(priced)
    if wanted.is_random:
        found["noise"] = Noise(wanted.compute_sigma, wanted.communication_sigma, wanted.rank_sigma)
    return found


def contention_of(priced: Priced) -> Contention:
    """The cluster's links as the network that this program's transfers share, faults included."""
    layout = priced.layout
    wanted, nodes = layout.scenario.effects, layout.scenario.cluster.num_nodes
    cluster = Cluster(layout.hardware, nodes, dead_slots=frozenset(wanted.dead_rails))
    faults = [link_fault(cluster, fault.link, fault.factor, fault.period, fault.down) for fault in wanted.link_faults]
    latency = np.array([price.latency_s for price in priced.prices])
    return Contention(ClusterNetwork(cluster), latency_s=latency, schedules=faults)


def routing_law(scenario: Scenario) -> Routing | None:
    """How tokens choose experts, where the scenario says that they do not spread evenly."""
    model, routing = scenario.model, scenario.training.routing
    if not isinstance(model, TransformerSpec) or model.moe is None or routing.kind == "balanced":
        return None
    return Routing(model.moe.num_experts, model.moe.num_experts_per_tok, routing.kind, routing.alpha, routing.counts,
                   routing.capacity_factor)  # fmt: skip


def _routed_tokens(scenario: Scenario) -> int:
    return scenario.training.micro_batch_size * scenario.training.sequence_length * scenario.plan.ep


def expected_load_factor(scenario: Scenario) -> float:
    """Mean over draws of the fullest expert rank's tokens over the mean, as the scenario's routing implies."""
    law = routing_law(scenario)
    return 1.0 if law is None else float(law.load_factors(_routed_tokens(scenario), scenario.plan.ep, 16, 8, (0,)).mean())


def repetitions_of(priced: Priced, effects: dict[str, Any]) -> Repetitions:
    """Independent draws of noise and, under uneven routing, of each layer's and micro-batch's expert load."""
    scenario = priced.layout.scenario
    wanted, law = scenario.effects, routing_law(scenario)
    if law is not None:
        priced, loaded = (prepare(scenario, load_factor=f, expand=wanted.expand) for f in (1.0, 2.0))
        effects = {**effects, "imbalance": Imbalance(law, _routed_tokens(scenario), scenario.plan.ep, loaded.table)}
    return repeat(priced.program, priced.table, wanted.repetitions, seed=wanted.seed, **effects)


def interpret(priced: Priced, timeline: Timeline) -> Result:
    """What a timeline means."""
    layout, program = priced.layout, priced.program
    names = sorted({name for price in priced.prices for name, _ in price.terms})
    column = {name: i for i, name in enumerate(names)}
    terms = np.zeros((len(priced.prices), len(names)))
    for row, price in enumerate(priced.prices):
        for name, amount in price.terms:
            terms[row, column[name]] += amount
    accounting = account(program, timeline)
    seconds = priced.table.seconds[program.price]
    roles = {rank: rank for rank in priced.held}
    if priced.expanded:
        roles = {rank: layout.mesh.rank(pp=rank) for rank in priced.held}
    return Result(
        layout=layout, program=program, timeline=timeline, accounting=accounting,
        memory=memory_over_time(layout, program, timeline, priced.held, roles),
        breakdown=mean_breakdown(terms, names, program, accounting, seconds, timeline.seconds),
        bubble_fraction=bubble_fraction(program, timeline, accounting),
        step_interval=_interval(priced, timeline.makespan, names),
        provenance=_provenance(priced), communication_s=_communication(priced),
        schedule_name=priced.schedule.name, hardware_flops=_hardware_flops(layout),
    )  # fmt: skip


def _interval(priced: Priced, makespan: float, names: list[str]) -> Interval:
    """Push each category to both ends of its interval, replay, and add the changes in quadrature."""
    base = priced.table.seconds
    variants: list[FloatArray] = [base]
    for name in names:
        for sign in (1, -1):
            moved = base.copy()
            for row, price in enumerate(priced.prices):
                for category, up, down in price.spread:
                    if category == name:
                        moved[row] += up if sign > 0 else -down
            variants.append(np.maximum(moved, 0.0))
    spans = longest_path_batch(priced.program, np.array(variants))
    up = spans[1::2] - spans[0]
    down = spans[0] - spans[2::2]
    high = makespan + float(np.sqrt((np.maximum(up, 0) ** 2).sum()))
    low = makespan - float(np.sqrt((np.maximum(down, 0) ** 2).sum()))
    widths = sorted(((n, float(max(u, d))) for n, u, d in zip(names, up, down, strict=True)), key=lambda x: -x[1])
    return Interval(low, high, tuple(w for w in widths[:5] if w[1] > 0))


def _provenance(priced: Priced) -> dict[str, str]:
    """Category -> the worst provenance among the prices that contribute to it."""
    from simpar.costs.block_price import worst

    found: dict[str, list[object]] = {}
    for price in priced.prices:
        for name, _ in price.terms:
            found.setdefault(name, []).append(price.provenance)
    return {name: str(worst(kinds).value) for name, kinds in sorted(found.items())}  # type: ignore[arg-type]


def _communication(priced: Priced) -> dict[str, float]:
    """Busy seconds by dimension, hidden or exposed, mean over pipeline ranks."""
    counts = np.bincount(priced.program.price, minlength=len(priced.prices))
    found: dict[str, float] = {}
    for count, price in zip(counts, priced.prices, strict=True):
        pairs = price.communication_s or tuple(t for t in price.terms if t[0] in ("dp", "pp"))
        for name, seconds in pairs:
            found[name] = found.get(name, 0.0) + float(count) * seconds / max(len(priced.held), 1)
    return found


def _hardware_flops(layout: Layout) -> float:
    """Model FLOPs plus what recomputation repeats (matmuls and attention of the repeated ops)."""
    from simpar.parallel.layout import recomputed_flops

    return layout.model_flops + recomputed_flops(layout)
