"""The main path: a scenario becomes a layout, a schedule, a program, prices, a timeline, a result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from simpar import decide
from simpar.costs.collectives import CollectiveModel
from simpar.costs.kernels import KernelModel
from simpar.costs.mixed import MixedPricer
from simpar.costs.pricer import LayoutPricer
from simpar.costs.stage_times import stage_times
from simpar.decide import Probe
from simpar.engine import discrete_event, slowed_paths
from simpar.engine.effects import expected_load_factor, imbalance_of, memory_loads, routing_law
from simpar.engine.longest_path import longest_path
from simpar.engine.repeat import Repetitions, repeat
from simpar.engine.timeline import Timeline
from simpar.errors import InputError, Violation
from simpar.model.kind import kind_of, site_of
from simpar.parallel.layout import Layout
from simpar.program.lower import lower
from simpar.program.pipelines import Detail
from simpar.program.program import PriceTable, Program
from simpar.program.transfers import with_transfers
from simpar.program.waits import optimizer_waits
from simpar.result.accounting import account
from simpar.result.folded import MORE, Counts, can_fold, extended, is_drawn, shorter_counts, wants_times, with_microbatches
from simpar.result.interpret import Priced, interpret, slowest_replica
from simpar.result.result import Result
from simpar.result.shorter_steps import ShorterSteps
from simpar.schedules import SCHEDULES, Schedule, build_schedule
from simpar.schedules.csv import read_csv
from simpar.specs.calibration import KNOWN
from simpar.specs.framework import framework
from simpar.specs.hardware import HardwareProfile, load_hardware
from simpar.specs.scenario import Scenario
from simpar.specs.size import check_ops, limits, passes_of

__all__ = ["Priced", "cost_models", "interpret", "prepare", "run", "schedule_of", "simulate"]

FOLD_MICROBATCHES = 128
"""Of more than these a step that repeats itself is simulated from two shorter ones."""
FOLD_OPS = 400_000
"""More ops, about ten seconds, than any step is built with that could be simulated from two shorter ones."""
Engine = Literal["discrete_event", "longest_path"]
Lowering = Callable[..., Program]
"""What turns (layout, schedule, detail, expand=...) into a program."""


def schedule_of(scenario: Scenario, num_microbatches: int, times: dict[str, object] | None = None) -> Schedule:
    """The pipeline schedule of a scenario.

    Args:
        times: what `stage_times` says of the priced layout, for a schedule that depends on it; none = unit times.

    Raises:
        InputError: the schedule does not exist or cannot have this shape.
    """
    plan = scenario.plan
    name = plan.schedule
    if name.endswith(".csv"):
        path = Path(scenario.file).parent / name if scenario.file else Path(name)
        return read_csv(path if path.is_file() else Path(name))
    found, name, virtual, options = _required(scenario, num_microbatches, times or {})
    if found:
        raise InputError(found)
    # Layouts of one pipeline are asked for one after the other.
    return (build_schedule if times else _built)(name, plan.pp, num_microbatches, virtual, **options)


_built = lru_cache(maxsize=4)(build_schedule)


def _required(
    scenario: Scenario, num_microbatches: int, times: dict[str, object]
) -> tuple[list[Violation], str, int | None, dict[str, object]]:
    """(broken rules, name, chunks, options) of the scenario's schedule, one of the table, with so many micro-batches."""
    plan = scenario.plan
    name = framework(scenario.framework, scenario.framework_version).pipeline.named(plan.schedule, plan.pp, plan.virtual_stages)
    family = SCHEDULES[name]
    options: dict[str, object] = dict(times) if family.wants_times else {}
    if plan.microbatch_group_size:
        options["microbatch_group_size"] = plan.microbatch_group_size
    # A schedule with a fixed number of chunks needs none said; another number is an error that its requirements name.
    virtual = None if family.virtual_stages is not None and plan.virtual_stages == 1 else plan.virtual_stages
    found = family.requirements(plan.pp, num_microbatches, virtual, **options)
    return [Violation(f"plan.{v.field}", v.value, v.rule, v.right, scenario.file) for v in found], name, virtual, options


def _first_counts(scenario: Scenario) -> Counts | None:
    """Micro-batches of two shorter steps to try first and of the whole; None where it is not simulated from shorter ones.

    Raises:
        InputError: the schedule cannot have the micro-batches of the whole.
    """
    passes = passes_of(scenario)
    sought = wants_times(scenario) and passes.ops("stage") * _copies(scenario) > FOLD_OPS  # an order for all micro-batches
    if sought or passes.microbatches <= FOLD_MICROBATCHES or not can_fold(scenario):
        return None
    if wrong := _required(scenario, passes.microbatches, {})[0]:
        raise InputError(wrong)
    return shorter_counts(scenario, partial(_allows, scenario))


def _allows(scenario: Scenario, count: int) -> bool:
    """Whether the schedule can have so many micro-batches."""
    return not _required(scenario, count, {})[0]


def _copies(scenario: Scenario) -> int:
    """Sets of streams that stand for a pipeline."""
    return scenario.world_size // scenario.plan.pp if scenario.effects.expand else 1


@lru_cache(maxsize=32)
def _models(hardware: str) -> tuple[KernelModel, CollectiveModel]:
    profile = load_hardware(hardware)
    return KernelModel(profile), CollectiveModel(profile)


def cost_models(scenario: Scenario, profile: HardwareProfile) -> tuple[KernelModel, CollectiveModel]:
    """Kernel and collective models of the scenario's machine; shared between scenarios of one profile.

    Raises:
        InputError: SHARP on a fabric whose switches do not reduce.
    """
    sharp = scenario.cluster.sharp
    if sharp and not profile.fabric.in_network_reduction:
        rule = f"the switches of {profile.name} ({profile.fabric.kind}) do not reduce"
        raise InputError([Violation("cluster.sharp", True, rule, "false", scenario.file)])
    kernels, collectives = _models(scenario.cluster.hardware)
    if sharp or profile is not load_hardware(scenario.cluster.hardware):
        return kernels, CollectiveModel(profile, sharp=sharp)
    return kernels, collectives


def layout_of(scenario: Scenario, schedule: Schedule, load_factor: float, replica: int = 0) -> Layout:
    """The layout of a scenario whose pipeline runs under `schedule`.

    Raises:
        InputError: a schedule that holds every stage twice, on machines of several kinds.
    """
    count = schedule.stages_per_model
    if scenario.cluster.parts and schedule.replicas > 1:
        rule = "holds every stage on two pipeline ranks, which must be alike: the cluster has parts"
        raise InputError([Violation("plan.schedule", scenario.plan.schedule, rule, "such as 1f1b", scenario.file)])
    return Layout.of(scenario, count, schedule.replicas, load_factor, ends_meet=schedule.ends_meet,
                     ranks=schedule.stage_to_rank[:count], replica=replica)  # fmt: skip


def pricer_of(layout: Layout) -> LayoutPricer | MixedPricer:
    """What prices the keys of programs lowered from `layout`.

    Raises:
        InputError: SHARP on a fabric whose switches do not reduce.
    """
    return (
        MixedPricer(layout, cost_models) if layout.alone else LayoutPricer(layout, *cost_models(layout.scenario, layout.hardware))
    )


def _scheduled(
    scenario: Scenario, load_factor: float | None = None, replica: int = 0
) -> tuple[Layout, Schedule, LayoutPricer | MixedPricer]:
    """Layout, order and prices of a scenario that leaves nothing to cost; arguments as of `prepare`."""
    load_factor = expected_load_factor(scenario) if load_factor is None else load_factor
    probe = Layout.of(scenario, 1, load_factor=load_factor, replica=replica)
    timed = wants_times(scenario)
    # Where prices choose the order, only the pipeline's shape is asked for before them: any number of micro-batches has it.
    schedule = schedule_of(scenario, 1 if timed else probe.num_microbatches)
    layout = layout_of(scenario, schedule, load_factor, replica)
    model_stage = tuple(schedule.model_stage(s) for s in range(schedule.num_stages))
    pricer = pricer_of(layout).bind(schedule.stage_to_rank, model_stage)
    if timed:
        schedule = schedule_of(scenario, layout.num_microbatches, stage_times(pricer))
    return layout, schedule, pricer


def prepare(
    scenario: Scenario,
    *,
    detail: Detail = "layer",
    load_factor: float | None = None,
    expand: bool = False,
    transfers: bool = False,
    lowering: Lowering = lower,
    replica: int = 0,
) -> Priced:
    """Everything but the run: layout, schedule, program, prices.

    Args:
        replica: the part whose replicas are priced, where parts hold replicas.
        load_factor: tokens of the fullest expert rank over the mean; none = what the scenario's routing implies.
        expand: one set of streams per rank instead of one role per pipeline rank.
        transfers: attach what each op moves between which ranks (for contention).
        lowering: `lower`, or one that remembers.
    """
    layout, schedule, pricer = _scheduled(scenario := decided(scenario), load_factor, replica)
    program = lowering(layout, schedule, detail, expand=expand)
    if transfers:
        ranks = schedule.stage_to_rank[: schedule.stages_per_model]
        program = with_transfers(layout, program, ranks, pricer.exchange_share, expand=expand)
    prices = tuple(pricer.price(key) for key in program.price_keys)  # type: ignore[arg-type]
    table = PriceTable(np.array([p.seconds for p in prices]), np.array([p.interference for p in prices]))
    return Priced(layout, schedule, program, prices, table, pricer.stages_of_rank, expand)


def decided(scenario: Scenario) -> Scenario:
    """`scenario` with what it leaves to cost decided: layers per stage, micro-batches per replica.

    Raises:
        InputError: no whole micro-batches share out a batch.
    """
    probe = Probe(
        prepare=lambda chosen, replica: prepare(chosen, detail="stage", replica=replica), pricer=pricer_of,
        step=lambda priced: interpret(priced, run(priced, "longest_path")),
        allows=_allows,
    )  # fmt: skip
    return decide.decided(settled(scenario), probe)


def settled(scenario: Scenario) -> Scenario:
    """`scenario` with what its site says of this job and layout, which hangs on the step that is predicted without the site."""
    site = site_of(scenario)
    if site is None or not site.kinds:
        return scenario
    kind = kind_of(scenario)
    if site.layout_reach < KNOWN["site.layout_reach"].neutral:
        plain = simulate(scenario.model_copy(update={"site": None}), detail="stage")
        kind = kind_of(scenario, plain.step_time_s)
    return scenario.model_copy(update={"site": site.settled(kind)})


def run(priced: Priced, engine: Engine = "discrete_event", **effects: Any) -> Timeline:
    """Replay the program; `effects` go to the discrete-event engine (interference, contention, noise, ...)."""
    if engine == "longest_path":
        return longest_path(priced.program, priced.table)
    return discrete_event.run(priced.program, priced.table, discrete_event.Effects(**{"interference": True, **effects}))


def _played(priced: Priced) -> Timeline:
    """A step without chance and shared links: by the recurrence where that finds the times of the discrete-event engine, sooner."""
    effects = priced.layout.scenario.effects
    if priced.expanded or effects.slow_ranks or not effects.interference:
        return run(priced, **priced.effects)
    return slowed_paths.timeline(priced.program, priced.table)


def simulate(
    scenario: Scenario, *, detail: Detail = "layer", lowering: Lowering = lower, replayed: Callable[[], Result] | None = None
) -> Result:
    """Predict one training step of a checked scenario, with the effects it asks for.

    Args:
        detail: stage, layer or op.
        lowering: as in `prepare`.
        replayed: the whole step at this detail, where somebody has what it takes; asked for unless shorter steps tell.

    Raises:
        InputError: the plan cannot be run at all (a plan that does not fit the memory is a result).
    """
    scenario = decided(scenario)
    passes, finer = passes_of(scenario), detail
    copies = _copies(scenario)
    counts = _first_counts(scenario)
    if passes.ops(detail) * copies > FOLD_OPS:
        built, most = (counts[1], FOLD_OPS) if counts else (passes.microbatches, limits()["ops"])
        while detail != "stage" and passes.ops(detail, built) * copies > most:
            detail = "layer" if detail == "op" else "stage"
        check_ops(scenario, passes.ops(detail, built) * copies)
    if scenario.cluster.parts_hold == "replicas":
        kinds = [_whole(scenario, detail, lowering, replica) for replica in range(len(scenario.cluster.parts))]
        return _with_detail(slowest_replica(kinds), detail, finer)
    result = _folded(scenario, counts, detail, lowering)
    if result is None:
        result = replayed() if replayed is not None and detail == finer else _whole(scenario, detail, lowering)
    return _with_detail(result, detail, finer)


def _with_detail(result: Result, detail: Detail, finer: Detail) -> Result:
    """The result with a note where the step has too many ops for the level of detail that was asked for."""
    if detail == finer:
        return result
    note = f"too many ops at {finer} detail: simulated at {detail} detail, whose totals are the same"
    return replace(result, notes=(*result.notes, note))


def _folded(scenario: Scenario, counts: Counts | None, detail: Detail, lowering: Lowering) -> Result | None:
    """A step of many equal micro-batches from two shorter ones; where it does not repeat itself soon, all of it with one op a pass,
    whose totals are the same; None where it is built as it is.

    Args:
        counts: micro-batches of the first two to try, and of the whole.
    """
    passes, copies = passes_of(scenario), _copies(scenario)
    coarse: Detail = "stage" if detail == "layer" else detail
    fine, tried, last, exact = detail, 0, counts, False
    most = FOLD_OPS if passes.ops(coarse) * copies <= FOLD_OPS else FOLD_OPS // 3
    steps = ShorterSteps(
        lambda n, how, low: prepare(with_microbatches(scenario, n), detail=how, expand=scenario.effects.expand, lowering=low),
        _played, lowering,
    )  # fmt: skip
    while counts is not None and not exact:
        few, more, every = counts
        # What repeats itself late is built whole instead, or extended all the same: tries cost no more than that together.
        if tried and (tried > every or passes.ops(coarse, tried + few + more) * copies > most):
            break
        last, tried = counts, tried + more
        # Many micro-batches layer by layer cost more than a step of half as many as are built whole: passes say the same.
        fine = detail if few + more <= FOLD_MICROBATCHES // 2 else coarse
        # Where layers are hardly more ops than passes, looking at them at once saves a second look.
        looked = coarse if 3 * passes.ops(coarse) <= passes.ops(fine) else fine
        again = steps.repeat(few, more, every, looked)
        # The order that prices choose for all micro-batches need not be that for fewer, gone on with.
        exact = again and (not wants_times(scenario) or steps.order_goes_on(few, more, looked, _scheduled(scenario)[1]))
        needed = (not again and steps.foreseen(few, more, every, looked)) or (MORE * few, False)
        least = max(needed[0], few + scenario.plan.pp)
        counts = counts if exact else shorter_counts(scenario, partial(_allows, scenario), least)
    if last is None or not (exact or passes.ops(coarse) * copies > FOLD_OPS):
        return _coarser(scenario, steps.result) if detail == "layer" and passes.microbatches > FOLD_MICROBATCHES else None
    second, first = (steps.result(count, fine) for count in last[1::-1])
    schedule = schedule_of(scenario.model_copy(update={"training": second.layout.training}), last[1])
    layout = layout_of(scenario, schedule, expected_load_factor(scenario))
    found = extended(first, second, last, layout, exact=exact)
    return found if fine == detail else replace(found, notes=(*found.notes, "one op a pass, whose totals are those of its layers"))


def _coarser(scenario: Scenario, run: Callable[[int, Detail], Result]) -> Result | None:
    """All micro-batches with one op a pass, of a step where that changes no total."""
    if scenario.effects.needs_network or is_drawn(scenario):
        return None
    count = passes_of(scenario).microbatches
    note = f"{count:,} micro-batches that never or late repeat themselves: simulated with one op a pass, whose totals are the same"
    result = run(count, "stage")
    return replace(result, notes=(*result.notes, note))


def _whole(scenario: Scenario, detail: Detail, lowering: Lowering, replica: int = 0) -> Result:
    """Every op of the step replayed."""
    wanted = scenario.effects
    priced = prepare(scenario, detail=detail, expand=wanted.expand, transfers=wanted.needs_network, lowering=lowering,
                     replica=replica)  # fmt: skip
    effects = priced.effects
    timeline = run(priced, **effects, seed=wanted.seed)
    result = interpret(priced, timeline)
    if wanted.repetitions > 1 or wanted.is_random:
        result = replace(result, repetitions=repetitions_of(priced, effects, timeline, detail, lowering))
    return result


def _unsynchronised_step_s(timeline: Timeline) -> float:
    """Step time, as in the result, where no rank waits for the others at the step's end."""
    return account(timeline.program, timeline, waits=False).makespan


def repetitions_of(
    priced: Priced, effects: dict[str, Any], first: Timeline | None = None, detail: Detail = "layer", lowering: Lowering = lower
) -> Repetitions:
    """Independent draws of noise and, under uneven routing, of each layer's and micro-batch's expert load.

    Args:
        first: the run of `priced` under `effects` and the scenario's seed, where it is there already.
        detail, lowering: those of `priced`.
    """
    scenario = priced.layout.scenario
    wanted, peaks = scenario.effects, None
    if routing_law(scenario) is not None:
        first = None
        priced, loaded = (
            prepare(
                scenario,
                detail=detail,
                load_factor=f,
                expand=wanted.expand,
                transfers=wanted.needs_network,
                lowering=lowering,
                replica=priced.layout.replica,
            )
            for f in (1.0, 2.0)
        )
        expert_layers = [sum(b.expert_parameters > 0 for b in blocks) for blocks in priced.layout.stage_blocks]
        per_op = max(round(sum(expert_layers) / len(expert_layers)), 1) if detail == "stage" else 1
        effects = {**effects, "imbalance": imbalance_of(scenario, loaded.table, per_op)}
        even, double = (interpret(p, run(p, "longest_path")).worst_rank.device_bytes for p in (priced, loaded))
        layers = max(sum(expert_layers[s] for s in held) for held in priced.held.values())
        loads = memory_loads(scenario, max(layers, 1), min(scenario.plan.pp, priced.layout.num_microbatches))
        peaks = even + (double - even) * (loads - 1.0)
    step_s = None if optimizer_waits(priced.layout, priced.schedule) else _unsynchronised_step_s
    drawn = discrete_event.Effects(seed=wanted.seed, **effects)
    runs = repeat(priced.program, priced.table, wanted.repetitions, drawn, first=first, step_s=step_s)
    return replace(runs, peak_memory_bytes=peaks)
