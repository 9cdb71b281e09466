"""Low-rank pairs beside frozen products: where they sit, in which format they compute, what they keep of what they read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeGuard

from simpar.graph.types import Einsum, Node

_FEED_FORWARD: Final = ("mlp", "moe", "moe_act", "shared_experts")
"""Modules whose products have a pair under "mlp"."""


@dataclass(frozen=True, slots=True)
class Magnitudes:
    """What a magnitude for each output of a product moves, beside what its pair does (peft tuners/lora/dora.py, counted on torch).

    Attributes:
        forward, backward: (bytes per element of the output, kernels) of the results' scaling and sum.
        norms: (bytes per frozen weight, kernels) of the sum with the pair's product and its norm.
        kept: bytes per element of the output: both results that are scaled.
    """

    forward: tuple[float, int]
    backward: tuple[float, int]
    norms: tuple[float, int]
    kept: float


IN_16_BITS: Final = Magnitudes((14.0, 3), (30.0, 7), (12.0, 3), 4.0)
IN_FP32: Final = Magnitudes((26.0, 3), (58.0, 8), (30.0, 4), 6.0)
CAST_BACK: Final = Magnitudes((38.0, 4), (78.0, 11), (24.0, 4), 4.0)
"""Of pairs in 16 bits, in fp32, and in fp32 under autocast."""


@dataclass(frozen=True, slots=True)
class Pairs:
    """How the pairs of a run compute (peft tuners/lora/layer.py, Linear.forward: result + B(A(dropout(x))) * scaling).

    Attributes:
        modules: matmuls that have one, see `adapted`.
        packed: one pair beside a packed matmul, not one for each of its linears.
        wide: of fp32 beside 16-bit weights: each casts what it reads.
        autocast: their matmuls are cast back to 16 bits; without, fp32 pairs multiply in fp32.
        narrowed: of fp32 beside weights whose inputs stay as they are: autocast turns their own weights into 16 bits each pass.
        dropout: each drops elements of what it reads, by a kernel of its own.
        dora: each output of an adapted product is scaled by a trained magnitude over the norm of its adapted weights.

    >>> Pairs("all", wide=True, autocast=True, dropout=True).kept, Pairs("all", wide=True).kept, Pairs("all").kept
    (3.0, 4.0, 0.0)
    """

    modules: Literal["attention", "qv", "mlp", "all"]
    packed: bool = False
    wide: bool = False
    autocast: bool = False
    narrowed: bool = False
    dropout: bool = False
    dora: bool = False

    @property
    def element(self) -> float:
        """Bytes of an element that a pair drops from."""
        return 4.0 if self.wide else 2.0

    @property
    def in_fp32(self) -> bool:
        """Whether the pairs' matmuls are of fp32."""
        return self.wide and not self.autocast

    @property
    def kept(self) -> float:
        """Bytes per element of what one pair reads that it keeps for itself: a copy, and which elements are dropped (a byte each).
        None where it reads the product's own input."""
        copy = (4.0 if self.in_fp32 else 2.0) if self.wide or self.dropout else 0.0
        return copy + (1.0 if self.dropout else 0.0)

    @property
    def magnitudes(self) -> Magnitudes | None:
        """What a magnitude for each output moves; none where there are none."""
        if not self.dora:
            return None
        return IN_FP32 if self.in_fp32 else CAST_BACK if self.wide else IN_16_BITS

    @property
    def repeats(self) -> bool:
        """Whether the frozen product runs once more, on what the pair reads: with magnitudes, where elements of that are dropped
        (tuners/lora/layer.py passes the product's own result on only without dropout, since peft 0.14)."""
        return self.dora and self.dropout

    def of(self, node: Einsum) -> int:
        """Pairs beside an adapted product: of queries, keys and values apart two under "qv"."""
        if self.packed:
            return 1
        return 2 if self.modules == "qv" and node.linears == 3 else node.linears

    def adapted(self, node: Node) -> TypeGuard[Einsum]:
        """Whether a pair sits beside a product."""
        if not isinstance(node, Einsum) or not node.weight or node.wide:
            return False
        if self.modules == "mlp":
            return node.module in _FEED_FORWARD
        makes_values = node.linears == 3 or node.name.endswith("/qkv")
        return self.modules == "all" or (node.module == "attention" and (self.modules == "attention" or makes_values))
