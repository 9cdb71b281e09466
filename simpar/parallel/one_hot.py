"""Rows of tokens brought to experts by products with one-hot masks, in place of copies (GShard, arXiv 2006.16668, section 2.2)."""

from __future__ import annotations

from simpar.graph.types import Permute
from simpar.parallel.local_layer import LocalLayer
from simpar.parallel.work import Gemm, OpList


def add_one_hot(local: LocalLayer, node: Permute, ops: OpList, *, backward: bool) -> None:
    """Products of a sequence's tokens with the mask that says which of them stands in which place of which expert; on the way back
    the mask holds the router's weights and has a gradient itself."""
    rows = local.axes(local.shards.layouts.exchanged(node))
    places = round(local.shards.local(rows[:1], "expert") / local.degrees.etp)
    product = Gemm(places, int(local.layer.size(rows[-1])), int(local.layer.size("sequence")) // local.degrees.cp)
    suffix = ".backward" if backward else ""
    ops.compute(f"{node.name}.one_hot{suffix}", product, 1)
    if backward and node.back:
        ops.compute(f"{node.name}.one_hot.mask{suffix}", product, 1)
