"""Values that are hashed once."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field, replace

from simpar.graph.kernel_types import KernelPlan
from simpar.hashed import HashedOnce, field_hash
from simpar.parallel.degrees import Degrees
from simpar.parallel.split_options import SplitOptions

hashed = 0


class Counted(int):
    def __hash__(self) -> int:
        global hashed
        hashed += 1
        return super().__hash__()


def test_a_long_tuple_is_hashed_once() -> None:
    items = tuple(map(Counted, range(5)))
    long, before = HashedOnce(items), hashed
    assert {long: 1}[long] == 1
    assert hashed - before == 5
    assert {long: 1}[HashedOnce(items)] == {long: 1}[items] == 1  # type: ignore[index]
    assert hash(long) == hash(items)


def test_its_hash_stays_in_its_process() -> None:
    """Texts have other hashes in another one."""
    long = HashedOnce(("a", "b"))
    hash(long)
    again = pickle.loads(pickle.dumps(long))
    assert type(again) is HashedOnce
    assert again == long
    assert not vars(again)


def test_a_dataclass_is_hashed_by_what_it_is_compared_by() -> None:
    @dataclass(frozen=True)
    class Pair:
        a: int
        b: int
        c: int = field(default=0, compare=False)

    assert field_hash(Pair(1, 2, 3)) == field_hash(Pair(1, 2)) == hash(Pair(1, 2))
    assert field_hash(Pair(2, 1)) != field_hash(Pair(1, 2))


def test_equal_options_are_one_object() -> None:
    one = SplitOptions(Degrees(), KernelPlan())
    other = replace(one, lora_rank=8)
    assert one.interned is replace(other, lora_rank=0).interned
    assert other.interned is not one.interned
