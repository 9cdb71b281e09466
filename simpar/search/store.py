"""Searches in a SQLite file: every finished layout and part is on disk before the next one starts."""

from __future__ import annotations

import hashlib
import json
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from simpar import __version__
from simpar.errors import InputError
from simpar.search.choice import Choice
from simpar.search.incumbents import Scored

_TABLES = """
create table if not exists searches (key text primary key, request text not null, started real not null, answer text);
create table if not exists parts (key text not null, part integer not null, account text not null, primary key (key, part));
create table if not exists layouts (
    key text not null, choice text not null, step_time_s real not null, device_bytes real not null, value real not null,
    primary key (key, choice)
);
"""


def models_fingerprint() -> str:
    """Changes when the code or a constant that prices layouts changes: answers of other models are not reused."""
    package = Path(__file__).resolve().parent.parent
    digest = hashlib.sha256(__version__.encode())
    folders = [package, package.parent / "hardware_profiles"]
    files = sorted(f for folder in folders for kind in ("*.py", "*.toml") for f in folder.rglob(kind))
    for file in files:
        if file.parts[-2] not in ("search", "report", "planning", "validation"):
            status = file.stat()
            digest.update(f"{file.name}:{status.st_size}:{status.st_mtime_ns}".encode())
    return digest.hexdigest()


def request_key(request: dict[str, Any]) -> str:
    """The same request under the same models has the same key."""
    text = json.dumps(request, sort_keys=True, default=str)
    return hashlib.sha256((models_fingerprint() + text).encode()).hexdigest()[:32]


class Store:
    """One file of searches.

    Raises:
        InputError: the file cannot be opened or is not a store.
    """

    def __init__(self, path: Path, request: dict[str, Any]) -> None:
        self.key = request_key(request)
        try:
            self._db = sqlite3.connect(path, timeout=30.0, isolation_level=None)
            # Every statement is durable when it returns, also under kill -9.
            self._db.execute("pragma journal_mode = wal")
            self._db.execute("pragma synchronous = normal")
            self._db.executescript(_TABLES)
            text = json.dumps(request, sort_keys=True, default=str)
            self._db.execute("insert or ignore into searches values (?, ?, ?, null)", (self.key, text, time.time()))
        except sqlite3.Error as error:
            raise InputError(f"--store {path}: {error}") from None

    def close(self) -> None:
        """Give the file back."""
        self._db.close()

    @property
    def answer(self) -> dict[str, Any] | None:
        """The finished answer of this very search, if there is one."""
        row = self._db.execute("select answer from searches where key = ?", (self.key,)).fetchone()
        return json.loads(row[0]) if row and row[0] else None

    def finish(self, answer: dict[str, Any]) -> None:
        """Keep the answer."""
        self._db.execute("update searches set answer = ? where key = ?", (json.dumps(answer), self.key))

    def forget(self) -> None:
        """Start this search anew."""
        for table in ("parts", "layouts"):
            self._db.execute(f"delete from {table} where key = ?", (self.key,))
        self._db.execute("update searches set answer = null where key = ?", (self.key,))

    def add(self, scored: Scored) -> None:
        """A simulated layout."""
        choice = json.dumps(scored.choice.flat(), sort_keys=True)
        row = (self.key, choice, scored.step_time_s, scored.device_bytes, scored.value)
        self._db.execute("insert or replace into layouts values (?, ?, ?, ?, ?)", row)

    def layouts(self) -> Iterator[Scored]:
        """Every layout simulated so far, best first."""
        query = "select choice, step_time_s, device_bytes, value from layouts where key = ? order by value"
        for choice, seconds, device_bytes, value in self._db.execute(query, (self.key,)):
            yield Scored(Choice.from_flat(json.loads(choice)), seconds, device_bytes, value)

    def part_done(self, part: int, account: dict[str, Any]) -> None:
        """A part of the space is searched."""
        self._db.execute("insert or replace into parts values (?, ?, ?)", (self.key, part, json.dumps(account)))

    def parts(self) -> dict[int, dict[str, Any]]:
        """Parts searched so far with their accounts."""
        rows = self._db.execute("select part, account from parts where key = ?", (self.key,))
        return {part: json.loads(account) for part, account in rows}


__all__ = ["Store", "models_fingerprint", "request_key"]
