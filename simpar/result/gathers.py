"""Weights and gradients that come and go on a fully sharded rank (ZeRO 3, FSDP): in sums by block.

`allocations.py` asks the allocator for the same tensors one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from simpar.parallel.blocks import LocalBlock
from simpar.parallel.layout import Layout
from simpar.parallel.optimizers import more_moments
from simpar.parallel.traffic import stays_gathered
from simpar.result.stage_ends import STAGE_INPUT

CAST_BYTES: Final = 2.0
"""A weight that autocast has cast."""


def fully_sharded(layout: Layout) -> bool:
    """A rank holds a part of its weights, where no pipeline keeps them gathered."""
    return layout.plan.zero_stage == 3 and layout.shares_state


def rests_unsharded(layout: Layout) -> bool:
    """A rank rests with gathered parameters and unsharded gradients, as fully sharded pipeline stages do (torch FSDP2); its shards
    of the gradients come as those go."""
    return fully_sharded(layout) and layout.plan.pp > 1 and layout.training.optimizer != "none"


def fsdp_buffers(layout: Layout, held: float, stages: Sequence[int]) -> float:
    """What rests whole on a fully sharded rank: gathered parameters and gradients in a pipeline (6 + 12/D bytes in all), gradients
    alone where only the last micro-batch reduces."""
    if layout.defers_reduction:
        return held * layout.state_bytes.reduce
    if not fully_sharded(layout) or layout.plan.pp == 1:
        casts = bool(layout.kernels.autocast) and fully_sharded(layout) and layout.recompute.granularity == "none"
        return CAST_BYTES * held * casts
    resting = held * (layout.state_bytes.gather + layout.state_bytes.reduce)
    return resting + (whole_embedding_gradient(layout) if layout.embedding_stage in stages else 0.0)


def whole_embedding_gradient(layout: Layout) -> float:
    """Bytes by which the resting gradient of a split vocabulary is larger than its part.

    A replicated tensor leaves DTensor's embedding backward, and FSDP2 accumulates what it gets until it reduces (torch 2.13).
    """
    tp, embedding = layout.plan.tp, layout.network.embedding
    if (
        embedding is None
        or "embedding/word.weight" not in embedding.tensor
        or tp == 1
        or not layout.framework.kernels.whole_embedding_gradient
        or not rests_unsharded(layout)
    ):
        return 0.0
    return embedding.elements("embedding/word.weight") * (1.0 - 1.0 / tp) * layout.state_bytes.reduce


def bucket_elements(layout: Layout) -> float:
    """Gradients that are put into a buffer before they are reduced; 0 = there is none."""
    plan = layout.plan
    if not layout.framework.data.fills_buckets(plan.zero_stage) or plan.pp > 1 or layout.training.optimizer == "none":
        return 0.0
    return plan.reduce_bucket_size or layout.framework.data.bucket_elements_min


def gradient_buffers(layout: Layout) -> float:
    """Bytes of the buffers that hold gradients until they are reduced."""
    twice = layout.plan.zero_stage < 3 and layout.overlap_grad_reduce
    return bucket_elements(layout) * layout.plain_options.kernels.element * (2.0 if twice else 1.0)


def buffers_at_rest(layout: Layout) -> float:
    """Bytes of these that are there throughout a pass: those of stages 1 and 2 may come with the first gradient."""
    late = layout.framework.data.gradient_buffers_late and layout.plan.zero_stage < 3
    return 0.0 if late else gradient_buffers(layout)


def beside_update(layout: Layout, update: float, trained: float) -> float:
    """What exists beside what rests, buffers of gradients and casts included, from the end of the backward to that of the update.

    Args:
        update: bytes that the update takes.
        trained: weights of the rank, of which the last bucket's gradients are copied once more.
    """
    rest = buffers_at_rest(layout)
    gone = rest if layout.plan.zero_stage < 3 else 0.0
    if layout.kernels.autocast:
        # Casts, which the backward was the last to read.
        gone += fsdp_buffers(layout, trained, ()) if fully_sharded(layout) else layout.state_bytes.parameter * trained
    copied = min(bucket_elements(layout), trained) * layout.plain_options.kernels.element
    return max(update - gone, gradient_buffers(layout) - rest + copied)


def sharded_more_moments(layout: Layout, stages: Sequence[int]) -> float:
    """Bytes of moments of tables and vectors over those of as many weights of a matrix, on one rank."""
    blocks = [block for stage in stages for block in layout.stage_blocks[stage]]
    dense, experts = more_moments(layout.optimizer, blocks)
    sharded = layout.plan.zero_stage >= 1
    return dense / (layout.shard_ranks if sharded else 1) + experts / (layout.expert_shard_ranks if sharded else 1)


def frozen_parameters(layout: Layout, stages: Sequence[int]) -> float:
    """Bytes of the frozen weights of these stages that rest on one rank: of frozen encoders, of a reference, or under low-rank
    adaptation."""
    shards, expert_shards = (layout.shard_ranks, layout.expert_shard_ranks) if layout.plan.zero_stage == 3 else (1, 1)
    blocks = [block for stage in stages for block in layout.stage_blocks[stage]]
    found = 0.0
    for b in blocks:
        found += layout.frozen_bytes(b) * ((b.frozen_parameters - b.frozen_experts) / shards + b.frozen_experts / expert_shards)
        if b.options.lora_rank:
            found += layout.frozen_bytes(b) * (b.dense_parameters / shards + b.expert_parameters / expert_shards)
    return found


def update_bytes(layout: Layout, optimizer: float) -> float:
    """Bytes that exist during the update only, of a rank with so much resting optimizer state."""
    state = layout.state_bytes.optimizer
    if not state or layout.options.lora_rank:
        return 0.0
    gathered = layout.framework.data.gather_buffer_bytes * layout.shard_ranks if gathers_in_buffers(layout) else 0.0
    return (layout.update_bytes + gathered) * optimizer / state


def gathers_in_buffers(layout: Layout) -> bool:
    """Whether updated weights pass through buffers of their own on their way back to all data-parallel ranks."""
    return layout.framework.data.gather_buffer_bytes > 0.0 and layout.plan.zero_stage in (1, 2) and layout.shard_ranks > 1


@dataclass(frozen=True, slots=True)
class Gathers:
    """What passes over the blocks of a fully sharded stage, float bytes [blocks]: one group per block (torch FSDP2).

    Attributes:
        forward: gathered weights of the block and of those prefetched, and of all before it where they stay for the backward.
        begin: at the begin of the block's backward: weights, and the buffer that reduces the block behind it.
        end: at its end: its own unsharded gradients as well, or the buffer into which they are copied.
    """

    forward: list[float]
    begin: list[float]
    end: list[float]

    @classmethod
    def of(cls, layout: Layout, blocks: Sequence[LocalBlock]) -> Gathers:
        """Of one stage; without weights where nothing is gathered per block."""
        if not layout.gathers_by_layer:
            late = gradient_buffers(layout) - buffers_at_rest(layout)  # the head's gradients are the first
            passing = [late * all(name != "head/logits" for name, _ in b.saved) for b in blocks]
            return cls([0.0] * len(blocks), passing, passing)
        state, data = layout.state_bytes, layout.framework.data
        ahead = data.fsdp_prefetch_groups
        held = [b.gathered_parameters for b in blocks]
        trained = [sum(layout.trained(b)[: 2 if layout.plan.shard_experts else 1]) for b in blocks]
        # Gradients are as wide as what is computed with.
        width = state.reduce if data.fsdp_fp32 else blocks[0].options.kernels.element
        own = [width * p for p in trained]
        if at_loss := any(name == "head/logits" for name, _ in blocks[-1].saved):
            own[-1] = head_gradient_bytes(layout) * trained[-1]
        whole = root_weights(layout, blocks)
        root, waiting = state.gather * sum(whole), 0.0
        if root:
            waiting = sum(g for g, w in zip(own[1:], whole[1:], strict=True) if w)
            held, once = ([p * (not w) for p, w in zip(each, whole, strict=True)] for each in (held, trained))
            trained = [sum(trained) - sum(once) if whole[0] else once[0], *once[1:]]
        stays = stays_gathered(layout, blocks)
        resting = [0.0, *accumulate(p * kept for p, kept in zip(held, stays, strict=True))]  # of the blocks before each
        forward = [root + state.gather * (resting[i] + sum(held[i : i + ahead + 1])) for i in range(len(held))]
        near = [max(i - ahead, 0) for i in range(len(held))]
        weights = [root + state.gather * (resting[n] + sum(held[n : i + 1])) for i, n in enumerate(near)]
        bucket = bucket_elements(layout)
        copied = full_buckets(trained, bucket) if bucket else [*trained[1:], 0.0]
        behind = [state.reduce * p for p in copied]
        # Gradients of the head wait for those of the embedding.
        waits = [waiting] * (len(blocks) - 1) + [0.0]
        begin = [w + b + g for w, b, g in zip(weights, behind, waits, strict=True)]
        if at_loss:
            # Nothing is prefetched before the loss is through.
            begin[-1] = root + state.gather * (resting[-2] + held[-1])
        beside = [0.0 if bucket else state.reduce * p for p in trained]
        end = [w + g + max(b, p) for w, g, b, p in zip(weights, own, behind, beside, strict=True)]
        end = [e + g for e, g in zip(end, waits, strict=True)]
        return cls(forward, begin, end)


def full_buckets(trained: Sequence[float], size: float) -> list[float]:
    """Gradients that are copied out of their buffer while each block's backward puts its own there, the last block's first.

    >>> full_buckets([1.0, 2.0, 2.0, 3.0], 4.0)
    [0.0, 2.0, 3.0, 0.0]
    """
    found, held = [], 0.0
    for own in reversed(trained):
        full = held + own > size
        found.append(min(held, size) if full else 0.0)
        held = own if full else held + own
    return found[::-1]


def head_gradient_bytes(layout: Layout) -> float:
    """Bytes per weight of the head's gradient before it is reduced.

    Where each piece of a loss has a backward of its own and the last one reduces, FSDP2 adds them up as wide as it reduces.
    """
    element, loss = layout.plain_options.kernels.element, layout.plain_options.kernels.loss
    pieces = loss.kind == "chunked" and loss.chunks > 1 and layout.framework.data.fsdp_reduce_input_stays
    return max(element, layout.state_bytes.reduce) if pieces else element


def root_stays(layout: Layout) -> bool:
    """Whether the ends of the model are one group that is gathered throughout."""
    root = layout.framework.data.fsdp_root
    return root == "all" or (root == "tied" and layout.network.tied)


def root_weights(layout: Layout, blocks: Sequence[LocalBlock]) -> list[float]:
    """Weights of each block that belong to the group that is gathered throughout; zeros where there is none."""
    ends = [root_stays(layout) and b.outside_layers for b in blocks]
    return [b.gathered_parameters * end for b, end in zip(blocks, ends, strict=True)]


def held_inputs(layout: Layout, block: LocalBlock) -> float:
    """Bytes of a block's input that stay, and of its gradient that come, from its backward to the end of the model's."""
    return held_by_frozen(layout, block) if fully_sharded(layout) and layout.plan.pp == 1 else 0.0


def held_reductions(layout: Layout, block: LocalBlock) -> float:
    """Bytes of a block's reduced gradients that stay from its backward to the end of the model's.

    Replicas sum them up as wide as they are reduced, and FSDP2 holds what the all-reduce works on (AllReduceState of torch 2.13,
    _fsdp_param_group.py); where gradients rest as wide, they are the same tensors.
    """
    state, replicas = layout.state_bytes, layout.mesh.dp * layout.mesh.cp // layout.shard_ranks
    holds = fully_sharded(layout) and layout.plan.pp == 1 and layout.framework.data.fsdp_reduce_input_stays
    if not holds or replicas == 1 or state.reduce <= state.gradient:
        return 0.0
    dense, experts = layout.trained(block)
    return state.reduce * (dense / layout.shard_ranks + experts * layout.plan.shard_experts / layout.expert_shard_ranks)


def held_to_the_end(layout: Layout, block: LocalBlock) -> float:
    """Bytes that a block's backward leaves to the end of the model's: its input and that one's gradient, reduced gradients."""
    return 2.0 * held_inputs(layout, block) + held_reductions(layout, block)


def held_by_frozen(layout: Layout, block: LocalBlock) -> float:
    """The same where weights are fully sharded."""
    checkpointed = [name for name, _ in block.saved] == [STAGE_INPUT]
    holds = layout.options.lora_rank and layout.framework.data.fsdp_frozen_holds_inputs
    return block.saved_bytes if checkpointed and holds else 0.0
