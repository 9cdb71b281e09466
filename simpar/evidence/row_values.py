"""A row's values as the rules expect them: numbers, whole numbers, flags and texts, whatever a file wrote them as.

Files of other origin write 8 as "8" or 8.0, true as "yes" or 1, and an unknown value as "n/a". What can be read is read; what
cannot is named. A setting or a compared figure that cannot be read makes the row inexpressible, since a guess would be another run;
what only describes is left out and named.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

Row = Mapping[str, Any]

SAID: Final = r"(?<!no )(?<!not )(?<!without )(?<![-\w])"
"""Before a word: it begins there and is not denied ("non-fused")."""

COUNTS: Final = frozenset((
    "layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab", "seq_len", "moe_experts", "moe_topk", "moe_ffn",
    "moe_shared_ffn", "moe_dense_layers", "dense_ffn", "mtp_layers", "n_gpus", "gpus_per_node", "tp", "pp", "vpp", "cp", "ep",
    "domain_size", "etp", "dp", "zero_stage", "micro_batch", "global_batch", "grad_accum", "hsdp_replicas",
    "reduce_bucket_size",
))  # fmt: skip
"""Whole numbers of at least 0."""
SAMPLES: Final = frozenset(("document_tokens",))
"""Whole numbers of at least 0: one for all, or a list of some."""
MEASURED: Final = frozenset((
    "tokens_per_s_per_gpu", "tokens_per_s", "samples_per_s", "samples_per_s_per_gpu", "step_time_s", "tflops_per_gpu", "mfu",
    "hfu", "peak_tflops_used", "mem_gib", "bubble_fraction", "step_time_s_derived", "step_time_s_best",
    "tokens_per_s_per_gpu_best", "tokens_per_s_per_gpu_from_flops", "gflops_per_token_causal", "gflops_per_token_noncausal",
    "gpu_mem_gb", "n_params_b", "n_active_b",
))  # fmt: skip
"""Numbers."""
COMPARED: Final = frozenset((
    "tokens_per_s_per_gpu", "tokens_per_s", "samples_per_s", "samples_per_s_per_gpu", "step_time_s", "tflops_per_gpu", "mem_gib",
    "bubble_fraction", "step_time_s_derived", "step_time_s_best", "tokens_per_s_per_gpu_best", "tokens_per_s_per_gpu_from_flops",
    "oom",
))  # fmt: skip
"""Figures that predictions are compared with; of others, one that cannot be read is left out."""
FLAGS: Final = frozenset((
    "sp", "dist_opt", "flash_attention", "overlap_grad_reduce", "overlap_param_gather", "overlap_tp", "overlap_p2p",
    "overlap_ep", "compile", "tied_embeddings", "oom",
))  # fmt: skip
"""True or false; one that cannot be read is left out."""
TEXTS: Final = frozenset((
    "id", "source", "source_ref", "source_url", "source_version", "confidence", "notes", "exclude", "task", "model_name",
    "arch", "mlp_type", "position", "moe_routing", "mla", "attn_window", "gpu", "interconnect", "cp_type", "fsdp",
    "pp_schedule", "pp_layout", "recompute", "recompute_detail", "precision", "grad_dtype", "optimizer", "offload",
    "cuda_graphs", "framework", "framework_version", "tflops_def", "mfu_def", "mem_kind", "mem_unit_as_stated", "bubble_kind",
))  # fmt: skip

_MOST: Final = {
    "layers": 10_000, "pp": 10_000, "vpp": 10_000, "mtp_layers": 100, "moe_experts": 65_536, "gpus_per_node": 65_536,
    "n_gpus": 10_000_000,
}  # fmt: skip
"""Beyond these a whole number is a slip of units; 10^9 elsewhere."""
_ABSENT: Final = ("", "?", "-", "n/a", "na", "nan", "none", "null", "unknown", "not stated", "tbd", "auto", "default")
_NONE_IS_A_VALUE: Final = ("recompute", "offload", "cuda_graphs", "position")
_TRUE: Final = ("true", "yes", "on", "1", "enabled", "y", "t")
_FALSE: Final = ("false", "no", "off", "0", "disabled", "n", "f", "none")
_TOKENS: Final = r"tok(?:en)?s?"
_UNITS: Final = (
    (r"step_time_s\w*", r"s|secs?|seconds?"),
    (r"tokens_per_s(?:_per_gpu(?:_best|_from_flops)?)?", rf"{_TOKENS}/s(?:ec)?"),
    (r"samples_per_s(?:_per_gpu)?", r"(?:samples?|seq(?:uence)?s?)/s(?:ec)?"),
    (r"tflops_per_gpu|peak_tflops_used", r"TF|TFLOPS|TFLOPs?/s"),
    (r"mfu|hfu", r"%|percent"),
    (r"mem_gib", r"GiB"),
    (r"gpu_mem_gb", r"Gi?B"),
    (r"n_(?:params|active)_b", r"B"),
    (r"seq_len|document_tokens", _TOKENS),
    (r"(?:micro|global)_batch", r"seq(?:uence)?s?|samples?"),
    (r"n_gpus|gpus_per_node|domain_size|tp|pp|cp|ep|etp|dp", r"GPUs?"),
    (r"layers|moe_dense_layers|mtp_layers", r"layers?"),
)
"""Columns -> the unit that may stand behind their figures."""
_STAGE: Final = re.compile(r"\b(?:zero|stage|z)[ _:-]*(?:stage[ _:-]*)?([0-3])\b")
_STRATEGY: Final = ((r"(?<![a-z])no[ _]shard", 0), (r"shard[ _]grad[ _]op", 2), (r"^fsdp|full[ _]shard", 3))
"""Sharding strategies of torch.distributed.fsdp -> the ZeRO stage that each is named after."""
_NOT_THERE: Final = {"fsdp": re.compile(r"(?:ddp|[nf])$|(?:.*[^a-z])?no[ _]shard")}
"""Column -> what says that there is none in its own words."""
_DENIED: Final = re.compile(
    r"\W*(?:(?:none|no|not(?! stated| known| given)|off|false|disabled|without|w/o|never)(?![a-z0-9])|un(?:compiled|used)\b"
    r"|0(?![\w./])|[^=]*\b(?:off|disabled|false|not (?:used|on|enabled|compiled|offloaded|recomputed|applied))\s*$"
    r"|\S+\s*=\s*(?:off|disabled|false|no|none|0)\s*$)",
    re.IGNORECASE,
)
"""How a clause that says that there is none begins or ends; a setting of its own that is false, beside others, does not."""


@dataclass(frozen=True, slots=True)
class Values:
    """A row read.

    Attributes:
        row: readable values in their types; absent ones and those that cannot be read are left out.
        wrong: column -> why it cannot be read, for settings and compared figures.
        notes: the same for what was left out.
    """

    row: dict[str, Any]
    wrong: dict[str, str]
    notes: tuple[str, ...]


def read_values(row: Row) -> Values:
    """`row` with every known column in its type; unknown columns stay as they are."""
    found: dict[str, Any] = {}
    wrong: dict[str, str] = {}
    notes: list[str] = []
    for name, value in row.items():
        if value is None:
            continue
        try:
            read = _read(name, value, row)
        except ValueError as error:
            if name in COUNTS or name in SAMPLES or name in COMPARED:
                wrong[name] = f"{name}: {error}"
            else:
                notes.append(f"{name} left out: {error}")
            continue
        if read is not None:
            found[name] = read
    return Values(found, wrong, tuple(notes))


def _read(name: str, value: Any, row: Row) -> Any:
    """`value` of `row` in the type of its column; None for one that says it is unknown.

    Raises:
        ValueError: of another kind; the message says what was found.
    """
    if name in COUNTS:
        return _count(name, _numeral(name, value, row))
    if name in SAMPLES:
        each = value if isinstance(value, list | tuple) else (value,)
        return tuple(read for one in each if (read := _count(name, one)) is not None) or None
    if name in MEASURED:
        return _number(name, value)
    if name in FLAGS:
        return _flag(name, value)
    if name in TEXTS:
        return _text(name, value)
    if name == "assumed":
        return [str(item) for item in value] if isinstance(value, list | tuple) else [str(value)]
    if name == "extra":
        return dict(value) if isinstance(value, Mapping) else {}
    return value


def _numeral(name: str, value: Any, row: Row) -> Any:
    """A count in other words: "8k" tokens, a batch in tokens, "ZeRO-3", no ZeRO."""
    word = str(value).strip().lower()
    if name == "seq_len" and (thousands := re.fullmatch(rf"(\d+) ?ki?(?: ?{_TOKENS})?", word)):
        return 1024 * int(thousands[1])
    if name == "global_batch" and (figure := re.fullmatch(rf"([\d,_]+) ?{_TOKENS}", word)):
        tokens, length = int(re.sub(r"\D", "", figure[1]) or 0), read_values({"seq_len": row.get("seq_len")}).row.get("seq_len")
        if not length or tokens % length:
            raise ValueError(f"{_shown(value)} is no whole number of sequences of seq_len {length or 'not stated'}")
        return tokens // length
    if name == "zero_stage":
        stage = _STAGE.search(word)
        if denied(word) and stage and stage[1] != "0":
            raise ValueError(f"{_shown(value)} says which stage it is not")
        if denied(word) or word == "ddp":
            return 0
        if stage:
            return int(stage[1])
        return next((level for pattern, level in _STRATEGY if re.search(pattern, word)), value)
    return value


def denied(text: str) -> bool:
    """Whether the first clause of `text` says that there is none; what follows may be a reason, or of something else.

    >>> [denied(text) for text in ("no CPU offload", "off (CPU too small)", "checkpointing off", "no_shard", "uncompiled")]
    [True, True, True, True, True]
    >>> [denied(text) for text in ("selective; offload disabled", "full, use_reentrant=False", "0.5 of layers", "node-local NVMe")]
    [False, False, False, False]
    """
    return _DENIED.match(re.split(r"[;,(]", text, maxsplit=1)[0]) is not None


def _figure(name: str, text: str) -> str:
    """`text` without a sign that it is about so much and without the unit of its column; another unit stays.

    >>> _figure("step_time_s", "~5.2 s"), _figure("n_gpus", "8 layers")
    ('5.2', '8 layers')
    """
    unit = next((unit for columns, unit in _UNITS if re.fullmatch(columns, name)), "")
    said = re.fullmatch(rf"[~≈]?\s*([\d.,_]+)\s*(?:{unit})?", text.strip(), re.IGNORECASE)
    return said[1] if said else text


def _number(name: str, value: Any) -> float | None:
    if isinstance(value, str):
        if value.strip().lower() in _ABSENT:
            return None
        try:
            value = float(_figure(name, value).replace(",", "").replace("_", ""))
        except ValueError:
            unit = " in the unit of the column" if re.match(r"[~≈]?\s*\d", value.strip()) else ""
            raise ValueError(f"{_shown(value)} is not a number{unit}") from None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{_shown(value)} is not a number")
    if not math.isfinite(value):
        raise ValueError(f"{value} is not a finite number")
    if value < 0:
        raise ValueError(f"{value:g} is negative")
    return value


def _count(name: str, value: Any) -> int | None:
    number = _number(name, value)
    if number is None:
        return None
    if number != int(number):
        raise ValueError(f"{number:g} is not a whole number")
    if number > _MOST.get(name, 1_000_000_000):
        raise ValueError(f"{number:g} is out of range")
    return int(number)


def _flag(name: str, value: Any) -> bool | str | None:
    if isinstance(value, bool):
        return value
    word = f"{value:g}" if isinstance(value, int | float) else str(value).strip().lower()
    if word in _ABSENT and word not in _FALSE:
        return None
    first = re.split(r"[^a-z0-9]", word, maxsplit=1)[0]
    if word in _FALSE or denied(word):
        return False
    if word in _TRUE or (first in _TRUE and name != "flash_attention"):  # where a kernel's name may follow
        return True
    if name == "compile" and re.search(r"\bloss only|only (?:the )?loss\b", word):
        return "loss"
    if name == "compile" and first == "eager":
        return False
    if name == "compile" and re.search(r"model|compile|inductor|dynamo|autotune|overhead|block|layer|region", word):
        return "model" if re.search(r"\bmodel\b", word) else True  # how says that it is
    if name == "flash_attention" and isinstance(value, str):
        return value  # the kernel's name says that there is one
    raise ValueError(f"{_shown(value)} is neither true nor false")


def _text(name: str, value: Any) -> str | None:
    if isinstance(value, bool):
        value = {True: "full" if name == "recompute" else "on", False: "none"}[value]
    text = f"{value:g}" if isinstance(value, float) and value.is_integer() else str(value)
    word = text.strip().lower()
    if name == "recompute":
        text = word
    if name in _NOT_THERE and (_NOT_THERE[name].match(word) or (denied(word) and "reshard" not in word)):
        return None
    return text if word not in _ABSENT or (word == "none" and name in _NONE_IS_A_VALUE) else None


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def first_match(table: Sequence[tuple[str, str]], text: object) -> str | None:
    """The value of the first pattern of `table` that is in a text; none where none is."""
    return next((value for pattern, value in table if re.search(pattern, str(text or ""), re.IGNORECASE)), None)
