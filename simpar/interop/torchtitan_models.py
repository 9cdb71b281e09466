"""torchtitan's models: name and flavor -> the model they stand for (torchtitan/models/*, v0.1 to v0.2.2 and main)."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, Final

from simpar.interop.meaning import DESCRIPTIVE
from simpar.model.huggingface import from_huggingface
from simpar.specs.architecture import TokenModel
from simpar.specs.model import TransformerSpec
from simpar.specs.models_io import load_model

Key = tuple[str, str]


def _llama(dim: int, layers: int, heads: int, kv: int, inner: int, vocabulary: int = 128256, tied: bool = False) -> dict[str, Any]:
    return {
        "hidden_size": dim, "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv,
        "head_dim": dim // heads, "intermediate_size": inner, "vocab_size": vocabulary, "max_position_embeddings": 131072,
        "tie_word_embeddings": tied,
    }  # fmt: skip


def _qwen(dim: int, layers: int, heads: int, inner: int, tied: bool) -> dict[str, Any]:
    return {
        "hidden_size": dim, "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": 8, "head_dim": 128,
        "intermediate_size": inner, "vocab_size": 151936, "max_position_embeddings": 40960, "qk_norm": True,
        "tie_word_embeddings": tied,
    }  # fmt: skip


def _deepseek(dim: int, layers: int, heads: int, inner: int, vocabulary: int, moe: dict[str, Any]) -> dict[str, Any]:
    return {
        "hidden_size": dim, "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": heads,
        "head_dim": 192, "intermediate_size": inner, "vocab_size": vocabulary, "max_position_embeddings": 16384,
        "mla": {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
        "moe": {**moe, "router_bias": True, "first_k_dense_replace": 1},
    }  # fmt: skip


def dense_qwen35(dim: int, layers: int, heads: int, kv: int, inner: int, values: int, vision: tuple[int, ...]) -> dict[str, Any]:
    """A dense Qwen3.5 in Hugging Face's words; torchtitan ties no head to an embedding.

    Args:
        values: value heads of the gated delta net.
        vision: width, feed-forward's width, layers and heads of the vision encoder.
    """
    sizes = dict(zip(("hidden_size", "intermediate_size", "depth", "num_heads"), vision, strict=True))
    return {
        "model_type": "qwen3_5", "tie_word_embeddings": False,
        "text_config": {
            "model_type": "qwen3_5_text", "hidden_size": dim, "num_hidden_layers": layers, "num_attention_heads": heads,
            "num_key_value_heads": kv, "head_dim": 256, "intermediate_size": inner, "vocab_size": 248320,
            "full_attention_interval": 4, "linear_num_key_heads": 16, "linear_num_value_heads": values,
            "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        },
        "vision_config": {
            **sizes, "model_type": "qwen3_5", "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2,
            "out_hidden_size": dim, "num_position_embeddings": 2304,
        },
    }  # fmt: skip


_LARGE: Final = (1152, 4304, 27, 16)

_FLAVORS: Final[dict[Key, str | dict[str, Any]]] = {
    ("llama3", "debugmodel"): _llama(256, 6, 16, 16, 768, 2048),
    ("llama3", "1B"): _llama(2048, 16, 32, 8, 8192, tied=True),
    ("llama3", "3B"): _llama(3072, 28, 24, 8, 8192, tied=True),
    ("llama3", "8B"): "llama3.1-8b",
    ("llama3", "70B"): "llama3.1-70b",
    ("llama3", "405B"): "llama3.1-405b",
    ("qwen3", "0.6B"): _qwen(1024, 28, 16, 3072, True),
    ("qwen3", "1.7B"): _qwen(2048, 28, 16, 6144, True),
    ("qwen3", "4B"): _qwen(2560, 36, 32, 9728, True),
    ("qwen3", "8B"): _qwen(4096, 36, 32, 12288, False),
    ("qwen3", "14B"): _qwen(5120, 40, 40, 17408, False),
    ("qwen3", "32B"): "qwen3-32b",
    ("qwen3", "30B-A3B"): "qwen3-30b-a3b",
    ("qwen3", "235B-A22B"): "qwen3-235b-a22b",
    ("deepseek_v3", "16B"): _deepseek(2048, 27, 16, 10944, 102400, {
        "num_experts": 64, "num_experts_per_tok": 6, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 2816}),
    ("deepseek_v3", "236B"): "deepseek-v2",
    ("deepseek_v3", "671B"): "deepseek-v3",
    ("gpt_oss", "20b"): "gpt-oss-20b",
    ("gpt_oss", "120b"): "gpt-oss-120b",
    ("qwen3_5", "0.8B"): dense_qwen35(1024, 24, 8, 2, 3584, 16, (768, 3072, 12, 12)),
    ("qwen3_5", "2B"): dense_qwen35(2048, 24, 8, 2, 6144, 16, (1024, 4096, 24, 16)),
    ("qwen3_5", "4B"): dense_qwen35(2560, 32, 16, 4, 9216, 32, (1024, 4096, 24, 16)),
    ("qwen3_5", "9B"): dense_qwen35(4096, 32, 16, 4, 12288, 32, _LARGE),
    ("qwen3_5", "27B"): "qwen3.5-27b",
    ("qwen3_5", "35B-A3B"): "qwen3.5-35b-a3b",
    ("qwen3_5", "122B-A10B"): "qwen3.5-122b-a10b",
    ("qwen3_5", "397B-A17B"): "qwen3.5-397b-a17b",
    ("kimi_k2_5", "Kimi-K2.5"): "kimi-k2.5",
    ("llama2", "7B"): "llama2-7b",
    ("llama2", "13B"): "llama2-13b",
    ("llama2", "70B"): "llama2-70b",
}  # fmt: skip
_GONE: Final = ("llama2",)
"""Models of 2024 that later releases do not have."""
PLAIN_ONLY: Final = ("gpt_oss",)
"""Models since v0.2.2 without a pipeline or context parallelism there (torchtitan/models/gpt_oss: pipelining_fn = None, an error in
GptOssModelArgs.update_from_config)."""


MAIN_ONLY: Final = {"qwen3_5": "qwen3_5", "kimi_k2_5": "kimi_k2_7"}
"""Models of the main branch after v0.2.2 and their packages: a vision encoder and a decoder, without context parallelism
(torchtitan/models/*/parallelize.py at b5bcd76c6, August 2026)."""


@lru_cache(maxsize=64)
def model_of(key: Key) -> TokenModel:
    """The model of a name and flavor; training configurations up to v0.2.2 have no multi-token prediction."""
    entry = _FLAVORS[key]
    if isinstance(entry, str):
        model = load_model(entry)
    elif "model_type" in entry:
        model = from_huggingface(entry, file=f"{key[0]} {key[1]}").model_copy(update={"name": f"{key[0]} {key[1]}"})
    else:
        model = TransformerSpec(name=f"{key[0]} {key[1]}", **entry)
    assert isinstance(model, TokenModel)
    return model.model_copy(update={"num_nextn_predict_layers": 0}) if model.num_nextn_predict_layers else model


def find_key(name: str, flavor: str) -> Key | None:
    """The table's key for what a file names; attention variants ("8B_flex") are the same model."""
    plain = re.sub(r"_(flex|varlen|sdpa)(_attn|_flash|_triton)?$", "", flavor)
    return next((key for key in _FLAVORS if key[0] == name and key[1].lower() == plain.lower()), None)


def model_table(key: Key) -> str | dict[str, Any]:
    """The model as a scenario writes it: a preset's name, or a table."""
    entry, model = _FLAVORS[key], model_of(key)
    if isinstance(entry, str) and load_model(entry) == model:
        return entry
    return {k: v for k, v in model.model_dump(exclude_none=True).items() if k not in DESCRIPTIVE - {"name"}}


def _shape(model: TokenModel) -> dict[str, Any]:
    if not isinstance(model, TransformerSpec):
        free = {*DESCRIPTIVE, "max_position_embeddings", "num_nextn_predict_layers"}
        return {k: v for k, v in model.model_dump().items() if k not in free}
    free = {*DESCRIPTIVE, "max_position_embeddings", "num_nextn_predict_layers", *(["head_dim"] if model.mla else [])}
    if all(model.is_moe_layer(i) for i in range(model.num_hidden_layers)):
        free.add("intermediate_size")  # the width of dense layers, of which there is none
    return {k: v for k, v in model.model_dump().items() if k not in free}


def key_of(model: TokenModel) -> Key | None:
    """The name and flavor of a model; None where torchtitan has none of its shape."""
    own = _shape(model)
    return next((key for key in _FLAVORS if key[0] not in _GONE and _flavor_shape(key) == own), None)


@lru_cache(maxsize=64)
def _flavor_shape(key: Key) -> dict[str, Any]:
    return _shape(model_of(key))


def known_flavors(exported: bool = True) -> list[str]:
    """Names and flavors, for messages."""
    return [f"{name} {flavor}" for name, flavor in _FLAVORS if not exported or name not in _GONE]
