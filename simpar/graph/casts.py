"""Cast: kernels that turn 16-bit tensors into fp8 (or fp4) around products.

Two ways of making them. **Kernels of their own** (torchao under torch.compile): each of the three products of a linear layer
contracts another axis, and fp8 operands must lie along it, so every tensor is cast twice, once as it lies and once transposed.
Bytes per element, kernel by kernel, as torchao counts them (torchao/testing/training/roofline_utils.py,
`get_tensor_memory_traffic_ovhd_s`):

    scale per tensor    maximum (read 2), cast (read 2, write 1), cast to the transposed layout (read 2, write 1; of a
                        gradient both layouts in one kernel: 4)
    scale per row       cast (read 2, write 1); for the other axis a transposed 16-bit copy (read 2, write 2), then its cast
    scale per block     cast (read 2, write 1 and the scales) along either axis
    fp4                 maximum of the tensor and of its rotation (read 2), then both layouts in one kernel (read 2, write twice
                        4 bits and a scale per 16 elements); inputs and gradients are rotated for the weight gradient, weights
                        are not (torchao/prototype/moe_training/nvfp4_training/nvfp4_linear.py)

Weights that fully sharded ranks gather in fp8 are cast as shards; only the transposed copy is left to make.

Where the scale is that of earlier steps (flax under XLA: flax/linen/fp8_ops.py, in_qdq of input and weight, out_qdq of the
gradient), one kernel casts a tensor (read 2, write 1) and finds its maximum for the next step, as XLA fuses what reads the same
tensor (openxla/xla service/gpu/transforms/multi_output_fusion.h). The copy of 8 bits is transposed (read 1, write 1) for tensor
cores that multiply one layout only, on Blackwell never (gemm_rewriter.cc, TransposeMatrix). Experts' products, and those with
one-hot masks, are einsums like any other there (MaxText layers/moe.py get_einsum).

**TransformerEngine** makes one kernel per input and per gradient: a linear layer casts its input, and in the backward the gradient
of its output, each in the layouts that its products need (pytorch/module/linear.py and grouped_linear.py, quantizers with rowwise
and columnwise usage). Only the norm of a LayerNormLinear writes the narrow format itself. Copies of weights last for the step.
Bytes per element:

    scale known beforehand (delayed), blocks     read 2, write 1; a second layout 1 more
    scale of the tensor's own values (current)   the same; a pass before that reads 2; the norm writes 16 bits
    fp4                                          as current; half a byte for each layout

The second layout is for the weight gradient: transposed on Hopper, whose fp8 tensor cores multiply one layout only, scaled along
the other axis with blocks; Blackwell's multiply one copy with a scale per tensor either way. That pass is three kernels: the
maximum is set to zero, found, and made a scale of (common/recipe/current_scaling.cu).

A grouped linear layer casts the rows of each expert as a tensor of its own, one after the other; with delayed scales one kernel
takes all that get both layouts (csrc/extensions/cast.cpp, multi_tensor_quantize_impl).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from simpar.graph.kernel_types import HALF, KernelPlan
from simpar.graph.types import Attention, Einsum, Elementwise, Layer, Node, Norm

GATHERED: Final = "fp8_gathered"
"""Recipe of scales per tensor with weights that arrive in fp8."""
DELAYED: Final = "fp8_delayed"
"""Beginning of the recipes with scales of earlier steps."""
QUANTIZE: Final = "quantize"
"""Class of the memory-bound price of TransformerEngine's casts."""
SCALE_KERNELS: Final = 3
"""Kernels of the pass before a cast that finds its scale."""
_BLOCK: Final = 3.0 + 1.0 / 32.0
Operand = Literal["input", "weight", "gradient"]


@dataclass(frozen=True, slots=True)
class Cast:
    """One kernel over one operand.

    Attributes:
        tensor: whose elements.
        kernel: class of the memory-bound price.
        bytes: moved per element.
        implementation: tier of that price. A compiled cast along rows moves 2.0-2.2 of an H100's 2.4 TB/s (pytorch issue
            149982), as tuned ones do; a pass for the maximum 1.7 (issue 130015).
        maximum: a pass for the scale alone; per-op checkpointing keeps its result (torchtitan's list of saved ops).
    """

    tensor: Operand
    kernel: str
    bytes: float
    implementation: Literal["tuned", "framework", "eager"] = "tuned"
    maximum: bool = False


Recipe = dict[str, tuple[Cast, ...]]


def _maximum(tensor: Operand) -> Cast:
    return Cast(tensor, "cast", 2.0, "framework", maximum=True)


def _both_in_fp4(tensor: Operand) -> tuple[Cast, Cast]:
    """Both layouts of a tensor in 4 bits."""
    return _maximum(tensor), Cast(tensor, "cast", 2.0 + 2.0 * (0.5 + 1.0 / 16.0), "framework")


_ROW: Final = (Cast("gradient", "cast_column", 4.0, "framework"), Cast("gradient", "cast", 3.0))
_PER_TENSOR: Final[Recipe] = {
    "forward": (_maximum("input"), Cast("input", "cast", 3.0), _maximum("weight"), Cast("weight", "cast", 3.0)),
    "dgrad": (_maximum("gradient"), Cast("gradient", "cast_transpose", 4.0, "framework"),
              Cast("weight", "cast_transpose", 3.0, "framework")),
    "wgrad": (Cast("input", "cast_transpose", 3.0, "framework"),),
}  # fmt: skip
_PER_BLOCK: Final[Recipe] = {
    "forward": (Cast("input", "cast", _BLOCK), Cast("weight", "cast", _BLOCK)),
    "dgrad": (Cast("gradient", "cast", _BLOCK), Cast("weight", "cast_column", _BLOCK)),
    "wgrad": (Cast("gradient", "cast_column", _BLOCK), Cast("input", "cast_column", _BLOCK)),
}


def _delayed(*, gathered: bool, turned: bool) -> Recipe:
    """Casts with the scale of earlier steps; `turned`: into both layouts."""
    weight = () if gathered else (Cast("weight", "cast", 3.0, "framework"),)
    forward, gradient = (Cast("input", "cast", 3.0, "framework"), *weight), Cast("gradient", "cast", 3.0, "framework")
    if not turned:
        return {"forward": forward, "dgrad": (gradient,), "wgrad": ()}
    first, second, third = (Cast(t, "cast_transpose", 2.0, "framework") for t in ("weight", "input", "gradient"))
    return {"forward": forward, "dgrad": (gradient, first), "wgrad": (second, third)}


RECIPES: Final[dict[str, Recipe]] = {
    "fp8": _PER_TENSOR,
    GATHERED: {
        "forward": (_maximum("input"), Cast("input", "cast", 3.0)),
        "dgrad": (*_PER_TENSOR["dgrad"][:2], Cast("weight", "cast_transpose", 2.0, "framework")),
        "wgrad": _PER_TENSOR["wgrad"],
    },
    "fp8_row": {
        "forward": (Cast("input", "cast", 3.0), Cast("weight", "cast", 3.0)),
        "dgrad": (Cast("gradient", "cast", 3.0), Cast("weight", "cast_column", 4.0, "framework"), Cast("weight", "cast", 3.0)),
        "wgrad": (*_ROW, Cast("input", "cast_column", 4.0, "framework"), Cast("input", "cast", 3.0)),
    },
    "mxfp8": _PER_BLOCK,
    "fp8_block": _PER_BLOCK,
    "fp4": {
        "forward": (*_both_in_fp4("input"), *_both_in_fp4("weight")),
        "dgrad": _both_in_fp4("gradient"),
    },
    DELAYED: _delayed(gathered=False, turned=False),
    f"{DELAYED}_turned": _delayed(gathered=False, turned=True),
    f"{DELAYED}_gathered": _delayed(gathered=True, turned=False),
    f"{DELAYED}_gathered_turned": _delayed(gathered=True, turned=True),
}
"""Recipe -> casts before each product of a linear layer, in order."""


def recipe_of(dtype: str, architecture: str, *, gathered: bool, delayed: bool) -> str:
    """The recipe of products in `dtype` on a GPU of `architecture`.

    Args:
        gathered: weights arrive in fp8.
        delayed: a tensor's one scale is that of earlier steps.
    """
    if dtype != "fp8":
        return dtype
    if not delayed:
        return GATHERED if gathered else dtype
    return DELAYED + "_gathered" * gathered + "_turned" * (architecture != "blackwell")


def casts(recipe: str, direction: str, *, again: bool = False) -> tuple[Cast, ...]:
    """What is cast right before a product in one direction; `again`: it is recomputed, from scales that were kept."""
    return tuple(c for c in RECIPES.get(recipe, {}).get(direction, ()) if not (again and c.maximum))


@dataclass(frozen=True, slots=True)
class EngineCasts:
    """HBM traffic of one of TransformerEngine's casts, bytes per element.

    Attributes:
        once: of one layout.
        second: more for the layout of the weight gradient.
        scale: of the pass before that finds the scale, 0 = there is none; norms do not write the narrow format then.
        together: one kernel takes the rows of all experts where both layouts are made.
    """

    once: float
    second: float
    scale: float = 0.0
    together: bool = False

    def skips(self, layer: Layer, node: Einsum, *, backward: bool) -> bool:
        """Whether a product finds its input narrow already, or is none of TransformerEngine's."""
        return node.wide or (not backward and not self.scale and holds_norm(layer, node))


def holds_norm(layer: Layer, node: Einsum) -> bool:
    """Whether a linear layer holds the norm before it: one that it alone reads (TELayerNormColumnParallelLinear)."""
    before = layer.producer.get(node.inputs[0])
    return isinstance(before, Norm) and layer.consumers[node.inputs[0]] == (node,)


def narrow_copies(layer: Layer, node: Node, plan: KernelPlan) -> int:
    """Narrow copies of what it reads that a product keeps for itself: attention keeps its output in 16 bits beside them
    (TransformerEngine dot_product_attention/backends.py), and of linears side by side each quantises its input alone."""
    if plan.linear_input_bytes >= HALF or not isinstance(node, Einsum) or not node.weight or node.wide:
        return 0
    if plan.linears_alone and node.linears > 1:
        return node.linears
    made_by = layer.producer.get(node.inputs[0])
    kept = isinstance(made_by, Attention) and plan.beyond(layer.size(made_by.head_dim)) != "unfused"
    return int(kept and node.inputs[0] not in dict(plan.stored))


def engine_casts(precision: str, architecture: str, scaling: str) -> EngineCasts | None:
    """The casts of training in `precision` on a GPU of `architecture`; none in 16 bits.

    Args:
        scaling: of formats with one scale per tensor: delayed or current; "" = not TransformerEngine.
    """
    if not scaling:
        return None
    current = scaling == "current"
    if precision == "fp8":
        second = 0.0 if architecture == "blackwell" else 1.0
        return EngineCasts(3.0, second, scale=2.0) if current else EngineCasts(3.0, second, together=True)
    return {
        "fp8-block": EngineCasts(3.0, 1.0), "mxfp8": EngineCasts(3.0, 1.0), "nvfp4": EngineCasts(2.5, 0.5, scale=2.0),
    }.get(precision)  # fmt: skip


def cast_inputs(layer: Layer, node: Node, plan: KernelPlan) -> int:
    """Copies in 16 bits that autocast makes of what a product reads: one for each linear behind a norm or on the stream itself,
    a compiler one for all."""
    if not plan.autocast or not isinstance(node, Einsum) or not node.weight:
        return 0
    made_by = layer.producer.get(node.inputs[0])
    summed = isinstance(made_by, Elementwise) and made_by.op in ("residual", "dropout")
    norm = isinstance(made_by, Norm) and not made_by.over
    return (node.linears if plan.autocast == "own" else 1) if made_by is None or norm or summed else 0
