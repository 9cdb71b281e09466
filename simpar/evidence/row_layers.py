"""What a flat row says of its layers: which run again in the backward, and which pipeline stage holds them."""

from __future__ import annotations

import re
from typing import Any, Final

from simpar.evidence.row_machine import CannotExpress
from simpar.evidence.row_values import Row, denied
from simpar.specs.counts import split_by_cost
from simpar.specs.framework import FrameworkSpec

RECOMPUTE_MODULES: Final = (
    (r"core.?att|core_attn|qk\^t|attention internals|minimal_flash", "core_attn"),
    (r"moe_act|swiglu output|\bmoe.act", "moe_act"),
    (r"layernorm|rmsnorm|minimal_flash", "layernorm"),
    (r"mla", "mla_up_proj"),
    (r"shared", "shared_experts"),
    (r"(?<![_.])\bmlp\b", "mlp"),
    (r"\bmoe\b(?!_act)", "moe"),
    (r"per-op|\bop\b|op-level", "op"),
    (r"save_dot\w*_except_mlp", "mlp"),
    (r"save_dot\w*_except_mlp", "layernorm"),
    (r"save_dot_except_mlp", "core_attn"),
    (r"save_dot_(?:only|with_no_batch|for_mlperf|except_logits)|save_(?:quantized|qkv_out_proj)", "layernorm"),
    (r"save_dot_with_no_batch|save_qkv_out_proj", "core_attn"),
    (r"save_dot_(?:for_mlperf|except_logits_ffn1)|save_(?:quantized|qkv_out_proj)", "mlp"),
)
"""Pattern in recompute_detail -> a module that is recomputed; several may match. save_dot...except_mlp and minimal_flash are
MaxText's: the products around attention are kept, with its own output or without; minimal_flash keeps all products and attention's
output, and norms run again (layers/decoders.py, get_remat_policy). The last three are praxis's (layers/checkpoint_policy.py,
custom_policy): all products are kept, those with weights, or those around attention, with its output or without, and of
except_logits_ffn1 the feed-forward's second too."""

_BLOCK: Final = re.compile(r"\bblock\b\D{0,20}(\d+)", re.IGNORECASE)
"""Full recomputation of so many layers of each virtual stage and no others: Megatron-LM's --recompute-method block."""

_SHARE: Final = re.compile(
    r"(\d*\.?\d+) ?(?:(%)|(?:/|(?:out )?of) ?(\d+))? ?(?:of )?(?:all |the )*(?:layers|blocks)", re.IGNORECASE
)
_EVERY: Final = re.compile(r"every (?:([1-9]\d*)(?:nd|rd|th)|second) layer", re.IGNORECASE)
"""A share of the layers: 1/2, 0.5, 50 % or 8 of 32 of them; every 2nd."""
_SOME_AGAIN: Final = re.compile(r"select|\bsac\b|partial", re.IGNORECASE)
_ALL_AGAIN: Final = re.compile(
    r"^\s*(?:yes|on|true|enabled|uniform)\b|^\s*1\s*$|checkpoint"
    r"|^\s*(?:(?:all|whole|every|each|per)[- ])?(?:(?:decoder|transformer) )?(?:layer|block)s?\b",
    re.IGNORECASE,
)
"""In `recompute`, in this order: parts of a layer, whole layers (as torch's checkpoint around each)."""


def recompute_of(row: Row, framework: FrameworkSpec, notes: list[str]) -> str | dict[str, Any]:
    """The recomputation: none, full, or the modules named in words."""
    word, detail = str(row.get("recompute") or ""), str(row.get("recompute_detail") or "")
    if not word:
        word = framework.conventions.recompute_default
        notes.append(f"recomputation not stated: {word} (framework's default)")
    stages = int(row.get("pp") or 1) * int(row.get("vpp") or 1)
    if denied(word):
        return "none"
    modules = _modules(f"{word} {detail}")
    if not modules and (every := _EVERY.search(f"{word} {detail}")):
        return {"granularity": "full", "every": int(every[1] or 2)}
    if not modules and (share := _share(f"{word} {detail}")) is not None:
        again = int(share * (int(row["layers"]) // stages) + 1e-9)
        return {"granularity": "full", "method": "block", "num_layers": again}
    if _whole(word):
        block = _BLOCK.search(f"{word} {detail}")
        return {"granularity": "full", "method": "block", "num_layers": int(block[1])} if block else "full"
    if budget := re.search(r"memory budget (0?\.\d+|[01])", detail):
        # torch.compile's partitioner keeps that share of what full checkpointing would free; here of the layers.
        again = round((1.0 - float(budget[1])) * int(row["layers"]) / stages)
        return {"granularity": "full", "method": "block", "num_layers": again}
    if not modules and not _SOME_AGAIN.search(word):
        notes.append(f"recomputation {word!r} unknown: selective")
    return {"granularity": "selective", "modules": modules or framework.conventions.selective_recompute}


def _modules(text: str) -> tuple[str, ...]:
    return tuple(module for pattern, module in RECOMPUTE_MODULES if re.search(pattern, text, re.IGNORECASE))


def _whole(word: str) -> bool:
    """Whether `word` says whole layers.

    >>> [_whole(word) for word in ("gradient checkpointing", "uniform, 1 layer", "AC full, without MLA", "on")]
    [True, True, True, True]
    >>> [_whole(word) for word in ("selective (full attention)", "yes (selective)", "on (core attention only)")]
    [False, False, False]
    """
    full, some = re.search(r"\bfull\b", word), _SOME_AGAIN.search(word)
    if full:
        return some is None or full.start() < some.start()
    return some is None and _ALL_AGAIN.search(word) is not None and not _modules(word)


def _share(text: str) -> float | None:
    """The share of the layers that `text` says, or None.

    >>> _share("1/2 of layers"), _share("0.5 of the layers"), _share("8 of 32 layers"), _share("25% of layers")
    (0.5, 0.5, 0.25, 0.25)
    >>> _share("block, 3 layers") is None
    True
    """
    said = _SHARE.search(text)
    if said is None or not (said[2] or said[3] or "." in said[1]):
        return None
    share = float(said[1]) / (100 if said[2] else int(said[3] or 1) or 1)
    return share if 0.0 < share <= 1.0 else None


def stage_layers(row: Row, rounding: str, stages: int) -> dict[str, Any]:
    """Plan fields of a run over so many virtual stages; `rounding`: the framework's way where the run does not say.

    Raises:
        CannotExpress: a layout that is not understood or does not hold all layers.
    """
    layers, stated = int(row["layers"]), str(row.get("pp_layout") or "")
    usual = layout_of(stated, layers, stages)
    if stated:
        return usual
    if rounding == "cost" and int(row["pp"]) > 1:
        return {"layers_per_stage": _by_cost(row, stages)}
    deal = {"fill": _filled, "last": _last_longer, "ends": _ends}.get(rounding)
    return (deal(layers, stages) if deal else {}) or usual


def layout_of(text: str, layers: int, stages: int) -> dict[str, Any]:
    """Plan fields of a pp_layout: words about the first and last stage, or Megatron's layout language.

    >>> layout_of("Et*2|(t*3|)*2tL", 9, 4)
    {'layers_per_stage': (2, 3, 3, 1)}

    Raises:
        CannotExpress: a layout that does not hold all layers.
    """
    if not text:
        return _more_stages_than_layers(layers, stages)
    if re.fullmatch(r"[EtmL*()|,\d\s]+", text):
        counts = parse_layout(text)
        if sum(counts) != layers or len(counts) != stages:
            held = f"{sum(counts)} layers in {len(counts)} stages"
            raise CannotExpress(f"pp_layout {text!r} has {held}, not {layers} in {stages}")
        return {"layers_per_stage": counts}
    if re.search(r"first.*last.*(fewer|removed)|removed from first|counted as layers", text):
        if stages >= layers:
            return _more_stages_than_layers(layers, stages)
        if (layers + 2) % stages == 0:
            return {"first_stage_less_layers": 1, "last_stage_less_layers": 1}
        if (layers + 1) % stages == 0:
            return {"last_stage_less_layers": 1}
        return {}
    raise CannotExpress(f"pp_layout {text!r} is not understood")


def parse_layout(text: str) -> tuple[int, ...]:
    """Transformer layers per stage of Megatron's pipeline layout ("E" embedding, "t" layer, "m" MTP, "L" loss).

    "|" ends a stage, "," is ignored, "x*3" repeats one symbol, "(...)*3" a group.
    """
    expanded = re.sub(r"\s|,", "", text)
    group = re.compile(r"\(([^()]*)\)\*(\d+)")
    while (found := group.search(expanded)) is not None:
        expanded = expanded[: found.start()] + found[1] * int(found[2]) + expanded[found.end() :]
    expanded = re.sub(r"([A-Za-z|])\*(\d+)", lambda m: m[1] * int(m[2]), expanded)
    return tuple(stage.count("t") for stage in expanded.split("|"))


def _more_stages_than_layers(layers: int, stages: int) -> dict[str, Any]:
    """Single-layer stages; the first and last (embedding and head) without, further empty ones at the end."""
    empty = stages - layers
    if empty <= 0:
        return {}
    first = 1 if empty >= 2 else 0
    return {"layers_per_stage": (0,) * first + (1,) * layers + (0,) * (empty - first)}


def _filled(layers: int, stages: int) -> dict[str, Any]:
    """Every stage the rounded-up share, the last what is left; nothing where they divide or a stage would stay empty."""
    share = -(-layers // stages)
    rest = layers - share * (stages - 1)
    return {"layers_per_stage": [share] * (stages - 1) + [rest]} if layers % stages and rest > 0 else {}


def _last_longer(layers: int, stages: int) -> dict[str, Any]:
    """The layers that are left over go to the last stages; nothing where they divide."""
    share, rest = divmod(layers, stages)
    return {"layers_per_stage": [share] * (stages - rest) + [share + 1] * rest} if share and rest else {}


def _ends(layers: int, stages: int) -> dict[str, Any]:
    """The rounded-up share in between; what is left on the first and the last stage."""
    share = -(-layers // stages)
    left = layers - share * (stages - 2)
    if stages < 3 or layers % stages == 0 or left < 1:
        return {}
    return {"layers_per_stage": (left - left // 2, *(share,) * (stages - 2), left // 2)}


def _by_cost(row: Row, stages: int) -> tuple[int, ...]:
    """Layers per stage of a framework that deals them out by matmul weights, the head's included."""
    hidden, heads = int(row["hidden"]), int(row["heads"])
    attention = 4 * heads * int(row.get("head_dim") or hidden // heads) * hidden
    layer = attention + 3 * int(row["ffn"]) * hidden
    return split_by_cost(int(row["layers"]), layer, float(row.get("vocab") or 0) * hidden, stages)
