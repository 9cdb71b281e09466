"""Vision-language files whose classes are not transformers' (remote code): their words in transformers', encoders and projectors.

Read from the code that the files name: DeepSeek-VL2 (siglip_vit.py), DeepSeek-OCR (deepencoder), Ovis 2.5 (modeling_ovis.py),
MiniCPM-V (resampler.py), ERNIE 4.5 VL, Phi-3 Vision (image_embedding_phi3_v.py), Molmo (modeling_molmo.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from simpar.model.config_keys import Keys
from simpar.model.pieces import linear, matrix, vector
from simpar.model.sam import sam_stack
from simpar.specs.architecture import StackSpec

SPEECH = ("talker_config", "token2wav_config", "code2wav_config")
"""What speaks beside a thinker: models of their own, which training of the thinker leaves alone."""

MINICPM_TEXT = {"2.5": "llama", "2.6": "qwen2", "4.0": "llama", "4": "llama", "4.5": "qwen3"}
"""Version of a MiniCPM-V -> the family of its decoder."""


def minicpmv(config: dict[str, Any]) -> dict[str, Any]:
    """The decoder's keys stand flat beside the encoder's; the version says its family."""
    family = MINICPM_TEXT.get(str(config.get("version")))
    return {**config, "text_config": {**_decoder(config), "model_type": family}} if family else config


def deepseek_vl(config: dict[str, Any]) -> dict[str, Any]:
    """DeepSeek-OCR goes by the name of DeepSeek-VL2; its decoder's keys stand twice, its layers are not always latent attention."""
    text, seeing = dict(config.get("language_config") or {}), dict(config.get("vision_config") or {})
    if not text.get("kv_lora_rank"):
        text = {n: v for n, v in text.items() if n not in LATENT} | {"model_type": "deepseek"}
    own = {n: v for n, v in config.items() if n not in {*text, *LATENT} or n in ("model_type", "torch_dtype")}
    if isinstance(seeing.get("width"), dict):
        return {**own, "model_type": "deepseek_ocr", "language_config": text}
    image = re.search(r"_(\d+)$", str(seeing.get("model_name")))
    wide = int(seeing.get("width", 1152) * seeing.get("mlp_ratio", 3.7362))
    sizes = {"image_size": int(image[1]) if image else 384, "num_attention_heads": 16, "intermediate_size": wide}
    seeing.pop("mlp_ratio", None)
    return {**own, "language_config": text, "vision_config": {**sizes, **seeing}}


def phi4mm(config: dict[str, Any]) -> dict[str, Any]:
    """Phi-4-multimodal as its authors publish it: the encoders' sizes stand in code or deep inside; adapters are weights."""
    own = ("audio_processor", "embd_layer", "img_processor")
    sound = (config.get("audio_processor") or {}).get("config") or {}
    sizes = {name: sound[old] for name, old in PHI4_SOUND.items() if old in sound}
    distance = (sound.get("relative_attention_bias_args") or {}).get("t5_bias_max_distance", 1000)
    return {
        **{name: value for name, value in config.items() if name not in own},
        "vision_config": {"model_type": "phi4_multimodal_vision"},
        "audio_config": {"model_type": "phi4_multimodal_audio", **sizes, "bias_max_distance": distance},
    }


PHI4_SOUND = {
    "hidden_size": "attention_dim", "num_attention_heads": "attention_heads", "intermediate_size": "linear_units",
    "num_blocks": "num_blocks", "kernel_size": "kernel_size", "input_size": "input_size", "time_reduction": "time_reduction",
    "ext_pw_out_channel": "ext_pw_out_channel", "depthwise_separable_out_channel": "depthwise_seperable_out_channel",
}  # fmt: skip
"""transformers' name of a size of the sound's encoder -> the authors'."""

LATENT = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
"""Sizes of a latent attention; void where its class builds plain heads."""


def ernie_vl(config: dict[str, Any]) -> dict[str, Any]:
    """ERNIE 4.5 VL as its authors publish it: text and image experts in pairs, everything flat."""
    seeing = {**(config.get("vision_config") or {}), "model_type": "ernie4_5_vl_moe_vision"}
    seeing["intermediate_size"] = int(seeing.get("embed_dim", 1280) * seeing.get("mlp_ratio", 4))
    seeing.pop("attn_sep", None)
    text = {**_decoder(config), "model_type": "ernie4_5_vl_moe_text"}
    for name in ("moe_layer_start_index", "moe_layer_end_index", "moe_num_experts"):
        if isinstance(text.get(name), list):
            text[name] = text[name][0]
    return {"model_type": "ernie4_5_vl_moe", "text_config": text, "vision_config": seeing,
            "tie_word_embeddings": config.get("tie_word_embeddings", True)}  # fmt: skip


def _decoder(config: dict[str, Any]) -> dict[str, Any]:
    """The flat keys without the encoder's."""
    own = ("vision_config", "slice_config", "im_patch_id", "pixel_hidden_size", "spatial_conv_size", "temporal_conv_size",
           "freq_allocation", "use_temporal_conv", "moe_layer_end_index", "modality_detach", "moe_use_hard_gate", "moe_gate_act",
           "moe_multimodal_dispatch_use_allgather", "use_recompute_loss_fn", "sinkhorn_2gate", "rope_3d",
           "query_num", "image_size",
           "patch_size", "vision_batch_size", "batch_vision_input", "drop_vision_last_layer", "batch_3d_resampler", "slice_mode",
           "use_image_id", "version")  # fmt: skip
    return {name: value for name, value in config.items() if name not in own}


def phi3_v(config: dict[str, Any]) -> dict[str, Any]:
    """Phi-3 and 3.5 Vision: flat keys of Phi-3; the encoder is named, its sizes stand in code."""
    text = {n: v for n, v in config.items() if n not in ("embd_layer", "img_processor", "auto_map")}
    return {"model_type": "phi3_v", "text_config": {**text, "model_type": "phi3"}, "vision_config": CLIP_LARGE}


CLIP_LARGE = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16, "image_size": 336,
              "patch_size": 14, "spatial_merge_size": 2, "model_type": "clip_vision_model"}  # fmt: skip
"""openai/clip-vit-large-patch14-336, 2 x 2 of whose patches become a token."""


def molmo(config: dict[str, Any]) -> dict[str, Any]:
    """Molmo on Qwen 2: gate and up are counted as one width, words are those of the table; the encoder's sizes stand in code."""
    own = ("layer_norm_type", "weight_tying", "use_position_ids", "embedding_size", "auto_map", "model_type")
    text = {n: v for n, v in config.items() if n not in own}
    text |= {"intermediate_size": int(config.get("intermediate_size") or 0) // 2, "model_type": "qwen2"}
    text["vocab_size"] = config.get("embedding_size") or config.get("vocab_size")
    tied = bool(config.get("weight_tying", False))
    seeing = {**CLIP_LARGE, "num_hidden_layers": 23, "model_type": "molmo_vision"}
    return {"model_type": "molmo", "text_config": text, "vision_config": seeing, "tie_word_embeddings": tied}


def qwen3_asr(config: dict[str, Any]) -> dict[str, Any]:
    """Qwen3-ASR as its authors publish it: all of it is a thinker, its parts by other names."""
    thinker = config.get("thinker_config")
    if not isinstance(thinker, dict):
        return config
    parts = {"text_config": "qwen3", "audio_config": "qwen3_asr_encoder"}
    inside = {n: {**(thinker.get(n) or {}), "model_type": kind} for n, kind in parts.items()}
    return {"model_type": "qwen3_asr", **inside}


def phi_msft(config: dict[str, Any]) -> dict[str, Any]:
    """Phi 1.5 and 2 as first published, in GPT-2's names."""
    found = {PHI_NAMES.get(n, n): v for n, v in config.items() if n not in ("flash_rotary", "fused_dense", "img_processor")}
    width = found.get("intermediate_size") or 4 * int(found.get("hidden_size") or 0)
    return {**found, "intermediate_size": width, "model_type": "phi"}


PHI_NAMES = {
    "n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
    "n_head_kv": "num_key_value_heads", "n_inner": "intermediate_size", "n_positions": "max_position_embeddings",
}  # fmt: skip
"""GPT-2's name of a size -> transformers' for Phi."""


WORDS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "phi3_v": phi3_v,
    "molmo": molmo,
    "qwen3_asr": qwen3_asr,
    "phi-msft": phi_msft,
    "minicpmv": minicpmv,
    "phi4mm": phi4mm,
    "deepseek_vl_v2": deepseek_vl,
    "ernie4_5_moe_vl": ernie_vl,
}
"""model_type -> its file in transformers' words."""


def deepseek_ocr(file: Keys, k: Keys, text: int, clip: Callable[[Keys], StackSpec]) -> list[StackSpec]:
    """Segment Anything's encoder with two strided convolutions, CLIP-L on its 16-fold fewer patches, one matrix over both."""
    k.get("mlp_ratio")
    p = file.child("projector_config") or file
    p.get("n_embed", "input_dim")
    parts = k.child("width")
    first, second = (parts.child(name) if parts else None for name in ("sam_vit_b", "clip-l-14-224"))
    if first is None or second is None:
        k.violate("width", "...", "must hold sam_vit_b and clip-l-14-224")
        return []
    names = {"layers": "num_hidden_layers", "heads": "num_attention_heads", "width": "hidden_size"}
    near, far = (
        Keys({names.get(n, n): v for n, v in part.config.items()}, k.file, part.path, like)
        for part, like in ((first, "sam_vision_model"), (second, "clip_vision_model"))
    )
    for part in (first, second):
        part.used.update(part.config)
    neck = 256
    far.config.setdefault("intermediate_size", 4 * far.number("hidden_size"))
    sam, whole = sam_stack(near), clip(far)
    strided = (matrix("convolution_1", 9 * neck, 2 * neck), matrix("convolution_2", 18 * neck, 4 * neck))
    joined = (linear("projector", 4 * neck + whole.hidden_size, text), vector("separators", 2 * text))
    return [
        sam.model_copy(update={"name": "pages", "extra": (*sam.extra, *strided)}),
        whole.model_copy(update={"final_norm": False, "extra": (*whole.extra, *joined)}),
    ]
