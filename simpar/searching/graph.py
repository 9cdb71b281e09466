"""A step as plain lists: what the longest path needs of a program, and in which order it goes through its ops."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import cached_property


@dataclass
class Graph:
    """Ops with what they wait for.

    Attributes:
        preds: of each op, dependencies and the op before it on each of its streams.
        price: index into `price_keys` of each op.
        compute: role whose compute stream it holds, -1 for none.
        beside: role whose compute it may slow, -1 for none.
        stream: what it runs on beside compute, -1 for nothing.
        role: whose it is.
        price_keys: as in a Program.
    """

    preds: list[list[int]] = field(default_factory=list)
    price: list[int] = field(default_factory=list)
    compute: list[int] = field(default_factory=list)
    beside: list[int] = field(default_factory=list)
    stream: list[int] = field(default_factory=list)
    role: list[int] = field(default_factory=list)
    price_keys: tuple[object, ...] = ()

    @cached_property
    def order(self) -> list[int]:
        """A topological order in which communication comes before the compute ops that it may slow."""
        waiting = [len(p) for p in self.preds]
        successors: list[list[int]] = [[] for _ in self.preds]
        for op, preds in enumerate(self.preds):
            for pred in preds:
                successors[pred].append(op)
        compute = self.compute
        talk: deque[int] = deque()
        work: deque[int] = deque()
        for op, count in enumerate(waiting):
            if not count:
                (work if compute[op] >= 0 else talk).append(op)
        found = []
        while talk or work:
            op = talk.popleft() if talk else work.popleft()
            found.append(op)
            for successor in successors[op]:
                waiting[successor] -= 1
                if not waiting[successor]:
                    (work if compute[successor] >= 0 else talk).append(successor)
        return found

    @cached_property
    def sinks(self) -> list[int]:
        """Ops that nothing waits for."""
        waited = {pred for preds in self.preds for pred in preds}
        return [op for op in range(len(self.preds)) if op not in waited]


__all__ = ["Graph"]
