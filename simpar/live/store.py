"""Measurements kept as they are made: one JSON object a line, so an interrupted run loses nothing and can go on."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

Record = dict[str, Any]
_CONTROLS: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")


class CalibrationError(Exception):
    """The run cannot go on; what was measured is kept. One message, exit code 2."""


def plain(text: str) -> str:
    """`text` without a terminal's escapes and other control characters, which TOML forbids; tabs and line ends stay."""
    return _CONTROLS.sub("", text)


class Store:
    """A JSONL file of records, each with a `key`; the last record of a key counts.

    Args:
        path: the file, made on the first `append`.

    Raises:
        CalibrationError: the file is there but is no store.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records: dict[str, Record] = {}
        if path.exists():
            self._load()

    def _load(self) -> None:
        try:
            text = self.path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CalibrationError(f"{self.path}: cannot be read: {error}") from None
        lines = text.splitlines()
        for number, line in enumerate(lines, 1):
            try:
                record = json.loads(line)
                self.records[record["key"]] = record
            except (ValueError, KeyError, TypeError):
                # A kill in the middle of a write leaves a part of the last line, and only of the last.
                if number == len(lines) and not text.endswith("\n"):
                    self._cut(text, line)
                    return
                rule = "not a measurement (a JSON object with a key)"
                raise CalibrationError(f"{self.path}: line {number}: {rule}; give the file that an earlier run wrote") from None

    def _cut(self, text: str, part: str) -> None:
        with self.path.open("r+b") as file:
            file.truncate(len(text.encode()) - len(part.encode()))

    def append(self, record: Mapping[str, Any]) -> None:
        """Write `record` and have it on the disk before going on.

        Raises:
            CalibrationError: the file cannot be written.
        """
        self.records[record["key"]] = dict(record)
        if not self.path.parent.is_dir() and self.path.parent == Path(os.devnull):
            return  # of a rank that keeps nothing
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise CalibrationError(f"{self.path}: cannot be written: {error.strerror}") from None

    def of_kind(self, kind: str) -> list[Record]:
        """The records of one kind, in the order of their first measurement."""
        return [r for r in self.records.values() if r.get("kind") == kind]

    def finished(self, key: str) -> bool:
        """Whether the interval of `key` is narrow already."""
        return bool(self.records.get(key, {}).get("narrow"))
