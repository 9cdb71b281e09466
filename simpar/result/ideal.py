"""The least time that a step's model FLOPs take: every product at the peak of the dtype that it runs in."""

from __future__ import annotations

from collections import Counter

from simpar.parallel.blocks import LocalBlock
from simpar.parallel.layout import Layout
from simpar.parallel.work import Gemm, GroupedGemm
from simpar.specs.stage_plan import rank_gpus

_PEAKS = {"fp8_row": "fp8", "fp8_block": "fp8", "mxfp8": "fp8"}
"""Dtypes of kernels -> whose peak they share."""


def mfu_peak_flops_per_s(layout: Layout) -> float:
    """Dense peak that MFU divides by: the training dtype's, bf16's for narrower ones."""
    dtype = layout.training.precision
    return layout.hardware.peak_flops_per_s(dtype if dtype in ("fp16", "fp32", "tf32") else "bf16")


def ideal_seconds(layout: Layout) -> float:
    """Seconds of a step that did its model FLOPs (forward and backward) at peak on all GPUs and nothing else; of
    replicas of several kinds, those that `layout` stands for."""
    if layout.replicas_differ:
        layout = layout.of_rank(0)
    sizes, even = rank_gpus(layout.scenario), layout.scenario.world_size / layout.plan.pp
    each: dict[tuple[LocalBlock, Layout], float] = {}
    counts: Counter[float] = Counter()
    for stage, blocks in enumerate(layout.stage_blocks):
        own = layout.on(stage)
        # The mean over pipeline ranks, each by its own GPUs.
        share = even / sizes[layout.ranks[stage]] if layout.alone else 1.0
        for block in blocks:
            key = (block, own)
            if key not in each:
                each[key] = share * _seconds(block, own)
            counts[each[key]] += 1
    return sum(count * seconds for seconds, count in counts.items()) * layout.microbatches_in_all / layout.scenario.world_size


def uncounted_pairs_flops(layout: Layout, *, again: bool = False) -> float:
    """What counting the whole score matrix, as PaLM and Megatron's formula do, adds to `model_flops`: those of causal attention
    once more; with `again`, of the layers that recomputation repeats and their repetition alone."""
    blocks = [block for blocks in layout.stage_blocks for block in blocks]
    passes = ((1.0 if block.repeated_flops else 0.0) if again else block.passes[0] for block in blocks)
    return sum(n * block.halved_flops for n, block in zip(passes, blocks, strict=True)) * layout.microbatches_in_all


def _seconds(block: LocalBlock, layout: Layout) -> float:
    """Seconds of one GPU for a block's passes of one micro-batch, all at peak: products by their dtypes' shares of FLOPs."""
    usual = mfu_peak_flops_per_s(layout)
    found: dict[str, float] = {}
    for op in block.forward:
        if isinstance(op.work, Gemm):
            found[op.work.dtype] = found.get(op.work.dtype, 0.0) + float(op.work.m) * op.work.n * op.work.k
        elif isinstance(op.work, GroupedGemm):
            found[op.work.dtype] = found.get(op.work.dtype, 0.0) + op.work.tokens * op.work.n * op.work.k
    attention, products, total = block.passes[0] * block.attention_flops, block.step_flops, sum(found.values())
    if not total:
        return products / usual
    products -= attention
    peaks = {dtype: max(layout.hardware.peak_flops_per_s(_PEAKS.get(dtype, dtype)), usual) for dtype in found}
    return attention / usual + products * sum(found[dtype] / total / peaks[dtype] for dtype in found)
