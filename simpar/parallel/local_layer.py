"""One rank's share of a layer's nodes: each as the work that is priced, weights, and what stays in memory."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property, lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from simpar.graph.attention_kernels import in_fp32, score_parts
from simpar.graph.differentiate import kept
from simpar.graph.kernel_types import Kept, Kernel
from simpar.graph.kernels import kernels, product_of
from simpar.graph.ledger import attended, node_flops
from simpar.graph.rematerialise import Cut, Recompute, cut, staying
from simpar.graph.shard import Layout, Shards
from simpar.graph.types import Attention, Convolution, Custom, Einsum, Layer, Loss, Node, Norm, Scan
from simpar.parallel.adapters import pairs_of
from simpar.parallel.split_options import SplitOptions, WeightGradients
from simpar.parallel.work import AttentionWork, Direction, Gemm, GroupedGemm, KernelWork, MemoryWork, OpList, fused

SOFTMAX_BATCHES: Final = 4
"""What batch times heads must divide by for Megatron's softmax kernel, else torch's chain runs (model/fused_softmax.py)."""
SOFTMAX_KEYS: Final = 16384
"""Keys from which on torch's chain runs as well (TransformerEngine dot_product_attention/softmax.py, is_kernel_available)."""
CHAIN_KERNELS: Final = 5
"""Kernels that the chain has more: to fp32, scale, mask, softmax and back to 16 bits instead of one (two of the mask's)."""
FUSED: Final = ("fa", "cudnn", "flex")
FLASH_HEAD: Final = 256
CUDNN_HEAD: Final = 128
"""Widest heads that torch's scaled_dot_product_attention gives FlashAttention and cuDNN (aten/src/ATen/native/transformers/cuda/
sdp_utils.cpp: check_head_dim_size_flash, check_cudnn_tensor_shapes; cuDNN above 9.22 takes 256, which no stable torch has yet).
FlexAttention fits shared memory at 512 with its smallest tiles alone, slower than SDPA (whitecircle/halo gemma4.md, 2026-10)."""


def sdpa_kernel(first: str, head_dim: int, *, masked: bool) -> str:
    """The kernel that torch's scaled_dot_product_attention runs where `first` is its first choice.

    FlashAttention takes no mask (check_for_attn_mask); the memory-efficient kernel takes every head and mask, and with a mask
    computes all pairs, as cuDNN does.

    >>> sdpa_kernel("cudnn", 512, masked=False), sdpa_kernel("cudnn", 256, masked=True), sdpa_kernel("fa2", 128, masked=False)
    ('efficient-causal', 'efficient', 'fa2')
    """
    if first.startswith("cudnn") and head_dim > CUDNN_HEAD:
        first = "fa2"
    if first == "fa2" and (masked or head_dim > FLASH_HEAD):
        return "efficient" if masked else "efficient-causal"
    return first


Product = Einsum | Convolution


class LocalLayer:
    """One layer on one rank under `options`."""

    def __init__(self, layer: Layer, options: SplitOptions) -> None:
        self.layer, self.options = layer, options
        self.degrees, self.element = options.degrees, options.kernels.element
        self.shards = Shards(layer, options.degrees.placement(options.load_factor * options.spare_rows))
        self.kernels: tuple[Kernel, ...] = kernels(layer, options.kernels)
        self.cut: Cut = cut(layer, options.kernels, options.recompute)
        self._products: dict[str, tuple[str, float, float, float]] = {}

    def axes(self, tensor: str) -> tuple[str, ...]:
        """Axes of a tensor."""
        return self.layer.tensor[tensor].axes

    def layout(self, node: Node) -> Layout:
        """The layout in which a node works."""
        return self.shards.layouts.of_node[node.name]

    # -- work of one node ----------------------------------------------------------------------------------------------

    def product(self, node: Product, direction: Direction) -> Gemm | GroupedGemm:
        """A product: m rows, n outputs, k contracted, by the forward."""
        group, m, n, k = self._sizes(node)
        fp32 = self.options.accumulate_fp32 and direction == "wgrad"
        if group:
            groups, dtype = max(round(self.shards.extent(group, "expert")), 1), self.options.expert_dtype or self.options.dtype
            if self.options.dense_experts:
                # What is contracted has zeros for the other experts; shapes are fixed, so that empty rows are multiplied too.
                n, k = (n * groups, k) if direction == "dgrad" else (n, k * groups)
                return Gemm(max(round(m * self.options.spare_rows), 1), round(n), round(k), dtype, direction, fp32)
            return GroupedGemm(groups, m, round(n), round(k), dtype, direction, fp32)
        # The logits and the router stay in 16 bits under fp8 training.
        wide = isinstance(node, Einsum) and node.wide and self.options.narrow
        dtype = "bf16" if wide else self.options.dtype
        return Gemm(max(round(m), 1), max(round(n), 1), max(round(k), 1), dtype, direction, fp32)

    def _sizes(self, node: Product) -> tuple[str, float, float, float]:
        """The axis that groups a product's rows, m, n and k; all directions share them."""
        found = self._products.get(node.name)
        if found is None:
            out, layout = self.axes(node.outputs[0]), self.layout(node)
            second = self.axes(node.weight) if node.weight else self.axes(node.inputs[1])
            rows = tuple(a for a in out if a not in second or (not node.weight and a in self.axes(node.inputs[0])))
            group = self.layer.grouping(node)
            n = self.shards.product((a for a in out if a not in rows), "tensor")
            k = self.shards.product((a for a in second if a not in out and a != group), "tensor")
            m = self.shards.local(rows, layout) / (self.options.spare_rows if group else 1.0)
            found = self._products[node.name] = (group, m, n, k)
        return found

    def _pad(self, node: Node, product: Gemm | GroupedGemm, ops: OpList) -> None:
        """Put the kernel that writes a row for every expert, all but one zeros, where one product is over all experts."""
        if self.options.dense_experts and self.layer.grouping(node) and isinstance(product, Gemm):
            wide = product.n if product.direction == "dgrad" else product.k
            suffix = "" if product.direction == "forward" else ".backward"
            ops.compute(f"{node.name}.pad{suffix}", self._moving("copy", self.element * product.m * wide))

    def _moving(self, kernel: str, moved: float, launches: int = 1) -> MemoryWork:
        """Work of a memory-bound kernel of the run's library."""
        return MemoryWork(kernel, moved, launches, self.options.memory_implementation)

    def local_groups(self, node: Node) -> int:
        """Products that one stands for: of a grouped one, one for each expert of this rank."""
        group = self.layer.grouping(node)
        return max(round(self.shards.extent(group, "expert")), 1) if group and not self.options.dense_experts else 1

    def launches(self, kernel: Kernel) -> int:
        """Kernels of one product: expert matmuls run one after the other over streams (TransformerEngine GroupedLinear), narrow
        ones elsewhere after casts in both layouts."""
        if not self.layer.grouping(kernel.node) or self.options.dense_experts:
            return kernel.launches
        return self.local_groups(kernel.node) * (3 if self.options.narrow_experts and self.options.engine_casts is None else 1)

    def elementary_launches(self, kernel: Kernel, *, backward: bool) -> int:
        """Kernels of a memory-bound node in one direction; some run once more for every expert of the rank."""
        count, each = kernel.launched(backward=backward), kernel.each_group[backward]
        group = self.layer.grouping(self.layer.producer[kernel.node.inputs[0]]) if each else ""
        return count + each * max(round(self.shards.extent(group, "expert")), 1) if group else count

    def attention(self, node: Attention, *, backward: bool) -> AttentionWork:
        """The whole sequence's attention with this rank's heads; context parallelism splits it further."""
        layer, tp = self.layer, self.degrees.tp
        batch, queries, keys = layer.size(node.batch), layer.size(node.queries), layer.size(node.keys)
        heads, groups = max(layer.size(node.heads) // tp, 1), max(layer.size(node.kv_heads) // tp, 1)
        width, mask, causal = layer.size(node.head_dim), node.mask, node.mask.causal and node.queries == node.keys
        plan = self.options.kernels
        kernel = (not mask.selects and plan.beyond(width)) or self.options.attention_kernel
        if kernel == "unfused" and (not plan.library.fused_softmax or batch * heads % SOFTMAX_BATCHES or keys >= SOFTMAX_KEYS):
            kernel = "eager"
        masked = causal and mask.window is not None and mask.window <= queries
        if self.options.sdpa and causal:
            kernel, causal = sdpa_kernel(kernel, width, masked=masked), not masked
        elif width > FLASH_HEAD and kernel.startswith(FUSED) and not mask.selects:
            kernel, causal = "efficient" if masked else "efficient-causal", causal and not masked
        seen = attended(layer, node) / queries
        if mask.documents and node.queries == node.keys and not kernel.startswith("efficient"):
            # As many documents of one length: that of the one in which a token lies on average, which has all pairs.
            packed = max(round(queries / mask.mean_document(queries)), 1)
            batch, queries, keys = batch * packed, queries // packed, queries // packed
        if mask.kind == "chunk" and queries > mask.size:
            batch, queries, keys = batch * (queries // mask.size), mask.size, mask.size
        elif mask.kind in ("top_k", "compressed", "fixed", "bidirectional_window"):
            keys, causal = max(round(seen), 1), False
        return AttentionWork(
            batch, queries, keys, heads, groups, layer.size(node.head_dim), layer.size(node.value_dim), causal, backward, kernel,
            window=mask.window if causal else None, dtype=self._attention_dtype(kernel),
            dropout=self.options.kernels.dropout > 0,
        )  # fmt: skip

    def _attention_dtype(self, kernel: str) -> str:
        """What attention multiplies in: torch's math backend in fp32 whatever its inputs are."""
        own = self.options.dtype if self.options.dtype in ("fp32", "tf32") else "bf16"
        return "fp32" if own == "bf16" and kernel in ("unfused", "eager") and in_fp32(self.options.kernels) else own

    def attention_launches(self, kernel: Kernel, work: AttentionWork) -> int:
        """Kernels of one attention in one direction."""
        count = kernel.launches + (CHAIN_KERNELS if work.kernel == "eager" else 0)
        return 2 * count if work.backward else count

    def priced_alone(self, kernel: Kernel, *, backward: bool) -> KernelWork:
        """A scan or custom node: FLOPs and bytes of this rank."""
        node, layout = kernel.node, self.layout(kernel.node)
        traffic = kernel.backward if backward else kernel.forward
        moved = sum(self.shards.local(axes, layout) * each for axes, each in traffic)
        over = self.axes(node.inputs[0])
        kind = "custom"
        if isinstance(node, Scan):
            kind, over = node.kind, (node.batch, node.sequence, node.heads)
        elif isinstance(node, Custom):
            over = node.over or over
        flops = node_flops(self.layer, node) * self.shards.local(over, layout) / self.layer.volume(over)
        if isinstance(node, Custom) and backward:
            flops *= 2.0 if node.backward_flops is None else node.backward_flops / (node.flops or 1.0)
        return KernelWork(kind, flops, moved, kernel.launched(backward=backward), backward)

    def memory(self, kernel: Kernel, *, backward: bool) -> MemoryWork:
        """Traffic of a memory-bound node."""
        traffic, layout = kernel.backward if backward else kernel.forward, self.layout(kernel.node)
        moved = sum(self.shards.local(axes, layout) * each for axes, each in traffic)
        launches = self.elementary_launches(kernel, backward=backward) if any(kernel.each_group) else kernel.launches
        work = MemoryWork(kernel.price, moved, launches, self.options.memory_implementation)
        return fused(work, self.options.activation_implementation, backward=backward)

    def frozen(self, kernel: Kernel) -> bool:
        """Whether a product trains nothing: it keeps no input."""
        node, options = kernel.node, self.options
        if not options.lora_rank or not isinstance(node, Einsum) or not node.weight or pairs_of(self, node) is not None:
            return False
        return node.wide or not options.kernels.frozen_inputs  # the head's weight is of 16 bits

    def bytes_of(self, tensor: Kept) -> float:
        """Bytes of a kept tensor on this rank."""
        return self.shards.local(tensor.axes, self._kept_layout(tensor)) * self._stored.get(tensor.name, tensor.bytes) * tensor.part

    @cached_property
    def _stored(self) -> dict[str, float]:
        return dict(self.options.kernels.stored)

    def _kept_layout(self, tensor: Kept) -> Layout:
        """Torch keeps what it gathered, and a convolution the channels that it gathered."""
        if self.options.kernels.library.saves_gathered_input and tensor.name in self._gathered:
            return "tensor"
        return self.shards.layouts.layout_of(tensor.axes)

    @cached_property
    def _gathered(self) -> frozenset[str]:
        return frozenset(name for stretch in self.shards.layouts.stretches for name in stretch.gathered)

    @cached_property
    def _tensors(self) -> dict[str, float]:
        options, plain = self.options, Recompute()
        return _kept_bytes(self.layer, options if options.recompute == plain else replace(options, recompute=plain))

    def tensors(self) -> dict[str, float]:
        """Kept tensors by name before recomputation, bytes on this rank."""
        return dict(self._tensors)

    def saved(self) -> tuple[tuple[tuple[str, float], ...], float]:
        """(what stays saved, what is alive only during the backward)."""
        tensors, made, shares = self._tensors, self.cut, dict(self.cut.kept_parts)
        entries = tuple((name, self.entry_bytes(name) * shares.get(name, 1.0)) for name in made.entries)
        stays: tuple[tuple[str, float], ...] = ()
        if not self.options.recompute.full:
            stays = tuple((name, amount * shares.get(name, 1.0)) for name, amount in tensors.items() if name not in made.dropped)
        # What runs again starts from tensors that the kernels keep or do not keep.
        again = sum(tensors.values()) - sum(amount for name, amount in entries if name in tensors)
        return (*entries, *stays), again - sum(amount for _, amount in stays)

    def saved_bytes(self, recomputes: tuple[Recompute, ...]) -> NDArray[np.float64]:
        """What stays saved where each of these is recomputed instead, float array [recomputes]."""
        names, entered, shares = staying(self.layer, self.options.kernels, recomputes)
        amounts = [*(self._tensors.get(name, 0.0) for name in names), *(self.entry_bytes(name) for name in entered)]
        return np.asarray(shares @ np.array(amounts))

    def entry_bytes(self, tensor: str) -> float:
        """Bytes of what enters the layer."""
        found = self.layer.tensor[tensor]
        stream = 4.0 if self.options.kernels.autocast else self.element
        each = {"activation": stream, "int64": 8.0, "fp32": 4.0, "int32": 4.0, "bool": 1.0}[found.format]
        return self.shards.local(found.axes) * each

    def is_logits(self, node: Node) -> bool:
        """Whether a loss over a vocabulary reads what `node` makes."""
        return any(isinstance(n, Loss) and n.kind == "vocabulary" for n in self.layer.consumers.get(node.outputs[0], ()))

    def weight_gradient(self, node: Product) -> float:
        """Bytes of the tensor that holds (or stands for) the weight gradient of a matmul: as wide as activations."""
        kind = self._weight_gradients(node)
        if kind == "none" or (kind == "shapes" and not (isinstance(node, Einsum) and node.wide)):
            return 0.0
        return self.shards.weights(node) * self.element

    def _weight_gradients(self, node: Node) -> WeightGradients:
        return self.options.grouped_weight_gradients if self.layer.grouping(node) else self.options.weight_gradients

    def weight_shapes(self) -> dict[tuple[int, int], float]:
        """(rows, columns) -> bytes of the placeholders that are kept for this layer's weight gradients."""
        found: dict[tuple[int, int], float] = {}
        for node in () if self.options.frozen else self.layer.nodes:
            if not isinstance(node, Einsum) or not node.weight or node.wide or node.name in self.options.borrowed:
                continue
            if self._weight_gradients(node) == "shapes":
                work = self.product(node, "forward")
                found[work.n, work.k] = self.element * work.n * work.k
        return found

    def scores_bytes(self, kernel: Kernel) -> float:
        """Bytes of the softmax's output that an attention keeps; 0 = it keeps none."""
        node = kernel.node
        if not isinstance(node, Attention) or self.options.kernels.beyond(self.layer.size(node.head_dim)) != "unfused":
            return 0.0
        scores = self.shards.local((node.batch, node.heads, node.queries), "tensor") * self.layer.size(node.keys)
        return scores * score_parts(self.options.kernels)[0]

    def deferred(self) -> float:
        """What weight gradients need: input and output gradient of every matmul, each tensor once (fp8 matmuls: both in fp8)."""
        tensors, stays = self.tensors(), 0.0
        for kernel in self.kernels:
            node = kernel.node
            if product_of(kernel):
                wide = isinstance(node, Einsum) and node.wide
                plan, narrow = self.options.kernels, self.options.narrow and not wide
                element = plan.linear_input_bytes if narrow else plan.element
                out = self.shards.local(self.axes(node.outputs[0]), self.layout(node))
                stays += out * element + sum(tensors.pop(t.name, 0.0) for t in kernel.keeps[:1])
        return stays


@lru_cache(maxsize=4096)
def _kept_bytes(layer: Layer, options: SplitOptions) -> dict[str, float]:
    """What a layer keeps that recomputes nothing: the same for every choice of what runs again."""
    local = LocalLayer(layer, options)
    whole = {local.shards.layouts.whole_channels(node) for node in layer.nodes}
    frozen = (k.node.name for k in local.kernels if local.frozen(k) or (options.lora_rank and isinstance(k.node, Norm)))
    found = kept(layer, options.kernels, frozenset(frozen)).items()
    return {name: local.bytes_of(tensor) * (local.degrees.tp if name in whole else 1) for name, tensor in found}
