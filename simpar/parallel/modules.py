"""How many modules and weights a framework on plain torch modules makes of a block."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from simpar.graph.types import Attention, Einsum, Elementwise, Layer
from simpar.parallel.blocks import LocalBlock

_CONTAINERS: Final = 3
"""Attention, feed-forward and the layer around them."""


@lru_cache(maxsize=4096)
def weights(layer: Layer) -> int:
    """Weights of linear modules and norms; transformers' models hold each projection in a module of its own.

    Experts of a grouped product count as one: models whose experts are modules each are leaf modules to ZeRO-3.
    """
    found = 0
    for node in layer.nodes:
        if isinstance(node, Einsum) and node.weight:
            experts = len(layer.tensor[node.weight].axes) > 2
            found += 1 if experts else node.linears
        else:
            found += len(node.parameters) > 0
    return found


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


def pairs(block: LocalBlock) -> int:
    """Low-rank pairs beside linears, in modules of their own; those beside experts are not."""
    found = block.options.kernels.pairs
    if found is None or not block.options.lora_rank:
        return 0
    return sum(found.of(node) for node in block.layer.nodes if found.adapted(node) and node.module != "moe")


def containers(layer: Layer) -> int:
    """Modules without weights of their own whose hooks run as well."""
    return _CONTAINERS if layer.name not in ("embedding", "head") else 0
