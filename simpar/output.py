"""Reports: files written whole or refused with one clear message, and values that JSON can hold."""

from __future__ import annotations

import math
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from simpar.errors import InputError, Violation

OFFLINE: ContextVar[bool] = ContextVar("offline", default=False)
"""Whether pages have plotly.js inside."""

PLOTLY_SITE: Final = "https://cdn.plot.ly"


def write_file(path: Path, content: bytes | memoryview, field: str) -> None:
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


def write_page(path: Path, html: str) -> None:
    """Write the page that --html asks for.

    Raises:
        InputError: as `write_file`.
    """
    write_file(path, html.encode(), "--html")


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


def finite(value: Any) -> Any:
    """`value` with None for every number that JSON cannot hold."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


@contextmanager
def offline(wanted: bool = True) -> Iterator[None]:
    """Pages that are written inside have everything inside, if that is wanted here or was before."""
    before = OFFLINE.set(wanted or OFFLINE.get())
    try:
        yield
    finally:
        OFFLINE.reset(before)


def plotly_script() -> str:
    """The element that brings plotly.js."""
    # One file of the package, read without importing it: that would take longer, and more memory, than a whole step.
    script = files("plotly.package_data").joinpath("plotly.min.js")
    if OFFLINE.get():
        return f"<script>{script.read_text(encoding='utf-8')}</script>"
    digest = sha256()
    with script.open("rb") as file:
        version = file.read(64).split(b"plotly.js v", 1)[1].split(maxsplit=1)[0].decode()
        file.seek(0)
        while block := file.read(1 << 18):
            digest.update(block)
    whole = b64encode(digest.digest()).decode()
    return f'<script src="{PLOTLY_SITE}/plotly-{version}.min.js" integrity="sha256-{whole}" crossorigin=anonymous></script>'
