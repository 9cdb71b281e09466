"""Collects the ops of a program under symbolic keys."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from typing import Final, NamedTuple

import numpy as np

from simpar.errors import InternalError
from simpar.program.program import IntArray, OpKind, Program, Stream, Transfer, pointers

Row = tuple[int, int, int, int, int, int]
"""An op: kind, stage, micro-batch, layer, role, price."""


class Place(NamedTuple):
    """Which part of the model an op is of, for which micro-batch; -1 = none."""

    stage: int = -1
    microbatch: int = -1
    layer: int = -1


class Name(NamedTuple):
    """Keys that differ by one number, of a micro-batch: what stands before it and after it."""

    before: tuple[object, ...]
    after: tuple[object, ...]


NOWHERE: Final = Place()
Member = tuple[Name, int]
"""Keys of one name, and which of the numbers of what is put tells the op."""


class Again(NamedTuple):
    """An op that is put again for other micro-batches: what it is known as and waits for, its row around the micro-batch, which of
    the numbers that is, its streams."""

    keys: tuple[Member, ...]
    waits: tuple[Member, ...]
    before: tuple[int, ...]
    which: int
    after: tuple[int, ...]
    streams: tuple[Stream, ...]


class Stamp:
    """The ops from `begin` on, all of one micro-batch, or of two that differ: they are put again for others, numbers alone."""

    def __init__(self, builder: ProgramBuilder, begin: int, numbers: tuple[int, ...]) -> None:
        self._builder = builder
        self.begins: list[int] = []
        self.numbers: list[tuple[int, ...]] = []

        def members(keys: Iterable[object]) -> tuple[Member, ...]:
            splits = [split for key in keys if (split := split_key(key))]
            return tuple((name, numbers.index(number)) for name, number in splits)

        self.ops = tuple(
            Again(members(keys), members(deps), row[:2], numbers.index(row[2]), row[3:], streams)
            for keys, row, deps, streams in builder.latest(begin)
        )
        builder.stamps.append(self)

    def put(self, numbers: tuple[int, ...]) -> None:
        """The same ops of other micro-batches."""
        self.begins.append(self._builder.num_ops)
        self.numbers.append(numbers)
        self._builder.num_ops += len(self.ops)

    def expanded(self) -> Iterator[tuple[Again, IntArray, IntArray]]:
        """Every op with the places at which it was put again, int array [times], and the numbers there, [numbers, times]."""
        begins, numbers = np.array(self.begins, dtype=np.int64), np.array(self.numbers, dtype=np.int64).T
        return ((op, begins + offset, numbers) for offset, op in enumerate(self.ops if self.begins else ()))


def split_key(key: object) -> tuple[Name, int] | None:
    """A key of a pass or its send as its name and the number of its micro-batch, which is behind what a send goes to, else behind
    the stage; None of a key without one."""
    if not isinstance(key, tuple):
        return None
    at = 4 if key[1:2] == ("send",) else 3
    return (Name(key[:at], key[at + 1 :]), key[at]) if len(key) > at and isinstance(key[at], int) else None


class ProgramBuilder:
    """Collects ops under symbolic keys; dependencies may name ops that come later."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._index: dict[object, int] = {}
        self._rows: list[Row] = []
        self._deps: list[Sequence[object]] = []
        self._at: list[int] = []
        self.num_ops = 0
        self.stamps: list[Stamp] = []
        self._streams: dict[Stream, list[int]] = {}
        self._prices: dict[object, int] = {}
        self.transfers: dict[int, Transfer] = {}
        self.labels: dict[int, str] = {}
        self.pairs: dict[int, tuple[int, int]] = {}
        self.begins: list[int] = []

    def alias(self, key: object, target: object) -> None:
        """`key` is another name of the op under `target`."""
        self._index[key] = self._index[target]

    def add(
        self,
        key: object,
        *,
        kind: OpKind,
        role: int,
        streams: Iterable[Stream],
        price: object,
        deps: Sequence[object] = (),
        place: Place = NOWHERE,
    ) -> int:
        """Append an op to the end of each of its streams; returns its index."""
        row = (int(kind), *place, role, self._prices.setdefault(price, len(self._prices)))
        index = self.append(key, row, deps)
        for stream in streams:
            self.on(stream).append(index)
        return index

    def append(self, key: object, row: Row, deps: Sequence[object]) -> int:
        """An op that is on no stream yet; returns its index."""
        index = self.num_ops
        if self._index.setdefault(key, index) != index:
            raise InternalError(f"op {key!r} is added twice to {self.name}")
        self.num_ops += 1
        self._at.append(index)
        self._rows.append(row)
        self._deps.append(deps)
        return index

    def on(self, stream: Stream) -> list[int]:
        """The ops of a stream, to which more may be appended."""
        return self._streams.setdefault(stream, [])

    def latest(self, begin: int) -> Iterator[tuple[list[object], Row, Sequence[object], tuple[Stream, ...]]]:
        """Keys, row, dependencies and streams of the ops from `begin` on, none of which was put again."""
        found: dict[int, list[object]] = {}
        for key, index in takewhile(lambda item: item[1] >= begin, reversed(self._index.items())):
            found.setdefault(index, []).append(key)
        for index in sorted(found):
            at = index - self.num_ops
            on = tuple(s for s, ops in self._streams.items() if index in ops[begin - self.num_ops :])
            yield found[index], self._rows[at], self._deps[at], on

    def __contains__(self, key: object) -> bool:
        return key in self._index

    def __getitem__(self, key: object) -> int:
        return self._index[key]

    def build(self, rank_count: tuple[int, ...] = ()) -> Program:
        """The finished program (not yet checked for deadlock)."""
        named, at = self._named(), np.array(self._at, dtype=np.int64)

        def op_of(key: object) -> int:
            if (index := self._index.get(key)) is None:
                name, number = split_key(key) or (None, -1)
                index = int(named[name][number]) if name in named and number < len(named[name]) else -1
            if index < 0:
                raise InternalError(f"{self.name}: an op depends on {key!r}, which does not exist")
            return index

        rows = np.empty((self.num_ops, 6), dtype=np.int64)
        rows[at] = np.array(self._rows, dtype=np.int64).reshape(-1, 6)
        heads = [np.repeat(at, [len(keys) for keys in self._deps])]
        waits = [np.array([op_of(key) for keys in self._deps for key in keys], dtype=np.int64)]
        on = {stream: [np.array(ops, dtype=np.int64)] for stream, ops in self._streams.items()}
        for op, places, numbers in (each for stamp in self.stamps for each in stamp.expanded()):
            rows[places] = (*op.before, 0, *op.after)
            rows[places, 2] = numbers[op.which]
            heads += [places] * len(op.waits)
            waits += [named[name][numbers[which]] for name, which in op.waits]
            for stream in op.streams:
                on[stream].append(places)
        head, wait, lists = np.concatenate(heads), np.concatenate(waits), [np.sort(np.concatenate(each)) for each in on.values()]
        if (wait < 0).any():
            raise InternalError(f"{self.name}: an op that is put again depends on one that does not exist")
        return Program(
            name=self.name,
            streams=tuple(on),
            stream_ptr=pointers([len(ops) for ops in lists]),
            stream_ops=np.concatenate(lists) if lists else at[:0],
            kind=rows[:, 0],
            stage=rows[:, 1],
            microbatch=rows[:, 2],
            layer=rows[:, 3],
            role=rows[:, 4],
            price=rows[:, 5],
            price_keys=tuple(self._prices),
            dep_ptr=pointers(np.bincount(head, minlength=self.num_ops)),
            dep_ops=wait[np.argsort(head, kind="stable")],
            transfers=self.transfers,
            rank_count=rank_count,
            labels=self.labels,
            pairs=self.pairs,
            begins=np.array(self.begins, dtype=np.int64),
        )

    def _named(self) -> dict[Name | None, IntArray]:
        """Of the names of what was put again, and of what that waits for, the op of each number; -1 where there is none."""
        found: dict[Name, list[tuple[IntArray, IntArray]]] = {}
        for op, places, numbers in (each for stamp in self.stamps for each in stamp.expanded()):
            for name, which in op.keys:
                found.setdefault(name, []).append((places, numbers[which]))
            for name, _ in op.waits:
                found.setdefault(name, [])
        single = ((split, index) for key, index in self._index.items() if found and (split := split_key(key)))
        for (name, number), index in single:
            if name in found:
                found[name].append((np.array([index]), np.array([number])))
        most = 1 + max((int(numbers.max()) for each in found.values() for _, numbers in each), default=-1)
        named: dict[Name | None, IntArray] = {}
        for name, each in found.items():
            named[name] = np.full(most, -1, dtype=np.int64)
            for places, numbers in each:
                if (named[name][numbers] >= 0).any():
                    raise InternalError(f"an op of {name!r} is added twice to {self.name}")
                named[name][numbers] = places
        return named
