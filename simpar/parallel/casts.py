"""Casts of 16-bit tensors to fp8 around a matmul, where they are kernels of their own (torchao under torch.compile).

Each of the three products of a linear layer contracts another axis, and fp8 operands must lie along it: every tensor is
cast twice, once as it lies and once transposed. Bytes per element, kernel by kernel, as torchao counts them
(torchao/testing/training/roofline_utils.py, `get_tensor_memory_traffic_ovhd_s`):

    scale per tensor    maximum (read 2), cast (read 2, write 1), cast to the transposed layout (read 2, write 1; of a
                        gradient both layouts in one kernel: 4)
    scale per row       cast (read 2, write 1); for the other axis a transposed 16-bit copy (read 2, write 2), then its cast
    scale per block     cast (read 2, write 1 and the scales) along either axis

Weights that fully sharded ranks gather in fp8 are cast as shards; only the transposed copy is left to make.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from simpar.parallel.work import Direction, Gemm, Implementation, MemoryWork

GATHERED = "fp8_gathered"
"""Recipe of scales per tensor with weights that arrive in fp8."""
_BLOCK = 3.0 + 1.0 / 32.0


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

    tensor: Literal["input", "weight", "gradient"]
    kernel: str
    bytes: float
    implementation: Implementation = "tuned"
    maximum: bool = False


Recipe = dict[Direction, tuple[Cast, ...]]


def _maximum(tensor: Literal["input", "weight", "gradient"]) -> Cast:
    return Cast(tensor, "cast", 2.0, "framework", maximum=True)


_ROW = (Cast("gradient", "cast_column", 4.0, "framework"), Cast("gradient", "cast", 3.0))
_PER_TENSOR: Recipe = {
    "forward": (_maximum("input"), Cast("input", "cast", 3.0), _maximum("weight"), Cast("weight", "cast", 3.0)),
    "dgrad": (_maximum("gradient"), Cast("gradient", "cast_transpose", 4.0, "framework"),
              Cast("weight", "cast_transpose", 3.0, "framework")),
    "wgrad": (Cast("input", "cast_transpose", 3.0, "framework"),),
}  # fmt: skip
_PER_BLOCK: Recipe = {
    "forward": (Cast("input", "cast", _BLOCK), Cast("weight", "cast", _BLOCK)),
    "dgrad": (Cast("gradient", "cast", _BLOCK), Cast("weight", "cast_column", _BLOCK)),
    "wgrad": (Cast("gradient", "cast_column", _BLOCK), Cast("input", "cast_column", _BLOCK)),
}
RECIPES: dict[str, Recipe] = {
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
}
"""Recipe -> casts before each product of a linear layer, in order."""


def casts(recipe: str, product: Gemm, *, again: bool = False) -> tuple[MemoryWork, ...]:
    """What is cast right before `product`; `again`: it is recomputed, from scales that were kept."""
    m, n, k = product.m, product.n, product.k
    elements = {"input": float(m) * k, "weight": float(n) * k, "gradient": float(m) * n}
    return tuple(
        MemoryWork(c.kernel, c.bytes * elements[c.tensor], 1, c.implementation)
        for c in RECIPES.get(recipe, {}).get(product.direction, ())
        if not (again and c.maximum)
    )
