"""Lower bounds on step time and memory, for all layouts of one mesh, variant and pipeline at once (numpy, tier 1).

Each bound is the length of one chain of the program that `lower` would build, or the load of one serial resource:
what a rank must wait for before its first op, all its own ops, what must follow its last one, the update. The memory is not
a bound but the peak itself, unless activations are offloaded (then it depends on time, and a bound is taken).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from simpar.program.program import FloatArray
from simpar.search.blocks import B, F, I, W
from simpar.search.shapes import Shape
from simpar.search.spreads import StateBound


@dataclass(frozen=True)
class PipelineBound:
    """Chains of one pipeline for R recomputations, float arrays [R, ranks], seconds.

    Attributes:
        head: before a rank's first op.
        work: a rank's own ops.
        tail: after its last op, until the first stage's last backward.
        serial: load of other serial resources (host copies are added where they are chosen).
    """

    head: FloatArray
    work: FloatArray
    tail: FloatArray

    def alone(self) -> PipelineBound:
        """Where ranks do not wait for each other at the end of a step: a rank's own ops only."""
        return PipelineBound(np.zeros_like(self.head), self.work, np.zeros_like(self.tail))

    @property
    def least(self) -> FloatArray:
        """[R]: without states and update."""
        return (self.head + self.work + self.tail).max(axis=1)  # type: ignore[no-any-return]


def pipeline_bound(
    shape: Shape, seconds: FloatArray, compute: FloatArray, m: int, send: float, *, blocking: bool
) -> PipelineBound:
    """The chains of a pipeline.

    Args:
        shape: of the schedule.
        seconds: float array [R, 4 phases, stages], durations of whole stages.
        compute: the same without communication, for passes that overlap.
        m: micro-batches per step.
        send: seconds of one boundary tensor.
        blocking: sends hold the sender's compute stream.
    """
    forward = seconds[:, F]
    if shape.style == "pairs":
        forward = compute[:, F]
        whole = forward + np.minimum(compute[:, B], compute[:, I] + compute[:, W])
    elif shape.style == "split":
        whole = forward + seconds[:, I] + seconds[:, W]
    else:
        whole = forward + seconds[:, B]
    hops = shape.before @ (np.ones(shape.stages))
    crossing = np.minimum(hops, shape.first) * send
    head = forward @ shape.before.T + crossing
    work = m * (whole @ shape.share.T)
    if blocking:
        work = work + m * shape.sends * send
    if shape.style == "full":
        tail = seconds[:, B] @ shape.before.T + crossing
        if blocking:
            # The send of a rank's last backward is part of what follows, beside which gradients may be reduced already.
            work = work - np.minimum(crossing, send)
    else:
        tail = np.zeros_like(head)
    group = shape.group(m)
    if group:
        # The first micro-batch reaches a rank's last chunk through all stages before it; until then the rank had only the
        # forwards of one group through its other chunks to run. The same backwards, from the last micro-batch's last chunk on.
        last = np.arange(shape.stages - shape.ranks, shape.stages)
        through = np.arange(shape.stages)[None, :] < last[:, None]
        others = shape.share.copy()
        others[:, -shape.ranks :] = 0.0
        spared = group * (shape.stages // shape.ranks - 1) * send if blocking else 0.0
        head = np.maximum(head, forward @ through.T + last * send - group * (forward @ others.T) - spared)
        if shape.style == "full":
            backward = seconds[:, B]
            tail = np.maximum(tail, backward @ through.T + last * send - group * (backward @ others.T) - spared - blocking * send)
    return PipelineBound(head, work, tail)


def combine(pipe: PipelineBound, states: StateBound, offloaded: int) -> FloatArray:
    """Step-time bounds [R, D] of every pair of recomputation and spread."""
    head = np.maximum(pipe.head[:, None] + states.gather[None, :, :1], states.gather[None])
    after = np.maximum(pipe.tail[:, None], states.reduce[None])
    # The stream is busy from the start, so what is left of it when the rank starts slows its compute; of the reductions what does
    # not come after the last compute runs beside compute (what comes after costs more than it would have slowed).
    beside = np.maximum(states.gathers[None] - head, 0.0) + np.maximum(states.reduces[None] - after, 0.0)
    # It cannot slow more than there is.
    beside = np.minimum(beside, pipe.work[:, None] / (1.0 - states.loss)[None, :, None])
    chain = (head + pipe.work[:, None] + after + states.loss[None, :, None] * beside).max(axis=2)
    found = np.maximum(chain, states.serial.max(axis=1)[None]) + states.end[None, :, offloaded]
    return np.asarray(found)


def device_bytes(activations: FloatArray, resting: FloatArray, fragmentation: float, outside: float) -> FloatArray:
    """Peak use of the fullest device, [R, D], of activations [R, ranks] over resting states [D, ranks]."""
    total = activations[:, None] + resting[None]
    return np.asarray(total.max(axis=2) * fragmentation + outside)


@dataclass(frozen=True)
class Chains:
    """`PipelineBound.least` of one pipeline as linear forms, so that many pipelines take one matrix product.

    Attributes:
        forward, backward: float arrays [chains, stages], how often a chain passes each stage's forward and backward.
        sends: float array [chains], boundary tensors in it.
    """

    forward: FloatArray
    backward: FloatArray
    sends: FloatArray


def chains(shape: Shape, m: int, *, blocking: bool, waits: bool = True) -> Chains:
    """The chains of a pipeline; the backward of a schedule that splits it is input and weight gradient together.

    Args:
        waits: ranks wait for each other at the end of a step; else only their own ops count.
    """
    ranks, stages, full = shape.ranks, shape.stages, shape.style == "full"
    hops = np.minimum(shape.before.sum(axis=1), shape.first)
    nothing = np.zeros((ranks, stages))
    work = m * shape.share
    sends = m * shape.sends * float(blocking) - (np.minimum(hops, 1.0) if blocking and full else 0.0)
    if not waits:
        return Chains(work, work, sends)
    heads = [(shape.before, hops)]
    tails = [(shape.before, hops) if full else (nothing, np.zeros(ranks))]
    group = shape.group(m)
    if group:
        last = np.arange(stages - ranks, stages)
        through = (np.arange(stages)[None, :] < last[:, None]).astype(np.float64)
        others = shape.share.copy()
        others[:, -ranks:] = 0.0
        spared = float(group * (stages // ranks - 1) * blocking)
        heads.append((through - group * others, last - spared))
        if full:
            tails.append((through - group * others, last - spared - float(blocking)))
    pairs = [(h, t) for h in heads for t in tails]
    return Chains(
        np.concatenate([work + h[0] for h, _ in pairs]), np.concatenate([work + t[0] for _, t in pairs]),
        np.concatenate([sends + h[1] + t[1] for h, t in pairs]),
    )  # fmt: skip


__all__ = ["Chains", "PipelineBound", "chains", "combine", "device_bytes", "pipeline_bound"]
