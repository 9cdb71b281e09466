"""Critical paths of a schedule: chains of passes that each wait for the one before, whatever anything costs.

Where stages lie in a V, two pipelines run at once, or a rank of several chunks is slow, no formula of `bounds` says how long ranks
wait for each other between their first op and their last. Any chain of passes bounds the step from below; those that are critical
at usual durations are nearly so at others.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from simpar.program.program import FloatArray, IntArray
from simpar.schedules import Phase, Schedule
from simpar.schedules.order import PHASE_CODE, OrderArrays, Replay, replay
from simpar.searching.slow_ranks import Slow

USUAL = {Phase.F: 1.0, Phase.B: 2.0, Phase.I: 1.3, Phase.W: 0.7}
PAIR = 2.8
"""Durations at which a chain is critical: of passes, and of two that run as one."""
END = 1.1
"""The last stage, with the loss, over the others."""


@dataclass(frozen=True)
class Paths:
    """P chains of passes, each from a rank's first to some rank's last, through C classes of stages.

    Attributes:
        alone: passes by themselves, those of a slow rank as more, float array [4 phases, P, C].
        pairs: those that are pairs, by the classes of forward and backward, float array [P, C, C].
        sends: boundary tensors in between, float array [P].
        first, last: rank that it begins and ends on, int arrays [P].
    """

    alone: FloatArray
    pairs: FloatArray
    sends: FloatArray
    first: IntArray
    last: IntArray

    def seconds(self, alone: FloatArray, pairs: FloatArray, send: float) -> FloatArray:
        """How long the chains take, [R, P].

        Args:
            alone, pairs: seconds of passes, float arrays [R, 4 phases, C] and [R, C, C]; send: those of a boundary tensor.
        """
        count = len(self.sends)
        found = np.tensordot(alone, self.alone.transpose(1, 0, 2), axes=([1, 2], [1, 2]))
        return np.asarray(found + pairs.reshape(len(pairs), -1) @ self.pairs.reshape(count, -1).T + self.sends * send)


def critical_paths(schedule: Schedule, which: IntArray, layers: IntArray, slow: Slow) -> Paths:
    """Each rank's own passes behind what comes before the first, and the chain that is critical at `USUAL` durations.

    Args:
        which: class of each stage of the model; layers: of each class.
        slow: factor on each rank's passes, () = 1.
    """
    order = schedule.as_arrays()
    paired, model = order.overlapped(), np.array([schedule.model_stage(s) for s in range(schedule.num_stages)])[order.stage]
    usual = np.zeros(len(PHASE_CODE))
    for phase, seconds in USUAL.items():
        usual[PHASE_CODE[phase]] = seconds
    factor = np.array(slow or (1.0,) * schedule.num_ranks)[order.rank]
    usual_s = np.where(paired, PAIR, usual[order.phase]) * np.where(model == which.size - 1, END, 1.0)
    if slow:
        # What a slow rank holds less of it may be the faster for.
        usual_s = usual_s * factor * (layers / layers.max())[which[model]]
    played = replay(order, usual_s.tolist())
    begins, ends = np.array(order.rank_start[:-1]), np.array(order.rank_start[1:]) - 1
    chains = {_chain(order, paired, played, max(ends.tolist(), key=played.finish.__getitem__))}
    for first, last in zip(begins.tolist(), ends.tolist(), strict=True):
        row = (e for e in range(last, first - 1, -1) if e == first or order.slot[e] != order.slot[e - 1])
        chains.add((*row, *_chain(order, paired, played, first)[1:]))
    of, classes = which[model], int(which.max()) + 1
    alone, pairs = np.zeros((len(PHASE_CODE), len(chains), classes)), np.zeros((len(chains), classes, classes))
    sends, reached = np.zeros(len(chains)), np.zeros((2, len(chains)), dtype=np.int64)
    for index, chain in enumerate(sorted(chains)):
        at = np.array(chain)
        single, both = at[~paired[at]], at[paired[at]]
        np.add.at(alone[:, index], (order.phase[single], of[single]), factor[single])
        np.add.at(pairs[index], (of[both], of[both + 1]), factor[both])
        sends[index] = np.count_nonzero(np.diff(order.rank[at]))
        reached[:, index] = order.rank[at[[-1, 0]]]
    return Paths(alone, pairs, sends, *reached)


def _chain(order: OrderArrays, paired: np.ndarray, played: Replay, at: int) -> tuple[int, ...]:
    """What each pass up to the one at `at` waited for, the last first; of a pair its forward stands for both."""
    found = list[int]()
    while at >= 0:
        begin = order.rank_start[order.rank[at]]
        if paired[at] and at > begin and order.slot[at] == order.slot[at - 1]:
            at -= 1
        found.append(at)
        needed = order.prerequisites[at : at + 1 + int(paired[at])].ravel().tolist()
        # What the rank ran before comes first: of equals it needs no send.
        waits = [at - 1 if at > begin else -1, *needed]
        at = next((e for e in waits if e >= 0 and played.finish[e] == played.start[at]), -1)
    return tuple(found)


__all__ = ["Paths", "critical_paths"]
