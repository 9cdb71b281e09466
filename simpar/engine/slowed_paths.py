"""The longest path where communication slows compute down: step times of many candidates of one program, in numpy.

With compute slowed by communication of the same role, an op's finish depends on what communication is still running when it
starts. In a folded program every communication op is triggered by the end of a compute op of its own role (or by nothing), so
whatever can slow an op is already running, or waiting behind it on its stream, when the op starts: from then on each stream is
busy without a gap until its last op ends. The finish then is a closed form of the start and of those ops' ends, increasing in all
of them: longer prices never make a step shorter, with interference as without. SimPy finds the same times, to the last bit but
for sums of more than one stretch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from simpar.engine.longest_path import start_of
from simpar.engine.timeline import Timeline
from simpar.errors import InternalError
from simpar.program.program import FloatArray, IntArray, PriceTable, Program

Queue = list[tuple[FloatArray, FloatArray]]
"""What a stream runs, one after the other: ends and how much each slows compute, float arrays [candidates]."""

_FEW = 6
"""Candidates up to which plain Python per candidate beats numpy per op (measured)."""


@dataclass(frozen=True, slots=True)
class _Order:
    """A folded program as plain lists: faster than arrays for programs that are deep and narrow.

    Attributes:
        ops: their numbers in topological order, communication before the compute ops that it may slow, int array. The *place* of
            an op is its position there, counted from 1; place 0 is what is not there and has ended at the start.
        first, second: of each, the places of two ops that it waits for (dependencies and the op before it on each of its streams);
            others: of the rest.
        kind: of each, index into `kinds`.
        kinds: index into the program's price keys; role whose compute stream is held, -1 for none; the stream beside compute of its
            role, -1 for none (what joins two roles has no compute beside it); the op's role.
        sinks: places of what nothing waits for.
    """

    ops: IntArray
    first: list[int]
    second: list[int]
    others: list[tuple[int, ...]]
    kind: list[int]
    kinds: list[tuple[int, int, int, int]]
    sinks: list[int]

    @classmethod
    def of(cls, program: Program) -> _Order:
        """Worked out once and kept with the program."""
        return program.worked_out(cls._prepare)

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
        order, _ = program.topological_order
        place = np.empty(ops, dtype=np.int64)
        place[order] = np.arange(1, ops + 1)
        count, before, two = np.diff(ptr), place[sources], np.zeros((2, ops), dtype=np.int64)
        for row in range(2):
            some = np.flatnonzero(count > row)
            two[row, place[some] - 1] = before[ptr[some] + row]
        others: list[tuple[int, ...]] = [()] * ops
        more, every = np.flatnonzero(count > 2), before.tolist()
        for at, begin, end in zip(*(each.tolist() for each in (place[more] - 1, ptr[more] + 2, ptr[more + 1])), strict=True):
            others[at] = tuple(every[begin:end])
        # One number tells kinds apart: rows of arrays are slow to compare.
        columns = [column[order] + 1 for column in (program.price, compute, stream, program.role)]
        sizes = [int(column.max(initial=0)) + 1 for column in columns]
        codes, kind = np.unique(np.ravel_multi_index(tuple(columns), sizes), return_inverse=True)
        kinds = list(zip(*((column - 1).tolist() for column in np.unravel_index(codes, sizes)), strict=True))
        sinks = place[np.diff(program.successors[0]) == 0].tolist()
        return cls(order, two[0].tolist(), two[1].tolist(), others, kind.tolist(), kinds, sinks)

    def loud(self, interference: FloatArray) -> list[tuple[int, int] | None]:
        """Of each kind, whose compute it runs beside, and its stream, where something on that stream slows compute.

        Args:
            interference: float array [candidates, prices].
        """
        slows = set(np.flatnonzero((interference > 0.0).any(axis=0)).tolist())
        streams = {stream for key, _, stream, _ in self.kinds if key in slows}
        return [(role, stream) if stream >= 0 and stream in streams else None for _, _, stream, role in self.kinds]


def makespans(
    program: Program, seconds: FloatArray, interference: FloatArray, *, waits: bool = True, slow: Sequence[float] = ()
) -> FloatArray:
    """Step times of candidates, float array [candidates].

    Args:
        program: folded, one role per pipeline rank.
        seconds, interference: float arrays [candidates, prices].
        waits: all ranks wait for each other at the end of a step; else a step is the longest that any rank takes by itself.
        slow: factor on the seconds of each role's compute ops; none = 1.

    Raises:
        DeadlockError: the program has a cycle.
        InternalError: prices do not fit the program.
    """
    if seconds.shape != interference.shape or seconds.shape[1:] != (len(program.price_keys),):
        raise InternalError(f"{program.name} has {len(program.price_keys)} prices, the batch {seconds.shape}")
    graph = _Order.of(program)
    loud = graph.loud(interference)
    if len(seconds) > _FEW:
        return _many(graph, seconds, interference, loud, waits=waits, slow=slow)
    found = []
    for each, factors in zip(seconds.tolist(), interference.tolist(), strict=True):
        finish = _sweep(graph, each, factors, loud, slow)
        found.append(max(finish) if waits else _longest_rank(_timeline(program, graph, finish)))
    return np.array(found)


def timeline(program: Program, prices: PriceTable, slow: Sequence[float] = ()) -> Timeline:
    """When every op of a folded program runs, compute slowed by communication beside it: SimPy's times without its clock.

    Args:
        slow: as in `makespans`.

    Raises:
        DeadlockError: the program has a cycle.
    """
    graph = _Order.of(program)
    loud = graph.loud(prices.interference[None])
    finish = _sweep(graph, prices.seconds.tolist(), prices.interference.tolist(), loud, slow)
    return _timeline(program, graph, finish)


def _timeline(program: Program, graph: _Order, finish: list[float]) -> Timeline:
    by_op = np.empty(program.num_ops)
    by_op[graph.ops] = finish[1:]
    return Timeline(program, start_of(program, by_op), by_op)


def _longest_rank(ran: Timeline) -> float:
    roles = ran.program.role - ran.program.role.min(initial=0)
    first, last = np.full(int(roles.max(initial=-1)) + 1, np.inf), np.zeros(int(roles.max(initial=-1)) + 1)
    np.minimum.at(first, roles, ran.start)
    np.maximum.at(last, roles, ran.finish)
    return float((last - first)[np.isfinite(first)].max(initial=0.0))


def _sweep(
    graph: _Order, seconds: list[float], factors: list[float], loud: list[tuple[int, int] | None], slow: Sequence[float]
) -> list[float]:
    """Finish of every op by its place."""
    durations = [seconds[key] for key, *_ in graph.kinds]
    if slow:
        durations = [s * slow[role] if role >= 0 else s for s, (_, role, *_) in zip(durations, graph.kinds, strict=True)]
    computes = [role if factors[key] <= 0.0 else -1 for key, role, *_ in graph.kinds]
    finish = [0.0]
    put = finish.append
    busy: dict[int, dict[int, list[tuple[float, float]]]] = {}
    for first, second, others, kind in zip(graph.first, graph.second, graph.others, graph.kind, strict=True):
        start = finish[first]
        if (end := finish[second]) > start:
            start = end
        for other in others:
            if (end := finish[other]) > start:
                start = end
        if busy and (role := computes[kind]) in busy:
            put(_follow(start, durations[kind], busy[role]))
            if not busy[role]:
                del busy[role]
            continue
        end = start + durations[kind]
        put(end)
        if (lane := loud[kind]) is not None:
            queue = busy.setdefault(lane[0], {}).setdefault(lane[1], [])
            level = factors[graph.kinds[kind][0]]
            if queue and queue[-1][1] == level:
                # One stretch: a stream that is busy when compute starts has no gap from then on.
                queue[-1] = (end, level)
            else:
                queue.append((end, level))
    return finish


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


def _many(
    graph: _Order, seconds: FloatArray, factors: FloatArray, loud: list[tuple[int, int] | None], *, waits: bool,
    slow: Sequence[float],
) -> FloatArray:  # fmt: skip
    prices, levels = np.ascontiguousarray(seconds.T), np.ascontiguousarray(factors.T)
    durations = [prices[key] * slow[role] if slow and role >= 0 else prices[key] for key, role, *_ in graph.kinds]
    slows = [bool(row.any()) for row in levels > 0.0]
    quiet = np.zeros(len(seconds))
    begin, finish = list[FloatArray](), [quiet]
    busy: dict[int, dict[int, Queue]] = {}
    maximum = np.maximum
    for before, second, others, kind in zip(graph.first, graph.second, graph.others, graph.kind, strict=True):
        key, role, _, _ = graph.kinds[kind]
        start = finish[before]
        for other in (second, *others) if second else ():
            start = maximum(start, finish[other])
        begin.append(start)
        if role in busy and not slows[key]:
            finish.append(_slowed(start, durations[kind], busy[role]))
            if not busy[role]:
                del busy[role]
            continue
        end = start + durations[kind]
        finish.append(end)
        if (lane := loud[kind]) is not None:
            queue = busy.setdefault(lane[0], {}).setdefault(lane[1], [])
            if queue and (queue[-1][1] is levels[key] or (queue[-1][1] == levels[key]).all()):
                queue[-1] = (end, queue[-1][1])
            else:
                queue.append((end, levels[key]))
    if waits:
        return np.asarray(np.maximum.reduce([finish[place] for place in graph.sinks])) if graph.sinks else quiet
    first: dict[int, FloatArray] = {}
    last: dict[int, FloatArray] = {}
    for kind, start, end in zip(graph.kind, begin, finish[1:], strict=True):
        role = graph.kinds[kind][3]
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
