"""Collects the ops of a program under symbolic keys."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Final, NamedTuple

import numpy as np

from simpar.errors import InternalError
from simpar.program.program import OpKind, Program, Stream, Transfer

Row = tuple[int, int, int, int, int, int]
"""An op: kind, stage, micro-batch, layer, role, price."""


class Place(NamedTuple):
    """Which part of the model an op is of, for which micro-batch; -1 = none."""

    stage: int = -1
    microbatch: int = -1
    layer: int = -1


class Put(NamedTuple):
    """An op as it was put: its keys, row, what it waits for, its streams."""

    keys: list[object]
    row: Row
    deps: Sequence[object]
    streams: list[Stream]


class Family(dict[int, int]):
    """Ops whose keys differ by one number, of a micro-batch: number -> op."""

    def __init__(self, index: dict[object, int], before: tuple[object, ...], after: tuple[object, ...]) -> None:
        super().__init__()
        self._index, self._before, self._after = index, before, after

    def __missing__(self, number: int) -> int:
        """One that was put by its key."""
        return self._index[*self._before, number, *self._after]


NOWHERE: Final = Place()
Member = tuple[Family, int]
"""A family and which of the numbers of what is put tells its op."""


def split_key(key: object) -> tuple[tuple[object, ...], int, tuple[object, ...]] | None:
    """A key of a pass or its send as what stands before and after the number of its micro-batch, which is behind what a send goes
    to, else behind the stage; None of a key without one."""
    if not isinstance(key, tuple):
        return None
    at = 4 if key[1:2] == ("send",) else 3
    return (key[:at], key[at], key[at + 1 :]) if len(key) > at and isinstance(key[at], int) else None


class ProgramBuilder:
    """Collects ops under symbolic keys; dependencies may name ops that come later."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._index: dict[object, int] = {}
        self._rows: list[Row] = []
        self._deps: list[Sequence[object]] = []
        self._families: dict[object, Family] = {}
        self._again: list[tuple[int, tuple[Member, ...], tuple[int, ...]]] = []
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
        index = len(self._rows)
        if self._index.setdefault(key, index) != index:
            raise InternalError(f"op {key!r} is added twice to {self.name}")
        self._rows.append(row)
        self._deps.append(deps)
        return index

    def family(self, before: tuple[object, ...], after: tuple[object, ...]) -> Family:
        """The ops whose keys are a number between these two parts."""
        key = (before, after)
        found = self._families.get(key)
        if found is None:
            found = self._families[key] = Family(self._index, before, after)
        return found

    def repeat(self, row: Row, keys: tuple[Member, ...], waits: tuple[Member, ...], numbers: tuple[int, ...]) -> int:
        """Append an op, on no stream yet, known and waiting by families and the numbers in them; returns its index."""
        index = len(self._rows)
        for family, which in keys:
            if family.setdefault(numbers[which], index) != index:
                raise InternalError(f"op {numbers[which]} of its kind is added twice to {self.name}")
        self._rows.append(row)
        self._deps.append(())
        self._again.append((index, waits, numbers))
        return index

    def on(self, stream: Stream) -> list[int]:
        """The ops of a stream, to which more may be appended."""
        return self._streams.setdefault(stream, [])

    @property
    def num_ops(self) -> int:
        """Ops so far."""
        return len(self._rows)

    def latest(self, begin: int) -> list[Put]:
        """Ops from `begin` on."""
        found: dict[int, list[object]] = {}
        for key, index in takewhile(lambda item: item[1] >= begin, reversed(self._index.items())):
            found.setdefault(index, []).append(key)
        on = {index: [s for s, ops in self._streams.items() if index in ops[begin - self.num_ops :]] for index in found}
        return [Put(found[i], self._rows[i], self._deps[i], on[i]) for i in sorted(found)]

    def __contains__(self, key: object) -> bool:
        return self._found(key) is not None

    def __getitem__(self, key: object) -> int:
        found = self._found(key)
        if found is None:
            raise KeyError(key)
        return found

    def _found(self, key: object) -> int | None:
        found = self._index.get(key)
        if found is None and (split := split_key(key)) is not None:
            before, number, after = split
            family = self._families.get((before, after))
            found = None if family is None else family.get(number)
        return found

    def build(self, rank_count: tuple[int, ...] = ()) -> Program:
        """The finished program (not yet checked for deadlock)."""
        try:
            deps = [[self[key] for key in keys] if keys else [] for keys in self._deps]
            for op, waits, numbers in self._again:
                deps[op] = [family[numbers[which]] for family, which in waits]
        except KeyError as error:
            raise InternalError(f"{self.name}: an op depends on {error.args[0]!r}, which does not exist") from None
        rows = np.array(self._rows, dtype=np.int64).reshape(-1, 6)
        streams = tuple(self._streams)
        lists = [self._streams[s] for s in streams]
        return Program(
            name=self.name,
            streams=streams,
            stream_ptr=np.concatenate([[0], np.cumsum([len(x) for x in lists])]).astype(np.int64),
            stream_ops=np.array([op for ops in lists for op in ops], dtype=np.int64),
            kind=rows[:, 0],
            stage=rows[:, 1],
            microbatch=rows[:, 2],
            layer=rows[:, 3],
            role=rows[:, 4],
            price=rows[:, 5],
            price_keys=tuple(self._prices),
            dep_ptr=np.concatenate([[0], np.cumsum([len(d) for d in deps])]).astype(np.int64),
            dep_ops=np.array([d for ds in deps for d in ds], dtype=np.int64),
            transfers=self.transfers,
            rank_count=rank_count,
            labels=self.labels,
            pairs=self.pairs,
            begins=np.array(self.begins, dtype=np.int64),
        )
