"""Passes that are put again for another micro-batch: what the ops of one were, with its number taken out."""

from __future__ import annotations

from dataclasses import dataclass

from simpar.program.program import ProgramBuilder

Key = tuple[object, ...]
Parts = tuple[Key, Key]
"""A key before and after the number of its micro-batch."""


def parts_of(key: object) -> Parts:
    """Where the number stands: behind what a send goes to, else behind the stage."""
    assert isinstance(key, tuple)
    at = 4 if key[1] == "send" else 3
    return key[:at], key[at + 1 :]


@dataclass(frozen=True, slots=True)
class _Op:
    """One op: its key, what it waits for, its row but the micro-batch, the ops of its streams."""

    key: Parts
    waits: tuple[Parts, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]
    streams: tuple[list[int], ...]


class Stamp:
    """The ops from `begin` on, all of one micro-batch."""

    def __init__(self, builder: ProgramBuilder, begin: int) -> None:
        self._builder = builder
        self._ops = tuple(
            _Op(parts_of(op.key), tuple(map(parts_of, op.deps)), op.row[:2], op.row[3:], tuple(map(builder.on, op.streams)))
            for op in builder.latest(begin)
        )

    def put(self, microbatch: int) -> None:
        """The same ops of another micro-batch."""
        append, number = self._builder.append, (microbatch,)
        for op in self._ops:
            waits = tuple([before + number + after for before, after in op.waits])
            index = append(op.key[0] + number + op.key[1], (*op.before, microbatch, *op.after), waits)  # type: ignore[arg-type]
            for ops in op.streams:
                ops.append(index)


__all__ = ["Stamp"]
