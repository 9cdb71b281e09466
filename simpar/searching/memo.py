"""Methods that work a thing out once and keep it with their object."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

S = TypeVar("S")
P = ParamSpec("P")
T = TypeVar("T")


def kept(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """`method`, asked once for each list of arguments (hashable); as `cached_property` for methods that take some."""
    name = f"{method.__name__} kept"

    @wraps(method)
    def once(self: S, /, *given: P.args, **named: P.kwargs) -> T:
        key = (given, *named.items()) if named else given
        try:
            return self.__dict__[name][key]  # type: ignore[no-any-return]
        except KeyError:
            found = method(self, *given, **named)
            self.__dict__.setdefault(name, {})[key] = found
            return found

    return once


__all__ = ["kept"]
