"""What models of plain torch modules move beside their kernels: copies of keys and values, sums of gradients."""

from __future__ import annotations

from simpar.graph.types import Attention, Convolution, Einsum
from simpar.parallel.local_layer import LocalLayer
from simpar.parallel.work import MemoryWork


def head_copies(local: LocalLayer, node: Attention) -> MemoryWork | None:
    """Keys and values copied to as many heads as queries have, and backward the sum of their gradients; none where they are not."""
    if not local.options.kernels.library.repeats_keys or local.layer.size(node.heads) <= local.layer.size(node.kv_heads):
        return None
    heads, widths = (node.heads, node.kv_heads), (node.head_dim, node.value_dim)
    tensors = ((node.batch, node.keys, some, width) for some in heads for width in widths)
    moved = local.element * sum(local.shards.local(axes, "tensor") for axes in tensors)
    return MemoryWork("copy", moved, 2, local.options.memory_implementation)


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
