"""Searches in a SQLite file: every finished layout and part is on disk before the next one starts."""

from __future__ import annotations

import hashlib
import json
import sqlite3
import time
from collections.abc import Iterator, Sequence
from copy import copy
from functools import cache
from pathlib import Path
from typing import Any, Final

from simpar import __version__
from simpar.errors import InputError, Violation
from simpar.search.choice import Choice
from simpar.search.incumbents import Scored

_APPLICATION: Final = 0x73696D70
"""SQLite's application_id of a store ("simp"): tells it from the database of any other program."""
_FORMAT: Final = 1

_TABLES: Final = (
    "create table searches (key text primary key, request text not null, started real not null, parts integer not null, "
    "answer text)",
    "create table parts (key text not null, part integer not null, account text not null, primary key (key, part))",
    "create table layouts (key text not null, choice text not null, step_time_s real not null, device_bytes real not null, "
    "value real not null, primary key (key, choice))",
)


@cache
def models_fingerprint() -> str:
    """Changes when the code or a constant that an answer depends on changes: answers of other models are not reused."""
    package = Path(__file__).resolve().parent.parent
    digest = hashlib.sha256(__version__.encode())
    folders = [package, package.parent / "hardware_profiles"]
    files = sorted(f for folder in folders for kind in ("*.py", "*.toml") for f in folder.rglob(kind))
    for file in files:
        if not {"report", "planning", "validation", "interop", "calibration"} & set(file.relative_to(package.parent).parts):
            digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()


def request_key(request: dict[str, Any]) -> str:
    """The same request under the same models has the same key."""
    text = json.dumps(request, sort_keys=True, default=str)
    return hashlib.sha256((models_fingerprint() + text).encode()).hexdigest()[:32]


class Store:
    """One search in a file that may hold many.

    Raises:
        InputError: the file cannot be opened, is damaged, or is no store; also from every method.
    """

    def __init__(self, path: Path, request: dict[str, Any]) -> None:
        self.path, self.key = path, request_key(request)
        self._request = json.dumps(request, sort_keys=True, default=str)
        try:
            # Statements commit by themselves and are in the log when they return: kill -9 cannot take them back.
            self._db = sqlite3.connect(path, timeout=30.0, isolation_level=None)
        except sqlite3.Error as error:
            raise self._refused(error) from None
        self._open()

    def _open(self) -> None:
        empty = not self.path.exists() or self.path.stat().st_size == 0
        if not empty and self._one("pragma application_id") != _APPLICATION:
            right = "name another file; a missing one is made"
            raise InputError([Violation("--store", str(self.path), "is a database of another program", right)])
        if not empty and self._one("pragma quick_check(1)") != "ok":
            raise self._refused("damaged")
        if not empty and self._one("pragma user_version") != _FORMAT:
            right = "name another file, or use the simpar that wrote it"
            raise InputError([Violation("--store", str(self.path), "is a store of another version of simpar", right)])
        self._run("pragma journal_mode = wal")
        self._run("pragma synchronous = normal")
        self._run("begin immediate")
        # Asked again inside the transaction: another search may have made the tables in the meantime.
        if self._one("pragma application_id") != _APPLICATION:
            for statement in _TABLES:
                self._run(statement)
            self._run(f"pragma application_id = {_APPLICATION}")
            self._run(f"pragma user_version = {_FORMAT}")
        self._run("commit")

    def _run(self, statement: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        try:
            return self._db.execute(statement, values).fetchall()
        except sqlite3.Error as error:
            raise self._refused(error) from None

    def _one(self, statement: str, values: Sequence[Any] = ()) -> Any:
        rows = self._run(statement, values)
        return rows[0][0] if rows else None

    def _refused(self, error: object) -> InputError:
        right = "name another file, or delete it to start anew"
        return InputError([Violation("--store", str(self.path), f"cannot be used: {error}", right)])

    def _read(self, text: str) -> Any:
        try:
            return json.loads(text)
        except ValueError:
            raise self._refused("an entry is damaged") from None

    def close(self) -> None:
        """Give the file back."""
        self._db.close()

    def of(self, space: str) -> Store:
        """The same file, for one of several spaces of this search."""
        found = copy(self)
        found.key = f"{self.key}/{space}"
        return found

    # -- the search --------------------------------------------------------------------------------------------------

    @property
    def answer(self) -> dict[str, Any] | None:
        """The finished answer of this very search, if there is one."""
        text = self._one("select answer from searches where key = ?", (self.key,))
        return dict(self._read(text)) if text else None

    @property
    def progress(self) -> tuple[int, int, int]:
        """(parts done, parts, layouts) of this search in all its spaces; zeros where it was never begun."""
        mine = f"where key = '{self.key}' or key like '{self.key}/%'"
        count = self._one(f"select sum(parts) from searches {mine}") or 0
        done = self._one(f"select count(*) from parts {mine}")
        return done, count, self._one(f"select count(*) from layouts {mine}")

    def begin(self, parts: int, *, resume: bool) -> int:
        """Start this search anew in `parts` parts, or go on with it; returns into how many parts it is cut."""
        if resume and (known := self._one("select parts from searches where key = ?", (self.key,))):
            return int(known)
        self._run("begin immediate")
        for table in ("searches", "parts", "layouts"):
            self._run(f"delete from {table} where key = ?", (self.key,))
        self._run("insert into searches values (?, ?, ?, ?, null)", (self.key, self._request, time.time(), parts))
        self._run("commit")
        return parts

    def finish(self, answer: dict[str, Any]) -> None:
        """Keep the answer."""
        row = (self.key, self._request, time.time(), json.dumps(answer))
        self._run("insert into searches values (?, ?, ?, 0, ?) on conflict(key) do update set answer = excluded.answer", row)

    def add(self, scored: Scored) -> None:
        """A simulated layout."""
        choice = json.dumps(scored.choice.flat(), sort_keys=True)
        row = (self.key, choice, scored.step_time_s, scored.device_bytes, scored.value)
        self._run("insert or replace into layouts values (?, ?, ?, ?, ?)", row)

    def layouts(self) -> Iterator[Scored]:
        """Every layout simulated so far, best first."""
        query = "select choice, step_time_s, device_bytes, value from layouts where key = ? order by value"
        for choice, seconds, device_bytes, value in self._run(query, (self.key,)):
            try:
                yield Scored(Choice.from_flat(self._read(choice)), seconds, device_bytes, value)
            except (KeyError, TypeError, ValueError):
                raise self._refused("an entry is damaged") from None

    def part_done(self, part: int, account: dict[str, Any]) -> None:
        """A part of the space is searched."""
        self._run("insert or replace into parts values (?, ?, ?)", (self.key, part, json.dumps(account)))

    def parts(self) -> dict[int, dict[str, Any]]:
        """Parts searched so far with their accounts."""
        rows = self._run("select part, account from parts where key = ?", (self.key,))
        return {part: self._read(account) for part, account in rows}


__all__ = ["Store", "models_fingerprint", "request_key"]
