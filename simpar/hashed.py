"""Long values that memos ask for all the time: hashed once each."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import fields
from functools import cache, cached_property
from operator import attrgetter
from typing import Any, TypeVar, cast

T = TypeVar("T")


class HashedOnce(tuple[T, ...]):
    """A tuple that keeps its hash; equal to any other of the same items."""

    @cached_property
    def _hash(self) -> int:
        return super().__hash__()

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[type[HashedOnce[T]], tuple[tuple[T, ...]]]:
        # Without the hash: texts have other ones in another process.
        return type(self), (tuple(self),)


def field_hash(value: object) -> int:
    """Hash of a dataclass by what it is compared by, for a `__hash__` that keeps it."""
    return hash(_compared(cast(Hashable, type(value)))(value))


@cache
def _compared(kind: Any) -> attrgetter[tuple[Any, ...]]:
    return attrgetter(*(field.name for field in fields(kind) if field.compare))


__all__ = ["HashedOnce", "field_hash"]
