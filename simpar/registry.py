"""Name -> part: the one way simpar looks things up, so that an unknown name always gets the same helpful answer."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import Generic, TypeVar

from simpar.errors import UnknownNameError

T = TypeVar("T")


SHOWN = 30
"""Known names that an error lists at most; of more, the nearest, and the command that lists all."""


def closest(name: str, known: Iterable[str]) -> str:
    """The known name that `name` was probably meant to be; "" where none is near."""
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=0.5)), "")


def unknown(kind: str, name: str, known: list[str], listing: str = "") -> UnknownNameError:
    """The error for a `name` that is not among the `known` parts of this `kind`, which the command `listing` lists."""
    hint = f"; did you mean {close!r}?" if (close := closest(name, known)) else "."
    if len(known) <= SHOWN or not listing:
        return UnknownNameError(f"unknown {kind} {name!r}{hint} Known: {', '.join(sorted(known))}")
    near = difflib.get_close_matches(name.rpartition("/")[2].lower(), known, n=6, cutoff=0.3)
    others = f" Near it: {', '.join(near)};" if near else ""
    return UnknownNameError(f"unknown {kind} {name!r}{hint}{others} `{listing}` lists all {len(known)}")


class Registry(Mapping[str, T], Generic[T]):
    """An explicit table of named parts; `add` is the only way in."""

    def __init__(self, kind: str, parts: Mapping[str, T]) -> None:
        self.kind = kind
        self._parts = dict(parts)

    def __getitem__(self, name: str) -> T:
        try:
            return self._parts[name]
        except KeyError:
            raise unknown(self.kind, name, list(self._parts)) from None

    def add(self, name: str, part: T) -> None:
        """Take in a part from outside; a name that is taken stays what it is.

        Raises:
            ValueError: `name` is taken.
        """
        if name in self._parts:
            raise ValueError(f"there is a {self.kind} {name!r} already")
        self._parts[name] = part

    def __contains__(self, name: object) -> bool:
        return name in self._parts

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)
