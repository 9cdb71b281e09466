"""TensorBoard event files: TFRecord frames of protobuf `Event` messages, read without a library.

Frame: length (8 bytes, little endian), its checksum (4), the message, its checksum (4) (tensorflow/core/lib/io/record_writer.h).
Event: 1 wall_time, 2 step, 5 summary; Summary.value: 1 tag, 2 simple_value, 8 tensor (tensorflow/core/framework/summary.proto,
util/event.proto). Checksums are not verified; a file that ends inside a record is one of a job that was killed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from simpar.errors import InputError
from simpar.runlogs.scalars import Point, Store

_KILLED: Final = "ends inside a record, as of a job that was killed"
_MOST_RECORD: Final = 2**26
_MOST_POINTS: Final = 20_000_000


def is_event_file(path: Path) -> bool:
    """By the name that writers give."""
    return "tfevents" in path.name


def read_events(path: Path) -> Store:
    """Scalars of one event file.

    Raises:
        InputError: no such file, or not made of records.
    """
    store = Store(str(path))
    for wall, step, tag, value in _scalars(path, store):
        store.add(tag, Point(step, value, wall))
        if store.count > _MOST_POINTS:
            raise InputError(f"{path}: holds more than {_MOST_POINTS:,} points; expected one run's events")
    return store


def _scalars(path: Path, store: Store) -> Iterator[tuple[float, int, str, float]]:
    for record in _records(path, store):
        try:
            event = dict(_fields(record))
        except (ValueError, struct.error, IndexError):
            raise InputError(f"{path}: holds a record that is no TensorBoard event; expected an events.out.tfevents file") from None
        wall, step, summary = event.get(1), event.get(2, 0), event.get(5)
        if not isinstance(summary, bytes) or not isinstance(wall, bytes):
            continue
        try:
            seconds = struct.unpack("<d", wall)[0]
            for number, value in _fields(summary):
                if number == 1 and isinstance(value, bytes) and (found := _value(value)) is not None:
                    yield seconds, int(step) if isinstance(step, int) else 0, *found
        except (ValueError, struct.error, IndexError, UnicodeDecodeError):
            store.note("a summary that cannot be read was left out")


def _records(path: Path, store: Store) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            first = True
            while head := file.read(12):
                if len(head) < 12:
                    store.note(_KILLED)
                    return
                size = struct.unpack("<Q", head[:8])[0]
                if size > _MOST_RECORD:
                    if first:
                        raise InputError(f"{path}: is no TensorBoard event file; expected events.out.tfevents as writers name it")
                    store.note("is damaged inside; what follows was left out")
                    return
                body = file.read(size + 4)
                if len(body) < size + 4:
                    store.note(_KILLED)
                    return
                first = False
                yield body[:size]
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("varint")


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(field number, value) of a message: whole numbers, or the bytes of fixed and delimited values."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, kind = key >> 3, key & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield number, value
            continue
        if kind == 2:
            size, at = _varint(data, at)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise ValueError("wire type")
        if at + size > len(data):
            raise ValueError("length")
        yield number, data[at : at + size]
        at += size


def _value(data: bytes) -> tuple[str, float] | None:
    """(tag, number) of a summary value; none for texts, images and histograms."""
    tag, number = "", None
    for field, value in _fields(data):
        if field == 1 and isinstance(value, bytes):
            tag = value.decode()
        elif field == 2 and isinstance(value, bytes) and len(value) == 4:
            number = struct.unpack("<f", value)[0]
        elif field == 8 and isinstance(value, bytes):
            number = _tensor(value)
    return (tag, number) if tag and number is not None else None


def _tensor(data: bytes) -> float | None:
    """The number in a scalar tensor of floats or doubles."""
    dtype = 0
    for field, value in _fields(data):
        if field == 1 and isinstance(value, int):
            dtype = value
        elif field in (4, 5, 6) and isinstance(value, bytes):
            form = "<d" if dtype == 2 or field == 6 else "<f"
            if dtype in (1, 2) and len(value) == struct.calcsize(form):
                return float(struct.unpack(form, value)[0])
    return None
