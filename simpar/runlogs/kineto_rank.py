"""A Kineto trace of one rank, streamed."""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from simpar.boundary import reader
from simpar.errors import InputError
from simpar.interop.kineto import collective_name, collective_of, kernel_class
from simpar.interop.kineto_stream import EXPECTED, Head, stream
from simpar.runlogs.rank_trace import MOST_CALLS, UPDATE, Call, Mark, RankTrace, Spans, launched_at, steps_of

_STEP: Final = re.compile(r"^ProfilerStep#(\d+)$")
_WIRE: Final = re.compile(r"^(?:gloo|mpi|ucc|nccl|fake):(\w+)(?: (\d+)->(\d+))?")
_WORKS: Final = re.compile(r"^(?!autograd::|c10d::|fsdp::|profiler::)\w+::")
_IN_NAME: Final = re.compile(r"rank[_-]?(\d+)|[_-](\d+)\.(?:pt\.)?trace\.json", re.IGNORECASE)
_MOST_WORK: Final = 20_000_000


@reader("path", EXPECTED)
def read_rank(path: Path) -> RankTrace:
    """The trace at `path`.

    Raises:
        InputError: no such trace, or nothing ran in it.
    """
    head = Head()
    found = _Found(str(path))
    for event in stream(path, head):
        found.take(event)
    return found.rank(head)


class _Found:
    def __init__(self, file: str) -> None:
        self.file = file
        self.device, self.host = Spans(), Spans()
        self.correlations = array("q")
        self.launches: dict[int, float] = {}
        self.calls: list[tuple[str, str, float, float, int | None]] = []
        self.wires: list[tuple[str, str, float, float, int | None]] = []
        self.marks: dict[int, tuple[float, float]] = {}
        self.updates: list[tuple[float, float]] = []
        self.zero: float | None = None

    def take(self, event: Mapping[str, Any]) -> None:
        if event.get("ph") != "X":
            return
        category, name = str(event.get("cat", "")).lower(), str(event.get("name", ""))
        if category in ("python_function", "trace", "overhead"):
            return
        ts, duration = event.get("ts"), event.get("dur", 0.0)
        if not isinstance(ts, int | float) or not isinstance(duration, int | float) or not math.isfinite(ts + duration):
            raise InputError(f"{self.file}: event {name[:60]!r}: ts and dur must be finite numbers (microseconds)")
        self.zero = ts if self.zero is None else self.zero
        start, end = (ts - self.zero) * 1e-6, (ts - self.zero + max(duration, 0.0)) * 1e-6
        args = event.get("args")
        args = args if isinstance(args, dict) else {}
        if category in ("kernel", "gpu_memcpy", "gpu_memset"):
            self._kernel(name, category, args, start, end)
        elif category in ("cuda_runtime", "cuda_driver", "runtime"):
            if isinstance(correlation := args.get("correlation"), int):
                self.launches[correlation] = start
        elif category == "user_annotation" and (mark := _STEP.match(name)):
            self.marks[int(mark[1])] = (start, end)
        elif category == "user_annotation" and UPDATE.match(name):
            self.updates.append((start, end))
        elif wire := _WIRE.match(name):
            if len(self.wires) < MOST_CALLS and category != "gpu_user_annotation":
                source = int(wire[2]) if wire[2] and wire[1] == "recv" else None
                self.wires.append((_group(args), collective_name(wire[1]), start, end, source))
        elif category == "cpu_op" and _WORKS.match(name) and len(self.host.starts) < _MOST_WORK:
            self.host.add(start, end, communication=False)

    def _kernel(self, name: str, category: str, args: Mapping[str, Any], start: float, end: float) -> None:
        if len(self.device.starts) >= _MOST_WORK:
            raise InputError(f"{self.file}: holds more than {_MOST_WORK:,} kernels; expected the trace of a few steps")
        wire = kernel_class(name, category, args) == "nccl"
        self.device.add(start, end, wire)
        correlation = args.get("correlation")
        self.correlations.append(correlation if isinstance(correlation, int) else -1)
        if wire and len(self.calls) < MOST_CALLS:
            source = args.get("Src Rank")
            self.calls.append((_group(args), collective_of(name, args), start, end, source if isinstance(source, int) else None))

    def rank(self, head: Head) -> RankTrace:
        on_device = len(self.device.starts) > 0
        spans, calls = (self.device, self.calls) if on_device else (self.host, self.wires)
        if not on_device:
            for _, _, start, end, _ in self.wires:
                spans.add(start, end, communication=True)
        if not len(spans.starts):
            rule = "has no events of work" + (
                ", as a profiler writes that is exported after its last step" if not self.marks else ""
            )
            raise InputError(f"{self.file}: {rule}; expected {EXPECTED} called from on_trace_ready")
        notes = [f"{self.file}: ends inside its events; what is whole was read"] if head.cut else []
        ranges = [(n, *self.marks[n]) for n in sorted(self.marks)]
        launched = launched_at(self.correlations, self.launches) if on_device else np.full(len(spans.starts), np.nan)
        steps, marks, counted = steps_of(spans, ranges, self.updates, launched, on_device=on_device)
        if not counted:
            rule = "no ProfilerStep marks and no two updates of an optimizer: how many steps it holds is not known"
            notes.append(f"{self.file}: {rule}; call profiler.step() once per training step")
        if head.cut and len(steps) > 1:
            steps.pop()  # not whole, and shorter than it was
        if not steps:
            raise InputError(
                f"{self.file}: nothing ran inside its ProfilerStep marks; expected profiler.step() once per training step"
            )
        info = head.table.get("distributedInfo")
        info = info if isinstance(info, dict) else {}
        number = info.get("rank")
        if not isinstance(number, int) and (named := _IN_NAME.search(Path(self.file).name)):
            number = int(named[1] or named[2])
        world = info.get("world_size")
        return RankTrace(
            self.file, number if isinstance(number, int) else None, world if isinstance(world, int) else None,
            "cuda" if on_device else "cpu", steps, _ordered(calls, marks, _members(info)), notes, counted,
        )  # fmt: skip


def _group(args: Mapping[str, Any]) -> str:
    ranks = str(args.get("Process Group Ranks") or "")
    return ranks if ranks and "..." not in ranks else str(args.get("Process Group Name") or "")


def _members(info: Mapping[str, Any]) -> dict[str, str]:
    """Name of a process group -> its ranks as text."""
    groups = info.get("pg_config")
    return {
        str(g.get("pg_name")): str(g.get("ranks")) for g in groups if isinstance(g, dict) and g.get("ranks")
    } if isinstance(groups, list) else {}  # fmt: skip


def _ordered(calls: list[tuple[str, str, float, float, int | None]], marks: list[Mark], members: Mapping[str, str]) -> list[Call]:
    bounds = np.array([start for _, start, _ in marks])
    found = []
    for group, name, start, end, source in sorted(calls, key=lambda c: c[2]):
        place = int(np.searchsorted(bounds, start, side="right")) - 1
        if place >= 0:
            found.append(Call(members.get(group, group), name, marks[place][0], start, end, source))
    return found
