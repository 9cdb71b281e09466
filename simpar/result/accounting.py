"""Where a step's time goes, per role: compute, waits by cause, from the timeline alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from simpar.engine.timeline import Timeline
from simpar.errors import InternalError
from simpar.program.program import COMPUTE_KINDS, FloatArray, OpKind, Program

BoolArray = NDArray[np.bool_]

_TINY_S = 1e-12
_DATA = (int(OpKind.GATHER_PARAMETERS), int(OpKind.REDUCE_GRADIENTS))
_SENDS = (int(OpKind.SEND_FORWARD), int(OpKind.SEND_BACKWARD))
_INSIDE = (int(OpKind.COLLECTIVE), int(OpKind.OFFLOAD))
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
    """Waits by cause and role. Plain lists: a large step has thousands of gaps, each of a few numbers."""

    def __init__(self, program: Program, timeline: Timeline) -> None:
        self.program, self.makespan = program, timeline.makespan
        self.roles = max((stream.role for stream in program.streams), default=-1) + 1
        self.waits = {name: [0.0] * self.roles for name in ("bubble", "pp", "dp")}
        self.start: list[float] = timeline.start.tolist()
        self.finish: list[float] = timeline.finish.tolist()
        self._kind: list[int] = program.kind.tolist()
        self._ptr: list[int] = program.dep_ptr.tolist()
        self._deps: list[int] = program.dep_ops.tolist()
        self._dimensions: dict[int, str] = {}

    def add(self, name: str, role: int, seconds: float) -> None:
        found = self.waits.get(name)
        if found is None:  # Not setdefault: it would build a list of all roles on every call.
            found = self.waits[name] = [0.0] * self.roles
        found[role] += seconds

    def gap(self, op: int, free: float, role: int) -> None:
        """Split the wait before `op` (from `free` on) by the dependency that ended it."""
        start = self.start[op]
        deps = self._deps[self._ptr[op] : self._ptr[op + 1]]
        if not deps:
            self.add("bubble", role, start - free)
            return
        cause = max(deps, key=self.finish.__getitem__)
        kind = self._kind[cause]
        if kind in _DATA:
            # Until its own input was there the collective could not start: that part is another stage's.
            waited, name = start - max(self.ready(cause), free), "dp"
        elif kind in _SENDS or kind in _INSIDE:
            waited, name = max(start - max(self.start[cause], free), 0.0), self.dimension(cause)
        else:
            waited, name = 0.0, "bubble"
        self.add(name, role, waited)
        self.add("bubble", role, start - free - waited)

    def ready(self, op: int) -> float:
        """When the compute that collective `op` waited for had finished."""
        return max((self.finish[d] for d in self._deps[self._ptr[op] : self._ptr[op + 1]]), default=0.0)

    def dimension(self, op: int) -> str:
        """Which dimension a communication op belongs to, by its stream."""
        ptr, streams = self._op_streams
        for stream in streams[ptr[op] : ptr[op + 1]]:
            found = self._dimensions.get(stream)
            if found is None:
                kind = self.program.streams[stream].kind
                found = self._dimensions[stream] = kind.removeprefix("block_").split("_")[0]
            # A blocking send holds the compute stream as well.
            if found != "compute":
                return found
        raise InternalError(f"{self.program.label(op)} communicates on a compute stream only")

    def tail(self, role: int, free: float) -> None:
        """The wait from a role's last compute op to the end of the step."""
        last = self._last_data.get(role, free)
        waited = max(min(last, self.makespan) - free, 0.0)
        self.add("dp", role, waited)
        self.add("bubble", role, self.makespan - free - waited)

    @cached_property
    def _op_streams(self) -> tuple[list[int], list[int]]:
        ptr, streams = self.program.op_streams
        return ptr.tolist(), streams.tolist()

    @cached_property
    def _last_data(self) -> dict[int, float]:
        """Role -> when its last gather or reduction of parameters and gradients ends."""
        found: dict[int, float] = {}
        mine = np.flatnonzero(np.isin(self.program.kind, _DATA))
        for role, op in zip(self.program.role[mine].tolist(), mine.tolist(), strict=True):
            found[role] = max(self.finish[op], found.get(role, -np.inf))
        return found


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
        late = np.flatnonzero(start[ops] - before > _TINY_S)
        for op, free in zip(ops[late].tolist(), before[late].tolist(), strict=True):
            sinks.gap(op, free, stream.role)
        end = float(finish[ops[-1]]) if len(ops) else 0.0
        if timeline.makespan - end > _TINY_S:
            sinks.tail(stream.role, end)
    pipeline = _window(program, timeline, np.isin(program.kind, [int(k) for k in _PIPELINE]), waits=waits)
    found = {name: np.array(seconds) for name, seconds in sinks.waits.items()}
    if waits:
        return Accounting(busy, found, timeline.makespan, pipeline)
    step = _window(program, timeline, np.ones(program.num_ops, dtype=bool), waits=False)
    # Idling before a rank's first op and after its last is no loss where the neighbouring steps fill it.
    for name in ("bubble", "pp", "dp"):
        over = busy + sum(found.values()) - step
        found[name] = found[name] - np.clip(over, 0.0, found[name])
    return Accounting(busy, found, step, pipeline)


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
