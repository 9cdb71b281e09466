"""Which stage activations a rank holds at once under a schedule: from its order alone, without time.

A rank runs its ops one after the other, so what it holds at each of them follows from their order; the memory peak is then a
maximum of linear forms in the stages' bytes, the same numbers that `result/memory.py` finds on the timeline.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simpar.program.program import FloatArray, IntArray
from simpar.schedules import Schedule

FORWARD, BACKWARD, INPUT = range(3)


@dataclass(frozen=True)
class StageBytes:
    """Bytes per micro-batch of stages, float arrays [candidates, model stages].

    Attributes:
        kept: from the forward to the backward.
        deferred: from the input gradient to the weight gradient, where the two are apart.
        backward: beyond what is kept, while a backward goes through the stage and frees as it goes.
        input: the same of an input gradient that leaves what weight gradients need.
        outputs: of every forward run so far, to the end of the step.
    """

    kept: FloatArray
    deferred: FloatArray
    backward: FloatArray
    input: FloatArray
    outputs: FloatArray


@dataclass(frozen=True)
class RankResidency:
    """What one rank holds at its worst moments.

    Attributes:
        stages: model stages it holds, int array [own].
        held: int array [moments, own]: micro-batches whose activations it keeps, at the moments that can be the worst.
        waiting: int array [moments, own]: micro-batches that wait for their weight gradient only.
        passed: int array [moments, own]: forwards run so far, where they leave something (else 0).
        active: int array [moments]: index into `stages` of the stage that runs then; in a pair that of the backward.
        kind: int array [moments]: FORWARD, BACKWARD (a pair's too: its forward is among `held`), INPUT.
    """

    stages: IntArray
    held: IntArray
    waiting: IntArray
    passed: IntArray
    active: IntArray
    kind: IntArray

    def peak(self, stage: StageBytes, away: float = 0.0) -> FloatArray:
        """Peak bytes beyond the resting state, float array [candidates].

        Args:
            stage: bytes of the candidates' stages.
            away: fraction that is offloaded; then a lower bound, reached if copies took no time.
        """
        own = self.stages
        total = (stage.kept[:, own] @ self.held.T + stage.deferred[:, own] @ self.waiting.T) * (1.0 - away)
        total += stage.outputs[:, own] @ self.passed.T
        for kind, bump in ((BACKWARD, stage.backward), (INPUT, stage.input)):
            mask = self.kind == kind
            if mask.any():
                total[:, mask] += bump[:, own[self.active[mask]]]
        return np.asarray(total.max(axis=1, initial=0.0))


def residencies(schedule: Schedule, *, outputs: bool = False) -> tuple[RankResidency, ...]:
    """The worst moments of every rank of `schedule`; `outputs`: what forwards leave to the end of the step counts."""
    order = schedule.as_arrays()
    model = np.array([schedule.model_stage(s) for s in range(schedule.num_stages)], dtype=np.int64)
    split = np.isin(model, model[order.stage[order.phase == 3]])
    pair = order.overlapped()
    return tuple(
        _of_rank(np.array(schedule.stages_of(rank)), order.stage[a:z], order.phase[a:z], pair[a:z], split, model, outputs)
        for rank, (a, z) in enumerate(zip(order.rank_start[:-1], order.rank_start[1:], strict=True))
    )


def _of_rank(
    own: IntArray, stage: IntArray, phase: IntArray, pair: NDArray[np.bool_], split: NDArray[np.bool_], model: IntArray,
    outputs: bool,
) -> RankResidency:  # fmt: skip
    column = {int(s): i for i, s in enumerate(own)}
    index = np.array([column[int(s)] for s in stage], dtype=np.int64)
    held, waiting = (np.zeros((len(stage), len(own)), dtype=np.int64) for _ in range(2))
    forward, whole, part, weight = phase == 0, phase == 1, phase == 2, phase == 3
    held[np.flatnonzero(forward), index[forward]] = 1
    gone = whole | part
    held[np.flatnonzero(gone), index[gone]] = -1
    left = part & split[stage]
    waiting[np.flatnonzero(left), index[left]] = 1
    waiting[np.flatnonzero(weight), index[weight]] = -1
    # While an op runs: a forward already holds its own, the others still do.
    passed = np.cumsum(np.where(forward[:, None], held, 0), axis=0) * (outputs and int(model.max()) in model[own])
    during = np.cumsum(held, axis=0) - np.where(forward[:, None], 0, held)
    during_waiting = np.cumsum(waiting, axis=0) - waiting
    # Where recomputation kept little, an input gradient leaves more than it found: the moment before its weight gradient counts.
    kind = np.select([forward | weight, left], [FORWARD, INPUT], default=BACKWARD)
    # In a pair the forward (first entry) opens before the backward runs: the backward's entry sees both.
    rows = np.unique(np.column_stack([kind, index, during, during_waiting, passed])[~(pair & forward)], axis=0)
    rows = _undominated(rows)
    n = len(own)
    return RankResidency(model[own], rows[:, 2 : 2 + n], rows[:, 2 + n : 2 + 2 * n], rows[:, 2 + 2 * n :], rows[:, 1], rows[:, 0])


def _undominated(rows: IntArray) -> IntArray:
    """Rows [kind, active, counts...] that no other row of the same kind and stage exceeds everywhere."""
    kept = []
    for kind, active in sorted({(int(r[0]), int(r[1])) for r in rows}):
        group = rows[(rows[:, 0] == kind) & (rows[:, 1] == active)]
        order = np.argsort(-group[:, 2:].sum(axis=1), kind="stable")
        best: list[IntArray] = []
        for row in group[order]:
            if not any((other[2:] >= row[2:]).all() for other in best):
                best.append(row)
        kept += best
    return np.array(kept, dtype=np.int64)


__all__ = ["BACKWARD", "FORWARD", "INPUT", "RankResidency", "StageBytes", "residencies"]
