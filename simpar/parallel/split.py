"""A block's work on one rank: forward and backward op lists, saved activations, weights. The one place that splits."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

from simpar.parallel import context, expert, tensor
from simpar.parallel.degrees import Degrees
from simpar.parallel.recompute import Recompute, dropped, repeated
from simpar.parallel.work import (
    AttentionWork,
    Direction,
    Gemm,
    GroupedGemm,
    Implementation,
    LocalOp,
    MemoryWork,
    OpList,
    Work,
)  # fmt: skip
from simpar.specs.model import MoeSpec
from simpar.workload.ops import Block, Op, OpType, Region, Seam, op_flops, volume
from simpar.workload.style import BlockStyle

WeightGradients = Literal["none", "each", "shapes"]
"""16-bit tensors of weight gradients in a backward: none, one at a time, one of every shape kept for good."""
OUTSIDE_TE = frozenset({"head/logits", "moe/router"})
"""Matmuls outside of TransformerEngine's linear layers."""


@dataclass(frozen=True, slots=True)
class SplitOptions:
    """Everything besides the block that decides one rank's work.

    Attributes:
        degrees: tensor, context, expert.
        style: framework semantics of the work.
        recompute: what runs again.
        dtype: of matmuls: bf16, fp16, fp8, fp8-block, fp32, ...
        attention_kernel: name for the attention price.
        memory_implementation: tuned, framework or eager kernels.
        accumulate_fp32: weight gradients accumulate into fp32.
        moe: expert spec, for the exchange.
        load_factor: tokens of the fullest expert rank over the mean.
        dispatch_bytes: per element of the dispatched hidden vectors (1 under fp8 dispatch).
        weight_gradients, grouped_weight_gradients: what stands for them in memory, see specs/framework.py.
    """

    degrees: Degrees
    style: BlockStyle
    recompute: Recompute = field(default_factory=Recompute)
    dtype: str = "bf16"
    attention_kernel: str = "auto"
    memory_implementation: Implementation = "tuned"
    accumulate_fp32: bool = True
    moe: MoeSpec | None = None
    load_factor: float = 1.0
    dispatch_bytes: float = 2.0
    window: int | None = None
    lora_rank: int = 0
    """> 0: base weights are frozen; every attention matmul has a trained pair of this rank."""
    weight_gradients: WeightGradients = "none"
    grouped_weight_gradients: WeightGradients = "none"


@dataclass(frozen=True, slots=True)
class LocalBlock:
    """One rank's share of a block.

    Attributes:
        name: the block's.
        forward, backward: op lists; `backward` starts with what is recomputed.
        input_gradient, weight_gradient: the backward split for zero-bubble schedules.
        saved: (tensor, bytes) kept from forward to backward.
        working: bytes alive only while the block's backward runs (recomputed activations).
        transient: bytes of the largest gradient pair alive in the backward.
        deferred: bytes that stay from the input gradient to the weight gradient where the two are apart.
        dense_parameters, expert_parameters: weights on this rank.
        matmul_parameters: of which in matmuls (weights cast or gathered per use).
        lora_parameters: trained weights under low-rank adaptation.
        model_flops: forward FLOPs of the whole micro-batch over all ranks, causal attention halved.
        attention_flops: attention's part of them.
        block, options: what was split, and how.
    """

    name: str
    forward: tuple[LocalOp, ...]
    backward: tuple[LocalOp, ...]
    input_gradient: tuple[LocalOp, ...]
    weight_gradient: tuple[LocalOp, ...]
    saved: tuple[tuple[str, float], ...]
    working: float
    transient: float
    deferred: float
    dense_parameters: float
    expert_parameters: float
    lora_parameters: float
    model_flops: float
    attention_flops: float
    block: Block = field(compare=False, repr=False)
    options: SplitOptions = field(compare=False, repr=False)

    @property
    def saved_bytes(self) -> float:
        """Total kept from forward to backward."""
        return sum(amount for _, amount in self.saved)


class Splitter:
    """One block's shapes on one rank under `options`."""

    def __init__(self, block: Block, options: SplitOptions) -> None:
        self.block, self.options = block, options
        self.size = block.size
        self.degrees, self.style = options.degrees, options.style

    def local(self, axes: str, region: str) -> float:
        """Elements of an activation on this rank."""
        count = 1.0
        for axis in axes:
            divisor = self.degrees.divisor(axis, region)  # type: ignore[arg-type]
            count *= self._axis(axis, divisor)
        if region == "expert" and "y" in axes:
            count *= self.options.load_factor
        return count

    def _axis(self, axis: str, divisor: float) -> float:
        size = self.size
        if axis == "p" and divisor > 1 and "k" in size:
            # Key/value heads are replicated once there are fewer of them than tensor-parallel ranks.
            heads = max(size["k"] / divisor, 1.0)
            return size["n"] / divisor * size["h"] + heads * (size["h"] + size["j"])
        if axis == "k":
            return max(size["k"] / divisor, 1.0)
        return size[axis] / divisor

    def weights(self, op: Op) -> float:
        """Weights of `op` on this rank."""
        count = 0.0
        for axes in (*op.parameters, *([op.weight_axes] if op.equation else [])):
            elements = 1.0
            for axis in axes:
                elements *= self._axis(axis, self.degrees.weight_divisor(axis, op.region))
            count += elements
        if op.equation and op.bias:
            out = [a for a in op.output_axes if a in op.weight_axes]
            elements = 1.0
            for axis in {*out, *("e" if "e" in op.weight_axes else "")}:
                elements *= self._axis(axis, self.degrees.weight_divisor(axis, op.region))
            count += elements
        return count

    # -- work of one op ------------------------------------------------------------------------------------------

    def matmul(self, op: Op, direction: Direction) -> Work:
        """The matmul of `op`: m rows, n outputs, k contracted, by the forward."""
        weight, out, inp = op.weight_axes, op.output_axes, op.input_axes
        rows = "".join(a for a in out if a not in weight)
        columns = "".join(a for a in out if a in weight)
        inner = "".join(a for a in inp if a in weight)
        fp32 = self.options.accumulate_fp32 and direction == "wgrad"
        m = self.local(rows, op.region)
        n = self._weight_volume(columns, op)
        k = self._weight_volume(inner, op)
        if op.type is OpType.GROUPED_MATMUL:
            groups = max(round(self._axis("e", self.degrees.weight_divisor("e", "expert"))), 1)
            return GroupedGemm(groups, m, round(n), round(k), self.options.dtype, direction, fp32)
        # The logits and the router stay in 16 bits under fp8 training.
        wide = op.name in ("head/logits", "moe/router") and self.options.dtype.startswith(("fp8", "fp4", "mxfp8"))
        dtype = "bf16" if wide else self.options.dtype
        return Gemm(max(round(m), 1), max(round(n), 1), max(round(k), 1), dtype, direction, fp32)

    def lora(self, op: Op, direction: Direction) -> Work:
        """Both low-rank matmuls of `op` as one of their summed width (n + k columns of rank r)."""
        whole = self.matmul(op, direction)
        assert isinstance(whole, Gemm)
        return Gemm(whole.m, self.options.lora_rank, whole.n + whole.k, "bf16", direction)

    def lora_weights(self, op: Op) -> float:
        """Trained weights of `op`: r (k + n)."""
        if not self.options.lora_rank or not op.equation or op.module != "attention":
            return 0.0
        whole = self.matmul(op, "forward")
        return float(self.options.lora_rank * (whole.n + whole.k)) if isinstance(whole, Gemm) else 0.0

    def launches(self, op: Op) -> int:
        """Kernels of one matmul: expert matmuls run one after the other over streams (TransformerEngine GroupedLinear), and
        fp8 casts the input in both layouts first."""
        casts = 2 if self.options.dtype.startswith(("fp8", "fp4", "mxfp8")) else 0
        if op.type is not OpType.GROUPED_MATMUL:
            return op.kernels
        groups = max(round(self._axis("e", self.degrees.weight_divisor("e", "expert"))), 1)
        return groups * (1 + casts)

    def _weight_volume(self, axes: str, op: Op) -> float:
        count = 1.0
        for axis in axes:
            count *= self._axis(axis, self.degrees.weight_divisor(axis, op.region))
        return count

    def attention(self, op: Op, *, backward: bool) -> AttentionWork:
        """The whole sequence's attention with this rank's heads; context parallelism splits it further."""
        size, tp = self.size, self.degrees.tp
        return AttentionWork(
            size["b"], size["s"], size["t"], max(size["n"] // tp, 1), max(size["k"] // tp, 1), size["h"], size["j"],
            op.causal, backward, self.options.attention_kernel, window=self.options.window,
        )  # fmt: skip

    def memory(self, op: Op, *, backward: bool) -> MemoryWork:
        """Traffic of a memory-bound op."""
        pairs = op.backward_bytes if backward else op.forward_bytes
        moved = sum(self.local(axes, op.region) * each for axes, each in pairs)
        return MemoryWork(op.kernel, moved, op.kernels, self.options.memory_implementation)

    # -- lists ---------------------------------------------------------------------------------------------------

    def put_forward(self, ops: OpList, only: frozenset[str] | None = None) -> None:
        """Append the forward (or the ops named in `only` and the collectives between them)."""
        for item in self.block.items:
            if isinstance(item, Seam):
                if only is None:
                    self._forward_seam(item, ops)
                continue
            if only is not None and item.name not in only:
                continue
            if item.type is OpType.ATTENTION:
                context.attention(item.name, self.attention(item, backward=False), self.degrees, item.kernels, ops)
            elif item.type is OpType.MEMORY:
                ops.compute(item.name, self.memory(item, backward=False), item.kernels)
            else:
                ops.compute(item.name, self.matmul(item, "forward"), self.launches(item))
                if self.options.lora_rank and item.module == "attention":
                    ops.compute(f"{item.name}.lora", self.lora(item, "forward"), 2)

    def _forward_seam(self, seam: Seam, ops: OpList) -> None:
        if seam.name in ("moe_dispatch", "moe_combine"):
            self._exchange(seam, ops, combine=seam.name == "moe_combine", backward=False)
        else:
            tensor.forward(seam, self.size, self.degrees, self.style, ops)

    def _exchange(self, seam: Seam, ops: OpList, *, combine: bool, backward: bool) -> None:
        assert self.options.moe is not None
        element = 2.0 if combine or backward else self.options.dispatch_bytes
        suffix = ".backward" if backward else ""
        expert.exchange(seam.name + suffix, self.size, self.degrees, self.options.moe, ops, combine=combine,
                        element_bytes=element)  # fmt: skip

    def put_backward(self, ops: OpList, weight_ops: OpList | None) -> None:
        """Append the backward; with `weight_ops` the weight gradients go there instead (zero bubble)."""
        items = self.block.items
        for position in range(len(items) - 1, -1, -1):
            item = items[position]
            if isinstance(item, Seam):
                self._backward_seam(item, ops)
                continue
            if item.type is OpType.ATTENTION:
                context.attention(f"{item.name}.backward", self.attention(item, backward=True), self.degrees,
                                  2 * item.kernels, ops)  # fmt: skip
            elif item.type is OpType.MEMORY:
                ops.compute(f"{item.name}.backward", self.memory(item, backward=True), 2 * item.kernels)
            else:
                entry = self._entry_before(position)
                self._matmul_backward(item, entry, ops, weight_ops)

    def _entry_before(self, position: int) -> Seam | None:
        """The entry seam right before the op at `position`, whose collectives belong to its backward."""
        previous = self.block.items[position - 1] if position else None
        return previous if isinstance(previous, Seam) and previous.name in ("attention_in", "mlp_in", "head_in") else None

    def _backward_seam(self, seam: Seam, ops: OpList) -> None:
        if seam.name in ("moe_dispatch", "moe_combine"):
            # The gradient of combine is a dispatch and the other way round.
            self._exchange(seam, ops, combine=seam.name == "moe_dispatch", backward=True)
        else:
            tensor.backward_exit(seam, self.size, self.degrees, ops)

    def _matmul_backward(self, op: Op, entry: Seam | None, ops: OpList, weight_ops: OpList | None) -> None:
        regathered = None
        if entry is not None:
            regathered = tensor.regather(entry, self.size, self.degrees, self.style, ops)
        if op.needs_input_gradient:
            ops.compute(f"{op.name}.dgrad", self.matmul(op, "dgrad"), self.launches(op))
        reduced = tensor.reduce_input_gradient(entry, self.size, self.degrees, ops) if entry is not None else None
        target = ops if weight_ops is None else weight_ops
        if regathered is not None:
            ops.wait(regathered)
        if not self.options.lora_rank:
            target.compute(f"{op.name}.wgrad", self.matmul(op, "wgrad"), self.launches(op) + bool(op.bias))
        elif op.module == "attention":
            target.compute(f"{op.name}.lora.wgrad", self.lora(op, "wgrad"), 2)
            target.compute(f"{op.name}.lora.dgrad", self.lora(op, "dgrad"), 2)
        if reduced is not None:
            ops.wait(reduced)

    # -- memory --------------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, float]:
        """Saved tensors by name before recomputation, bytes on this rank."""
        found: dict[str, float] = {}
        for op in self.block.ops:
            for t in op.saves:
                if t.name == "attention/softmax":
                    continue_axes = t.axes.replace("t", "")
                    amount = self.local(continue_axes, t.region) * self.size["t"] * t.element_bytes
                else:
                    amount = self.local(t.axes, t.region) * t.element_bytes
                found.setdefault(t.name, amount)
        return found

    def saved(self) -> tuple[tuple[tuple[str, float], ...], float]:
        """(what stays saved, what is alive only during the backward)."""
        tensors, recompute = self.tensors(), self.options.recompute
        if recompute.full:
            first = next(iter(tensors), "")
            entry = self.local("bsd", "residual") * 2.0
            return ((first or "input", entry),), sum(tensors.values()) - entry
        kept = tuple((name, amount) for name, amount in tensors.items() if not dropped(recompute, name))
        if "op" in recompute.modules:
            kept = tuple((name, self._op_level(name, amount)) for name, amount in kept)
        return kept, sum(tensors.values()) - sum(a for _, a in kept)

    def _op_level(self, name: str, amount: float) -> float:
        """Bytes that per-op checkpointing keeps of a tensor: of q, k, v the key part goes, of fc1 the w3 half goes;
        the second norm's input is rebuilt from the kept outputs, w2's output is kept instead (same size)."""
        if name == "attention/qkv_out":
            size = self.size
            total = size["n"] * size["h"] + size["k"] * (size["h"] + size["j"])
            return amount * (total - size["k"] * size["h"]) / total
        return amount / 2 if name == "mlp/activation_in" and self.size["u"] == 2 * self.size["f"] else amount

    def transient(self) -> float:
        """What a backward adds to the saved tensors at its worst op: gradients of a matmul's output, input and weight."""
        widest = 0.0
        for op in self.block.ops:
            if op.equation:
                pair = self.local(op.output_axes, op.region) * 2.0 + self.weight_gradient(op)
                pair += sum(self.local(t.axes, self._gradient_region(op, t.region)) for t in op.saves[:1]) * 2.0
                if op.name == "head/logits":
                    # The logits and their copies are gone by then, but for the gradient of the logits counted above.
                    pair -= sum(v for name, v in self.tensors().items() if name == "head/logits")
                widest = max(widest, pair)
        return max(widest, self._scores_transient())

    def _gradient_region(self, op: Op, region: Region) -> Region:
        """Layout of an input's gradient: whole before its reduce-scatter under sequence parallelism."""
        return "tensor" if op.region == "tensor" and region == "residual" else region

    def weight_gradient(self, op: Op) -> float:
        """Bytes of the 16-bit tensor that holds (or stands for) the weight gradient of a matmul while it is computed."""
        grouped = op.type is OpType.GROUPED_MATMUL
        kind = self.options.grouped_weight_gradients if grouped else self.options.weight_gradients
        if kind == "none" or (kind == "shapes" and op.name not in OUTSIDE_TE):
            return 0.0
        return self.weights(op) * 2.0

    def weight_shapes(self) -> dict[tuple[int, int], float]:
        """(rows, columns) -> bytes of the placeholders that are kept for this block's weight gradients."""
        found: dict[tuple[int, int], float] = {}
        for op in self.block.ops:
            grouped = op.type is OpType.GROUPED_MATMUL
            kind = self.options.grouped_weight_gradients if grouped else self.options.weight_gradients
            if op.equation and kind == "shapes" and op.name not in OUTSIDE_TE:
                work = self.matmul(op, "forward")
                if isinstance(work, Gemm | GroupedGemm):
                    found[work.n, work.k] = 2.0 * work.n * work.k
        return found

    def _scores_transient(self) -> float:
        """The same at an attention that keeps its scores: gradients of the probabilities before and after dropout and the
        buffer that the score matmul accumulates into (Megatron-LM), less what the ops behind it have freed by then."""
        tensors, freed = self.tensors(), 0.0
        for op in reversed(self.block.ops):
            if any(t.name == "attention/softmax" for t in op.saves):
                scores = self.local("bns", "tensor") * self.size["t"] * 2.0
                return (3.0 if self.style.dropout else 2.0) * scores - freed
            freed += sum(tensors.pop(t.name, 0.0) for t in op.saves)
        return 0.0

    def deferred(self) -> float:
        """What weight gradients need: input and output gradient of every matmul, each tensor once (16-bit)."""
        tensors, kept = self.tensors(), 0.0
        for op in self.block.ops:
            if op.equation:
                kept += self.local(op.output_axes, op.region) * 2.0 + tensors.pop(op.saves[0].name, 0.0)
        return kept


@lru_cache(maxsize=65536)
def split_block(block: Block, options: SplitOptions) -> LocalBlock:
    """`block` on one rank under `options`."""
    splitter = Splitter(block, options)
    forward = OpList()
    splitter.put_forward(forward)
    backward, inputs, weights = OpList(), OpList(), OpList()
    again = repeated(options.recompute, block)
    for ops in (backward, inputs):
        if options.recompute.full:
            splitter.put_forward(ops)
        elif again:
            splitter.put_forward(ops, only=frozenset(again))
    splitter.put_backward(backward, None)
    splitter.put_backward(inputs, weights)
    saved, working = splitter.saved()
    dense = sum(splitter.weights(op) for op in block.ops if op.region != "expert")
    experts = sum(splitter.weights(op) for op in block.ops if op.region == "expert")
    flops = [(op, op_flops(op, splitter.size)) for op in block.ops]
    return LocalBlock(
        name=block.name, forward=forward.done(), backward=backward.done(), input_gradient=inputs.done(),
        weight_gradient=weights.done(), saved=saved, working=working, transient=splitter.transient(), deferred=splitter.deferred(),
        dense_parameters=dense, expert_parameters=experts,
        lora_parameters=sum(splitter.lora_weights(op) for op in block.ops), model_flops=sum(f for _, f in flops),
        attention_flops=sum(f for op, f in flops if op.type is OpType.ATTENTION), block=block, options=options,
    )  # fmt: skip


__all__ = ["LocalBlock", "SplitOptions", "split_block", "volume"]
