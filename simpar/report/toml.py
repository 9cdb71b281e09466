"""A table as TOML."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any


def toml(table: Mapping[str, Any]) -> str:
    """A table of strings, numbers, booleans, lists and tables as TOML; None is left out."""
    lines: list[str] = []
    _write(table, "", lines)
    return "\n".join(lines).strip() + "\n"


def _write(table: Mapping[str, Any], path: str, lines: list[str]) -> None:
    nested = {k: v for k, v in table.items() if isinstance(v, Mapping) and v}
    lines += [f"{_key(k)} = {_value(v)}" for k, v in table.items() if k not in nested and v is not None and not _tables(v)]
    for key, value in table.items():
        name = f"{path}.{_key(key)}" if path else _key(key)
        if key in nested:
            lines += ["", f"[{name}]"]
            _write(value, name, lines)
        elif _tables(value):
            for item in value:
                lines += ["", f"[[{name}]]"]
                _write(item, name, lines)


def _tables(value: object) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(v, Mapping) for v in value)


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _quoted(name)


def _quoted(text: str) -> str:
    # JSON's escapes are TOML's, but for DEL, which TOML wants escaped too.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(v) for v in value) + "]"
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items() if v is not None) + " }" if value else "{}"
    return str(value)
