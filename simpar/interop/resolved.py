"""What the readers of resolved configurations share: values by path, and which of them were read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from simpar.errors import InputError, Violation
from simpar.specs.models_io import load_model, model_names, preset_called


def nested(table: Mapping[str, Any], path: str, default: Any = None) -> Any:
    """The value at "a.b.c"; `default` where a part is missing or null."""
    value: Any = table
    for part in path.split("."):
        if not isinstance(value, Mapping) or value.get(part) is None:
            return default
        value = value[part]
    return value


def inner(table: dict[str, Any], *names: str) -> dict[str, Any]:
    """The table of a table at `names`, empty where there is none."""
    for name in names:
        table = found if isinstance(found := table.get(name), dict) else {}
    return table


def whole(value: Any, path: str, file: str) -> int:
    """A whole number.

    Raises:
        InputError: another kind of value.
    """
    if isinstance(value, str) and re.fullmatch(r"[\d_]+", value):
        value = int(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise InputError([Violation(path, value, "is no whole number", "one", file)])
    return value


def unresolved(table: Any, path: str = "") -> Iterator[str]:
    """Paths of values that still ask for others: ${...}, auto."""
    if isinstance(table, Mapping):
        for name, value in table.items():
            yield from unresolved(value, f"{path}.{name}" if path else str(name))
    elif isinstance(table, list):
        for index, value in enumerate(table):
            yield from unresolved(value, f"{path}[{index}]")
    elif isinstance(table, str) and "${" in table:
        yield path


def model_named(text: str, path: str, file: str) -> Any:
    """The model that a configuration names: a shipped one, or the folder or file of a config.json beside it.

    Raises:
        InputError: neither.
    """
    from pathlib import Path

    for place in (Path(text), Path(file).parent / text if file else Path(text)):
        config = place / "config.json" if place.is_dir() else place
        if config.is_file() and config.suffix == ".json":
            return load_model(str(config)).model_dump()
    if (name := preset_called(text)) is not None:
        return name
    right = f"a folder with its config.json, or a shipped model such as {', '.join(list(model_names())[:4])}"
    raise InputError([Violation(path, text, "is no model known here", right, file)])
