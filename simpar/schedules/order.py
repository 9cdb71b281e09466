"""What waits for what in a pipeline schedule, and its replay.

The dependency rule stands once, in `PREREQUISITES`. Everything that needs it (checking, replaying, lowering
to a program) reads it through `Schedule.prerequisites` or `Schedule.as_arrays`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from simpar.schedules.action import COMPUTE_PHASES, Action, Phase

Rows = tuple[tuple[Action, ...], ...]
"""Per rank, its actions in order."""

IntArray = NDArray[np.int64]

PREREQUISITES: Final[dict[Phase, tuple[tuple[int, Phase], ...]]] = {
    Phase.F: ((-1, Phase.F),),
    Phase.B: ((0, Phase.F), (+1, Phase.I)),
    Phase.I: ((0, Phase.F), (+1, Phase.I)),
    Phase.W: ((0, Phase.I),),
}
"""THE rule: phase -> (stage offset within its chain, phase) that the same microbatch must have finished.

I stands for "the input gradient": where a stage runs a full backward B, that B is meant. An offset that
leaves the chain (before its first stage, after its last) asks for nothing.
"""

PHASE_CODE: Final = {phase: code for code, phase in enumerate(COMPUTE_PHASES)}


@dataclass(frozen=True, slots=True)
class Chain:
    """One copy of the model: consecutive stages, and the microbatches that flow through them.

    Most schedules have a single chain with every stage and every microbatch. A bidirectional schedule
    (DualPipe) has two, over disjoint stages and disjoint microbatches, so that no rule needs to know about
    directions.
    """

    stages: range
    microbatches: range


@dataclass(frozen=True, slots=True)
class OrderArrays:
    """The compute actions of a schedule as read-only columns, rank after rank, each rank in its order.

    An overlapped pair takes two entries with the same `slot`. `prerequisites` has one row per entry and two
    columns: indices of entries that must finish first, -1 where there is none.
    """

    rank: IntArray
    slot: IntArray
    """Position in the rank's row."""
    stage: IntArray
    phase: IntArray
    """Index into `COMPUTE_PHASES`: 0 F, 1 B, 2 I, 3 W."""
    microbatch: IntArray
    prerequisites: IntArray
    rank_start: tuple[int, ...]
    """Entries of rank r are ``rank_start[r]`` up to ``rank_start[r + 1]``."""

    def overlapped(self) -> NDArray[np.bool_]:
        """Whether each entry is part of an overlapped pair."""
        with_next = (self.slot[1:] == self.slot[:-1]) & (self.rank[1:] == self.rank[:-1])
        pair = np.zeros(len(self.slot), dtype=np.bool_)
        pair[1:] |= with_next
        pair[:-1] |= with_next
        return pair


def order_arrays(rows: Rows, chains: Sequence[Chain], num_stages: int, num_microbatches: int) -> OrderArrays:
    """The columns of `rows`, whose stages and microbatches must lie within the given counts."""
    rank: list[int] = []
    slot: list[int] = []
    stage: list[int] = []
    phase: list[int] = []
    microbatch: list[int] = []
    rank_start = [0]
    for r, row in enumerate(rows):
        for position, action in enumerate(row):
            for leaf in action.parts or (action,):
                slot.append(position)
                stage.append(leaf.stage)
                phase.append(PHASE_CODE[leaf.phase])
                microbatch.append(leaf.microbatch)
        rank.extend([r] * (len(stage) - len(rank)))
        rank_start.append(len(stage))
    ranks, slots, stages, phases, microbatches = (
        np.array(column, dtype=np.int64) for column in (rank, slot, stage, phase, microbatch)
    )
    prerequisites = _prerequisite_entries(stages, phases, microbatches, chains, num_stages, num_microbatches)
    for column in (ranks, slots, stages, phases, microbatches, prerequisites):
        column.flags.writeable = False
    return OrderArrays(ranks, slots, stages, phases, microbatches, prerequisites, tuple(rank_start))


def _prerequisite_entries(
    stage: IntArray,
    phase: IntArray,
    microbatch: IntArray,
    chains: Sequence[Chain],
    num_stages: int,
    num_microbatches: int,
) -> IntArray:
    """`PREREQUISITES` for every entry at once: (n, 2) entry indices, -1 for none."""
    entry_of = np.full((len(COMPUTE_PHASES), num_stages, num_microbatches), -1, dtype=np.int64)
    entry_of[phase, stage, microbatch] = np.arange(len(stage))
    chain = np.zeros(num_stages + 2, dtype=np.int64)  # shifted by one: both ends belong to no chain
    for number, each in enumerate(chains, start=1):
        chain[each.stages.start + 1 : each.stages.stop + 1] = number
    input_gradient = np.maximum(entry_of[PHASE_CODE[Phase.I]], entry_of[PHASE_CODE[Phase.B]])
    found = np.full((len(stage), max(map(len, PREREQUISITES.values()))), -1, dtype=np.int64)
    for dependent, rule in PREREQUISITES.items():
        (entries,) = np.nonzero(phase == PHASE_CODE[dependent])
        for column, (offset, wanted) in enumerate(rule):
            table = input_gradient if wanted is Phase.I else entry_of[PHASE_CODE[wanted]]
            of_stage = stage[entries]
            kept = entries[chain[of_stage + offset + 1] == chain[of_stage + 1]]
            found[kept, column] = table[stage[kept] + offset, microbatch[kept]]
    return found


@dataclass(frozen=True, slots=True)
class Replay:
    """When each entry of an `OrderArrays` runs, if every rank starts its next action as soon as it may.

    `blocked` holds the entries at which ranks are stuck for ever; it is empty unless the order deadlocks.
    Entries that never run have the time 0.
    """

    start: list[float]
    finish: list[float]
    blocked: list[int]

    @property
    def makespan(self) -> float:
        """When the last entry finishes."""
        return max(self.finish, default=0.0)


def replay(order: OrderArrays, durations: Sequence[float]) -> Replay:
    """Run `order` with one duration per entry; both parts of an overlapped pair carry the pair's duration."""
    prerequisites: list[list[int]] = order.prerequisites.tolist()
    slot: list[int] = order.slot.tolist()
    start, finish = [0.0] * len(slot), [0.0] * len(slot)
    done = bytearray(len(slot))
    num_ranks = len(order.rank_start) - 1
    head, clock = list(order.rank_start[:-1]), [0.0] * num_ranks
    waiting: dict[int, list[int]] = {}  # unfinished entry -> ranks whose head needs it
    runnable = list(range(num_ranks))
    while runnable:
        rank = runnable.pop()
        end_of_row = order.rank_start[rank + 1]
        while head[rank] < end_of_row:
            first = head[rank]
            stop = first + 2 if first + 1 < end_of_row and slot[first + 1] == slot[first] else first + 1
            needed = [entry for own in range(first, stop) for entry in prerequisites[own] if entry >= 0]
            missing = next((entry for entry in needed if not done[entry]), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            begin = max([clock[rank], *(finish[entry] for entry in needed)])
            clock[rank] = begin + durations[first]
            head[rank] = stop
            for own in range(first, stop):
                start[own], finish[own], done[own] = begin, clock[rank], 1
                runnable.extend(waiting.pop(own, ()))
    return Replay(start, finish, [head[r] for r in range(num_ranks) if head[r] < order.rank_start[r + 1]])


def goes_on(few: Rows, more: Rows, every: Rows) -> bool:
    """Whether every rank runs `every` as `more`, with what `more` has beyond `few` again and again.

    Args:
        few, more, every: orders of ever more micro-batches, which each phase of a stage runs one after the other.
    """
    for rows in zip(few, more, every, strict=True):
        short, longer, whole = ([(action.phase, action.stage) for action in row] for row in rows)
        begin = next((at for at, (a, b) in enumerate(zip(short, longer, strict=False)) if a != b), len(short))
        end = begin + len(longer) - len(short)
        times = (len(whole) - len(short)) // (end - begin)
        if longer[end:] != short[begin:] or whole != short[:begin] + times * longer[begin:end] + short[begin:]:
            return False
    return True
