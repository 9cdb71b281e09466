"""Kineto's Chrome traces event by event: memory does not grow with the file."""

from __future__ import annotations

import gzip
import io
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from simpar.boundary import streaming
from simpar.errors import InputError

EXPECTED: Final = "torch.profiler's export_chrome_trace"
MOST_BYTES: Final = 2**37
"""Of a trace, unpacked."""
_CHUNK: Final = 2**21
_MOST_HEAD: Final = 2**24
"""Of what stands before and after the events: devices, process groups."""
_MOST_EVENT: Final = 2**24
_EVENTS: Final = re.compile(r'"traceEvents"\s*:\s*\[')


@dataclass
class Head:
    """What a trace says besides its events.

    Attributes:
        table: the file's object without its events; complete once the events are read.
        cut: the file ends inside the events.
    """

    table: dict[str, Any] = field(default_factory=dict)
    cut: bool = False


def stream(path: Path, head: Head) -> Iterator[dict[str, Any]]:
    """The events of the trace at `path` (.json or .json.gz); `head` is filled on the way.

    Raises:
        InputError: missing, no such trace, damaged, or an event that is not JSON.
    """
    with streaming(path, EXPECTED), _opened(path) as file:
        yield from _Scanner(path, file, head).events()


def _opened(path: Path) -> io.TextIOWrapper:
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    return io.TextIOWrapper(gzip.open(path, "rb") if packed else path.open("rb"), encoding="utf-8-sig")


class _Scanner:
    def __init__(self, path: Path, file: io.TextIOWrapper, head: Head) -> None:
        self.path, self.file, self.head = path, file, head
        self.text, self.at, self.total, self.lines = "", 0, 0, 1
        self.decoder = json.JSONDecoder()

    def more(self) -> bool:
        part = self.file.read(_CHUNK)
        self.total += len(part)
        if self.total > MOST_BYTES:
            raise InputError(f"{self.path}: is larger than {MOST_BYTES >> 30} GiB unpacked; expected the trace of a few steps")
        self.lines += self.text.count("\n", 0, self.at)
        self.text, self.at = self.text[self.at :] + part, 0
        return bool(part)

    def events(self) -> Iterator[dict[str, Any]]:
        before = self._before()
        while True:
            self._skip()
            if self.at >= len(self.text):
                if self.more():
                    continue
                self.head.cut = True
                break
            if self.text[self.at] == "]":
                self.at += 1
                break
            event = self._event()
            if event is None:
                self.head.cut = True
                break
            yield event
        self.head.table |= {**before, **({} if self.head.cut else self._after())}

    def _skip(self) -> None:
        while self.at < len(self.text) and self.text[self.at] in " \t\r\n,":
            self.at += 1

    def _before(self) -> dict[str, Any]:
        """The keys before the events; the scanner then stands at the first of them."""
        while (found := _EVENTS.search(self.text)) is None:
            if len(self.text) > _MOST_HEAD or not self.more():
                if self.text.lstrip().startswith("["):  # the events alone
                    self.at = self.text.index("[") + 1
                    return {}
                raise self._without_events()
            if self.text.lstrip().startswith("["):
                self.at = self.text.index("[") + 1
                return {}
        text = self.text[: found.start()].rstrip().rstrip(",")
        self.at = found.end()
        return self._object(text + "}")

    def _without_events(self) -> InputError:
        if not self.text.strip():
            return InputError(f"{self.path}: the file is empty; expected {EXPECTED}")
        try:
            json.loads(self.text)
        except json.JSONDecodeError as error:
            return InputError(f"{self.path}:{error.lineno}: not JSON: {error.msg}; expected {EXPECTED}")
        except RecursionError:
            return InputError(f"{self.path}: is nested too deeply; expected {EXPECTED}")
        return InputError(f"{self.path}: traceEvents is missing; expected {EXPECTED}")

    def _after(self) -> dict[str, Any]:
        while len(self.text) - self.at < _MOST_HEAD and self.more():
            pass
        text = self.text[self.at :].strip().lstrip(",").strip()
        return self._object("{" + text) if text.startswith('"') else {}

    def _object(self, text: str) -> dict[str, Any]:
        try:
            found = json.loads(text)
        except (json.JSONDecodeError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    def _event(self) -> dict[str, Any] | None:
        """The next event; none where the file ends inside it."""
        while True:
            try:
                event, self.at = self.decoder.raw_decode(self.text, self.at)
            except RecursionError:
                raise InputError(f"{self.path}: an event is nested too deeply; expected {EXPECTED}") from None
            except json.JSONDecodeError as error:
                place = error.pos - self.at  # more() moves what is left to the front
                if len(self.text) - self.at < _MOST_EVENT and self.more():
                    continue
                if error.msg.startswith("Unterminated string") or not re.search(r"[}\]]", self.text[self.at + place :]):
                    return None
                line = self.lines + self.text.count("\n", 0, self.at + place)
                raise InputError(f"{self.path}:{line}: not JSON: {error.msg}; expected {EXPECTED}") from None
            if not isinstance(event, dict):
                raise InputError(f"{self.path}: traceEvents holds a value that is no event; expected {EXPECTED}")
            return event
