"""The price of a block: its op list replayed on a compute stream and one stream per dimension, in closed order.

The same rule as the engine's (an op starts when what it waits for has finished and its stream is free), on a list small
enough that a loop beats a queue. Time in which the compute stream waits for a collective is that dimension's exposed time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from simpar.costs.price import Price, Provenance
from simpar.parallel.work import AttentionWork, ExpertExchange, Gemm, GroupedGemm, LocalOp, MemoryWork

PriceOf = Callable[[LocalOp], Price]

_ORDER = list(Provenance)


def worst(kinds: Sequence[Provenance]) -> Provenance:
    """The least certain of several provenances."""
    return max(kinds, key=_ORDER.index, default=Provenance.MEASURED)


def category(op: LocalOp, *, backward: bool) -> str:
    """Ledger name of a compute op."""
    if backward and not op.name.endswith(("grad", ".backward")) and ".backward" not in op.name:
        return "recompute"
    if isinstance(op.work, AttentionWork):
        return "attention"
    if isinstance(op.work, Gemm):
        return "matmul"
    if isinstance(op.work, GroupedGemm):
        return "expert_matmul"
    if isinstance(op.work, MemoryWork):
        return "cast" if op.work.kernel.startswith("cast") else "memory_bound"
    return "communication"


@dataclass(frozen=True, slots=True)
class BlockPrice:
    """What one block costs in one phase.

    Attributes:
        seconds: makespan of the op list.
        terms: compute seconds by category and exposed communication by dimension; sums to `seconds`.
        spread: (category, seconds up, seconds down) of the 80 % interval, each category fully correlated.
        communication_s: busy seconds by dimension, hidden or not.
        kernels: launches of compute ops.
        collectives: communication ops issued.
        provenance: the worst among the ops.
    """

    seconds: float
    terms: tuple[tuple[str, float], ...]
    spread: tuple[tuple[str, float, float], ...]
    communication_s: tuple[tuple[str, float], ...]
    kernels: int
    collectives: int
    provenance: Provenance

    @property
    def exposed_s(self) -> float:
        """Seconds in which compute waits for collectives."""
        dimensions = {name for name, _ in self.communication_s}
        return sum(seconds for name, seconds in self.terms if name in dimensions)

    @property
    def has_experts(self) -> bool:
        """Whether tokens go to experts."""
        return any(name == "expert_matmul" for name, _ in self.terms)

    @property
    def recomputes(self) -> bool:
        """Whether part of the forward runs again."""
        return any(name == "recompute" for name, _ in self.terms)


class _Ledger:
    def __init__(self) -> None:
        self.terms: dict[str, float] = {}
        self.up: dict[str, float] = {}
        self.down: dict[str, float] = {}
        self.busy: dict[str, float] = {}
        self.kinds: list[Provenance] = []
        self.kernels = 0
        self.collectives = 0

    def add(self, name: str, price: Price, seconds: float) -> None:
        self.terms[name] = self.terms.get(name, 0.0) + seconds
        share = seconds / price.seconds if price.seconds else 0.0
        self.up[name] = self.up.get(name, 0.0) + (price.high - price.seconds) * share
        self.down[name] = self.down.get(name, 0.0) + (price.seconds - price.low) * share
        self.kinds.append(price.provenance)

    def finish(self, seconds: float) -> BlockPrice:
        spread = tuple((n, self.up[n], self.down[n]) for n in self.terms)
        return BlockPrice(seconds, tuple(self.terms.items()), spread, tuple(self.busy.items()), self.kernels, self.collectives,
                          worst(self.kinds))  # fmt: skip


def price_list(ops: Sequence[LocalOp], price_of: PriceOf, *, backward: bool) -> BlockPrice:
    """Price one op list."""
    ledger = _Ledger()
    finish: list[float] = []
    free: dict[str, float] = {}
    prices: list[Price] = []
    for op in ops:
        price = price_of(op)
        prices.append(price)
        ready, cause = 0.0, -1
        for dep in op.deps:
            if finish[dep] > ready:
                ready, cause = finish[dep], dep
        start = max(ready, free.get(op.stream, 0.0))
        if op.stream == "compute":
            ledger.kernels += op.kernels
            gap = start - free.get("compute", 0.0)
            if gap > 0:
                stream = ops[cause].stream if cause >= 0 else "compute"
                ledger.add(stream, prices[cause], gap)
            ledger.add(category(op, backward=backward), price, price.seconds)
        else:
            ledger.collectives += 1
            ledger.busy[op.stream] = ledger.busy.get(op.stream, 0.0) + price.seconds
        free[op.stream] = start + price.seconds
        finish.append(start + price.seconds)
    total = max(finish, default=0.0)
    tail = total - free.get("compute", 0.0)
    if tail > 0:
        last = max(range(len(ops)), key=lambda i: finish[i])
        ledger.add(ops[last].stream, prices[last], tail)
    return ledger.finish(total)


def price_pair(forward: Sequence[LocalOp], backward: Sequence[LocalOp], price_of: PriceOf) -> BlockPrice:
    """Two op lists interleaved on one compute stream: whoever is ready first computes while the other communicates.

    Ties go to the backward, as in DualPipe's order. Each list keeps its own order.
    """
    ledger = _Ledger()
    lists = (backward, forward)
    position = [0, 0]
    finish: tuple[list[float], list[float]] = ([], [])
    free: dict[str, float] = {}

    def ready(lane: int) -> float:
        op = lists[lane][position[lane]]
        return max([free.get(op.stream, 0.0), *(finish[lane][d] for d in op.deps)])

    while position[0] < len(lists[0]) or position[1] < len(lists[1]):
        lanes = [lane for lane in (0, 1) if position[lane] < len(lists[lane])]
        lane = min(lanes, key=lambda x: (ready(x), x))
        op = lists[lane][position[lane]]
        price, start = price_of(op), ready(lane)
        if op.stream == "compute":
            ledger.kernels += op.kernels
            gap = start - free.get("compute", 0.0)
            if gap > 0:
                cause = max(op.deps, key=lambda d: finish[lane][d], default=-1)
                stream = lists[lane][cause].stream if cause >= 0 else "compute"
                ledger.add(stream, price_of(lists[lane][cause]) if cause >= 0 else price, gap)
            ledger.add(category(op, backward=lane == 0), price, price.seconds)
        else:
            ledger.collectives += 1
            ledger.busy[op.stream] = ledger.busy.get(op.stream, 0.0) + price.seconds
        free[op.stream] = start + price.seconds
        finish[lane].append(start + price.seconds)
        position[lane] += 1
    total = max([*finish[0], *finish[1]], default=0.0)
    tail = total - free.get("compute", 0.0)
    if tail > 0:
        ledger.add("ep", Price(tail, tail, tail, Provenance.MODEL), tail)
    return ledger.finish(total)


__all__ = ["BlockPrice", "ExpertExchange", "price_list", "price_pair", "worst"]
