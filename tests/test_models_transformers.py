"""Every family of the table against transformers' own class on the meta device: parameters are equal, at sizes of our own."""

from __future__ import annotations

import copy
import json
import re
import warnings
from functools import cache
from typing import Any

import pytest

from simpar.errors import InputError
from simpar.model.bert import BERT_LIKE
from simpar.model.families import ALIASES, READERS, TABLE
from simpar.model.huggingface import read
from simpar.model.ledger import entries, totals
from simpar.model.towers import MOBILENETS
from simpar.specs.mixers import ExpertsSpec

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.24")
pytestmark = pytest.mark.torch

UNBUILT = {"dbrx", "ministral", "nemotron", "lfm2_moe", "gemma3n"}
"""Their default configurations cannot be built by transformers 5.24 itself."""
QWEN4 = {"indexer_n_heads": 8, "indexer_kv_heads": 1, "indexer_head_dim": 256, "indexer_budget": 512, "indexer_compress_ratio": 16}
CHANGES: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 2}, "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2, "head_dim": 64}, "hunyuan_v1_dense": {"head_dim": 64},
    "gemma3n_text": {"num_hidden_layers": 20}, "marian": {"decoder_vocab_size": 1500}, "esm": {"vocab_size": 33},
    "dory": {"n_input_layers": 2, "n_output_layers": 2},
    "qwen4_exp": {"text_config": {**QWEN4, "num_hidden_layers": 4}},
    "qwen4_exp_text": {**QWEN4, "ple_layer_ids": [2, 5], "ngram_vocab_size_base": 1000, "eos_token_id": 3},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
}  # fmt: skip
PARTS: dict[str, dict[str, Any]] = {
    "aya_vision": {"vision_config": {"model_type": "siglip_vision_model", "hidden_size": 1152, "num_attention_heads": 16}},
    "qwen4_exp": CHANGES["qwen4_exp"],
    "cohere_compass": {"text_config": CHANGES["cohere_compass_text"]},
}
"""What the defaults of whole models need to be built."""
WHOLE = {"zamba"}
"""Families that transformers builds at no other depth."""
COMPUTED = (
    "afmoe", "apertus", "arcee", "aria_text", "bailing_hybrid", "bamba", "cohere", "cohere2", "cohere2_moe",
    "deberta", "deberta-v2", "diffllama", "doge", "ernie4_5_moe", "esmc", "eurobert", "falcon", "falcon_mamba",
    "flex_olmo", "granite", "granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared", "hy_v4",
    "hyperclovax", "jais2", "jamba", "llama", "mamba", "minicpm3", "mistral", "nanochat", "nomic_bert", "olmo",
    "olmo2", "olmo3", "olmo_hybrid", "olmoe", "opt", "phi", "phi3", "recurrent_gemma", "roformer", "rwkv", "xlstm",
)  # fmt: skip
"""Families whose classes compute sizes from others: heads of keys, widths of heads, steps of a state space."""
OTHER_WORK = {"albert", "dory", "hrm_text", "zamba", "zamba2", "longcat_flash", "led", "longformer", "xlnet"}
"""Families whose tokens meet some weights more than once (shared layers) or not at all (experts without weights, global tokens,
projections of positions)."""
HEADS = ("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "IMAGE_TEXT_TO_TEXT", "MASKED_LM", "CTC")
"""What people train, by the heads of transformers' classes."""
REASONS: dict[str, tuple[str, ...]] = {
    "an encoder or a projector that no table has": (
        "apertus1p5", "blip", "blip-2", "chameleon", "cosmos3_edge", "deepseek_ocr2",
        "deepseek_vl_hybrid", "emu3", "evolla", "fast_vlm", "florence2", "granite4_vision", "granite_docling",
        "granite_speech", "granite_speech_plus", "hunyuan_vl", "hy_v4_vl", "idefics", "inkling2", "inkling2_loop",
        "inkling_mm_model", "instructblip", "instructblipvideo", "janus", "kosmos-2", "kosmos-2.5", "lfm3_vl",
        "minicpm_ocr", "muse_spark", "nemo_speechlm", "nemotron_h_omni", "omniasr",
        "perception_lm", "pix2struct", "pp_chart2table", "pp_formulanet", "udop",
        "unlimited_ocr", "vibevoice", "vibevoice_asr",
    ),
    "several models in one: speech, music, actions": (
        "canary", "cohere_asr", "dia", "encoder-decoder", "fun_asr_nano", "kyutai_speech_to_text", "moonshine",
        "moonshine_streaming", "moshi", "musicgen", "musicgen_melody", "pi0", "pop2piano", "seamless_m4t",
        "seamless_m4t_v2", "speech-encoder-decoder", "speecht5", "vision-encoder-decoder",
    ),
    "convolution and attention in one layer over sound": (
        "granite_speech5_ctc", "lasr_ctc", "omniasr_ctc", "sew", "sew-d",
    ),
    "layers of its own, before 2022": (
        "convbert", "fsmt", "funnel", "luke", "mobilebert", "pegasus_x", "perceiver", "prophetnet", "reformer",
        "squeezebert", "tapas",
    ),
    "layers of its own": (
        "blt", "diffusion_gemma", "inkling2_loop_text", "neomme", "t5gemma2",
    ),
    "a default that leaves out a size": (
        "dbrx", "gemma4_unified_assistant",
    ),
}  # fmt: skip
"""Families with such a head that are refused. A family that is read does not belong here; a new one is read or gets a line."""
NOT_READ = {t for types in REASONS.values() for t in types}


@cache
def mappings() -> dict[str, dict[str, Any]]:
    names = transformers.models.auto.modeling_auto
    found = {head: dict(getattr(names, f"MODEL_FOR_{head}_MAPPING_NAMES")) for head in HEADS}
    return {**found, "": dict(names.MODEL_MAPPING_NAMES)}


def trained() -> list[str]:
    """Model types of transformers that have a head."""
    return sorted({t for head in HEADS for t in mappings()[head] if t in transformers.CONFIG_MAPPING})


def class_of(model_type: str, config: Any) -> Any:
    """The class that trains a model of this type: with a head where it has one."""
    pairs, seen = ["SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ"], ["IMAGE_TEXT_TO_TEXT", "CAUSAL_LM"]
    order = pairs + seen if getattr(config, "is_encoder_decoder", False) else seen + pairs
    if model_type in BERT_LIKE:
        order = ["MASKED_LM", "CAUSAL_LM"]
    for head in (*order, "MASKED_LM", "CTC", ""):
        found = mappings()[head].get(model_type)
        if found:
            return getattr(transformers, found if isinstance(found, str) else found[0])
    return None


def built(model_type: str, config: Any) -> Any:
    """transformers' model without memory, tied weights once."""
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = class_of(model_type, config)._from_config(config)
        model.tie_weights()
    return model


def counted(model_type: str, config: Any) -> int:
    """Parameters of transformers' model, tied ones once."""
    return sum(parameter.numel() for parameter in built(model_type, config).parameters())


def applied(model: Any, routed: dict[int, float], head: int) -> float:
    """Two FLOPs for every weight that a token meets: matrices once, of experts the routed share, look-ups and norms not.

    Args:
        model: of transformers.
        routed: number of experts -> share of them that a token is routed to.
        head: weights of a head that is tied to the embedding.
    """
    found = float(head)
    for name, parameter in model.named_parameters():
        owner = type(model.get_submodule(name.rpartition(".")[0])).__name__
        if head and name.startswith("lm_head") and parameter.numel() == head:
            continue  # the embedding under its other name
        if (
            parameter.dim() < 2
            or re.search("Embed|Norm", owner)
            or re.search(r"A_log$|bonus$|shared\.weight|pooler|positions", name)
        ):
            continue
        inside = "shared" not in name and ("expert" in name or parameter.dim() == 3)
        share = routed.get(parameter.shape[0], 1.0) if inside and parameter.dim() == 3 else 1.0
        if inside and parameter.dim() == 2 and "experts." in name:
            share = next(iter(routed.values()), 1.0)
        found += share * parameter.numel()
    return 2.0 * found


def made(model_type: str, **wanted: int) -> Any:
    """A configuration of few layers and words, with `wanted` under the names that its class has for it."""
    kind = transformers.CONFIG_MAPPING[model_type]
    names, changes = getattr(kind, "attribute_map", {}) or {}, CHANGES.get(model_type, {})
    wanted = {} if model_type in WHOLE else {"num_hidden_layers": 7, "vocab_size": 1500, "pad_token_id": 0, **wanted}
    sizes = {names.get(name, name): value for name, value in wanted.items() if hasattr(kind, names.get(name, name))}
    try:
        return kind(**{**sizes, **changes})
    except Exception:  # a class whose lists per layer are its defaults' length
        return kind(**changes)


def written(config: Any, *, difference: bool) -> dict[str, Any]:
    """The file of `config`: everything, or what differs from its class (and the sizes), as files are published."""
    table: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    if not difference:
        return table
    stated = (
        "model_type",
        "hidden_size",
        "d_model",
        "n_embd",
        "num_hidden_layers",
        "n_layer",
        "num_attention_heads",
        "n_head",
        "vocab_size",
    )
    return {
        **{name: table[name] for name in (*stated, "vocab_size") if name in table},
        **json.loads(config.to_json_string(use_diff=True)),
    }


def nested(model_type: str) -> bool:
    """Whether a file of this type holds the files of several models."""
    return bool(getattr(transformers.CONFIG_MAPPING[model_type], "sub_configs", {}))


READ = sorted(t for t in {*TABLE, *READERS, *ALIASES, *trained()} - UNBUILT - NOT_READ if t in transformers.CONFIG_MAPPING)


def alone(model_type: str) -> bool:
    """Whether it is an encoder of images on its own, or a pair of encoders."""
    return READERS.get(model_type, object).__module__ == "simpar.model.alone"


ONE = [t for t in READ if not nested(t) and (t in trained() or (alone(t) and t in mappings()[""]))]


@pytest.mark.parametrize("model_type", ONE)
def test_families_equal_transformers(model_type: str) -> None:
    config = made(model_type)
    model, whole = read(written(config, difference=False), file=model_type), built(model_type, config)
    assert totals(model, 128).parameters == sum(parameter.numel() for parameter in whole.parameters())
    if model_type in OTHER_WORK:
        return
    experts = [branch for branch in model.branches() if isinstance(branch, ExpertsSpec)]
    routed = {e.num_experts: e.num_experts_per_tok / (e.num_experts + e.zero_experts) for e in experts}
    tied = model.vocab_size * (model.embedding_size or model.text.hidden_size) if model.tie_word_embeddings and model.head else 0
    work = sum(e.flops * e.runs for e in entries(model, 128) if not re.search(r"core$|scan$|_scores$|/kernel$|/index$", e.node))
    assert work == pytest.approx(applied(whole, routed, tied), rel=4e-3)


@pytest.mark.parametrize("model_type", COMPUTED)
def test_a_file_that_leaves_out_what_its_class_computes(model_type: str) -> None:
    width = written(made(model_type), difference=False)["hidden_size"]
    config = made(model_type, hidden_size=2 * width)
    table = written(config, difference=True)
    assert totals(read(table, file=model_type), 128).parameters == counted(model_type, config)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [t for t in READ if nested(t) and t not in ("esm", "gemma4_assistant")])
def test_decoders_with_encoders_equal_transformers(model_type: str) -> None:
    config = transformers.CONFIG_MAPPING[model_type](**PARTS.get(model_type, {}))
    table = written(config, difference=False)
    assert totals(read(table, file=model_type), 128).parameters == counted(model_type, config)


SWITCHED: list[tuple[str, dict[str, Any]]] = [
    ("dinov2", {"hidden_size": 32, "num_attention_heads": 4, "image_size": 28, "use_swiglu_ffn": True, "use_mask_token": False}),
    ("videomae", {"image_size": 32, "qv_bias": False, "use_mean_pooling": False}),
    ("dinov3_vit", {"use_gated_mlp": True, "key_bias": True, "query_bias": False}),
    ("dinov3_vit", {"proj_bias": False, "mlp_bias": False}),
    ("t5", {"is_gated_act": True}), ("mt5", {"feed_forward_proj": "relu"}), ("opt", {"enable_bias": False}),
    ("nemotron_h", {"use_bias": True, "n_shared_experts": 0}), ("nemotron_h", {"mlp_bias": True}),
    ("speech_to_text", {"tie_word_embeddings": False}),
    ("hubert", {"feat_proj_layer_norm": False}), ("llama4_text", {"intermediate_size_mlp": 4096}),
    ("esmc", {"tie_word_embeddings": True}),
    ("internvl", {"vision_config": {"use_qk_norm": True, "norm_type": "rms_norm", "use_mask_token": True}}),
    ("internvl", {"vision_config": {"use_absolute_position_embeddings": False, "use_mean_pooling": False}}),
    ("got_ocr2", {"text_config": {"model_type": "qwen2", "hidden_size": 512}}), ("paligemma", {"projection_dim": 1024}),
    ("llama4", {"vision_config": {"projector_input_dim": 2048, "projector_output_dim": 1024, "vision_output_dim": 1024}}),
    ("voxtral", {"text_config": {"model_type": "llama", "tie_word_embeddings": True}}),
    ("musicflamingo", {"projector_bias": False}),
    ("muse_glimmer", {"text_config": {"model_type": "muse_glimmer_text", "tie_word_embeddings": True}}),
    ("molmo2", {"tie_word_embeddings": True, "adapter_config": {"attention_bias": False, "hidden_size": 576}}),
    ("glmasr", {"audio_config": {"model_type": "glmasr_encoder", "num_key_value_heads": 10}}),
    ("kimi_k25", {"vision_config": {"hidden_size": 576}, "projection_hidden_size": 576}),
    ("muse_glimmer", {"vision_config": {"pos_emb_height": 16}}), ("ovis2", {"vision_config": {"qkv_bias": True}}),
    ("phi4_multimodal", {"audio_config": {"depthwise_multiplier": 2}}),
    ("gemma4", {"audio_config": {"num_hidden_layers": 3, "subsampling_conv_channels": [64, 32], "output_proj_dims": 512}}),
    ("dots3_note", {"vision_config": {"num_hidden_layers": 3, "pyramid_num_routed": [-1, 4, 8]}}),
]  # fmt: skip
"""Switches that change what a class builds, at values that are not its defaults."""


@pytest.mark.parametrize(("model_type", "changes"), SWITCHED)
def test_switches_of_a_file_are_read(model_type: str, changes: dict[str, Any]) -> None:
    config = transformers.CONFIG_MAPPING[model_type](**{**PARTS.get(model_type, {}), **changes})
    table = written(config, difference=False)
    assert totals(read(table, file=model_type), 128).parameters == counted(model_type, config)


SEEN = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": 1000}  # fmt: skip
"""A small decoder."""
PARTLY: list[dict[str, Any]] = [
    {"model_type": "qwen2_vl", **SEEN, "vision_config": {"model_type": "qwen2_vl", "hidden_size": 64, "in_chans": 3}},
    {"model_type": "qwen2_5_vl", **SEEN, "vision_config": {"depth": 3, "out_hidden_size": 64}},
    {"model_type": "llava", "text_config": {**SEEN}, "vision_config": {"num_hidden_layers": 3}},
    {"model_type": "aria", "text_config": {**SEEN, "moe_num_experts": 4}, "vision_config": {"num_hidden_layers": 3}},
    {"model_type": "voxtral", "text_config": {"num_hidden_layers": 2}, "audio_config": {"num_hidden_layers": 2}},
    {"model_type": "glmasr", "text_config": {"num_hidden_layers": 2}, "audio_config": {"num_hidden_layers": 2}},
]  # fmt: skip
"""Files as published: a nested object says what differs from the class that the whole file's class takes it for."""


def from_file(table: dict[str, Any]) -> Any:
    """transformers' configuration of a file."""
    return transformers.CONFIG_MAPPING[table["model_type"]].from_dict({k: v for k, v in table.items() if k != "model_type"})


@pytest.mark.parametrize("table", PARTLY, ids=lambda table: str(table["model_type"]))
def test_what_a_nested_object_leaves_out_is_its_class_default(table: dict[str, Any]) -> None:
    parameters = counted(table["model_type"], from_file(copy.deepcopy(table)))
    assert totals(read(table, file=table["model_type"]), 128).parameters == parameters


@pytest.mark.parametrize("whole", [None, True, False])
@pytest.mark.parametrize("inside", [None, True, False])
@pytest.mark.parametrize("model_type", ["llava", "llava_next", "llama4", "got_ocr2"])
def test_whose_word_ties_the_embeddings_is_the_class_of_the_whole_file(
    model_type: str, inside: bool | None, whole: bool | None
) -> None:
    table: dict[str, Any] = {"model_type": model_type, "text_config": {**SEEN}, "vision_config": {"num_hidden_layers": 2}}
    for part, word in ((table, whole), (table["text_config"], inside)):
        part.update({} if word is None else {"tie_word_embeddings": word})
    parameters = counted(model_type, from_file(copy.deepcopy(table)))
    found = read(table, file=model_type, approximate=True)
    if model_type == "got_ocr2" and whole is None and inside is False:  # transformers keeps a head that the weights have
        assert not found.tie_word_embeddings
        assert any("tie_word_embeddings" in note for note in found.notes)
    else:
        assert totals(found, 128).parameters == parameters


def test_gemma_3n_but_its_convolutions_equals_transformers() -> None:
    """Its vision encoder is timm's, which is no dependency: text and sound are built, and what embeds both."""
    kind = transformers.CONFIG_MAPPING
    parts = {"text_config": kind["gemma3n_text"](intermediate_size=[16384] * 35), "audio_config": kind["gemma3n_audio"]()}
    table = {"model_type": "gemma3n", "vision_config": {"model_type": "gemma3n_vision", "architecture": "mobilenetv5_300m_enc"},
             **{name: written(part, difference=False) for name, part in parts.items()}}  # fmt: skip
    text, audio = parts.values()
    modules = transformers.models.gemma3n.modeling_gemma3n
    with torch.device("meta"):
        embedders = [modules.Gemma3nMultimodalEmbedder(c, text) for c in (audio, kind["gemma3n_vision"]())]
    whole = sum(p.numel() for model in (built("gemma3n_text", text), *embedders) for p in model.parameters())
    whole += counted("gemma3n_audio", audio) + MOBILENETS["mobilenetv5_300m_enc"]
    assert totals(read(table, file="gemma3n"), 128).parameters == whole
    table["vision_config"]["architecture"] = "resnet50"
    with pytest.raises(InputError, match="known are mobilenetv5_300m_enc"):
        read(table, file="gemma3n")


def test_every_class_that_people_train_is_read_or_refused_by_name() -> None:
    refused = set()
    for model_type in trained():
        try:
            table = written(made(model_type), difference=False)
        except Exception:  # transformers cannot make the configuration by itself
            continue
        try:
            read(table, file=model_type)
        except InputError:
            refused.add(model_type)
    assert refused == NOT_READ
