"""Memory of each pipeline rank over the step, by category, from the layout and the timeline."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from simpar.engine.timeline import Timeline
from simpar.parallel.data import state_memory
from simpar.parallel.keys import BlockOp, Compute, LaunchGap, Offload, Overlapped
from simpar.parallel.layout import Layout
from simpar.parallel.split import LocalBlock
from simpar.program.program import FloatArray, OpKind, Program

CATEGORIES = (
    "parameters", "gradients", "optimizer", "activations", "recompute", "gradients_in_flight", "logits",
    "fsdp_buffers", "communication_buffers",
)  # fmt: skip
"""What the allocator holds; the CUDA context and NCCL live outside of it."""


@dataclass(frozen=True)
class RankMemory:
    """One pipeline rank's memory.

    Attributes:
        rank: pipeline rank.
        static: (category, bytes) that rest through the step.
        times: seconds [events], ascending.
        dynamic: bytes [events, categories] after each event, of CATEGORIES.
        outside: context and NCCL bytes, outside the allocator.
        fragmentation: reserved over allocated.
    """

    rank: int
    static: tuple[tuple[str, float], ...]
    times: FloatArray
    dynamic: FloatArray
    outside: tuple[tuple[str, float], ...]
    fragmentation: float

    @cached_property
    def total(self) -> FloatArray:
        """Allocated bytes after each event."""
        dynamic: FloatArray = self.dynamic.sum(axis=1)
        return dynamic + sum(v for _, v in self.static)

    @property
    def peak_index(self) -> int:
        """Event at which the most is allocated."""
        return int(np.argmax(self.total))

    @property
    def allocated_bytes(self) -> float:
        """Peak allocated."""
        return float(self.total.max())

    @property
    def reserved_bytes(self) -> float:
        """Peak reserved by the caching allocator."""
        return self.allocated_bytes * self.fragmentation

    @property
    def device_bytes(self) -> float:
        """Peak use of the device: reserved, context and NCCL."""
        return self.reserved_bytes + sum(v for _, v in self.outside)

    @property
    def peak_time_s(self) -> float:
        """When the peak is reached."""
        return float(self.times[self.peak_index])

    @property
    def at_peak(self) -> dict[str, float]:
        """Bytes by category at the peak."""
        found = dict(self.static)
        for name, amount in zip(CATEGORIES, self.dynamic[self.peak_index], strict=True):
            if amount:
                found[name] = found.get(name, 0.0) + float(amount)
        return found


def static_state(layout: Layout, stages: list[int]) -> tuple[tuple[str, float], ...]:
    """Resting parameters, gradients and optimizer state of a rank that holds these model stages."""
    dense = experts = 0.0
    for stage in stages:
        more_dense, more_experts = layout.block_parameters(stage, 0, len(layout.stage_blocks[stage]))
        dense, experts = dense + more_dense, experts + more_experts
    first_and_last = 0 in stages and layout.num_stages - 1 in stages
    if first_and_last:
        dense -= layout.tied_extra
    state, zero = layout.state_bytes, layout.plan.zero_stage
    a = state_memory(dense, state, zero, layout.shard_ranks)
    b = state_memory(experts, state, zero, layout.expert_shard_ranks)
    if layout.training.optimizer == "none":
        return (("parameters", a.parameters + b.parameters),)
    offloaded = layout.plan.offload.optimizer
    found = [
        ("parameters", a.parameters + b.parameters),
        ("gradients", a.gradients + b.gradients),
        ("optimizer", 0.0 if offloaded else a.optimizer + b.optimizer),
    ]
    buffers = _fsdp_buffers(layout, stages, dense + experts)
    if buffers:
        found.append(("fsdp_buffers", buffers))
    return tuple(found)


def _fsdp_buffers(layout: Layout, stages: list[int], held: float) -> float:
    """Gathered parameters and unsharded gradients of a fully sharded rank.

    Without a pipeline: the groups in use and prefetched, unsharded gradients of a group and its reduction buffers.
    Under a pipeline everything stays gathered and gradients accumulate unsharded: 6 + 16/D (torch FSDP2).
    """
    if layout.plan.zero_stage < 3 or layout.data_ranks == 1:
        return 0.0
    state, spec = layout.state_bytes, layout.framework
    if layout.plan.pp > 1 and spec.fsdp_unsharded_with_pp:
        return held * (state.gather + state.reduce)
    groups = [b.dense_parameters + b.expert_parameters for s in stages for b in layout.stage_blocks[s]]
    largest = max(groups, default=0.0)
    gathered = largest * state.gather * (spec.fsdp_prefetch_groups + 1)
    return gathered + largest * (2.0 + state.reduce)


def _block_bytes(block: LocalBlock) -> tuple[float, float, float, float]:
    """(activations, logits, recompute working set, gradients in flight) of one block."""
    logits = sum(v for name, v in block.saved if name == "head/logits")
    kept = block.saved_bytes - logits
    return kept, logits, max(block.working, 0.0), block.transient


def _events(layout: Layout, program: Program) -> dict[str, list[object]]:
    """Allocation events as parallel lists: op, at finish, category index, bytes."""
    index = {name: i for i, name in enumerate(CATEGORIES)}
    ops: list[int] = []
    ends: list[bool] = []
    kinds: list[int] = []
    amounts: list[float] = []

    def put(op: int, at_finish: bool, name: str, amount: float) -> None:
        if amount:
            ops.append(op)
            ends.append(at_finish)
            kinds.append(index[name])
            amounts.append(amount)

    sums = [[_block_bytes(b) for b in blocks] for blocks in layout.stage_blocks]
    split = {int(s) for s, k in zip(program.stage, program.kind, strict=True) if k == OpKind.WEIGHT_GRADIENT}
    for op in range(program.num_ops):
        key = program.price_keys[program.price[op]]
        opens = closes = True
        parts: list[tuple[str, int, int, int | None]]
        if isinstance(key, Offload):
            away = layout.plan.offload.activations * sum(
                b[0] + b[1] for b in sums[key.stage][key.first : key.last]
            )
            put(op, key.to_host, "activations", -away if key.to_host else away)
            continue
        if isinstance(key, Overlapped):
            parts = [("F", key.forward_stage, 0, None), ("B", key.backward_stage, 0, None)]
        elif isinstance(key, Compute):
            parts = [(key.phase, key.stage, key.first, key.last)]
        elif isinstance(key, BlockOp) and key.index == 0:
            # At op detail a block's memory comes with its first op and goes with the op that ends it.
            parts, opens, closes = [(key.phase, key.stage, key.block, key.block + 1)], True, False
        elif isinstance(key, LaunchGap):
            parts, opens, closes = [(key.phase, key.stage, key.block, key.block + 1)], False, True
        else:
            continue
        for phase, stage, first, last in parts:
            blocks = sums[stage][first:last]
            kept, logits = sum(b[0] for b in blocks), sum(b[1] for b in blocks)
            working = max((b[2] for b in blocks), default=0.0)
            transient = max((b[3] for b in blocks), default=0.0)
            if phase == "F" and opens:
                put(op, False, "activations", kept)
                put(op, False, "logits", logits)
            if phase in ("B", "I") and opens:
                put(op, False, "recompute", working)
                put(op, False, "gradients_in_flight", transient)
            if phase in ("B", "I") and closes:
                put(op, True, "recompute", -working)
                put(op, True, "gradients_in_flight", -transient)
            if closes and (phase == "W" or phase == "B" or (phase == "I" and int(program.stage[op]) not in split)):
                put(op, True, "activations", -kept)
                put(op, True, "logits", -logits)
    return {"op": ops, "end": ends, "kind": kinds, "bytes": amounts}  # type: ignore[dict-item]


def memory_over_time(
    layout: Layout, program: Program, timeline: Timeline, held: dict[int, list[int]], roles: dict[int, int]
) -> tuple[RankMemory, ...]:
    """Each pipeline rank's memory over the step.

    Args:
        held: pipeline rank -> model stages.
        roles: pipeline rank -> the role that stands for it.
    """
    raw = _events(layout, program)
    op = np.array(raw["op"], dtype=np.int64)
    end = np.array(raw["end"], dtype=bool)
    kind = np.array(raw["kind"], dtype=np.int64)
    amount = np.array(raw["bytes"], dtype=np.float64)
    time = np.where(end, timeline.finish[op], timeline.start[op]) if len(op) else np.zeros(0)
    role = program.role[op] if len(op) else np.zeros(0, dtype=np.int64)
    spec = layout.framework
    groups = sum(layout.placement(d).size > 1 for d in ("tp", "cp", "pp", "dp", "ep"))
    outside = (("context", spec.context_bytes), ("nccl", groups * spec.nccl_bytes_per_group))
    ranks = []
    for rank in sorted(held):
        mine = np.flatnonzero(role == roles[rank])
        # Frees come before allocations of the same moment: a stream reuses what the op before it released.
        order = mine[np.lexsort((amount[mine] > 0, time[mine]))]
        delta = np.zeros((len(order) + 1, len(CATEGORIES)))
        delta[np.arange(1, len(order) + 1), kind[order]] = amount[order]
        times = np.concatenate([[0.0], time[order]])
        static = static_state(layout, held[rank])
        dynamic = np.cumsum(delta, axis=0)
        ranks.append(RankMemory(rank, static, times, dynamic, outside, spec.fragmentation))
    return tuple(ranks)
