"""Lower bounds on step time and memory, for all layouts of one mesh, variant and pipeline at once (numpy, tier 1).

Each bound is the length of one chain of the program that `lower` would build, or the load of one serial resource:
what a rank must wait for before its first op, all its own ops, what must follow its last one, the update. The memory is not
a bound but the peak itself, unless activations are offloaded (then it depends on time, and a bound is taken).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from simpar.program.program import FloatArray
from simpar.search.blocks import B, BlockTable, Composition, F, I, W
from simpar.search.choice import Group, Offload, Pipeline, State, Variant
from simpar.search.pricing import Pricing
from simpar.search.residency import BACKWARD, INPUT, PAIR
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
        return (self.head + self.work + self.tail).max(axis=1)


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
    else:
        tail = np.zeros_like(head)
    return PipelineBound(head, work, tail)


@dataclass(frozen=True)
class StateBound:
    """What D spreads of the states add, float arrays [D, ranks] (seconds, bytes).

    Attributes:
        gather: before a rank's first forward.
        reduce: after a rank's last backward.
        end: update (and gathers after it), [D, 2]: states on the device, offloaded.
        serial: load of the data-parallel stream.
        resting: bytes of parameters, gradients, buffers; optimizer: bytes of its states.
    """

    gather: FloatArray
    reduce: FloatArray
    end: FloatArray
    serial: FloatArray
    resting: FloatArray
    optimizer: FloatArray


def state_bound(
    pricing: Pricing, group: Group, variant: Variant, states: Sequence[State], pipeline: Pipeline, m: int
) -> StateBound:
    """Bounds and bytes of `states` under one cut of the layers."""
    shape = shape_of(group.pp, pipeline.virtual_stages, pipeline.schedule)
    composition = pricing.composition(pipeline, group.pp, 0)
    table = pricing.table(group, 1, variant, "none", split=False)
    dense, expert = composition.parameters(table)
    held = [np.array(stages) for stages in shape.held.values()]
    rank_dense = np.array([dense[s].sum() for s in held])
    rank_expert = np.array([expert[s].sum() for s in held])
    rows = [
        _one_state(pricing, group, variant, state, shape, composition, table, held, (dense, expert), (rank_dense, rank_expert), m)
        for state in states
    ]
    return StateBound(*(np.array(column) for column in zip(*rows, strict=True)))


def _one_state(
    pricing: Pricing, group: Group, variant: Variant, state: State, shape: Shape, composition: Composition, table: BlockTable,
    held: list[np.ndarray], stages: tuple[FloatArray, FloatArray], ranks: tuple[FloatArray, FloatArray], m: int,
) -> tuple[FloatArray, ...]:  # fmt: skip
    layout = pricing.state_layout(group, variant, state).layout
    prices = pricing.states(group, variant, state)
    spec, zero, p = layout.framework, state.zero_stage, shape.ranks
    training = layout.training.optimizer != "none"
    data = layout.data_ranks > 1 and training
    kept_gathered = p > 1 and spec.fsdp_unsharded_with_pp
    always = zero == 3 and not kept_gathered and data
    reduce_always = data and (always or (zero == 2 and p == 1))
    at_start = data and not always and (zero == 3 or (zero >= 1 and layout.overlap_param_gather))

    def stage_seconds(what: str, stage: int) -> float:
        return pricing.data_seconds(group, variant, state, what, float(stages[0][stage]), float(stages[1][stage]))

    def first_bucket(what: str, stage: int) -> float:
        """Of the bucket that holds a stage's first block."""
        order = composition.orders[stage]
        if not order:
            return 0.0
        whole = (spec.buckets_on_first_pipeline_rank_only and stage != 0) or not layout.overlap_grad_reduce
        if whole and not reduce_always:
            return stage_seconds(what, stage)
        return float((prices.gather if what == "gather" else prices.reduce)[order[0]])

    gather, reduce, serial = np.zeros(p), np.zeros(p), np.zeros(p)
    end = np.zeros((p, 2))
    for rank, own in enumerate(held):
        if at_start:
            gather[rank] = first_bucket("gather", int(shape.first[rank]))
        if data:
            lasts = [first_bucket("reduce", int(s)) for s in own]
            reduce[rank] = lasts[int(np.flatnonzero(own == shape.first[rank])[0])] if shape.style == "full" else min(lasts)
            if not (layout.overlap_grad_reduce or reduce_always) and shape.style == "full":
                reduce[rank] = sum(stage_seconds("reduce", int(s)) for s in own)
        if always or reduce_always:
            blocks = composition.counts[own].sum(axis=0)
            serial[rank] = m * float(blocks @ prices.reduce)
            if always:
                serial[rank] += m * float(blocks @ prices.gather)
                if state.reshard_after_forward:
                    kept = sum(prices.gather[composition.orders[s][-1]] for s in own if composition.orders[s])
                    serial[rank] += m * max(float(blocks @ prices.gather - kept), 0.0)
        if training:
            for column, offloaded in enumerate((False, True)):
                end[rank, column] = pricing.optimizer_seconds(
                    group, variant, state, float(ranks[0][rank]), float(ranks[1][rank]), offloaded
                )
            if data and zero in (1, 2) and not layout.overlap_param_gather:
                end[rank] += sum(stage_seconds("gather", int(s)) for s in own)
    resting, optimizer = _resting(pricing, group, state, layout, prices, shape, composition, table, held, ranks, data)
    return gather, reduce, end.max(axis=0), serial, resting, optimizer


def _resting(
    pricing: Pricing, group: Group, state: State, layout, prices, shape: Shape, composition: Composition, table: BlockTable,  # type: ignore[no-untyped-def]
    held: list[np.ndarray], ranks: tuple[FloatArray, FloatArray], data: bool,
) -> tuple[FloatArray, FloatArray]:  # fmt: skip
    """Resting bytes of every rank; the formulas of `result.memory.static_state`."""
    dense, expert = ranks[0].copy(), ranks[1]
    for rank, own in enumerate(held):
        if 0 in own and shape.stages - 1 in own:
            dense[rank] -= layout.tied_extra
    resting = dense * prices.dense_bytes[0] + expert * prices.expert_bytes[0]
    optimizer = dense * prices.dense_bytes[1] + expert * prices.expert_bytes[1]
    if state.zero_stage == 3 and data:
        spec, bytes_ = layout.framework, layout.state_bytes
        for rank, own in enumerate(held):
            if shape.ranks > 1 and spec.fsdp_unsharded_with_pp:
                resting[rank] += (dense[rank] + expert[rank]) * (bytes_.gather + bytes_.reduce)
                continue
            present = np.flatnonzero(composition.counts[own].sum(axis=0))
            largest = float((table.dense + table.expert)[present].max(initial=0.0))
            resting[rank] += largest * bytes_.gather * (spec.fsdp_prefetch_groups + 1) + largest * (2.0 + bytes_.reduce)
    return resting, optimizer


def activation_peaks(
    pricing: Pricing, group: Group, pipeline: Pipeline, m: int, items: Sequence[tuple[BlockTable, Composition]], away: float
) -> FloatArray:
    """Peak bytes beyond the resting state, [R, ranks], of R recomputations (table, composition)."""
    kept = np.array([c.kept(t) for t, c in items])
    bumps = {
        BACKWARD: np.array([c.backward_bump(t) for t, c in items]),
        INPUT: np.array([c.largest_bump(t) for t, c in items]),
        PAIR: np.array([c.pair_bump(t) for t, c in items]),
    }
    return np.stack([r.peak(kept, bumps, away) for r in pricing.residency(pipeline, group.pp, m)], axis=1)


def combine(pipe: PipelineBound, states: StateBound, offloaded: int) -> FloatArray:
    """Step-time bounds [R, D] of every pair of recomputation and spread."""
    head = np.maximum(pipe.head[:, None] + states.gather[None, :, :1], states.gather[None])
    after = np.maximum(pipe.tail[:, None], states.reduce[None])
    chain = (head + pipe.work[:, None] + after).max(axis=2)
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
