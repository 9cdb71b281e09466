"""Lines of a training log as the framework wrote them: without colours, carriage returns and what launchers put before them."""

from __future__ import annotations

import gzip
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from simpar.boundary import encoding_of, streaming
from simpar.errors import InputError

MOST_LINE: Final = 2**16
"""Characters of a line that are looked at."""
MOST_BYTES: Final = 2**33
"""Characters of a log, unpacked."""

_ANSI: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_PREFIXES: Final = (
    re.compile(r"^\[(?:rank|default)(?P<rank>\d+)\]:\s?"),  # torchrun --tee; [default3] is a local rank
    re.compile(r"^(?P<rank>\d+):\s(?!\d)"),  # srun -l
    re.compile(r"^\[\d+,(?P<rank>\d+)\]<std(?:out|err)>:\s?"),  # mpirun --tag-output
    re.compile(r"^\((?:\w+ )?pid=\d+(?:, ip=[\d.]+)?\)\s?"),  # Ray
    re.compile(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?Z\s(?:std(?:out|err) F )?"),  # Kubernetes
)
_STAMP: Final = re.compile(r"(\d{4})-(\d\d)-(\d\d)[ T](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,6}))?")
_AMERICAN: Final = re.compile(r"(\d\d)/(\d\d)/(\d{4}) (\d\d):(\d\d):(\d\d)")
_COMMA_DECIMAL: Final = re.compile(r"[-+]?\d[\d.]*,\d+(?:[eE][-+]?\d+)?")


@dataclass(frozen=True, slots=True)
class Line:
    """One line: its text, number in the file, and the rank that a launcher's prefix names."""

    text: str
    number: int
    rank: int | None = None


def lines_of(path: Path) -> Iterator[Line]:
    """Cleaned lines of the log at `path` (plain or gzip), streamed.

    Raises:
        InputError: missing, no file, not text, or larger than `MOST_BYTES` unpacked.
    """
    with streaming(path, "a log in it"), _opened(path) as file:
        total = number = 0
        for raw in iter(lambda: file.readline(MOST_LINE), ""):
            total += len(raw)
            number += raw.endswith("\n")
            if number < 2 and "\x00" in raw:
                raise InputError(f"{path}: not a text file; expected a training log")
            if total > MOST_BYTES:
                raise InputError(f"{path}: is larger than {MOST_BYTES >> 30} GiB unpacked; expected a training log")
            yield from cleaned(raw, number)


def _opened(path: Path) -> io.TextIOWrapper:
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        start = gzip.GzipFile(fileobj=file).read(2) if packed else file.read(2)
    return io.TextIOWrapper(gzip.open(path, "rb") if packed else path.open("rb"), encoding_of(start), "replace", "\n")


def cleaned(raw: str, number: int = 0) -> Iterator[Line]:
    """The lines in a raw one: what a progress bar overwrote counts as lines of its own."""
    for part in raw.rstrip("\n").split("\r"):
        text = _ANSI.sub("", part)
        rank: int | None = None
        again = True
        while again:
            again = False
            for pattern in _PREFIXES:
                if (found := pattern.match(text)) is not None and found.end():
                    rank = int(found["rank"]) if "rank" in found.groupdict() else rank
                    text, again = text[found.end() :], True
        if text.strip():
            yield Line(text, number, rank)


def clock_of(text: str) -> float | None:
    """Seconds of the first time stamp in `text` (taken as UTC: only differences count)."""
    if (found := _STAMP.search(text)) is not None:
        *whole, fraction = found.groups()
    elif (found := _AMERICAN.search(text)) is not None:
        first, then, years, *clock = found.groups()
        whole, fraction = [years, first, then, *clock], None
    else:
        return None
    try:
        year, month, day, hour, minute, second = (int(x) for x in whole)
        stamp = datetime(year, month, day, hour, minute, second, tzinfo=UTC).timestamp()
    except ValueError:
        return None
    return stamp + (float(f"0.{fraction}") if fraction else 0.0)


class OtherLanguage(ValueError):  # noqa: N818 - caught where the line is known
    """A number written with a decimal comma."""


def number_of(text: str) -> float:
    """A number as programs print it: 1.5, 1.5E-05, nan.

    Raises:
        OtherLanguage: 8123,4.
        ValueError: no number.
    """
    try:
        return float(text)
    except ValueError:
        if _COMMA_DECIMAL.fullmatch(text.strip()):
            raise OtherLanguage(text) from None
        raise
