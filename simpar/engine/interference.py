"""Compute that slows down while communication of the same role takes SMs and memory bandwidth.

While communication ops with interference f > 0 run on a role's streams, the op on its compute stream progresses at
1 / (1 + max f). Measured slowdowns of overlapped compute: 18.9 % on average, 40 % at most (arXiv 2507.03114, on H100,
A100, MI250, MI210); the factor of each collective comes with its price.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import numpy as np
from numpy.typing import NDArray

from simpar.engine.running import Running
from simpar.program.program import IntArray, PriceTable, Program

BoolArray = NDArray[np.bool_]
Members = list[tuple[int, ...]]


class Interference:
    """Who slows whom, and who runs at the moment. Lists by op and crew: every op of a step passes here twice.

    Attributes:
        loud: per op, the crews that it slows; empty for an op that slows nobody.
        slowed: per op, the crews whose communication slows it.
        changed: crews where something started or ended since the last call of `changes`.
    """

    def __init__(self, program: Program, prices: PriceTable, fixed: Collection[int]) -> None:
        """`fixed`: ops that never yield to communication (transfers, also those that hold a compute stream)."""
        self._factor: list[float] = prices.interference[program.price].tolist()
        self.loud, self.slowed, crews = _who_slows_whom(program, prices, fixed)
        self._active: list[list[float]] = [[] for _ in range(crews)]
        """Factors of the communication under way."""
        self._worst = [0.0] * crews
        self._computing: list[Running | None] = [None] * crews
        self.changed: list[int] = []

    def start_compute(self, state: Running) -> None:
        """A compute op starts; its speed follows with `changes`."""
        for crew in self.slowed[state.op]:
            self._computing[crew] = state
            if self._worst[crew]:
                self.changed.append(crew)

    def end_compute(self, op: int) -> None:
        """A compute op ends."""
        for crew in self.slowed[op]:
            self._computing[crew] = None

    def start_communication(self, op: int) -> None:
        """A communication op starts."""
        factor = self._factor[op]
        for crew in self.loud[op]:
            self._active[crew].append(factor)
            if factor > self._worst[crew]:
                self._worst[crew] = factor
                self.changed.append(crew)

    def end_communication(self, op: int) -> None:
        """A communication op ends."""
        factor = self._factor[op]
        for crew in self.loud[op]:
            active = self._active[crew]
            active.remove(factor)
            if factor == self._worst[crew]:
                self._worst[crew] = max(active, default=0.0)
                self.changed.append(crew)

    def changes(self) -> Iterator[tuple[Running, float]]:
        """(compute op, speed) of the crews where something started or ended since the last call."""
        if self.changed:
            worst = self._worst
            for crew in self.changed:
                state = self._computing[crew]
                if state is not None:
                    beside = self.slowed[state.op]
                    yield state, 1.0 / (1.0 + (worst[crew] if len(beside) == 1 else max([worst[r] for r in beside])))
            self.changed = []


def _who_slows_whom(program: Program, prices: PriceTable, fixed: Collection[int]) -> tuple[Members, Members, int]:
    """Per op the crews that it slows, per op the crews whose communication slows it, and how many crews there are.

    A crew is roles that take part in the same ops only (the tensor-parallel ranks of a stage at stage detail): what one of
    them sees, all see.
    """
    ptr, streams = program.op_streams
    op = np.repeat(np.arange(program.num_ops), np.diff(ptr))
    roles = 1 + max((stream.role for stream in program.streams), default=0)
    code = op * roles + np.array([stream.role for stream in program.streams], dtype=np.int64)[streams]
    computes = np.array([stream.kind == "compute" for stream in program.streams], dtype=bool)[streams]
    loud = prices.interference[program.price] > 0.0
    # An op that also holds the compute stream has nothing beside it there to slow.
    slows, computing = _distinct(code[loud[op]]), _distinct(code[loud[op] & computes])
    slows = slows[~_among(slows, computing)]
    noisy = np.zeros(roles, dtype=bool)
    noisy[slows % roles] = True
    yields = ~loud
    yields[np.fromiter(fixed, np.int64, len(fixed))] = False
    slowed = _distinct(code[yields[op] & computes])
    slowed = slowed[noisy[slowed % roles]]
    crew_of = _crews(slows, slowed, roles)
    loud_by_op, slowed_by_op = (_by_op(part, roles, crew_of, program.num_ops) for part in (slows, slowed))
    return loud_by_op, slowed_by_op, int(crew_of.max()) + 1


def _distinct(code: IntArray) -> IntArray:
    """Sorted, each once. By hand: numpy 2's hashing np.unique takes many times longer on millions of entries."""
    code = np.sort(code, kind="stable")
    return code[np.diff(code, prepend=-1) > 0]


def _among(code: IntArray, others: IntArray) -> BoolArray:
    """Which of `code` occur in `others` (sorted)."""
    if not len(others):
        return np.zeros(len(code), dtype=bool)
    return np.asarray(others[np.minimum(np.searchsorted(others, code), len(others) - 1)] == code)


def _crews(slows: IntArray, slowed: IntArray, roles: int) -> IntArray:
    """Index of the crew for the first role of each, -1 for the others: int array [roles]."""
    ops = [_of_each_role(part, roles) for part in (slows, slowed)]
    known: set[tuple[bytes, bytes]] = set()
    crew_of = np.full(roles, -1)
    for role in range(roles):
        mine = (ops[0][role], ops[1][role])
        if mine not in known:
            crew_of[role] = len(known)
            known.add(mine)
    return crew_of


def _of_each_role(code: IntArray, roles: int) -> list[bytes]:
    """The ops of each role, as bytes to compare."""
    op, role = np.divmod(code, roles)
    order = np.argsort(role, kind="stable")
    ends = np.cumsum(np.bincount(role, minlength=roles))
    return [part.tobytes() for part in np.split(op[order], ends[:-1])]


def _by_op(code: IntArray, roles: int, crew_of: IntArray, num_ops: int) -> Members:
    """The crews of each op, from sorted op * roles + role."""
    ops, role = np.divmod(code, roles)
    crew = crew_of[role]
    first = crew >= 0
    alone = [(c,) for c in range(int(crew_of.max()) + 1)]
    found: Members = [()] * num_ops
    for op, member in zip(ops[first].tolist(), crew[first].tolist(), strict=True):
        found[op] = found[op] + alone[member] if found[op] else alone[member]
    return found
