"""The part of YAML that configuration files of clusters use: block mappings and sequences, plain and quoted scalars, flow
lists of scalars, comments. PyYAML is no dependency of simpar; anchors, tags, block text and nested flow are refused."""

from __future__ import annotations

import re
from typing import Any, Final

from simpar.errors import InputError

_KEY: Final = re.compile(r"^(\"[^\"]*\"|'[^']*'|[^\s:#\-\[{&*!|>'\"%@`][^:#]*?|[\w.-]+)\s*:(?:\s+(.*))?$")
_Line = tuple[int, int, str]
"""Line number, indent, text."""


def _without_comment(line: str) -> str:
    quote = ""
    for i, c in enumerate(line):
        if quote:
            quote = "" if c == quote else quote
        elif c in "\"'":
            quote = c
        elif c == "#" and (i == 0 or line[i - 1] in " \t"):
            return line[:i].rstrip()
    return line.rstrip()


def _scalar(text: str, where: str) -> Any:
    text = text.strip()
    if text[:1] in "\"'" and len(text) > 1 and text[-1] == text[0]:
        return text[1:-1]
    if text.startswith("[") and text.endswith("]") and "[" not in text[1:] and "{" not in text:
        return [_scalar(item, where) for item in text[1:-1].split(",") if item.strip()]
    if text[:1] in ("&", "*", "!", "|", ">", "{", "[", "%", "@", "`"):
        raise InputError(f"{where}: {text[:30]!r}: expected a plain value, a quoted one, or a list [a, b]")
    if re.fullmatch(r"[+-]?\d+", text):
        return int(text)
    if re.fullmatch(r"[+-]?(\d+\.\d*|\.\d+|\d+)([eE][+-]?\d+)?", text):
        return float(text)
    return {"true": True, "yes": True, "false": False, "no": False, "null": None, "~": None, "": None}.get(text.lower(), text)


class _Reader:
    """Lines not yet read."""

    def __init__(self, lines: list[_Line], file: str) -> None:
        self.lines, self.file, self.at = lines, file, 0

    def block(self, indent: int) -> Any:
        """The mapping or sequence whose lines start at `indent`."""
        return self._sequence(indent) if self.lines[self.at][2].startswith("-") else self._mapping(indent)

    def _more(self, indent: int) -> bool:
        if self.at >= len(self.lines) or self.lines[self.at][1] < indent:
            return False
        number, found, text = self.lines[self.at]
        if found > indent:
            raise InputError(f"{self.file}:{number}: {text[:40]!r} is indented by {found}; expected {indent}")
        return True

    def _sequence(self, indent: int) -> list[Any]:
        items = []
        while self._more(indent) and re.match(r"-(\s|$)", self.lines[self.at][2]):
            number, _, text = self.lines[self.at]
            rest = text[1:].lstrip()
            inner = indent + len(text) - len(rest)
            if not rest:
                self.at += 1
                deeper = self.at < len(self.lines) and self.lines[self.at][1] > indent
                items.append(self.block(self.lines[self.at][1]) if deeper else None)
            elif _KEY.match(rest) or re.match(r"-\s", rest):
                self.lines[self.at] = (number, inner, rest)
                items.append(self.block(inner))
            else:
                items.append(_scalar(rest, f"{self.file}:{number}"))
                self.at += 1
        return items

    def _mapping(self, indent: int) -> dict[str, Any]:
        table: dict[str, Any] = {}
        while self._more(indent):
            number, _, text = self.lines[self.at]
            found = _KEY.match(text)
            if found is None:
                raise InputError(f"{self.file}:{number}: {text[:40]!r}: expected `key: value` or `- item`")
            key, value = found[1].strip("\"'").strip(), (found[2] or "").strip()
            if key in table:
                raise InputError(f"{self.file}:{number}: {key!r} stands twice in one mapping; expected once")
            self.at += 1
            table[key] = _scalar(value, f"{self.file}:{number}") if value else self._nested(indent)
        return table

    def _nested(self, indent: int) -> Any:
        if self.at >= len(self.lines):
            return None
        _, deeper, text = self.lines[self.at]
        if deeper > indent or (deeper == indent and text.startswith("-")):
            return self.block(deeper)
        return None


def parse(text: str, file: str) -> Any:
    """The value in `text`; `file` is for messages.

    Raises:
        InputError: outside the subset, with file and line.
    """
    lines: list[_Line] = []
    for number, raw in enumerate(text.splitlines(), 1):
        line = _without_comment(raw)
        if not line.strip() or line.strip() in ("---", "..."):
            continue
        body = line.lstrip(" ")
        if body.startswith("\t"):
            raise InputError(f"{file}:{number}: indented with a tab; expected spaces")
        lines.append((number, len(line) - len(body), body))
    if not lines:
        raise InputError(f"{file}: nothing but comments")
    reader = _Reader(lines, file)
    value = reader.block(lines[0][1])
    if reader.at < len(lines):
        number, _, rest = reader.lines[reader.at]
        raise InputError(f"{file}:{number}: {rest[:40]!r}: expected the end of the file or a line at the first indent")
    return value
