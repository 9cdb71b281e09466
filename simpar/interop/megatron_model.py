"""The model among Megatron-LM's flags, written and read."""

from __future__ import annotations

import re
from math import gcd
from typing import Any, Final

from simpar.interop.megatron_flags import Flags
from simpar.interop.megatron_hybrid import expert_flags, read_hybrid
from simpar.model.forms import general
from simpar.specs.mixers import ExpertsSpec
from simpar.specs.model import TransformerSpec
from simpar.specs.models_io import load_model, table_names

_NUMBERS: Final = (
    ("num-layers", "num_hidden_layers"),
    ("hidden-size", "hidden_size"),
    ("ffn-hidden-size", "intermediate_size"),
    ("num-attention-heads", "num_attention_heads"),
)
_LATENT: Final = (
    ("q-lora-rank", "q_lora_rank", 0, ""), ("kv-lora-rank", "kv_lora_rank", 32, ""),
    ("qk-head-dim", "qk_nope_head_dim", 128, "qk-nope-head-dim"),
    ("qk-pos-emb-head-dim", "qk_rope_head_dim", 64, "qk-rope-head-dim"), ("v-head-dim", "v_head_dim", 128, ""),
)  # fmt: skip
"""Sizes of latent attention: flag, field, what it is without the flag, and the flag of older forks."""
_POSITIONS: Final = {"rope": "rope", "learned": "learned_absolute", "relative": "relative", "none": "none"}
_READ_POSITIONS: Final = {**{v: k for k, v in _POSITIONS.items()}, "alibi": "alibi", "absolute": "learned", "rotary": "rope",
                          "yarn": "rope", "mrope": "rope"}  # fmt: skip
_NORMS: Final = {"layernorm": "layernorm", "rmsnorm": "rmsnorm", "layernorm1p": "layernorm"}
_PLAIN_SPECS: Final = (
    "get_gpt_layer",
    "get_gpt_decoder_block_spec",
    "gpt_layer_specs",
    "gpt_layer_specs.py",
    "megatron.core.models.gpt.gpt_layer_specs",
)
"""Layer specs that are the decoder which the other flags describe."""
_VOCABULARIES: Final = {
    "GPT2BPETokenizer": 50257, "Llama2Tokenizer": 32000, "Llama3Tokenizer": 128256, "DeepSeekV2Tokenizer": 102400,
    "DeepSeekV3Tokenizer": 129280, "Qwen2Tokenizer": 151936, "BertWordPieceLowerCase": 30522, "BertWordPieceCase": 28996,
}  # fmt: skip
"""Sizes of tokenizers that a script names by type."""


# -- written -------------------------------------------------------------------------------------------------------------


def model_flags(model: TransformerSpec, sequence_length: int = 1, tp: int = 1) -> list[str]:
    """Flags of a transformer; positions reach at least to `sequence_length` where nothing is learned about them.

    Args:
        tp: tensor-parallel ranks, which the vocabulary is padded for.
    """
    flags = [f"--{flag} {getattr(model, name)}" for flag, name in _NUMBERS]
    positions = model.max_position_embeddings
    if model.position != "learned":
        positions = max(positions, sequence_length)
    flags += [f"--max-position-embeddings {positions}", *vocabulary_flags(model.vocab_size, tp)]
    if model.num_key_value_heads != model.num_attention_heads:
        flags += ["--group-query-attention", f"--num-query-groups {model.num_key_value_heads}"]
    if model.mla is None:
        flags.append(f"--kv-channels {model.head_dim}")
    if model.gated_mlp and model.activation == "silu":
        flags.append("--swiglu")
    elif model.activation == "squared_relu":
        flags.append("--squared-relu")
    flags.append("--normalization " + ("RMSNorm" if model.norm == "rmsnorm" else "LayerNorm"))
    flags.append(f"--position-embedding-type {_POSITIONS.get(model.position, 'none')}")
    if not model.tie_word_embeddings:
        flags.append("--untie-embeddings-and-output-weights")
    if not model.mlp_bias:
        flags.append("--disable-bias-linear")
    if model.attention_bias and not model.mlp_bias:
        flags.append("--add-qkv-bias")
    if model.qk_norm or model.mla is not None:
        flags.append("--qk-layernorm")
    if model.sliding_window is not None:
        flags.append(f"--window-size {model.sliding_window - 1},0")
    return [*flags, *_mla_flags(model), *_moe_flags(model)]


def vocabulary_flags(words: int, tp: int = 1) -> list[str]:
    """A vocabulary of `words` on `tp` ranks.

    NullTokenizer adds a token for the end of a document up to core 0.14 and none later: padded to a unit that divides the
    vocabulary, both come to its size, and so does the default unit of 128 x tp, which need not.
    """
    unit = gcd(words // tp, 128) if words % tp == 0 else 128
    return [f"--vocab-size {words - 1}", "--tokenizer-type NullTokenizer", f"--make-vocab-size-divisible-by {unit}"]


def _mla_flags(model: TransformerSpec) -> list[str]:
    mla = model.mla
    if mla is None:
        return []
    return ["--multi-latent-attention", *(f"--{flag} {size}" for flag, name, *_ in _LATENT if (size := getattr(mla, name)))]


def _moe_flags(model: TransformerSpec) -> list[str]:
    moe, flags = model.moe, []
    if model.num_nextn_predict_layers:
        flags.append(f"--mtp-num-layers {model.num_nextn_predict_layers}")
    if moe is None:
        return flags
    flags += [flag for branch in general(model).branches() if isinstance(branch, ExpertsSpec) for flag in expert_flags(branch)]
    if moe.first_k_dense_replace or moe.moe_layer_freq > 1:
        flags.append(f"--moe-layer-freq '{_pattern(model)}'")
    return flags


def _pattern(model: TransformerSpec) -> str:
    """Which layers have experts, as runs: "([0]*3+[1]*58)"."""
    assert model.moe is not None
    bits = [int(model.is_moe_layer(i)) for i in range(model.num_hidden_layers)]
    period = model.moe.moe_layer_freq
    times = len(bits) // period
    repeated = times > 1 and bits == bits[:period] * times
    unit, count = (bits[:period], times) if repeated else (bits, 1)
    runs: list[list[int]] = []
    for bit in unit:
        if runs and runs[-1][0] == bit:
            runs[-1][1] += 1
        else:
            runs.append([bit, 1])
    text = "+".join(f"[{bit}]*{n}" for bit, n in runs)
    return f"({text})*{count}" if count > 1 else f"({text})"


# -- read ----------------------------------------------------------------------------------------------------------------


def read_model(f: Flags) -> str | dict[str, Any]:
    """The model table of flags, or the preset that they fit but for a vocabulary that they leave open.

    What is missing or cannot be read is added to the flags' lists.
    """
    vocabulary, said = _vocabulary(f)
    hybrid = read_hybrid(f, vocabulary)
    if hybrid is not None:
        return hybrid
    table = _table(f)
    if not table:
        return {}
    table["vocab_size"] = vocabulary
    if not said:
        preset = _fitting_preset(table)
        if preset is not None:
            return preset
        if not f.has("tokenizer-type") or f.text("tokenizer-type") not in _VOCABULARIES:
            f.warnings.append(f"the size of the vocabulary does not stand in the flags: taken as {vocabulary}")
    return table


def _vocabulary(f: Flags) -> tuple[int, bool]:
    """Tokens, and whether the flags say how many."""
    kind = f.text("tokenizer-type")
    f.use("make-vocab-size-divisible-by")
    if f.has("padded-vocab-size"):
        return f.number("padded-vocab-size", 1), True
    if f.has("vocab-size"):
        return f.number("vocab-size", 50256) + kind.startswith("Null"), True
    return _VOCABULARIES.get(kind, 50257 if kind == "" else 50304), False


def _fitting_preset(table: dict[str, Any]) -> str | None:
    """The shipped model that differs from `table` in the vocabulary (and the reach of its positions) at most."""
    free = {"vocab_size": None, "max_position_embeddings": None, "head_dim": None}
    wanted = {**TransformerSpec(**table).model_dump(), **free}
    for name in table_names():
        preset = load_model(name)
        if isinstance(preset, TransformerSpec):
            found = {**preset.model_dump(), **free}
            if all(found[k] == v for k, v in wanted.items() if k not in ("name", "source") and not k.startswith("published")):
                return name
    return None


def _table(f: Flags) -> dict[str, Any]:
    missing = [n for n in ("num-layers", "hidden-size", "num-attention-heads") if not f.has(n)]
    layers = f.number("num-layers", 0) or f.number("encoder-num-layers", 0)
    hidden, heads = f.number("hidden-size", 0), f.number("num-attention-heads", 0)
    if not (layers and hidden and heads):
        for name in missing:
            f.missing(name)
        return {}
    swiglu, geglu, squared = f.on("swiglu"), any([f.on("geglu"), f.on("quick-geglu")]), f.on("squared-relu")
    gated, biased = swiglu or geglu, not f.on("disable-bias-linear")
    inner = f.number("ffn-hidden-size", int(4 * hidden * 2 / 3 / 64) * 64 if swiglu else 4 * hidden)
    _check_spec(f)
    rotary = f.on("use-rotary-position-embeddings")
    position = f.text("position-embedding-type", "rope" if rotary else "learned_absolute")
    mla = _read_mla(f)
    qk_norm = f.on("qk-layernorm")
    groups = f.number("num-query-groups", 1)
    table: dict[str, Any] = {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "intermediate_size": inner,
        "num_key_value_heads": groups if f.on("group-query-attention") else heads,
        "head_dim": f.number("kv-channels", hidden // heads),
        "max_position_embeddings": f.number("max-position-embeddings", f.number("seq-length", 8192)),
        "gated_mlp": gated,
        "activation": "silu" if swiglu else "squared_relu" if squared else "gelu",
        "norm": _one_of(f, "normalization", "LayerNorm", _NORMS),
        "position": _one_of(f, "position-embedding-type", position, _READ_POSITIONS),
        "embedding_norm": f.on("embed-layernorm"),
        "tie_word_embeddings": not f.on("untie-embeddings-and-output-weights"),
        "mlp_bias": biased,
        "attention_out_bias": biased,
        "attention_bias": f.on("add-qkv-bias") or biased,
        "qk_norm": qk_norm and mla is None,
    }
    f.use("openai-gelu", "glu-activation")
    if table["position"] == "rope":  # says nothing there (megatron/training/arguments.py, validate_args)
        f.use("no-position-embedding")
    if f.on("use-rotary-position-embeddings"):
        table["position"] = "rope"
    if f.text("glu-activation") in ("geglu", "swiglu"):
        table |= {"gated_mlp": True, "activation": "silu" if f.text("glu-activation") == "swiglu" else "gelu"}
    if any([f.on("use-alibi-position-embeddings"), f.on("alibi")]):
        table["position"] = "alibi"
    if f.has("window-size"):
        table["sliding_window"] = int(re.split(r"[(,\s]+", f.text("window-size").strip("()"))[0] or 0) + 1
    if mtp := f.number("mtp-num-layers", 0):
        table["num_nextn_predict_layers"] = mtp
    if mla is not None:
        table |= {"mla": mla, "head_dim": mla["qk_nope_head_dim"] + mla["qk_rope_head_dim"]}
    # One expert is the dense MLP: the idiom of Megatron-DeepSpeed's scripts for "none".
    if (experts := f.number("num-experts", 0)) > 1:
        table["moe"] = _read_moe(f, experts, inner, layers)
    return table


def _one_of(f: Flags, name: str, default: str, known: dict[str, str]) -> str:
    """What a value means; one that means nothing here is refused."""
    text = f.text(name, default) or default
    if text.lower() not in known:
        f.refuse(name, text, "is not known here", f"one of {', '.join(sorted(known))}, or --accept {name}")
    return known.get(text.lower(), known[default.lower()] if default.lower() in known else next(iter(known.values())))


def _check_spec(f: Flags) -> None:
    """A layer spec of its own is another model, whatever the other flags say."""
    words = f.values("spec")
    if words and not all(w.startswith(_PLAIN_SPECS) for w in words):
        f.refuse("spec", " ".join(words), "takes its layers from there, not from the other flags",
                 "the model's config.json in a scenario by hand, or --accept spec to read plain layers")  # fmt: skip


def _read_mla(f: Flags) -> dict[str, Any] | None:
    # Scripts of older forks name the parts without the switch.
    if not (f.on("multi-latent-attention") or f.has("kv-lora-rank")):
        return None
    return {
        name: f.number(flag, f.number(older, usual) if older else usual) for flag, name, usual, older in _LATENT
    }  # fmt: skip


def _read_moe(f: Flags, experts: int, width: int, layers: int) -> dict[str, Any]:
    inner = f.number("moe-ffn-hidden-size", width)
    if not f.on("moe-grouped-gemm"):
        f.warnings.append("no --moe-grouped-gemm: experts are taken to be computed in one grouped matmul")
    moe: dict[str, Any] = {
        "num_experts": experts,
        "num_experts_per_tok": f.number("moe-router-topk", 2),
        "moe_intermediate_size": inner,
        "shared_expert_intermediate_size": f.number(
            "moe-shared-expert-intermediate-size", f.number("num-shared-experts", 0) * inner
        ),
        "shared_expert_gate": f.on("moe-shared-expert-gate"),
        "router_bias": f.on("moe-router-enable-expert-bias"),
        "n_group": f.number("moe-router-num-groups", 0),
        "topk_group": f.number("moe-router-group-topk", 0),
    }
    f.use("enable-shared-expert")
    bits = layer_bits(f.text("moe-layer-freq", "1"), layers)
    if bits is None or len(bits) != layers:
        f.warnings.append(f"--moe-layer-freq {f.text('moe-layer-freq')}: every layer is taken to have experts")
        return moe
    for period in range(1, min(layers, 64) + 1):
        for first in range(layers):
            if bits == [int(i >= first and (i + 1) % period == 0) for i in range(layers)]:
                return {**moe, "first_k_dense_replace": first, "moe_layer_freq": period}
    period = max(round(layers / max(sum(bits), 1)), 1)
    f.warnings.append(f"--moe-layer-freq {f.text('moe-layer-freq')}: taken as every {period}. layer")
    return {**moe, "moe_layer_freq": period}


def layer_bits(text: str, layers: int) -> list[int] | None:
    """1 for a layer with experts: "2", "([0]*3+[1]*58)", "([1]*3+[0]*2)*2", "[0,1,1]"; None where it cannot be read."""
    text = re.sub(r"[\s'\"]", "", text)
    if text.isdigit() and int(text):
        return [int(i % int(text) == 0) for i in range(layers)]
    if not re.fullmatch(r"[\d\[\](),+*]*", text) or len(text) > 4096:
        return None
    try:
        found, at = _sum(text, 0)
    except (IndexError, ValueError):
        return None
    return found if at == len(text) else None


def _sum(text: str, at: int) -> tuple[list[int], int]:
    found, at = _product(text, at)
    while at < len(text) and text[at] == "+":
        more, at = _product(text, at + 1)
        found = found + more
    return found, at


def _product(text: str, at: int) -> tuple[list[int], int]:
    if text[at] == "(":
        found, at = _sum(text, at + 1)
        at += 1
    else:
        end = text.index("]", at)
        found, at = [int(x) for x in text[at + 1 : end].split(",") if x], end + 1
    while at < len(text) and text[at] == "*":
        match = re.compile(r"\d+").match(text, at + 1)
        if match is None or len(found) * int(match[0]) > 100_000:
            raise ValueError(text)
        found, at = found * int(match[0]), match.end()
    return found, at
