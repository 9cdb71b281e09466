"""Fuse and cast: which kernels run a layer, what they move and what they keep, as rules by kind of node.

A `KernelPlan` says which rewrite rules of a kernel library are in force (TransformerEngine fuses, torch eager runs chains of
elementary kernels, a compiler fuses those again). Bytes are per element at 16-bit activations and are widened where training is in
fp32; sources of the counts stand in docs/formulas.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final

from simpar.graph.attention_kernels import attention
from simpar.graph.casts import cast_inputs, narrow_copies
from simpar.graph.kernel_types import HALF, Axes, Kept, Kernel, KernelPlan, Traffic, kept_whole
from simpar.graph.scan_kernels import scan
from simpar.graph.types import (
    GELUS,
    Attention,
    Convolution,
    Custom,
    Einsum,
    Elementwise,
    Layer,
    Lookup,
    Loss,
    Node,
    Norm,
    Permute,
    Scan,
    Select,
    View,
)

Rule = Callable[[Layer, Any, KernelPlan], Kernel]


def _input(layer: Layer, node: Node) -> Axes:
    return layer.tensor[node.inputs[0]].axes


def _norm(layer: Layer, node: Norm, plan: KernelPlan) -> Kernel:
    """One kernel, as torch's layer norm always is; or, as its dispatcher sees it, RMSNorm in fp32 and back (8 kernels, 17
    backward), of queries and of keys too. Under autocast it reads and makes fp32 (6 kernels, 14 backward), but for queries and
    keys, which come from a product in 16 bits."""
    one = plan.library.fused_norm or node.kind == "layernorm"
    wide = 2.0 if plan.autocast else 1.0
    if node.over:
        pairs = tuple(zip(node.saved, node.over, strict=True))
        kept = tuple(Kept(name, axes, HALF) for name, axes in pairs) if one else tuple(k for p in pairs for k in _in_fp32(*p, plan))
        price, forward, backward, launches = ("norm", 4.0, 6.0, 1) if one else ("composite", *RMSNORM_CHAIN)
        moved, back = (tuple((axes, each) for axes in node.over) for each in (forward, backward))
        return Kernel(node, price, moved, back, launches * len(node.over), kept)
    axes = _input(layer, node)
    stats = Kept(f"{node.name}_stats", axes[:-1], 8.0 if node.kind == "layernorm" else 4.0)
    if one:
        gate = 2.0 * node.gated
        keeps = (*(kept_whole(layer, name, HALF * wide) for name in node.inputs), stats)
        forward, backward = wide * (4.0 + gate), wide * (6.0 + 2 * gate)
        if plan.autocast == "joined":  # with the sum: normalised fp32 and its 16-bit product are written, read with the gradient
            forward, backward = 6.0 + gate, 6.0 + 2 * gate
        return Kernel(node, "norm", ((axes, forward),), ((axes, backward),), 1, keeps)
    gates = tuple(kept_whole(layer, name) for name in node.inputs[1:])
    if plan.autocast:
        kept = (Kept(f"{node.name}_fp32", axes, 4.0), Kept(f"{node.name}_normed", axes, 4.0, of_weight=True), stats, *gates)
        return Kernel(node, "composite", ((axes, 28.0),), ((axes, 92.0),), 6, kept)
    forward, backward, launches = RMSNORM_CHAIN
    kept = (*_in_fp32(node.name, axes, plan), stats, *gates)
    return Kernel(node, "composite", ((axes, forward),), ((axes, backward),), launches, kept)


RMSNORM_CHAIN: Final = (36.0, 95.0, 8)
"""Bytes per element forward and backward, and kernels, of RMSNorm in fp32 and back where elementary kernels make it: a cast to fp32
(6), its square (8), the mean (4), the product with the root (8), the cast back (6) and the product with the weight (4)."""


def _in_fp32(name: str, axes: Axes, plan: KernelPlan) -> tuple[Kept, Kept]:
    """What RMSNorm as a chain keeps: its input in fp32, not in 16 bits, and for its weight's gradient what is multiplied by it."""
    return Kept(f"{name}_fp32", axes, 4.0), Kept(f"{name}_normed", axes, plan.library.normed_bytes, of_weight=True)


def _product(layer: Layer, node: Einsum | Convolution, plan: KernelPlan) -> Kernel:
    """A product keeps its operands: the weight is there anyway, the input in the format in which it is multiplied.

    A frozen one keeps nothing, but each low-rank pair beside it what it reads: where that was cast or elements are dropped, a copy.
    Magnitudes keep both results that they scale.
    """
    if (pairs := plan.pairs) and pairs.magnitudes and pairs.adapted(node):
        found = _product(layer, node, replace(plan, pairs=replace(pairs, dora=False)))
        scaled = Kept(f"{node.name}_scaled", layer.tensor[node.outputs[0]].axes, pairs.magnitudes.kept)
        return replace(found, keeps=(*found.keeps, scaled))
    if (pairs := plan.pairs) and pairs.kept and pairs.adapted(node):
        copy = Kept(f"{node.name}_adapter_in", layer.tensor[node.inputs[0]].axes, pairs.kept * pairs.of(node))
        return Kernel(node, keeps=(copy, kept_whole(layer, node.inputs[0])) if plan.frozen_inputs else (copy,))
    if read := narrow_copies(layer, node, plan) or cast_inputs(layer, node, plan):
        each = read * _input_bytes(layer, node.inputs[0], plan)
        return Kernel(node, keeps=(Kept(f"{node.name}_cast_in", layer.tensor[node.inputs[0]].axes, each),))
    return Kernel(node, keeps=tuple(kept_whole(layer, name, _input_bytes(layer, name, plan)) for name in node.inputs))


def _convolution(layer: Layer, node: Convolution, plan: KernelPlan) -> Kernel:
    """Over channels as products; channel by channel (the short causal convolutions of scans) it moves its input and output."""
    source, out = layer.tensor[node.inputs[0]].axes, layer.tensor[node.outputs[0]].axes
    if layer.tensor[node.weight].axes[-1] not in source:
        return _product(layer, node, plan)
    keep = (kept_whole(layer, node.inputs[0]),)
    return Kernel(node, "activation", ((source, 2.0), (out, 2.0)), ((source, 4.0), (out, 2.0)), 1, keep)


def _input_bytes(layer: Layer, name: str, plan: KernelPlan) -> float:
    """A tensor that only products in 16 bits read is kept in 16 bits."""
    readers = layer.consumers.get(name, ())
    return plan.linear_input_bytes if any(isinstance(n, Einsum) and not n.wide for n in readers) else HALF


def product_of(kernel: Kernel) -> Einsum | Convolution | None:
    """The node of a kernel that is a matrix product with a gradient of its input and one of its weight; None of any other."""
    return kernel.node if isinstance(kernel.node, Einsum | Convolution) and not kernel.price else None


def _select(layer: Layer, node: Select, plan: KernelPlan) -> Kernel:
    """Scores, probabilities and the mask of the chosen, in fp32."""
    axes = _input(layer, node)
    path = node.name.rsplit("/", 1)[0]
    keeps = (Kept(f"{path}/logits", axes, 4.0), Kept(f"{path}/probs", axes, 4.0), Kept(f"{path}/mask", axes, 1.0))
    return Kernel(node, "softmax", ((axes, 16.0),), ((axes, 16.0),), 6, keeps)


def _permute(layer: Layer, node: Permute, plan: KernelPlan) -> Kernel:
    """Rows read and written once, the router's probability of each with them; back, weighed by it, or apart in eager torch.

    Where no kernel is made for it, what adds up rows of one token (outputs, backward the gradients of inputs) is torch's own
    (`ROW_SUMS`), which a compiled graph calls as well.
    """
    rows = layer.tensor[node.inputs[0] if node.back else node.outputs[0]].axes
    path, library = node.name.rsplit("/", 1)[0], plan.library
    added = ROW_SUMS["bulk" if library.bulk_row_adds and library.expert_rows == "added" else library.expert_rows]
    taken: tuple[Traffic, Traffic] = (((rows, 4.0),), ((rows, 4.0),))
    if not node.back:
        keeps: tuple[Kept, ...] = (Kept(f"{path}/row_probs", rows[:1], 4.0),)
        beside: tuple[tuple[str, Axes, float, float], ...] = ((added.inputs, rows, 0.0, 6.0),) if added.inputs else ()
        taken = (taken[0], () if added.inputs else taken[1])
    else:
        keeps = (Kept(f"{path}/weighed", rows, 4.0),) if library.expert_output_fp32 else ()
        beside = (("copy", rows, *library.expert_output_bytes),) if library.weighs_apart else ()
        beside += ((added.outputs, rows, 6.0, 0.0),) if added.outputs else ()
        beside += (("row_product", rows, 0.0, 8.0),) if added.product else ()
        taken = (() if added.outputs else taken[0], taken[1])
    return Kernel(node, "permute" if library.expert_rows == "fused" else "row_take", *taken, 2, keeps, beside=beside)


@dataclass(frozen=True, slots=True)
class RowSums:
    """Classes of the kernels that add up the rows of a token: outputs in the forward, gradients of inputs in the backward; whether
    outputs are summed by a batched product instead, whose gradients are products of vectors."""

    outputs: str = ""
    inputs: str = ""
    product: bool = False


ROW_SUMS: Final = {
    "fused": RowSums(), "added": RowSums("row_add", "row_add"), "placed": RowSums("", "row_sort_add", product=True),
    "sorted": RowSums("row_sort_add", "row_sort_add"), "bulk": RowSums("copy", "copy"),
}  # fmt: skip
"""By `Kernels.expert_rows`; added in bulk from torch 2.13 on. Each reads a row and its sum and writes the sum (6 bytes)."""


def _lookup(layer: Layer, node: Lookup, plan: KernelPlan) -> Kernel:
    """Rows read and written; the backward adds into the table's gradient."""
    if not node.inputs:
        return Kernel(node, "embedding")
    out, wide = layer.tensor[node.outputs[0]].axes, 2.0 if plan.autocast else 1.0
    if len(node.inputs) > 1:
        return Kernel(node, "residual", ((out, 6.0 * wide),), ((out, 4.0 * wide),))
    return Kernel(node, "embedding", ((out, 4.0 * wide),), ((out, 8.0 * wide),), 1, (kept_whole(layer, node.inputs[0], 8.0),))


def _loss(layer: Layer, node: Loss, plan: KernelPlan) -> Kernel:
    """Logits plus the fp32 copies that live until the backward (semantics of each framework's loss)."""
    axes = _input(layer, node)
    if node.kind == "classes":
        return Kernel(node, "cross_entropy", ((axes, 6.0),), ((axes, 6.0),), 1, (kept_whole(layer, node.inputs[0]),))
    forward, backward = (moved * plan.logits_gathered for moved in plan.loss.moved_bytes)
    kept = plan.loss.logit_bytes(plan.element) * plan.logits_gathered + (plan.element if plan.logits_gathered > 1 else 0.0)
    launches = {"fused": 3, "unfused": 8}.get(plan.loss.kind, 3 * plan.loss.chunks)
    keeps: tuple[Kept, ...] = (kept_whole(layer, node.inputs[0], kept / plan.loss.chunks),)
    head = layer.producer.get(node.inputs[0])
    if plan.loss_keeps_weight_gradient and isinstance(head, Einsum) and head.weight:
        keeps = (*keeps, Kept(f"{head.name}.weight_gradient", layer.tensor[head.weight].axes, HALF))
    return Kernel(node, plan.loss.kernel, ((axes, forward),), ((axes, backward),), launches, keeps)


def _custom(layer: Layer, node: Custom, plan: KernelPlan) -> Kernel:
    """Its own bytes, spread over its axes."""
    over = node.over or _input(layer, node)
    volume = layer.volume(over)
    backward = node.backward_bytes or 2.0 * node.forward_bytes
    kept = tuple(kept_whole(layer, name) for name in node.saved or node.inputs)
    return Kernel(node, "custom", ((over, node.forward_bytes / volume),), ((over, backward / volume),), 1, kept)


# -- elementwise ---------------------------------------------------------------------------------------------------------


def _residual(layer: Layer, node: Elementwise, plan: KernelPlan) -> Kernel:
    axes, mask = _input(layer, node), 1.0 if plan.dropout else 0.0
    keeps = (Kept(f"{node.name}_mask", axes, 1.0),) if plan.dropout else ()
    # Dropout and sum are one kernel or two; a sum alone is one anywhere.
    apart = plan.dropout > 0 and not plan.library.fused_residual
    forward = 6.0 + mask + (4.0 if apart else 0.0)
    # What reads the sum reads it twice: autograd adds up both gradients (6); the branch's passes the mask of a dropout (5).
    backward = 11.0 if plan.dropout else 6.0
    if plan.autocast:
        # The stream is fp32, the branch is not: backward its gradient is cast, both of the stream are fp32 (joined: one).
        forward, backward = forward + 4.0, backward + (12.0 if plan.autocast == "own" else 4.0)
    return Kernel(node, "residual", ((axes, forward),), ((axes, backward),), 2 if apart else 1, keeps)


def _dropout(layer: Layer, node: Elementwise, plan: KernelPlan) -> Kernel:
    return _residual(layer, node, plan) if plan.dropout else Kernel(node, bare=True)


def _rope(layer: Layer, node: Elementwise, plan: KernelPlan) -> Kernel:
    """A rotary embedding, fused or in elementary kernels, by halves or by complex numbers, which no compiler fuses; not every fused
    kernel takes a factor of its sine and cosine (YaRN)."""
    library = plan.library
    turned = library.complex_rope and node.op == "rope" and not isinstance(layer.producer.get(node.inputs[0]), Norm)
    fused = library.fused_rope and not turned and (node.op == "rope" or library.fused_scaled_rope)
    price, forward, backward, launches = ("rope", 4.0, 4.0, 2) if fused else ("composite", 21.0, 27.0, 8)
    if turned:  # a cast to fp32 (6), the product (8) and a cast back (6), backward the same
        forward, backward, launches = 20.0, 20.0, 6
    elif library.wide_rope and not fused:
        # Cast (6), product (8), half with its sign turned (4), joined (8), product (8), sum (12), cast back (6).
        forward, backward, launches = 52.0, 68.0, 14
    elif plan.autocast and not fused:
        # Sine and cosine have the dtype of the stream, and attention casts what they make.
        forward, backward = 36.0, 54.0
    over = node.over or (_input(layer, node),)
    return Kernel(node, price, tuple((a, forward) for a in over), tuple((a, backward) for a in over), launches)


def _latent_rope(layer: Layer, node: Elementwise, plan: KernelPlan) -> Kernel:
    """Queries and keys of latent attention, the shared rotary part of the keys copied to all heads.

    In elementary kernels: the queries' rotary part is cast to fp32, turned as complex numbers and cast back, queries and keys are
    put together; backward that part again, and the gradients of what was split are (torchtitan models/deepseek_v3 Attention).
    """
    query, key = (layer.tensor[name].axes for name in node.outputs[:2])
    if plan.library.fused_rope and not plan.library.complex_rope:
        return Kernel(node, "rope", ((query, 8.0),), ((query, 8.0),), 2)
    both, shared = (layer.tensor[name].axes for name in node.inputs[1:])
    turned = (*query[:-1], shared[-1])
    return Kernel(node, "composite", ((query, 4.0), (key, 4.0), (turned, 20.0)), ((query, 4.0), (both, 4.0), (turned, 22.0)), 9)


def _activation(layer: Layer, node: Elementwise, plan: KernelPlan) -> Kernel:
    """The non-linearity, and the gate where its input is two halves."""
    wide, narrow = _input(layer, node), layer.tensor[node.outputs[0]].axes
    keeps, gated = [kept_whole(layer, node.inputs[0])], len(layer.axis[wide[-1]].parts) == 2
    if gated and plan.library.gate_chains:
        sent = (n for n in layer.nodes if isinstance(n, Permute) and not n.back)
        weighed = any(layer.tensor[n.outputs[0]].axes[0] == wide[0] for n in sent)
        weight = plan.row_probability_bytes if weighed else 0.0
        forward, backward, launches, kept = GATE_CHAINS[weight] if plan.library.gate_chains == "offset" else GATE_HALVES
        keeps += [Kept(f"{node.name}_{name}", narrow, HALF) for name in kept]
        return Kernel(node, "stream", ((narrow, forward),), ((narrow, backward),), launches, tuple(keeps))
    if gated and not plan.library.fused_activation:
        # The gate's non-linearity and the product, forward (4 + 6 bytes) and backward (6 + 12).
        keeps.append(Kept(f"{node.name}_gate", narrow, HALF))
        return Kernel(node, "stream", ((narrow, 10.0),), ((narrow, 18.0),), 2, tuple(keeps))
    price = "gate" if gated else "activation"
    return Kernel(node, price, ((wide, 2.0), (narrow, 2.0)), ((wide, 4.0), (narrow, 2.0)), 1, tuple(keeps))


GATE_CHAINS: Final[dict[float, tuple[float, float, int, tuple[str, ...]]]] = {
    0.0: (14.0, 26.0, 3, ("gate", "other")), HALF: (18.0, 38.0, 4, ("gate", "other", "product")),
    4.0: (26.0, 56.0, 5, ("gate", "other", "product")),
}  # fmt: skip
"""Bytes of the probability that weighs a row (0: none) -> bytes per element of one half forward and backward, kernels and kept
tensors beside the input of gates that Megatron-LM does not fuse (core/transformer/mlp.py and moe/experts.py since August 2025): the
non-linearity (4 bytes), the other half plus glu_linear_offset (4) and their product (6); backward two products (12), the
non-linearity (6) and the halves' gradients joined (8). What an expert's makes is weighed (4); backward the gradients of what was
weighed (4) and of the weight, a product summed over the width (8). In fp32 6 and a cast back (6); backward a cast (6), 8 with one
more (6) and 10."""
GATE_HALVES: Final = (10.0, 26.0, 2, ("gate",))
"""The same before there was an offset: the non-linearity (4) and the product (6); backward as above."""
GELU_CHAINS: Final[dict[str, tuple[float, float, int, tuple[float, ...]]]] = {
    "gelu_new": (36.0, 56.0, 8, (HALF,) * 4), "gelu_fast": (42.0, 72.0, 9, (HALF,) * 7), "quick_gelu": (14.0, 28.0, 3, (HALF,) * 2),
    "gelu_new_fp32": (76.0, 118.0, 10, (4.0, 4.0, 4.0, HALF)),
}  # fmt: skip
"""Bytes per element forward and backward, kernels and kept tensors (the input first) of GELUs that transformers' activations.py
writes out, as do minGPT's NewGELU and LLMs-from-scratch's GELU (torch's own is one kernel). Under autocast torch.pow casts its
input to fp32 and keeps that, what is made of it is fp32, and the product behind it casts it back: 0.5 x (4), cast (6), power (8),
times (8), plus x (10), times (8), tanh (8), plus 1 (8), times 0.5 x (10), cast (6)."""


def _chained_gelu(layer: Layer, node: Elementwise, plan: KernelPlan) -> Kernel:
    """A GELU in elementary operations, or one kernel where those are compiled or fused."""
    if plan.library.fused_activation:
        return _activation(layer, node, plan)
    powers = node.op == "gelu_new" and plan.autocast_powers
    forward, backward, launches, kept = GELU_CHAINS[f"{node.op}_fp32" if powers else node.op]
    axes, first = _input(layer, node), f"{node.name}_power" if powers else node.inputs[0]
    keeps = (Kept(name, axes, each) for name, each in zip([first, *(f"{node.name}_{i}" for i in range(1, 9))], kept, strict=False))
    return Kernel(node, "stream", ((axes, forward),), ((axes, backward),), launches, tuple(keeps))


def _clamp(layer: Layer, node: Elementwise, plan: KernelPlan) -> Kernel:
    """Clamp of both halves and their concatenation; backward the masks of what was not clamped (one half has two bounds), the
    gradients under them and their concatenation."""
    if plan.library.fused_expert_bias or plan.library.fused_clamp:
        return Kernel(node, bare=True)
    axes = _input(layer, node)
    keeps = (kept_whole(layer, node.inputs[0]),)
    return Kernel(node, "composite", ((axes, 4.0),), ((axes, 11.0),), 3, keeps, beside=(("copy", axes, 4.0, 4.0),))


def _expert_bias(layer: Layer, node: Elementwise, plan: KernelPlan) -> Kernel:
    """Output bias of each expert times the routing probability of each row, added and concatenated; backward the gradient times
    either, summed over the rows (bias) and over the width (probability), and split's gradient. Probabilities in fp32 make the sum
    fp32, which is cast back, and so is its gradient."""
    if plan.library.fused_expert_bias:
        return Kernel(node, bare=True)
    axes = _input(layer, node)
    wide = plan.row_probability_bytes > HALF
    forward, backward, each = (14.0, 24.0, (2, 6)) if wide else (2.0, 12.0, (2, 4))
    copied = ("copy", axes, *((14.0, 16.0) if wide else (10.0, 4.0)))
    return Kernel(node, "composite", ((axes, forward),), ((axes, backward),), 2, each_group=each, beside=(copied,))


def _relu(layer: Layer, node: Elementwise, plan: KernelPlan) -> Kernel:
    """Keeps what it makes, not what it reads (torch's threshold_backward); what leaves the layer is the next layer's input."""
    made = node.outputs[0]
    keeps = () if made in layer.outputs else (kept_whole(layer, made),)
    return replace(_plain(layer, node, plan), keeps=keeps)


def _pool(layer: Layer, node: Elementwise, plan: KernelPlan) -> Kernel:
    axes = _input(layer, node)
    return Kernel(node, "activation", ((axes, 2.5),), ((axes, 4.0),))


def _plain(layer: Layer, node: Elementwise, plan: KernelPlan) -> Kernel:
    """Reads its inputs, writes its output; backward: the inputs and the gradient read, the gradients of the inputs written."""
    out = layer.tensor[node.outputs[0]].axes
    if node.over:
        return Kernel(node, "activation", tuple((a, 4.0) for a in node.over), tuple((a, 6.0) for a in node.over), 1,
                      (kept_whole(layer, node.inputs[0]),))  # fmt: skip
    read = [layer.tensor[name] for name in node.inputs]
    moved = (*((t.axes, 2.0) for t in read), (out, 2.0))
    back = (*((t.axes, 4.0) for t in read), (out, 2.0))
    return Kernel(node, "activation", moved, back, 1, tuple(kept_whole(layer, t.name) for t in read))


ELEMENTWISE: Final[dict[str, Rule]] = {
    "residual": _residual, "dropout": _dropout, "rope": _rope, "scaled_rope": _rope, "latent_rope": _latent_rope,
    "activation": _activation, **dict.fromkeys(GELUS, _chained_gelu),
    "clamp": _clamp, "expert_bias": _expert_bias, "pool": _pool, "relu": _relu,
}  # fmt: skip
"""Elementwise ops with a rule of their own; any other is `_plain`."""

RULES: Final[dict[type[Node], Rule]] = {
    Norm: _norm, Einsum: _product, Convolution: _convolution, Attention: attention, Scan: scan, Select: _select,
    Permute: _permute, Lookup: _lookup, Loss: _loss, Custom: _custom,
    Elementwise: lambda layer, node, plan: ELEMENTWISE.get(node.op, _plain)(layer, node, plan),
    View: lambda layer, node, plan: Kernel(node, bare=True),
}  # fmt: skip
"""Kind of node -> how it runs."""


def _widened(kernel: Kernel, plan: KernelPlan) -> Kernel:
    """`kernel` where activations take `plan.element` bytes; statistics, masks and indices keep their width."""
    if plan.element == HALF:
        return kernel
    scale = plan.element / HALF
    return replace(
        kernel,
        forward=tuple((axes, each * scale) for axes, each in kernel.forward),
        backward=tuple((axes, each * scale) for axes, each in kernel.backward),
        keeps=tuple(replace(k, bytes=plan.element) if k.bytes == HALF else k for k in kernel.keeps),
        beside=tuple((kind, axes, forward * scale, backward * scale) for kind, axes, forward, backward in kernel.beside),
    )


@lru_cache(maxsize=8192)
def kernels(layer: Layer, plan: KernelPlan) -> tuple[Kernel, ...]:
    """Kernels of a layer, in order, without nodes of which nothing is left."""
    found = (_widened(RULES[type(node)](layer, node, plan), plan) for node in layer.nodes)
    return tuple(kernel for kernel in found if not kernel.bare)
