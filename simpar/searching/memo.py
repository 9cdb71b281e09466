"""Methods that work a thing out once and keep it with their object."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

S = TypeVar("S")
P = ParamSpec("P")
T = TypeVar("T")


def kept(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """`method`, asked once for each list of arguments (by position, hashable); as `cached_property` for methods that take some."""
    name = f"{method.__name__} kept"

    @wraps(method)
    def once(self: S, /, *given: P.args, **named: P.kwargs) -> T:
        known: dict[Any, T] | None = self.__dict__.get(name)
        if known is None:
            known = self.__dict__[name] = {}
        if given not in known:
            known[given] = method(self, *given, **named)
        return known[given]

    return once


__all__ = ["kept"]
