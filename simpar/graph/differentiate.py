"""Differentiate: which tensors have a gradient, and which the forward leaves for the backward.

The backward runs the nodes in reverse. A product has two: the gradient of its input (with the weight) and of its weight (with the
input); every other kind has one, which reads what its kernel keeps. Where nothing before a node is trained, the gradient of its
input is not needed and nothing is computed for it; where its weight is frozen, its input is not kept.
"""

from __future__ import annotations

from functools import lru_cache

from simpar.graph.kernel_types import Kept, Kernel, KernelPlan
from simpar.graph.kernels import kernels
from simpar.graph.types import Convolution, Einsum, Layer, Node


@lru_cache(maxsize=4096)
def differentiable(layer: Layer) -> frozenset[str]:
    """Tensors that have a gradient: activations from before, and what is made of them or of trained weights."""
    found = {name for name in layer.inputs if layer.tensor[name].role == "activation"}
    for node in layer.nodes:
        trained = any(layer.tensor[name].trained for name in node.parameters)
        if trained or any(name in found for name in node.inputs):
            found |= {name for name in node.outputs if layer.tensor[name].format in ("activation", "fp32")}
    return frozenset(found)


def needs_input_gradient(layer: Layer, node: Node) -> bool:
    """Whether the backward of `node` computes a gradient for what it reads."""
    return any(name in differentiable(layer) for name in node.inputs)


def needs_weight_gradient(layer: Layer, node: Node) -> bool:
    """Whether the backward of `node` computes a gradient for its weights."""
    return any(layer.tensor[name].trained for name in node.parameters)


def keeps(layer: Layer, kernel: Kernel) -> tuple[Kept, ...]:
    """What one kernel leaves for the backward: nothing where it has none, and no input for a frozen weight's gradient."""
    node = kernel.node
    weight, inputs = needs_weight_gradient(layer, node), needs_input_gradient(layer, node)
    if isinstance(node, Einsum | Convolution) and node.weight and not weight:
        return ()
    if not (weight or inputs or node.parameters):
        return ()
    return kernel.keeps if weight else tuple(tensor for tensor in kernel.keeps if not tensor.of_weight)


@lru_cache(maxsize=4096)
def kept(layer: Layer, plan: KernelPlan, frozen: frozenset[str] = frozenset()) -> dict[str, Kept]:
    """Tensors by name that a forward leaves; one that several kernels keep is there once, as the first of them keeps it.

    Args:
        frozen: nodes whose weight is not trained although the layer says so (low-rank adaptation).
    """
    found: dict[str, Kept] = {}
    for kernel in kernels(layer, plan):
        still = kernel.node.name in frozen
        if still and isinstance(kernel.node, Einsum | Convolution):
            continue
        for tensor in keeps(layer, kernel):
            if not (still and tensor.of_weight):
                found.setdefault(tensor.name, tensor)
    return found


@lru_cache(maxsize=4096)
def makers(layer: Layer, plan: KernelPlan) -> dict[str, Node]:
    """The node that makes each tensor: edges of the graph, and what kernels keep beside them (statistics, masks)."""
    found = dict(layer.producer)
    for kernel in kernels(layer, plan):
        for tensor in kernel.keeps:
            if tensor.name not in layer.inputs:
                found.setdefault(tensor.name, kernel.node)
    return found
