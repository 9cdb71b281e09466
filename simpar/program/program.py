"""A program: what waits for what, without seconds.

An op starts when every op it depends on has finished and it is at the head of every stream it occupies; it holds those
streams while it runs; streams are first-in first-out. Ops refer to prices by index, so one program serves any number of
price tables.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from simpar.errors import DeadlockError

T = TypeVar("T")
IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


def pointers(counts: Sequence[int] | IntArray) -> IntArray:
    """Where runs of these lengths begin in one array, and its end (CSR)."""
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


Groups = tuple[tuple[int, ...], ...]
"""Ranks of each of several groups. Long ones are `HashedOnce`: every op is looked up by them."""


class OpKind(IntEnum):
    """What an op is, for reports; the engines do not look at it."""

    FORWARD = 0
    BACKWARD = 1
    INPUT_GRADIENT = 2
    WEIGHT_GRADIENT = 3
    SEND_FORWARD = 4
    SEND_BACKWARD = 5
    GATHER_PARAMETERS = 6
    REDUCE_GRADIENTS = 7
    OPTIMIZER = 8
    COLLECTIVE = 9
    OFFLOAD = 10
    OTHER = 11
    OVERLAPPED = 12


COMPUTE_KINDS = frozenset(
    {
        OpKind.FORWARD, OpKind.BACKWARD, OpKind.INPUT_GRADIENT, OpKind.WEIGHT_GRADIENT, OpKind.OPTIMIZER, OpKind.OTHER,
        OpKind.OVERLAPPED,
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Stream:
    """A serial resource of one role: "compute", or the communication stream of a dimension ("tp", "dp", "pp_forward")."""

    role: int
    kind: str

    def __str__(self) -> str:
        return f"r{self.role}.{self.kind}"


@dataclass(frozen=True, slots=True)
class Transfer:
    """What an op moves over the network, for the contention model.

    Attributes:
        collective: name as in costs/collectives.py, or "send_recv".
        bytes: as nccl-tests counts them.
        groups: global ranks of every group that one op stands for (a folded op stands for all its symmetric groups).
    """

    collective: str
    bytes: float
    groups: Groups


class _WorkedOut(Generic[T]):
    """As `cached_property`, in the memo of `Program.worked_out`."""

    def __init__(self, what: Callable[[Any], T]) -> None:
        self._what, self.__doc__ = what, what.__doc__

    def __get__(self, program: Program, owner: type) -> T:
        return program.worked_out(self._what)


@dataclass(frozen=True, eq=False)
class Program:
    """Ops, their streams and dependencies, as arrays over ops (CSR for the ragged ones).

    Attributes:
        name: for messages.
        streams: every stream; `stream_ptr`/`stream_ops` list each stream's ops in its order.
        kind, stage, microbatch, layer, role: int arrays [ops]; -1 where it does not apply. `stage` is virtual.
        price: int array [ops], index into a price table.
        price_keys: one hashable key per price, what costs/ prices.
        dep_ptr, dep_ops: CSR of the ops each op waits for, besides its streams.
        transfers: op -> what it moves, where contention matters.
        rank_count: ranks that each role stands for.
        labels: texts of ops that the arrays do not describe.
        pairs: overlapped op -> (stage, microbatch) of its backward; the arrays describe its forward.
        begins: first op of each action of the schedule, pipeline after pipeline, rank after rank, and behind the last one's.
        known: memo of `worked_out`; programs that differ in `rank_count` alone may hand it on.
    """

    name: str
    streams: tuple[Stream, ...]
    stream_ptr: IntArray
    stream_ops: IntArray
    kind: IntArray
    stage: IntArray
    microbatch: IntArray
    layer: IntArray
    role: IntArray
    price: IntArray
    price_keys: tuple[object, ...]
    dep_ptr: IntArray
    dep_ops: IntArray
    transfers: dict[int, Transfer] = field(default_factory=dict)
    rank_count: tuple[int, ...] = ()
    labels: dict[int, str] = field(default_factory=dict)
    pairs: dict[int, tuple[int, int]] = field(default_factory=dict)
    begins: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    known: dict[object, Any] = field(init=False, repr=False, default_factory=dict)

    def worked_out(self, what: Callable[[Program], T]) -> T:
        """What a function says of what waits for what, asked once."""
        if what not in self.known:
            self.known[what] = what(self)
        found: T = self.known[what]
        return found

    @property
    def num_ops(self) -> int:
        """How many ops there are."""
        return len(self.kind)

    def label(self, op: int) -> str:
        """A short text for op `op`, such as "2F0/l5@r1"."""
        if op in self.labels:
            return self.labels[op]
        letter = {0: "F", 1: "B", 2: "I", 3: "W", 4: "SEND_F", 5: "SEND_B", 6: "UNSHARD", 7: "REDUCE_GRAD", 8: "OPT",
                  12: "F+B"}.get(int(self.kind[op]), OpKind(int(self.kind[op])).name)  # fmt: skip
        stage = str(self.stage[op]) if self.stage[op] >= 0 else ""
        microbatch = str(self.microbatch[op]) if self.microbatch[op] >= 0 else ""
        layer = f"/l{self.layer[op]}" if self.layer[op] >= 0 else ""
        return f"{stage}{letter}{microbatch}{layer}@r{self.role[op]}"

    def ops_of(self, stream: Stream) -> IntArray:
        """The ops of a stream in its order, int array."""
        if stream not in self.streams:
            return np.zeros(0, dtype=np.int64)
        return self.ops_at(self.streams.index(stream))

    def ops_at(self, index: int) -> IntArray:
        """The ops of the stream at `index` of `streams` in its order, int array."""
        return self.stream_ops[self.stream_ptr[index] : self.stream_ptr[index + 1]]

    @_WorkedOut
    def op_streams(self) -> tuple[IntArray, IntArray]:
        """CSR (ptr, streams): the streams each op occupies."""
        owner = np.repeat(np.arange(len(self.streams)), np.diff(self.stream_ptr))
        order = np.argsort(self.stream_ops, kind="stable")
        counts = np.bincount(self.stream_ops, minlength=self.num_ops)
        return pointers(counts), owner[order]

    @_WorkedOut
    def predecessors(self) -> tuple[IntArray, IntArray]:
        """CSR (ptr, ops): stream predecessors of each op, and dependencies that the order of a stream does not imply."""
        heads = np.repeat(np.arange(self.num_ops), np.diff(self.dep_ptr))
        same_stream = np.ones(max(len(self.stream_ops) - 1, 0), dtype=bool)
        starts = self.stream_ptr[1:-1]
        same_stream[starts[(starts > 0) & (starts < len(self.stream_ops))] - 1] = False
        before, after = self.stream_ops[:-1][same_stream], self.stream_ops[1:][same_stream]
        stream, place = np.full(self.num_ops, -1), np.full(self.num_ops, -1)
        stream[self.stream_ops] = np.repeat(np.arange(len(self.streams)), np.diff(self.stream_ptr))
        place[self.stream_ops] = np.arange(len(self.stream_ops))
        own, other = place[heads], place[self.dep_ops]
        told = (stream[heads] != stream[self.dep_ops]) | (other >= own)
        target = np.concatenate([heads[told], after])
        source = np.concatenate([self.dep_ops[told], before])
        # Sorted by hand: numpy 2's hashing np.unique takes many times longer on millions of entries.
        code = np.sort(target * self.num_ops + source)
        code = code[np.diff(code, prepend=-1) > 0]
        target, source = np.divmod(code, max(self.num_ops, 1))
        counts = np.bincount(target, minlength=self.num_ops)
        return pointers(counts), source

    @_WorkedOut
    def successors(self) -> tuple[IntArray, IntArray]:
        """CSR (ptr, ops): the transpose of `predecessors`."""
        ptr, source = self.predecessors
        target = np.repeat(np.arange(self.num_ops), np.diff(ptr))
        order = np.argsort(source, kind="stable")
        counts = np.bincount(source, minlength=self.num_ops)
        return pointers(counts), target[order]

    @_WorkedOut
    def role_streams(self) -> dict[int, tuple[int, ...]]:
        """Indices of the streams of each role."""
        found: dict[int, list[int]] = {}
        for index, stream in enumerate(self.streams):
            found.setdefault(stream.role, []).append(index)
        return {role: tuple(indices) for role, indices in found.items()}

    @_WorkedOut
    def topological_order(self) -> tuple[IntArray, IntArray]:
        """Every op behind its predecessors, communication before the compute that it may run beside; the level of each, one more
        than that of any predecessor. Int arrays [ops].

        Raises:
            DeadlockError: the program has a cycle; the error names it.
        """
        waiting = np.diff(self.predecessors[0]).tolist()
        ptr, ops = self.successors[0].tolist(), self.successors[1].tolist()
        computes = np.zeros(self.num_ops, dtype=bool)
        for index, stream in enumerate(self.streams):
            if stream.kind == "compute":
                computes[self.ops_at(index)] = True
        works, level = computes.tolist(), [0] * self.num_ops
        # Plain lists: programs are often thousands of levels deep and a few ops wide, where numpy calls per level cost more.
        ready = np.flatnonzero(np.array(waiting) == 0)
        work, talk = deque(ready[computes[ready]].tolist()), deque(ready[~computes[ready]].tolist())
        order = []
        while talk or work:
            op = talk.popleft() if talk else work.popleft()
            order.append(op)
            below = level[op] + 1
            for successor in ops[ptr[op] : ptr[op + 1]]:
                waiting[successor] -= 1
                if level[successor] < below:
                    level[successor] = below
                if not waiting[successor]:
                    (work if works[successor] else talk).append(successor)
        if len(order) != self.num_ops:
            raise DeadlockError(self._cycle(np.array(waiting, dtype=np.int64)))
        return np.array(order, dtype=np.int64), np.array(level, dtype=np.int64)

    @_WorkedOut
    def topological_levels(self) -> tuple[IntArray, ...]:
        """Ops grouped so that every predecessor of a level lies in an earlier one; ascending within a level.

        Raises:
            DeadlockError: as of `topological_order`.
        """
        levels = self.topological_order[1]
        sizes = np.bincount(levels)
        return tuple(np.split(np.argsort(levels, kind="stable"), np.cumsum(sizes)[:-1])) if len(sizes) else ()

    def check(self) -> None:
        """Find a deadlock before anything runs.

        Raises:
            DeadlockError: naming the ops of one cycle.
        """
        _ = self.topological_order

    def _cycle(self, indegree: IntArray) -> list[str]:
        """Labels of one cycle among the ops that never became ready."""
        ptr, ops = self.predecessors
        op = int(np.flatnonzero(indegree > 0)[0])
        path: list[int] = []
        position: dict[int, int] = {}
        while op not in position:
            position[op] = len(path)
            path.append(op)
            op = next(int(p) for p in ops[ptr[op] : ptr[op + 1]] if indegree[p] > 0)
        return [self.label(o) for o in reversed(path[position[op] :])]


@dataclass(frozen=True)
class PriceTable:
    """Seconds for each price key of a program.

    Attributes:
        seconds: float array [prices].
        interference: float array [prices]; while an op with interference f runs on a communication stream, compute ops of
            the same role run at 1 / (1 + f) of their speed (SMs and HBM that the collective takes). 0 for compute.
    """

    seconds: FloatArray
    interference: FloatArray
