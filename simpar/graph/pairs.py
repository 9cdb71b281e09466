"""Low-rank pairs beside frozen products: where they sit, in which format they compute, what they keep of what they read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeGuard

from simpar.graph.types import Einsum, Node

_FEED_FORWARD: Final = ("mlp", "moe", "moe_act", "shared_experts")
"""Modules whose products have a pair under "mlp"."""


@dataclass(frozen=True, slots=True)
class Pairs:
    """How the pairs of a run compute (peft tuners/lora/layer.py, Linear.forward: result + B(A(dropout(x))) * scaling).

    Attributes:
        modules: matmuls that have one, see `adapted`.
        packed: one pair beside a packed matmul, not one for each of its linears.
        wide: of fp32 beside 16-bit weights: each casts what it reads.
        autocast: their matmuls are cast back to 16 bits; without, fp32 pairs multiply in fp32.
        dropout: each drops elements of what it reads, by a kernel of its own.

    >>> Pairs("all", wide=True, autocast=True, dropout=True).kept, Pairs("all", wide=True).kept, Pairs("all").kept
    (3.0, 4.0, 0.0)
    """

    modules: Literal["attention", "qv", "mlp", "all"]
    packed: bool = False
    wide: bool = False
    autocast: bool = False
    dropout: bool = False

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
