"""What a flat row says is recomputed in the backward."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from simpar.specs.framework import FrameworkSpec

Row = Mapping[str, Any]

RECOMPUTE_MODULES: Final = (
    (r"core.?att|core_attn|qk\^t|attention internals|minimal_flash", "core_attn"),
    (r"moe_act|swiglu output|\bmoe.act", "moe_act"),
    (r"layernorm|rmsnorm", "layernorm"),
    (r"mla", "mla_up_proj"),
    (r"shared", "shared_experts"),
    (r"(?<![_.])\bmlp\b", "mlp"),
    (r"\bmoe\b(?!_act)", "moe"),
    (r"per-op|\bop\b|op-level", "op"),
)
"""Pattern in recompute_detail -> a module that is recomputed; several may match."""

_BLOCK: Final = re.compile(r"\bblock\b\D{0,20}(\d+)", re.IGNORECASE)
"""Full recomputation of so many layers of each virtual stage and no others: Megatron-LM's --recompute-method block."""

_NOTHING_AGAIN: Final = re.compile(r"^\s*(?:none|no|off|false|disabled|without)\b", re.IGNORECASE)
_SOME_AGAIN: Final = re.compile(r"select|\bsac\b|partial", re.IGNORECASE)
_ALL_AGAIN: Final = re.compile(
    r"\bfull\b|^\s*(?:yes|on|true|enabled|uniform|block)\b|^\s*(?:(?:whole|every|each|per)[- ]|all )?(?:decoder )?layers?\b"
    r"|(?:activation|gradient)[- ]?(?:re)?checkpointing",
    re.IGNORECASE,
)
"""In `recompute`, in this order: nothing is recomputed, parts of a layer, whole layers (as torch's checkpoint around each)."""


def recompute_of(row: Row, framework: FrameworkSpec, notes: list[str]) -> str | dict[str, Any]:
    """The recomputation: none, full, or the modules named in words."""
    word, detail = str(row.get("recompute") or ""), str(row.get("recompute_detail") or "")
    if not word:
        word = framework.conventions.recompute_default
        notes.append(f"recomputation not stated: {word} (framework's default)")
    stages = int(row.get("pp") or 1) * int(row.get("vpp") or 1)
    word = _extent(word)
    if word.startswith("full") and (block := _BLOCK.search(f"{word} {detail}")):
        return {"granularity": "full", "method": "block", "num_layers": int(block[1])}
    if word.startswith(("none", "full")):
        return word[:4]
    if budget := re.search(r"memory budget (0?\.\d+|[01])", detail):
        # torch.compile's partitioner keeps that share of what full checkpointing would free; here of the layers.
        again = round((1.0 - float(budget[1])) * int(row["layers"]) / stages)
        return {"granularity": "full", "method": "block", "num_layers": again}
    if re.search(r"every (2nd|second) layer", detail):
        return {"granularity": "full", "method": "block", "num_layers": int(row["layers"]) // stages // 2}
    modules = tuple(m for pattern, m in RECOMPUTE_MODULES if re.search(pattern, f"{word} {detail}", re.IGNORECASE))
    if not modules and not _SOME_AGAIN.search(word):
        notes.append(f"recomputation {word!r} unknown: selective")
    if not modules:
        modules = framework.conventions.selective_recompute
    return {"granularity": "selective", "modules": modules}


def _extent(word: str) -> str:
    """`word` beginning with "none" or "full" where that is what it says.

    >>> _extent("off"), _extent("gradient checkpointing"), _extent("uniform, 1 layer"), _extent("selective (full attention)")
    ('none', 'full gradient checkpointing', 'full uniform, 1 layer', 'selective (full attention)')
    """
    if _NOTHING_AGAIN.search(word):
        return "none"
    return f"full {word}" if _ALL_AGAIN.search(word) and not _SOME_AGAIN.search(word) else word
