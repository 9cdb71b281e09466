"""Where a step's time goes, per role: compute, waits by cause, from the timeline alone."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from simpar.engine.timeline import Timeline
from simpar.errors import InternalError
from simpar.program.program import COMPUTE_KINDS, FloatArray, IntArray, OpKind, Program

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
    """Waits by cause and role, of all gaps of a role at once."""

    def __init__(self, program: Program, timeline: Timeline, phase: tuple[FloatArray, FloatArray]) -> None:
        self.program, self.makespan, self._phase = program, timeline.makespan, phase
        self.roles = max((stream.role for stream in program.streams), default=-1) + 1
        self.phase_bubble = np.zeros(self.roles)
        self.waits = {name: np.zeros(self.roles) for name in ("bubble", "pp", "dp")}
        self.start, self.finish = timeline.start, timeline.finish
        self._communicates, self._sends = np.isin(program.kind, _COMMUNICATION), np.isin(program.kind, _SENDS)
        self._marked, self._own = -1, np.zeros(program.num_ops, dtype=bool)

    def add(self, name: str, role: int, seconds: float) -> None:
        self.waits.setdefault(name, np.zeros(self.roles))[role] += seconds

    def waited(self, name: str, role: int, begin: FloatArray, end: FloatArray) -> None:
        """Waits of a role's compute stream, for one cause, float arrays [waits]."""
        self.add(name, role, float((end - begin).sum()))

    def gaps(self, ops: IntArray, free: FloatArray, role: int) -> None:
        """Split the waits of `role` before `ops` [gaps], from `free` [gaps] on."""
        self._bubble(role, free, self.start[ops] - self._explained(ops, self._last_cause[ops], free, role))

    def _bubble(self, role: int, begin: FloatArray, end: FloatArray) -> None:
        """What communication does not explain; that it ends a gap, so that the bubble begins it."""
        self.waited("bubble", role, begin, end)
        first, last = self._phase[0][role], self._phase[1][role]
        self.phase_bubble[role] += float(np.maximum(np.minimum(end, last) - np.maximum(begin, first), 0.0).sum())

    def _explained(self, ops: IntArray, causes: IntArray, free: FloatArray, role: int) -> FloatArray:
        """Charge what communication explains of the waits before `ops` [gaps]: back along the chain of what each op started upon,
        as long as that is communication of this role, or gradients that all ranks wait for. Returns these seconds [gaps].

        What runs on another rank when the chain leaves communication is no communication of this role, however it ends.
        """
        total, gaps, own = np.zeros(len(ops)), np.arange(len(ops)), self._ops_of(role)
        while len(gaps):
            sends = self._sends[causes]
            foreign = ~own[causes] & ~(sends & own[ops])
            on = (causes >= 0) & (self.finish[causes] > free[gaps]) & self._communicates[causes] & ~(foreign & sends)
            gaps, causes, foreign = gaps[on], causes[on], foreign[on]
            begin, end = np.maximum(self.start[causes], free[gaps]), self.finish[causes]
            self._charge(role, np.where(foreign, len(self._dimensions[0]), self._dimensions[1][causes]), begin, end)
            total[gaps] += end - begin
            ops, causes = causes, self._last_cause[causes]
        return total

    def _charge(self, role: int, dimension: IntArray, begin: FloatArray, end: FloatArray) -> None:
        for index, name in enumerate((*self._dimensions[0], "skew")):
            if (of := dimension == index).any():
                self.waited(name, role, begin[of], end[of])
        if (dimension < 0).any():
            raise InternalError(f"{self.program.name}: communication on a compute stream only")

    @cached_property
    def _last_cause(self) -> IntArray:
        """What each op waited for until it started: of its dependencies and the ops before it on its streams; -1 without any."""
        ptr, ops = self.program.predecessors
        waiting = np.flatnonzero(np.diff(ptr))
        found = np.full(self.program.num_ops, -1)
        if len(waiting):
            finish = self.finish[ops]
            latest = np.maximum.reduceat(finish, ptr[waiting])
            of = np.repeat(np.arange(len(waiting)), np.diff(ptr)[waiting])
            last = np.flatnonzero(finish == latest[of])[::-1]
            found[waiting[of[last]]] = ops[last]  # Of equals the first, which is written last.
        return found

    @cached_property
    def _dimensions(self) -> tuple[tuple[str, ...], IntArray]:
        """Names of dimensions, and which of them each op belongs to, by its stream; -1 for an op of compute streams alone."""
        of = [dimension_of(stream.kind) for stream in self.program.streams]
        names = tuple(dict.fromkeys(name for name in of if name != "compute"))
        found = np.full(self.program.num_ops, -1)
        # The first of an op's streams counts, and a blocking send holds the compute stream as well.
        for index in reversed(range(len(of))):
            if of[index] != "compute":
                found[self.program.ops_at(index)] = names.index(of[index])
        return names, found

    def tail(self, role: int, free: float) -> None:
        """The wait from a role's last compute op to the end of the step."""
        ending, after = np.flatnonzero(self._ops_of(role) & np.isin(self.program.kind, _DATA)), free
        if len(ending):
            last = ending[[np.argmax(self.finish[ending])]]
            after = max(free, float(self.finish[last[0]]))
            explained = self._explained(last, last, np.array([free]), role)
            self._bubble(role, np.array([free]), np.array([after]) - explained)
        self._bubble(role, np.array([after]), np.array([self.makespan]))

    def _ops_of(self, role: int) -> BoolArray:
        """Which ops hold a stream of this role; valid until another role is asked for (one array for all of them)."""
        if role != self._marked:
            for of, holds in ((self._marked, False), (role, True)):
                for index in self.program.role_streams.get(of, ()):
                    self._own[self.program.ops_at(index)] = holds
            self._marked = role
        return self._own


class _Spans(_Sinks):
    """The waits themselves: (role, begin, end, cause)."""

    def __init__(self, program: Program, timeline: Timeline, phase: tuple[FloatArray, FloatArray]) -> None:
        super().__init__(program, timeline, phase)
        self.found: list[tuple[int, float, float, str]] = []

    def waited(self, name: str, role: int, begin: FloatArray, end: FloatArray) -> None:
        """Keep those that take any time."""
        takes = end - begin > _TINY_S
        self.found += [(role, a, b, name) for a, b in zip(begin[takes].tolist(), end[takes].tolist(), strict=True)]


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
    role, ops = program.streams[index].role, program.ops_at(index)
    before = np.concatenate([[0.0], timeline.finish[ops[:-1]]])
    late = np.flatnonzero(timeline.start[ops] - before > _TINY_S)
    sinks.gaps(ops[late], before[late], role)
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
        ops = program.ops_at(index)
        lengths = finish[ops] - start[ops]
        computed = is_compute[ops]
        busy[stream.role] += float(lengths[computed].sum())
        passes[stream.role] += float(lengths[is_pass[ops]].sum())
        reduced = program.kind[ops] == int(OpKind.REDUCE_GRADIENTS)
        sinks.add("dp", stream.role, float(lengths[reduced].sum()))
        sinks.add("pp", stream.role, float(lengths[~computed & ~reduced].sum()))
        _waits_before(sinks, program, timeline, index)
    every = _spans(program, timeline, np.ones(program.num_ops, dtype=bool))
    return Ledger(busy, sinks.waits, sinks.phase_bubble, passes, own, (first, last), every, timeline.makespan, waits).settled()


def _spans(program: Program, timeline: Timeline, mask: BoolArray) -> tuple[FloatArray, FloatArray]:
    """First start and last finish of the ops in `mask` on each role's streams, float arrays [roles]; infinite without one."""
    roles = max((stream.role for stream in program.streams), default=-1) + 1
    first, last = np.full(roles, np.inf), np.full(roles, -np.inf)
    for index, stream in enumerate(program.streams):
        ops = program.ops_at(index)
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
        ops = program.ops_at(index)
        ops, name = ops[~is_compute[ops]], dimension_of(stream.kind)
        if name == "compute":  # what else holds it has a stream of its own
            ops, name = ops[np.isin(program.kind[ops], _SENDS)], "pp"
        if seconds := float(lengths[ops].sum()):
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
