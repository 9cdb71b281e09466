"""Which stage activations a rank holds at once under a schedule: from its order alone, without time.

A rank runs its ops one after the other, so what it holds at each of them follows from their order; the memory peak is then a
maximum of linear forms in the stages' bytes, the same numbers that `result/memory.py` finds on the timeline.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from simpar.program.program import FloatArray, IntArray
from simpar.schedules import Schedule

FORWARD, BACKWARD, INPUT, PAIR = range(4)


@dataclass(frozen=True)
class RankResidency:
    """What one rank holds at its worst moments.

    Attributes:
        stages: model stages it holds, int array [own].
        held: int array [moments, own]: micro-batches kept of each, at the moments that can be the worst.
        active: int array [moments]: index into `stages` of the stage that runs then; a pair: of its backward.
        kind: int array [moments]: FORWARD, BACKWARD, INPUT, PAIR.
    """

    stages: IntArray
    held: IntArray
    active: IntArray
    kind: IntArray

    def peak(self, kept: FloatArray, bumps: dict[int, FloatArray], away: float = 0.0) -> FloatArray:
        """Peak bytes beyond the resting state.

        Args:
            kept: float array [candidates, model stages], bytes per micro-batch.
            bumps: BACKWARD, INPUT, PAIR -> float array [candidates, model stages].
            away: fraction of what waits that has gone to the host; then a lower bound.

        Returns:
            float array [candidates].
        """
        own = kept[:, self.stages]
        total = own @ self.held.T * (1.0 - away)
        if away:
            total += away * own[:, self.active]
        for kind, bump in bumps.items():
            mask = self.kind == kind
            if mask.any():
                total[:, mask] += bump[:, self.stages[self.active[mask]]]
        return total.max(axis=1, initial=0.0)


def residencies(schedule: Schedule) -> tuple[RankResidency, ...]:
    """The worst moments of every rank of `schedule`."""
    order = schedule.as_arrays()
    split = np.zeros(schedule.num_stages, dtype=bool)
    split[order.stage[order.phase == 3]] = True
    pair = order.overlapped()
    model = np.array([schedule.model_stage(s) for s in range(schedule.num_stages)], dtype=np.int64)
    return tuple(
        _of_rank(np.array(schedule.stages_of(rank)), order.stage[a:z], order.phase[a:z], pair[a:z], split, model)
        for rank, (a, z) in enumerate(zip(order.rank_start[:-1], order.rank_start[1:], strict=True))
    )


def _of_rank(
    own: IntArray, stage: IntArray, phase: IntArray, pair: np.ndarray, split: np.ndarray, model: IntArray
) -> RankResidency:
    column = {int(s): i for i, s in enumerate(own)}
    index = np.array([column[int(s)] for s in stage], dtype=np.int64)
    change = np.zeros((len(stage), len(own)), dtype=np.int64)
    opens = phase == 0
    frees = (phase == 1) | (phase == 3) | ((phase == 2) & ~split[stage])
    change[np.flatnonzero(opens), index[opens]] = 1
    change[np.flatnonzero(frees), index[frees]] = -1
    after = np.cumsum(change, axis=0)
    # While an op runs: a forward already holds its own, a backward still does.
    during = np.where(opens[:, None], after, after - change)
    kind = np.select([opens, phase == 1, phase == 2], [FORWARD, BACKWARD, INPUT], default=-1)
    # In a pair the forward (first entry) opens before the backward runs: the backward's entry sees both.
    second = pair & (phase != 0)
    kind[second] = PAIR
    keep = (kind >= 0) & ~(pair & opens)
    rows = np.unique(np.column_stack([kind, index, during])[keep], axis=0)
    rows = _undominated(rows)
    return RankResidency(model[own], rows[:, 2:], rows[:, 1], rows[:, 0])


def _undominated(rows: IntArray) -> IntArray:
    """Rows [kind, active, held...] that no other row of the same kind and stage exceeds everywhere."""
    kept = []
    for kind, active in {(int(r[0]), int(r[1])) for r in rows}:
        group = rows[(rows[:, 0] == kind) & (rows[:, 1] == active)]
        order = np.argsort(-group[:, 2:].sum(axis=1), kind="stable")
        best: list[IntArray] = []
        for row in group[order]:
            if not any((other[2:] >= row[2:]).all() for other in best):
                best.append(row)
        kept += best
    return np.array(kept, dtype=np.int64)


__all__ = ["BACKWARD", "FORWARD", "INPUT", "PAIR", "RankResidency", "residencies"]
