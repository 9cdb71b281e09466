"""Low-rank adaptation as a run describes it: whether, where, of which rank, beside which base."""

from __future__ import annotations

import re
from typing import Any, Final

from simpar.evidence.row_values import SAID, Row
from simpar.specs.framework import FrameworkSpec

_SEVERAL: Final = 4
"""Adapters of runs that hold several and say no number: prime-rl's benchmarks/scripts/run_single_benchmark.py (MAX_LORAS)."""
_RANK: Final = ("lora_rank", "lora_r")
_TARGETS: Final = ("lora_modules", "lora_target_modules", "lora_targets", "lora_target")
"""Columns that some files have for what others say in words."""
_NAME: Final = r"(?:q|k|v|o|gate|up|down)"
_LIST: Final = re.compile(rf"\b(?P<list>{_NAME}(?:_proj)?(?:(?:\s*(?:,|and|\+|/|&)\s*)+{_NAME}(?:_proj)?)+)\b", re.IGNORECASE)
_SPOKEN: Final = re.compile(
    r"(?:lora|\badapters?|\btargets?|\bmodules?)\b"
    rf"(?:[^\w;]|\b(?:rank|alpha|r|[\d.]+|adapters?|targets?|modules?|on|of|to|for|in|the)\b)*(?<!, ){_LIST.pattern}",
    re.IGNORECASE,
)
"""The same in notes, which speak of queries, keys and values for other reasons too: what adapters are said to be on."""
_FULL_NAME: Final = re.compile(rf"\b({_NAME})_proj\b", re.IGNORECASE)
_MEGATRON_NAME: Final = re.compile(r"\blinear_(qkv|proj|fc[12]|(?:q|kv)(?:_down|_up)?_proj)\b", re.IGNORECASE)
"""Megatron-Core's products (transformer/attention.py, mlp.py, multi_latent_attention.py), as Megatron-Bridge's LoRA names them."""
_BASES: Final = (
    (r"nf4|qlora|4-?bit|\bint4\b", "nf4"), (r"int8|8-?bit base", "int8"),
    (rf"{SAID}(?:base|frozen)(?: model(?:'s)?)?(?: weights)?(?: are| rest)?(?: loaded)? (?:in|of) (?:fp|float)32\b", "fp32"),
)  # fmt: skip


def adapted(row: Row) -> bool:
    """Whether low-rank adapters are trained and nothing else: the task says so, or a column has their rank."""
    named = re.search(r"(?<!no )(?<!without )(?:lora|\bdora\b)", str(row.get("task") or ""), re.IGNORECASE)
    return named is not None or _rank(row) > 0


def adapters_of(row: Row, framework: FrameworkSpec) -> dict[str, Any]:
    """The fields of a TrainingSpec that say it."""
    task, notes, precision = (str(row.get(key) or "") for key in ("task", "notes", "precision"))
    text = f"{task} {notes}"
    rank, several = re.search(r"rank (\d+)|\br ?= ?(\d+)", text), re.search(r"(\d+) adapters", text)
    table: dict[str, Any] = {
        "trainable": "lora",
        "lora_rank": _rank(row) or (int(rank[1] or rank[2]) if rank else 16),
    }
    targets = next((str(row[key]) for key in _TARGETS if row.get(key)), "")
    if modules := _modules(targets) or _modules(task) or _modules(notes, _SPOKEN):
        table["lora_modules"] = modules
    dropped = re.search(r"lora[\w ,-]*?dropout (?:of )?(0?\.\d+)", text, re.IGNORECASE)
    if dropout := float(row.get("lora_dropout") or (dropped[1] if dropped else 0.0)):
        table["lora_dropout"] = dropout
    if re.search(r"(?<!no )(?<!without )\bdora\b", text, re.IGNORECASE):
        table["dora"] = True
    if several or "several adapters" in text:
        table["lora_adapters"] = int(several[1]) if several else _SEVERAL
    said = f"{text} {precision} {row.get('quantization') or ''}"
    base = next((value for pattern, value in _BASES if re.search(pattern, said, re.IGNORECASE)), None)
    if base and "quantised_base" in framework.conventions.abilities:
        table["base_weights"] = base
    return table


def _rank(row: Row) -> int:
    return next((int(found[0]) for key in _RANK if (found := re.search(r"\d+", str(row.get(key) or "")))), 0)


def _modules(text: str, listed: re.Pattern[str] = _LIST) -> str | None:
    """Where pairs are: everywhere, or as products' whole names or a list of short ones says.

    >>> _modules("q_proj v_proj"), _modules("on gate, up and down"), _modules("q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj")
    ('qv', 'mlp', 'all')
    """
    if re.search(r"all attention and MLP|all.linear|every linear|^\s*all\s*$", text, re.IGNORECASE):
        return "all"
    found = listed.search(text)
    short = re.findall(rf"\b{_NAME}(?=\b|_)", found["list"], re.IGNORECASE) if found else ()
    names = {name.lower() for name in _FULL_NAME.findall(text) or short}
    names |= {"up" if name.lower().startswith("fc") else "o" for name in _MEGATRON_NAME.findall(text)}
    attention, feed_forward = names & {"q", "k", "v", "o"}, names & {"gate", "up", "down"}
    if attention and feed_forward:
        return "all"
    if feed_forward or re.search(r"mlp (layers |matmuls )?(alone|only)", text, re.IGNORECASE):
        return "mlp"
    return ("qv" if attention == {"q", "v"} else "attention") if attention else None
