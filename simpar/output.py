"""Report files: written whole, or refused with one clear message."""

from __future__ import annotations

from pathlib import Path

from simpar.errors import InputError, Violation


def write_file(path: Path, content: bytes, field: str) -> None:
    """Write `content` to `path`; missing folders are made, an earlier report is replaced.

    Args:
        field: what the user wrote, such as "--html", for the message.

    Raises:
        InputError: a folder or a file is in the way, or writing is not permitted.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    except OSError as error:
        raise InputError([_violation(path, error, field)]) from None


def check_writable(path: Path, field: str) -> None:
    """That `write_file` will be able to write `path`: before long work whose report would be lost.

    Raises:
        InputError: as `write_file` does.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new = not path.exists()
        path.open("ab").close()
        if new:
            path.unlink()
    except OSError as error:
        raise InputError([_violation(path, error, field)]) from None


def _violation(path: Path, error: OSError, field: str) -> Violation:
    if path.is_dir():
        return Violation(field, str(path), "is a folder", "name a file in it")
    blocking = next((p for p in path.parents if p.exists() and not p.is_dir()), None)
    if blocking is not None:
        return Violation(field, str(path), f"{blocking} is a file, not a folder", "choose another path")
    if isinstance(error, PermissionError):
        return Violation(field, str(path), "writing there is not permitted", "choose a folder of your own")
    return Violation(field, str(path), f"cannot be written: {error.strerror or error}", "choose another path")
