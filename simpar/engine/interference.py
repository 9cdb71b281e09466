"""Compute that slows down while communication of the same role takes SMs and memory bandwidth.

While communication ops with interference f > 0 run on a role's streams, the op on its compute stream progresses at
1 / (1 + max f). Measured slowdowns of overlapped compute: 18.9 % on average, 40 % at most (arXiv 2507.03114, on H100,
A100, MI250, MI210); the factor of each collective comes with its price.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from simpar.program.program import PriceTable, Program


class Interference:
    """Who slows whom, and who runs at the moment.

    Attributes:
        loud: communication op -> its factor and the roles it slows.
        slowed: compute op -> the roles whose communication slows it.
    """

    def __init__(self, program: Program, prices: PriceTable, fixed: Collection[int]) -> None:
        """`fixed`: ops that never yield to communication (transfers, also those that hold a compute stream)."""
        ptr, streams = program.op_streams[0].tolist(), program.op_streams[1].tolist()
        role = [stream.role for stream in program.streams]
        computes = [stream.kind == "compute" for stream in program.streams]
        factors = prices.interference[program.price].tolist()
        self.loud: dict[int, tuple[float, tuple[int, ...]]] = {}
        self.slowed: dict[int, tuple[int, ...]] = {}
        noisy_roles: set[int] = set()
        for op, factor in enumerate(factors):
            if factor > 0.0:
                held = streams[ptr[op] : ptr[op + 1]]
                # An op that also holds the compute stream has nothing beside it there to slow.
                roles = {role[s] for s in held} - {role[s] for s in held if computes[s]}
                if roles:
                    self.loud[op] = (factor, tuple(sorted(roles)))
                    noisy_roles |= roles
        for op, factor in enumerate(factors):
            if factor <= 0.0 and op not in fixed:
                roles = {role[s] for s in streams[ptr[op] : ptr[op + 1]] if computes[s]} & noisy_roles
                if roles:
                    self.slowed[op] = tuple(sorted(roles))
        self._factors: dict[int, list[float]] = {r: [] for r in noisy_roles}
        self._computing: dict[int, int] = {}
        self._changed: set[int] = set()

    def start_compute(self, op: int) -> None:
        """A compute op starts; its speed follows with `changes`."""
        for role in self.slowed[op]:
            self._computing[role] = op
            if self._factors[role]:
                self._changed.add(role)

    def start_communication(self, op: int) -> None:
        """A communication op starts."""
        factor, roles = self.loud[op]
        for role in roles:
            self._factors[role].append(factor)
            self._changed.add(role)

    def end(self, op: int) -> None:
        """Any op ends."""
        if op in self.slowed:
            for role in self.slowed[op]:
                del self._computing[role]
        elif op in self.loud:
            factor, roles = self.loud[op]
            for role in roles:
                self._factors[role].remove(factor)
                self._changed.add(role)

    def changes(self) -> Iterator[tuple[int, float]]:
        """(compute op, speed) of the roles where something started or ended since the last call."""
        if not self._changed:
            return
        changed, self._changed = self._changed, set()
        for op in sorted({self._computing[role] for role in changed if role in self._computing}):
            worst = max(max(self._factors[role], default=0.0) for role in self.slowed[op])
            yield op, 1.0 / (1.0 + worst)
