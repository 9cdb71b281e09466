"""How many modules and weights a framework on plain torch modules makes of a block."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

from simpar.graph.types import Attention, Einsum, Elementwise, Layer, Lookup, Node
from simpar.parallel.blocks import LocalBlock
from simpar.parallel.layout import Layout

_CONTAINERS: Final = 3
"""Attention, feed-forward and the layer around them."""


def module_experts(layout: Layout) -> int:
    """Expert ranks where the model's experts are modules each, with hooks and linears of their own; 0 = they are not."""
    moe = layout.options.moe
    apart = moe is not None and moe.transformers_class == "modules" and layout.framework.data.fsdp_expert_modules
    return layout.mesh.ep if apart else 0


def _experts(layer: Layer, node: Node, ranks: int) -> int:
    """Experts with modules of their own on an expert rank in a product, see `linears`; 1 where none are, 0 where it has none."""
    group = layer.grouping(node)
    return (max(layer.size(group) // ranks, 1) if ranks else 1) if group else 0


@lru_cache(maxsize=4096)
def linears(layer: Layer, ranks: int = 0) -> tuple[int, int]:
    """Linear modules of a layer but for its experts', and of those of an expert rank.

    Args:
        ranks: expert ranks where each expert is a module with linears of its own; 0 = a product of all experts has one weight.
    """
    others = grouped = 0
    for node in layer.nodes:
        if not isinstance(node, Einsum) or not node.weight:
            continue
        if experts := _experts(layer, node, ranks):
            grouped += experts * (node.linears if ranks else 1)
        else:
            others += node.linears
    return others, grouped


@lru_cache(maxsize=4096)
def weights(layer: Layer, ranks: int = 0) -> int:
    """Weights of linear modules and norms; transformers' models hold each projection in a module of its own. `ranks`: as above."""
    others = sum(len(node.parameters) > 0 for node in layer.nodes if not (isinstance(node, Einsum) and node.weight))
    return sum(linears(layer, ranks)) + others


@lru_cache(maxsize=4096)
def kept_whole(layer: Layer) -> int:
    """Weights of a layer so small that what shards modules leaves them whole: its norms', not those of linears or lookups."""
    return sum(len(n.parameters) > 0 for n in layer.nodes if not isinstance(n, Lookup) and not (isinstance(n, Einsum) and n.weight))


@lru_cache(maxsize=4096)
def matrices(layer: Layer) -> int:
    """Weights of products where queries, keys and values share one, as in Megatron-LM's modules; the experts' count as one."""
    return sum(isinstance(node, Einsum) and bool(node.weight) for node in layer.nodes)


@lru_cache(maxsize=4096)
def attentions(layer: Layer) -> int:
    """Softmax attentions of a layer; scans are none."""
    return sum(isinstance(node, Attention) for node in layer.nodes)


@lru_cache(maxsize=4096)
def rotaries(layer: Layer) -> int:
    """Rotary embeddings of a layer, each of queries and keys."""
    return sum(isinstance(node, Elementwise) and node.op.endswith("rope") for node in layer.nodes)


def pairs(block: LocalBlock, ranks: int = 0) -> int:
    """Low-rank pairs beside linears, in modules of their own; those beside experts are where these are (`ranks`, as above)."""
    found, layer = block.options.kernels.pairs, block.layer
    if found is None or not block.options.lora_rank:
        return 0
    adapted = [node for node in layer.nodes if found.adapted(node) and (ranks or node.module != "moe")]
    return sum(found.of(node) * max(_experts(layer, node, ranks), 1) for node in adapted)


def quantised(block: LocalBlock, ranks: int = 0) -> int:
    """Linears whose frozen weight rests in fewer bits than it is multiplied in (`ranks`, as above)."""
    within = block.options.lora_rank and block.options.dequantised_bytes and block.layer.name not in ("embedding", "head")
    return sum(linears(block.layer, ranks)) if within else 0


def trained(block: LocalBlock) -> int:
    """Weights of a block that are trained, in tensors of their own: all, or the two of each low-rank pair."""
    return 2 * pairs(block) if block.options.lora_rank else weights(block.layer)


def containers(layer: Layer, ranks: int = 0) -> int:
    """Modules without weights of their own whose hooks run as well, one for each expert among them (`ranks`, as above)."""
    if layer.name in ("embedding", "head"):
        return 0
    return _CONTAINERS + (max(_experts(layer, node, ranks) for node in layer.nodes) if ranks else 0)


def counts(block: LocalBlock, ranks: int) -> dict[str, Any]:
    """All of these counts by name (`ranks`, as above): what the host's hooks run for."""
    layer = block.layer
    return {
        "weights": weights(layer, ranks), "linears": sum(linears(layer, ranks)), "quantised": quantised(block, ranks),
        "containers": containers(layer, ranks), "matrices": matrices(layer), "pairs": pairs(block, ranks),
        "attentions": attentions(layer), "rotaries": rotaries(layer),
    }  # fmt: skip
