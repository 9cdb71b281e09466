"""A step as a Perfetto (Chrome trace event) file: one process per pipeline rank, one thread per stream.

Times are written to the nanosecond, as viewers keep them, so that slices that touch in the timeline touch in the trace.
Slices ("X") carry stage, micro-batch, layer and the terms of their price; every send is a flow ("s", "t", "f") from the
op that made the tensor, through the send, to the op that uses it; memory by category is a counter ("C"). Format: "Trace
Event Format" of the Chromium project.
"""

from __future__ import annotations

import gzip
import heapq
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from json.encoder import encode_basestring_ascii as quoted
from operator import itemgetter
from pathlib import Path

import numpy as np

from simpar.output import write_file
from simpar.program.program import IntArray, OpKind, Program
from simpar.report.ledger import price_terms
from simpar.report.shown import MAX_ROLES, ShownRole, shown_roles, subset_note
from simpar.report.streams import ordered_streams
from simpar.result.memory import CATEGORIES, RankMemory
from simpar.result.result import Result

_LEVEL = 5
"""Of gzip; 112 MB of trace: 14.0 MB in 0.5 s at level 1, 10.6 MB in 0.9 s at 5, 9.7 MB in 1.4 s at 6."""
_Event = tuple[int, str]
"""(ns, its line)"""
_SENDS = (OpKind.SEND_FORWARD, OpKind.SEND_BACKWARD)


def write_trace(result: Result, path: Path) -> None:
    """Write the gzipped trace of one step.

    Raises:
        InputError: the file cannot be written.
    """
    packed = io.BytesIO()
    # No time stamp inside: the same run gives the same bytes. A line at a time: the whole text would be held several times over.
    with gzip.GzipFile(fileobj=packed, mode="wb", compresslevel=_LEVEL, mtime=0) as file:
        for line in _lines(result):
            file.write(line.encode())
    write_file(path, packed.getbuffer(), "--trace")


@dataclass(frozen=True, slots=True)
class _Slice:
    """Where an op is shown: pid and tid, and its pipeline."""

    pid: int
    tid: int
    pipeline: int


def trace(result: Result) -> str:
    """The trace as JSON text; events sorted by time, metadata first."""
    return "".join(_lines(result))


def _lines(result: Result) -> Iterator[str]:
    roles = shown_roles(result)
    writer = _Writer(result, roles)
    counters = [_counters(shown, memory) for shown in roles for memory in result.memory if memory.rank == shown.pipeline_rank]
    # Of events at one moment the earlier list's come first: slices before the flows that bind to them.
    timed = heapq.merge(*writer.slices(), writer.flows(), *counters, key=itemgetter(0))
    about = {
        "scenario": result.layout.scenario.name, "step_time_s": result.step_time_s, "world_size": result.world_size,
        "schedule": result.schedule_name, "note": subset_note(result, roles),
    }  # fmt: skip
    yield f'{{"displayTimeUnit":"ms","otherData":{json.dumps(about)},"traceEvents":['
    between = "\n"
    for line in chain(_names(result.program, roles), map(itemgetter(1), timed)):
        yield between + line
        between = ",\n"
    yield "\n]}\n"


def _names(program: Program, roles: tuple[ShownRole, ...]) -> Iterator[str]:
    """Metadata: names and order of processes and threads. Threads count from 1: viewers keep 0 for the idle thread."""

    def meta(what: str, pid: int, tid: int, **args: object) -> str:
        return json.dumps({"ph": "M", "name": what, "pid": pid, "tid": tid, "args": args}, separators=(",", ":"))

    for index, shown in enumerate(roles):
        pid = _pid(shown)
        yield meta("process_name", pid, 0, name=shown.title)
        yield meta("process_sort_index", pid, 0, sort_index=index)
        for tid, stream in enumerate(ordered_streams(program, shown.role), start=1):
            yield meta("thread_name", pid, tid, name=program.streams[stream].kind)
            yield meta("thread_sort_index", pid, tid, sort_index=tid)


def _pid(shown: ShownRole) -> int:
    """The pipeline rank; the second pipeline shown of an expanded program counts on from there."""
    return shown.pipeline * MAX_ROLES + shown.pipeline_rank


def _us(nanoseconds: int) -> str:
    """Microseconds with three decimals."""
    return f"{nanoseconds // 1000}.{nanoseconds % 1000:03d}"


class _Writer:
    """Slices and flows of one result."""

    def __init__(self, result: Result, roles: tuple[ShownRole, ...]) -> None:
        self.program = result.program
        self.start: list[int] = np.rint(result.timeline.start * 1e9).astype(np.int64).tolist()
        self.finish: list[int] = np.rint(result.timeline.finish * 1e9).astype(np.int64).tolist()
        self.terms = [
            json.dumps({name: round(seconds * 1e6, 4) for name, seconds in terms}, separators=(",", ":"))
            for terms in price_terms(result)
        ]
        self.at: dict[int, list[_Slice]] = {}
        self.lanes: list[tuple[_Slice, list[int]]] = []
        for shown in roles:
            for tid, stream in enumerate(ordered_streams(result.program, shown.role), start=1):
                lane = _Slice(_pid(shown), tid, shown.pipeline), result.program.ops_at(stream).tolist()
                self.lanes.append(lane)
                for op in lane[1]:
                    self.at.setdefault(op, []).append(lane[0])

    def slices(self) -> list[Iterator[_Event]]:
        """One slice per op and stream that it holds; a list for every stream."""
        program = self.program
        fields = (program.stage, program.microbatch, program.layer, program.kind, program.price)
        columns = [column.tolist() for column in fields]
        return [self._slices(place, ops, columns) for place, ops in self.lanes]

    def _slices(self, place: _Slice, ops: list[int], columns: list[list[int]]) -> Iterator[_Event]:
        start, finish, kinds = self.start, self.finish, [k.name.lower() for k in OpKind]
        stage, microbatch, layer, kind, price = columns
        for op in sorted(ops, key=start.__getitem__):
            name = quoted(self.program.label(op).rpartition("@")[0])
            yield (
                start[op],
                (
                    f'{{"ph":"X","pid":{place.pid},"tid":{place.tid},"ts":{_us(start[op])},"dur":{_us(finish[op] - start[op])},'
                    f'"name":{name},"cat":"{kinds[kind[op]]}","args":{{"op":{op},"stage":{stage[op]},'
                    f'"microbatch":{microbatch[op]},"layer":{layer[op]},"terms_us":{self.terms[price[op]]}}}}}'
                ),
            )

    def flows(self) -> list[_Event]:
        """Producer, send and consumer of every send between shown ranks."""
        found: list[_Event] = []
        program = self.program
        sends = np.flatnonzero(np.isin(program.kind, [int(k) for k in _SENDS]))
        wanted = {int(s) for s in sends} & self.at.keys()
        consumers = self._consumers(wanted)
        number = 0
        for send in sorted(wanted):
            for source in {p.pipeline: p for p in self.at[send]}.values():
                producer = self._producer(send, source)
                target = self._consumer(consumers.get(send, []), source)
                if producer is None or target is None:
                    continue
                number += 1
                op, place = producer
                consumer, there = target
                ends = (("s", max(self.finish[op] - 1, self.start[op]), place), ("t", self.start[send], source),
                        ("f", self.start[consumer], there))  # fmt: skip
                for letter, at, where in ends:
                    line = f'{{"ph":"{letter}","id":{number},"pid":{where.pid},"tid":{where.tid},"ts":{_us(at)},'
                    found.append((at, line + '"name":"send","cat":"send","bp":"e"}'))
        return sorted(found, key=itemgetter(0))

    def _consumers(self, sends: set[int]) -> dict[int, list[int]]:
        """Send -> ops that wait for it."""
        program = self.program
        found: dict[int, list[int]] = {}
        heads: IntArray = np.repeat(np.arange(program.num_ops), np.diff(program.dep_ptr))
        mine = np.isin(program.dep_ops, np.fromiter(sends, dtype=np.int64, count=len(sends)))
        for op, send in zip(heads[mine].tolist(), program.dep_ops[mine].tolist(), strict=True):
            found.setdefault(send, []).append(op)
        return found

    def _producer(self, send: int, source: _Slice) -> tuple[int, _Slice] | None:
        """The op whose result is sent: the last of its stream with a length, up to the op that the send waits for."""
        program = self.program
        for op in program.dep_ops[program.dep_ptr[send] : program.dep_ptr[send + 1]].tolist():
            place = next((p for p in self.at.get(op, []) if p.pid == source.pid), None)
            if place is None:
                continue
            while self.finish[op] == self.start[op] and (before := self._before(op)) is not None:
                op = before
            return op, place
        return None

    def _before(self, op: int) -> int | None:
        """The compute op that `op` waits for last, on the same rank."""
        program = self.program
        deps = program.dep_ops[program.dep_ptr[op] : program.dep_ptr[op + 1]].tolist()
        own = [d for d in deps if d in self.at and program.role[d] == program.role[op]]
        return max(own, key=lambda d: self.finish[d], default=None)

    def _consumer(self, ops: list[int], source: _Slice) -> tuple[int, _Slice] | None:
        """The first op of another rank of the same pipeline that uses the tensor, one with a length if there is one."""
        found = [
            (self.finish[op] == self.start[op], self.start[op], op, place)
            for op in ops
            for place in self.at.get(op, [])
            if place.pipeline == source.pipeline and place.pid != source.pid
        ]
        if not found:
            return None
        *_, op, place = min(found, key=lambda f: f[:3])
        return op, place


def _counters(shown: ShownRole, memory: RankMemory) -> Iterator[_Event]:
    """Memory of a shown pipeline rank, in bytes by category, whenever it changes."""
    # An expanded run's memory is that of the first pipeline.
    if shown.pipeline:
        return
    for at, values in memory_changes(memory):
        amounts = "{" + ",".join([f'"{name}":{value}' for name, value in values.items()]) + "}"
        yield at, f'{{"ph":"C","pid":{_pid(shown)},"ts":{_us(at)},"name":"memory (bytes)","args":{amounts}}}'


def memory_changes(memory: RankMemory) -> Iterator[tuple[int, dict[str, int]]]:
    """(ns, bytes by category) after each moment at which something changes."""
    at = np.rint(memory.times * 1e9).astype(np.int64)
    last = np.flatnonzero(np.append(np.diff(at) != 0, True))
    used = [i for i in range(len(CATEGORIES)) if memory.dynamic[:, i].any()]
    static: dict[str, int] = {}
    for name, amount in memory.static:
        static[name] = static.get(name, 0) + round(amount)
    table = np.rint(memory.dynamic[last][:, used]).astype(np.int64).tolist()
    names = [CATEGORIES[i] for i in used]
    for moment, row in zip(at[last].tolist(), table, strict=True):
        values = dict(static)
        for name, amount in zip(names, row, strict=True):
            values[name] = values.get(name, 0) + amount
        yield moment, values
