"""One rank's timeline as slices of a few kinds, predicted or measured: what a trace comparison works on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from simpar.parallel.beside import op_of
from simpar.parallel.keys import BlockOp, Compute, Gather, LaunchGap, Offload, OptimizerStep, Overlapped, Reduce, Send, TiedReduce
from simpar.parallel.traffic import calls_of, send_collectives
from simpar.parallel.work import AttentionWork, Collective, ExpertExchange, Gemm, GroupedGemm, LocalOp
from simpar.program.program import OpKind
from simpar.result.interpret import Priced
from simpar.result.result import Result

COMPUTE: Final = ("gemm", "attention", "memory_bound", "optimizer")
"""Kernel classes of the compute stream."""
DIMENSIONS: Final = ("tp", "cp", "ep", "dp", "pp", "other")
"""Communication by parallel dimension; "other": a group that is none of the layout's."""
_TERMS: Final = {"matmul": "gemm", "expert_matmul": "gemm", "recompute": "gemm", "attention": "attention", "launch": "launch",
                 "optimizer": "optimizer", "offload": "copy", **{d: d for d in DIMENSIONS}}  # fmt: skip
"""Ledger category -> kind, for ops that hold several."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Something that ran on one rank.

    Attributes:
        start_s, end_s: seconds since the begin of the step.
        kind: one of COMPUTE, of DIMENSIONS, "copy" (host and device memory) or "launch" (the host is late).
        name: op or kernel.
        lane: stream.
        phase: F, B, I or W where known.
        layer, microbatch: where known, else -1.
        collective: kind of collective, "" for others.
        bytes: message as nccl-tests count it, 0 where not known.
        ready_s: when the host had issued it; none = not known.
    """

    start_s: float
    end_s: float
    kind: str
    name: str
    lane: str
    phase: str = ""
    layer: int = -1
    microbatch: int = -1
    collective: str = ""
    bytes: float = 0.0
    ready_s: float | None = None

    @property
    def seconds(self) -> float:
        """Duration."""
        return self.end_s - self.start_s

    def moved(self, by_s: float) -> Slice:
        """The same, later."""
        ready = None if self.ready_s is None else self.ready_s + by_s
        return replace(self, start_s=self.start_s + by_s, end_s=self.end_s + by_s, ready_s=ready) if by_s else self


def predicted_slices(priced: Priced, result: Result, role: int) -> list[Slice]:
    """What simpar expects `role` to run, by start. The program must be lowered at detail "op"."""
    program, timeline = priced.program, result.timeline
    found: list[Slice] = []
    for stream in program.role_streams.get(role, ()):
        lane = program.streams[stream].kind
        for op in program.ops_at(stream).tolist():
            is_send = program.kind[op] in (OpKind.SEND_FORWARD, OpKind.SEND_BACKWARD)
            if is_send and lane == "compute":
                continue  # a blocking send holds this stream too; it is on its own one already
            start, end = float(timeline.start[op]), float(timeline.finish[op])
            base = Slice(start, end, "memory_bound", program.label(op).rpartition("@")[0], lane,
                         layer=int(program.layer[op]), microbatch=int(program.microbatch[op]))  # fmt: skip
            found += _of_key(priced, program.price_keys[program.price[op]], int(program.price[op]), base)
    found += _received(priced, result, role)
    return sorted((s for s in found if s.end_s > s.start_s), key=lambda s: (s.start_s, s.end_s))


def _received(priced: Priced, result: Result, role: int) -> Iterator[Slice]:
    """Sends of other ranks that this one waits for: on a real rank they are kernels of their own."""
    program, timeline = priced.program, result.timeline
    mine = np.flatnonzero(program.role == role)
    sends = np.isin(program.kind, [int(OpKind.SEND_FORWARD), int(OpKind.SEND_BACKWARD)])
    seen: set[int] = set()
    for op in mine.tolist():
        for dep in program.dep_ops[program.dep_ptr[op] : program.dep_ptr[op + 1]].tolist():
            if sends[dep] and program.role[dep] != role and dep not in seen:
                seen.add(dep)
                forward = program.kind[dep] == OpKind.SEND_FORWARD
                base = Slice(float(timeline.start[dep]), float(timeline.finish[dep]), "pp", "receive",
                             "pp_receive_forward" if forward else "pp_receive_backward", collective="send_recv",
                             microbatch=int(program.microbatch[dep]))  # fmt: skip
                key = program.price_keys[program.price[dep]]
                size = send_collectives(priced.layout, key)[0].bytes if isinstance(key, Send) else 0.0
                yield replace(base, bytes=size)


def _of_key(priced: Priced, key: object, price: int, base: Slice) -> list[Slice]:
    layout = priced.layout
    if isinstance(key, BlockOp):
        return [_of_op(op_of(layout, key), replace(base, phase=key.phase))]
    if isinstance(key, LaunchGap):
        return [replace(base, kind="launch", name="host late", phase=key.phase)]
    if isinstance(key, OptimizerStep):
        return [replace(base, kind="optimizer", name="optimizer")]
    if isinstance(key, Send):
        return _calls(calls_of(layout, key), replace(base, kind="pp", name="send"))
    if isinstance(key, Gather | Reduce):
        name = "gather parameters" if isinstance(key, Gather) else "reduce gradients"
        return _calls(calls_of(layout, key), replace(base, kind="dp", name=name))
    if isinstance(key, TiedReduce):
        return [replace(base, kind="pp", name="tied embedding", collective="all_reduce")]
    if isinstance(key, Offload):
        return [replace(base, kind="copy", name="offload")]
    if isinstance(key, Compute | Overlapped):
        return _by_terms(priced.prices[price].terms, base)
    return [base]


def _of_op(op: LocalOp, base: Slice) -> Slice:
    work = op.work
    if isinstance(work, Gemm | GroupedGemm):
        return replace(base, kind="gemm", name=op.name)
    if isinstance(work, AttentionWork):
        return replace(base, kind="attention", name=op.name)
    if isinstance(work, Collective):
        return replace(base, kind=op.stream, name=op.name, collective=work.name, bytes=work.bytes)
    if isinstance(work, ExpertExchange):
        size = work.bytes
        return replace(base, kind="ep", name=op.name, collective="all_to_all", bytes=size)
    return replace(base, kind="memory_bound", name=op.name)


def _calls(calls: Sequence[Collective], base: Slice) -> list[Slice]:
    """One slice per collective that an op stands for, the time shared by bytes."""
    total = sum(c.bytes for c in calls)
    found, at = [], base.start_s
    for call in calls:
        end = at + base.seconds * (call.bytes / total if total else 1.0 / len(calls))
        found.append(replace(base, start_s=at, end_s=end, collective=call.name, bytes=call.bytes))
        at = end
    return found


def _by_terms(terms: Iterable[tuple[str, float]], base: Slice) -> list[Slice]:
    """An op that holds several kinds (an overlapped pair, an op of a coarser detail) as one slice of each."""
    wanted = [(name, seconds) for name, seconds in terms if seconds > 0]
    total = sum(seconds for _, seconds in wanted)
    found, at = [], base.start_s
    for name, seconds in wanted:
        end = at + base.seconds * seconds / total
        kind = _TERMS.get(name, "memory_bound")
        wire = "exposed" if kind in DIMENSIONS else ""
        found.append(replace(base, start_s=at, end_s=end, kind=kind, name=f"{base.name} {name}", collective=wire))
        at = end
    return found
