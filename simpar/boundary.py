"""Files from outside, read within bounds: whatever they hold, a reader returns values it checked or raises `InputError`.

Bounds on what a file may hold (`MOST_BYTES`, `MOST_NODES`, `MOST_DEPTH`) are far above what real files have and below what would
fill the memory. `reader` is the last line behind every reader's own checks: what still goes wrong inside names the file and what
was expected there.
"""

from __future__ import annotations

import codecs
import csv
import functools
import gzip
import inspect
import io
import json
import math
import re
import stat
import tomllib
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, ParamSpec, TypeVar

from simpar.errors import InputError, SimparError, Violation

MOST_BYTES: Final = 2**30
"""Of a trace, a log or a table, unpacked."""
MOST_CONFIG_BYTES: Final = 16 * 2**20
"""Of a file that a person or a framework wrote to configure something."""
MOST_RATIO: Final = 250
"""Unpacked over packed: gzip makes a trace 10 to 40 times smaller, and a file of zeros 1,000 times."""
MOST_DEPTH: Final = 64
"""Tables and lists inside each other in a configuration."""
MOST_NODES: Final = 1_000_000
"""Values of a YAML file, with what its aliases stand for."""
_CHUNK: Final = 2**22
_GZIP: Final = b"\x1f\x8b"
_PIPES: Final = ("/dev/stdin", "/dev/fd/", "/proc/self/fd/")

_DOTTED: Final = re.compile(rf"""(?<![\w-])(?:(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){{{MOST_DEPTH}}}""")
"""A TOML key of many parts: a.b.c."""

P = ParamSpec("P")
R = TypeVar("R")


# -- bytes and text --------------------------------------------------------------------------------------------------------


def read_bytes(path: str | Path, most: int = MOST_BYTES) -> bytes:
    """The content of the file at `path`, at most `most` bytes, unpacked where it is gzip.

    Raises:
        InputError: missing, unreadable, not a file, too large, or a damaged gzip file.
    """
    path = Path(path)
    try:
        if not path.exists() and (packed := path.with_name(f"{path.name}.gz")).is_file():
            path = packed
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise InputError(f"{path}: is a folder; expected a file in it")
        if not stat.S_ISREG(mode) and not str(path).startswith(_PIPES):
            raise InputError(f"{path}: is a device or a pipe; expected a file")
        with path.open("rb") as file:
            data = file.read(most + 1)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:  # a NUL in a name is a ValueError
        raise InputError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(data) > most:
        raise InputError(f"{path}: is larger than {_size(most)}, the most that is read of such a file")
    return _unpacked(data, path, most) if data.startswith(_GZIP) else data


def _unpacked(data: bytes, path: Path, most: int) -> bytes:
    parts, total = [], 0
    packed = io.BytesIO(data)
    try:
        with gzip.GzipFile(fileobj=packed) as file:
            while part := file.read(_CHUNK):
                parts.append(part)
                total += len(part)
                # By what is unpacked so far: a file that grows without measure is not unpacked to its limit first.
                limit = min(most, max(packed.tell() * MOST_RATIO, 2**24))
                if total > limit:
                    rule = f"a gzip file of {_size(len(data))} that unpacks to more than {_size(limit)}"
                    raise InputError(f"{path}: {rule}; expected one of a text that fits")
    except (EOFError, OSError, zlib.error):
        raise InputError(f"{path}: damaged gzip file; expected a whole .gz or plain text") from None
    return b"".join(parts)


@contextmanager
def streaming(path: Path, expected: str) -> Iterator[None]:
    """What goes wrong while a file is read bit by bit is one InputError: missing, a folder, no text, damaged, unreadable."""
    try:
        yield
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise InputError(f"{path}: is a folder; expected {expected}") from None
    except UnicodeDecodeError:
        raise InputError(f"{path}: not a text file; expected {expected}") from None
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise InputError(f"{path}: damaged gzip file; expected a whole .gz or plain text") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None


def _size(count: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count} bytes"


def encoding_of(start: bytes) -> str:
    """Of a text that starts so: UTF-16 with its mark (what PowerShell's `>` writes), UTF-8 otherwise."""
    return "utf-16" if start[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "utf-8-sig"


def text_of(data: bytes, path: str | Path) -> str:
    """`data` as text: UTF-8, or UTF-16 with its mark; a byte order mark is dropped.

    Raises:
        InputError: neither.
    """
    try:
        return data.decode(encoding_of(data))
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not a text file (byte {error.start}); expected UTF-8") from None


def read_text(path: str | Path, most: int = MOST_BYTES, *, empty: bool = False) -> str:
    """The text at `path`, unpacked where it is gzip.

    Args:
        empty: whether an empty file is a text too.

    Raises:
        InputError: as `read_bytes`, not text, or empty.
    """
    text = text_of(read_bytes(path, most), path)
    if not empty and not text.strip():
        raise InputError(f"{path}: the file is empty")
    return text


# -- formats ---------------------------------------------------------------------------------------------------------------


def parse_json(text: str, file: str | Path, expected: str = "", *, finite: bool = True) -> Any:
    """The value of a JSON text; `finite`: without nan and infinite numbers.

    Raises:
        InputError: not JSON, with the line; nan or infinite numbers; nested too deeply.
    """
    tail = f"; expected {expected}" if expected else ""
    try:
        return json.loads(text, parse_float=_finite, parse_constant=_constant) if finite else json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(f"{file}:{error.lineno}: not JSON: {error.msg}{tail}") from None
    except RecursionError:
        raise _too_deep(file) from None
    except ValueError as error:
        raise InputError(f"{file}: not JSON: {error}{tail}") from None


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is too large for a number")
    return value


def _constant(text: str) -> float:
    raise ValueError(f"{text} is no number")


def parse_toml(text: str, file: str | Path, expected: str = "") -> dict[str, Any]:
    """The table of a TOML text.

    Raises:
        InputError: not TOML, with line and column; nested too deeply.
    """
    if _DOTTED.search(text):  # tomllib takes the square of their number
        raise _too_deep(file)
    try:
        table = tomllib.loads(text)
    except RecursionError:
        raise _too_deep(file) from None
    except ValueError as error:  # TOMLDecodeError, or a number of too many digits
        raise InputError(f"{file}: not valid TOML: {error}" + (f"; expected {expected}" if expected else "")) from None
    check_depth(table, file)
    return table


def toml_value(text: str) -> Any:
    """The TOML value that somebody typed (8, true, [1, 2]); a bare word is a text.

    Raises:
        InputError: nested too deeply.
    """
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except RecursionError:
        raise _too_deep(text[:40]) from None
    except ValueError:
        return text
    check_depth(value, text[:40])
    return value


def parse_yaml(text: str, file: str | Path) -> Any:
    """The value of a YAML text, plain data only.

    Raises:
        InputError: not YAML, with the line; tags of a program's own; too many values or too deep; infinite numbers.
    """
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        _count_yaml(yaml, loader, text, file)
        value = yaml.load(text, Loader=loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{file}:{mark.line + 1}" if mark is not None else str(file)
        raise InputError(f"{where}: not valid YAML: {error.problem or error.context}") from None
    except RecursionError:
        raise _too_deep(file) from None
    except (yaml.YAMLError, ValueError, TypeError) as error:
        raise InputError(f"{file}: not valid YAML: {error}") from None
    check_depth(value, file, finite=True)
    return value


def _count_yaml(yaml: Any, loader: Any, text: str, file: str | Path) -> None:
    """Refuse what would grow: aliases stand for all they name, also inside each other."""
    sizes: dict[str, int] = {}
    stack: list[tuple[str | None, int]] = [(None, 0)]
    for event in yaml.parse(text, Loader=loader):
        if isinstance(event, yaml.CollectionStartEvent):
            stack.append((event.anchor, 0))
            if len(stack) > MOST_DEPTH:
                raise _too_deep(f"{file}:{event.start_mark.line + 1}")
            continue
        if isinstance(event, yaml.CollectionEndEvent):
            anchor, size = stack.pop()
        elif isinstance(event, yaml.AliasEvent):
            anchor, size = None, sizes.get(event.anchor, 0)
        elif isinstance(event, yaml.ScalarEvent):
            anchor, size = event.anchor, 0
        else:
            continue
        if anchor is not None:
            sizes[anchor] = size + 1
        above, count = stack.pop()
        stack.append((above, count + size + 1))
        if count + size >= MOST_NODES:
            rule = f"holds more than {MOST_NODES:,} values with what its aliases stand for"
            raise InputError(f"{file}:{event.start_mark.line + 1}: {rule}; expected a configuration")


def check_depth(value: Any, file: str | Path, *, finite: bool = False) -> None:
    """Refuse tables and lists more than MOST_DEPTH deep and, if `finite`, numbers that are not; with the place.

    Raises:
        InputError: one is.
    """
    stack: list[tuple[Any, str, int]] = [(value, "", 0)]
    while stack:
        found, place, depth = stack.pop()
        if isinstance(found, dict | list):
            if depth >= MOST_DEPTH:
                raise _too_deep(file, place[:60])
            pairs = found.items() if isinstance(found, dict) else enumerate(found)
            stack += [(inner, f"{place}.{str(name)[:40]}" if place else str(name)[:40], depth + 1) for name, inner in pairs]
        elif finite and isinstance(found, float) and not math.isfinite(found):
            raise InputError([Violation(place or "value", found, "must be a finite number", file=str(file))])


def _too_deep(file: str | Path, place: str = "") -> InputError:
    where = f"{file}: {place}" if place else str(file)
    return InputError(f"{where}: is nested too deeply; expected at most {MOST_DEPTH} tables or lists inside each other")


def read_json(path: str | Path, expected: str = "one JSON object", *, finite: bool = True) -> dict[str, Any]:
    """The object in the JSON file at `path`.

    Args:
        finite: refuse nan and infinite numbers, which are not JSON (Python writes them all the same).

    Raises:
        InputError: unreadable, not JSON, or another value than an object.
    """
    value = parse_json(read_text(path, MOST_CONFIG_BYTES), path, expected, finite=finite)
    if not isinstance(value, dict):
        raise InputError(f"{path}: holds a {_kind(value)}; expected {expected}")
    check_depth(value, path)
    return value


def read_csv(path: str | Path, *, empty: bool = False) -> list[list[str]]:
    """The rows of the CSV file at `path`.

    Raises:
        InputError: unreadable or not CSV, with the line.
    """
    rows = csv.reader(io.StringIO(read_text(path, empty=empty), newline=""))
    try:
        return list(rows)
    except csv.Error as error:
        raise InputError(f"{path}:{rows.line_num}: not valid CSV: {error}") from None


def read_records(path: str | Path, *, empty: bool = False) -> Iterator[dict[str, str]]:
    """The rows of the CSV file at `path` by the names in its first; cells that a short row lacks are empty.

    Raises:
        InputError: unreadable, not CSV, or a row with more cells than names.
    """
    rows = read_csv(path, empty=empty)
    names = rows[0] if rows else []
    for line, row in enumerate(rows[1:], 2):
        if len(row) > len(names):
            raise InputError(f"{path}:{line}: has {len(row)} cells; expected {len(names)}, one for each name in the first line")
        if row:
            yield dict(zip(names, [*row, *[""] * (len(names) - len(row))], strict=True))


def read_json_lines(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of the file at `path` with one JSON object a line; nan and infinite numbers are the caller's matter.

    Raises:
        InputError: unreadable, or a line that is no object; with its number.
    """
    for number, line in enumerate(read_text(path, empty=True).split("\n"), 1):
        if line.strip():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise InputError(f"{path}:{number}: not JSON: {error}") from None
            if not isinstance(row, dict):
                raise InputError(f"{path}:{number}: a JSON object is needed, one a line; this is a {_kind(row)}")
            yield number, row


def _kind(value: object) -> str:
    names = {list: "list", str: "text", bool: "true or false", int: "number", float: "number", type(None): "null"}
    return names.get(type(value), type(value).__name__)


# -- the last line ---------------------------------------------------------------------------------------------------------


def reader(parameter: str, expected: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator for functions that read what others wrote: nothing but `SimparError` comes out.

    Args:
        parameter: of the function that names the file.
        expected: what should stand in the file, for the message.
    """

    def wrap(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return function(*args, **kwargs)
            except (SimparError, OSError):
                raise
            except Exception as error:
                named = signature.bind(*args, **kwargs).arguments.get(parameter) or "the input"
                raise InputError(f"{named}: {_said(error)}; expected {expected}") from error

        return guarded

    return wrap


def _said(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "is nested too deeply"
    if isinstance(error, MemoryError):
        return "is too large for the memory of this machine"
    if isinstance(error, KeyError):
        return f"{error} is missing"
    text = str(error).strip().splitlines()
    return f"holds a value that cannot be read ({text[0][:160] if text else type(error).__name__})"
