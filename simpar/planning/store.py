"""Finished repetitions in SQLite, so that an interrupted run goes on where it stopped."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from simpar.errors import InputError
from simpar.planning.outcome import Outcome
from simpar.planning.run_model import RunModel

_TABLE = """
create table if not exists checked_repetitions (
    run text not null, seed integer not null, repetition integer not null, outcome text not null,
    checksum text not null, primary key (run, seed, repetition)
)
"""
_VERSION = "1"
"""Raised when the simulation changes what the same numbers come to."""


def run_key(model: RunModel) -> str:
    """A fingerprint of everything the repetitions of `model` depend on, but the seed."""
    return hashlib.sha256(f"{_VERSION} {model!r}".encode()).hexdigest()[:32]


class RepetitionStore:
    """Outcomes by (run, seed, repetition) in the SQLite file at `path`.

    Raises:
        InputError: the file cannot be opened, or is not SQLite.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = path
        try:
            self._db = sqlite3.connect(path)
            self._db.execute(_TABLE)
            self._db.commit()
        except sqlite3.Error as error:
            raise InputError(f"--store {path}: cannot be used as a store: {error}") from None

    def __enter__(self) -> RepetitionStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._db.commit()  # what is finished stays, whatever stopped the rest
        self._db.close()

    def load(self, run: str, seed: int) -> dict[int, Outcome]:
        """The finished repetitions of `run`."""
        try:
            query = "select repetition, outcome, checksum from checked_repetitions where run = ? and seed = ?"
            rows = self._db.execute(query, (run, seed))
            found = {}
            for repetition, text, stored in rows:
                if stored != _checksum(run, seed, repetition, text):
                    raise ValueError("its checksum is wrong")
                found[int(repetition)] = _decode(json.loads(text))
        except (sqlite3.Error, ValueError, TypeError, KeyError, AttributeError) as error:
            raise InputError(f"--store {self._path}: an entry is damaged: {error}; delete the file to start anew") from None
        return found

    def save(self, run: str, seed: int, repetition: int, outcome: Outcome) -> None:
        """Keep one finished repetition."""
        text = json.dumps(_encode(outcome))
        row = (run, seed, repetition, text)
        try:
            self._db.execute("insert or replace into checked_repetitions values (?, ?, ?, ?, ?)", (*row, _checksum(*row)))
        except sqlite3.Error as error:
            raise InputError(f"--store {self._path}: cannot be written: {error}") from None

    def commit(self) -> None:
        """Make what was saved safe."""
        self._db.commit()


def _checksum(*values: object) -> str:
    """Of a row: a bit that flips in a number leaves a database that is sound and a row that is not."""
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]


def _encode(outcome: Outcome) -> dict[str, Any]:
    table = {key: value for key, value in asdict(outcome).items() if key not in ("marks", "progress", "spans")}
    table["busy"] = [[phase, stage, seconds] for (phase, stage), seconds in outcome.busy.items()]
    return table


def _decode(table: dict[str, Any]) -> Outcome:
    table["busy"] = {(int(phase), int(stage)): float(seconds) for phase, stage, seconds in table["busy"]}
    table["phase_s"], table["stage_s"] = tuple(table["phase_s"]), tuple(table["stage_s"])
    return Outcome(**table)
