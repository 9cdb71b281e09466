"""Tables as TOML text, which the standard library only reads; in it alone, as live/ runs where nothing else is installed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any


def toml(
    table: Mapping[str, Any],
    inline: Callable[[int, Mapping[str, Any]], bool] = lambda depth, value: False,
    number: Callable[[float], str] = repr,
) -> str:
    """A table of strings, numbers, booleans, lists and tables as TOML; None is left out.

    Args:
        inline: whether a table (or every table of a list), so many names deep, stays on its line instead of getting a header.
        number: a float as text.
    """
    lines: list[str] = []

    def write(table: Mapping[str, Any], path: tuple[str, ...]) -> None:
        below: list[tuple[str, list[Mapping[str, Any]], str]] = []
        for key, value in table.items():
            listed = isinstance(value, list | tuple)
            tables = list(value) if listed else [value]
            if tables and all(isinstance(v, Mapping) and (v or listed) and not inline(len(path) + 1, v) for v in tables):
                below.append((_key(key), tables, "[[{}]]" if listed else "[{}]"))
            elif value is not None:
                lines.append(f"{_key(key)} = {toml_value(value, number)}")
        for name, tables, header in below:
            for each in tables:
                lines.extend(("", header.format(".".join((*path, name)))))
                write(each, (*path, name))

    write(table, ())
    return "\n".join(lines).strip() + "\n"


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else toml_value(name)


def toml_value(value: Any, number: Callable[[float], str] = repr) -> str:
    """A value as TOML, on one line, floats as `number` writes them."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return number(value) if isinstance(value, float) else repr(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml_value(v, number) for v in value) + "]"
    if isinstance(value, Mapping):
        given = [f"{_key(k)} = {toml_value(v, number)}" for k, v in value.items() if v is not None]
        return "{ " + ", ".join(given) + " }" if value else "{}"
    # JSON's escapes are TOML's, but for DEL, which TOML wants escaped too.
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
