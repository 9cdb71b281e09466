"""What-if changes of a raw plan table: one field by its path, ranges of values, scaled values."""

from __future__ import annotations

import copy
import math
import re
from typing import Any

from simpar.boundary import toml_value
from simpar.errors import InputError

_RANGE = re.compile(r"^\s*(?P<first>[\d.eE+-]*\d)\s*\.\.\s*(?P<last>\d[\d.eE]*)\s*(?:(?P<kind>[x+])\s*(?P<step>[\d.]+))?\s*$")
_MOST_POINTS = 200


def with_value(table: dict[str, Any], path: str, value: object) -> dict[str, Any]:
    """A copy of `table` with the field at `path` ("cluster.num_nodes", "phases.0.tokens") set to `value`.

    Raises:
        InputError: the path leads through something that is not a table or list.
    """
    changed = copy.deepcopy(table)
    *parents, last = path.strip().split(".")
    current: Any = changed
    for parent in parents:
        current = _child(current, parent, path)
    if isinstance(current, list):
        current[_index(current, last, path)] = value
    elif isinstance(current, dict):
        current[last] = value
    else:
        raise InputError(f"{path}: {parents[-1]} is not a table")
    return changed


def assigned(table: dict[str, Any], assignment: str) -> dict[str, Any]:
    """A copy of `table` with one --set applied: "cluster.spares=8", "phases.0.tokens=2T" (TOML values; bare words are strings).

    Raises:
        InputError: not of that form, or the path leads nowhere.
    """
    path, equals, text = assignment.partition("=")
    if not equals or not path.strip() or not text.strip():
        raise InputError(f"--set {assignment}: write it as field=value, such as cluster.num_nodes=256 or phases.0.tokens=2T")
    try:
        return with_value(table, path, toml_value(text))
    except InputError as error:
        raise InputError(f"--set {assignment}: {error}") from None


def _child(current: Any, name: str, path: str) -> Any:
    if isinstance(current, list):
        return current[_index(current, name, path)]
    if not isinstance(current, dict):
        raise InputError(f"{path}: nothing lies below {name}")
    return current.setdefault(name, {})


def _index(items: list[Any], name: str, path: str) -> int:
    if not name.isdigit() or int(name) >= len(items):
        raise InputError(f"{path}: {name} is not an index; there are {len(items)} entries, counted from 0")
    return int(name)


def parse_sweep(text: str) -> tuple[str, list[object]]:
    """Field and values of a sweep: "f=128..2048x2" doubles, "f=0..10+2" adds, "f=1,2,4,7" lists.

    >>> parse_sweep("cluster.num_nodes=128..512x2")
    ('cluster.num_nodes', [128, 256, 512])

    Raises:
        InputError: not of that form.
    """
    field, equals, values = text.partition("=")
    if not equals or not field.strip() or not values.strip():
        raise InputError(f"--sweep {text}: write it as field=128..2048x2, field=0..10+2 or field=1,2,4,7")
    match = _RANGE.match(values)
    if match:
        return field.strip(), _range(text, match)
    return field.strip(), [toml_value(part.strip()) for part in values.split(",") if part.strip()]


def _range(text: str, match: re.Match[str]) -> list[object]:
    try:
        first, last, step = (float(match[name] or 1.0) for name in ("first", "last", "step"))
    except ValueError:
        raise InputError(f"--sweep {text}: not a range of numbers; write it as 128..2048x2 or 0..10+2") from None
    multiply = match["kind"] == "x"
    if last < first or (multiply and (step <= 1 or first <= 0)) or (not multiply and step <= 0):
        raise InputError(f"--sweep {text}: an empty or endless range; it runs upwards, by +step or by a factor above 1")
    values: list[object] = []
    current = first
    while current <= last * (1 + 1e-12):
        if len(values) == _MOST_POINTS:
            raise InputError(f"--sweep {text}: more than {_MOST_POINTS} points")
        values.append(int(current) if current == math.floor(current) else current)
        current = current * step if multiply else current + step
    return values


def scaled_field(plan: Any, table: dict[str, Any], path: str, factor: float) -> dict[str, Any] | None:
    """`table` with the number at `path` multiplied, as the checked `plan` knows it; None where it is not set or zero.

    Quantities are written with their SI unit again.
    """
    current: Any = plan
    for part in path.split("."):
        current = current[int(part)] if isinstance(current, tuple) else getattr(current, part, None)
        if current is None:
            return None
    if isinstance(current, bool) or not isinstance(current, int | float) or current == 0:
        return None
    value = round(current * factor) if isinstance(current, int) else current * factor
    unit = unit_of(plan, path)
    return with_value(table, path, f"{value!r} {unit}" if unit else value)


def unit_of(plan: Any, path: str) -> str:
    """The SI unit that the field at `path` is written with, "" for plain numbers."""
    *parents, last = path.split(".")
    current: Any = plan
    for part in parents:
        current = current[int(part)] if isinstance(current, tuple) else getattr(current, part)
    written = current.model_dump(mode="json", include={last}).get(last)
    if isinstance(written, str):
        return written.rpartition(" ")[2]
    return "s" if last == "interval" and isinstance(written, float | int) else ""
