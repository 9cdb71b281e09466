"""From the plan file to numbers: step times, failure rates, checkpoint times. Every default becomes an assumption."""

from __future__ import annotations

from dataclasses import dataclass

from simpar.planning.checkpoints import CheckpointTimes, checkpoint_times, choose_interval, doubts, storage_load
from simpar.planning.closed_forms import DAY_S, goodput_exact
from simpar.planning.economics import Economics
from simpar.planning.notes import Assumption, Notes, kind_of
from simpar.planning.plan_rules import check_plan
from simpar.planning.prices import resolve_economics
from simpar.planning.run_model import Growth, Recovery, RunModel, SlowNodeModel, Source, Stage, Window
from simpar.planning.speeds import Speeds, phase_name, phase_scenario
from simpar.planning.steps import StepEstimate, StepModel
from simpar.specs.hardware import HardwareProfile, load_hardware
from simpar.specs.planfile import PlanFile
from simpar.units import format_seconds

HOPELESS_GOODPUT = 0.05
"""Below this expected goodput a run is called impossible instead of simulated."""


@dataclass(frozen=True, slots=True)
class Resolved:
    """A plan ready to run. `feasible` is False where `binding` says why it cannot."""

    plan: PlanFile
    run: RunModel | None
    economics: Economics | None
    checkpoints: CheckpointTimes | None
    gpus_per_node: int
    feasible: bool
    binding: tuple[str, ...]
    assumptions: tuple[Assumption, ...]
    steps: tuple[tuple[str, StepEstimate], ...] = ()
    """Simulated steps, by phase (and ramp step)."""
    warnings: tuple[str, ...] = ()
    """What runs but nobody would do."""
    storage: tuple[tuple[str, float], ...] = ()
    """What the first stage's checkpoints ask of the storage."""


def resolve(plan: PlanFile, steps: StepModel) -> Resolved:
    """`plan` as numbers, asking `steps` for the phases that name a scenario.

    Raises:
        InputError: the plan contradicts itself, or a scenario or profile it names does.
    """
    check_plan(plan)
    notes = Notes()
    profile = _profile(plan)
    per_node = _gpus_per_node(plan, profile, notes)
    counts = [plan.cluster.num_nodes]
    for growth in sorted(plan.cluster.expansions, key=lambda g: (g.day or 0.0, g.at_tokens or 0.0)):
        counts.append(counts[-1] + growth.add_nodes)
    pieces = [Speeds(plan, nodes, nodes * per_node, steps, notes).pieces() for nodes in counts]
    economics = resolve_economics(plan, profile, per_node, notes)
    if not notes.feasible:
        return Resolved(
            plan,
            None,
            economics,
            None,
            per_node,
            False,
            tuple(dict.fromkeys(notes.binding)),
            tuple(notes.assumptions),
            tuple(notes.steps),
        )
    sources = _sources(plan, per_node, notes)
    stages, saves, warnings, storage = [], None, dict[str, None](), dict[str, float]()
    for nodes, stage_pieces in zip(counts, pieces, strict=True):
        rate = nodes * sum(source.rate_per_node_s for source in sources)
        mtti = 1.0 / rate if rate > 0 else float("inf")
        times = checkpoint_times(plan.checkpoints, nodes, nodes * per_node, notes.parameters)
        step = max((piece.step_time_s or 0.0 for piece in stage_pieces), default=0.0)
        interval = choose_interval(plan.checkpoints, times, mtti, step)
        storage = storage or storage_load(plan.checkpoints, times, interval)
        warnings |= dict.fromkeys(doubts(times, interval, mtti, step))
        if isinstance(plan.checkpoints.interval, str) and "least_interval" not in plan.checkpoints.model_fields_set:
            least = f"at least {format_seconds(plan.checkpoints.least_interval)} apart"
            notes.assume("checkpoints.least_interval", least, "assumed: what operators leave between two")
        saves = saves or times
        stages.append(Stage(nodes, nodes * per_node, stage_pieces, interval, times.stall_s, times.save_s))
        notes.binding.extend(_checkpoint_limits(plan, times, interval, mtti))
        capacity = plan.checkpoints.storage_capacity
        if capacity is not None and times.bytes is not None and capacity < times.bytes:
            size = f"{times.bytes / 1e12:.4g} TB"
            notes.impossible(f"storage: one checkpoint of {size} does not fit its capacity of {capacity / 1e12:.4g} TB")
    assert saves is not None  # there is always a first stage
    for text in saves.assumed:
        notes.assume("checkpoints", text, "assumed: not given")
    _note_times(plan, notes)
    run = _run_model(plan, tuple(stages), sources, saves)
    _check_hope(run, notes)
    return Resolved(
        plan,
        run,
        economics,
        saves,
        per_node,
        notes.feasible,
        tuple(dict.fromkeys(notes.binding)),
        tuple(dict.fromkeys(notes.assumptions)),
        tuple(notes.steps),
        tuple(warnings),
        tuple(storage.items()),
    )


# -- the machines ------------------------------------------------------------------------------------------------------
def _profile(plan: PlanFile) -> HardwareProfile | None:
    """The hardware of the plan, or of its first scenario."""
    if plan.cluster.hardware:
        return load_hardware(plan.cluster.hardware)
    for phase in plan.phases:
        if phase.scenario:
            return phase_scenario(plan, phase).hardware
    return None


def _gpus_per_node(plan: PlanFile, profile: HardwareProfile | None, notes: Notes) -> int:
    if plan.cluster.gpus_per_node:
        return plan.cluster.gpus_per_node
    if profile is not None:
        return profile.gpus_per_node
    notes.assume("cluster.gpus_per_node", 8, "assumed: no hardware profile is named")
    return 8


# -- reliability -------------------------------------------------------------------------------------------------------
def _sources(plan: PlanFile, per_node: int, notes: Notes) -> tuple[Source, ...]:
    spec = plan.reliability
    result = []
    for failure in spec.failures:
        rate = failure.rate_per_node_day
        if rate is None:
            rate = (failure.rate_per_gpu_day or 0.0) * per_node
        notes.assume(
            f"failures of {failure.component}",
            f"{rate:.4g} per node-day",
            failure.source or "the plan file",
            kind_of(failure.source),
        )
        result.append(
            Source(
                failure.component,
                rate / DAY_S,
                int(failure.replaces_node),
                spec.detection if failure.detection is None else failure.detection,
                spec.repair if failure.repair is None else failure.repair,
            )
        )
    for group in spec.correlated:
        notes.assume(
            f"failures of {group.name}",
            f"{group.rate_per_group_day:.4g} per day for every {group.nodes_per_group} nodes",
            group.source or "the plan file",
            kind_of(group.source),
        )
        rate = group.rate_per_group_day / group.nodes_per_group
        result.append(Source(group.name, rate / DAY_S, group.nodes_per_group, spec.detection, group.repair))
    return tuple(result)


RECOVERY_TIMES = ("detection", "replacement", "restart", "initialisation", "repair")


def _note_times(plan: PlanFile, notes: Notes) -> None:
    """Write down the times of recovery, and the rules that are always assumed."""
    spec = plan.reliability
    for name in RECOVERY_TIMES:
        given = name in spec.model_fields_set
        source = "the plan file" if given else "assumed: default"
        notes.assume(f"reliability.{name}", format_seconds(getattr(spec, name)), source, "given" if given else "assumed")
    notes.assume("failures", "Poisson, independent of load", "assumed: exponential times between failures")
    if any(phase.scenario is None for phase in plan.phases) and plan.cluster.expansions:
        notes.assume("given speeds", "scale with the number of GPUs", "assumed: linear")


def _run_model(plan: PlanFile, stages: tuple[Stage, ...], sources: tuple[Source, ...], saves: CheckpointTimes) -> RunModel:
    spec, slow = plan.reliability, plan.reliability.slow_nodes
    return RunModel(
        phases=tuple(phase_name(plan, i) for i in range(len(plan.phases))),
        stages=stages,
        growth=tuple(Growth(None if g.day is None else g.day * DAY_S, g.at_tokens, g.add_nodes) for g in plan.cluster.expansions),
        sources=sources,
        slow_nodes=None
        if slow is None
        else SlowNodeModel(
            slow.rate_per_node_day / DAY_S,
            slow.initial_fraction,
            slow.slowdown,
            slow.detection,
            slow.action == "replace",
        ),
        recovery=Recovery(
            spec.replacement,
            spec.cold_replacement,
            spec.restart,
            spec.initialisation,
            saves.load_s,
            spec.silent_fraction,
            spec.silent_detection,
            spec.repair_distribution == "fixed",
        ),
        windows=tuple(
            Window(w.name, w.first_day * DAY_S, w.duration, None if w.every_days is None else w.every_days * DAY_S)
            for w in plan.maintenance
        ),
        hot_spares=plan.cluster.spares,
        cold_spares=plan.cluster.cold_spares,
        restart_between_phases=plan.restart_between_phases,
        rate_uncertainty=spec.rate_uncertainty,
    )


def _checkpoint_limits(plan: PlanFile, times: CheckpointTimes, interval: float, mtti: float) -> list[str]:
    found = []
    wanted = plan.checkpoints.interval
    if isinstance(wanted, float | int) and times.save_s - times.stall_s > wanted + 1e-9:
        found.append(
            f"storage: one save takes {times.save_s:.4g} s, so a checkpoint every {wanted:.4g} s is not possible; "
            f"every {interval:.4g} s is"
        )
    if times.save_s > mtti:
        found.append(
            f"storage: one save takes {times.save_s / 60:.4g} min, longer than the mean time to interrupt of {mtti / 60:.4g} min"
        )
    capacity, size = plan.checkpoints.storage_capacity, times.bytes
    if capacity is not None and size is not None and size <= capacity < plan.checkpoints.keep * size:
        found.append(
            f"storage: {plan.checkpoints.keep} checkpoints of {size / 1e12:.4g} TB exceed its capacity of {capacity / 1e12:.4g} TB"
        )
    return found


def _check_hope(run: RunModel, notes: Notes) -> None:
    """Call a run impossible whose failures leave it no time to train."""
    for index, stage in enumerate(run.stages):
        mtti, recovery = run.mtti_s(index), run.mean_recovery_s()
        expected = goodput_exact(stage.interval_s, stage.stall_s, recovery, mtti)
        if expected < HOPELESS_GOODPUT:
            load = run.recovery.load_s
            parts = {
                "checkpoint stall": stage.stall_s,
                "checkpoint load": load,
                "recovery besides loading": recovery - load,
                "checkpoint interval": stage.interval_s,
            }
            binds = max(parts, key=lambda name: parts[name])
            notes.impossible(
                f"failures: {stage.nodes} nodes fail every {mtti / 60:.4g} min, too often for recovery "
                f"({recovery / 60:.4g} min), stall ({stage.stall_s / 60:.4g} min) and interval "
                f"({stage.interval_s / 60:.4g} min); the {binds} binds (expected goodput {expected:.2%})"
            )
