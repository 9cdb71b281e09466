"""Pickles of others, read without running anything that they ask for.

Flight-recorder dumps and memory snapshots hold plain containers, so a pickle that names a class or function is refused. The
arguments in a checkpoint stand among classes: these become inert stand-ins, made of nothing but the values given to them.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import zipfile
from pathlib import Path
from typing import Any, Final

from simpar.boundary import read_bytes
from simpar.errors import InputError

MOST_BYTES: Final = 2**31
_TORCH_MAGIC: Final = 0x1950A86A20F9469CFC6C


_MOST_OPCODES: Final = 300_000_000


class Refused(pickle.UnpicklingError):
    """A pickle asked for a class or a function; the text is its name."""


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise Refused(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        raise Refused("a stored object of its own")


class Inert:
    """Stands for an object of any class: what it was made with and what it was set to, nothing done."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args = args
        self.state: Any = kwargs or None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def append(self, value: Any) -> None:
        """Lists of other classes."""

    def extend(self, values: Any) -> None:
        """As above."""

    def __setitem__(self, key: Any, value: Any) -> None:
        """Mappings of other classes."""


class _Standing(pickle.Unpickler):
    """Every class is a stand-in of its name."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module == "torch" and name.islower():
            return f"torch.{name}"  # dtypes are globals, nothing is called
        return type(name.rpartition(".")[2] or "Inert", (Inert,), {"__module__": module})

    def persistent_load(self, pid: Any) -> Any:
        return None


def load_plain(path: Path, expected: str) -> Any:
    """The value of a pickle of plain containers.

    Raises:
        InputError: unreadable, no pickle, or one that asks for anything else; nothing of it is run.
    """
    data = read_bytes(path, MOST_BYTES)
    _check_memo(data, path, expected)
    try:
        return _Plain(io.BytesIO(data)).load()
    except Refused as error:
        rule = f"the pickle asks for {error}, which a plain one does not hold; it was not run"
        raise InputError(f"{path}: {rule}; expected {expected}") from None
    except MemoryError:
        raise InputError(f"{path}: asks for more memory than there is; expected {expected}") from None
    except Exception as error:  # the unpickler raises what damaged bytes lead it to
        raise InputError(f"{path}: not a whole pickle ({str(error)[:80] or type(error).__name__}); expected {expected}") from None


def load_inert(path: Path, expected: str) -> Any:
    """The value of a torch file, every object in it a stand-in (`Inert`); tensors are none.

    Raises:
        InputError: unreadable or no such file.
    """
    try:
        with path.open("rb") as file:
            packed = file.read(2) == b"PK"
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None
    data = _zipped(path, expected) if packed else read_bytes(path, MOST_BYTES)
    _check_memo(data, path, expected)
    stream = io.BytesIO(data)
    try:
        value = _Standing(stream).load()
        if value == _TORCH_MAGIC:  # torch's older format: protocol, system, then the object
            for _ in range(3):
                value = _Standing(stream).load()
    except Exception as error:
        raise InputError(
            f"{path}: not a whole torch file ({str(error)[:80] or type(error).__name__}); expected {expected}"
        ) from None
    return value


def _check_memo(data: bytes, path: Path, expected: str) -> None:
    """That no opcode numbers a value beyond those there are: the unpickler would make room for all below it."""
    count = 0
    try:
        for opcode, argument, _ in pickletools.genops(data):
            count += 1
            if opcode.name in ("LONG_BINPUT", "PUT") and isinstance(argument, int) and argument > count:
                raise InputError(f"{path}: numbers a value {argument:,} of {count:,}; it was not loaded; expected {expected}")
            if count > _MOST_OPCODES:
                raise InputError(f"{path}: holds more than {_MOST_OPCODES:,} values; expected {expected}")
    except (ValueError, UnicodeDecodeError, IndexError) as error:
        raise InputError(f"{path}: not a whole pickle ({str(error)[:80]}); expected {expected}") from None


def _zipped(path: Path, expected: str) -> bytes:
    try:
        with zipfile.ZipFile(path) as archive:
            entry = next((i for i in archive.infolist() if i.filename.endswith("data.pkl")), None)
            if entry is None or entry.file_size > MOST_BYTES:
                raise InputError(f"{path}: holds no data.pkl that fits; expected {expected}")
            return archive.read(entry)
    except (zipfile.BadZipFile, OSError, RuntimeError, NotImplementedError) as error:
        raise InputError(f"{path}: damaged archive ({error}); expected {expected}") from None
