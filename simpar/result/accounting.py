"""Where a step's time goes, per role: compute, waits by cause, from the timeline alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from simpar.engine.timeline import Timeline
from simpar.program.program import COMPUTE_KINDS, FloatArray, OpKind, Program

_TINY_S = 1e-12
_DATA = (OpKind.GATHER_PARAMETERS, OpKind.REDUCE_GRADIENTS)
_SENDS = (OpKind.SEND_FORWARD, OpKind.SEND_BACKWARD)
_PIPELINE = frozenset(
    {OpKind.FORWARD, OpKind.BACKWARD, OpKind.INPUT_GRADIENT, OpKind.WEIGHT_GRADIENT, OpKind.OVERLAPPED}
)


@dataclass(frozen=True, slots=True)
class Accounting:
    """Seconds per role [roles]; the rows add up to the makespan.

    Attributes:
        busy: compute ops running (their own exposed collectives included).
        bubble: waiting for another stage.
        pp: waiting for a pipeline send in flight, or held by a blocking one.
        dp: waiting for a parameter gather or a gradient reduction.
        makespan: of the whole step.
    """

    busy: FloatArray
    bubble: FloatArray
    pp: FloatArray
    dp: FloatArray
    makespan: float


def account(program: Program, timeline: Timeline) -> Accounting:
    """Attribute every second of every role's compute stream."""
    roles = max((stream.role for stream in program.streams), default=-1) + 1
    busy, bubble, pp, dp = (np.zeros(roles) for _ in range(4))
    start, finish = timeline.start, timeline.finish
    makespan = timeline.makespan
    is_compute = np.isin(program.kind, [int(k) for k in COMPUTE_KINDS])
    for index, stream in enumerate(program.streams):
        if stream.kind != "compute":
            continue
        ops = program.stream_ops[program.stream_ptr[index] : program.stream_ptr[index + 1]]
        role = stream.role
        own = is_compute[ops]
        lengths = finish[ops] - start[ops]
        busy[role] += float(lengths[own].sum())
        pp[role] += float(lengths[~own].sum())
        before = np.concatenate([[0.0], finish[ops[:-1]]])
        gaps = start[ops] - before
        for position in np.flatnonzero(gaps > _TINY_S):
            op = int(ops[position])
            _attribute(program, timeline, op, float(before[position]), role, (bubble, pp, dp))
        tail = makespan - (float(finish[ops[-1]]) if len(ops) else 0.0)
        if tail > _TINY_S:
            _tail(program, timeline, role, makespan - tail, (bubble, dp))
    return Accounting(busy, bubble, pp, dp, makespan)


def _attribute(
    program: Program, timeline: Timeline, op: int, free: float, role: int, sinks: tuple[FloatArray, FloatArray, FloatArray]
) -> None:
    """Split the wait before `op` (from `free` on) by the dependency that ended it."""
    bubble, pp, dp = sinks
    start = float(timeline.start[op])
    deps = program.dep_ops[program.dep_ptr[op] : program.dep_ptr[op + 1]]
    if not len(deps):
        bubble[role] += start - free
        return
    cause = int(deps[np.argmax(timeline.finish[deps])])
    running = start - max(float(timeline.start[cause]), free)
    kind = OpKind(int(program.kind[cause]))
    if kind in _DATA:
        # Before the collective could even start its own input was late: that part is another stage's.
        behind = _ready(program, timeline, cause)
        waited = start - max(behind, free)
        dp[role] += waited
        bubble[role] += start - free - waited
    elif kind in _SENDS or kind is OpKind.COLLECTIVE:
        pp[role] += max(running, 0.0)
        bubble[role] += start - free - max(running, 0.0)
    else:
        bubble[role] += start - free


def _ready(program: Program, timeline: Timeline, op: int) -> float:
    """When the compute that the collective `op` (or the ones queued before it) waited for had finished."""
    deps = program.dep_ops[program.dep_ptr[op] : program.dep_ptr[op + 1]]
    return float(timeline.finish[deps].max()) if len(deps) else 0.0


def _tail(program: Program, timeline: Timeline, role: int, free: float, sinks: tuple[FloatArray, FloatArray]) -> None:
    """The wait from a role's last compute op to the end of the step."""
    bubble, dp = sinks
    mine = np.flatnonzero((program.role == role) & np.isin(program.kind, [int(k) for k in _DATA]))
    last = float(timeline.finish[mine].max()) if len(mine) else free
    waited = max(min(last, timeline.makespan) - free, 0.0)
    dp[role] += waited
    bubble[role] += timeline.makespan - free - waited


def bubble_fraction(program: Program, timeline: Timeline, accounting: Accounting) -> float:
    """Mean wait for other stages over the pipeline phase (first to last forward or backward op of any rank)."""
    mask = np.isin(program.kind, [int(k) for k in _PIPELINE])
    if not mask.any():
        return 0.0
    window = float(timeline.finish[mask].max() - timeline.start[mask].min())
    return float(accounting.bubble.mean() / window) if window else 0.0
