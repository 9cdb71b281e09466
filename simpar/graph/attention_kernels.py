"""What attention runs as and keeps, fused or in elementary kernels."""

from __future__ import annotations

from simpar.graph.kernel_types import HALF, Axes, Kept, Kernel, KernelPlan, kept_whole
from simpar.graph.types import Attention, Einsum, Elementwise, Layer


def _turned(layer: Layer, node: Attention, plan: KernelPlan) -> float:
    """Share of packed queries, keys and values of which a rotary embedding in elementary kernels makes tensors of their own, while
    the values, a view, keep the whole of what one linear made."""
    rope = layer.producer.get(node.inputs[0])
    if not isinstance(rope, Elementwise) or rope.op not in ("rope", "scaled_rope") or plan.library.fused_rope:
        return 0.0
    product = layer.producer.get(rope.inputs[0])
    if not isinstance(product, Einsum) or product.linears != 1:
        return 0.0
    parts = [layer.volume(part) for part in layer.axis[layer.tensor[product.outputs[0]].axes[-1]].parts]
    return sum(parts[:2]) / sum(parts)


def attention(layer: Layer, node: Attention, plan: KernelPlan) -> Kernel:
    """Queries, keys, values and the output; beside them the log-sum-exp of each row, or the whole score matrix."""
    path = node.name.rsplit("/", 1)[0]
    out = node.outputs[0]
    keeps = [kept_whole(layer, name) for name in node.inputs]
    if plan.library.value_views and len(node.inputs) == 3:
        keeps[2] = Kept(node.inputs[2], _viewed(layer, node.inputs[2], node.value_dim), HALF)
    keeps.append(kept_whole(layer, out))
    rows, fused = (node.batch, node.queries, node.heads), plan.beyond(layer.size(node.head_dim)) != "unfused"
    # torch's own math attention runs in fp32 whatever its inputs are.
    if not fused and in_fp32(plan):
        return Kernel(node, launches=4, keeps=(*_kept_in_fp32(layer, node, path, plan), kept_whole(layer, out)))
    if fused:
        keeps.append(Kept(f"{path}/lse", rows, 4.0))
    else:
        scores = sum(score_parts(plan)) * layer.size(node.keys)
        keeps.append(Kept(f"{path}/softmax", (node.batch, node.heads, node.queries), scores))
    if plan.library.repeats_keys and layer.size(node.heads) > layer.size(node.kv_heads):
        more = 1.0 - layer.size(node.kv_heads) / layer.size(node.heads)
        keeps.append(Kept(f"{path}/repeated_keys", (*rows, node.head_dim), HALF, part=more))
        keeps.append(Kept(f"{path}/repeated_values", (*rows, node.value_dim), HALF, part=more))
    elif (copies := plan.library.qkv_copies or _turned(layer, node, plan)) and len(node.inputs) == 1:
        keeps.append(Kept(f"{path}/qkv_copies", layer.tensor[node.inputs[0]].axes, HALF * copies))
    if plan.output_copies:
        keeps.append(Kept(f"{path}/out_copies", layer.tensor[out].axes, 2 * plan.output_copies))
    return Kernel(node, launches=1 if fused else 4, keeps=tuple(keeps))


def in_fp32(plan: KernelPlan) -> bool:
    """Whether attention without a fused kernel turns 16-bit inputs into fp32."""
    return plan.library.unfused_attention_fp32 and plan.element == HALF


def score_parts(plan: KernelPlan) -> tuple[float, ...]:
    """Bytes of a score, by tensor: the softmax's output, what is multiplied with the values where that is another tensor, a mask.

    Under dropout its output and its mask (Korthikanti et al. 2022: 5 a s per token). Autocast computes softmax in fp32 and casts
    what the product reads (torch, "CUDA Ops that can autocast to float32").

    >>> score_parts(KernelPlan(dropout=0.1)), score_parts(KernelPlan(autocast="own")), score_parts(KernelPlan(element=4.0))
    ((2.0, 2.0, 1.0), (4.0, 2.0), (4.0,))
    """
    if in_fp32(plan):
        return (4.0, 4.0, 1.0) if plan.dropout else (4.0,)
    output = 4.0 if plan.autocast else plan.element
    read = (plan.element,) if plan.dropout or plan.autocast else ()
    return (output, *read, *((1.0,) if plan.dropout else ()))


def _kept_in_fp32(layer: Layer, node: Attention, path: str, plan: KernelPlan) -> tuple[Kept, ...]:
    """What torch's own attention keeps of 16-bit inputs (aten/native/transformers/attention.cpp): in fp32 queries and keys times
    the scale, values, keys and values for every query head, and the softmax output; under dropout its mask and output too."""
    rows, keys = (node.batch, node.queries, node.heads), layer.size(node.keys)
    wide, scores = keys / layer.size(node.queries) * 4.0, (9.0 if plan.dropout else 4.0) * keys
    return (
        Kept(f"{path}/scaled_queries", (*rows, node.head_dim), 4.0), Kept(f"{path}/scaled_keys", (*rows, node.head_dim), wide),
        Kept(f"{path}/wide_values", (*rows, node.value_dim), wide), Kept(f"{path}/softmax", rows, scores),
    )  # fmt: skip


def _viewed(layer: Layer, values: str, width: str) -> Axes:
    """Axes of the packed tensor that values are a part of."""
    for name in layer.producer[values].inputs:
        axes = layer.tensor[name].axes
        if any(width in part for part in layer.axis[axes[-1]].parts):
            return axes
    return layer.tensor[values].axes
