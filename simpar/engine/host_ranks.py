"""Ranks on the cores of one host: every rank is a thread of the kernel's fair scheduler.

A rank that can compute is runnable; as many as there are cores run, the others queue. While others queue, a rank runs for at
most one time slice and goes to the end of the queue; one that waits for a message gives its core up at once. A rank whose
message comes while all cores are taken gets one at the next slice's end, or by preemption after a wake-up delay, if that is
sooner: it has slept and is owed time (Linux's EEVDF does so; slice and delay are measured by calibration). Collectives are
no threads here: each keeps a measured share of a core per rank busy, and while running ranks and collectives together want
more than the cores, all progress at cores / wanted of their speed.

Ops are replayed per rank: one op of a role is one of each of its ranks, one collective one of each of its groups
(`Program.transfers`), so ranks of a role drift apart where the cores make them.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from simpar.engine.timeline import Timeline
from simpar.program.program import FloatArray, IntArray, Program

_TIE = 1e-12


@dataclass(frozen=True, slots=True)
class Scheduler:
    """A host's cores and how it shares them.

    Attributes:
        cores: of the host.
        slice_s: longest that a rank runs while others wait for its core.
        wake_s: until a rank that wakes gets a core that is taken.
    """

    cores: int
    slice_s: float
    wake_s: float


@dataclass(frozen=True)
class RankTimeline:
    """What a replay gives.

    Attributes:
        timeline: first start and last finish over the ranks of each op.
        held_s: seconds between start and finish, the mean over the ranks of each op: float array [ops].
    """

    timeline: Timeline
    held_s: FloatArray


class _Instances:
    """Ops of single ranks: instance -> op, ranks that take part, rank whose thread computes it (-1: none)."""

    def __init__(self, program: Program, ranks: Sequence[Sequence[int]], computes: Sequence[bool]) -> None:
        self.op: list[int] = []
        self.thread: list[int] = []
        members: list[tuple[int, ...]] = []
        of_op: list[range] = []
        for op in range(program.num_ops):
            first, role = len(self.op), int(program.role[op])
            transfer = program.transfers.get(op)
            groups = transfer.groups if transfer is not None else tuple((rank,) for rank in ranks[role])
            for group in groups:
                self.op.append(op)
                self.thread.append(group[0] if computes[op] and transfer is None else -1)
                members.append(group)
            of_op.append(range(first, len(self.op)))
        self.successors: list[list[int]] = [[] for _ in self.op]
        self.waiting = [0] * len(self.op)
        ptr, before = (a.tolist() for a in program.predecessors)
        for op in range(program.num_ops):
            for earlier in before[ptr[op] : ptr[op + 1]]:
                self._join(of_op[earlier], of_op[op], members)

    def _join(self, sources: range, targets: range, members: list[tuple[int, ...]]) -> None:
        for target in targets:
            wanted = set(members[target])
            found = [s for s in sources if not wanted.isdisjoint(members[s])]
            for source in found or sources:
                self.successors[source].append(target)
                self.waiting[target] += 1


class _Host:
    """The replay's state: what runs, what queues, and when the next thing ends."""

    def __init__(self, instances: _Instances, seconds: FloatArray, wanted: FloatArray, host: Scheduler) -> None:
        self.instances, self.seconds, self.wanted, self.host = instances, seconds.tolist(), wanted.tolist(), host
        self.waiting = list(instances.waiting)
        # `served` is the work done on anything that has run since 0: s seconds begun at served = a end at a + s.
        self.now = self.served = self.talking = 0.0
        self.start = [-1.0] * len(self.waiting)
        self.finish = [0.0] * len(self.waiting)
        self.running: dict[int, tuple[int, float, float]] = {}
        """Thread -> (instance, served at its end, since when it has had the core)."""
        self.left: dict[int, deque[tuple[int, float]]] = {}
        """Thread that has something to compute -> what it does not run yet, (instance, seconds left), one after the other."""
        self.queue: deque[int] = deque()
        self.woken: deque[tuple[float, int]] = deque()
        """(when it may take a core from another, thread), ahead of the queue."""
        self.shared: list[tuple[float, int]] = []
        self.free: list[tuple[float, int]] = []

    @property
    def speed(self) -> float:
        busy = len(self.running) + self.talking
        return min(1.0, self.host.cores / busy) if busy > 0.0 else 1.0

    def begin(self, instance: int) -> None:
        op, thread = self.instances.op[instance], self.instances.thread[instance]
        if thread >= 0 and self.seconds[op] > 0.0:
            self.left.setdefault(thread, deque()).append((instance, self.seconds[op]))
            return
        self.start[instance] = self.now
        if thread < 0 and self.wanted[instance] > 0.0:
            self.talking += self.wanted[instance]
            heapq.heappush(self.shared, (self.served + self.seconds[op], instance))
        else:
            heapq.heappush(self.free, (self.now + self.seconds[op], instance))

    def place(self) -> None:
        """Threads that just became able to compute: on with the core they have, or on a free one, or into the queue."""
        for thread in [t for t in self.left if t not in self.running and not self._queued(t)]:
            self.woken.append((self.now + self.host.wake_s, thread))
        while len(self.running) < self.host.cores and (self.woken or self.queue):
            self.run(self.woken.popleft()[1] if self.woken else self.queue.popleft())

    def _queued(self, thread: int) -> bool:
        return thread in self.queue or any(t == thread for _, t in self.woken)

    def run(self, thread: int, since: float | None = None) -> None:
        instance, left = self.left[thread].popleft()
        if not self.left[thread]:
            del self.left[thread]
        if self.start[instance] < 0.0:
            self.start[instance] = self.now
        self.running[thread] = (instance, self.served + left, self.now if since is None else since)

    def stop(self, thread: int) -> None:
        """Take the core away; the rest waits at the end of the queue."""
        instance, end, _ = self.running.pop(thread)
        self.left.setdefault(thread, deque()).appendleft((instance, max(end - self.served, 0.0)))
        self.queue.append(thread)

    def next_moment(self) -> float:
        speed = self.speed
        ends = [end for _, end, _ in self.running.values()]
        if self.shared:
            ends.append(self.shared[0][0])
        moments = [self.now + (min(ends) - self.served) / speed] if ends else []
        if self.free:
            moments.append(self.free[0][0])
        if self.woken or self.queue:
            moments.append(self.oldest()[0] + self.host.slice_s)
        if self.woken:
            moments.append(self.woken[0][0])
        return max(min(moments), self.now)

    def oldest(self) -> tuple[float, int]:
        """(since when, thread) of the one that has had its core for longest."""
        return min((since, thread) for thread, (_, _, since) in self.running.items())

    def advance(self, moment: float) -> list[int]:
        """Go on to `moment`; the instances that ended."""
        self.served += (moment - self.now) * self.speed
        self.now = moment
        limit = self.served * (1.0 + _TIE) + _TIE
        ended = [instance for instance, end, _ in self.running.values() if end <= limit]
        while self.shared and self.shared[0][0] <= limit:
            ended.append(heapq.heappop(self.shared)[1])
            self.talking -= self.wanted[ended[-1]]
        while self.free and self.free[0][0] <= moment:
            ended.append(heapq.heappop(self.free)[1])
        if not self.shared:
            self.talking = 0.0
        return ended

    def finished(self, ended: list[int]) -> None:
        """Results of what ended; a thread whose next op is ready keeps its core, another gives it up."""
        free = []
        for instance in ended:
            self.finish[instance] = self.now
            thread = self.instances.thread[instance]
            if thread in self.running and self.running[thread][0] == instance:
                free.append((thread, self.running.pop(thread)[2]))
        todo = list(ended)
        while todo:
            for successor in self.instances.successors[todo.pop()]:
                self.waiting[successor] -= 1
                if not self.waiting[successor]:
                    self.begin(successor)
            while self.free and self.free[0][0] <= self.now:
                # Ops that take no time are part of what comes before them.
                instance = heapq.heappop(self.free)[1]
                self.finish[instance] = self.now
                todo.append(instance)
        for thread, since in free:
            if thread in self.left:
                self.run(thread, since)

    def preempt(self) -> None:
        """Ends of slices, and ranks that have been awake for long enough to take a core."""
        while (self.woken or self.queue) and self.running:
            since, thread = self.oldest()
            due = self.woken and self.woken[0][0] <= self.now * (1.0 + _TIE)
            if since + self.host.slice_s > self.now * (1.0 + _TIE) and not due:
                return
            following = self.woken.popleft()[1] if self.woken else self.queue.popleft()
            self.stop(thread)
            self.run(following)


def replay(
    program: Program, seconds: FloatArray, talks: FloatArray, computes: Sequence[bool], ranks: Sequence[Sequence[int]],
    host: Scheduler,
) -> RankTimeline:  # fmt: skip
    """Replay `program` with a thread per rank.

    Args:
        program: folded, with `transfers` (groups of global ranks) on whatever joins ranks.
        seconds: of each op alone, float array [ops].
        talks: cores that a rank keeps busy during each op that is not computed by its thread, float array [ops].
        computes: whether the thread of the rank runs the op [ops].
        ranks: global ranks of each role.
        host: cores and scheduling.

    Raises:
        DeadlockError: the program has a cycle.
    """
    program.check()
    instances = _Instances(program, ranks, computes)
    op_of = np.array(instances.op, dtype=np.int64)
    sizes = _sizes(program, op_of)
    state = _Host(instances, np.asarray(seconds, dtype=np.float64), np.asarray(talks, dtype=np.float64)[op_of] * sizes, host)
    for instance in [i for i, count in enumerate(state.waiting) if not count]:
        state.begin(instance)
    state.place()
    while state.running or state.shared or state.free:
        ended = state.advance(state.next_moment())
        state.finished(ended)
        state.preempt()
        state.place()
    start, finish = np.array(state.start), np.array(state.finish)
    first, last = np.full(program.num_ops, np.inf), np.zeros(program.num_ops)
    np.minimum.at(first, op_of, start)
    np.maximum.at(last, op_of, finish)
    counts = np.bincount(op_of, minlength=program.num_ops)
    held = np.bincount(op_of, weights=finish - start, minlength=program.num_ops) / np.maximum(counts, 1)
    return RankTimeline(Timeline(program, np.where(np.isfinite(first), first, 0.0), last), held)


def _sizes(program: Program, op_of: IntArray) -> FloatArray:
    """Ranks that take part in each instance."""
    return np.array([len(t.groups[0]) if (t := program.transfers.get(int(op))) else 1 for op in op_of], dtype=np.float64)
