"""Optimizers by kind: what they keep for a weight and what their step moves."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from simpar.specs.framework_policies import Optimizer

ADAM_BYTES: Final = 34.0
"""HBM bytes per weight of a fused Adam step: gradient read (4), and once more for its norm (4), fp32 weight read and written (8),
16-bit copy written (2), two fp32 moments read and written (16)."""


KERNEL_BYTES: Final = {"fused": ADAM_BYTES, "foreach": 92.0}
"""The same of torch's AdamW by its kernels: in lists of operations 80 for the update and 12 for clipping (torch optim/adamw.py
_multi_tensor_adamw)."""


@dataclass(frozen=True, slots=True)
class Factors:
    """Kronecker factors that precondition a matrix of weights: fp32 matrices n x n for each of its two sides, n long.

    Attributes:
        kept: of them for a side: the statistics of its gradients, and what is made of those.
        products: of one of them and a matrix as large as the weights, every step; the statistics' own product is one.
        every: steps between two decompositions, each with one product n x n x n.
        decomposition: its FLOPs over n^3.
        largest: a longer side has none, or is cut into blocks of at most so many where `blocked`.
    """

    kept: int
    products: int
    every: int
    decomposition: float
    largest: int
    blocked: bool = False

    def sides(self, rows: int, columns: int) -> Iterator[tuple[int, int, int]]:
        """(Length of a side, of the one across, how many such) of a matrix, block by block."""
        pieces = [math.ceil(n / self.largest) if self.blocked else 1 for n in (rows, columns)]
        a, b = (math.ceil(n / k) for n, k in zip((rows, columns), pieces, strict=True))
        for side, across in ((a, b), (b, a)):
            if side <= self.largest:
                yield side, across, math.prod(pieces)


@dataclass(frozen=True, slots=True)
class OptimizerKind:
    """One kind of optimizer.

    Attributes:
        moments: bytes kept per weight of a matrix.
        other_moments: the same of every other weight: norms and biases, where whole matrices are worked on embedding and head too.
        passes_bytes: HBM bytes per weight of a matrix beyond gradient, weight and moments.
        factored: keeps one fp32 value per row and column of a matrix instead of a moment.
        orthogonalises: multiplies whole matrices (Newton-Schulz).
        factors: preconditions whole matrices.
        own_width: moments have a width of their own; else they are as wide as the weight that is updated (4 bytes above).
        paged: moments live in host memory and visit the device tensor by tensor.
        synchronises: the host waits for the device after each tensor.
        kernel: how torch.optim goes over the weights where a run says so (Optimizer.optimizer_kernel); "" = as the framework does.
    """

    moments: float = 8.0
    other_moments: float = 8.0
    passes_bytes: float = 0.0
    factored: bool = False
    orthogonalises: bool = False
    factors: Factors | None = None
    own_width: bool = False
    paged: bool = False
    synchronises: bool = False
    kernel: Literal["", "fused", "foreach"] = ""

    @property
    def whole(self) -> bool:
        """Works on whole matrices; embedding and head are left to Adam."""
        return self.orthogonalises or self.factors is not None

    def beside(self, weight_bytes: float) -> OptimizerKind:
        """This kind for weights that are kept in `weight_bytes` (torch.optim: states in the weight's dtype)."""
        share = 1.0 if self.own_width else weight_bytes / 4.0
        return replace(self, moments=self.moments * share, other_moments=self.other_moments * share)

    def update_kernel(self, usual: Optimizer) -> tuple[str, float]:
        """How an update goes over the weights, and the HBM bytes that Adam's moves for each; `usual` is the framework's policy."""
        if self.kernel in ("", usual.optimizer_kernel):
            return usual.optimizer_kernel, usual.optimizer_traffic_bytes
        return self.kernel, KERNEL_BYTES[self.kernel]

    def traffic(self, weight_bytes: float = 4.0) -> float:
        """HBM bytes of a step per weight of a matrix, over those of Adam in fp32; `more_moments` are read and written besides.

        The gradient is read for its norm and for the update, and the weight read and written, in the weight's own width; a weight
        narrower than fp32 is the 16-bit copy itself.

        Args:
            weight_bytes: width of the weight that this kind is `beside`.
        """
        width = ADAM_BYTES - 16.0 if weight_bytes == 4.0 else 4.0 * weight_bytes
        return (width + 2.0 * self.moments + self.passes_bytes * weight_bytes / 4.0) / ADAM_BYTES


_BLOCKS_OF_256: Final = 2.0 * (1.0 + 4.0 / 256.0)
"""8-bit codes and an fp32 scale per 256 of them, for each of two moments (torchao optim/subclass_8bit.py and subclass_fp8.py;
bitsandbytes optim/optimizer.py Optimizer2State)."""

KINDS: Final[dict[str, OptimizerKind]] = {
    "adamw": OptimizerKind(),
    "adam": OptimizerKind(),
    "adamw-fused": OptimizerKind(kernel="fused"),
    "adamw-foreach": OptimizerKind(kernel="foreach"),
    "adamw-bf16-moments": OptimizerKind(4.0, 4.0, own_width=True),
    # bitsandbytes: step() ends with a synchronisation of the device for every tensor; paged: managed memory, prefetched by tensors.
    "adamw-8bit": OptimizerKind(_BLOCKS_OF_256, 8.0, own_width=True, synchronises=True),
    "adamw-8bit-paged": OptimizerKind(_BLOCKS_OF_256, 8.0, own_width=True, paged=True, synchronises=True),
    # torchao optim/subclass_4bit.py: two codes in a byte, an fp32 scale per 128.
    "adamw-4bit": OptimizerKind(2.0 * (0.5 + 4.0 / 128.0), 8.0, own_width=True),
    "adamw-fp8": OptimizerKind(_BLOCKS_OF_256, 8.0, own_width=True),
    "lion": OptimizerKind(4.0, 4.0),
    "sgd": OptimizerKind(0.0, 0.0),
    "sgd-momentum": OptimizerKind(4.0, 4.0),
    # Shazeer and Stern 2018, algorithm 4, no first moment: the gradient is read for the means of its rows and columns, the update
    # again for its root mean square, the weight for its own; vectors keep a whole second moment (torch.optim.Adafactor).
    "adafactor": OptimizerKind(0.0, 4.0, passes_bytes=12.0, factored=True),
    # One momentum; its 16-bit copy goes into the iteration and the update comes out of it (2 bytes each).
    "muon": OptimizerKind(4.0, 8.0, passes_bytes=4.0, orthogonalises=True),
    # Vyas et al. 2024, nikhilvyas/SOAP soap.py: Adam in the eigenbasis of both sides' statistics. Gradient and momentum are rotated
    # into it and the update back; every 10 steps one power iteration and a QR decomposition, Q formed (8/3 n^3). The three rotated
    # matrices are read or written once more (4 bytes each).
    "soap": OptimizerKind(
        passes_bytes=12.0, factors=Factors(kept=2, products=4, every=10, decomposition=8.0 / 3.0, largest=10_000)
    ),
    # facebookresearch/optimizers distributed_shampoo, as its README's examples: roots of both sides' statistics by eigenvalues
    # (9 n^3, Golub and Van Loan 8.3) every 100 steps, blocks of 8,192, grafted onto Adam, whose step length takes two norms more.
    "shampoo": OptimizerKind(
        passes_bytes=12.0, factors=Factors(kept=2, products=2, every=100, decomposition=9.0, largest=8192, blocked=True)
    ),
    "none": OptimizerKind(0.0, 0.0),
}  # fmt: skip
"""By the name in `training.optimizer`; a new one is a line here."""
