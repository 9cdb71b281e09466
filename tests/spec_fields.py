"""Every field of a spec, found in the pydantic models themselves, and other values that each may have."""

from __future__ import annotations

import copy
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class SpecField:
    """One field: where it stands, and the types it may have (None among them as a type)."""

    path: Path
    kinds: tuple[Any, ...]
    owner: str

    @property
    def name(self) -> str:
        """Dotted, lists with [0]."""
        return "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in self.path).lstrip(".")


def _kinds(annotation: Any) -> Iterator[Any]:
    """The alternatives of an annotation, without `Annotated`."""
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (Union, types.UnionType):
        for part in get_args(annotation):
            yield from _kinds(part)
    else:
        yield annotation


def _item(kind: Any) -> type[BaseModel] | None:
    """The spec of the items of a list of specs."""
    inner = next((k for a in get_args(kind) for k in _kinds(a)), None) if get_origin(kind) in (tuple, list) else None
    return inner if isinstance(inner, type) and issubclass(inner, BaseModel) else None


def fields_of(spec: type[BaseModel], path: Path = ()) -> Iterator[SpecField]:
    """Every leaf under `spec`; optional tables and the first item of lists of tables included."""
    for name, info in spec.model_fields.items():
        leaf: list[Any] = []
        for kind in _kinds(_annotation(info)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from fields_of(kind, (*path, name))
            elif (item := _item(kind)) is not None:
                yield from fields_of(item, (*path, name, 0))
            else:
                leaf.append(kind)
        if any(kind is not type(None) for kind in leaf):
            yield SpecField((*path, name), tuple(leaf), spec.__name__)


def _annotation(info: FieldInfo) -> Any:
    return info.annotation


def value_at(table: Any, path: Path) -> Any:
    """The value at `path` of a dumped spec.

    Raises:
        LookupError: there is none, or a table on the way is something else.
    """
    for part in path:
        if isinstance(part, int) and not isinstance(table, list | tuple):
            raise LookupError(path)
        if isinstance(part, str) and not isinstance(table, Mapping):
            raise LookupError(path)
        table = table[part]
    return table


def changed(table: Mapping[str, Any], path: Path, value: Any) -> dict[str, Any]:
    """`table` with another value at `path`; tables on the way are made."""
    found: dict[str, Any] = copy.deepcopy(dict(table))
    inner: Any = found
    for part, following in pairwise(path):
        if isinstance(part, str) and part not in inner:
            inner[part] = [{}] if isinstance(following, int) else {}
        inner = inner[part]
    if value is None and not isinstance(path[-1], int):
        inner.pop(path[-1], None)
    else:
        inner[path[-1]] = value
    return found


def other_values(field: SpecField, current: Any) -> list[Any]:
    """Values that the field may have besides `current`; every word of a choice, numbers around it."""
    found: list[Any] = []
    for kind in field.kinds:
        if kind is bool:
            found += [True, False]
        elif get_origin(kind) is Literal:
            found += list(get_args(kind))
        elif kind is int:
            base = current if isinstance(current, int) and not isinstance(current, bool) else 2
            found += [base * 2, max(base // 2, 1), base + 1, 1]
        elif kind is float:
            base = current if isinstance(current, float | int) and not isinstance(current, bool) else 1.0
            found += [base * 2.0 or 0.5, base * 0.5 or 0.25]
    return [v for i, v in enumerate(found) if v != current and v not in found[:i]]


def words(field: SpecField) -> frozenset[Any]:
    """Values that are a choice of their own (words, yes and no), each of which must count."""
    return frozenset(
        v for k in field.kinds for v in (get_args(k) if get_origin(k) is Literal else (True, False) if k is bool else ())
    )


__all__ = ["SpecField", "changed", "fields_of", "other_values", "value_at", "words"]
