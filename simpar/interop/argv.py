"""Command lines as data: flags and their values, and the words of a launch file that holds nothing but words.

Shell is left to the shell: a script with variables, arrays or branches is run under stand-in launchers (stub_launch.py).
"""

from __future__ import annotations

import re
import shlex
from typing import Final

from simpar.errors import InputError, Violation

_OWN: Final = re.compile(r"^ARGS=\(\n(.*?)^\)", re.S | re.M)
"""The array of flags that `simpar export megatron` writes."""
_SHELL: Final = re.compile(r"[$`;|&<>(){}]")
_PLAIN: Final = re.compile(r"^\s*(?:#.*|set [-+]\w+|export \w+=[\w./:-]*|)$")
RUN_HINT: Final = (
    "simpar import --run SCRIPT (runs it with stand-ins for its launchers), simpar import megatron --argv -- ..., or its log"
)


def options(words: list[str]) -> dict[str, list[str]]:
    """Flag -> its values: "--a 1 --b --c x y", "--a=1"; dashes and underscores are the same."""
    found: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if word.startswith("--") and len(word) > 2:
            # An array element such as "--fp8-format hybrid" may hold the value too.
            head, *values = _parts(word)
            name, equals, value = head[2:].partition("=")
            name = name.replace("_", "-")
            found[name] = [value, *values] if equals else values
        elif name:
            found[name].append(word)
    return found


def _parts(word: str) -> list[str]:
    if " " not in word:
        return [word]
    try:
        return shlex.split(word)
    except ValueError:
        return [word]


def literal_words(text: str, file: str = "") -> list[str]:
    """The words of the one command of a launch file: as `simpar export` writes it, or a command line without any shell in it.

    Raises:
        InputError: there is shell in it, or no command.
    """
    nodes = re.search(r"^torchrun (.*?) pretrain", text, re.M)
    if own := _OWN.search(text):
        before, inside = shlex.split(nodes[1].replace('"', "")) if nodes else [], own[1]
        commands = [inside]
    else:
        before, commands = [], [c for c in text.replace("\\\n", " ").split("\n") if not _PLAIN.match(c)]
    for command in commands:
        bare = re.sub(r"'[^'\n]*'", "", re.sub(r"'?\(\[[\d\[\]()+*,]*\)[\d*]*'?|\"[EtmL*()|,\d]*\"", "", command))
        if own is None and _SHELL.search(bare):
            found = _SHELL.search(bare)
            line = command.strip()[:80]
            rule = f"holds shell ({found[0] if found else ''} in {line!r}), which is not interpreted here"
            raise InputError([Violation("script", file or "-", rule, RUN_HINT)])
    try:
        lines = [shlex.split(c, comments=True) for c in commands]
    except ValueError as error:
        raise InputError([Violation("script", file or "-", f"is no command line ({error})", RUN_HINT)]) from None
    best = max(lines, key=lambda words: sum(w.startswith("--") for w in words), default=[])
    return [*before, *best]
