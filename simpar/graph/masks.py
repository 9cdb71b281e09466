"""Attention masks as values: which keys a query may see, counted exactly.

FLOPs, saved bytes, the balance of context parallelism and kernel prices all read the same mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MaskKind = Literal["causal", "bidirectional", "window", "bidirectional_window", "chunk", "fixed", "top_k", "compressed", "prefix"]


@dataclass(frozen=True, slots=True)
class Mask:
    """One mask. `size` is the window (own position included; to each side where bidirectional), the chunk, the number of
    keys of a cross-attention of fixed length, the prefix, or the keys that a sparse attention selects.

    `block` is the width in keys of what a sparse attention selects (1 = single tokens) or of what one compressed key stands
    for; `selected` limits the compressed keys per query (0 = all of them).
    """

    kind: MaskKind = "causal"
    size: int = 0
    block: int = 1
    selected: int = 0
    joint: int = 0
    """Keys of another stream that every query sees as well."""

    @property
    def causal(self) -> bool:
        """Whether no query sees a later key."""
        return self.kind not in ("bidirectional", "bidirectional_window", "fixed")

    @property
    def window(self) -> int | None:
        """Keys of a sliding window, where the mask is nothing else."""
        return self.size if self.kind in ("window", "bidirectional_window") else None

    def attended(self, length: int, keys: int | None = None) -> float:
        """Pairs of query and key in one document of `length` tokens; of queries with `keys` others where those are given."""
        if keys is not None:
            return float(length * keys)
        return self._own(length) + float(self.joint * length)

    def _own(self, n: int) -> float:
        """Pairs within the document."""
        size = min(self.size, n)
        match self.kind:
            case "bidirectional":
                return float(n * n)
            case "fixed":
                return float(n * self.size)
            case "window" | "top_k":
                return _window(n, size)
            case "bidirectional_window":
                return float(n * n) if self.size >= n else float(n * (2 * size + 1) - size * (size + 1))
            case "chunk":
                full, rest = divmod(n, self.size)
                return full * self.size * (self.size + 1) / 2 + rest * (rest + 1) / 2
            case "prefix":
                return n * (n + 1) / 2 + size * (size - 1) / 2
            case "compressed":
                return _window(n, size) + _compressed(n, self.block, self.selected)
        return n * (n + 1) / 2

    def mean_keys(self, length: int) -> float:
        """Keys that a query sees on average in a document of `length` tokens."""
        return self.attended(length) / length

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
