"""Files of other programs as text."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

from simpar.errors import InputError


def read_text(path: str | Path) -> str:
    """The text at `path`, unpacked where it is gzip.

    Raises:
        InputError: missing, unreadable, empty, damaged, or not text.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        text = data.decode("utf-8-sig")
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not a text file (byte {error.start}); expected UTF-8") from None
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise InputError(f"{path}: damaged gzip file; expected a whole .gz or plain text") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    if not text.strip():
        raise InputError(f"{path}: the file is empty")
    return text
