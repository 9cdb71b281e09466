"""Memory of each pipeline rank over the step, by category, from the layout and the timeline."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from simpar.engine.timeline import Timeline
from simpar.parallel.blocks import LocalBlock
from simpar.parallel.data import state_memory
from simpar.parallel.keys import BlockOp, Compute, LaunchGap, Offload, OptimizerStep, Overlapped
from simpar.parallel.layout import Layout
from simpar.program.program import FloatArray, IntArray, Program
from simpar.result.allocations import Known, Replays, Reserving, passes_of
from simpar.result.gathers import (
    Gathers,
    beside_update,
    buffers_at_rest,
    frozen_parameters,
    fsdp_buffers,
    held_to_the_end,
    rests_unsharded,
    root_weights,
    sharded_more_moments,
    update_bytes,
)
from simpar.result.outside import outside_bytes, workspaces
from simpar.result.requests import Pass, placeholders
from simpar.result.stage_ends import freed_inputs, kept_by_overlap, kept_outputs, last_outputs, receive_buffers
from simpar.result.tensors import TimedPass

BoolArray = NDArray[np.bool_]
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
        fragmentation: reserved over what the replayed requests reserve.
        capacity_bytes: of the device.
        replays: the allocator's view of the ranks; none = reserved follows from `fragmentation` alone.
        timed_passes: what the rank runs and when.
    """

    rank: int
    static: tuple[tuple[str, float], ...]
    times: FloatArray
    dynamic: FloatArray
    outside: tuple[tuple[str, float], ...]
    fragmentation: float
    replays: Reserving | None = None
    capacity_bytes: float = math.inf
    timed_passes: Callable[[], list[TimedPass]] | None = None

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
        if self.replays is None:
            return self.allocated_bytes * self.fragmentation
        room = self.capacity_bytes - sum(v for _, v in self.outside)
        return self.replays.reserved_bytes(self.rank, self.allocated_bytes, self.fragmentation, room)

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
    """What rests on a rank that holds these model stages: parameters, gradients, optimizer state, buffers, workspaces."""
    dense, experts = layout.held_parameters(stages)
    state, zero = layout.state_bytes, layout.plan.zero_stage
    resting = replace(state, gradient=0.0) if rests_unsharded(layout) else state
    a = state_memory(dense, resting, zero, layout.shard_ranks)
    b = state_memory(experts, resting if layout.plan.shard_experts else state, zero, layout.expert_shard_ranks)
    more = sharded_more_moments(layout, stages)
    beside = (("workspaces", work),) if (work := sum(workspaces(layout.framework, layout.hardware.gpu.architecture))) else ()
    if layout.training.optimizer == "none":
        return (("parameters", a.parameters + b.parameters + frozen_parameters(layout, stages)), *beside)
    if layout.options.lora_rank:
        parts = layout.held_parameters(stages, trainable=True)
        ranks = layout.shard_ranks, layout.expert_shard_ranks
        both = [state_memory(float(n), state, zero, shards) for n, shards in zip(parts, ranks, strict=True)]
        frozen = frozen_parameters(layout, stages)
        parameters = 0.0 if layout.plan.offload.parameters else frozen + sum(own.parameters for own in both)
        optimizer = 0.0 if layout.states_away else sum(own.optimizer for own in both) + more
        buckets = sum(parts) * state.bucket + buffers_at_rest(layout)
        more_beside = (("communication_buffers", buckets), *beside) if buckets else beside
        gradients = 0.0 if layout.gradients_away else sum(own.gradients for own in both)
        return (("parameters", parameters), ("gradients", gradients), ("optimizer", optimizer), *more_beside)
    # States in host memory leave the fp32 weights on the device only where the update runs there (paged moments).
    left = 0.0 if layout.plan.offload.optimizer else (a.optimizer + b.optimizer) * state.master / (state.optimizer or 1.0)
    found = [
        ("parameters", 0.0 if layout.plan.offload.parameters else a.parameters + b.parameters + frozen_parameters(layout, stages)),
        ("gradients", 0.0 if layout.gradients_away else a.gradients + b.gradients),
        ("optimizer", left if layout.states_away else a.optimizer + b.optimizer + more),
    ]
    buckets = (dense + experts) * state.bucket + buffers_at_rest(layout)
    found += [("communication_buffers", receive_buffers(layout, stages) + buckets)]
    found += [("fsdp_buffers", fsdp_buffers(layout, dense + experts * layout.plan.shard_experts, stages))]
    found += [("weight_gradients", sum(placeholders(layout, stages).values())), ("activations", kept_by_overlap(layout, stages))]
    return (*found[:3], *(pair for pair in found[3:] if pair[1]), *beside)


def _passing_gradients(layout: Layout, blocks: Sequence[LocalBlock]) -> float:
    """Gradients of these blocks where they do not rest in memory."""
    state, zero = layout.state_bytes, layout.plan.zero_stage
    if state.gradients_persist or layout.training.optimizer == "none" or layout.options.lora_rank or rests_unsharded(layout):
        return 0.0
    if layout.training.optimizer_in_backward or layout.gradients_away:
        return 0.0  # each goes with its update, while the next ones are computed, or to the host
    dense = state_memory(sum(b.dense_parameters for b in blocks), state, zero, layout.shard_ranks)
    experts = state_memory(sum(b.expert_parameters for b in blocks), state, zero, layout.expert_shard_ranks)
    return dense.passing_gradients + experts.passing_gradients


def _gradients(layout: Layout, blocks: Sequence[LocalBlock]) -> list[float]:
    """The same of each block, where its backward leaves them: those of a root group come together."""
    found = [_passing_gradients(layout, [b]) for b in blocks]
    whole = root_weights(layout, blocks)
    if whole and whole[0]:
        late = sum(g for g, w in zip(found, whole, strict=True) if w)
        found = [late, *(g * (not w) for g, w in zip(found[1:], whole[1:], strict=True))]
    return found


_BlockBytes = tuple[float, float, float, float, float, float]
"""(activations, logits, recompute working set, gradients in flight, what a split backward keeps until W, what of its activations a
backward frees) of one block."""


def _passing(block: LocalBlock, begin: float, end: float) -> float:
    """What a backward adds at its worst: the gradients in flight with what is gathered then, or what is there at its end, when
    the block's activations are gone."""
    return max(block.transient + begin, end - block.saved_bytes - max(block.working, 0.0))


def block_bytes(block: LocalBlock, begin: float, end: float, *, releases: bool) -> _BlockBytes:
    """What a block holds, with what full sharding gathers at the begin and the end of its backward.

    Args:
        releases: an input gradient frees all but what weight gradients need.
    """
    logits = sum(v for name, v in block.saved if name == "head/logits")
    kept = block.saved_bytes - logits
    # Where the input gradient frees nothing, activations and logits wait for the weight gradient.
    deferred = block.deferred if releases else kept + logits
    return kept, logits, max(block.working, 0.0), _passing(block, begin, end), deferred, kept


def _freed(layout: Layout, blocks: Sequence[LocalBlock], sums: list[_BlockBytes]) -> list[_BlockBytes]:
    """The same where backwards keep what they are done with up to the last one."""
    held = [held_to_the_end(layout, block) for block in blocks]
    freed = [kept - each for (kept, *_), each in zip(sums, held, strict=True)]
    freed[0] += sum(held)
    return [(*each[:5], own) for each, own in zip(sums, freed, strict=True)]


_OUTPUTS: Final = "outputs"
"""Of events: what forwards of the last stage leave to the end of the step, which counts among the logits."""
_Event = tuple[bool, str, float]
"""(at the op's finish, category, bytes)."""


def _backward_events(blocks: list[_BlockBytes], *, split: bool) -> list[_Event]:
    """Events of a backward over blocks, given in forward order. `split`: what weight gradients need stays.

    The peak inside the op comes at one block, when those after it have been freed already: its working set is what the op
    adds, and their activations go at the op's start. An op of one block and one of several thus agree on the peak.
    """
    freed, best, at, before_best = 0.0, -1.0, len(blocks) - 1, (0.0, 0.0)
    kept_after, logits_after = 0.0, 0.0
    for index in range(len(blocks) - 1, -1, -1):
        _, logits, working, transient, deferred, kept = blocks[index]
        extra = working + transient - freed
        if extra > best:
            best, at, before_best = extra, index, (kept_after, logits_after)
        kept -= deferred if split else 0.0
        freed += kept + logits
        kept_after, logits_after = kept_after + kept, logits_after + logits
    _, _, working, transient, _, _ = blocks[at]
    early_kept, early_logits = before_best
    return [
        (False, "recompute", working), (True, "recompute", -working),
        (False, "gradients_in_flight", transient), (True, "gradients_in_flight", -transient),
        (False, "activations", -early_kept), (True, "activations", early_kept - kept_after),
        (False, "logits", -early_logits), (True, "logits", early_logits - logits_after),
    ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class _StageBytes:
    """What the blocks of one stage do to memory, one entry a block.

    Attributes:
        blocks: what each holds.
        gradients: that its backward leaves, where they do not rest.
        gathered: weights gathered while its forward runs.
        outputs: what its forward leaves to the end of the step; of one micro-batch or of all.
        kept: activations that offloading applies to.
    """

    blocks: list[_BlockBytes]
    gradients: list[float]
    gathered: Sequence[float]
    outputs: list[float]
    kept: list[float]

    @classmethod
    def of(cls, layout: Layout, stage: int) -> _StageBytes:
        """Those of a stage as it runs: its backward ends with the output it kept and, at its input, what was sent away."""
        blocks, releases = layout.stage_blocks[stage], layout.framework.pipeline.input_gradient_releases
        gathers = Gathers.of(layout, blocks)
        sums = [block_bytes(b, gathers.begin[i], gathers.end[i], releases=releases) for i, b in enumerate(blocks)]
        if sums:
            sums[-1] = (sums[-1][0] + kept_outputs(layout, stage), *sums[-1][1:])
            sums[0] = (sums[0][0] - freed_inputs(layout, stage), *sums[0][1:])
            sums = _freed(layout, blocks, sums)
        for i, block in enumerate(blocks):
            if block.options.recompute.inner:  # The layers before it in the chunk have run again as well.
                sums[i] = (*sums[i][:2], sums[i][2] + sums[i - 1][2], *sums[i][3:])
        outputs, kept = [last_outputs(layout, b) for b in blocks], [b.offloadable_bytes for b in blocks]
        return cls(sums, _gradients(layout, blocks), gathers.forward, outputs, kept)


def _key_events(key: object, stages: list[_StageBytes], split: set[int], offloaded: float) -> list[_Event]:
    """What an op with this price does to memory.

    Args:
        split: stages whose weight gradients have a pass of their own.
        offloaded: share of the activations that goes to the host.
    """
    opens = closes = True
    parts: list[tuple[str, int, int, int | None]]
    if isinstance(key, Offload):
        away = offloaded * sum(stages[key.stage].kept[key.first : key.last])
        return [(key.to_host, "activations", -away if key.to_host else away)]
    if isinstance(key, OptimizerStep):
        return [(True, "gradients", -sum(sum(stage.gradients) for stage in stages))]
    if isinstance(key, Overlapped):
        parts = [("F", key.forward_stage, 0, None), ("B", key.backward_stage, 0, None)]
    elif isinstance(key, Compute):
        parts = [(key.phase, key.stage, key.first, key.last)]
    elif isinstance(key, BlockOp) and key.index == 0 and key.part != "beside":
        # At op detail a block's memory comes with its first op and goes with the op that ends it.
        parts, closes = [(key.phase, key.stage, key.block, key.block + 1)], False
    elif isinstance(key, LaunchGap):
        parts, opens = [(key.phase, key.stage, key.block, key.block + 1)], False
    else:
        return []
    events: list[_Event] = []
    for phase, stage, first, last in parts:
        own, blocks = stages[stage], stages[stage].blocks[first:last]
        if not blocks:
            continue
        if phase == "F":
            found: list[_Event] = [(False, "activations", sum(b[0] for b in blocks)), (False, "logits", sum(b[1] for b in blocks))]
            found.append((True, _OUTPUTS, sum(own.outputs[first:last])))
            weights = max(own.gathered[first:last])
            found += [(False, "fsdp_buffers", weights), (True, "fsdp_buffers", -weights)]
        elif phase == "W":
            found = [(True, "activations", -sum(b[4] for b in blocks))]
        else:
            found = _backward_events(blocks, split=phase == "I" and stage in split)
        if phase in ("B", "W") or (phase == "I" and stage not in split):
            found.append((True, "gradients", sum(own.gradients[first:last])))
        events += [e for e in found if (closes if e[0] else opens)]
    return [e for e in events if e[2]]


def _events(layout: Layout, program: Program, held: dict[int, list[int]]) -> tuple[IntArray, BoolArray, IntArray, FloatArray]:
    """Allocation events of all ops as columns: op, at its finish, category index (past the last: _OUTPUTS), bytes."""
    index = {name: i for i, name in enumerate((*CATEGORIES, _OUTPUTS))}
    stages = [_StageBytes.of(layout, stage) for stage in range(len(layout.stage_blocks))]
    split = {k.stage for k in program.price_keys if isinstance(k, Compute | LaunchGap) and k.phase == "W"}
    away = layout.plan.offload.activations
    per_key = [_key_events(key, stages, split, away) for key in program.price_keys]
    for key, events in zip(program.price_keys, per_key, strict=True):
        if isinstance(key, OptimizerStep):
            # What the pipeline engine kept of every micro-batch goes with the step.
            left = layout.num_microbatches * sum(sum(stages[stage].outputs) for stage in held[key.rank])
            events += [(True, _OUTPUTS, -left)] if left else []
            update = update_bytes(layout, dict(static_state(layout, held[key.rank])).get("optimizer", 0.0))
            update = beside_update(layout, update, sum(layout.held_parameters(held[key.rank], trainable=True)))
            events += [(False, "optimizer", update), (True, "optimizer", -update)] if update else []
    counts = np.array([len(events) for events in per_key], dtype=np.int64)
    begins = np.concatenate([[0], np.cumsum(counts)])
    flat = [e for events in per_key for e in events]
    ends = np.array([e[0] for e in flat], dtype=bool)
    kinds = np.array([index[e[1]] for e in flat], dtype=np.int64)
    amounts = np.array([e[2] for e in flat], dtype=np.float64)
    each = counts[program.price]
    ops = np.repeat(np.arange(program.num_ops), each)
    offset = np.arange(len(ops)) - np.repeat(np.cumsum(each) - each, each)
    row = begins[program.price[ops]] + offset
    return ops, ends[row], kinds[row], amounts[row]


def memory_over_time(
    layout: Layout, program: Program, timeline: Timeline, held: dict[int, list[int]], roles: dict[int, int],
    known: Known | None = None,
) -> tuple[RankMemory, ...]:  # fmt: skip
    """Each pipeline rank's memory over the step.

    Args:
        held: pipeline rank -> model stages.
        roles: pipeline rank -> the role that stands for it.
        known: see `Replays`.
    """
    replays = Replays(layout, held, lambda rank: _passes(layout, program, timeline, roles[rank]), known)
    found: list[RankMemory] = []
    for own, ranks in layout.kinds:
        op, end, kind, amount = _events(own, program, held)
        time = np.where(end, timeline.finish[op], timeline.start[op]) if len(op) else np.zeros(0)
        role = program.role[op] if len(op) else np.zeros(0, dtype=np.int64)
        outside, capacity = outside_bytes(own), own.hardware.gpu.memory.value
        for rank in ranks:
            mine = np.flatnonzero(role == roles[rank])
            # Frees come before allocations of the same moment: a stream reuses what the op before it released.
            order = mine[np.lexsort((amount[mine] > 0, time[mine]))]
            delta = np.zeros((len(order) + 1, len(CATEGORIES) + 1))
            delta[np.arange(1, len(order) + 1), kind[order]] = amount[order]
            times = np.concatenate([[0.0], time[order]])
            counted = np.cumsum(delta, axis=0)
            dynamic, outputs = counted[:, :-1], counted[:, -1]
            if own.framework.pipeline.last_outputs == "one":
                outputs = np.minimum(outputs, delta[:, -1].max())  # each takes the place of the one before it
            dynamic[:, CATEGORIES.index("logits")] += outputs
            timed = partial(_timed_passes, layout, program, timeline, roles[rank])
            more = (outside, own.framework.allocator.fragmentation, replays, capacity, timed)
            found.append(RankMemory(rank, static_state(own, held[rank]), times, dynamic, *more))
    replays.choose({r.rank: r.allocated_bytes for r in found})
    return tuple(found)


def _in_order(program: Program, timeline: Timeline, role: int) -> IntArray:
    mine = np.flatnonzero(program.role == role)
    found: IntArray = mine[np.argsort(timeline.start[mine], kind="stable")]
    return found


def _passes(layout: Layout, program: Program, timeline: Timeline, role: int) -> list[Pass]:
    """What a role runs, in order."""
    return passes_of([program.price_keys[i] for i in program.price[_in_order(program, timeline, role)]], layout.stage_blocks)


def _timed_passes(layout: Layout, program: Program, timeline: Timeline, role: int) -> list[TimedPass]:
    """The same with start and end."""
    return [
        (one, float(timeline.start[op]), float(timeline.finish[op]))
        for op in _in_order(program, timeline, role)
        for one in passes_of([program.price_keys[program.price[op]]], layout.stage_blocks)
    ]
