"""Every family of the table against transformers' own class on the meta device: parameters are equal, at sizes of our own."""

from __future__ import annotations

import json
import warnings
from typing import Any

import pytest

from simpar.model.families import ALIASES, READERS, TABLE
from simpar.model.huggingface import read
from simpar.model.ledger import totals

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.23")
pytestmark = pytest.mark.torch

NO_DEFAULT = {"dbrx", "ministral", "nemotron", "lfm2_moe", "gemma3n"}
"""Their default configurations cannot be built by transformers 5.23 itself."""
CHANGES: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 2}, "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2, "head_dim": 64}, "hunyuan_v1_dense": {"head_dim": 64},
    "gemma3n_text": {"num_hidden_layers": 20}, "marian": {"decoder_vocab_size": 1500},
}  # fmt: skip
ALONE = ("vit", "deit", "dinov2", "dinov3_vit")
"""Encoders whose class has no head."""
WRAPPERS = (
    "llava", "llava_next", "llava_onevision", "gemma3", "gemma4", "internvl", "mistral3", "lfm2_vl", "idefics3", "smolvlm",
    "kimi_k25",
    "mllama", "llama4", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "glm4v", "glm4v_moe",
    "glm46v",
    "minimax_m3_vl", "mistral_large4", "paligemma", "cohere2_vision", "step3p7",
)  # fmt: skip
"""A decoder with a vision encoder and a projector."""


def class_of(model_type: str, config: Any) -> Any:
    """The class that trains a model of this type: with a head where it has one."""
    names = transformers.models.auto.modeling_auto
    base = {t: n for t, n in names.MODEL_MAPPING_NAMES.items() if t in ALONE}
    causal, masked = names.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, names.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    pairs, spoken = names.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES, names.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES
    seen = names.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    order = [pairs, spoken, seen, causal] if getattr(config, "is_encoder_decoder", False) else [seen, causal, pairs, spoken]
    for mapping in (*order, masked, base):
        if model_type in mapping:
            found = mapping[model_type]
            return getattr(transformers, found if isinstance(found, str) else found[0])
    return None


def counted(model_type: str, config: Any) -> int:
    """Parameters of transformers' model, tied ones once."""
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = class_of(model_type, config)._from_config(config)
        model.tie_weights()
    return sum(parameter.numel() for parameter in model.parameters())


def smaller(model_type: str) -> Any:
    """A configuration of few layers and words, the class's own in all the rest."""
    made = transformers.CONFIG_MAPPING[model_type]
    names, changes = getattr(made, "attribute_map", {}) or {}, CHANGES.get(model_type, {})
    wanted = {"num_hidden_layers": 7, "vocab_size": 1500, "pad_token_id": 0}
    sizes = {names.get(name, name): value for name, value in wanted.items() if hasattr(made, names.get(name, name))}
    try:
        return made(**{**sizes, **changes})
    except Exception:  # a class whose lists per layer are its defaults' length
        return made(**changes)


FAMILIES = sorted(t for t in {*TABLE, *READERS, *ALIASES} if t in transformers.CONFIG_MAPPING and t not in NO_DEFAULT)


def known() -> list[str]:
    """Families that have a class with parameters of their own, wrappers apart."""
    return [t for t in FAMILIES if t not in WRAPPERS and class_of(t, None) is not None]


@pytest.mark.parametrize("model_type", known())
def test_families_equal_transformers(model_type: str) -> None:
    config = smaller(model_type)
    table = json.loads(config.to_json_string(use_diff=False))
    assert totals(read(table, file=model_type), 128).parameters == counted(model_type, config)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", WRAPPERS)
def test_decoders_with_encoders_equal_transformers(model_type: str) -> None:
    config = transformers.CONFIG_MAPPING[model_type]()
    table = json.loads(config.to_json_string(use_diff=False))
    assert totals(read(table, file=model_type), 128).parameters == counted(model_type, config)
