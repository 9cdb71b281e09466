"""The pipeline Gantt: every op of every pipeline rank as a rectangle, thinned where there are more than a page can draw.

The page's script draws one filled shape per kind and looks ops up under the pointer itself, so that a rectangle costs a few
bytes and no element of its own.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simpar.program.program import FloatArray, IntArray, OpKind, Program
from simpar.report import palette
from simpar.report.encode import packed, time_unit
from simpar.report.ledger import price_terms
from simpar.report.palette import PHASES, TRANSFERS
from simpar.report.shown import ShownRole, drawn_note, drawn_s, shown_roles, subset_note
from simpar.report.streams import ordered_streams, stream_position
from simpar.result.accounting import waits_of
from simpar.result.result import Result

BoolArray = NDArray[np.bool_]

MAX_RECTANGLES = 40_000
"""More make a browser slow to zoom."""


def _transfer(name: str, what: str) -> tuple[str, str, str]:
    return what, TRANSFERS[name], TRANSFERS[name]


KINDS: dict[OpKind, tuple[str, str, str]] = {
    OpKind.FORWARD: ("F forward", *PHASES["forward"]),
    OpKind.BACKWARD: ("B backward", *PHASES["backward"]),
    OpKind.INPUT_GRADIENT: ("I input gradient", *PHASES["input_gradient"]),
    OpKind.WEIGHT_GRADIENT: ("W weight gradient", *PHASES["weight_gradient"]),
    OpKind.OVERLAPPED: ("F + B overlapped", *PHASES["overlapped"]),
    OpKind.OPTIMIZER: ("optimizer", *PHASES["optimizer"]),
    OpKind.SEND_FORWARD: _transfer("send_forward", "send forward"),
    OpKind.SEND_BACKWARD: _transfer("send_backward", "send backward"),
    OpKind.GATHER_PARAMETERS: _transfer("gather", "parameter gather"),
    OpKind.REDUCE_GRADIENTS: _transfer("reduce", "gradient reduction"),
    OpKind.COLLECTIVE: _transfer("collective", "collective in a block"),
    OpKind.OFFLOAD: _transfer("offload", "offload"),
    OpKind.OTHER: _transfer("other", "other"),
}
"""Name, colour of even micro-batches, of odd ones."""
FOLDED = ("other micro-batches", palette.FOLDED, palette.FOLDED)


WAITS: dict[str, str] = {
    "bubble": "bubble: waits for another stage", "pp": "waits for a send", "dp": "waits for parameters or gradients",
    "skew": "waits for other ranks' reductions", "other": "waits for another collective",
}  # fmt: skip
"""Cause of a wait -> what the page calls it."""
MAX_WAITS = 8_000
STRIP = 0.07
"""Height of the strip of causes under a rank's compute."""


@dataclass(frozen=True, slots=True)
class _Lane:
    """One stream of one shown role."""

    stream: int
    """-1: the causes of the waits of its role."""
    top: float
    bottom: float
    title: str


@dataclass(frozen=True)
class Waits:
    """The causes of waits, as rectangles: lane, index of the cause, start and length in seconds; arrays [waits], sorted by lane."""

    lane: IntArray
    cause: IntArray
    start: FloatArray
    length: FloatArray


def waits(result: Result, roles: tuple[ShownRole, ...], first_lane: int) -> tuple[list[_Lane], Waits]:
    """A strip for each shown role with the causes of its waits; the longest where there are more than a page can draw."""
    band = {shown.role: index for index, shown in enumerate(roles)}
    found = waits_of(result.program, result.timeline, band)
    if len(found) > MAX_WAITS:
        least = sorted((end - begin for _, begin, end, _ in found), reverse=True)[MAX_WAITS]
        found = [each for each in found if each[2] - each[1] > least]
    found.sort(key=lambda each: (band[each[0]], each[1]))
    others = any(stream.kind != "compute" for stream in result.program.streams)
    bottom = 0.03 + (0.52 if others else 0.84)
    lanes = [_Lane(-1, index + bottom - STRIP, index + bottom, f"{shown.title}, waits") for index, shown in enumerate(roles)]
    causes = list(WAITS)
    return lanes, Waits(
        np.array([first_lane + band[role] for role, _, _, _ in found], dtype=np.int64),
        np.array([causes.index(cause if cause in WAITS else "other") for _, _, _, cause in found], dtype=np.int64),
        np.array([begin for _, begin, _, _ in found]), np.array([end - begin for _, begin, end, _ in found]),
    )  # fmt: skip


@dataclass(frozen=True)
class Rectangles:
    """What is drawn, sorted by lane, then start.

    Attributes:
        lane, first, count: int arrays [rectangles]: lane, its first op, and how many ops of the lane it stands for.
        start, finish, busy: float arrays [rectangles], seconds; busy is less than finish - start where merged ops had gaps.
        folded: bool array [rectangles]: ops of several actions, of micro-batches that are not drawn one by one.
        members: int array, the ops of all rectangles, one after the other.
    """

    lane: IntArray
    first: IntArray
    count: IntArray
    start: FloatArray
    finish: FloatArray
    busy: FloatArray
    folded: BoolArray
    members: IntArray


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
            # Under compute stands the strip with the causes of its waits.
            bottom = top + (compute - STRIP - 0.02 if kind == "compute" else each * 0.85)
            found.append(_Lane(stream, top, bottom, f"{shown.title}, {kind}"))
    return found


def _between(program: Program, ends: int | None) -> BoolArray:
    """Which ops belong to micro-batches other than the first and last `ends`; None: no op."""
    if ends is None:
        return np.zeros(program.num_ops, dtype=bool)
    microbatch = program.microbatch
    return (microbatch >= ends) & (microbatch <= int(microbatch.max(initial=-1)) - ends)


def _queued(program: Program, lanes: list[_Lane]) -> tuple[IntArray, IntArray]:
    """(lane, op) of all ops of the lanes, lane by lane in the order of its stream."""
    found = [program.ops_at(lane.stream) for lane in lanes]
    if not found:
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    return np.repeat(np.arange(len(found)), [len(ops) for ops in found]), np.concatenate(found)


def rectangles(result: Result, lanes: list[_Lane], whole: int | None = None, shown: int | None = None) -> Rectangles:
    """Rectangles of all lanes, one per op, or one per merged or folded run of consecutive ops.

    Args:
        whole: merge the ops of one action (kind, stage, micro-batch) but in the first and last `whole` micro-batches; None:
            merge nowhere.
        shown: fold the ops of all but the first and last `shown` micro-batches, whatever their action; None: fold nowhere.
    """
    program, start, finish = result.program, result.timeline.start, result.timeline.finish
    lane, ops = _queued(program, lanes)
    if not len(ops):
        none, nothing = np.zeros(0, dtype=np.int64), np.zeros(0)
        return Rectangles(none, none, none, nothing, nothing, nothing, none.astype(bool), none)
    folded = _between(program, shown)
    at = np.flatnonzero(_opens(program, lane, ops, _between(program, whole), folded))
    last = np.append(at[1:], len(ops)) - 1
    busy = np.add.reduceat(finish[ops] - start[ops], at)
    return Rectangles(lane[at], ops[at], last - at + 1, start[ops[at]], finish[ops[last]], busy, folded[ops[at]], ops)


def _opens(program: Program, lane: IntArray, ops: IntArray, merged: BoolArray, folded: BoolArray) -> BoolArray:
    """Which of the queued ops begin a rectangle: the first of a lane, of another action, and any that stands alone."""
    joins, away = (merged | folded)[ops], folded[ops]
    opens = ~joins
    opens[0] = True
    same = (lane[1:] == lane[:-1]) & (away[1:] == away[:-1])
    for column in (program.kind, program.stage, program.microbatch):
        values = column[ops]
        same &= (values[1:] == values[:-1]) | away[1:]  # folded ops are all alike
    opens[1:] |= ~same
    return opens


def _affordable(counts: IntArray, budget: int) -> int:
    """The most micro-batches from either end whose `counts` [micro-batches] add up to no more than `budget`."""
    pairs = (counts + counts[::-1])[: len(counts) // 2]
    return int(np.searchsorted(np.cumsum(pairs), budget, side="right"))


def _per_microbatch(result: Result, drawn: Rectangles, microbatches: int) -> IntArray:
    """How many rectangles each micro-batch has."""
    microbatch = result.program.microbatch[drawn.first]
    return np.bincount(microbatch[microbatch >= 0], minlength=microbatches)


def thinned(result: Result, lanes: list[_Lane], limit: int = MAX_RECTANGLES) -> tuple[Rectangles, str]:
    """At most about `limit` rectangles, and a note on what was merged (empty: nothing); no op is left out.

    First the ops of one action are merged, but for as many first and last micro-batches as may stay whole; if that is not
    enough, all but the first and last micro-batches are folded too.
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
    some = range(2, microbatches // 2 + 1)
    shown = 1 + bisect_right(some, limit, key=lambda n: len(rectangles(result, lanes, whole=0, shown=n).lane))
    drawn = rectangles(result, lanes, whole=0, shown=shown)
    return drawn, (
        f"{total:,} ops are drawn as {len(drawn.lane):,} rectangles: the ops of one action are merged, and only the first "
        f"and last {shown} of {microbatches} micro-batches are shown; the others are in blocks that may hide short waits."
    )


def legend(program: Program, drawn: Rectangles, idle: Waits) -> tuple[list[tuple[str, str, str]], IntArray]:
    """Name and colours of every kind of what is drawn, and the kinds [rectangles + waits] as indices of them."""
    own = np.where(drawn.folded, -1, program.kind[drawn.first])
    kinds, causes = [k for k in KINDS if (own == int(k)).any()], np.unique(idle.cause)
    named = [KINDS[k] for k in kinds] + ([FOLDED] if drawn.folded.any() else [])
    # The last place is that of folded rectangles, whose kind is -1.
    place = np.full(max(int(k) for k in OpKind) + 2, len(kinds))
    place[[int(k) for k in kinds]] = np.arange(len(kinds))
    waiting = len(named) + np.searchsorted(causes, idle.cause)
    names = list(WAITS)
    named += [(WAITS[names[cause]], palette.WAITS[names[cause]], palette.WAITS[names[cause]]) for cause in causes]
    return named, np.concatenate([place[own], waiting])


def gantt(result: Result) -> dict[str, Any]:
    """Everything the page's script needs to draw the Gantt and to say what is under the pointer."""
    roles = shown_roles(result)
    lanes = lanes_of(result.program, roles)
    drawn, note = thinned(result, lanes)
    unit, factor = time_unit(drawn_s(result))
    signatures, tables = _terms(result, drawn)
    strips, idle = waits(result, roles, len(lanes))
    lanes += strips
    program = result.program
    microbatch = program.microbatch[drawn.first]
    named, kind = legend(program, drawn, idle)
    nothing = np.zeros(len(idle.lane))
    length = np.concatenate([drawn.finish - drawn.start, idle.length]) * factor
    busy = np.concatenate([drawn.busy, idle.length]) * factor
    return {
        "unit": unit,
        "step": drawn_s(result) * factor,
        "kinds": named,
        "roles": [s.title for s in roles],
        "ticks": [f"rank {s.pipeline_rank}" + (" (slowest)" if s.pipeline else "") + _gpu(result, s.pipeline_rank) for s in roles],
        "lanes": [[round(lane.top, 4), round(lane.bottom, 4), lane.title] for lane in lanes],
        "lane": packed(np.concatenate([drawn.lane, idle.lane]), "int16"),
        "kind": packed(kind, "int8"),
        "odd": packed(np.concatenate([np.where((microbatch >= 0) & ~drawn.folded, microbatch % 2, 0), nothing]), "int8"),
        "start": packed(np.concatenate([drawn.start, idle.start]) * factor, "float64"),
        "length": packed(length),
        "busy": packed(busy),
        "label": [*_labels(program, drawn), *[""] * len(nothing)],
        "terms": packed(np.concatenate([signatures, nothing + len(tables)]), "int32"),
        "tables": [*([[name, seconds * factor] for name, seconds in table] for table in tables), []],
        "notes": [text for text in (drawn_note(result), note, subset_note(result, roles)) if text],
    }


def _gpu(result: Result, rank: int) -> str:
    """What a pipeline rank runs on, where there is more than one kind."""
    return f", {result.layout.of_rank(rank).hardware.gpu.name}" if result.layout.alone else ""


def _labels(program: Program, drawn: Rectangles) -> list[str]:
    """Op labels without the rank, which the lane says; merged ones name the action, folded ones how many ops they hold."""
    found = []
    for op, count, folded in zip(drawn.first.tolist(), drawn.count.tolist(), drawn.folded.tolist(), strict=True):
        label = program.label(op).rpartition("@")[0]
        if folded:
            label = f"{count:,} ops from {label} on"
        elif count > 1:
            label = f"{label.partition('/')[0]} ({count} ops)"
        found.append(label)
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
