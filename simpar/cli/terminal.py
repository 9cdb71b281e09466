"""The terminal, pipes and disks that a command writes to: whatever they cannot take is one line, or other characters."""

from __future__ import annotations

import codecs
import io
import os
import sys
from contextlib import suppress
from typing import Final

_PLAIN: Final = {
    "\u00d7": "x", "\u00b5": "u", "\u00b7": "*", "\u00b1": "+-", "\u00b2": "2", "\u00b3": "3", "\u2013": "-", "\u2014": "-",
    "\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2022": "*", "\u2026": "...", "\u2192": "->", "\u2190": "<-",
    "\u2212": "-", "\u2248": "~", "\u2260": "!=", "\u2264": "<=", "\u2265": ">=", "\u03c3": "sigma", "\u0394": "delta",
}  # fmt: skip


def _replaced(error: UnicodeError) -> tuple[str, int]:
    """Characters that the output's encoding lacks, as others that every encoding has."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(_PLAIN.get(c, "?") for c in error.object[error.start : error.end]), error.end


def prepare() -> None:
    """Let both outputs take every character."""
    codecs.register_error("simpar", _replaced)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="simpar")


def flush() -> None:
    """Write out what is left.

    Raises:
        OSError: the disk is full, or whoever read it has gone.
    """
    if sys.stdout is not None:
        sys.stdout.flush()


def silence() -> None:
    """After an output has failed: what is left of it goes nowhere, without a word from the interpreter as it ends."""
    with suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def described(error: OSError) -> str:
    """What the system does not let us do, on one line."""
    reason = error.strerror or str(error) or type(error).__name__
    return f"{error.filename}: {reason}" if error.filename else f"the output cannot be written: {reason}"
