"""A measured step of one rank against its prediction: the difference by cause, op by op where they can be paired."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import mean
from typing import Any, Final

from simpar.errors import InputError, Violation
from simpar.live.trace_align import (
    CollectiveRow,
    Late,
    OpRow,
    align_compute,
    collective_rows,
    late_collectives,
    op_rows,
)  # fmt: skip
from simpar.live.trace_partition import ORDER, partition, with_launch_gaps, with_waits
from simpar.live.trace_slices import Slice, predicted_slices
from simpar.parallel.layout import Layout
from simpar.result.interpret import Priced, interpret
from simpar.result.result import Result
from simpar.specs.scenario import Scenario
from simpar.step import prepare, run

GROUPS: Final = {
    "compute": ("gemm", "attention", "memory_bound", "optimizer"), "communication": ("tp", "cp", "ep", "dp", "pp", "other"),
    "bubble": ("bubble",), "launch gaps": ("launch",), "other": ("copy", "idle"),
}  # fmt: skip
"""Causes as the four things that a difference is attributed to, and the rest."""


@dataclass(frozen=True, slots=True)
class MeasuredTrace:
    """A trace as its reader gives it.

    Attributes:
        steps: slices of every whole step, seconds from the step's own begin.
        lengths_s: of the steps.
        file, device: where it was read from; "cuda" or "cpu".
        rank, world_size: as the trace says; none = it does not.
        kernels: kind -> (name, launches, seconds) per step of the longest, over all steps.
        notes: what the reader had to assume.
    """

    steps: tuple[tuple[Slice, ...], ...]
    lengths_s: tuple[float, ...]
    file: str
    device: str
    rank: int | None
    world_size: int | None
    kernels: Mapping[str, Sequence[tuple[str, float, float]]]
    notes: tuple[str, ...] = ()
    whole: bool = True
    """Steps last to the next one's begin; False: the only one ends with its last op."""


Reader = Callable[[Layout, int | None], MeasuredTrace]
"""Reads the trace for a layout and the rank asked for (none = what the trace says): groups of ranks name dimensions."""


@dataclass(frozen=True, slots=True)
class Cause:
    """Exclusive seconds of the step under one cause."""

    name: str
    group: str
    predicted_s: float
    measured_s: float

    @property
    def difference_s(self) -> float:
        """What it adds to the difference of the steps."""
        return self.measured_s - self.predicted_s


@dataclass(frozen=True, slots=True)
class TraceDiff:
    """The comparison.

    Attributes:
        scenario: its name.
        rank, pipeline_rank: compared.
        predicted_step_s, measured_step_s: of this rank's window; causes add up to each.
        ops, collectives, late: op by op; empty where they cannot be paired.
        predicted, measured: slices of the predicted step and of the measured step shown.
        shown_step_s: its length.
        lag: (predicted begin, how much later it began in the shown step) of every pair.
    """

    scenario: str
    file: str
    device: str
    rank: int
    pipeline_rank: int
    steps: int
    predicted_step_s: float
    measured_step_s: float
    causes: tuple[Cause, ...]
    ops: tuple[OpRow, ...]
    collectives: tuple[CollectiveRow, ...]
    late: tuple[Late, ...]
    kernels: Mapping[str, Sequence[tuple[str, float, float]]]
    notes: tuple[str, ...]
    predicted: tuple[Slice, ...]
    measured: tuple[Slice, ...]
    shown_step_s: float
    lag: tuple[tuple[float, float], ...]

    def group(self, name: str) -> float:
        """Seconds that a group of causes adds to the difference."""
        return sum(c.difference_s for c in self.causes if c.group == name)

    def to_json(self) -> dict[str, Any]:
        """The public object, without the timelines."""
        return {
            "scenario": self.scenario, "trace": self.file, "device": self.device, "rank": self.rank,
            "pipeline_rank": self.pipeline_rank, "steps": self.steps, "predicted_step_time_s": self.predicted_step_s,
            "measured_step_time_s": self.measured_step_s, "difference_s": self.measured_step_s - self.predicted_step_s,
            "difference_by_group_s": {name: self.group(name) for name in GROUPS},
            "causes": [{**asdict(c), "difference_s": c.difference_s} for c in self.causes],
            "ops": [asdict(row) for row in self.ops], "collectives": [asdict(row) for row in self.collectives],
            "late_collectives": [asdict(row) for row in self.late],
            "kernels": {
                kind: [{"name": n, "launches": c, "seconds": s} for n, c, s in rows] for kind, rows in self.kernels.items()
            },
            "notes": list(self.notes),
        }  # fmt: skip


def predict(scenario: Scenario) -> tuple[Priced, Result]:
    """The scenario's step, op by op."""
    priced = prepare(scenario, detail="op")
    return priced, interpret(priced, run(priced, interference=scenario.effects.interference))


def diff(scenario: Scenario, read: Reader, rank: int | None = None) -> TraceDiff:
    """The scenario's prediction against a trace of one of its ranks.

    Args:
        rank: global rank; none = what the trace says, else 0.

    Raises:
        InputError: the trace cannot be read, or the layout has no such rank.
    """
    priced, result = predict(scenario)
    layout = priced.layout
    _check_rank(rank, layout, "--rank")
    trace = read(layout, rank)
    if rank is None:
        _check_rank(trace.rank, layout, f"{trace.file}: distributedInfo.rank")
    chosen = rank if rank is not None else trace.rank or 0
    pipeline_rank = layout.mesh.coordinates(chosen)["pp"]
    return compare(priced, result, trace, chosen, pipeline_rank)


def _check_rank(rank: int | None, layout: Layout, field: str) -> None:
    if rank is not None and not 0 <= rank < layout.mesh.world_size:
        right = f"give a rank of 0 to {layout.mesh.world_size - 1} with --rank, or the scenario that the trace ran"
        raise InputError([Violation(field, rank, f"the scenario has {layout.mesh.world_size} ranks", right)])


def compare(priced: Priced, result: Result, trace: MeasuredTrace, rank: int, pipeline_rank: int) -> TraceDiff:
    """Both timelines of one rank by cause and op by op."""
    layout = priced.layout
    waits = "bubble" if layout.plan.pp > 1 else "idle"
    expected = predicted_slices(priced, result, pipeline_rank)
    begin, end = _window(result, expected, whole=trace.whole)
    mine = partition(expected, begin, end, waits)
    transfers: dict[float, float] = {}
    for item in expected:
        if item.collective == "send_recv" and item.kind == "pp":
            transfers[item.bytes] = min(item.seconds, transfers.get(item.bytes, item.seconds))
    notes, known, parts, steps, lengths = list(trace.notes), True, [], [], []
    for slices, length in zip(trace.steps, trace.lengths_s, strict=True):
        moved = with_waits(slices, transfers)
        first = 0.0 if trace.whole else min(s.start_s for s in moved)
        prepared, told = with_launch_gaps(moved, first, length)
        known &= told
        steps.append([s.moved(-first) for s in prepared])
        parts.append(partition(prepared, first, length, waits))
        lengths.append(length - first)
    if not trace.whole:
        notes.append("one step: what a rank waits before its first and after its last op is left out of both sides")
    if not known and trace.device == "cuda":
        notes.append("the trace holds no launches: gaps below 100 us count as the host's, longer ones as waits")
    if trace.world_size and trace.world_size != layout.mesh.world_size:
        notes.append(f"the trace ran on {trace.world_size} ranks, the scenario has {layout.mesh.world_size}")
    shown = sorted(range(len(steps)), key=lambda i: lengths[i])[len(steps) // 2]
    pairs, problem = align_compute(expected, steps[shown])
    notes += [problem] if problem else []
    lag = tuple(
        (p.predicted[0].start_s - begin, p.measured[0].start_s - (p.predicted[0].start_s - begin))
        for p in pairs
        if p.predicted and p.measured
    )
    return TraceDiff(
        scenario=layout.scenario.name, file=trace.file, device=trace.device, rank=rank, pipeline_rank=pipeline_rank,
        steps=len(steps), predicted_step_s=mine.total, measured_step_s=mean(lengths),
        causes=_causes(mine.seconds, [p.seconds for p in parts]), ops=tuple(op_rows(pairs)),
        collectives=tuple(collective_rows(expected, trace.steps[shown])),
        late=tuple(late_collectives(expected, trace.steps[shown])), kernels=trace.kernels, notes=tuple(notes),
        predicted=tuple(expected), measured=tuple(steps[shown]), shown_step_s=lengths[shown], lag=lag,
    )  # fmt: skip


def _window(result: Result, expected: Sequence[Slice], *, whole: bool) -> tuple[float, float]:
    """Of the predicted step: all of it, or from the rank's first op to its last."""
    if not whole:
        return min(s.start_s for s in expected), max(s.end_s for s in expected)
    synchronous = result.timeline.makespan <= result.step_time_s * (1 + 1e-9)
    begin = 0.0 if synchronous else min(s.start_s for s in expected)
    return begin, begin + result.step_time_s


def _causes(predicted: Mapping[str, float], measured: Sequence[Mapping[str, float]]) -> tuple[Cause, ...]:
    sums: dict[str, float] = defaultdict(float)
    for part in measured:
        for name, seconds in part.items():
            sums[name] += seconds / len(measured)
    groups = {name: group for group, names in GROUPS.items() for name in names}
    return tuple(
        Cause(name, groups[name], predicted.get(name, 0.0), sums.get(name, 0.0))
        for name in (*ORDER, "bubble", "idle")
        if predicted.get(name) or sums.get(name)
    )
