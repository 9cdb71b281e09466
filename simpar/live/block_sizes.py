"""Sizes of the single blocks that one GPU runs: what `gpu_blocks` builds and `block_predict` prices. Standard library only."""

from __future__ import annotations

from typing import Final

STYLES: Final = ("eager", "compiled", "fp8", "fp8_row")
BLOCKS: Final[dict[str, dict[str, int]]] = {
    "dense 3072": {"d": 3072, "f": 8192, "heads": 24, "kv": 8, "s": 6144, "b": 1},
    "dense 5120": {"d": 5120, "f": 17408, "heads": 40, "kv": 8, "s": 4096, "b": 2},
    "experts 2560": {"d": 2560, "f": 1280, "heads": 20, "kv": 4, "s": 4096, "b": 2, "experts": 48, "chosen": 6},
    "experts 4096": {"d": 4096, "f": 1536, "heads": 32, "kv": 8, "s": 3072, "b": 2, "experts": 24, "chosen": 4},
    "hybrid 2560": {"d": 2560, "f": 6912, "heads": 20, "kv": 20, "s": 8192, "b": 1, "linear": 1},
}
"""Widths, heads, sequence and batch; none of them is a shape of a shipped model that constants were fitted on."""
CHUNK: Final = 64
"""Tokens that linear attention takes together."""
PARTS: Final = ("forward", "step")
"""The forward alone, and with its backward."""


def key_of_block(name: str, style: str, part: str) -> str:
    """The name of a block's record and prediction."""
    return f"block/{name}/{style}/{part}"
