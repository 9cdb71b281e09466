"""What shardings of the states over data-parallel ranks add to a step, in seconds and bytes, for one cut of the layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from simpar.program.program import FloatArray, IntArray
from simpar.program.waits import one_queue, reductions_block
from simpar.result.gathers import buffers_at_rest, whole_embedding_gradient
from simpar.searching.blocks import BlockTable, Composition
from simpar.searching.choice import Group, Pipeline, State, Variant
from simpar.searching.pricing import Pricing
from simpar.searching.shapes import Shape, shape_of
from simpar.searching.state_prices import StatePricer

BoolArray = NDArray[np.bool_]


@dataclass(frozen=True)
class StateBound:
    """What D shardings of the states add at least, float arrays [D, ranks] of seconds but where said otherwise.

    Attributes:
        gather: before a rank's first forward.
        reduce: after a rank's last backward.
        gathers, reduces: all seconds of the data-parallel stream before the first and after the last backwards of stages.
        loss: [D], share of the time beside those in which compute makes no progress.
        end: [D, 2]: update (and gathers after it) with states on the device, offloaded.
        serial: load of the data-parallel stream where it is busy in every micro-batch.
        stall: in which a rank's compute waits between its own ops, in all micro-batches.
        moving_costs: [D], whether no rank's update is faster offloaded.
    """

    gather: FloatArray
    reduce: FloatArray
    gathers: FloatArray
    reduces: FloatArray
    loss: FloatArray
    end: FloatArray
    serial: FloatArray
    stall: FloatArray
    moving_costs: BoolArray

    def alone(self) -> StateBound:
        """Where ranks do not wait for each other at the end of a step: of a rank's own ops only."""
        nothing = np.zeros_like(self.gather)
        return replace(self, gather=nothing, reduce=nothing, gathers=nothing, reduces=nothing)

    def take(self, rows: IntArray) -> StateBound:
        """Some of the shardings."""
        return StateBound(*(getattr(self, f.name)[rows] for f in fields(self)))


@dataclass(frozen=True)
class StateBytes:
    """Bytes of D shardings, float arrays [D, ranks].

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

    @cached_property
    def first_kind(self) -> IntArray:
        """Kind of each stage's first block, -1 of none, int array [stages]."""
        return np.array([order[0] if order else -1 for order in self.composition.orders], dtype=np.int64)

    @cached_property
    def behind(self) -> FloatArray:
        """Blocks of each rank that are not the first of their stage, float array [ranks, kinds]."""
        kinds = np.arange(self.composition.counts.shape[1])
        return np.asarray(self.held @ (self.composition.counts - (self.first_kind[:, None] == kinds)))

    @classmethod
    def of(cls, pricing: Pricing, group: Group, variant: Variant, pipeline: Pipeline) -> Cut:
        """The cut of a pipeline on a mesh."""
        slow = pricing.slow_ranks.of(group)[0]
        shape = shape_of(group.pp, pipeline.virtual_stages, pipeline.schedule, slow)
        composition = pricing.pipelines.composition(pipeline, group.pp, 0)
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
        )  # fmt: skip


class Shardings:
    """Shardings of one mesh and precision, for any cut of the layers.

    Args:
        variant: of which only the precision matters.
    """

    def __init__(self, pricing: Pricing, group: Group, variant: Variant, states: Sequence[State]) -> None:
        self.pricing, self.group, self.variant, self.states = pricing, group, variant, states
        self.trains = pricing.template.training.optimizer != "none"
        self.layouts = [pricing.state_layout(group, variant, state).layout for state in self.states]
        zero, alone = np.array([s.zero_stage for s in self.states]), group.pp == 1
        # When each communicates: the rules of `program.pipelines`.
        self.data = np.array([each.shares_state for each in self.layouts]) & self.trains
        self.always = self.data & (zero == 3) & alone
        defers = np.array([each.may_defer_reduction for each in self.layouts])
        self.reduces_always = (self.always & ~defers) | (self.data & (zero == 2) & alone)
        gathers = np.array([each.overlap_param_gather for each in self.layouts])
        self.at_start = self.data & ~self.always & ((zero == 3) | ((zero >= 1) & gathers))
        self.after = self.data & ((zero == 1) | (zero == 2)) & ~gathers
        # A bound: some blocks may keep their weights.
        self.frees = np.array([s.reshard_after_forward and not pricing.framework.data.fsdp_reuse_weights for s in self.states])
        # Fully sharded gradients go block by block even where the last micro-batch alone reduces them.
        self.hidden = np.array([each.overlap_grad_reduce for each in self.layouts]) | self.always
        # What of a sharding is hidden does not matter to its prices.
        names = [(s.zero_stage, s.shard_size, s.offload_parameters) for s in self.states]
        self.priced_as = np.array([names.index(name) for name in names], dtype=np.int64)
        self._bytes: dict[bool, FloatArray] = {}

    # -- seconds -----------------------------------------------------------------------------------------------------

    def seconds(self, cut: Cut, m: int, columns: IntArray) -> StateBound:
        """What the shardings at `columns` add to a step of m micro-batches."""
        shape, number, ranks = cut.shape, len(columns), cut.shape.ranks
        every, which = np.unique(self.priced_as[columns], return_inverse=True)
        pricers = [self.pricing.state_prices(self.group, self.variant, self.states[i]) for i in every.tolist()]
        at_start, hidden = self.at_start[columns][:, None], self.hidden[columns][:, None]
        reduces_always = self.reduces_always[columns][:, None]
        in_buckets = self.data[columns][:, None] & ~reduces_always
        zeros = np.zeros((number, ranks))
        gather = reduce = gathers = reduces = serial = stall = whole_gather = zeros
        if at_start.any() or self.after[columns].any():
            stages = np.array([p.each("gather", cut.dense, cut.expert) for p in pricers])[which][:, cut.which]
            whole_gather = stages @ cut.held.T
            blocks = np.array([p.gather for p in pricers])[which]
            first = self._first_buckets(blocks, stages, cut, hidden, reduces_always)[:, shape.first]
            gather, gathers = np.where(at_start, first, 0.0), np.where(at_start, whole_gather, 0.0)
        if in_buckets.any():
            stages = np.array([p.each("reduce", cut.dense, cut.expert) for p in pricers])[which][:, cut.which]
            whole = stages @ cut.held.T
            blocks = np.array([p.reduce for p in pricers])[which]
            own = self._first_buckets(blocks, stages, cut, hidden, reduces_always)[:, shape.first]
            # Every rank ends with the last backward of its first stage; what waits for that waits in the order of the stages (of
            # two pipelines, on the ranks of the second half, the other stage has ended before).
            behind = whole if shape.replicas == 1 else own
            reduce = np.where(in_buckets, np.where(hidden, own, behind), 0.0)
            reduces = np.where(in_buckets, np.where(hidden, whole, reduce), 0.0)
        if reduces_always.any():
            serial = m * self._every_time(cut, pricers, which, columns)
        if shape.style == "full" and self.always[columns].any():
            stall = m * self._between(cut, pricers, which, columns)
        begins = [bool(b) for b in at_start[:, 0]]
        loss = np.array([pricers[k].loss(gathers=b) for k, b in zip(which.tolist(), begins, strict=True)])
        end, costs = self._end(cut, pricers, which, whole_gather * self.after[columns][:, None])
        return StateBound(
            gather, reduce, gathers, reduces, np.where((at_start | in_buckets)[:, 0], loss, 0.0), end, serial, stall, costs
        )  # fmt: skip

    def _first_buckets(
        self, blocks: FloatArray, stages: FloatArray, cut: Cut, hidden: BoolArray, reduces_always: BoolArray
    ) -> FloatArray:
        """Seconds of the bucket that holds each stage's first block, [D, stages]; its first block alone where that is a bucket.

        Args:
            blocks: seconds of each kind of block [D, kinds]; stages: of whole stages [D, stages].
        """
        alone = (cut.first_kind >= 0) & (hidden | reduces_always)
        if self.pricing.framework.data.buckets_on_first_pipeline_rank_only:
            # Stages but the first are one bucket.
            alone &= reduces_always | (np.arange(len(cut.which)) == 0)
        return np.where(alone, blocks[:, cut.first_kind], stages)

    def _every_time(self, cut: Cut, pricers: Sequence[StatePricer], which: IntArray, columns: IntArray) -> FloatArray:
        """Seconds of the data-parallel stream for each micro-batch, [D, ranks]."""
        blocks = cut.held @ cut.composition.counts
        always = self.always[columns]
        reduce = np.array([p.reduce for p in pricers])[which] @ blocks.T
        filled = np.array([p.layout.framework.data.fills_buckets(p.layout.plan.zero_stage) for p in pricers])[which]
        if filled.any():  # one bucket is the least that they cost
            whole = np.array([p.each("reduce", cut.dense, cut.expert) for p in pricers])[which][:, cut.which]
            reduce = np.where(filled[:, None], np.minimum(whole @ cut.held.T, reduce), reduce)
        found = np.where(self.reduces_always[columns][:, None], reduce, 0.0)
        if always.any():
            gather = np.array([p.gather for p in pricers])[which]
            once = gather @ blocks.T
            last = np.array([order[-1] if order else -1 for order in cut.composition.orders], dtype=np.int64)
            kept = np.where(last >= 0, gather[:, last], 0.0) @ cut.held.T
            again = np.where(self.frees[columns][:, None], np.maximum(once - kept, 0.0), 0.0)
            found = found + np.where(always[:, None], once + again, 0.0)
        return np.asarray(found)

    def _between(self, cut: Cut, pricers: Sequence[StatePricer], which: IntArray, columns: IntArray) -> FloatArray:
        """Seconds of a micro-batch in which each rank waits for gathers and reductions of its next block, [D, ranks].

        Under full sharding, where kernels start in the order of their launch; the rules of `program.lower`.
        """
        layout, always = pricers[0].layout, self.always[columns]
        gathers = np.array([p.gather for p in pricers])[which] * (always & one_queue(layout))[:, None]
        filled = np.array([p.layout.framework.data.fills_buckets(p.layout.plan.zero_stage) for p in pricers])[which]
        waits = always & self.reduces_always[columns] & reductions_block(layout) & ~filled
        reduces = np.array([p.reduce for p in pricers])[which] * waits[:, None]
        return np.asarray((gathers + reduces) @ cut.behind.T)

    def _end(self, cut: Cut, pricers: Sequence[StatePricer], which: IntArray, gathers: FloatArray) -> tuple[FloatArray, BoolArray]:
        """Seconds of the update and of `gathers` after it, [D, 2], and where offloading the update costs time, [D]."""
        if not self.trains:
            return np.zeros((len(which), 2)), np.ones(len(which), dtype=bool)
        weights, rank = np.unique(cut.weights, axis=0, return_inverse=True)
        rows = [[p.each(what, weights[:, 0], weights[:, 1]) for what in ("update", "host update")] for p in pricers]
        each = np.array(rows)[which][:, :, rank.ravel()]
        costs = np.asarray((each[:, 1] >= each[:, 0]).all(axis=1))
        each = each * cut.shape.slow + gathers[:, None]
        # Ranks that do not wait for each other may end with the shortest update.
        together = self.data.all() and self.pricing.waits(cut.shape.style)
        return each.max(axis=2) if together else each.min(axis=2), costs

    # -- bytes -------------------------------------------------------------------------------------------------------

    def bytes(self, cut: Cut, m: int) -> StateBytes:
        """Resting bytes of every rank; the formulas of `result.memory.static_state`."""
        per = self._per_weight(m == 1 and self.group.pp == 1)
        if self.pricing.template.training.trainable == "lora":
            return self._lora_bytes(cut, per)
        dense, expert = cut.weights[:, 0], cut.weights[:, 1]
        resting = per[:, 0, 0, None] * dense + per[:, 1, 0, None] * expert + self.pricing.workspace_bytes
        resting = resting + self._gradient_buffers[:, None]
        optimizer = per[:, 0, 1, None] * dense + per[:, 1, 1, None] * expert
        if not self.trains:
            return StateBytes(resting, optimizer)
        gathered, whole, stands = self._gathered
        gathered = gathered + (self._deferred if m > 1 else 0.0)
        resting = resting + gathered[:, None] * (dense + expert) + whole[:, None] * (cut.held[:, 0] > 0) + self._frozen(cut)
        return StateBytes(resting + stands[:, None] * cut.placeholders, optimizer)

    def _per_weight(self, passing: bool) -> FloatArray:
        """Bytes per dense and per expert weight, [D, 2, 2], see `Pricing.state_bytes`."""
        if passing not in self._bytes:
            each = [self.pricing.state_bytes(self.group, self.variant, state, passing=passing) for state in self.states]
            self._bytes[passing] = np.array(each)
        return self._bytes[passing]

    @cached_property
    def _gathered(self) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Bytes per weight of what rests gathered or in DDP's buckets, of a whole embedding's gradient; 1 where tensors stand
        for gradients."""
        gathered, whole = self._ddp_buckets.copy(), np.zeros(len(self.states))
        for index, (state, layout) in enumerate(zip(self.states, self.layouts, strict=True)):
            if self.pricing.stays_gathered(self.group, state):
                gathered[index] = layout.state_bytes.gather + layout.state_bytes.reduce
                whole[index] = whole_embedding_gradient(layout)
        return gathered, whole, np.array([float(state.zero_stage < 3) for state in self.states])

    @cached_property
    def _ddp_buckets(self) -> FloatArray:
        """Bytes per trained weight of DistributedDataParallel's buckets."""
        return np.array([layout.state_bytes.bucket for layout in self.layouts])

    @cached_property
    def _gradient_buffers(self) -> FloatArray:
        """Bytes of buffers for gradients that are there throughout."""
        return np.array([buffers_at_rest(layout) for layout in self.layouts])

    @cached_property
    def _deferred(self) -> FloatArray:
        """Bytes per weight of whole gradients that wait for the last of several micro-batches."""
        deferred = self.always & ~self.reduces_always
        return np.where(deferred, [layout.state_bytes.reduce for layout in self.layouts], 0.0)

    def _frozen(self, cut: Cut) -> FloatArray:
        """Bytes of frozen encoders [D, ranks] where all else is trained."""
        held = cut.held @ (cut.composition.counts @ cut.table.frozen_dense)
        shares = []
        for state, layout in zip(self.states, self.layouts, strict=True):
            shares.append(0.0 if state.offload_parameters else 1.0 / (layout.shard_ranks if state.zero_stage == 3 else 1))
        return np.asarray(held[None, :] * np.array(shares)[:, None])

    def trained(self, cut: Cut) -> FloatArray:
        """Weights of each rank that train."""
        if self.pricing.template.training.trainable == "lora":
            return np.asarray(cut.held @ (cut.composition.counts @ cut.table.lora))
        return np.asarray(cut.weights.sum(axis=1))

    def _lora_bytes(self, cut: Cut, per: FloatArray) -> StateBytes:
        """Frozen weights in their format, and the states of the trained pairs."""
        counts = cut.composition.counts
        every, beside = cut.held @ (counts @ cut.table.lora), cut.held @ (counts @ cut.table.lora_expert)
        dense, expert = cut.held @ (counts @ cut.table.frozen_dense), cut.held @ (counts @ cut.table.frozen_expert)
        resting, optimizer = (np.zeros((len(self.states), len(cut.weights))) for _ in range(2))
        for index, (state, layout) in enumerate(zip(self.states, self.layouts, strict=True)):
            split = (layout.shard_ranks, layout.expert_shard_ranks) if state.zero_stage == 3 else (1, 1)
            frozen = 0.0 if state.offload_parameters else dense / split[0] + expert / split[1]
            states = (every - beside)[:, None] * per[index, 0] + beside[:, None] * per[index, 1]
            buffers = every * self._ddp_buckets[index] + self._gradient_buffers[index]
            resting[index] = frozen + states[:, 0] + buffers + self.pricing.workspace_bytes
            optimizer[index] = states[:, 1]
        return StateBytes(resting, optimizer)


__all__ = ["Cut", "Shardings", "StateBound", "StateBytes"]
