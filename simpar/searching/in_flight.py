"""Which stage activations ranks hold at once under a schedule: from its order alone, without time.

A rank runs its ops one after the other, so what it holds at each of them follows from their order; the memory peak is then a
maximum of linear forms in the stages' bytes, the same numbers that `result/memory.py` finds on the timeline.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from simpar.program.program import FloatArray, IntArray
from simpar.schedules import Schedule
from simpar.schedules.interleaved import round_size
from simpar.searching.blocks import B, F, I
from simpar.searching.stages import StageBytes

FORWARD, BACKWARD, INPUT, NOTHING = range(4)


@dataclass(frozen=True)
class InFlight:
    """What ranks hold at their worst moments, for stages or for classes of stages.

    Attributes:
        ranks: pipeline ranks.
        rank: of each moment, int array [moments], ascending.
        held: int array [moments, stages]: micro-batches whose activations it keeps, those of what runs included.
        waiting: int array [moments, stages]: micro-batches that wait for their weight gradient only.
        passed: int array [moments, stages]: forwards that are over and whose output is still there.
        active: int array [moments, 2]: the stage that runs (in a pair that of the backward), and a pair's forward (else -1).
        kind: int array [moments]: FORWARD, BACKWARD (a pair's too), INPUT, NOTHING.
    """

    ranks: int
    rank: IntArray
    held: IntArray
    waiting: IntArray
    passed: IntArray
    active: IntArray
    kind: IntArray

    def peaks(self, stage: StageBytes, away: float = 0.0) -> FloatArray:
        """Peak bytes of each rank beyond the resting state, float array [candidates, ranks].

        Args:
            stage: bytes of the candidates' stages.
            away: fraction that is offloaded; then a lower bound, reached if copies took no time.
        """
        total = (stage.kept @ self.held.T + stage.deferred @ self.waiting.T) * (1.0 - away) + stage.outputs @ self.passed.T
        for kind, bump in ((FORWARD, stage.forward), (BACKWARD, stage.backward), (INPUT, stage.input)):
            mask = self.kind == kind
            if mask.any():
                total[:, mask] += bump[:, self.active[mask, 0]]
        pair = self.active[:, 1] >= 0
        if pair.any():
            total[:, pair] += stage.forward[:, self.active[pair, 1]]
        found = np.zeros((len(total), self.ranks))
        present, starts = self._ranges
        if len(present):
            found[:, present] = np.maximum.reduceat(total, starts, axis=1)
        return np.maximum(found, 0.0)

    @cached_property
    def _ranges(self) -> tuple[IntArray, IntArray]:
        """Ranks with moments, and the first moment of each."""
        return np.unique(self.rank, return_index=True)


def in_flight(schedule: Schedule, which: IntArray, *, outputs: int = 0) -> InFlight:
    """The moments of every rank of `schedule` that can be the worst.

    Args:
        which: class of each model stage, int array [stages].
        outputs: most micro-batches whose output the last stage keeps to the end of the step.
    """
    order = schedule.as_arrays()
    model = np.array([schedule.model_stage(s) for s in range(schedule.num_stages)], dtype=np.int64)
    classes = int(which.max()) + 1
    split = np.zeros(schedule.stages_per_model, dtype=bool)
    split[model[order.stage[order.phase == 3]]] = True
    pair = order.overlapped()
    found = []
    for rank, (a, z) in enumerate(zip(order.rank_start[:-1], order.rank_start[1:], strict=True)):
        stage = model[order.stage[a:z]]
        leaves = int(which[-1]) if outputs else -1
        rows = _of_rank(which[stage], split[stage], order.phase[a:z], pair[a:z], classes, leaves, outputs)
        found.append(np.column_stack([np.full(len(rows), rank), rows]))
    rows = np.concatenate(found)
    held, waiting, passed = (rows[:, 4 + k * classes : 4 + (k + 1) * classes] for k in range(3))
    return InFlight(schedule.num_ranks, rows[:, 0], held, waiting, passed, rows[:, 2:4], rows[:, 1])


@lru_cache(maxsize=16384)
def held_by_chunk(schedule: str, ranks: int, m: int, chunks: int, rank: int) -> FloatArray:
    """Micro-batches that a rank holds of each of its chunks, [moments, chunks], at the moments of which one is its fullest.

    For GPipe's, 1F1B's and the interleaved schedule, whose orders are formulas: while forward number warm-up + k runs, k backwards
    are over, and after one visit to every chunk it is the same again.
    """
    group, most = round_size(ranks, m), m * chunks
    warmup = {"gpipe": most, "1f1b": ranks - rank - 1}.get(schedule, 2 * (ranks - rank - 1) + (chunks - 1) * group)
    if warmup >= most:
        return np.full((1, chunks), float(m))
    visited = np.arange(min(warmup + group * chunks, most)) // group % chunks
    forwards = np.cumsum(visited[:, None] == np.arange(chunks), axis=0)
    begun = forwards[warmup:]
    over = np.concatenate([np.zeros((1, chunks)), forwards[: len(begun) - 1, ::-1]])
    return np.asarray(begun - over)


class Backwards(NamedTuple):
    """Some backwards of every rank, and what must run before and after them.

    Attributes:
        rank: of each, int array [C].
        before: forwards of the rank up to its own, by stage of the model, float array [C, stages].
        after: the rank's passes from it on, float array [4 phases, C, stages].
    """

    rank: IntArray
    before: FloatArray
    after: FloatArray


def backwards(schedule: Schedule) -> Backwards:
    """The first backwards of the first two stages that each rank runs one of."""
    order = schedule.as_arrays()
    model = np.array([schedule.model_stage(s) for s in range(schedule.num_stages)])
    ranks, before, after = [], [], []
    for rank, (a, z) in enumerate(itertools.pairwise(order.rank_start)):
        stage, microbatch, phase = order.stage[a:z], order.microbatch[a:z], order.phase[a:z]
        turned = np.flatnonzero((phase == B) | (phase == I))
        for at in np.sort(turned[np.unique(stage[turned], return_index=True)[1]])[:2].tolist():
            own = np.flatnonzero((phase == F) & (stage == stage[at]) & (microbatch == microbatch[at]))[0]
            passes = np.zeros((2, 4, schedule.stages_per_model))
            np.add.at(passes[0], (phase[: own + 1], model[stage[: own + 1]]), 1.0)
            np.add.at(passes[1], (phase[at:], model[stage[at:]]), 1.0)
            ranks.append(rank)
            before.append(passes[0, F])
            after.append(passes[1])
    return Backwards(np.array(ranks), np.array(before), np.stack(after, axis=1))


def _of_rank(stage: IntArray, split: np.ndarray, phase: IntArray, pair: np.ndarray, count: int, leaves: int, most: int) -> IntArray:
    """Moments of one rank as rows: kind, active, forward of a pair, held, waiting, passed.

    Args:
        stage: class of each op's stage; split: whether its weight gradients run apart.
        count: classes.
        leaves: the class whose forwards leave something to the end of the step, -1 for none; most: of so many micro-batches.
    """
    number, line = len(stage), np.arange(len(stage))
    held, waiting, begun = (np.zeros((number, count), dtype=np.int64) for _ in range(3))
    forward, weight = phase == 0, phase == 3
    left = (phase == 2) & split
    held[line[forward], stage[forward]] = 1
    gone = ~forward & ~weight
    held[line[gone], stage[gone]] = -1
    waiting[line[left], stage[left]] = 1
    waiting[line[weight], stage[weight]] = -1
    ends = forward & (stage == leaves)
    begun[line[ends], stage[ends]] = 1
    # While an op runs: a forward already holds its own, the others still do; its output comes at its end.
    during = np.cumsum(held, axis=0) - np.where(forward[:, None], 0, held)
    during_waiting = np.cumsum(waiting, axis=0) - waiting
    passed = np.cumsum(begun, axis=0) - begun
    # Where recomputation kept little, an input gradient leaves more than it found: the moment before its weight gradient counts.
    kind = np.select([forward, weight, left], [FORWARD, NOTHING, INPUT], default=BACKWARD)
    other = np.full(number, -1)
    # In a pair the forward (first entry) opens before the backward runs: the backward's entry sees both.
    first = pair & forward
    second = np.flatnonzero(first) + 1
    other[second] = stage[first]
    passed[second] -= begun[first]
    passed = np.minimum(passed, most)
    rows = np.column_stack([kind, np.where(kind == NOTHING, 0, stage), other, during, during_waiting, passed])[~first]
    if leaves >= 0:
        # What a forward leaves counts from its end on.
        after = (np.cumsum(held, axis=0), np.cumsum(waiting, axis=0), np.minimum(np.cumsum(begun, axis=0), most))
        idle = np.column_stack([np.full(number, NOTHING), np.zeros_like(stage), np.full(number, -1), *after])
        rows = np.concatenate([rows, idle])
    return _undominated(rows)


def _undominated(rows: IntArray) -> IntArray:
    """Rows [kind, active, forward, counts...] that no other of the same first three exceeds everywhere."""
    rows = np.array(list(set(map(tuple, rows.tolist()))), dtype=np.int64)
    kept = []
    for name in set(map(tuple, rows[:, :3].tolist())):
        group = rows[(rows[:, :3] == name).all(axis=1)]
        # The largest first: nothing behind it can exceed it everywhere.
        group = group[np.argsort(-group[:, 3:].sum(axis=1), kind="stable")]
        while len(group):
            first = group[0]
            kept.append(first)
            group = group[~(first[3:] >= group[:, 3:]).all(axis=1)]
    return np.array(kept, dtype=np.int64)


__all__ = ["BACKWARD", "FORWARD", "INPUT", "Backwards", "InFlight", "backwards", "held_by_chunk", "in_flight"]
