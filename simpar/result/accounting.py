"""Where a step's time goes, per role: compute, waits by cause, from the timeline alone."""

from __future__ import annotations

from collections.abc import Container
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
_COMMUNICATION = (*_DATA, *_SENDS, int(OpKind.COLLECTIVE), int(OpKind.OFFLOAD))
_PIPELINE = frozenset({OpKind.FORWARD, OpKind.BACKWARD, OpKind.INPUT_GRADIENT, OpKind.WEIGHT_GRADIENT, OpKind.OVERLAPPED})


@dataclass(frozen=True, slots=True)
class Accounting:
    """Seconds per role [roles]; busy and the waits add up to the step.

    Attributes:
        busy: compute ops running (at stage and layer detail their own exposed collectives included).
        waits: cause -> seconds: "bubble" (another stage's compute), "pp" (a send in flight, or one that holds the compute stream),
            "dp" (a parameter gather or gradient reduction of this rank), at op detail "tp", "cp", "ep", and "skew" (reductions of
            other ranks, which all ranks wait for before the update). A second counts as communication only while a transfer of
            this rank runs, so that no dimension is exposed for longer than it is busy.
        makespan: of the whole step, from one step's start to the next one's. Where ranks do not wait for each other at its end,
            the longest that any rank takes from its own first op to its own last.
        pipeline_s: of its forwards and backwards, by the same rule.
        phase_bubble: of the bubble, what lies in those `pipeline_s` [roles]; the rest waits for other ranks' updates.
        ledger: what all of it follows from.
    """

    busy: FloatArray
    waits: dict[str, FloatArray]
    makespan: float
    pipeline_s: float
    phase_bubble: FloatArray
    ledger: Ledger

    @property
    def bubble(self) -> FloatArray:
        """Waiting for another stage."""
        return self.waits["bubble"]

    @property
    def busiest_bubble(self) -> float:
        """Idle share of the longest span of a rank, from its own first pass to its own last, beside the busiest rank's passes: a
        schedule whose ranks start and end in steps (ZB-H2) has spans shorter than the phase."""
        first, last = self.ledger.own
        span = float((last - first)[np.isfinite(first)].max(initial=0.0))
        return 1.0 - float(self.ledger.passes.max()) / span if span else 0.0


@dataclass(frozen=True, slots=True)
class Ledger:
    """What a timeline says by itself. Once a schedule repeats itself, all of it grows by the same with every further round.

    Attributes:
        busy, waits, phase_bubble: as in `Accounting`, waits with what the neighbouring steps fill.
        passes: seconds of each role's own passes [roles].
        own, every: (first start, last finish) of each role's passes, and of all its ops; infinite for a role without any.
        phase: `own`, or those of all roles where they wait for each other.
        makespan: finish of the last op.
        together: every rank waits for all others before the next step.
    """

    busy: FloatArray
    waits: dict[str, FloatArray]
    phase_bubble: FloatArray
    passes: FloatArray
    own: tuple[FloatArray, FloatArray]
    phase: tuple[FloatArray, FloatArray]
    every: tuple[FloatArray, FloatArray]
    makespan: float
    together: bool

    def settled(self) -> Accounting:
        """The accounting of this ledger."""
        (first, last), (begun, ended) = self.phase, self.every
        spans = np.isfinite(first)
        pipeline, found, inside = float((last - first)[spans].max(initial=0.0)), dict(self.waits), self.phase_bubble
        if self.together:
            return Accounting(self.busy, found, self.makespan, pipeline, inside, self)
        step = float((ended - begun)[np.isfinite(begun)].max(initial=0.0))
        # Idling before a rank's first op and after its last is no loss where the neighbouring steps fill it.
        for name in (cause for cause in ("bubble", "skew", "pp", "dp") if cause in found):
            over = self.busy + sum(found.values()) - step
            found[name] = found[name] - np.clip(over, 0.0, found[name])
        # A rank whose own phase is shorter than the longest idles for the difference, as far as nothing fills it.
        inside = inside + np.where(spans, pipeline - (last - first), 0.0)
        return Accounting(self.busy, found, step, pipeline, np.minimum(inside, found["bubble"]), self)

    def along(self, other: Ledger, times: float) -> Ledger:
        """`times` as far along as `other` is from this one."""

        def further(a: FloatArray, b: FloatArray) -> FloatArray:
            return np.where(np.isfinite(a), a + (b - a) * times, a)

        def both(a: tuple[FloatArray, FloatArray], b: tuple[FloatArray, FloatArray]) -> tuple[FloatArray, FloatArray]:
            return further(a[0], b[0]), further(a[1], b[1])

        none = np.zeros_like(self.busy)
        names = dict.fromkeys([*self.waits, *other.waits])
        waits = {n: further(self.waits.get(n, none), other.waits.get(n, none)) for n in names}
        return Ledger(
            further(self.busy, other.busy), waits, further(self.phase_bubble, other.phase_bubble),
            further(self.passes, other.passes), both(self.own, other.own), both(self.phase, other.phase),
            both(self.every, other.every), self.makespan + (other.makespan - self.makespan) * times, self.together,
        )  # fmt: skip


class _Sinks:
    """Waits by cause and role. Plain lists: a large step has thousands of gaps, each of a few numbers."""

    def __init__(self, program: Program, timeline: Timeline, phase: tuple[FloatArray, FloatArray]) -> None:
        self.program, self.makespan = program, timeline.makespan
        self.roles = max((stream.role for stream in program.streams), default=-1) + 1
        self._begin, self._end = phase[0].tolist(), phase[1].tolist()
        self.phase_bubble = [0.0] * self.roles
        self.waits = {name: [0.0] * self.roles for name in ("bubble", "pp", "dp")}
        self.start: list[float] = timeline.start.tolist()
        self.finish: list[float] = timeline.finish.tolist()
        self._kind: list[int] = program.kind.tolist()
        self._dimensions = [dimension_of(stream.kind) for stream in program.streams]

    def add(self, name: str, role: int, seconds: float) -> None:
        found = self.waits.get(name)
        if found is None:  # Not setdefault: it would build a list of all roles on every call.
            found = self.waits[name] = [0.0] * self.roles
        found[role] += seconds

    def waited(self, name: str, role: int, begin: float, end: float) -> None:
        """A wait of a role's compute stream, for one cause."""
        self.add(name, role, end - begin)

    def gap(self, op: int, free: float, role: int) -> None:
        """Split the wait of `role` before `op`, from `free` on."""
        self._bubble(role, free, self.start[op] - self._explained(op, self._last_cause[op], free, role))

    def _bubble(self, role: int, begin: float, end: float) -> None:
        """What communication does not explain; that it ends a gap, so that the bubble begins it."""
        self.waited("bubble", role, begin, end)
        self.phase_bubble[role] += max(min(end, self._end[role]) - max(begin, self._begin[role]), 0.0)

    def _explained(self, op: int, cause: int, free: float, role: int) -> float:
        """Charge what communication explains of the wait before `op`: back along the chain of what each op started upon, as long as
        that is communication of this role, or gradients that all ranks wait for. Returns these seconds.

        What runs on another rank when the chain leaves communication is no communication of this role, however it ends.
        """
        total = 0.0
        while cause >= 0 and self.finish[cause] > free and self._kind[cause] in _COMMUNICATION:
            name = self.dimension(cause)
            received = self._kind[cause] in _SENDS and role in self._roles_of(op)
            if not received and role not in self._roles_of(cause):
                if self._kind[cause] in _SENDS:
                    break
                name = "skew"
            begin = max(self.start[cause], free)
            self.waited(name, role, begin, self.finish[cause])
            total += self.finish[cause] - begin
            op, cause = cause, self._last_cause[cause]
        return total

    @cached_property
    def _last_cause(self) -> list[int]:
        """What each op waited for until it started: of its dependencies and the ops before it on its streams; -1 without any."""
        ptr, ops = self.program.predecessors
        waiting = np.flatnonzero(np.diff(ptr))
        found = np.full(self.program.num_ops, -1)
        if len(waiting):
            finish = np.array(self.finish)[ops]
            latest = np.maximum.reduceat(finish, ptr[waiting])
            of = np.repeat(np.arange(len(waiting)), np.diff(ptr)[waiting])
            last = np.flatnonzero(finish == latest[of])[::-1]
            found[waiting[of[last]]] = ops[last]  # Of equals the first, which is written last.
        return found.tolist()

    def dimension(self, op: int) -> str:
        """Which dimension a communication op belongs to, by its stream."""
        ptr, streams = self._op_streams
        for stream in streams[ptr[op] : ptr[op + 1]]:
            # A blocking send holds the compute stream as well.
            if (found := self._dimensions[stream]) != "compute":
                return found
        raise InternalError(f"{self.program.label(op)} communicates on a compute stream only")

    def tail(self, role: int, free: float) -> None:
        """The wait from a role's last compute op to the end of the step."""
        last = self._last_data.get(role, -1)
        after = max(free, self.finish[last]) if last >= 0 else free
        self._bubble(role, free, after - (self._explained(last, last, free, role) if last >= 0 else 0.0))
        self._bubble(role, after, self.makespan)

    def _roles_of(self, op: int) -> set[int]:
        """Roles whose streams an op holds."""
        ptr, streams = self._op_streams
        return {self.program.streams[stream].role for stream in streams[ptr[op] : ptr[op + 1]]}

    @cached_property
    def _op_streams(self) -> tuple[list[int], list[int]]:
        ptr, streams = self.program.op_streams
        return ptr.tolist(), streams.tolist()

    @cached_property
    def _last_data(self) -> dict[int, int]:
        """Role -> its gather or reduction of parameters and gradients that ends last."""
        found: dict[int, int] = {}
        for op in np.flatnonzero(np.isin(self.program.kind, _DATA)).tolist():
            for role in self._roles_of(op):
                if role not in found or self.finish[op] > self.finish[found[role]]:
                    found[role] = op
        return found


class _Spans(_Sinks):
    """The waits themselves: (role, begin, end, cause)."""

    def __init__(self, program: Program, timeline: Timeline, phase: tuple[FloatArray, FloatArray]) -> None:
        super().__init__(program, timeline, phase)
        self.found: list[tuple[int, float, float, str]] = []

    def waited(self, name: str, role: int, begin: float, end: float) -> None:
        """Keep it, where it takes any time."""
        if end - begin > _TINY_S:
            self.found.append((role, begin, end, name))


def waits_of(program: Program, timeline: Timeline, roles: Container[int]) -> list[tuple[int, float, float, str]]:
    """(role, begin, end, cause) of every wait of the compute streams of some roles, seconds; what `account` adds up."""
    none = np.zeros(_roles(program))
    sinks = _Spans(program, timeline, (none, none))
    for index, stream in enumerate(program.streams):
        if stream.kind == "compute" and stream.role in roles:
            _waits_before(sinks, program, timeline, index)
    return sorted(sinks.found)


def _waits_before(sinks: _Sinks, program: Program, timeline: Timeline, index: int) -> None:
    """The gaps of a compute stream, and that at its end."""
    role = program.streams[index].role
    ops = program.stream_ops[program.stream_ptr[index] : program.stream_ptr[index + 1]]
    before = np.concatenate([[0.0], timeline.finish[ops[:-1]]])
    late = np.flatnonzero(timeline.start[ops] - before > _TINY_S)
    for op, free in zip(ops[late].tolist(), before[late].tolist(), strict=True):
        sinks.gap(op, free, role)
    end = float(timeline.finish[ops[-1]]) if len(ops) else 0.0
    if timeline.makespan - end > _TINY_S:
        sinks.tail(role, end)


def account(program: Program, timeline: Timeline, *, waits: bool = True) -> Accounting:
    """Attribute every second of every role's compute stream.

    Args:
        waits: every rank waits for all others before the next step. False: each starts it as soon as it has ended its own part
            of this one, so that steps of ranks that start and end at different times fit into each other.
    """
    is_pass = np.isin(program.kind, [int(k) for k in _PIPELINE])
    own = first, last = _spans(program, timeline, is_pass)
    spans = np.isfinite(first)
    if waits and spans.any():
        first, last = np.full(len(first), first[spans].min()), np.full(len(last), last[spans].max())
    sinks = _Sinks(program, timeline, (first, last))
    busy, passes = np.zeros(sinks.roles), np.zeros(sinks.roles)
    start, finish = timeline.start, timeline.finish
    is_compute = np.isin(program.kind, [int(k) for k in COMPUTE_KINDS])
    for index, stream in enumerate(program.streams):
        if stream.kind != "compute":
            continue
        ops = program.stream_ops[program.stream_ptr[index] : program.stream_ptr[index + 1]]
        lengths = finish[ops] - start[ops]
        computed = is_compute[ops]
        busy[stream.role] += float(lengths[computed].sum())
        passes[stream.role] += float(lengths[is_pass[ops]].sum())
        sinks.add("pp", stream.role, float(lengths[~computed].sum()))
        _waits_before(sinks, program, timeline, index)
    found = {name: np.array(seconds) for name, seconds in sinks.waits.items()}
    every = _spans(program, timeline, np.ones(program.num_ops, dtype=bool))
    phase_bubble = np.array(sinks.phase_bubble)
    return Ledger(busy, found, phase_bubble, passes, own, (first, last), every, timeline.makespan, waits).settled()


def _spans(program: Program, timeline: Timeline, mask: BoolArray) -> tuple[FloatArray, FloatArray]:
    """First start and last finish of the ops in `mask` on each role's streams, float arrays [roles]; infinite without one."""
    roles = max((stream.role for stream in program.streams), default=-1) + 1
    first, last = np.full(roles, np.inf), np.full(roles, -np.inf)
    for index, stream in enumerate(program.streams):
        ops = program.stream_ops[program.stream_ptr[index] : program.stream_ptr[index + 1]]
        ops = ops[mask[ops]]
        first[stream.role] = min(first[stream.role], timeline.start[ops].min(initial=np.inf))
        last[stream.role] = max(last[stream.role], timeline.finish[ops].max(initial=-np.inf))
    return first, last


def dimension_of(stream: str) -> str:
    """The dimension of a stream's kind: "dp" of "dp", "pp" of "pp_forward", "tp" of "block_tp", "host" of "host_up"."""
    return stream.removeprefix("block_").split("_")[0]


def communication_seconds(program: Program, timeline: Timeline) -> dict[str, float]:
    """Seconds by dimension in which transfers of their own run, hidden or exposed, mean over roles.

    A send counts once (at the rank that waits for it), a blocking one at both ends. Collectives inside compute ops are not in here.
    """
    lengths, found = timeline.seconds, dict[str, float]()
    is_compute = np.isin(program.kind, [int(k) for k in COMPUTE_KINDS])
    for index, stream in enumerate(program.streams):
        ops = program.stream_ops[program.stream_ptr[index] : program.stream_ptr[index + 1]]
        name = dimension_of(stream.kind)
        name = "pp" if name == "compute" else name
        if seconds := float(lengths[ops[~is_compute[ops]]].sum()):
            found[name] = found.get(name, 0.0) + seconds
    return {name: seconds / _roles(program) for name, seconds in found.items()}


def compute_counts(program: Program) -> FloatArray:
    """How often each price is computed with per role, on average, float array [prices].

    An op of several roles (ranks in lockstep) is on the compute stream of each.
    """
    compute = np.isin(program.kind, [int(k) for k in COMPUTE_KINDS])
    ptr, _ = program.op_streams
    counts = np.bincount(program.price[compute], weights=np.diff(ptr)[compute], minlength=len(program.price_keys))
    return counts / _roles(program)


def _roles(program: Program) -> int:
    return max((stream.role for stream in program.streams), default=0) + 1


def bubble_fraction(accounting: Accounting) -> float:
    """Mean wait for other stages in the pipeline phase over its length; sends in flight are counted apart, as "pp"."""
    return float(accounting.phase_bubble.mean() / accounting.pipeline_s) if accounting.pipeline_s else 0.0
