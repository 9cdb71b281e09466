"""Lower bounds on step time and memory, for all layouts of one mesh, variant and pipeline at once (numpy, tier 1).

Each bound is the length of one chain of the program that `lower` would build, or the load of one serial resource:
what a rank must wait for before its first op, all its own ops, what must follow its last one, the update. The memory is not
a bound but the peak itself, unless activations are offloaded (then it depends on time, and a bound is taken).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from simpar.parallel.layout import Layout
from simpar.program.program import FloatArray, IntArray
from simpar.search.blocks import B, BlockTable, Composition, F, Gathered, I, W
from simpar.search.choice import Group, Offload, Pipeline, State, Variant
from simpar.search.pricing import Pricing
from simpar.search.residency import StageBytes
from simpar.search.shapes import Shape, shape_of


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


@dataclass(frozen=True)
class StateBound:
    """What D spreads of the states add, float arrays [D, ranks] (seconds, bytes) but where said otherwise.

    Attributes:
        gather: before a rank's first forward.
        reduce: after a rank's last backward.
        gathers, reduces: all seconds of the data-parallel stream before the first and after the last backwards of stages.
        loss: [D], share of the time beside those in which compute makes no progress.
        end: [D, 2]: update (and gathers after it) with states on the device, offloaded.
        serial: load of the data-parallel stream where it is busy in every micro-batch.
        resting: bytes of parameters, gradients, buffers; optimizer: bytes of its states.
    """

    gather: FloatArray
    reduce: FloatArray
    gathers: FloatArray
    reduces: FloatArray
    loss: FloatArray
    end: FloatArray
    serial: FloatArray
    resting: FloatArray
    optimizer: FloatArray


@dataclass(frozen=True)
class Cut:
    """One cut of the layers over ranks, for the states.

    Attributes:
        shape, composition: of the pipeline.
        table: weights of each kind of block.
        held: float array [ranks, stages], 1 where a rank holds a stage.
        dense, expert: distinct weights of whole stages; which: int array [stages] into them.
        weights: [ranks, 2], weights of a rank, dense and expert.
        placeholders: [ranks], bytes that stand for weight gradients: one tensor of every shape.
    """

    shape: Shape
    composition: Composition
    table: BlockTable
    held: FloatArray
    dense: FloatArray
    expert: FloatArray
    which: IntArray
    weights: FloatArray
    placeholders: FloatArray

    @classmethod
    def of(cls, pricing: Pricing, group: Group, variant: Variant, pipeline: Pipeline) -> Cut:
        """The cut of a pipeline on a mesh."""
        shape = shape_of(group.pp, pipeline.virtual_stages, pipeline.schedule)
        composition = pricing.composition(pipeline, group.pp, 0)
        table = pricing.table(group, 1, variant, "none", split=False)
        pairs = np.stack(composition.parameters(table), axis=1)
        distinct, which = np.unique(pairs, axis=0, return_inverse=True)
        held = (shape.share > 0).astype(np.float64)
        present = (held @ composition.counts) > 0
        stand_ins: list[float] = []
        for row in present:
            shapes: dict[tuple[int, int], float] = {}
            for kind in np.flatnonzero(row):
                shapes |= table.shapes[kind]
            stand_ins.append(sum(shapes.values()))
        placeholders = np.array(stand_ins)
        return cls(shape, composition, table, held, distinct[:, 0], distinct[:, 1], which.ravel(), held @ pairs, placeholders)


def state_bound(
    pricing: Pricing, group: Group, variant: Variant, states: Sequence[State], pipeline: Pipeline, m: int
) -> StateBound:
    """Bounds and bytes of `states` under one cut of the layers."""
    cut = Cut.of(pricing, group, variant, pipeline)
    rows = [(*_seconds(pricing, group, variant, s, cut, m), *_resting(pricing, group, variant, s, cut, m)) for s in states]
    return StateBound(*(np.array(column) for column in zip(*rows, strict=True)))


@dataclass(frozen=True)
class Traffic:
    """When a spread communicates; the rules of `program.lower`."""

    data: bool
    always: bool
    reduce_always: bool
    at_start: bool
    after: bool

    @classmethod
    def of(cls, layout: Layout, group: Group, zero: int) -> Traffic:
        """Of one layout."""
        data = layout.data_ranks > 1 and layout.training.optimizer != "none"
        always = data and zero == 3 and not (group.pp > 1 and layout.framework.fsdp_unsharded_with_pp)
        start = data and not always and (zero == 3 or (zero >= 1 and layout.overlap_param_gather))
        after = data and zero in (1, 2) and not layout.overlap_param_gather
        return cls(data, always, data and (always or (zero == 2 and group.pp == 1)), start, after)


def _seconds(
    pricing: Pricing, group: Group, variant: Variant, state: State, cut: Cut, m: int
) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray, float, FloatArray, FloatArray]:
    layout = pricing.state_layout(group, variant, state).layout
    traffic = Traffic.of(layout, group, state.zero_stage)
    shape, p = cut.shape, cut.shape.ranks
    zeros = np.zeros(p)
    gather, reduce, gathers, reduces, serial, loss = zeros, zeros, zeros, zeros, zeros, 0.0
    whole: dict[str, FloatArray] = {}

    def stages(what: str) -> FloatArray:
        """Seconds for each whole stage."""
        if what not in whole:
            pairs = zip(cut.dense, cut.expert, strict=True)
            each = [pricing.data_seconds(group, variant, state, what, float(d), float(e)) for d, e in pairs]
            whole[what] = np.array(each)[cut.which]
        return whole[what]

    if traffic.at_start:
        first = _first_buckets(pricing, group, variant, state, cut, traffic, "gather", stages)
        gather, gathers = first[shape.first], cut.held @ stages("gather")
    if traffic.data and not traffic.reduce_always:
        first = _first_buckets(pricing, group, variant, state, cut, traffic, "reduce", stages)
        whole_stream = cut.held @ stages("reduce")
        if shape.style == "full":
            reduce = first[shape.first] if layout.overlap_grad_reduce else whole_stream
        else:
            reduce = np.where(cut.held > 0, first[None, :], np.inf).min(axis=1)
        reduces = whole_stream if layout.overlap_grad_reduce else reduce
    if traffic.always or traffic.reduce_always:
        prices = pricing.states(group, variant, state)
        blocks = cut.held @ cut.composition.counts
        serial = m * (blocks @ prices.reduce)
        if traffic.always:
            serial = serial + m * (blocks @ prices.gather)
            if state.reshard_after_forward:
                kept = np.array([prices.gather[o[-1]] if o else 0.0 for o in cut.composition.orders])
                serial = serial + m * np.maximum(blocks @ prices.gather - cut.held @ kept, 0.0)
    if traffic.at_start or (traffic.data and not traffic.reduce_always):
        loss = pricing.loss(group, variant, state, gathers=traffic.at_start)
    end = np.zeros((p, 2))
    end = end.max(axis=0)
    if layout.training.optimizer != "none":
        known = {
            (d, e): [pricing.optimizer_seconds(group, variant, state, d, e, offloaded) for offloaded in (False, True)]
            for d, e in {(float(d), float(e)) for d, e in cut.weights}
        }
        each = np.array([known[float(d), float(e)] for d, e in cut.weights])
        if traffic.after:
            each = each + (cut.held @ stages("gather"))[:, None]
        # Ranks that do not wait for each other may end with the shortest update.
        end = each.max(axis=0) if traffic.data and pricing.waits(shape.style) else each.min(axis=0)
    return gather, reduce, gathers, reduces, loss, end, serial


def _first_buckets(
    pricing: Pricing, group: Group, variant: Variant, state: State, cut: Cut, traffic: Traffic, what: str,
    stages: Callable[[str], FloatArray],
) -> FloatArray:  # fmt: skip
    """Seconds of the bucket that holds each stage's first block, [stages]; its first block alone where that is a bucket."""
    layout = pricing.state_layout(group, variant, state).layout
    found = stages(what).copy()
    bucketed = layout.overlap_grad_reduce or traffic.reduce_always
    if bucketed:
        prices = getattr(pricing.states(group, variant, state), what)
        only_first = layout.framework.buckets_on_first_pipeline_rank_only and not traffic.reduce_always
        for stage, order in enumerate(cut.composition.orders):
            if order and not (only_first and stage != 0):
                found[stage] = prices[order[0]]
    return found


def _resting(
    pricing: Pricing, group: Group, variant: Variant, state: State, cut: Cut, m: int
) -> tuple[FloatArray, FloatArray]:
    """Resting bytes of every rank; the formulas of `result.memory.static_state`."""
    layout = pricing.state_layout(group, variant, state).layout
    shape, per = cut.shape, pricing.state_bytes(group, variant, state, passing=m == 1 and group.pp == 1)
    if layout.options.lora_rank:
        return _resting_lora(layout, state, cut, per)
    both = (cut.held[:, 0] > 0) & (cut.held[:, -1] > 0)
    dense, expert = cut.weights[:, 0] - both * layout.tied_extra, cut.weights[:, 1]
    resting = dense * per[0][0] + expert * per[1][0]
    optimizer = dense * per[0][1] + expert * per[1][1]
    if layout.training.optimizer == "none":
        return resting, optimizer
    if state.zero_stage == 3 and layout.data_ranks > 1 and shape.ranks > 1 and layout.framework.fsdp_unsharded_with_pp:
        resting = resting + (dense + expert) * (layout.state_bytes.gather + layout.state_bytes.reduce)
    return resting + (cut.placeholders if state.zero_stage < 3 else 0.0), optimizer


def _resting_lora(
    layout: Layout, state: State, cut: Cut, per: tuple[tuple[float, float], tuple[float, float]]
) -> tuple[FloatArray, FloatArray]:
    """Frozen weights at 2 bytes, and the states of the trained pairs (never offloaded)."""
    trained = cut.held @ (cut.composition.counts @ cut.table.lora)
    both = (cut.held[:, 0] > 0) & (cut.held[:, -1] > 0)
    split = (layout.shard_ranks, layout.expert_shard_ranks) if state.zero_stage == 3 else (1, 1)
    frozen = 2.0 * (cut.weights[:, 0] - both * layout.tied_extra) / split[0] + 2.0 * cut.weights[:, 1] / split[1]
    return frozen + trained * (per[0][0] + per[0][1]), np.zeros_like(trained)


def activation_peaks(
    pricing: Pricing, group: Group, pipeline: Pipeline, m: int, items: Sequence[tuple[BlockTable, Composition]], away: float,
    gathered: Gathered | None = None, sent: float = 0.0, *, sharded: bool = False,
) -> FloatArray:  # fmt: skip
    """Peak bytes beyond the resting state, [R, ranks], of R recomputations (table, composition).

    Args:
        away: fraction of the activations that is offloaded; then a lower bound.
        gathered: weights that come and go with their blocks.
        sent: bytes of a stage's output, where it stays.
        sharded: weights are fully sharded.
    """
    columns = zip(*(c.bytes(t, gathered, sent, sharded=sharded) for t, c in items), strict=True)
    stage = StageBytes(*(np.array(column) for column in columns))
    return np.stack([r.peak(stage, away) for r in pricing.residency(pipeline, group.pp, m)], axis=1)


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


def device_bytes(
    pricing: Pricing, activations: FloatArray, states: StateBound, offload: Offload, outside: float
) -> FloatArray:
    """Peak use of the fullest device, [R, D]."""
    resting = states.resting + (0.0 if offload.optimizer else 1.0) * states.optimizer
    total = activations[:, None] + resting[None]
    return np.asarray(total.max(axis=2) * pricing.framework.fragmentation + outside)


__all__ = [
    "PipelineBound", "StateBound", "activation_peaks", "combine", "device_bytes", "pipeline_bound", "state_bound",
]  # fmt: skip
