"""The loss at the head of a language model: which kernels, what they move, and which logits they keep, by framework and option."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Final, cast

from simpar.errors import InternalError
from simpar.specs.framework import FrameworkSpec
from simpar.specs.framework_releases import LossKind

DEFAULT_CHUNKS: Final = 8
"""Pieces of a chunked loss where the framework has no number of its own (torchtune's and torchtitan's default)."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss as one run computes it.

    Attributes:
        kind: fused, unfused, half, chunked, linear or tiled.
        kernel: class of its kernels.
        moved_bytes: bytes per logit they move forward and backward.
        fp32_copies: fp32 tensors of the logits' size alive at the peak beside the 16-bit ones.
        chunks: pieces of the logits that exist one after the other.
        pieces: products with the head's weight; each has a gradient of all of it, which is added to the sum of the others'.
        returned: a graph of the whole model hands the logits out beside the loss: autograd gives its backward zeros for their
            gradient, to which that of the loss is added (tests/test_losses_torch.py).
    """

    kind: LossKind
    kernel: str
    moved_bytes: tuple[float, float]
    fp32_copies: float
    chunks: int = 1
    pieces: int = 1
    returned: bool = False

    def logit_bytes(self, element: float) -> float:
        """Bytes per logit at the peak, of logits of `element` bytes (2 or 4).

        Every full 4 beside 16-bit logits are an fp32 tensor, what is left over the logits where they live on. Four or fewer are no
        fp32 tensor: the logits, and their gradient (tests/test_losses_torch.py).

        >>> losses = [Loss("unfused", "cross_entropy", (18.0, 18.0), copies) for copies in (0.0, 0.5, 2.5, 3.0)]
        >>> [(loss.logit_bytes(2.0), loss.logit_bytes(4.0)) for loss in losses]
        [(2.0, 4.0), (4.0, 8.0), (12.0, 12.0), (14.0, 16.0)]
        >>> Loss("unfused", "cross_entropy", (18.0, 18.0), 0.5, returned=True).logit_bytes(2.0)
        6.0
        """
        narrow = 2.0 + 4.0 * self.fp32_copies
        if narrow <= 4.0 or self.kind == "half":
            return narrow * element / 2.0 + element * self.returned
        return narrow + (element - 2.0) * self.logits_live

    @property
    def logits_live(self) -> bool:
        """Whether the logits are there at the peak, beside what the loss makes of them."""
        narrow = 2.0 + 4.0 * self.fp32_copies
        return narrow <= 4.0 or narrow % 4.0 >= 2.0


_COMPILED: Final = 0.5
"""fp32 copies that a compiled loss over a cast to fp32 keeps of what it works on: the 16-bit logits, which it turns into their
gradient (tests/test_losses_torch.py)."""
_HALF: Final = 1.5
"""fp32 copies of logits whose log-softmax, its gradient and their own are all of 16 bits (tests/test_losses_torch.py)."""
FUSED: Final = Loss("fused", "cross_entropy", (6.0, 6.0), 1.0)
"""In place, with one fp32 copy of the logits."""


def losses_of(spec: FrameworkSpec) -> list[str]:
    """The words of `training.cross_entropy` that a framework has."""
    return [name for name, *_ in spec.head.loss_work if name != "compiled"]


def linear_chunks(tokens: float, vocabulary: float, hidden: float) -> int:
    """Pieces of Liger's fused linear cross-entropy: logits of a piece take about the room of the hidden vectors of all tokens.

    liger_kernel/ops/fused_linear_cross_entropy.py: ceil(V / H) pieces of next_power_of_2(ceil(T / pieces)) tokens.

    >>> linear_chunks(16384, 128256, 4096), linear_chunks(8192, 151936, 1024)
    (32, 128)
    """
    share = ceil(tokens / max(ceil(vocabulary / hidden), 1))
    piece: int = 2 ** max(share - 1, 0).bit_length()
    return max(ceil(tokens / piece), 1)


def loss_of(
    spec: FrameworkSpec, wanted: str, *, compiled: bool, tp: int, sizes: tuple[float, float, float], pure: bool = False
) -> Loss:
    """The loss of a run.

    Args:
        wanted: `training.cross_entropy`.
        compiled: the run compiles its model.
        pure: weights are of 16 bits alone.
        tp: ranks that the vocabulary is split over.
        sizes: tokens of a micro-batch on a rank, vocabulary, hidden size.
    """
    usual = (spec.head.loss_of_16_bits if pure and not compiled else "") or spec.head.loss
    kind = usual if wanted == "auto" else cast(LossKind, wanted)
    work = {name: (kernel, (forward, backward)) for name, kernel, forward, backward in spec.head.loss_work}
    compiled = compiled and kind != "half"
    in_graph = compiled and kind == "unfused" and spec.head.logits_fp32_copies_compiled is not None
    if kind not in work:
        raise InternalError(f"{spec.name} has no loss {kind!r}")
    kernel, moved = work["compiled" if in_graph else kind]
    if kind == "linear":
        return Loss(kind, kernel, moved, 0.0, linear_chunks(*sizes))
    if kind == "tiled":
        tokens, words = sizes[0], sizes[1] / tp
        rows, columns = spec.head.loss_tile
        tiles = ceil(tokens / (rows or tokens)) * ceil(words / columns)
        return Loss(kind, kernel, moved, spec.head.logits_fp32_copies, tiles)
    chunks = (spec.head.loss_chunks or DEFAULT_CHUNKS) if kind == "chunked" else 1
    pieces = max(chunks, DEFAULT_CHUNKS) if kind == "chunked" else 1
    copies = _copies(spec, kind, asked=wanted != "auto", compiled=compiled, tp=tp)
    if kind == "chunked" and compiled and spec.head.logits_fp32_copies_compiled is not None:
        copies = _COMPILED * chunks / pieces
    return Loss(kind, kernel, moved, copies, chunks, pieces, in_graph and spec.head.logits_returned)


def _copies(spec: FrameworkSpec, kind: LossKind, *, asked: bool, compiled: bool, tp: int) -> float:
    """fp32 tensors of logits size alive at the peak; `asked`: the run names its loss."""
    if kind == "fused" and asked and spec.head.logits_fp32_copies_fused is not None:
        return spec.head.logits_fp32_copies_fused
    if kind == "half":
        return _HALF
    if compiled and spec.head.logits_fp32_copies_compiled is not None:
        return spec.head.logits_fp32_copies_compiled
    if kind == "chunked" and spec.head.logits_fp32_copies_chunked is not None:
        return spec.head.logits_fp32_copies_chunked
    if tp > 1 and spec.head.logits_fp32_copies_parallel is not None:
        return spec.head.logits_fp32_copies_parallel
    return spec.head.logits_fp32_copies
