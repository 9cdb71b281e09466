"""What spreads of the states over data-parallel ranks add to a step, in seconds and bytes, for one cut of the layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from simpar.parallel.layout import Layout
from simpar.program.program import FloatArray, IntArray
from simpar.result.gathers import whole_embedding_gradient
from simpar.search.blocks import BlockTable, Composition
from simpar.search.choice import Group, Pipeline, State, Variant
from simpar.search.pricing import Pricing
from simpar.search.shapes import Shape, shape_of
from simpar.specs.framework import FrameworkSpec


@dataclass(frozen=True)
class StateBound:
    """What D spreads of the states add at least, float arrays [D, ranks] of seconds but where said otherwise.

    Attributes:
        gather: before a rank's first forward.
        reduce: after a rank's last backward.
        gathers, reduces: all seconds of the data-parallel stream before the first and after the last backwards of stages.
        loss: [D], share of the time beside those in which compute makes no progress.
        end: [D, 2]: update (and gathers after it) with states on the device, offloaded.
        serial: load of the data-parallel stream where it is busy in every micro-batch.
        moving_costs: [D], whether no rank's update is faster offloaded.
    """

    gather: FloatArray
    reduce: FloatArray
    gathers: FloatArray
    reduces: FloatArray
    loss: FloatArray
    end: FloatArray
    serial: FloatArray
    moving_costs: NDArray[np.bool_]

    def alone(self) -> StateBound:
        """Where ranks do not wait for each other at the end of a step: of a rank's own ops only."""
        nothing = np.zeros_like(self.gather)
        return replace(self, gather=nothing, reduce=nothing, gathers=nothing, reduces=nothing)

    @classmethod
    def of(cls, rows: Sequence[tuple[object, ...]]) -> StateBound:
        """From one row per spread."""
        return cls(*(np.array(column) for column in zip(*rows, strict=True)))


@dataclass(frozen=True)
class StateBytes:
    """Bytes of D spreads, float arrays [D, ranks].

    Attributes:
        resting: parameters, gradients, buffers.
        optimizer: its states.
    """

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
        tied_extra: weights counted twice on a rank with both ends.
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
    tied_extra: float

    @cached_property
    def first_kind(self) -> IntArray:
        """Kind of each stage's first block, -1 of none, int array [stages]."""
        return np.array([order[0] if order else -1 for order in self.composition.orders], dtype=np.int64)

    @classmethod
    def of(cls, pricing: Pricing, group: Group, variant: Variant, pipeline: Pipeline) -> Cut:
        """The cut of a pipeline on a mesh."""
        shape = shape_of(group.pp, pipeline.virtual_stages, pipeline.schedule)
        composition = pricing.composition(pipeline, group.pp, 0)
        table = pricing.weights(group, variant)
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
        return cls(
            shape, composition, table, held, distinct[:, 0], distinct[:, 1], which.ravel(), held @ pairs, np.array(stand_ins),
            pricing.tied_extra(group, variant),
        )  # fmt: skip


def resting_bytes(pricing: Pricing, group: Group, variant: Variant, states: Sequence[State], cut: Cut, m: int) -> StateBytes:
    """Resting bytes of every rank under every spread."""
    rows = [_resting(pricing, group, variant, state, cut, m) for state in states]
    return StateBytes(np.array([r for r, _ in rows]), np.array([o for _, o in rows]))


@dataclass(frozen=True, slots=True)
class Hidden:
    """Whether gradients are reduced beside the backward, parameters gathered beside the forward."""

    reduce: bool
    gather: bool

    @classmethod
    def of(cls, spec: FrameworkSpec, state: State) -> Hidden:
        """Of a spread; the rule of `Layout`."""
        gather = state.overlap_param_gather
        reduce = spec.reduces_beside_backward(state.zero_stage, state.overlap_grad_reduce)
        return cls(reduce, spec.overlap_param_gather if gather is None else gather)


@dataclass(frozen=True)
class Traffic:
    """When a spread communicates; the rules of `program.lower`."""

    data: bool
    always: bool
    reduce_always: bool
    at_start: bool
    after: bool

    @classmethod
    def of(cls, layout: Layout, group: Group, zero: int, gather: bool) -> Traffic:
        """Of a layout; `gather`: parameters are gathered beside the forward."""
        data = layout.data_ranks > 1 and layout.training.optimizer != "none"
        always = data and zero == 3 and not (group.pp > 1 and layout.framework.fsdp_unsharded_with_pp)
        start = data and not always and (zero == 3 or (zero >= 1 and gather))
        after = data and zero in (1, 2) and not gather
        return cls(data, always, data and (always or (zero == 2 and group.pp == 1)), start, after)


def state_seconds(
    pricing: Pricing, group: Group, variant: Variant, state: State, cut: Cut, m: int
) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray, float, FloatArray, FloatArray, bool]:
    """One row of a `StateBound`."""
    prices = pricing.state_prices(group, variant, state)
    overlap = Hidden.of(pricing.framework, state)
    traffic = Traffic.of(prices.layout, group, state.zero_stage, overlap.gather)
    shape, p = cut.shape, cut.shape.ranks
    zeros = np.zeros(p)
    gather, reduce, gathers, reduces, serial, loss = zeros, zeros, zeros, zeros, zeros, 0.0
    whole: dict[str, FloatArray] = {}

    def stages(what: str) -> FloatArray:
        """Seconds for each whole stage."""
        if what not in whole:
            whole[what] = prices.each(what, cut.dense, cut.expert)[cut.which]
        return whole[what]

    bucketed = overlap.reduce or traffic.reduce_always
    only_first = pricing.framework.buckets_on_first_pipeline_rank_only and not traffic.reduce_always
    if traffic.at_start:
        first = _first_buckets(prices.gather, stages("gather"), cut, only_first, bucketed=bucketed)
        gather, gathers = first[shape.first], cut.held @ stages("gather")
    if traffic.data and not traffic.reduce_always:
        first = _first_buckets(prices.reduce, stages("reduce"), cut, only_first, bucketed=bucketed)
        whole_stream = cut.held @ stages("reduce")
        # Every rank ends with the last backward of its first stage; what waits for that waits in the order of the stages (of two
        # pipelines, on the ranks of the second half, the other stage has ended before).
        own = first[shape.first]
        behind = whole_stream if shape.replicas == 1 else np.where(np.arange(p) < p // 2, whole_stream, own)
        reduce = own if overlap.reduce else behind
        reduces = whole_stream if overlap.reduce else reduce
    if traffic.always or traffic.reduce_always:
        blocks = cut.held @ cut.composition.counts
        serial = m * (blocks @ prices.reduce)
        if traffic.always:
            serial = serial + m * (blocks @ prices.gather)
            if state.reshard_after_forward:
                kept = np.array([prices.gather[o[-1]] if o else 0.0 for o in cut.composition.orders])
                serial = serial + m * np.maximum(blocks @ prices.gather - cut.held @ kept, 0.0)
    if traffic.at_start or (traffic.data and not traffic.reduce_always):
        loss = prices.loss(gathers=traffic.at_start)
    end, costs = np.zeros(2), True
    if pricing.template.training.optimizer != "none":
        dense, expert = cut.weights[:, 0], cut.weights[:, 1]
        each = np.stack([prices.each("update", dense, expert), prices.each("host update", dense, expert)], axis=1)
        costs = bool((each[:, 1] >= each[:, 0]).all())
        if traffic.after:
            each = each + (cut.held @ stages("gather"))[:, None]
        # Ranks that do not wait for each other may end with the shortest update.
        end = each.max(axis=0) if traffic.data and pricing.waits(shape.style) else each.min(axis=0)
    return gather, reduce, gathers, reduces, loss, end, serial, costs


def _first_buckets(blocks: FloatArray, stages: FloatArray, cut: Cut, only_first: bool, *, bucketed: bool) -> FloatArray:
    """Seconds of the bucket that holds each stage's first block, [stages]; its first block alone where that is a bucket.

    Args:
        blocks: seconds of each kind of block; stages: of whole stages.
        only_first: stages but the first are one bucket.
    """
    if not bucketed:
        return stages
    alone = cut.first_kind >= 0
    if only_first:
        alone &= np.arange(len(alone)) == 0
    return np.where(alone, blocks[cut.first_kind], stages)


def _resting(
    pricing: Pricing, group: Group, variant: Variant, state: State, cut: Cut, m: int
) -> tuple[FloatArray, FloatArray]:
    """Resting bytes of every rank; the formulas of `result.memory.static_state`."""
    per = pricing.state_bytes(group, variant, state, passing=m == 1 and group.pp == 1)
    if pricing.template.training.trainable == "lora":
        return _resting_lora(pricing.state_layout(group, variant, state).layout, state, cut, per)
    both = (cut.held[:, 0] > 0) & (cut.held[:, -1] > 0)
    dense, expert = cut.weights[:, 0] - both * cut.tied_extra, cut.weights[:, 1]
    resting = dense * per[0][0] + expert * per[1][0]
    optimizer = dense * per[0][1] + expert * per[1][1]
    if pricing.template.training.optimizer == "none":
        return resting, optimizer
    if pricing.stays_gathered(group, state):
        bytes_ = pricing.per_weight(group, variant, state)
        resting = resting + (dense + expert) * (bytes_.gather + bytes_.reduce)
        whole = whole_embedding_gradient(pricing.state_layout(group, variant, state).layout)
        resting = resting + (cut.held[:, 0] > 0) * whole
    return resting + (cut.placeholders if state.zero_stage < 3 else 0.0), optimizer


def _resting_lora(
    layout: Layout, state: State, cut: Cut, per: tuple[tuple[float, float], tuple[float, float]]
) -> tuple[FloatArray, FloatArray]:
    """Frozen weights at 2 bytes, and the states of the trained pairs (never offloaded)."""
    trained = cut.held @ (cut.composition.counts @ cut.table.lora)
    both = (cut.held[:, 0] > 0) & (cut.held[:, -1] > 0)
    split = (layout.shard_ranks, layout.expert_shard_ranks) if state.zero_stage == 3 else (1, 1)
    frozen = 2.0 * (cut.weights[:, 0] - both * cut.tied_extra) / split[0] + 2.0 * cut.weights[:, 1] / split[1]
    return frozen + trained * (per[0][0] + per[0][1]), np.zeros_like(trained)


__all__ = ["Cut", "StateBound", "StateBytes", "Traffic", "resting_bytes", "state_seconds"]
