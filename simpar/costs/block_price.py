"""The price of a block: its op list replayed on a compute stream and one stream per dimension, in closed order.

The same rule as the engine's (an op starts when what it waits for has finished and its stream is free), on a list small
enough that a loop beats a queue. Time in which the compute stream waits is exposed time of the dimension whose collective runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from simpar.costs.price import Price, Provenance
from simpar.graph.scan_kernels import LAUNCHES
from simpar.parallel.work import AttentionWork, Collective, Gemm, GroupedGemm, KernelWork, LocalOp, MemoryWork

PriceOf = Callable[[LocalOp], Price]
Kinds = tuple[tuple[str, Provenance], ...]
"""Category and how its price is known."""
INTERFERENCE = "interference"

_ORDER = list(Provenance)


def worst(kinds: Sequence[Provenance]) -> Provenance:
    """The least certain of several provenances."""
    return max(kinds, key=_ORDER.index, default=Provenance.MEASURED)


def worst_each(kinds: Iterable[tuple[str, Provenance]]) -> Kinds:
    """Each category once, with the least certain of its provenances."""
    found: dict[str, Provenance] = {}
    for name, kind in kinds:
        found[name] = worst([found.get(name, kind), kind])
    return tuple(found.items())


def category(op: LocalOp, *, backward: bool) -> str:
    """Ledger name of a compute op."""
    if backward and not op.name.endswith(("grad", ".backward")) and ".backward" not in op.name:
        return "recompute"
    if isinstance(op.work, AttentionWork | KernelWork):
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
        repeated_kernels: of them, those of a repeated forward.
        triton_kernels: of `kernels`, those of scans that Triton launches from Python.
        collectives: communication ops issued.
        provenance: of each category of `terms`, the worst among its ops.
        expert_kernels: of `kernels`, those of routed experts, which graphs over attention alone leave out.
        weights, containers: weights, each in a module of its own, and modules around those.
        linears: of the weights, those of linear modules.
        quantised: of these, those whose weight is dequantised before each use.
        matrices: weights of products, those of queries, keys and values in one.
        pairs: low-rank pairs beside linears.
        attentions, rotaries: softmax attentions, and the rotary embeddings of their queries and keys.
        repeats_modules, repeats_experts: whether products of weights run again, and so their modules; whether those of experts do,
            and so the exchange that brings their rows.
        called: of `collectives`, those that all ranks of a group call together, by dimension (sends have two ends).
    """

    seconds: float
    terms: tuple[tuple[str, float], ...]
    spread: tuple[tuple[str, float, float], ...]
    communication_s: tuple[tuple[str, float], ...]
    kernels: int
    collectives: int
    provenance: Kinds
    expert_kernels: int = 0
    weights: int = 0
    containers: int = 0
    linears: int = 0
    quantised: int = 0
    matrices: int = 0
    pairs: int = 0
    attentions: int = 0
    rotaries: int = 0
    repeated_kernels: int = 0
    triton_kernels: int = 0
    repeats_modules: bool = False
    repeats_experts: bool = False
    called: tuple[tuple[str, int], ...] = ()

    @property
    def exposed_s(self) -> float:
        """Seconds in which compute waits for collectives."""
        dimensions = {name for name, _ in self.communication_s}
        return sum(seconds for name, seconds in self.terms if name in dimensions)


class _Ledger:
    def __init__(self) -> None:
        self.terms: dict[str, float] = {}
        self.up: dict[str, float] = {}
        self.down: dict[str, float] = {}
        self.busy: dict[str, float] = {}
        self.kinds: list[tuple[str, Provenance]] = []
        self.kernels = 0
        self.collectives = 0
        self.called: dict[str, int] = {}

    def add(self, name: str, price: Price, seconds: float) -> None:
        self.terms[name] = self.terms.get(name, 0.0) + seconds
        share = seconds / price.seconds if price.seconds else 0.0
        self.up[name] = self.up.get(name, 0.0) + (price.high - price.seconds) * share
        self.down[name] = self.down.get(name, 0.0) + (price.seconds - price.low) * share
        self.kinds.append((name, price.provenance))

    def finish(self, seconds: float) -> BlockPrice:
        spread = tuple((n, self.up[n], self.down[n]) for n in self.terms)
        return BlockPrice(seconds, tuple(self.terms.items()), spread, tuple(self.busy.items()), self.kernels, self.collectives,
                          worst_each(self.kinds), called=tuple(self.called.items()))  # fmt: skip


@dataclass(frozen=True)
class _Ops:
    """What a replay runs: ops with their prices, ledger names and the ops that each waits for besides its stream."""

    ops: tuple[LocalOp, ...]
    deps: tuple[tuple[int, ...], ...]
    names: tuple[str, ...]
    prices: tuple[Price, ...]

    @classmethod
    def of(cls, ops: Sequence[LocalOp], price_of: PriceOf, *, backward: bool) -> _Ops:
        names = tuple(category(op, backward=backward) if op.stream == "compute" else op.stream for op in ops)
        return cls(tuple(ops), tuple(op.deps for op in ops), names, tuple(price_of(op) for op in ops))

    @cached_property
    def streams(self) -> tuple[str, ...]:
        """Of each op."""
        return tuple(op.stream for op in self.ops)

    @cached_property
    def seconds(self) -> tuple[float, ...]:
        """Of each op."""
        return tuple(price.seconds for price in self.prices)

    @property
    def bound_by_sms(self) -> float:
        """Share of the compute that loses what SMs it loses; fewer SMs still keep the memory busy."""
        compute = [(op, price.seconds) for op, price in zip(self.ops, self.prices, strict=True) if op.stream == "compute"]
        total = sum(seconds for _, seconds in compute)
        return sum(seconds for op, seconds in compute if not isinstance(op.work, MemoryWork)) / total if total else 0.0

    def beside(self, other: _Ops) -> _Ops:
        """These ops, then the `other` ones."""
        moved = tuple(tuple(d + len(self.ops) for d in deps) for deps in other.deps)
        return _Ops(self.ops + other.ops, self.deps + moved, self.names + other.names, self.prices + other.prices)


class _Replay:
    """The ops of a block in one order: when each starts and finishes, and what it started upon."""

    def __init__(self, given: _Ops, order: Sequence[int]) -> None:
        count, deps, streams, seconds = len(given.ops), given.deps, given.streams, given.seconds
        self.given, self.order = given, order
        start, finish, cause = [0.0] * count, [0.0] * count, [-1] * count
        last: dict[str, int] = {}
        for index in order:
            begin, stream = 0.0, streams[index]
            for before in deps[index]:
                if finish[before] > begin:
                    begin, cause[index] = finish[before], before
            before = last.get(stream, -1)
            if before >= 0 and finish[before] > begin:
                begin, cause[index] = finish[before], before
            start[index], finish[index] = begin, begin + seconds[index]
            last[stream] = index
        self.start, self.finish, self.cause = start, finish, cause
        self.seconds = max(finish, default=0.0)

    def priced(self) -> BlockPrice:
        """The ledger of this order: compute by category, waits by the dimension whose collective runs then."""
        ledger, free = _Ledger(), 0.0
        for index in self.order:
            op, price = self.given.ops[index], self.given.prices[index]
            if op.stream == "compute":
                ledger.kernels += op.kernels
                self._wait(ledger, self.cause[index], free)
                ledger.add(self.given.names[index], price, price.seconds)
                free = self.finish[index]
            else:
                ledger.collectives += op.kernels
                group = op.work.dimension if isinstance(op.work, Collective) else op.stream
                if not (isinstance(op.work, Collective) and op.work.name == "send_recv"):
                    ledger.called[group] = ledger.called.get(group, 0) + op.kernels
                ledger.busy[op.stream] = ledger.busy.get(op.stream, 0.0) + price.seconds
        if self.order and self.seconds > free:
            self._wait(ledger, max(self.order, key=self.finish.__getitem__), free)
        return ledger.finish(self.seconds)

    def _wait(self, ledger: _Ledger, cause: int, free: float) -> None:
        """Charge a wait of the compute stream, from `free` to the end of `cause`, to the collectives that ran in it."""
        while cause >= 0 and self.finish[cause] > free:
            begun = max(self.start[cause], free)
            ledger.add(self.given.names[cause], self.given.prices[cause], self.finish[cause] - begun)
            cause = self.cause[cause]


def triton_launches(work: KernelWork) -> int:
    """Kernels of a scan that Triton launches; 0 of a kernel that no scan's table knows."""
    return LAUNCHES[work.kind][work.backward].triton if work.kind in LAUNCHES else 0


def price_list(ops: Sequence[LocalOp], price_of: PriceOf, *, backward: bool) -> BlockPrice:
    """Price one op list."""
    price = _Replay(_Ops.of(ops, price_of, backward=backward), range(len(ops))).priced()
    compute = [op for op in ops if op.stream == "compute"]
    repeated = [op for op in compute if category(op, backward=backward) == "recompute"]
    again = [op.work for op in repeated]
    return replace(
        price,
        expert_kernels=sum(op.kernels for op in compute if op.name.startswith("moe")),
        repeated_kernels=sum(op.kernels for op in repeated),
        triton_kernels=sum(triton_launches(op.work) for op in compute if isinstance(op.work, KernelWork)),
        repeats_modules=any(isinstance(work, Gemm | GroupedGemm) for work in again),
        repeats_experts=any(isinstance(work, GroupedGemm) for work in again),
    )


def price_pair(forward: Sequence[LocalOp], backward: Sequence[LocalOp], price_of: PriceOf, slowed: float = 0.0) -> BlockPrice:
    """Two op lists interleaved on one compute stream: one computes while the other communicates.

    Each list keeps its own order. How they interleave is the best of a few orders that follow from the lists alone, not from what
    anything costs (`merges`). The least of several longest paths: no op that gets faster makes the pair slower.

    Args:
        slowed: how much longer compute takes beside an exchange of expert tokens that holds SMs: 0.2 = a fifth.
    """
    both = _Ops.of(backward, price_of, backward=True).beside(_Ops.of(forward, price_of, backward=False))
    orders = merges(segments(backward, 0), segments(forward, len(backward)))
    best = min((_Replay(both, order) for order in orders), key=lambda replay: replay.seconds).priced()
    return _beside_exchanges(best, slowed * both.bound_by_sms)


def _beside_exchanges(price: BlockPrice, slowed: float) -> BlockPrice:
    """`price` with compute slowed where exchanges run beside it: seconds of both, less those in which either runs.

    With s of at most 1 the sum is (1 - s) * either + s * both: nothing that gets faster makes it longer.
    """
    more = min(slowed, 1.0) * max(dict(price.communication_s).get("ep", 0.0) - price.exposed_s, 0.0)
    if not more:
        return price
    return replace(
        price, seconds=price.seconds + more, terms=(*price.terms, (INTERFERENCE, more)),
        spread=(*price.spread, (INTERFERENCE, 0.3 * more, 0.3 * more)),
        provenance=worst_each([*price.provenance, (INTERFERENCE, Provenance.MODEL)]),
    )  # fmt: skip


def merges(first: Sequence[Sequence[int]], second: Sequence[Sequence[int]]) -> list[list[int]]:
    """Orders of two op lists, cut into `segments`, on one compute stream.

    Turn and turn about at the cuts, as a framework's hooks around dispatch and combine do; the `first` list begins (the backward,
    as in DualPipe's order) and is any number of turns ahead.
    """
    found = []
    for lead in range(1, max(len(first), 1) + 1):
        turns = [*first[:lead]]
        for turn in range(max(len(first) - lead, len(second))):
            turns += [*second[turn : turn + 1], *first[lead + turn : lead + turn + 1]]
        found.append([index for turn in turns for index in turn])
    return found


def segments(ops: Sequence[LocalOp], offset: int) -> list[list[int]]:
    """Indices of the ops, from `offset` on, cut before every compute op that waits for a collective issued since the last cut."""
    found: list[list[int]] = []
    for index, op in enumerate(ops):
        own = [d for d in op.deps if ops[d].stream != "compute"] if op.stream == "compute" else []
        if not found or any(d + offset >= found[-1][0] for d in own):
            found.append([])
        found[-1].append(index + offset)
    return found


def hidden_share(own: Sequence[BlockPrice], pair: BlockPrice) -> float:
    """The share of the exposed exchanges of a forward and a backward (`own`) beside each other that the other's compute hides.

    In the steady phase every forward meets a backward of the same stage: what the pair saves is time in which one waited for its
    experts' rows and the other computed. Each takes its share of it off its exposed exchange; nothing else changes.
    """
    wait = sum(dict(price.terms).get("ep", 0.0) for price in own)
    saved = max(own[0].seconds + own[1].seconds - pair.seconds, 0.0)
    return min(saved / wait, 1.0) if wait else 0.0


def without_hidden(price: BlockPrice, hidden: float) -> BlockPrice:
    """`price` without a share of its exposed exchange."""
    wait = dict(price.terms).get("ep", 0.0)
    if not hidden * wait:
        return price
    left = 1.0 - hidden
    terms = tuple((name, seconds * (left if name == "ep" else 1.0)) for name, seconds in price.terms)
    spread = tuple((n, up * (left if n == "ep" else 1.0), down * (left if n == "ep" else 1.0)) for n, up, down in price.spread)
    return replace(price, seconds=price.seconds - hidden * wait, terms=terms, spread=spread)
