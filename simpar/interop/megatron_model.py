"""The model among Megatron-LM's flags: a table of flags and fields, read both ways."""

from __future__ import annotations

from typing import Any

from simpar.errors import Violation
from simpar.specs.model import TransformerSpec
from simpar.specs.models_io import load_model, model_names

_NUMBERS = (
    ("num-layers", "num_hidden_layers"),
    ("hidden-size", "hidden_size"),
    ("ffn-hidden-size", "intermediate_size"),
    ("num-attention-heads", "num_attention_heads"),
    ("max-position-embeddings", "max_position_embeddings"),
    ("vocab-size", "vocab_size"),
)
_ACTIVATIONS = {"silu": "--swiglu", "squared_relu": "--squared-relu"}


def model_flags(model: TransformerSpec) -> list[str]:
    """Flags of a transformer."""
    flags = [f"--{flag} {getattr(model, name)}" for flag, name in _NUMBERS]
    if model.num_key_value_heads != model.num_attention_heads:
        flags += ["--group-query-attention", f"--num-query-groups {model.num_key_value_heads}"]
    if model.mla is None:
        flags.append(f"--kv-channels {model.head_dim}")
    if model.gated_mlp and model.activation == "silu":
        flags.append("--swiglu")
    elif model.activation == "squared_relu":
        flags.append("--squared-relu")
    flags.append("--normalization " + ("RMSNorm" if model.norm == "rmsnorm" else "LayerNorm"))
    position = {"rope": "rope", "learned": "learned_absolute", "relative": "relative", "none": "none"}.get(model.position, "none")
    flags.append(f"--position-embedding-type {position}")
    if not model.tie_word_embeddings:
        flags.append("--untie-embeddings-and-output-weights")
    if not model.mlp_bias:
        flags.append("--disable-bias-linear")
    if model.attention_bias and not model.mlp_bias:
        flags.append("--add-qkv-bias")
    if model.qk_norm:
        flags.append("--qk-layernorm")
    flags.append("--tokenizer-type NullTokenizer")
    return [*flags, *_mla_flags(model), *_moe_flags(model)]


def _mla_flags(model: TransformerSpec) -> list[str]:
    mla = model.mla
    if mla is None:
        return []
    query = [f"--q-lora-rank {mla.q_lora_rank}"] if mla.q_lora_rank else []
    return [
        "--multi-latent-attention",
        *query,
        f"--kv-lora-rank {mla.kv_lora_rank}",
        f"--qk-head-dim {mla.qk_nope_head_dim}",
        f"--qk-pos-emb-head-dim {mla.qk_rope_head_dim}",
        f"--v-head-dim {mla.v_head_dim}",
    ]


def _moe_flags(model: TransformerSpec) -> list[str]:
    moe, flags = model.moe, []
    if model.num_nextn_predict_layers:
        flags.append(f"--mtp-num-layers {model.num_nextn_predict_layers}")
    if moe is None:
        return flags
    flags += [
        f"--num-experts {moe.num_experts}",
        f"--moe-router-topk {moe.num_experts_per_tok}",
        f"--moe-ffn-hidden-size {moe.moe_intermediate_size}",
        "--moe-grouped-gemm",
    ]
    if moe.shared_expert_intermediate_size:
        flags.append(f"--moe-shared-expert-intermediate-size {moe.shared_expert_intermediate_size}")
    if moe.shared_expert_gate:
        flags.append("--moe-shared-expert-gate")
    if moe.router_bias:
        flags.append("--moe-router-enable-expert-bias")
    if moe.n_group:
        flags += [f"--moe-router-num-groups {moe.n_group}", f"--moe-router-group-topk {moe.topk_group}"]
    if moe.first_k_dense_replace:
        dense, rest = moe.first_k_dense_replace, model.num_hidden_layers - moe.first_k_dense_replace
        flags.append(f"--moe-layer-freq '([0]*{dense}+[1]*{rest})'")
    elif moe.moe_layer_freq > 1:
        flags.append(f"--moe-layer-freq {moe.moe_layer_freq}")
    return flags


def model_from_flags(flags: dict[str, list[str]], wrong: list[Violation], file: str) -> str | dict[str, Any]:
    """The preset whose flags these are, or a model table.

    What cannot be read is added to `wrong`.
    """
    for name in model_names():
        preset = load_model(name)
        if isinstance(preset, TransformerSpec) and not preset.num_decoder_layers and _same(preset, flags):
            return name
    return _table(flags, wrong, file)


def _same(model: TransformerSpec, flags: dict[str, list[str]]) -> bool:
    """Whether every flag that the model would be written with stands there with this value, and no other model flag."""
    mine: dict[str, list[str]] = {}
    for flag in model_flags(model):
        name, *values = flag[2:].split(" ")
        mine[name] = [v.strip("'\"") for v in values]
    if not {"num-layers", "hidden-size", "num-attention-heads"} <= set(flags):
        return False
    free = {"tokenizer-type", "kv-channels", "vocab-size", "max-position-embeddings", "moe-grouped-gemm", "position-embedding-type"}
    known = set(mine) | {
        "group-query-attention",
        "swiglu",
        "num-experts",
        "multi-latent-attention",
        "mtp-num-layers",
        "qk-layernorm",
        "untie-embeddings-and-output-weights",
        "disable-bias-linear",
        "add-qkv-bias",
        "squared-relu",
        "moe-shared-expert-intermediate-size",
    }
    return all(
        (name in flags) == (name in mine) and (name not in mine or flags[name] == mine[name]) for name in known - free
    ) and all(flags[name] == mine[name] for name in free if name in flags and name in mine and name != "tokenizer-type")


def _table(flags: dict[str, list[str]], wrong: list[Violation], file: str) -> dict[str, Any]:
    def number(name: str, default: int | None = None) -> int | None:
        values = flags.get(name)
        if not values:
            return default
        try:
            return int(values[0])
        except ValueError:
            wrong.append(Violation(f"--{name}", values[0], "is no whole number", file=file))
            return default

    hidden, heads, layers = number("hidden-size"), number("num-attention-heads"), number("num-layers")
    for name, value in (("hidden-size", hidden), ("num-attention-heads", heads), ("num-layers", layers)):
        if value is None:
            wrong.append(Violation(f"--{name}", None, "is missing", "the flag, as Megatron-LM takes it", file))
    if not (hidden and heads and layers):
        return {}
    swiglu, squared = "swiglu" in flags, "squared-relu" in flags
    table: dict[str, Any] = {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "intermediate_size": number("ffn-hidden-size", 4 * hidden),
        "vocab_size": number("vocab-size", 50304),
        "num_key_value_heads": number("num-query-groups", heads) if "group-query-attention" in flags else heads,
        "head_dim": number("kv-channels", hidden // heads),
        "max_position_embeddings": number("max-position-embeddings", number("seq-length", 8192)),
        "gated_mlp": swiglu,
        "activation": "silu" if swiglu else "squared_relu" if squared else "gelu",
        "norm": "rmsnorm" if flags.get("normalization", [""])[0] == "RMSNorm" else "layernorm",
        "position": {"rope": "rope", "learned_absolute": "learned", "relative": "relative", "none": "none"}.get(
            flags.get("position-embedding-type", ["rope" if "use-rotary-position-embeddings" in flags else "learned_absolute"])[0],
            "rope",
        ),
        "tie_word_embeddings": "untie-embeddings-and-output-weights" not in flags,
        "mlp_bias": "disable-bias-linear" not in flags,
        "attention_out_bias": "disable-bias-linear" not in flags,
        "attention_bias": "disable-bias-linear" not in flags or "add-qkv-bias" in flags,
        "qk_norm": "qk-layernorm" in flags,
    }
    if mtp := number("mtp-num-layers", 0):
        table["num_nextn_predict_layers"] = mtp
    if "multi-latent-attention" in flags:
        nope, rope = number("qk-head-dim", 128) or 128, number("qk-pos-emb-head-dim", 64) or 64
        table["mla"] = {
            "q_lora_rank": number("q-lora-rank", 0),
            "kv_lora_rank": number("kv-lora-rank", 32),
            "qk_nope_head_dim": nope,
            "qk_rope_head_dim": rope,
            "v_head_dim": number("v-head-dim", 128),
        }
        table["head_dim"] = nope + rope
    if experts := number("num-experts"):
        table["moe"] = _moe_table(flags, number, experts, table["intermediate_size"])
    return table


def _moe_table(flags: dict[str, list[str]], number: Any, experts: int, width: int) -> dict[str, Any]:
    moe: dict[str, Any] = {
        "num_experts": experts,
        "num_experts_per_tok": number("moe-router-topk", 2),
        "moe_intermediate_size": number("moe-ffn-hidden-size", width),
        "shared_expert_intermediate_size": number("moe-shared-expert-intermediate-size", 0),
        "shared_expert_gate": "moe-shared-expert-gate" in flags,
        "router_bias": "moe-router-enable-expert-bias" in flags,
        "n_group": number("moe-router-num-groups", 0),
        "topk_group": number("moe-router-group-topk", 0),
    }
    frequency = flags.get("moe-layer-freq", ["1"])[0].replace(" ", "")
    if frequency.isdigit():
        moe["moe_layer_freq"] = int(frequency)
    elif frequency.startswith("([0]*"):
        moe["first_k_dense_replace"] = int(frequency[5:].split("+")[0])
    return moe


__all__ = ["model_flags", "model_from_flags"]
