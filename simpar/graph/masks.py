"""Attention masks as values: which keys a query may see, counted exactly.

FLOPs, saved bytes, the balance of context parallelism and kernel prices all read the same mask.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Mask:
    """One mask. `size` is the window (own position included; to each side where bidirectional), the chunk, the number of
    keys of a cross-attention of fixed length, or the keys that a sparse attention selects.

    `block` is the width in keys of what a sparse attention selects (1 = single tokens) or of what one compressed key stands
    for; `selected` limits the compressed keys per query (0 = all of them).
    """

    kind: str = "causal"
    size: int = 0
    block: int = 1
    selected: int = 0
    joint: int = 0
    """Keys of another stream that every query sees as well."""
    documents: tuple[int, ...] = ()
    """Lengths of documents that are packed into sequences, a sample of them; nothing is seen of another. () = one a sequence."""

    @property
    def causal(self) -> bool:
        """Whether no query sees a later key."""
        return self.kind not in NOT_CAUSAL

    @property
    def selects(self) -> bool:
        """Whether keys are chosen by their content: by kernels of their own."""
        return self.kind in ("top_k", "compressed")

    @property
    def window(self) -> int | None:
        """Keys of a sliding window, where the mask is nothing else."""
        return self.size if self.kind in ("window", "bidirectional_window") else None

    def attended(self, length: int) -> float:
        """Pairs of query and key in one sequence of `length` tokens."""
        if not self.documents:
            return self._own(length) + float(self.joint * length)
        inside = [min(document, length) for document in self.documents]
        return sum(map(self._own, inside)) * length / sum(inside) + float(self.joint * length)

    def mean_document(self, length: int) -> float:
        """Tokens of the document that a token of a sequence lies in, on average."""
        inside = [min(document, length) for document in self.documents] or [length]
        return sum(document**2 for document in inside) / sum(inside)

    def _own(self, n: int) -> float:
        """Pairs within the document."""
        return MASKS[self.kind](self, n)

    def describe(self) -> str:
        """The mask in a few words, as `models show` prints it."""
        if self.kind in ("causal", "bidirectional"):
            return self.kind
        if self.kind == "compressed":
            return f"window {self.size} + 1/{self.block} compressed" + (f", top {self.selected}" if self.selected else "")
        if self.kind == "top_k":
            return f"top {self.size} keys" if self.block == 1 else f"top {self.size // self.block} blocks of {self.block}"
        return f"{self.kind.replace('_', ' ')} {self.size}"


CAUSAL = Mask()
BIDIRECTIONAL = Mask("bidirectional")


def _window(n: int, size: int) -> float:
    """Causal pairs when a query sees at most `size` keys."""
    return size * (size + 1) / 2 + (n - size) * size


def _compressed(n: int, block: int, selected: int) -> float:
    """Pairs of query and compressed key: query i (from 1) has floor(i / block) of them, at most `selected` where it is not 0.

    With q = n // block full blocks, the i in one block share the count: sum over j < q of block * j, and the rest.
    """
    q, rest = divmod(n, block)
    if not selected or q <= selected:
        return block * q * (q - 1) / 2 + q * (rest + 1)
    ramp = block * selected * (selected - 1) / 2 + selected
    return ramp + (n - block * selected) * selected


def _both_sides(mask: Mask, n: int) -> float:
    """Pairs when a query sees `size` keys to each side."""
    size = min(mask.size, n)
    return float(n * n) if mask.size >= n else float(n * (2 * size + 1) - size * (size + 1))


def _chunks(mask: Mask, n: int) -> float:
    full, rest = divmod(n, mask.size)
    return full * mask.size * (mask.size + 1) / 2 + rest * (rest + 1) / 2


MASKS: Final[dict[str, Callable[[Mask, int], float]]] = {
    "causal": lambda mask, n: n * (n + 1) / 2,
    "bidirectional": lambda mask, n: float(n * n),
    "window": lambda mask, n: _window(n, min(mask.size, n)),
    "bidirectional_window": _both_sides,
    "chunk": _chunks,
    "fixed": lambda mask, n: float(n * mask.size),
    "top_k": lambda mask, n: _window(n, min(mask.size, n)),
    "compressed": lambda mask, n: _window(n, min(mask.size, n)) + _compressed(n, mask.block, mask.selected),
}
"""Kind -> pairs of query and key in one document of so many tokens. A new mask is a line here."""
NOT_CAUSAL = {"bidirectional", "bidirectional_window", "fixed"}
"""Kinds in which a query sees later keys."""
