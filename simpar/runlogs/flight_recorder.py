"""Dumps of torch's flight recorder (NCCL, and gloo from 2.13): the collectives of each rank in order, and who is behind.

Fields: torch/csrc/distributed/c10d/FlightRecorder (schema 2.x): entries with process_group, collective_seq_id, profiling_name,
input_sizes, state, duration_ms. The pickle holds plain containers; the JSON variant has the same keys.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from statistics import median
from typing import Any, Final

from simpar.boundary import parse_json, read_text
from simpar.errors import InputError
from simpar.interop.inert_pickle import load_plain

_EXPECTED: Final = "a flight-recorder dump of torch.distributed"
_WIDTH: Final = {
    "Double": 8,
    "Long": 8,
    "Float": 4,
    "Int": 4,
    "Half": 2,
    "BFloat16": 2,
    "Short": 2,
    "Byte": 1,
    "Char": 1,
    "Bool": 1,
}


@dataclass(frozen=True, slots=True)
class Recorded:
    """One rank's dump.

    Attributes:
        last: process group -> number of the last collective it issued.
        unfinished: (group, number, name) of those issued and not completed.
        durations: (group, name, bytes) -> seconds, where the recorder timed them.
        counts: the same -> how many.
    """

    rank: int
    file: str
    last: dict[str, int]
    unfinished: tuple[tuple[str, int, str], ...]
    durations: dict[tuple[str, str, int], list[float]]
    counts: dict[tuple[str, str, int], int]


@dataclass
class Recorders:
    """All ranks' dumps."""

    ranks: list[Recorded]
    behind: dict[str, list[int]] = field(default_factory=dict)
    """Process group -> ranks that issued fewer collectives than others of it."""

    def as_json(self) -> dict[str, Any]:
        """The public object."""
        merged: dict[tuple[str, str, int], list[int]] = defaultdict(list)
        times: dict[tuple[str, str, int], list[float]] = defaultdict(list)
        for r in self.ranks:
            for key, n in r.counts.items():
                merged[key].append(n)
                times[key] += r.durations.get(key, [])
        return {
            "ranks": [
                {"rank": r.rank, "file": r.file, "last": r.last, "unfinished": [list(u) for u in r.unfinished[:20]]}
                for r in self.ranks
            ],
            "behind": self.behind,
            "collectives": [
                {"group": g, "name": n, "bytes": size or None, "calls_per_rank": max(counts),
                 "median_s": median(times[g, n, size]) if times[g, n, size] else None}
                for (g, n, size), counts in sorted(merged.items(), key=lambda item: -item[0][2] * max(item[1]))[:50]
            ],
        }  # fmt: skip

    def text(self) -> list[str]:
        """Lines for people."""
        lines = [f"flight recorder {len(self.ranks)} ranks, {sum(sum(r.counts.values()) for r in self.ranks)} collectives"]
        lines += [f"  group {g}: behind the others: rank {', '.join(map(str, ranks))}" for g, ranks in self.behind.items()]
        return lines


def is_recorder(path: Path) -> bool:
    """By its first bytes: a pickle, or JSON with entries."""
    with path.open("rb") as file:
        start = file.read(4096)
    return start[:1] == b"\x80" or (b'"entries"' in start and b'"traceEvents"' not in start)


def read_recorders(paths: Sequence[Path]) -> Recorders:
    """The dumps of the ranks of one job.

    Raises:
        InputError: a file is none, or wants to run something.
    """
    ranks = [_one(path, index) for index, path in enumerate(paths)]
    found = Recorders(ranks)
    for group in dict.fromkeys(g for r in ranks for g in r.last):
        mine = {r.rank: r.last[group] for r in ranks if group in r.last}
        most = max(mine.values())
        if late := sorted(rank for rank, number in mine.items() if number < most):
            found.behind[group] = late
    return found


def _one(path: Path, index: int) -> Recorded:
    with path.open("rb") as file:
        plain = file.read(1) == b"\x80"
    table = load_plain(path, _EXPECTED) if plain else parse_json(read_text(path), path, _EXPECTED)
    if not isinstance(table, Mapping) or not isinstance(table.get("entries"), list):
        raise InputError(f"{path}: holds no entries; expected {_EXPECTED}")
    named = re.search(r"(\d+)(?:\.json)?$", path.name)
    try:
        return _recorded(table["entries"], int(named[1]) if named else index, str(path))
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise InputError(f"{path}: an entry lacks what it needs ({error}); expected {_EXPECTED}") from None


def _recorded(entries: Sequence[Mapping[str, Any]], rank: int, file: str) -> Recorded:
    last: dict[str, int] = {}
    unfinished: list[tuple[str, int, str]] = []
    durations: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    counts: dict[tuple[str, str, int], int] = defaultdict(int)
    for entry in entries:
        group = str(entry["process_group"][1] or entry["process_group"][0])
        name = str(entry["profiling_name"]).partition(":")[2]
        number = int(entry["collective_seq_id"])
        if not entry.get("is_p2p"):
            last[group] = max(last.get(group, -1), number)
        size = sum(prod(int(d) for d in dims) * _WIDTH.get(str(dtype), 0)
                   for dims, dtype in zip(entry["input_sizes"], entry.get("input_dtypes") or [], strict=False))  # fmt: skip
        counts[group, name, size] += 1
        if entry.get("duration_ms"):
            durations[group, name, size].append(float(entry["duration_ms"]) / 1e3)
        if entry.get("state") != "completed" and not entry.get("retired"):
            unfinished.append((group, number, name))
    return Recorded(rank, file, last, tuple(unfinished), dict(durations), dict(counts))
