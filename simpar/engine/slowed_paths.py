"""The longest path where communication slows compute down: step times of many candidates of one program, in numpy.

With compute slowed by communication of the same role, an op's finish depends on what communication is still running when it
starts. In a folded program every communication op is triggered by the end of a compute op of its own role (or by nothing), so
whatever can slow an op is already running, or waiting behind it on its stream, when the op starts: from then on each stream is
busy without a gap until its last op ends. The finish then is a closed form of the start and of those ops' ends, increasing in all
of them: longer prices never make a step shorter, with interference as without. SimPy finds the same times, to the last bit but
for sums of more than one stretch.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from simpar.engine.timeline import Timeline
from simpar.errors import InternalError
from simpar.program.program import FloatArray, PriceTable, Program

Queue = list[tuple[FloatArray, FloatArray]]
"""What a stream runs, one after the other: ends and how much each slows compute, float arrays [candidates]."""

_FEW = 6
"""Candidates up to which plain Python per candidate beats numpy per op (measured)."""


@dataclass(frozen=True, slots=True)
class _Order:
    """A folded program as plain lists: faster than arrays for programs that are deep and narrow.

    Attributes:
        steps: topological, communication before the compute ops that it may slow. Of each op: its number; two of the ops that it
            waits for (dependencies and the op before it on each of its streams), the number past the last op for none; the rest of
            those; index into the program's price keys; role whose compute stream it holds, -1 for none; what it runs on beside
            compute of its role, -1 for nothing (what joins two roles has no compute beside it); whose it is.
        beside: of each price key, the streams of its ops that may slow compute.
        role: of each op by its number.
        sinks: ops that nothing waits for.
    """

    steps: list[tuple[int, int, int, list[int], int, int, int, int]]
    beside: list[set[int]]
    role: list[int]
    sinks: list[int]

    @classmethod
    def of(cls, program: Program) -> _Order:
        """Worked out once and kept with the program."""
        kept = program.__dict__.get("_order")
        if kept is None:
            kept = program.__dict__["_order"] = cls._prepare(program)
        return kept

    @classmethod
    def _prepare(cls, program: Program) -> _Order:
        ops = program.num_ops
        ptr, sources = program.predecessors
        own_ptr, own = program.op_streams
        computes = np.array([stream.role if stream.kind == "compute" else -1 for stream in program.streams], dtype=np.int64)
        held, named = np.diff(own_ptr), computes[own]
        compute, stream = np.full(ops, -1), np.full(ops, -1)
        working = np.flatnonzero(named >= 0)[::-1]
        compute[np.repeat(np.arange(ops), held)[working]] = named[working]  # Of an op's streams the first, which is written last.
        if len(own):
            alone = (held == 1) & (compute < 0)
            stream = np.where(alone, own[np.minimum(own_ptr[:-1], len(own) - 1)], -1)
        waits, two = np.diff(ptr), np.full((2, ops), ops)
        for row in range(2):
            some = np.flatnonzero(waits > row)
            two[row, some] = sources[ptr[some] + row]
        rest: list[list[int]] = [[]] * ops
        ends, every = ptr.tolist(), sources.tolist()
        for op in np.flatnonzero(waits > 2).tolist():
            rest[op] = every[ends[op] + 2 : ends[op + 1]]
        order = np.array(_sorted(program, compute.tolist()), dtype=np.int64)
        columns = [each[order].tolist() for each in (*two, program.price, compute, stream, program.role)]
        steps = list(zip(order.tolist(), *columns[:2], [rest[op] for op in order.tolist()], *columns[2:], strict=True))
        beside: list[set[int]] = [set() for _ in program.price_keys]
        for key, own_stream in set(zip(columns[2], columns[4], strict=True)):
            if own_stream >= 0:
                beside[key].add(own_stream)
        role = program.role.tolist()
        return cls(steps, beside, role, np.flatnonzero(np.diff(program.successors[0]) == 0).tolist())


def _sorted(program: Program, compute: list[int]) -> list[int]:
    waiting: list[int] = np.diff(program.predecessors[0]).tolist()
    ptr, successors = (each.tolist() for each in program.successors)
    talk: deque[int] = deque()
    work: deque[int] = deque()
    for op, count in enumerate(waiting):
        if not count:
            (work if compute[op] >= 0 else talk).append(op)
    found = []
    while talk or work:
        op = talk.popleft() if talk else work.popleft()
        found.append(op)
        for successor in successors[ptr[op] : ptr[op + 1]]:
            waiting[successor] -= 1
            if not waiting[successor]:
                (work if compute[successor] >= 0 else talk).append(successor)
    if len(found) < program.num_ops:
        program.check()
    return found


def makespans(program: Program, seconds: FloatArray, interference: FloatArray, *, waits: bool = True) -> FloatArray:
    """Step times of candidates, float array [candidates].

    Args:
        program: folded, one role per pipeline rank.
        seconds, interference: float arrays [candidates, prices].
        waits: all ranks wait for each other at the end of a step; else a step is the longest that any rank takes by itself.

    Raises:
        DeadlockError: the program has a cycle.
        InternalError: prices do not fit the program.
    """
    if seconds.shape != interference.shape or seconds.shape[1:] != (len(program.price_keys),):
        raise InternalError(f"{program.name} has {len(program.price_keys)} prices, the batch {seconds.shape}")
    graph = _Order.of(program)
    streams = _loud_streams(graph, interference)
    if len(seconds) <= _FEW:
        pairs = zip(seconds.tolist(), interference.tolist(), strict=True)
        return np.array([_one(graph, each, factors, streams, waits=waits) for each, factors in pairs])
    return _many(graph, seconds, interference, streams, waits=waits)


def _loud_streams(graph: _Order, interference: FloatArray) -> frozenset[int]:
    """Streams on which something slows compute."""
    loud = np.flatnonzero((interference > 0.0).any(axis=0)).tolist()
    return frozenset().union(*(graph.beside[key] for key in loud))


def timeline(program: Program, prices: PriceTable) -> Timeline:
    """When every op of a folded program runs, compute slowed by communication beside it: SimPy's times without its clock.

    Raises:
        DeadlockError: the program has a cycle.
    """
    graph, streams = _Order.of(program), _loud_streams(_Order.of(program), prices.interference[None])
    begin, finish = _sweep(graph, prices.seconds.tolist(), prices.interference.tolist(), streams)
    return Timeline(program, np.array(begin), np.array(finish))


def _one(graph: _Order, seconds: list[float], factors: list[float], streams: frozenset[int], *, waits: bool) -> float:
    begin, finish = _sweep(graph, seconds, factors, streams)
    if waits:
        return max(finish, default=0.0)
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    for role, start, end in zip(graph.role, begin, finish, strict=True):
        first[role], last[role] = min(first.get(role, start), start), max(last.get(role, end), end)
    return max((last[role] - first[role] for role in first), default=0.0)


def _sweep(graph: _Order, seconds: list[float], factors: list[float], streams: frozenset[int]) -> tuple[list[float], list[float]]:
    """Start and finish of every op."""
    begin = [0.0] * len(graph.steps)
    # What is not there has ended at the start.
    finish = [*begin, 0.0]
    busy: dict[int, dict[int, list[tuple[float, float]]]] = {}
    for op, first, second, others, key, role, stream, own in graph.steps:
        start = finish[first]
        if (end := finish[second]) > start:
            start = end
        for other in others:
            if (end := finish[other]) > start:
                start = end
        begin[op] = start
        if role in busy and factors[key] <= 0.0:
            finish[op] = _follow(start, seconds[key], busy[role])
            if not busy[role]:
                del busy[role]
            continue
        end = finish[op] = start + seconds[key]
        if stream in streams:
            queue = busy.setdefault(own, {}).setdefault(stream, [])
            if queue and queue[-1][1] == factors[key]:
                # One stretch: a stream that is busy when compute starts has no gap from then on.
                queue[-1] = (end, factors[key])
            else:
                queue.append((end, factors[key]))
    del finish[-1]
    return begin, finish


def _follow(start: float, work: float, streams: dict[int, list[tuple[float, float]]]) -> float:
    """Finish of `work` seconds of compute from `start` beside streams that run (end, level) one after the other.

    What has ended by `start` is dropped from `streams`: nothing that comes later on the compute stream starts before.
    """
    queues = []
    for stream, queue in tuple(streams.items()):
        while queue and queue[0][0] <= start:
            del queue[0]
        if queue:
            queues.append(queue)
        else:
            del streams[stream]
    if not queues:
        return start + work
    if len(queues) == 1:
        return _follow_one(start, work, queues[0])
    at = [0] * len(queues)
    now = start
    while work > 0.0:
        running = [(queue[i], k) for k, (queue, i) in enumerate(zip(queues, at, strict=True)) if i < len(queue)]
        if not running:
            break
        level = max(segment[1] for segment, _ in running)
        until = min(segment[0] for segment, _ in running)
        done = min((until - now) / (1.0 + level), work)
        work -= done
        now += done * (1.0 + level)
        if work > 0.0:
            now = until
            for segment, k in running:
                at[k] += segment[0] <= until
    return now + work


def _follow_one(start: float, work: float, queue: list[tuple[float, float]]) -> float:
    """The same beside one stream."""
    now = start
    for end, level in queue:
        slow = 1.0 + level
        done = (end - now) / slow
        if done >= work:
            return now + work * slow
        work -= done
        now = end
    return now + work


def _many(graph: _Order, seconds: FloatArray, factors: FloatArray, streams: frozenset[int], *, waits: bool) -> FloatArray:
    durations, levels = np.ascontiguousarray(seconds.T), np.ascontiguousarray(factors.T)
    loud = [bool(row.any()) for row in levels > 0.0]
    quiet = np.zeros(len(seconds))
    begin: list[FloatArray] = [quiet] * len(graph.steps)
    finish = [*begin, quiet]
    busy: dict[int, dict[int, Queue]] = {}
    maximum = np.maximum
    for op, before, second, others, key, role, stream, own in graph.steps:
        start = finish[before]
        for other in (second, *others) if second < len(begin) else ():
            start = maximum(start, finish[other])
        begin[op] = start
        if role in busy and not loud[key]:
            finish[op] = _slowed(start, durations[key], busy[role])
            if not busy[role]:
                del busy[role]
            continue
        end = finish[op] = start + durations[key]
        if stream in streams:
            queue = busy.setdefault(own, {}).setdefault(stream, [])
            if queue and (queue[-1][1] is levels[key] or (queue[-1][1] == levels[key]).all()):
                queue[-1] = (end, queue[-1][1])
            else:
                queue.append((end, levels[key]))
    if waits:
        return np.asarray(np.maximum.reduce([finish[op] for op in graph.sinks])) if graph.sinks else quiet
    first: dict[int, FloatArray] = {}
    last: dict[int, FloatArray] = {}
    for role, start, end in zip(graph.role, begin, finish[:-1], strict=True):
        first[role], last[role] = np.minimum(first.get(role, start), start), maximum(last.get(role, end), end)
    return np.asarray(np.maximum.reduce([last[role] - first[role] for role in first]))


def _slowed(start: FloatArray, work: FloatArray, streams: dict[int, Queue]) -> FloatArray:
    """Finish of `work` seconds of compute from `start` beside streams that run (ends, levels) one after the other.

    What has ended by `start` for all candidates is dropped from `streams`.
    """
    for stream, queue in list(streams.items()):
        while queue and (queue[0][0] <= start).all():
            del queue[0]
        if not queue:
            del streams[stream]
    running = list(streams.values())
    if len(running) > 1:
        return _slowed_by_several(start, work, running)
    now, left = start, work
    for end, level in running[0] if running else ():
        ahead = end - now
        done = np.minimum(np.maximum(ahead, 0.0) / (1.0 + level), left)
        now = now + done * (1.0 + level)
        left = left - done
        if not left.any():
            break
    return now + left


def _slowed_by_several(start: FloatArray, work: FloatArray, queues: list[Queue]) -> FloatArray:
    """The same beside several streams at once: whatever slows most counts, from one end of theirs to the next."""
    now, left = start, work
    until = np.sort(np.array([end for queue in queues for end, _ in queue]), axis=0)
    for limit in until:
        level = np.zeros_like(now)
        for queue in queues:
            # The stream runs what ends first of all that has not ended.
            own = np.zeros_like(now)
            for end, each in reversed(queue):
                own = np.where(end > now, each, own)
            level = np.maximum(level, own)
        done = np.minimum(np.maximum(limit - now, 0.0) / (1.0 + level), left)
        left = left - done
        # Where the work goes on the limit itself, so that what ends there has ended.
        now = np.where(left > 0.0, np.maximum(now, limit), now + done * (1.0 + level))
        if not left.any():
            break
    return now + left
