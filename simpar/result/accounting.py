"""Where a step's time goes, per role: compute, waits by cause, from the timeline alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simpar.engine.timeline import Timeline
from simpar.program.program import COMPUTE_KINDS, FloatArray, OpKind, Program

BoolArray = NDArray[np.bool_]

_TINY_S = 1e-12
_DATA = (OpKind.GATHER_PARAMETERS, OpKind.REDUCE_GRADIENTS)
_SENDS = (OpKind.SEND_FORWARD, OpKind.SEND_BACKWARD)
_PIPELINE = frozenset(
    {OpKind.FORWARD, OpKind.BACKWARD, OpKind.INPUT_GRADIENT, OpKind.WEIGHT_GRADIENT, OpKind.OVERLAPPED}
)


@dataclass(frozen=True, slots=True)
class Accounting:
    """Seconds per role [roles]; busy and the waits add up to the step.

    Attributes:
        busy: compute ops running (at stage and layer detail their own exposed collectives included).
        waits: cause -> seconds: "bubble" (another stage), "pp" (a send in flight, or one that holds the compute stream), "dp"
            (a parameter gather or gradient reduction), and at op detail "tp", "cp", "ep".
        makespan: of the whole step, from one step's start to the next one's. Where ranks do not wait for each other at its end,
            the longest that any rank takes from its own first op to its own last.
        pipeline_s: of its forwards and backwards, by the same rule.
    """

    busy: FloatArray
    waits: dict[str, FloatArray]
    makespan: float
    pipeline_s: float = 0.0

    @property
    def bubble(self) -> FloatArray:
        """Waiting for another stage."""
        return self.waits["bubble"]


class _Sinks:
    def __init__(self, program: Program, timeline: Timeline) -> None:
        self.program, self.timeline = program, timeline
        self.roles = max((stream.role for stream in program.streams), default=-1) + 1
        self.waits = {name: np.zeros(self.roles) for name in ("bubble", "pp", "dp")}

    def add(self, name: str, role: int, seconds: float) -> None:
        self.waits.setdefault(name, np.zeros(self.roles))[role] += seconds

    def gap(self, op: int, free: float, role: int) -> None:
        """Split the wait before `op` (from `free` on) by the dependency that ended it."""
        program, timeline = self.program, self.timeline
        start = float(timeline.start[op])
        deps = program.dep_ops[program.dep_ptr[op] : program.dep_ptr[op + 1]]
        if not len(deps):
            self.add("bubble", role, start - free)
            return
        cause = int(deps[np.argmax(timeline.finish[deps])])
        kind = OpKind(int(program.kind[cause]))
        if kind in _DATA:
            # Until its own input was there the collective could not start: that part is another stage's.
            waited, name = start - max(self.ready(cause), free), "dp"
        elif kind in _SENDS or kind in (OpKind.COLLECTIVE, OpKind.OFFLOAD):
            waited, name = max(start - max(float(timeline.start[cause]), free), 0.0), self.dimension(cause)
        else:
            waited, name = 0.0, "bubble"
        self.add(name, role, waited)
        self.add("bubble", role, start - free - waited)

    def ready(self, op: int) -> float:
        """When the compute that collective `op` waited for had finished."""
        program = self.program
        deps = program.dep_ops[program.dep_ptr[op] : program.dep_ptr[op + 1]]
        return float(self.timeline.finish[deps].max()) if len(deps) else 0.0

    def dimension(self, op: int) -> str:
        """Which dimension a communication op belongs to, by its stream."""
        ptr, streams = self.program.op_streams
        kinds = (self.program.streams[int(s)].kind for s in streams[ptr[op] : ptr[op + 1]])
        # A blocking send holds the compute stream as well.
        return next(kind for kind in kinds if kind != "compute").removeprefix("block_").split("_")[0]

    def tail(self, role: int, free: float) -> None:
        """The wait from a role's last compute op to the end of the step."""
        program, timeline = self.program, self.timeline
        mine = np.flatnonzero((program.role == role) & np.isin(program.kind, [int(k) for k in _DATA]))
        last = float(timeline.finish[mine].max()) if len(mine) else free
        waited = max(min(last, timeline.makespan) - free, 0.0)
        self.add("dp", role, waited)
        self.add("bubble", role, timeline.makespan - free - waited)


def account(program: Program, timeline: Timeline, *, waits: bool = True) -> Accounting:
    """Attribute every second of every role's compute stream.

    Args:
        waits: every rank waits for all others before the next step. False: each starts it as soon as it has ended its own part
            of this one, so that steps of ranks that start and end at different times fit into each other.
    """
    sinks = _Sinks(program, timeline)
    busy = np.zeros(sinks.roles)
    start, finish = timeline.start, timeline.finish
    is_compute = np.isin(program.kind, [int(k) for k in COMPUTE_KINDS])
    for index, stream in enumerate(program.streams):
        if stream.kind != "compute":
            continue
        ops = program.stream_ops[program.stream_ptr[index] : program.stream_ptr[index + 1]]
        lengths = finish[ops] - start[ops]
        own = is_compute[ops]
        busy[stream.role] += float(lengths[own].sum())
        sinks.add("pp", stream.role, float(lengths[~own].sum()))
        before = np.concatenate([[0.0], finish[ops[:-1]]])
        for position in np.flatnonzero(start[ops] - before > _TINY_S):
            sinks.gap(int(ops[position]), float(before[position]), stream.role)
        end = float(finish[ops[-1]]) if len(ops) else 0.0
        if timeline.makespan - end > _TINY_S:
            sinks.tail(stream.role, end)
    pipeline = _window(program, timeline, np.isin(program.kind, [int(k) for k in _PIPELINE]), waits=waits)
    if waits:
        return Accounting(busy, sinks.waits, timeline.makespan, pipeline)
    step = _window(program, timeline, np.ones(program.num_ops, dtype=bool), waits=False)
    # Idling before a rank's first op and after its last is no loss where the neighbouring steps fill it.
    for name in ("bubble", "pp", "dp"):
        over = busy + sum(sinks.waits.values()) - step
        sinks.waits[name] = sinks.waits[name] - np.clip(over, 0.0, sinks.waits[name])
    return Accounting(busy, sinks.waits, step, pipeline)


def _window(program: Program, timeline: Timeline, mask: BoolArray, *, waits: bool) -> float:
    """Seconds from the first to the last of the ops in `mask`: over all roles together, or the longest of any one role."""
    if not mask.any():
        return 0.0
    start, finish, role = timeline.start[mask], timeline.finish[mask], program.role[mask]
    if waits:
        return float(finish.max() - start.min())
    roles = int(role.max()) + 1
    first, last = np.full(roles, np.inf), np.full(roles, -np.inf)
    np.minimum.at(first, role, start)
    np.maximum.at(last, role, finish)
    return float((last - first)[np.isfinite(first)].max())


def bubble_fraction(accounting: Accounting) -> float:
    """Mean wait for other stages over the pipeline phase; sends in flight are counted apart, as "pp"."""
    return float(accounting.bubble.mean() / accounting.pipeline_s) if accounting.pipeline_s else 0.0
