"""Ledgers of a layer: parameters and forward FLOPs, one named term per node, summed at the end."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Final

from simpar.graph.types import Attention, Convolution, Custom, Einsum, Layer, Node, Scan


def parameters(layer: Layer) -> tuple[tuple[str, int], ...]:
    """(parameter tensor, elements) of every weight of a layer."""
    return tuple((name, layer.elements(name)) for node in layer.nodes for name in node.parameters)


def node_flops(layer: Layer, node: Node, *, halved: bool = False) -> float:
    """Forward FLOPs of one node in one micro-batch: two for each multiply and add.

    Args:
        halved: causal attention counts half of the score matrix, the diagonal halved too, as the usual model FLOPs do.
    """
    if isinstance(node, Einsum):
        return 2.0 * layer.volume(product_axes(layer, node))
    if isinstance(node, Convolution):
        out, weight = layer.tensor[node.outputs[0]].axes, layer.tensor[node.weight].axes
        return 2.0 * layer.volume((*out, *(a for a in weight if a not in out)))
    if isinstance(node, Attention):
        width = layer.size(node.head_dim) + layer.size(node.value_dim)
        return 2.0 * layer.size(node.batch) * layer.size(node.heads) * width * attended(layer, node, halved=halved)
    if isinstance(node, Scan):
        groups = layer.size(node.groups) if node.groups else layer.size(node.heads)
        shape = (layer.size(node.heads), layer.size(node.key_dim), layer.size(node.value_dim), groups, node.chunk)
        return layer.size(node.batch) * layer.size(node.sequence) * SCANS[node.kind](*shape)
    return node.flops if isinstance(node, Custom) else 0.0


def product_axes(layer: Layer, node: Einsum) -> tuple[str, ...]:
    """Axes that multiply the work of a product: all but those that only group it."""
    out = layer.tensor[node.outputs[0]].axes
    operands = [layer.tensor[name].axes for name in node.inputs]
    if node.weight:
        operands.append(layer.tensor[node.weight].axes)
    read = [set(axes) for axes in operands]
    found = dict.fromkeys(axis for axes in (*operands, out) for axis in axes)
    grouped = {a for a in found if a not in out and sum(a in axes for axes in read) == 1}
    return tuple(a for a in found if a not in grouped)


def attended(layer: Layer, node: Attention, *, halved: bool = False) -> float:
    """Pairs of query and key of one sequence."""
    queries, keys = layer.size(node.queries), layer.size(node.keys)
    mask = node.mask
    if node.queries != node.keys:
        return float(queries) * keys
    if halved and mask.kind == "causal":
        return queries * mask.mean_document(queries) / 2.0
    return mask.attended(queries)


def _ssd(heads: int, state: int, channels: int, groups: int, chunk: int) -> float:
    """Mamba 2 in chunks: C B^T by group, scores times inputs, chunk states, states to outputs (Dao and Gu 2024, section 6)."""
    return 2.0 * chunk * groups * state + 2.0 * chunk * heads * channels + 4.0 * heads * state * channels


def _linear(heads: int, key: int, value: int, groups: int, chunk: int) -> float:
    """Linear attention with decay: scores and their product inside a chunk, state update and read (Yang et al. 2023, GLA)."""
    return heads * (2.0 * chunk * (key + value) + 4.0 * key * value)


def _delta(heads: int, key: int, value: int, groups: int, chunk: int) -> float:
    """Gated delta rule: K K^T, the inverse of a triangle, W, U, V - W S, the update, Q S, Q K^T times it (Yang et al. 2024)."""
    return heads * (6.0 * chunk * key + 4.0 * chunk * value + 6.0 * key * value + chunk * chunk / 3.0)


def _dplr(heads: int, key: int, value: int, groups: int, chunk: int) -> float:
    """Diagonal plus low rank (RWKV-7): two more products of the keys than the delta rule."""
    return heads * (10.0 * chunk * key + 4.0 * chunk * value + 8.0 * key * value)


def _diagonal(heads: int, state: int, channels: int, groups: int, chunk: int) -> float:
    """Mamba 1's selective scan on vector units: 7 a state and channel, 3 a channel (gate and skip)."""
    return prod((heads, channels)) * (7.0 * state + 3.0)


SCANS: Final[dict[str, Callable[[int, int, int, int, int], float]]] = {
    "ssd": _ssd, "linear": _linear, "delta": _delta, "dplr": _dplr, "diagonal": _diagonal,
}  # fmt: skip
"""Kind of scan -> forward FLOPs per token from (heads, key dim or state, value dim or channels, groups, chunk)."""
