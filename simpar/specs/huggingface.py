"""Hugging Face config.json -> TransformerSpec, for the families listed in `FAMILIES`; nothing is guessed.

Reads the key names of transformers 4 and 5 (5 renames qwen3_moe's `num_experts` to `num_local_experts`, moves
`rope_theta` into `rope_parameters` and `torch_dtype` to `dtype`; the last two do not change the work). Where a key is
optional in transformers, its default there is used and stands in the family's function; sizes are always required.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from simpar.errors import InputError, Violation
from simpar.specs.base import validate
from simpar.specs.model import TransformerSpec

_ACTIVATIONS: Final = {
    "silu": "silu", "swish": "silu", "relu": "relu", "relu2": "squared_relu", "gelu": "gelu", "gelu_new": "gelu",
    "gelu_fast": "gelu", "gelu_pytorch_tanh": "gelu", "gelu_python": "gelu",
}  # fmt: skip


class _Reader:
    """The keys of one config.json, under any of their names; problems are collected, not raised one by one."""

    def __init__(self, config: dict[str, Any], file: str) -> None:
        self.config, self.file = config, file
        self.violations: list[Violation] = []

    def get(self, *names: str, default: Any = None) -> Any:
        """The first of `names` that is present and not null."""
        for name in names:
            if self.config.get(name) is not None:
                return self.config[name]
        return default

    def size(self, *names: str) -> int:
        """A required positive integer; 1 with a violation noted where there is none."""
        value = self.get(*names)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
        rule = "is required" if value is None else "must be a positive integer"
        right = f"also read as {', '.join(names[1:])}" if len(names) > 1 else ""
        self.violations.append(Violation(names[0], value, rule, right, self.file))
        return 1

    def only(self, name: str, value: Any, right: Any, why: str) -> None:
        """Note a violation unless `value` equals `right`."""
        if value != right:
            self.violations.append(Violation(name, value, why, f"only {right!r} can be read", self.file))

    def activation(self, *names: str, default: str) -> str:
        """simpar's name of the activation function."""
        name = self.get(*names, default=default)
        if name not in _ACTIVATIONS:
            known = ", ".join(_ACTIVATIONS)
            self.violations.append(Violation(names[0], name, "unknown activation", f"one of {known}", self.file))
        return _ACTIVATIONS.get(name, "silu")


def from_huggingface(config: dict[str, Any], *, file: str = "config.json") -> TransformerSpec:
    """The transformer that a config.json describes.

    Raises:
        InputError: an unknown `model_type`, or every missing or wrong key, together.
    """
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        rule = "is required" if model_type is None else "a model type that simpar cannot read"
        known = f"supported: {', '.join(sorted(FAMILIES))}"
        raise InputError([Violation("model_type", model_type, rule, known, file)])
    reader = _Reader(config, file)
    fields = FAMILIES[model_type](reader)
    if reader.violations:
        raise InputError(reader.violations)
    name = str(config.get("_name_or_path") or model_type)
    return validate(TransformerSpec, {"name": name, "source": f"Hugging Face {file}", **fields}, file=file)


def _decoder(r: _Reader) -> dict[str, Any]:
    """What Llama and its descendants share: RoPE, RMSNorm, gated MLP, no biases."""
    hidden, heads = r.size("hidden_size"), r.size("num_attention_heads")
    return {
        "hidden_size": hidden,
        "intermediate_size": r.size("intermediate_size"),
        "num_hidden_layers": r.size("num_hidden_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": r.get("num_key_value_heads", default=heads),
        "head_dim": r.get("head_dim", default=hidden // heads or 1),
        "vocab_size": r.size("vocab_size"),
        "max_position_embeddings": r.get("max_position_embeddings", default=2048),
        "tie_word_embeddings": r.get("tie_word_embeddings", default=False),
        "activation": r.activation("hidden_act", default="silu"),
    }


def _llama(r: _Reader) -> dict[str, Any]:
    bias = r.get("attention_bias", default=False)
    mlp_bias = r.get("mlp_bias", default=False)
    return {**_decoder(r), "attention_bias": bias, "attention_out_bias": bias, "mlp_bias": mlp_bias}


def _mistral(r: _Reader) -> dict[str, Any]:
    return {**_decoder(r), "num_key_value_heads": _kv_heads(r), "sliding_window": r.get("sliding_window")}


def _kv_heads(r: _Reader) -> int:
    """Required here: the defaults of these families are one model's, not a rule. Null means multi-head attention."""
    if "num_key_value_heads" in r.config and r.config["num_key_value_heads"] is None:
        return r.size("num_attention_heads")
    return r.size("num_key_value_heads")


def _mixtral(r: _Reader) -> dict[str, Any]:
    fields = _mistral(r)
    moe = {
        "num_experts": r.size("num_local_experts", "num_experts"),
        "num_experts_per_tok": r.size("num_experts_per_tok"),
        "moe_intermediate_size": fields["intermediate_size"],
    }
    return {**fields, "moe": moe}


def _sliding_window(r: _Reader) -> int | None:
    """Qwen: the window applies only where it is switched on."""
    window: int | None = r.get("sliding_window") if r.get("use_sliding_window", default=False) else None
    return window


def _qwen2(r: _Reader) -> dict[str, Any]:
    """Biases on Q, K and V always, on the output projection never."""
    fields = {**_decoder(r), "num_key_value_heads": _kv_heads(r), "sliding_window": _sliding_window(r)}
    return {**fields, "attention_bias": True}


def _qwen3(r: _Reader) -> dict[str, Any]:
    bias = r.get("attention_bias", default=False)
    return {
        **_decoder(r),
        "num_key_value_heads": _kv_heads(r),
        "head_dim": r.get("head_dim", default=128),
        "sliding_window": _sliding_window(r),
        "qk_norm": True,
        "attention_bias": bias,
        "attention_out_bias": bias,
    }


def _qwen_experts(r: _Reader) -> dict[str, Any]:
    dense = sorted(r.get("mlp_only_layers", default=[]))
    r.only("mlp_only_layers", dense, list(range(len(dense))), "dense layers must be the leading ones")
    return {
        "num_experts": r.size("num_experts", "num_local_experts"),
        "num_experts_per_tok": r.size("num_experts_per_tok"),
        "moe_intermediate_size": r.size("moe_intermediate_size"),
        "moe_layer_freq": r.get("decoder_sparse_step", default=1),
        "first_k_dense_replace": len(dense),
    }


def _qwen2_moe(r: _Reader) -> dict[str, Any]:
    shared = r.size("shared_expert_intermediate_size")
    moe = {**_qwen_experts(r), "shared_expert_intermediate_size": shared, "shared_expert_gate": True}
    return {**_qwen2(r), "attention_bias": r.get("qkv_bias", default=True), "moe": moe}


def _qwen3_moe(r: _Reader) -> dict[str, Any]:
    fields = _qwen3(r)
    head_dim = r.get("head_dim", default=fields["hidden_size"] // fields["num_attention_heads"])
    return {**fields, "head_dim": head_dim, "moe": _qwen_experts(r)}


def _deepseek(r: _Reader) -> dict[str, Any]:
    fields = _decoder(r)
    r.only("attention_bias", r.get("attention_bias", default=False), False, "biased latent attention")
    r.only("moe_layer_freq", r.get("moe_layer_freq", default=1), 1, "experts must be in every later layer")
    nope, rope = r.size("qk_nope_head_dim"), r.size("qk_rope_head_dim")
    mla = {
        "q_lora_rank": r.get("q_lora_rank", default=0),
        "kv_lora_rank": r.size("kv_lora_rank"),
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope,
        "v_head_dim": r.size("v_head_dim"),
    }
    width = r.size("moe_intermediate_size")
    moe = {
        "num_experts": r.size("n_routed_experts", "num_local_experts", "num_experts"),
        "num_experts_per_tok": r.size("num_experts_per_tok"),
        "moe_intermediate_size": width,
        "shared_expert_intermediate_size": r.get("n_shared_experts", default=0) * width,
        "first_k_dense_replace": r.get("first_k_dense_replace", default=0),
        "n_group": r.get("n_group", default=0),
        "topk_group": r.get("topk_group", default=0),
    }
    heads = fields["num_attention_heads"]
    return {**fields, "num_key_value_heads": heads, "head_dim": nope + rope, "mla": mla, "moe": moe}


def _deepseek_v3(r: _Reader) -> dict[str, Any]:
    fields = _deepseek(r)
    mtp = r.get("num_nextn_predict_layers", default=0)
    return {**fields, "moe": {**fields["moe"], "router_bias": True}, "num_nextn_predict_layers": mtp}


def _gpt_block(hidden: int, heads: int) -> dict[str, Any]:
    """What GPT-2 and its descendants share: LayerNorm, two-matrix MLP, biases everywhere, multi-head attention."""
    return {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": hidden // heads or 1,
        "gated_mlp": False,
        "norm": "layernorm",
        "attention_bias": True,
        "attention_out_bias": True,
        "mlp_bias": True,
    }


def _gpt2(r: _Reader) -> dict[str, Any]:
    hidden = r.size("n_embd", "hidden_size")
    return {
        **_gpt_block(hidden, r.size("n_head", "num_attention_heads")),
        "intermediate_size": r.get("n_inner", default=4 * hidden),
        "num_hidden_layers": r.size("n_layer", "num_hidden_layers"),
        "vocab_size": r.size("vocab_size"),
        "max_position_embeddings": r.size("n_positions", "max_position_embeddings"),
        "position": "learned",
        "activation": r.activation("activation_function", default="gelu_new"),
        "tie_word_embeddings": r.get("tie_word_embeddings", default=True),
    }


def _gpt_neox(r: _Reader) -> dict[str, Any]:
    bias = r.get("attention_bias", default=True)
    return {
        **_gpt_block(r.size("hidden_size"), r.size("num_attention_heads")),
        "attention_bias": bias,
        "attention_out_bias": bias,
        "intermediate_size": r.size("intermediate_size"),
        "num_hidden_layers": r.size("num_hidden_layers"),
        "vocab_size": r.size("vocab_size"),
        "max_position_embeddings": r.get("max_position_embeddings", default=2048),
        "activation": r.activation("hidden_act", default="gelu"),
        "parallel_block": r.get("use_parallel_residual", default=True),
        "tie_word_embeddings": r.get("tie_word_embeddings", default=False),
    }


def _bloom(r: _Reader) -> dict[str, Any]:
    hidden = r.size("hidden_size", "n_embed")
    return {
        **_gpt_block(hidden, r.size("n_head", "num_attention_heads")),
        "intermediate_size": r.get("n_inner", default=4 * hidden),
        "num_hidden_layers": r.size("n_layer", "num_hidden_layers"),
        "vocab_size": r.size("vocab_size"),
        "max_position_embeddings": r.get("seq_length", default=2048),
        "position": "alibi",
        "activation": "gelu",
        "embedding_norm": True,
        "tie_word_embeddings": r.get("tie_word_embeddings", default=True),
    }


def _gemma(r: _Reader) -> dict[str, Any]:
    bias = r.get("attention_bias", default=False)
    return {
        **_decoder(r),
        "num_key_value_heads": _kv_heads(r),
        "head_dim": r.get("head_dim", default=256),
        "activation": r.activation("hidden_activation", "hidden_act", default="gelu_pytorch_tanh"),
        "tie_word_embeddings": r.get("tie_word_embeddings", default=True),
        "attention_bias": bias,
        "attention_out_bias": bias,
    }


def _gemma2(r: _Reader) -> dict[str, Any]:
    """Every other layer has a sliding window; the spec has none per layer, so all are taken as full attention."""
    return {**_gemma(r), "block_norms": 4}


FAMILIES: Final[dict[str, Callable[[_Reader], dict[str, Any]]]] = {
    "bloom": _bloom,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek_v3,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "llama": _llama,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "qwen2": _qwen2,
    "qwen2_moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
}
"""`model_type` -> reader. To add a family: one function and one line here."""
