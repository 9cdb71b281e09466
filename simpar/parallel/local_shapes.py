"""One rank's share of a block's ops: elements of activations and weights, and each op as the work that is priced."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from simpar.parallel.degrees import Degrees
from simpar.parallel.recompute import Recompute
from simpar.parallel.te_casts import KERNEL, EngineCasts
from simpar.parallel.work import AttentionWork, Direction, Gemm, GroupedGemm, Implementation, MemoryWork, Work
from simpar.specs.model import MoeSpec
from simpar.workload.ops import Block, Op, OpType
from simpar.workload.style import BlockStyle

WeightGradients = Literal["none", "each", "shapes"]
"""16-bit tensors of weight gradients in a backward: none, one at a time, one of every shape kept for good."""
OUTSIDE_TE = frozenset({"head/logits", "moe/router"})
"""Matmuls outside of TransformerEngine's linear layers."""
SOFTMAX_BATCHES = 4
"""Batch times heads of a rank must divide by this for Megatron's scale-mask-softmax kernel; else the chain of torch's runs
(Megatron-LM model/fused_softmax.py since v2.0, is_kernel_available)."""
CHAIN_KERNELS = 5
"""Kernels that the chain has more: to fp32, scale, mask, softmax and back to 16 bits instead of one (two of the mask's)."""
_TENSOR_AXES = frozenset("pzwnjfugx")
"""Widths that tensor parallelism splits; a tensor without any of them is whole, or split over the sequence."""


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
        casts: recipe of casts to fp8 that are kernels of their own (parallel/casts.py), "" = none.
        weight_gradients, grouped_weight_gradients: what stands for them in memory, see specs/framework.py.
        engine_casts: casts to fp8 by TransformerEngine, none = it makes none.
        accumulation_bytes: per weight, of adding its gradient to a buffer in a kernel of its own.
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
    casts: str = ""
    window: int | None = None
    lora_rank: int = 0
    """> 0: base weights are frozen; every attention matmul has a trained pair of this rank."""
    weight_gradients: WeightGradients = "none"
    grouped_weight_gradients: WeightGradients = "none"
    engine_casts: EngineCasts | None = None
    accumulation_bytes: float = 0.0


class LocalShapes:
    """One block's shapes on one rank under `options`."""

    def __init__(self, block: Block, options: SplitOptions) -> None:
        self.block, self.options = block, options
        self.size = block.size
        self.degrees, self.style = options.degrees, options.style
        self._local: dict[tuple[str, str], float] = {}
        self._weights: dict[tuple[str, str], float] = {}

    def local(self, axes: str, region: str) -> float:
        """Elements of an activation on this rank."""
        found = self._local.get((axes, region))
        if found is None:
            found = 1.0
            for axis in axes:
                found *= self._axis(axis, self.degrees.divisor(axis, region))  # type: ignore[arg-type]
            if region == "expert" and "y" in axes:
                found *= self.options.load_factor
            self._local[axes, region] = found
        return found

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

    def engine_cast(self, op: Op, *, backward: bool) -> MemoryWork | None:
        """The cast of the input of `op`'s matmul, backward of its output's gradient; none where there is none.

        Under sequence parallelism a rank casts its part of the sequence and gathers that.
        """
        casts = self.options.engine_casts
        if casts is None or op.name in OUTSIDE_TE or casts.skips(op.name, backward=backward):
            return None
        axes = op.output_axes if backward else op.input_axes
        whole = op.region == "tensor" and not set(axes) & _TENSOR_AXES
        elements = self.local(axes, "residual" if whole else op.region)
        each = casts.once + (0.0 if self.options.lora_rank else casts.second)
        return MemoryWork(KERNEL, elements * each, 1, self.options.memory_implementation)

    def _weight_volume(self, axes: str, op: Op) -> float:
        count = self._weights.get((axes, op.region))
        if count is None:
            count = 1.0
            for axis in axes:
                count *= self._axis(axis, self.degrees.weight_divisor(axis, op.region))
            self._weights[axes, op.region] = count
        return count

    def attention(self, op: Op, *, backward: bool) -> AttentionWork:
        """The whole sequence's attention with this rank's heads; context parallelism splits it further."""
        size, tp = self.size, self.degrees.tp
        kernel = self.options.attention_kernel
        if kernel == "unfused" and size["b"] * max(size["n"] // tp, 1) % SOFTMAX_BATCHES:
            kernel = "eager"
        return AttentionWork(
            size["b"], size["s"], size["t"], max(size["n"] // tp, 1), max(size["k"] // tp, 1), size["h"], size["j"],
            op.causal, backward, kernel, window=self.options.window,
            dtype="fp32" if self.options.dtype in ("fp32", "tf32") else "bf16",
        )  # fmt: skip

    def attention_launches(self, op: Op, work: AttentionWork) -> int:
        """Kernels of `op`'s attention in one direction."""
        kernels = op.kernels + (CHAIN_KERNELS if work.kernel == "eager" else 0)
        return 2 * kernels if work.backward else kernels

    def memory(self, op: Op, *, backward: bool) -> MemoryWork:
        """Traffic of a memory-bound op."""
        pairs = op.backward_bytes if backward else op.forward_bytes
        moved = sum(self.local(axes, op.region) * each for axes, each in pairs)
        return MemoryWork(op.kernel, moved, op.kernels, self.options.memory_implementation)
