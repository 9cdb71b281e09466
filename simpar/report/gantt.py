"""The pipeline Gantt: every op of every pipeline rank as a rectangle, thinned where there are more than a page can draw.

The page's script draws one filled shape per kind and looks ops up under the pointer itself, so that a rectangle costs a few
bytes and no element of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from simpar.program.program import FloatArray, IntArray, OpKind, Program
from simpar.report.encode import packed, time_unit
from simpar.report.ledger import price_terms
from simpar.report.shown import ShownRole, shown_roles, subset_note
from simpar.report.streams import ordered_streams, stream_position
from simpar.result.result import Result

MAX_RECTANGLES = 40_000
"""More make a browser slow to zoom."""

KINDS: dict[OpKind, tuple[str, str, str]] = {
    OpKind.FORWARD: ("F forward", "#0072b2", "#4a9fd0"),
    OpKind.BACKWARD: ("B backward", "#e69f00", "#f5c767"),
    OpKind.INPUT_GRADIENT: ("I input gradient", "#d55e00", "#ee9a5f"),
    OpKind.WEIGHT_GRADIENT: ("W weight gradient", "#009e73", "#5cc4a3"),
    OpKind.OVERLAPPED: ("F + B overlapped", "#cc79a7", "#e3b3cd"),
    OpKind.OPTIMIZER: ("optimizer", "#000000", "#000000"),
    OpKind.SEND_FORWARD: ("send forward", "#56b4e9", "#56b4e9"),
    OpKind.SEND_BACKWARD: ("send backward", "#a67c00", "#a67c00"),
    OpKind.GATHER_PARAMETERS: ("parameter gather", "#d8c800", "#d8c800"),
    OpKind.REDUCE_GRADIENTS: ("gradient reduction", "#7a3b12", "#7a3b12"),
    OpKind.COLLECTIVE: ("collective in a block", "#6f4c9b", "#6f4c9b"),
    OpKind.OFFLOAD: ("offload", "#8c8c8c", "#8c8c8c"),
    OpKind.OTHER: ("other", "#555555", "#555555"),
}
"""Name, colour of even micro-batches, of odd ones; the hues are those of Okabe and Ito, told apart by colour-blind readers."""


@dataclass(frozen=True, slots=True)
class _Lane:
    """One stream of one shown role."""

    stream: int
    top: float
    bottom: float
    title: str


@dataclass(frozen=True)
class Rectangles:
    """What is drawn, sorted by lane, then start.

    Attributes:
        lane, first, count: int arrays [rectangles]: lane, its first op, and how many ops of the lane it stands for.
        start, finish, busy: float arrays [rectangles], seconds; busy is less than finish - start where merged ops had gaps.
        members: int array, the ops of all rectangles, one after the other.
    """

    lane: IntArray
    first: IntArray
    count: IntArray
    start: FloatArray
    finish: FloatArray
    busy: FloatArray
    members: IntArray

    def select(self, keep: np.ndarray[Any, np.dtype[np.bool_]]) -> Rectangles:
        """Only the rectangles where `keep` is true."""
        members = self.members[np.repeat(keep, self.count)]
        return Rectangles(
            self.lane[keep], self.first[keep], self.count[keep], self.start[keep], self.finish[keep], self.busy[keep], members
        )  # fmt: skip


def lanes_of(program: Program, roles: tuple[ShownRole, ...]) -> list[_Lane]:
    """A band of height 1 per role: compute in its upper part, communication streams share the rest."""
    kinds = {program.streams[i].kind for shown in roles for i in program.role_streams.get(shown.role, ())}
    others = sorted(kinds - {"compute"}, key=stream_position)
    compute = 0.52 if others else 0.84
    each = (0.9 - compute) / max(len(others), 1)
    found = []
    for band, shown in enumerate(roles):
        for stream in ordered_streams(program, shown.role):
            kind = program.streams[stream].kind
            top = band + (0.03 if kind == "compute" else 0.05 + compute + each * others.index(kind))
            bottom = top + (compute if kind == "compute" else each * 0.85)
            found.append(_Lane(stream, top, bottom, f"{shown.title}, {kind}"))
    return found


def rectangles(result: Result, lanes: list[_Lane], whole: int | None = None) -> Rectangles:
    """Rectangles of all lanes, one per op; consecutive ops of one action (kind, stage, micro-batch) are one where merged.

    Args:
        whole: merge except in the first and last `whole` micro-batches; None: merge nowhere.
    """
    program, start, finish = result.program, result.timeline.start, result.timeline.finish
    microbatch = program.microbatch
    merged = np.zeros(program.num_ops, dtype=bool)
    if whole is not None:
        merged = (microbatch >= whole) & (microbatch <= int(microbatch.max(initial=-1)) - whole)
    found = []
    for index, lane in enumerate(lanes):
        ops = program.stream_ops[program.stream_ptr[lane.stream] : program.stream_ptr[lane.stream + 1]]
        if not len(ops):
            continue
        key = np.stack([program.kind[ops], program.stage[ops], microbatch[ops]])
        opens = np.append(True, (key[:, 1:] != key[:, :-1]).any(axis=0)) | ~merged[ops]
        at = np.flatnonzero(opens)
        last = np.append(at[1:], len(ops)) - 1
        busy = np.add.reduceat(finish[ops] - start[ops], at)
        found.append((np.full(len(at), index), ops[at], last - at + 1, start[ops[at]], finish[ops[last]], busy, ops))
    if not found:
        none, nothing = np.zeros(0, dtype=np.int64), np.zeros(0)
        return Rectangles(none, none, none, nothing, nothing, nothing, none)
    lane_, first, count, begin, end, busy_, members = (np.concatenate(part) for part in zip(*found, strict=True))
    return Rectangles(lane_, first, count, begin, end, busy_, members)


def _affordable(counts: IntArray, budget: int) -> int:
    """The most micro-batches from either end whose `counts` [micro-batches] add up to no more than `budget`."""
    pairs = (counts + counts[::-1])[: len(counts) // 2]
    return int(np.searchsorted(np.cumsum(pairs), budget, side="right"))


def _per_microbatch(result: Result, drawn: Rectangles, microbatches: int) -> IntArray:
    """How many rectangles each micro-batch has."""
    microbatch = result.program.microbatch[drawn.first]
    return np.bincount(microbatch[microbatch >= 0], minlength=microbatches)


def thinned(result: Result, lanes: list[_Lane], limit: int = MAX_RECTANGLES) -> tuple[Rectangles, str]:
    """At most about `limit` rectangles, and a note on what was merged or left out (empty: nothing).

    First the ops of one action are merged, but for as many first and last micro-batches as may stay whole; if that is not
    enough, only the first and last micro-batches are kept, merged.
    """
    every = rectangles(result, lanes)
    total = len(every.lane)
    if total <= limit:
        return every, ""
    microbatches = int(result.program.microbatch.max(initial=-1)) + 1
    drawn = rectangles(result, lanes, whole=0)
    counts = _per_microbatch(result, drawn, microbatches)
    spare = limit - len(drawn.lane)
    if spare >= 0:
        whole = _affordable(_per_microbatch(result, every, microbatches) - counts, spare)
        drawn = rectangles(result, lanes, whole=whole)
        but = f", but for the first and last {whole} of {microbatches} micro-batches" if whole else ""
        return drawn, f"{total:,} ops are drawn as {len(drawn.lane):,} rectangles: the ops of one action are merged{but}."
    kept = max(_affordable(counts, limit - (len(drawn.lane) - int(counts.sum()))), 1)
    microbatch = result.program.microbatch[drawn.first]
    drawn = drawn.select((microbatch < kept) | (microbatch >= microbatches - kept))
    return drawn, (
        f"{total:,} ops are drawn as {len(drawn.lane):,} rectangles: the ops of one action are merged, and only the first "
        f"and last {kept} of {microbatches} micro-batches are drawn; what lies between is not idle time."
    )


def gantt(result: Result, limit: int = MAX_RECTANGLES) -> dict[str, Any]:
    """Everything the page's script needs to draw the Gantt and to say what is under the pointer."""
    roles = shown_roles(result)
    lanes = lanes_of(result.program, roles)
    drawn, note = thinned(result, lanes, limit)
    unit, factor = time_unit(result.step_time_s)
    signatures, tables = _terms(result, drawn)
    program = result.program
    microbatch = program.microbatch[drawn.first]
    kinds = [k for k in KINDS if (program.kind[drawn.first] == int(k)).any()]
    position = np.full(max(int(k) for k in OpKind) + 1, -1)
    position[[int(k) for k in kinds]] = np.arange(len(kinds))
    return {
        "unit": unit,
        "step": result.step_time_s * factor,
        "kinds": [KINDS[k] for k in kinds],
        "roles": [s.title for s in roles],
        "ticks": [f"rank {s.pipeline_rank}" + (" (slowest)" if s.pipeline else "") for s in roles],
        "lanes": [[round(lane.top, 4), round(lane.bottom, 4), lane.title] for lane in lanes],
        "lane": packed(drawn.lane, "int16"),
        "kind": packed(position[program.kind[drawn.first]], "int8"),
        "odd": packed(np.where(microbatch >= 0, microbatch % 2, 0), "int8"),
        "start": packed(drawn.start * factor, "float64"),
        "length": packed((drawn.finish - drawn.start) * factor),
        "busy": packed(drawn.busy * factor),
        "label": _labels(program, drawn),
        "terms": packed(signatures, "int32"),
        "tables": [[[name, seconds * factor] for name, seconds in table] for table in tables],
        "notes": [text for text in (note, subset_note(result, roles)) if text],
    }


def _labels(program: Program, drawn: Rectangles) -> list[str]:
    """Op labels without the rank, which the lane says; merged ones name the action and how many ops it has."""
    found = []
    for op, count in zip(drawn.first.tolist(), drawn.count.tolist(), strict=True):
        label = program.label(op).rpartition("@")[0]
        found.append(label if count == 1 else f"{label.partition('/')[0]} ({count} ops)")
    return found


def _terms(result: Result, drawn: Rectangles) -> tuple[list[int], list[list[tuple[str, float]]]]:
    """(table index per rectangle, distinct tables): seconds by category, summed over the ops of a rectangle."""
    ledgers = price_terms(result)
    price = result.program.price[drawn.members].tolist()
    ends = np.cumsum(drawn.count).tolist()
    seen: dict[tuple[int, ...], int] = {}
    tables: list[list[tuple[str, float]]] = []
    found, begin = [], 0
    for end in ends:
        signature = tuple(price[begin:end])
        begin = end
        index = seen.get(signature)
        if index is None:
            index = seen[signature] = len(tables)
            sums: dict[str, float] = {}
            for p in signature:
                for name, seconds in ledgers[p]:
                    sums[name] = sums.get(name, 0.0) + seconds
            tables.append(sorted(sums.items(), key=lambda item: -item[1]))
        found.append(index)
    return found, tables
