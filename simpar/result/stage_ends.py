"""What a pipeline stage holds of its input and output beside the activations of its blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from simpar.graph.types import Elementwise
from simpar.parallel.blocks import LocalBlock
from simpar.parallel.layout import Layout

STAGE_INPUT: Final = "input_norm_in"
"""What the first layer of a pipeline stage saves of the stage's input."""


def receive_buffers(layout: Layout, stages: list[int]) -> float:
    """Buffers for what arrives from other stages where every micro-batch has its own; an input that is saved is one."""
    if not layout.framework.pipeline.receive_buffers_per_microbatch or layout.plan.pp == 1:
        return 0.0
    total, count = 0.0, layout.num_microbatches
    for index in stages:
        if not layout.stages[index].head:
            total += count * layout.entering_bytes(index + 1)
        if index:
            blocks = layout.stage_blocks[index]
            kept = blocks and STAGE_INPUT in dict(blocks[0].saved)
            total += max(count - (layout.num_stages - index if kept else 0), 0) * layout.entering_bytes(index)
    return total


def outputs_stay(layout: Layout) -> bool:
    """Whether a stage's output stays until its backward: the pipeline engine holds it, or its last layer's backward reads it."""
    nodes = layout.network.layers[0].nodes
    return layout.framework.pipeline.keeps_stage_outputs or (isinstance(nodes[-1], Elementwise) and nodes[-1].op == "relu")


def kept_outputs(layout: Layout, index: int) -> float:
    """Bytes of a stage's output where it stays until its backward."""
    stage = layout.stages[index]
    if layout.plan.pp == 1 or stage.head or not outputs_stay(layout):
        return 0.0
    return layout.entering_bytes(index + 1)


def freed_inputs(layout: Layout, index: int) -> float:
    """Bytes that the first layer of a stage saves of its input, where that is given back after the forward."""
    stage = layout.stages[index]
    if not layout.framework.pipeline.frees_stage_inputs or layout.plan.pp == 1 or stage.embedding or not stage.count:
        return 0.0
    return dict(layout.stage_blocks[index][0].saved).get(STAGE_INPUT, 0.0)


def kept_by_overlap(layout: Layout, stages: Sequence[int]) -> float:
    """Bytes of a micro-batch, of one chunk, whose backward is through while another's forward beside it is not."""
    apart = not layout.framework.pipeline.overlap_keeps_backward or not layout.degrees.overlap_ep or layout.degrees.ep == 1
    if apart or layout.num_microbatches == 1:
        return 0.0
    return max(sum(block.saved_bytes for block in layout.stage_blocks[stage]) for stage in stages)


def last_outputs(layout: Layout, block: LocalBlock) -> float:
    """Logits of a micro-batch where those of all, or of one, stay to the end of the step."""
    policy = layout.framework.pipeline
    if policy.last_outputs == "none" or (layout.plan.pp == 1 and not policy.engine_of_one_stage):
        return 0.0
    logits, plan = sum(v for name, v in block.saved if name == "head/logits"), block.options.kernels
    return logits * plan.element / plan.loss.logit_bytes(plan.element)
