"""What a layer's backward holds beside the saved tensors at its worst op."""

from __future__ import annotations

from simpar.graph.differentiate import needs_weight_gradient
from simpar.graph.kernel_types import Kernel
from simpar.graph.kernels import product_of
from simpar.graph.types import Attention, Custom, Elementwise, Lookup, Loss, Node, Permute, Scan
from simpar.parallel.local_layer import LocalLayer
from simpar.specs.losses import Loss as HeadLoss


def transient(local: LocalLayer) -> float:
    """What a backward adds to the saved tensors at its worst op: gradients of a matmul's output, input and weight."""
    if _in_elementary_kernels(local):
        return max(_eager_transient(local), _scores_transient(local), _ring_transient(local))
    widest = 0.0
    for kernel in local.kernels:
        node = kernel.node
        if isinstance(node, Lookup) and len(node.inputs) == 1 and local.options.kernels.library.whole_embedding_gradient:
            # Beside the whole of it the part that this rank keeps (DTensor's redistribution copies it out).
            widest = 2.0 * local.layer.weights(node) * (1.0 + 1.0 / local.degrees.tp)
        if isinstance(node, Permute) and node.back:
            widest = max(widest, _weighing_transient(local, node))
        if product := product_of(kernel):
            layout = local.layout(node)
            out, source = (local.shards.local(local.axes(name), layout) for name in (node.outputs[0], node.inputs[0]))
            element, weight = local.options.kernels.element, local.weight_gradient(product)
            pair = out * element + weight
            if local.is_logits(node):
                # The logits and their copies are gone by then, but for their gradient.
                pair = _head_gradients(local.options.kernels.loss, out * element, weight)
                pair -= local.tensors().get(node.outputs[0], 0.0)
            widest = max(widest, pair + source * element)
    return max(widest, _scores_transient(local), _ring_transient(local))


def _head_gradients(loss: HeadLoss, logits: float, weight: float) -> float:
    """Most bytes of gradients of logits and of the head's weight at once, of so many bytes each.

    Pieces that exist one after the other add to the gradient at rest. Those of whole logits are gone through after all losses:
    with the first sum of two of the weight's gradients there is a third tensor, later ones are added in place.
    """
    if loss.chunks > 1 or loss.pieces == 1:
        return logits / loss.chunks + weight * min(loss.pieces, 2)
    return max(logits * (1.0 - done / loss.pieces) + weight * (done + 1) for done in range(3))


def _in_elementary_kernels(local: LocalLayer) -> bool:
    """Whether autograd runs a layer's backward op by op: no fused functions, no experts, no loss."""
    others = any(isinstance(node, Permute | Loss | Scan | Custom | Lookup) for node in local.layer.nodes)
    return not local.options.kernels.library.fused_activation and not others


def _eager_transient(local: LocalLayer) -> float:
    """The same where autograd runs op by op and gives back what an op saved when it is through with it.

    The gradient of the residual stream waits beside each branch.
    """
    tensors, element = local.tensors(), local.options.kernels.element
    last_reader: dict[str, str] = {}
    for kernel in reversed(local.kernels):
        last_reader |= {t.name: kernel.node.name for t in kernel.keeps if not local.frozen(kernel)}
    stream = local.shards.local(local.axes(local.layer.outputs[0])) * element
    adds = {node.name: node for node in local.layer.nodes if isinstance(node, Elementwise) and node.op == "residual"}
    joins = {name for node in adds.values() for name in node.inputs}
    widest = freed = gradients = 0.0
    for kernel in reversed(local.kernels):
        node, layout = kernel.node, local.layout(kernel.node)
        read, made = ([local.shards.local(local.axes(n), layout) * element for n in names] for names in (node.inputs, node.outputs))
        waiting = stream if node.outputs[0] not in joins else 0.0
        product = product_of(kernel)
        passing = local.weight_gradient(product) if product else 0.0
        if product and not passing:
            gradients += _new_gradient(local, node)
        if node.name not in adds:  # an addition passes its gradient on
            widest = max(widest, waiting + sum(read) + sum(made) + passing + gradients - freed)
        freed += sum(tensors[name] for name, reader in last_reader.items() if reader == node.name and name in tensors)
    return widest


def _new_gradient(local: LocalLayer, node: Node) -> float:
    """Bytes of a weight's gradient that stays at least to the end of the layer's backward."""
    trained = needs_weight_gradient(local.layer, node) and not local.options.lora_rank
    return local.shards.weights(node) * local.element if trained else 0.0


def _weighing_transient(local: LocalLayer, node: Permute) -> float:
    """Where eager torch weighs experts' outputs in fp32: the gradient of the product, and of each factor as large."""
    if not local.options.kernels.library.weighs_apart:
        return 0.0
    return 3.0 * 4.0 * local.shards.local(local.axes(node.inputs[0]), local.layout(node))


def _behind(local: LocalLayer, wanted: type[Node]) -> tuple[Kernel | None, float]:
    """The last node of a kind, and what the backward of the nodes behind it has freed by then."""
    tensors, freed = local.tensors(), 0.0
    for kernel in reversed(local.kernels):
        if isinstance(kernel.node, wanted):
            return kernel, freed
        freed += sum(tensors.pop(t.name, 0.0) for t in kernel.keeps)
    return None, freed


def _ring_transient(local: LocalLayer) -> float:
    """The same at an attention over torch's ring: keys and values of all query heads that were gathered (or arrived, and are
    passed on), their fp32 gradients and what arrives of them, less what the ops behind it have freed by then."""
    if local.degrees.cp == 1 or not local.degrees.ring_merges or local.degrees.cp_style == "ulysses":
        return 0.0
    kernel, freed = _behind(local, Attention)
    if kernel is None:
        return 0.0
    node = kernel.node
    assert isinstance(node, Attention)
    rows = (node.batch, node.queries, node.heads)
    pair = local.shards.local((*rows, node.head_dim), "tensor") + local.shards.local((*rows, node.value_dim), "tensor")
    parts = local.degrees.cp if local.degrees.cp_style == "all_gather" else 2
    return local.element * pair * parts + 2 * 4.0 * pair - freed


def _scores_transient(local: LocalLayer) -> float:
    """The same at an attention that keeps its scores: gradients of the probabilities before and after dropout and the
    buffer that the score matmul accumulates into (Megatron-LM), less what the ops behind it have freed by then."""
    kernel, freed = _behind(local, Attention)
    scores = local.scores_bytes(kernel) if kernel is not None else 0.0
    return (3.0 if local.options.kernels.dropout else 2.0) * scores - freed if scores else 0.0
