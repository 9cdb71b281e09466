"""Chakra execution traces: the predicted step of every rank as a graph that others replay (ASTRA-sim 2).

Schema: mlcommons/chakra et_def.proto of v0.0.4; a file is a stream of length-delimited messages, GlobalMetadata first, then nodes.
Attribute types are those that the feeder reads. Sizes as ASTRA-sim takes them: an all-gather's is one rank's share of the result.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from heapq import heapify, heappop, heappush
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np

from simpar.errors import InputError, Violation
from simpar.parallel.keys import Send
from simpar.parallel.traffic import calls_of, send_collectives
from simpar.program.program import OpKind
from simpar.result.interpret import Priced
from simpar.specs.scenario import Scenario
from simpar.step import prepare, run

MOST_NODES: Final = 5_000_000
"""Over all files."""
COMP, SEND, RECV, COLL = 4, 5, 6, 7
TYPES: Final = {"all_reduce": 0, "all_gather": 2, "broadcast": 5, "all_to_all": 6, "reduce_scatter": 7}
"""CollectiveCommType."""
_GROUPS: Final = {"dp": "dp_cp"}
"""Dimension of a collective -> group of the mesh, where the names differ."""


@dataclass(slots=True)
class Node:
    """One node of a role's graph; ranks of the role differ in whom they talk to.

    Attributes:
        kind: COMP, SEND, RECV or COLL.
        deps: ids of the nodes that it waits for.
        dimension: group of a collective.
        peer: role that is sent to or received from.
        tag: the same on both sides of a send.
    """

    id: int
    name: str
    kind: int
    deps: tuple[int, ...]
    start_us: int
    duration_us: int
    bytes: int = 0
    collective: str = ""
    dimension: str = ""
    peer: int = -1
    tag: int = 0


@dataclass
class Graph:
    """A role's nodes in an order that respects their dependencies."""

    nodes: list[Node] = field(default_factory=list)
    last: dict[int, int] = field(default_factory=dict)
    """Op of the program -> id of its last node."""

    def add(self, name: str, kind: int, deps: set[int], span: tuple[float, float], **more: Any) -> int:
        """A node after `deps`; times of whole microseconds whose sum does not drift."""
        start, end = (round(t * 1e6) for t in span)
        node = Node(len(self.nodes) + 1, name, kind, tuple(sorted(deps)), start, max(end - start, 0), **more)
        self.nodes.append(node)
        return node.id


# -- graphs ----------------------------------------------------------------------------------------------------------------


def graphs(priced: Priced) -> dict[int, Graph]:
    """Role -> its graph, of a program lowered at detail "op"."""
    program, timeline = priced.program, run(priced)
    sends = np.isin(program.kind, [int(OpKind.SEND_FORWARD), int(OpKind.SEND_BACKWARD)])
    waits = _receivers(priced, sends)
    found: dict[int, Graph] = {}
    for role in sorted(set(program.role.tolist())):
        graph = found[role] = Graph()
        before = _before(priced, role)
        received: dict[int, int] = {}
        for op in _order(priced, role, timeline.start, before):
            span = float(timeline.start[op]), float(timeline.finish[op])
            deps = {graph.last[b] for b in before.get(op, ()) if b in graph.last}
            for dep in program.dep_ops[program.dep_ptr[op] : program.dep_ptr[op + 1]].tolist():
                if dep in graph.last:
                    deps.add(graph.last[dep])
                elif sends[dep] and program.role[dep] != role:
                    if dep not in received:
                        when = float(timeline.start[dep]), float(timeline.finish[dep])
                        sender = int(program.role[dep])
                        received[dep] = graph.add("receive", RECV, set(), when, bytes=_size(priced, dep), peer=sender, tag=dep)
                    deps.add(received[dep])
            graph.last[op] = _nodes(priced, graph, op, deps, span, waits.get(op))
    return found


def _before(priced: Priced, role: int) -> dict[int, list[int]]:
    """Op -> the one before it on each of its streams."""
    program = priced.program
    found: dict[int, list[int]] = {}
    for stream in program.role_streams.get(role, ()):
        ops = program.ops_at(stream).tolist()
        for first, second in pairwise(ops):
            found.setdefault(second, []).append(first)
    return found


def _order(priced: Priced, role: int, starts: Any, before: dict[int, list[int]]) -> Iterator[int]:
    """The role's ops, each after those that it waits for, by start where that leaves a choice."""
    program = priced.program
    ops = np.flatnonzero(program.role == role).tolist()
    mine = set(ops)
    waits = {op: {*before.get(op, ())} for op in ops}
    for op in ops:
        waits[op] |= mine & {*program.dep_ops[program.dep_ptr[op] : program.dep_ptr[op + 1]].tolist()}
    after: dict[int, list[int]] = {}
    for op, deps in waits.items():
        for dep in deps:
            after.setdefault(dep, []).append(op)
    ready = [(float(starts[op]), op) for op in ops if not waits[op]]
    heapify(ready)
    while ready:
        _, op = heappop(ready)
        yield op
        for other in after.get(op, ()):
            waits[other].discard(op)
            if not waits[other]:
                heappush(ready, (float(starts[other]), other))


def _receivers(priced: Priced, sends: Any) -> dict[int, int]:
    """Send -> the role that waits for it."""
    program = priced.program
    found: dict[int, int] = {}
    for op in range(program.num_ops):
        for dep in program.dep_ops[program.dep_ptr[op] : program.dep_ptr[op + 1]].tolist():
            if sends[dep] and program.role[dep] != program.role[op]:
                found[dep] = int(program.role[op])
    return found


def _size(priced: Priced, op: int) -> int:
    key = priced.program.price_keys[priced.program.price[op]]
    return round(send_collectives(priced.layout, key)[0].bytes) if isinstance(key, Send) else 0


def _nodes(priced: Priced, graph: Graph, op: int, deps: set[int], span: tuple[float, float], receiver: int | None) -> int:
    """The nodes of an op, one after the other; the id of the last."""
    program, key = priced.program, priced.program.price_keys[priced.program.price[op]]
    name = program.label(op)
    calls = calls_of(priced.layout, key)
    if isinstance(key, Send):
        if receiver is None:
            return graph.add(name, COMP, deps, span)
        return graph.add(name, SEND, deps, span, bytes=round(calls[0].bytes), peer=receiver, tag=op)
    if not calls:
        return graph.add(name, COMP, deps, span)
    total, at, last = sum(c.bytes for c in calls) or 1.0, span[0], 0
    for call in calls:
        end = at + (span[1] - span[0]) * call.bytes / total
        last = graph.add(name, COLL, deps if not last else {last}, (at, end), bytes=round(call.bytes), collective=call.name,
                         dimension=call.dimension)  # fmt: skip
        at = end
    return last


# -- protobuf --------------------------------------------------------------------------------------------------------------


def varint(value: int) -> bytes:
    """A whole number of at least 0."""
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


def _number(field_number: int, value: int) -> bytes:
    return varint(field_number << 3) + varint(value) if value else b""


def _bytes(field_number: int, value: bytes) -> bytes:
    return varint(field_number << 3 | 2) + varint(len(value)) + value


def attribute(name: str, kind: int, value: int | bool | str) -> bytes:
    """AttributeProto: 7 int32, 9 int64, 13 uint64, 27 bool, 29 string; a value of 0 is written too, as it sits in a oneof."""
    body = _bytes(29, value.encode()) if isinstance(value, str) else varint(kind << 3) + varint(int(value))
    return _bytes(10, _bytes(1, name.encode()) + body)


def message(node: Node, rank: int, groups: dict[tuple[int, ...], int], peers: Any) -> bytes:
    """A node of `rank`'s file."""
    found = _number(1, node.id) + _bytes(2, node.name.encode()) + _number(3, node.kind)
    if node.deps:
        found += _bytes(5, b"".join(map(varint, node.deps)))
    found += _number(6, node.start_us) + _number(7, node.duration_us) + attribute("is_cpu_op", 27, False)
    if node.kind in (SEND, RECV):
        peer = peers.at_role(rank, node.peer)
        ends = (rank, peer) if node.kind == SEND else (peer, rank)
        found += attribute("comm_src", 7, ends[0]) + attribute("comm_dst", 7, ends[1]) + attribute("comm_tag", 7, node.tag)
        return found + attribute("comm_size", 9, node.bytes)
    if node.kind == COLL:
        members = peers.members(rank, node.dimension)
        size = node.bytes // len(members) if node.collective == "all_gather" else node.bytes
        number = groups.setdefault(members, len(groups) + 1)
        found += attribute("comm_type", 9, TYPES.get(node.collective, 0)) + attribute("comm_size", 9, max(size, 1))
        return found + attribute("pg_name", 29, str(number))
    return found + attribute("num_ops", 9, 0) + attribute("tensor_size", 13, 0)


class Peers:
    """Ranks of a layout's groups and of other roles; a role is a pipeline rank, or a rank of its own."""

    def __init__(self, priced: Priced, roles: int) -> None:
        self.mesh, self.shards = priced.layout.mesh, priced.layout.plan.shard_size
        self.folded = roles == priced.layout.plan.pp and roles != self.mesh.world_size
        self.members = lru_cache(maxsize=None)(self._members)

    def role(self, rank: int) -> int:
        """The role of a rank."""
        return self.mesh.coordinates(rank)["pp"] if self.folded else rank

    def at_role(self, rank: int, role: int) -> int:
        """The rank of `role` that has the other coordinates of `rank`."""
        at = self.mesh.coordinates(rank)
        return self.mesh.rank(tp=at["tp"], cp=at["cp"], dp=at["dp"], pp=role) if self.folded else role

    def _members(self, rank: int, dimension: str) -> tuple[int, ...]:
        return self.mesh.group_of(rank, _GROUPS.get(dimension, dimension), self.shards)


def write(scenario: Scenario, out: Path) -> list[Path]:
    """Write step.<rank>.et of every rank and comm_groups.json into the folder `out`.

    Raises:
        InputError: parts of several kinds, more nodes than can be written, or the folder cannot be.
    """
    scenario.check_one_kind("the format has one kind of rank")
    priced = prepare(scenario, detail="op")
    found = graphs(priced)
    peers = Peers(priced, len(found))
    world = priced.layout.mesh.world_size
    total = sum(len(found[peers.role(rank)].nodes) for rank in range(world)) if world <= MOST_NODES else MOST_NODES + 1
    if total > MOST_NODES:
        rule = f"has {total:,} nodes over its ranks, more than the {MOST_NODES:,} that are written"
        raise InputError([Violation("cluster.num_nodes", scenario.cluster.num_nodes, rule, "fewer GPUs, layers or micro-batches")])
    groups: dict[tuple[int, ...], int] = {}
    paths = []
    try:
        out.mkdir(parents=True, exist_ok=True)
        for rank in range(world):
            path = out / f"step.{rank}.et"
            path.write_bytes(b"".join(_file(found[peers.role(rank)], rank, groups, peers)))
            paths.append(path)
        table = {str(number): list(members) for members, number in groups.items()}
        (out / "comm_groups.json").write_text(json.dumps(table) + "\n", encoding="utf-8")
    except OSError as error:
        rule = f"cannot be written: {error.strerror or error}"
        raise InputError([Violation("--out", str(out), rule, "a folder")]) from None
    return [*paths, out / "comm_groups.json"]


def _file(graph: Graph, rank: int, groups: dict[tuple[int, ...], int], peers: Peers) -> Iterator[bytes]:
    for body in (_bytes(1, b"0.0.4"), *(message(node, rank, groups, peers) for node in graph.nodes)):
        yield varint(len(body)) + body
