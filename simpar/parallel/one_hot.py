"""Rows of tokens brought to experts by products with one-hot masks, in place of copies (GShard, arXiv 2006.16668, section 2.2)."""

from __future__ import annotations

from simpar.graph.casts import DELAYED
from simpar.graph.types import Permute
from simpar.parallel.local_layer import LocalLayer
from simpar.parallel.work import Gemm, MemoryWork, OpList


def add_one_hot(local: LocalLayer, node: Permute, ops: OpList, *, backward: bool) -> None:
    """Products of a sequence's tokens with the mask that says which of them stands in which place of which expert; on the way back
    the mask holds the router's weights and has a gradient itself."""
    rows = local.axes(local.shards.layouts.exchanged(node))
    places = round(local.shards.local(rows[:1], "expert") / local.degrees.etp)
    width, tokens = int(local.layer.size(rows[-1])), int(local.layer.size("sequence")) // local.degrees.cp
    suffix, narrow = ".backward" if backward else "", local.options.casts.startswith(DELAYED)
    product = Gemm(places, width, tokens, local.options.dtype if narrow else "bf16")
    if narrow:
        # The mask and what it multiplies before it, backward the gradient of what they make.
        mask, here, there = places * tokens, places * width, tokens * width
        made, read = (there, here) if node.back else (here, there)
        moved = 3.0 * (made if backward else mask + read)
        ops.compute(f"{node.name}.one_hot.cast{suffix}", MemoryWork("cast", moved, 1, "framework"))
    ops.compute(f"{node.name}.one_hot{suffix}", product, 1)
    if backward and node.back:
        ops.compute(f"{node.name}.one_hot.mask{suffix}", product, 1)
