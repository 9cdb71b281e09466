"""Casts of 16-bit tensors to fp8 (or fp4) around matmuls as TransformerEngine makes them: one kernel per input and per gradient.

A linear layer casts its input, and in the backward the gradient of its output, each in the layouts that its products need
(pytorch/module/linear.py and grouped_linear.py, quantizers with rowwise and columnwise usage). Only the norm of a
LayerNormLinear writes the narrow format itself. Copies of weights last for the step. Bytes per element:

    scale known beforehand (delayed), blocks     read 2, write 1; a second layout 1 more
    scale of the tensor's own values (current)   2 more for reading it once before; the norm writes 16 bits
    fp4                                          as current; half a byte for each layout

The second layout is for the weight gradient: transposed on Hopper, whose fp8 tensor cores multiply one layout only, scaled along
the other axis with blocks; Blackwell's multiply one copy with a scale per tensor either way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

KERNEL: Final = "quantize"
"""Class of the memory-bound price."""
NORM_FUSED: Final = frozenset({"attention/qkv", "attention/q_up", "attention/kv_up", "mlp/fc1"})
"""Linear layers that hold the norm before them (Megatron-LM gpt_layer_specs.py: TELayerNormColumnParallelLinear)."""


@dataclass(frozen=True, slots=True)
class EngineCasts:
    """HBM traffic of one cast, bytes per element.

    Attributes:
        once: of one layout.
        second: more for the layout of the weight gradient.
        norms: norms do not write the narrow format.
    """

    once: float
    second: float
    norms: bool = False

    def skips(self, name: str, *, backward: bool) -> bool:
        """Whether matmul `name` finds its input narrow already."""
        return not backward and name in NORM_FUSED and not self.norms


def engine_casts(precision: str, architecture: str, scaling: str) -> EngineCasts | None:
    """The casts of training in `precision` on a GPU of `architecture`; none in 16 bits.

    Args:
        scaling: of formats with one scale per tensor: delayed or current; "" = not TransformerEngine.
    """
    if not scaling:
        return None
    current = scaling == "current"
    if precision == "fp8":
        return EngineCasts(5.0 if current else 3.0, 0.0 if architecture == "blackwell" else 1.0, norms=current)
    return {
        "fp8-block": EngineCasts(3.0, 1.0), "mxfp8": EngineCasts(3.0, 1.0), "nvfp4": EngineCasts(4.5, 0.5, norms=True),
    }.get(precision)  # fmt: skip
