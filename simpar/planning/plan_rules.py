"""The rules of a plan file that span several fields; every broken one is reported, together."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from simpar.errors import InputError, Violation
from simpar.specs.planfile import Phase, PlanFile

SPEEDS = ("scenario", "tokens_per_s", "tokens_per_s_per_gpu", "step_time", "flops", "gpu_hours")
HORIZON_WINDOWS = 400
"""Repeats of a maintenance window that are compared with the others."""


def check_plan(plan: PlanFile) -> None:
    """Check `plan` against all rules.

    Raises:
        InputError: every violation.
    """
    found = [
        *_phase_rules(plan),
        *_order_rules(plan),
        *_cluster_rules(plan),
        *_reliability_rules(plan),
        *_window_rules(plan),
        *_other_rules(plan),
    ]
    if found:
        raise InputError([Violation(v.field, v.value, v.rule, v.right, plan.file) for v in found])


def _phase_rules(plan: PlanFile) -> Iterator[Violation]:
    for index, phase in enumerate(plan.phases):
        where = f"phases.{index}"
        given = [name for name in SPEEDS if getattr(phase, name) is not None]
        if len(given) != 1:
            yield Violation(where, given or None, "needs exactly one source of speed", f"give one of {', '.join(SPEEDS)}")
        yield from _speed_rules(phase, where)
        if phase.scenario is None and phase.layout == "search":
            yield Violation(f"{where}.layout", "search", "a layout can only be searched for a scenario", "give phases.scenario")
        if phase.scenario is None and phase.set:
            yield Violation(f"{where}.set", phase.set, "overrides need a scenario", "give phases.scenario")
        ramp = sum(step.tokens for step in phase.batch_ramp)
        if ramp > phase.tokens:
            yield Violation(f"{where}.batch_ramp", ramp, "the ramp is longer than its phase", f"at most {phase.tokens:g} tokens")


def _speed_rules(phase: Phase, where: str) -> Iterator[Violation]:
    rated = phase.tokens_per_s is not None or phase.step_time is not None
    if rated and phase.rated_gpus is None:
        yield Violation(
            f"{where}.rated_gpus",
            None,
            "is required with tokens_per_s and step_time",
            "give the number of GPUs it was measured on",
        )
    if phase.step_time is not None:
        for name in ("sequence_length", "global_batch_size"):
            if getattr(phase, name) is None:
                yield Violation(f"{where}.{name}", None, "is required with step_time", "a step trains their product")
        if phase.step_time == 0:
            yield Violation(f"{where}.step_time", 0, "must be longer than zero")
    if phase.flops is not None and phase.flops.num_layers and phase.sequence_length is None:
        yield Violation(f"{where}.sequence_length", None, "is required where flops counts attention", "tokens per sequence")


def _order_rules(plan: PlanFile) -> Iterator[Violation]:
    position = 0.0
    for index, phase in enumerate(plan.phases):
        start = phase.starts_at_tokens
        if start is not None and abs(start - position) > 1e-6 * max(position, 1.0):
            kind = "overlaps the phase before" if start < position else "leaves a gap after the phase before"
            yield Violation(f"phases.{index}.starts_at_tokens", start, kind, f"that one ends at {position:g} tokens")
        position += phase.tokens
    for index, growth in enumerate(plan.cluster.expansions):
        if growth.at_tokens is not None and growth.at_tokens >= position:
            yield Violation(
                f"cluster.expansions.{index}.at_tokens",
                growth.at_tokens,
                "is after the end of training",
                f"less than {position:g} tokens",
            )


def _cluster_rules(plan: PlanFile) -> Iterator[Violation]:
    kinds = set()
    for index, growth in enumerate(plan.cluster.expansions):
        if (growth.day is None) == (growth.at_tokens is None):
            yield Violation(f"cluster.expansions.{index}", None, "needs exactly one of day and at_tokens")
        kinds.add(growth.day is None)
    if len(kinds) > 1:
        yield Violation(
            "cluster.expansions",
            None,
            "their order is only known where all are by day or all by tokens",
            "write all of them the same way",
        )


def _reliability_rules(plan: PlanFile) -> Iterator[Violation]:
    for index, failure in enumerate(plan.reliability.failures):
        if (failure.rate_per_node_day is None) == (failure.rate_per_gpu_day is None):
            yield Violation(
                f"reliability.failures.{index}",
                failure.component,
                "needs exactly one of rate_per_node_day and rate_per_gpu_day",
            )


def _window_rules(plan: PlanFile) -> Iterator[Violation]:
    for index, window in enumerate(plan.maintenance):
        days = window.duration / 86400.0
        if window.every_days is not None and window.every_days <= days:
            yield Violation(
                f"maintenance.{index}.every_days",
                window.every_days,
                "the window overlaps its own repetition",
                f"more than its duration of {days:g} days",
            )
        for other in range(index):
            clash = _first_overlap(plan, other, index)
            if clash is not None:
                yield Violation(
                    f"maintenance.{index}",
                    window.name,
                    f"overlaps window {other} ({plan.maintenance[other].name}) on day {clash:g}",
                    "move or merge them",
                )


def _occurrences(plan: PlanFile, index: int) -> list[tuple[float, float]]:
    window = plan.maintenance[index]
    starts = [window.first_day]
    if window.every_days:
        starts = [window.first_day + i * window.every_days for i in range(HORIZON_WINDOWS)]
    return [(start, start + window.duration / 86400.0) for start in starts]


def _first_overlap(plan: PlanFile, first: int, second: int) -> float | None:
    spans = sorted((start, end, i) for i in (first, second) for start, end in _occurrences(plan, i))
    for (_, end, i), (start, _, j) in pairwise(spans):
        if i != j and start < end:
            return start
    return None


def _other_rules(plan: PlanFile) -> Iterator[Violation]:
    if plan.prices.rent is not None and plan.prices.own is not None:
        yield Violation("prices", None, "machines are either rented or owned", "give prices.rent or prices.own")
    power = plan.power
    if power.gpu_busy is not None and power.gpu_idle is not None and power.gpu_idle > power.gpu_busy:
        yield Violation("power.gpu_idle", power.gpu_idle, "is above power.gpu_busy", f"at most {power.gpu_busy:g} W")
    if plan.deadline is not None and plan.deadline <= 0:
        yield Violation("deadline", plan.deadline, "must be longer than zero", '"60 d"')
    saves = plan.checkpoints
    if saves.write_bandwidth == 0:
        yield Violation("checkpoints.write_bandwidth", 0, "must be more than zero", '"2 TB/s"')
    if saves.read_bandwidth == 0:
        yield Violation("checkpoints.read_bandwidth", 0, "must be more than zero", '"2 TB/s"')
    if saves.snapshot_bandwidth == 0:
        yield Violation("checkpoints.snapshot_bandwidth", 0, "must be more than zero", '"20 GB/s"')
    if saves.mode == "blocking" and saves.stall is not None and saves.save_time is not None and saves.stall != saves.save_time:
        yield Violation(
            "checkpoints.stall",
            saves.stall,
            "a blocking save stalls for all of save_time",
            'leave it out, or mode = "asynchronous"',
        )
    unknown_size = saves.bytes is None and saves.parameters is None and all(p.scenario is None for p in plan.phases)
    times_given = (
        saves.save_time is not None and saves.load_time is not None and (saves.mode == "blocking" or saves.stall is not None)
    )
    if unknown_size and not times_given:
        yield Violation(
            "checkpoints.bytes",
            None,
            "the size of a checkpoint is unknown",
            "give checkpoints.bytes, checkpoints.parameters, or save_time, load_time and stall",
        )
