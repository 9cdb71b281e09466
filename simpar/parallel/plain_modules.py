"""What models of plain torch modules move beside their kernels: copies of keys and values, sums of gradients."""

from __future__ import annotations

from simpar.graph.types import Attention, Convolution, Einsum
from simpar.parallel.local_layer import LocalLayer
from simpar.parallel.work import MemoryWork


def head_copies(local: LocalLayer, node: Attention, *, backward: bool) -> MemoryWork | None:
    """Keys and values copied to as many heads as queries have, and backward the sum of their gradients; queries, keys and values
    copied so that heads come before tokens: their gradients come with tokens first (flash attention). None where nothing is."""
    library, layer = local.options.kernels.library, local.layer
    few = [(node.batch, node.keys, node.kv_heads, width) for width in (node.head_dim, node.value_dim)]
    moved, launches = 0.0, 0
    if library.heads_first and not (library.fused_rope or backward):
        tensors = [(node.batch, node.queries, node.heads, node.head_dim), *few]
        moved, launches = 2.0 * sum(local.shards.local(axes, "tensor") for axes in tensors), 3
    if library.repeats_keys and layer.size(node.heads) > layer.size(node.kv_heads):
        many = [(node.batch, node.keys, node.heads, width) for width in (node.head_dim, node.value_dim)]
        moved, launches = moved + sum(local.shards.local(axes, "tensor") for axes in (*many, *few)), launches + 2
    return MemoryWork("copy", local.element * moved, launches, local.options.memory_implementation) if launches else None


def input_gradient_sums(local: LocalLayer, node: Einsum | Convolution) -> MemoryWork | None:
    """Sums of the gradients of what linears side by side read, a kernel for each but one: with the first of them, whose own
    gradient comes last; none with any other node."""
    apart = local.options.kernels.library.linears_apart
    readers = [n for n in local.layer.consumers[node.inputs[0]] if isinstance(n, Einsum) and n.weight and n.module in apart]
    count = sum(n.linears for n in readers) - 1 if node in readers[:1] else 0
    if not count:
        return None
    read = local.shards.local(local.axes(node.inputs[0]), local.layout(node))
    return MemoryWork("residual", 3 * local.element * read * count, count, local.options.memory_implementation)
