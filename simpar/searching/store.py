"""Searches in a SQLite file: every finished layout and part is on disk before the next one starts."""

from __future__ import annotations

import hashlib
import json
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Final

from simpar import __version__
from simpar.errors import InputError, Violation
from simpar.searching.choice import Choice
from simpar.searching.incumbents import Scored
from simpar.specs.base import data_dir

_APPLICATION: Final = 0x73696D70
"""SQLite's application_id of a store ("simp"): tells it from the database of any other program."""
_FORMAT: Final = 4
SEED: Final = -1
"""The part under which the seed of a search is kept."""

_TABLES: Final = (
    "create table searches (key text primary key, request text not null, started real not null, parts integer not null, "
    "answer text, checksum text)",
    "create table parts (key text not null, part integer not null, account text not null, checksum text not null, "
    "primary key (key, part))",
    "create table layouts (key text not null, choice text not null, step_time_s real not null, device_bytes real not null, "
    "value real not null, checksum text not null, primary key (key, choice))",
    "create table bounds (key text not null, part integer not null, bound real not null, checksum text not null, "
    "primary key (key, part))",
)


_ELSEWHERE = frozenset({"_data", "api", "cli", "evidence", "interop", "live", "planning", "report"})
"""Parts of the package that no answer of a search depends on; the profiles in `_data` count on their own."""


@cache
def models_fingerprint() -> str:
    """Changes when the code or a constant that an answer depends on changes: answers of other models are not reused."""
    package = Path(str(resources.files("simpar")))
    digest = hashlib.sha256(__version__.encode())
    own = [f for kind in ("*.py", "*.toml") for f in package.rglob(kind)]
    kept = [f for f in own if f.relative_to(package).parts[0] not in _ELSEWHERE]
    for file in [*sorted(kept), *sorted(data_dir("hardware_profiles").rglob("*.toml"))]:
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()


def request_key(request: dict[str, Any]) -> str:
    """The same request under the same models has the same key."""
    text = json.dumps(request, sort_keys=True, default=str)
    return hashlib.sha256((models_fingerprint() + text).encode()).hexdigest()[:32]


def checksum(*values: object) -> str:
    """Of a row: a bit that flips in a number leaves a database that is sound and a row that is not."""
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]


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
        empty = not self.path.exists() or self.path.stat().st_size == 0 or self._unborn()
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

    def _unborn(self) -> bool:
        """Whether it is a database without a table: a search was killed while it made its store."""
        return bool(self._one("pragma application_id") == 0 and self._one("select count(*) from sqlite_master") == 0)

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

    def _read(self, text: str) -> dict[str, Any]:
        try:
            found = json.loads(text)
        except (ValueError, TypeError, RecursionError):
            raise self._refused("an entry is damaged") from None
        if not isinstance(found, dict):
            raise self._refused("an entry is damaged")
        return found

    def _verify(self, stored: object, *values: object) -> None:
        try:
            right = checksum(*values)
        except (TypeError, ValueError):  # bytes where a text or a number should be
            right = ""
        if stored != right:
            raise self._refused("an entry is damaged: its checksum is wrong")

    def doubted(self, reason: str) -> InputError:
        """What to raise where an entry, whole as it is, does not say what is so."""
        return self._refused(f"an entry is wrong: {reason}")

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
        rows = self._run("select answer, checksum from searches where key = ?", (self.key,))
        if not rows or rows[0][0] is None:
            return None
        text, stored = rows[0]
        self._verify(stored, self.key, text)
        return self._read(text)

    @property
    def progress(self) -> tuple[int, int, int]:
        """(parts done, parts, layouts) of this search in all its spaces; zeros where it was never begun."""
        count = self._one(f"select sum(parts) from searches where {self._mine}") or 0
        done = self._one(f"select count(*) from parts where part != {SEED} and {self._mine}")
        return done, count, self._one(f"select count(*) from layouts where {self._mine}")

    @property
    def _mine(self) -> str:
        """Rows of this search in all its spaces."""
        return f"(key = '{self.key}' or key like '{self.key}/%')"

    def begin(self, parts: int, *, resume: bool) -> int:
        """Start this search anew in `parts` parts, or go on with it; returns into how many parts it is cut."""
        if resume and (known := self._one("select parts from searches where key = ?", (self.key,))):
            return int(known)
        self._run("begin immediate")
        for table in ("searches", "parts", "layouts", "bounds"):
            self._run(f"delete from {table} where key = ?", (self.key,))
        self._run("insert into searches values (?, ?, ?, ?, null, null)", (self.key, self._request, time.time(), parts))
        self._run("commit")
        return parts

    def finish(self, answer: dict[str, Any]) -> None:
        """Keep the answer."""
        text = json.dumps(answer)
        row = (self.key, self._request, time.time(), text, checksum(self.key, text))
        update = "update set answer = excluded.answer, checksum = excluded.checksum"
        self._run(f"insert into searches values (?, ?, ?, 0, ?, ?) on conflict(key) do {update}", row)

    def add(self, scored: Scored) -> None:
        """A simulated layout."""
        choice = json.dumps(scored.choice.flat(), sort_keys=True)
        row = (self.key, choice, float(scored.step_time_s), float(scored.device_bytes), float(scored.value))
        self._run("insert or replace into layouts values (?, ?, ?, ?, ?, ?)", (*row, checksum(*row)))

    def layouts(self) -> Iterator[Scored]:
        """Every layout simulated so far, best first."""
        query = "select choice, step_time_s, device_bytes, value, checksum from layouts where key = ? order by value"
        for choice, seconds, device_bytes, value, stored in self._run(query, (self.key,)):
            self._verify(stored, self.key, choice, seconds, device_bytes, value)
            try:
                yield Scored(Choice.from_flat(self._read(choice)), seconds, device_bytes, value)
            except (KeyError, TypeError, ValueError):
                raise self._refused("an entry is damaged") from None

    def part_done(self, part: int, account: dict[str, Any]) -> None:
        """A part of the space is searched."""
        row = (self.key, part, json.dumps(account))
        self._run("insert or replace into parts values (?, ?, ?, ?)", (*row, checksum(*row)))

    def bounded(self, bounds: Mapping[int, float]) -> None:
        """What nothing in a part ranks before, but for layouts that were simulated."""
        self._run("begin immediate")
        for part, bound in bounds.items():
            row = (self.key, part, float(bound))
            self._run("insert or replace into bounds values (?, ?, ?, ?)", (*row, checksum(*row)))
        self._run("commit")

    def bounds(self) -> dict[int, float]:
        """What `bounded` was told last, by part."""
        found = {}
        for part, bound, stored in self._run("select part, bound, checksum from bounds where key = ?", (self.key,)):
            self._verify(stored, self.key, part, bound)
            found[part] = float(bound)
        return found

    def parts(self) -> dict[int, dict[str, Any]]:
        """Parts searched so far with their accounts."""
        found = {}
        for part, account, stored in self._run("select part, account, checksum from parts where key = ?", (self.key,)):
            self._verify(stored, self.key, part, account)
            found[part] = self._read(account)
        return found


__all__ = ["SEED", "Store", "models_fingerprint", "request_key"]
