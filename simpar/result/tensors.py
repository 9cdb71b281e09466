"""Every tensor of a rank by name, with when it is asked for and given back, and which of them are alive at the peak."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from simpar.parallel.layout import Layout
from simpar.result.requests import Pass, Sharded, Trace, run_passes, until_steady

TimedPass = tuple[Pass, float, float]
"""A pass over blocks, and when it starts and ends, in seconds."""
_STREAMS = {"all_gather": "fsdp/gathered", "reduce_scatter": "fsdp/reduced", "compute": "fsdp/unsharded"}
"""Tensors that belong to no op: names by the stream that asks for them."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of one micro-batch.

    Attributes:
        name: of the op and what it is to it: "attention/qkv_out", "moe/fc2.gradient".
        stage, block: model stage and block in it that asked for it; -1: none.
        size: bytes.
        asked, freed: order of the two requests on the rank; freed is past all others where the tensor outlives them.
        start_s, end_s: start of the pass that asks for it, end of the pass that gives it back.
    """

    name: str
    stage: int
    block: int
    size: int
    asked: int
    freed: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Alive:
    """Tensors of one name that are alive at a moment: how many, their bytes, how long one lives on average."""

    name: str
    count: int
    size: int
    mean_life_s: float


@dataclass
class _Named(Trace):
    """Requests that remember the tensor's name and the time."""

    where: tuple[int, int] = (-1, -1)
    now: tuple[float, float] = (0.0, 0.0)
    open: dict[int, tuple[str, tuple[int, int], int, int, float]] = field(default_factory=dict)
    found: list[Tensor] = field(default_factory=list)
    seen: int = 0

    def run(self, steps: tuple[tuple[str, int], ...], ids: dict[str, int], collective: frozenset[str] = frozenset()) -> None:
        self._note([])
        super().run(steps, ids, collective)
        self._note([name.partition("#")[0] for name, size in steps if size])

    def forward(self, stage: int, index: int) -> None:
        self.where = (stage, index)
        super().forward(stage, index)
        self._note([])

    def backward(self, stage: int, index: int, *, late: bool) -> None:
        self.where = (stage, index)
        super().backward(stage, index, late=late)
        self._note([])

    def repeat(self, stage: int, index: int, steps: tuple[tuple[str, int], ...], collective: frozenset[str]) -> None:
        before, self.where = self.where, (stage, index)
        super().repeat(stage, index, steps, collective)
        self.where = before

    def weight(self, stage: int, index: int) -> None:
        self.where = (stage, index)
        super().weight(stage, index)
        self._note([])

    def _note(self, names: Sequence[str]) -> None:
        """Take in the requests since the last time; those that ask have `names`, or their stream's."""
        given = iter(names)
        for tensor, size, stream in self.events[self.seen :]:
            self.seen += 1
            if size:
                self.open[tensor] = (next(given, _STREAMS.get(stream, stream)), self.where, size, self.seen, self.now[0])
            elif tensor in self.open:
                self._close(tensor, self.seen, self.now[1])

    def _close(self, tensor: int, order: int, end_s: float) -> None:
        name, (stage, block), size, asked, start_s = self.open.pop(tensor)
        self.found.append(Tensor(name, stage, block, size, asked, order, start_s, end_s))

    def close(self, end_s: float) -> list[Tensor]:
        """All tensors in the order of asking; what is still there lives to the end."""
        self._note([])
        for tensor in list(self.open):
            self._close(tensor, self.seen + 1, end_s)
        return sorted(self.found, key=lambda tensor: tensor.asked)


def tensors_of(layout: Layout, timed: Sequence[TimedPass], end_s: float) -> list[Tensor]:
    """Tensors that come and go on a rank that runs these passes, from the first to those that are alive at its peak and what is
    asked for meanwhile; weights and optimizer states, which stay, are not among them."""
    split = frozenset(stage for (phase, stage, _, _), _, _ in timed if phase == "W")
    trace = _Named(layout, split)
    sharded = Sharded(trace)
    shortened = until_steady([one for one, _, _ in timed])
    waited: set[int] | None = None
    for position, (one, start, end) in enumerate(timed):
        if position >= len(shortened):
            waited = set(trace.open) if waited is None else waited & trace.open.keys()
            if not waited:
                break
        trace.now = (start, end)
        run_passes(trace, sharded, [one])
    return trace.close(end_s)


def alive_at_peak(tensors: Sequence[Tensor]) -> list[Alive]:
    """Tensors alive when the most bytes are, by name, the largest first."""
    changes = sorted([(t.asked, t.size) for t in tensors] + [(t.freed, -t.size) for t in tensors])
    total = most = at = 0
    for order, change in changes:
        total += change
        if total > most:
            most, at = total, order
    named: dict[str, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.asked <= at < tensor.freed:
            named.setdefault(tensor.name, []).append(tensor)

    def summed(name: str, mine: Sequence[Tensor]) -> Alive:
        return Alive(name, len(mine), sum(t.size for t in mine), sum(t.end_s - t.start_s for t in mine) / len(mine))

    return sorted((summed(name, mine) for name, mine in named.items()), key=lambda alive: -alive.size)
