"""Lower bounds on step time and memory, for all layouts of one mesh, variant and pipeline at once (numpy).

Each bound is the length of one chain of the program that `lower` would build, or the load of one serial resource:
what a rank must wait for before its first op, all its own ops, what must follow its last one, the update. The memory is not
a bound but the peak itself, unless activations are offloaded (then it depends on time, and a bound is taken).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from simpar.program.program import FloatArray, IntArray
from simpar.searching.blocks import B, F, I, W
from simpar.searching.in_flight import Backwards
from simpar.searching.shapes import Shape
from simpar.searching.state_sharding import StateBound


@dataclass(frozen=True)
class PipelineBound:
    """Chains of one pipeline for R recomputations, float arrays [R, ranks], seconds.

    Attributes:
        head: before a rank's first op, through the stages before its first one.
        work: a rank's own ops.
        tail: after its last op, through the same stages, until the first stage's last backward.
        around_head, around_tail: the same through all stages before its last one, without what the rank runs meanwhile; no
            more than `head` and `tail` where chunks do not go round.
        sends: float array [ranks], seconds of boundary tensors in any of these at most.
        order: ranks by their first stages; in two rows where pipelines start at both ends.
        whole: backwards are whole, so that the way back from a rank's last op is known.
        goes_round: there is a way around.
        beside: float array [ranks], seconds of sends that surely run beside a rank's own ops (see `Shape.sends_beside`).
        loss: share of these seconds in which compute makes no progress.
        density: share of any time between two of the rank's ops that sends take at most.
        joints: float array [ranks], seconds of sends that may run beside data-parallel traffic over that share.
        ways: float array [R, P], chains of passes from the first op of the rank `first` to the last one of `last`, int arrays [P].
    """

    head: FloatArray
    work: FloatArray
    tail: FloatArray
    around_head: FloatArray
    around_tail: FloatArray
    sends: FloatArray
    order: IntArray
    whole: bool
    goes_round: bool
    beside: FloatArray
    loss: float
    density: float
    joints: FloatArray
    ways: FloatArray
    first: IntArray
    last: IntArray

    def alone(self) -> PipelineBound:
        """Where ranks do not wait for each other at the end of a step: a rank's own ops only."""
        nothing = np.zeros_like(self.head)
        none: dict[str, Any] = dict.fromkeys(("head", "tail", "around_head", "around_tail"), nothing)
        return replace(self, **none, ways=self.ways[:, :0], first=self.first[:0], last=self.last[:0], whole=False, goes_round=False)

    def take(self, rows: IntArray) -> PipelineBound:
        """Some of the recomputations."""
        columns = ("head", "work", "tail", "around_head", "around_tail", "ways")
        return replace(self, **{name: getattr(self, name)[rows] for name in columns})

    @property
    def least(self) -> FloatArray:
        """[R]: without states and update."""
        ends = np.maximum(self.head, self.around_head) + np.maximum(self.tail, self.around_tail)
        return (ends + self.work + self.loss * self.beside).max(axis=1)  # type: ignore[no-any-return]

    def along(self, ends: FloatArray, way: FloatArray) -> FloatArray:
        """What comes after a rank's last op (or before its first) where every rank adds something of its own, [R, D, ranks].

        The way between a rank and the first stage passes the ranks before it: what one of them adds takes the place of the rest
        of the way behind it.

        Args:
            ends: float array [D, ranks], what each rank adds; way: `tail` or `head`.
        """
        found = ends[None] - way[:, None]
        for row in self.order:
            found[:, :, row] = np.maximum.accumulate(found[:, :, row], axis=2)
        return np.asarray(found + way[:, None])

    def around(self, ends: FloatArray, way: FloatArray, around: FloatArray) -> FloatArray:
        """The same of the way around, which passes the first stages of all ranks."""
        return np.asarray(around[:, None] + (ends[None] - way[:, None]).max(axis=2, keepdims=True))


@dataclass(frozen=True, slots=True)
class Sends:
    """Boundary tensors between the ranks of a pipeline.

    Attributes:
        seconds: of one.
        blocking: they hold the sender's compute stream.
        beside: float array [ranks], how many surely run beside the rank's own ops, see `Shape.sends_beside`.
        loss: share of their time in which compute beside them makes no progress.
        density: seconds of one over the shortest pass of a layer.
        blocks: int array [ranks], blocks of each rank: no more stretches of data-parallel traffic begin while it computes.
    """

    seconds: float
    blocking: bool
    beside: FloatArray
    loss: float
    density: float
    blocks: IntArray


def pipeline_bound(
    shape: Shape, passes: FloatArray, seconds: FloatArray, paired: FloatArray, m: int, sends: Sends, known: Ways
) -> PipelineBound:
    """The chains of a pipeline.

    Args:
        shape: of the schedule; passes: of its ranks, where some of them are pairs (see `paired_passes`).
        seconds: float array [R, 4 phases, stages], durations of whole stages.
        paired: what pairs take no less of, float array [2, R, 4 phases, stages] (see `Stages.in_pairs`).
        m: micro-batches per step.
        sends: its boundary tensors; known: the `ways` of its schedule.
    """
    forward, send, blocking = seconds[:, F], sends.seconds, float(sends.blocking)
    heads, tails, own = known
    head = [forward @ way.T + send * (count - sends.loss * passed) for way, count, passed in heads]
    if shape.style == "pairs":
        each = [np.stack([forward, least[:, F], seconds[:, B], least[:, B], seconds[:, I], seconds[:, W]]) for least in paired]
        work = np.maximum(*(np.einsum("krs,kps->rp", one, passes * shape.slow[:, None]) for one in each))
    else:
        backward = seconds[:, B] if shape.style == "full" else seconds[:, I] + seconds[:, W]
        work = m * ((forward + backward) @ shape.share.T)
    tail = [seconds[:, B] @ way.T + send * (count - sends.loss * passed) for way, count, passed in tails]
    group = shape.group(m)
    around = np.arange(shape.stages - shape.ranks, shape.stages) if group else np.zeros(shape.ranks)
    sent = send * (2.0 * (heads[0][1] + around) + m * shape.sends * blocking)
    slowed = (2.0 * send * (1.0 + sends.blocks)).astype(np.float64)
    none = np.zeros(0, dtype=np.int64)
    return PipelineBound(
        head[0], work + send * own, tail[0], head[-1], tail[-1], sent, shape.order, shape.style == "full", group > 0,
        sends.beside * send, sends.loss, sends.density, slowed, np.zeros((len(seconds), 0)), none, none,
    )  # fmt: skip


Way = tuple[FloatArray, FloatArray, FloatArray]
"""How often a chain before or after a rank's own ops passes each stage, float array [ranks, stages]; the boundary tensors in it,
and those of the rank that it takes the place of, float arrays [ranks]."""

Ways = tuple[list[Way], list[Way], FloatArray]


def ways(shape: Shape, m: int, beside: FloatArray, *, blocking: bool) -> Ways:
    """The chains before the first ops of ranks, those after their last ones (nothing where backwards are not whole), and boundary
    tensors among their own ops."""
    hops = np.minimum(np.count_nonzero(shape.before, axis=1), shape.first)
    none, full = np.zeros(shape.ranks), shape.style == "full"
    heads: list[Way] = [(shape.before, hops, none)]
    tails: list[Way] = heads.copy() if full else [(np.zeros_like(shape.before), none, none)]
    # The send of a rank's last backward is part of what follows, beside which gradients may be reduced already.
    own = blocking * (m * shape.sends - full * np.minimum(hops, 1.0))
    if group := shape.group(m):
        # The first micro-batch reaches a rank's last chunk through all stages before it; until then the rank had only the
        # forwards of one group through its other chunks to run. The same backwards, from the last micro-batch's last chunk on.
        last = np.arange(shape.stages - shape.ranks, shape.stages, dtype=np.float64)
        through = (np.arange(shape.stages)[None, :] < last[:, None]) * shape.through
        others = shape.share.copy()
        others[:, -shape.ranks :] = 0.0
        # What the rank sends meanwhile is not beside what comes after.
        chunks = group * (shape.stages // shape.ranks - 1.0)
        passed = np.minimum(chunks, 0.5 * beside)
        heads.append((through - group * others, last - chunks * blocking, passed))
        if full:
            tails.append((through - group * others, last - (chunks + 1.0) * blocking, passed))
    return heads, tails, own


def _lost(pipe: PipelineBound, loss: FloatArray, beside: FloatArray) -> FloatArray:
    """Seconds in which compute makes no progress: beside data-parallel traffic, and beside sends.

    Where both run at once the larger loss counts. One send follows on each op at most, so that of a stretch of other traffic sends
    take no more than their share of it, and as much again as one at each of its ends.

    Args:
        loss: float array [1, D, 1], share of the time `beside` data-parallel traffic, [R, D, ranks].
    """
    own = pipe.beside[None, None]
    both = np.minimum(np.minimum(beside, own), pipe.density * beside + pipe.joints)
    larger = np.maximum(loss, pipe.loss)
    return np.asarray(loss * (beside - both) + pipe.loss * (own - both) + larger * both)


def combine(pipe: PipelineBound, states: StateBound) -> FloatArray:
    """Step-time bounds [2, R, D] of every pair of recomputation and sharding, with the optimizer on the device and offloaded.

    The data-parallel stream is busy from the start until its gathers are through, and what runs beside it is slowed: no chain of
    ops makes progress during `loss` of that time, whatever ranks it passes, but for what it waits for first and sends. Of a
    rank's reductions, what does not come after its last op runs beside its compute (what does costs more than it would have
    slowed); a way around leaves the rank before they begin.
    """
    work, loss = pipe.work[:, None], states.loss[None, :, None]
    # It cannot slow more than there is.
    most = np.maximum(work - pipe.sends, 0.0) / (1.0 - loss)
    gathering = (states.gathers.min(axis=1) - states.gather.max(axis=1))[None, :, None] - pipe.sends
    head = pipe.along(states.gather, pipe.head)
    after = pipe.along(states.reduce, pipe.tail) if pipe.whole else states.reduce[None]
    reducing = np.maximum(states.reduces[None] - after, 0.0)
    beside = np.maximum(np.maximum(gathering, states.gathers[None] - head), 0.0) + reducing
    chain = head + after + _lost(pipe, loss, np.minimum(beside, most))
    if pipe.goes_round:
        gathering = np.maximum(gathering, 0.0)
        round_head = pipe.around(states.gather, pipe.head, pipe.around_head)
        chain = np.maximum(chain, round_head + after + _lost(pipe, loss, np.minimum(gathering + reducing, most)))
        if pipe.whole:
            round_after = pipe.around(states.reduce, pipe.tail, pipe.around_tail)
            alone = _lost(pipe, loss, np.minimum(gathering, most))
            chain = np.maximum(chain, np.maximum(head, round_head) + round_after + alone)
    found = np.maximum((chain + work + states.stall[None]).max(axis=2), states.serial.max(axis=1)[None])
    if len(pipe.first):
        ends = states.gather[:, pipe.first] + states.reduce[:, pipe.last]
        found = np.maximum(found, (pipe.ways[:, None] + ends[None]).max(axis=2))
    return np.asarray(found + states.end.T[:, None])


def host_path(pipe: PipelineBound, turn: Backwards, seconds: FloatArray, moved: FloatArray) -> FloatArray:
    """Seconds until the last activations are back from the host and the first stage has their gradients, [R].

    All of a rank's activations go to the host one after the other, and so they come back. Before a backward can begin, its forward
    and all before that have run, and what they keep has gone; then the rest runs and comes back.

    Args:
        seconds: float array [R, 4 phases, stages], durations of whole stages.
        moved: float array [R, stages], seconds of a copy of what a stage keeps.
    """
    run, gone = seconds[:, F] @ turn.before.T, moved @ turn.before.T
    begin = np.maximum(pipe.head[:, turn.rank] + np.maximum(run, gone), pipe.around_head[:, turn.rank] + run)
    rest, back = np.einsum("rks,kcs->rc", seconds, turn.after), moved @ (turn.after[B] + turn.after[I]).T
    return np.asarray((begin + np.maximum(rest, back) + pipe.tail[:, turn.rank]).max(axis=1))


def device_bytes(activations: FloatArray, resting: FloatArray, fragmentation: float, outside: float) -> FloatArray:
    """Peak use of the fullest device, [R, D], of activations [R, ranks] over resting states [D, ranks]."""
    total = activations[:, None] + resting[None]
    return np.asarray(total.max(axis=2) * fragmentation + outside)


__all__ = ["PipelineBound", "Sends", "Ways", "combine", "device_bytes", "host_path", "pipeline_bound", "ways"]
