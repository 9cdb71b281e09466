"""Passes that are put again for other micro-batches: what the ops of one were, with the numbers taken out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from simpar.program.builder import Member, ProgramBuilder, split_key


@dataclass(frozen=True, slots=True)
class _Op:
    """One op: what it is known as, what it waits for, its row around the micro-batch, which of the numbers that is, the ops of its
    streams."""

    keys: tuple[Member, ...]
    waits: tuple[Member, ...]
    before: tuple[int, ...]
    which: int
    after: tuple[int, ...]
    streams: tuple[list[int], ...]


class Stamp:
    """The ops from `begin` on, all of one micro-batch, or of two that differ."""

    def __init__(self, builder: ProgramBuilder, begin: int, numbers: tuple[int, ...]) -> None:
        self._builder = builder

        def members(keys: Iterable[object]) -> tuple[Member, ...]:
            found = []
            for key in keys:
                split = split_key(key)
                assert split is not None
                before, number, after = split
                found.append((builder.family(before, after), numbers.index(number)))
            return tuple(found)

        self._ops = tuple(
            _Op(members(op.keys), members(op.deps), op.row[:2], numbers.index(op.row[2]), op.row[3:],
                tuple(map(builder.on, op.streams)))
            for op in builder.latest(begin)
        )  # fmt: skip

    def put(self, numbers: tuple[int, ...]) -> None:
        """The same ops of other micro-batches."""
        repeat = self._builder.repeat
        for op in self._ops:
            index = repeat((*op.before, numbers[op.which], *op.after), op.keys, op.waits, numbers)  # type: ignore[arg-type]
            for ops in op.streams:
                ops.append(index)


__all__ = ["Stamp"]
