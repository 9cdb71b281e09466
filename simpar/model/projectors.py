"""What stands between an encoder and a decoder: functions of (whole file, encoder's keys, encoder's width, text's width) that
return weights.
"""

from __future__ import annotations

from collections.abc import Callable

from simpar.model.config_keys import Keys
from simpar.model.pieces import linear, lookup, matrix, vector
from simpar.model.pieces import norm_extra as norm
from simpar.specs.mixers import NormKind, WeightSpec

Weights = tuple[WeightSpec, ...]
Projector = Callable[[Keys, Keys, int, int], Weights]


def mlp2(name: str, inputs: int, inner: int, outputs: int, bias: bool = True) -> tuple[WeightSpec, ...]:
    return (linear(f"{name}_1", inputs, inner, bias=bias), linear(f"{name}_2", inner, outputs, bias=bias))


def joined_weight(weight: WeightSpec, joined: int) -> WeightSpec:
    """A projector's weight, which meets `joined` tokens of the encoder as one."""
    once = joined > 1 and weight.kind == "linear" and weight.copies == 1 and weight.uses is None
    return weight.model_copy(update={"uses": 1.0 / joined}) if once else weight


def merged(k: Keys, h: int) -> int:
    """Width of the patches that the encoder's file joins, side by side."""
    return h * k.number("spatial_merge_size", default=2) ** 2


def normed(over: int, wide: int, inner: int, text: int) -> Weights:
    """A norm and two layers."""
    return (norm("projector_norm", "layernorm", over), *mlp2("projector", wide, inner, text))


def wide_normed(wide: int, text: int) -> Weights:
    return normed(wide, wide, text, text)


def one(file: Keys, k: Keys, h: int, text: int) -> Weights:
    return (matrix("projector", h, text),)


def merger(k: Keys, h: int, text: int, out: str, kind: NormKind = "layernorm") -> Weights:
    """Of 2 x 2 patches: a norm and two layers."""
    wide = merged(k, h)
    return (norm("merger_norm", kind, h), *mlp2("merger", wide, wide, k.number(out, default=text)))


def glm(k: Keys, h: int, text: int, inner: int) -> Weights:
    """A convolution of 2 x 2, a projection, a norm and a gated layer."""
    out, merge = k.number("out_hidden_size", default=text), k.number("spatial_merge_size", default=2)
    return (
        linear("downsample", h * merge * merge, out), matrix("merger", out, out), norm("merger_norm", "layernorm", out),
        matrix("merger_gate_up", out, 2 * inner), matrix("merger_down", inner, out),
    )  # fmt: skip


def qwen25_vl(file: Keys, k: Keys, h: int, text: int) -> Weights:
    k.get("fullatt_block_indexes", "window_size")
    return merger(k, h, text, "out_hidden_size", "rmsnorm")


def qwen3_vl(file: Keys, k: Keys, h: int, text: int) -> Weights:
    """The merger, and one more for each layer whose maps reach the decoder (DeepStack)."""
    found = [*merger(k, h, text, "out_hidden_size")]
    wide, out = merged(k, h), k.number("out_hidden_size", default=text)
    for i, _ in enumerate(k.get("deepstack_visual_indexes", default=[]) or []):
        found += [norm(f"deepstack_{i}_norm", "layernorm", wide), *mlp2(f"deepstack_{i}", wide, wide, out)]
    return tuple(found)


def llava(file: Keys, k: Keys, h: int, text: int) -> Weights:
    layers = file.get("vision_feature_layer", default=-2)
    count = len(layers) if isinstance(layers, list) else 1
    return mlp2("projector", h * count, text, text, bool(file.get("multimodal_projector_bias", default=True)))


def gemma3n_embedder(file: Keys, k: Keys, h: int, text: int) -> Weights:
    """Gemma 3n: a table of hard words beside what the encoder gives, a norm for each, one matrix."""
    file.get("vision_soft_tokens_per_image", "audio_soft_tokens_per_image")
    words = lookup("hard_words", k.number("vocab_size", default=128), h)
    return (words, norm("embedder_norms", "rmsnorm", 2 * h), matrix("projector", h, text))


def minimax_m3(file: Keys, k: Keys, h: int, text: int) -> Weights:
    wide = file.number("projector_hidden_size", default=text)
    inner = k.child("img_token_compression_config") or k
    inner.get("temporal_patch_size")
    file.get("img_token_compression_config", "multimodal_projector_bias")
    merge = inner.number("spatial_merge_size", default=2) ** 2
    return (*mlp2("projector", h, wide, text), *mlp2("merge", text * merge, wide, text))


def aligner(file: Keys, k: Keys, h: int, text: int) -> Weights:
    """Two layers as wide as the text (DeepSeek-VL, VideoLLaMA 3, Audio Flamingo)."""
    return mlp2("projector", h, text, text, bool(file.get("projector_bias", default=True)))


def minicpm_v(file: Keys, k: Keys, h: int, text: int) -> Weights:
    """A merger with attention in the middle of the encoder, and one after it, each over 2 x 2 patches."""
    file.get("insert_layer_id", "downsample_mode", "patch_size", "merge_kernel_size")
    wide, times = 4 * h, file.number("merger_times", default=1)
    inside = (norm("merger_norm", "layernorm", h), norm("merger_wide_norm", "layernorm", wide))
    steps = [w for n in range(times) for w in (norm(f"projector_norm_{n}", "layernorm", wide),
             *mlp2(f"projector_{n}", wide, wide, text if n == times - 1 else h))]  # fmt: skip
    return (
        *inside,
        linear("merger_attention", h, h, copies=4),
        *mlp2("merger", wide, 4 * k.number("intermediate_size", default=wide), h),
        *steps,
    )


def ovis2(file: Keys, k: Keys, h: int, text: int) -> Weights:
    """Soft visual words: a head over a visual vocabulary and a table of its embeddings."""
    file.get("vocab_size")
    words, width = k.number("vocab_size"), file.number("hidden_size", default=text)
    rows = words - k.number("num_visual_indicator_tokens", default=5)
    head = matrix("visual_head", h * k.number("hidden_stride", default=1) ** 2, rows)
    return (head, norm("visual_head_norm", "layernorm", rows), vector("visual_words", words * width))


def aria(file: Keys, k: Keys, h: int, text: int) -> Weights:
    """Learned queries attend the patches, then a gated layer of the text's width."""
    queries = max(int(v) for v in file.get("projector_patch_to_query_dict", default={"0": 256}).values())
    inner = file.number("max_value_projector_patch_to_query_dict", default=queries)
    text_keys = file.config.get("text_config", {})
    width = text_keys.get("projector_hidden_size") or text_keys.get("hidden_size", text)
    return (
        vector("queries", inner * h), matrix("projections", h, h, copies=3), linear("attention", h, 3 * h),
        linear("attention_out", h, h, copies=2), norm("norms", "layernorm", 3 * h), matrix("up", h, width),
        matrix("down", width, text),
    )  # fmt: skip


def perceiver(file: Keys, k: Keys, h: int, text: int) -> Weights:
    """Idefics 2: a gated layer into the text's width, then latents that attend the patches."""
    p = file.child("perceiver_config", like="idefics2_perceiver") or file
    width = file.config.get("text_config", {}).get("intermediate_size") or 14336
    depth, latents = p.number("resampler_depth", default=3), p.number("resampler_n_latents", default=64)
    dim, heads = p.number("resampler_head_dim", default=96), p.number("resampler_n_heads", default=16)
    kv = p.number("num_key_value_heads", default=4)
    p.get("hidden_size", "qk_layer_norms_perceiver")
    blocks = (
        norm("perceiver_norms", "rmsnorm", 3 * depth * text), matrix("perceiver_q", text, heads * dim, copies=depth),
        matrix("perceiver_kv", text, 2 * kv * dim, copies=depth),
        matrix("perceiver_out", heads * dim, text, copies=depth),
        matrix("perceiver_up", text, 8 * text, copies=depth), matrix("perceiver_down", 4 * text, text, copies=depth),
    )  # fmt: skip
    gated = (matrix("up", h, 2 * width), matrix("down", width, text))
    return (*gated, vector("latents", latents * text), *blocks, norm("perceiver_norm", "rmsnorm", text))


def molmo2(file: Keys, k: Keys, h: int, text: int) -> Weights:
    """Attention over several patches of two layers, then a gated layer."""
    a = file.child("adapter_config", like="molmo2_adapter") or file
    layers = len(a.get("vision_feature_layer", "vit_layers", default=[-3, -9]))
    heads, kv = a.number("num_attention_heads", default=16), a.number("num_key_value_heads", default=16)
    dim, width = a.number("head_dim", default=72), a.number("intermediate_size")
    inside, out = a.number("hidden_size", default=h), a.number("text_hidden_size", default=text)
    bias, h = bool(a.get("attention_bias", default=True)), inside
    return (
        linear("pooling_qkv", layers * h, (heads + 2 * kv) * dim, bias=bias), linear("pooling_out", heads * dim, inside, bias=bias),
        matrix("up", inside, 2 * width), matrix("down", width, out),
    )  # fmt: skip


def pixel_unshuffle(file: Keys, k: Keys, h: int, text: int) -> Weights:
    """LFM2-VL: 2 x 2 patches into channels, two layers."""
    file.get("encoder_patch_size")
    wide, inner = pixel_shuffle(file, h), file.number("projector_hidden_size", default=2560)
    first = (norm("projector_norm", "layernorm", wide),) if file.get("projector_use_layernorm", default=True) else ()
    return (*first, *mlp2("projector", wide, inner, text, bool(file.get("projector_bias", default=True))))


def kimi(file: Keys, k: Keys, h: int, text: int) -> Weights:
    merge = k.get("merge_kernel_size", "spatial_merge_size", default=2)
    wide = h * (merge[0] * merge[1] if isinstance(merge, list) else merge**2)
    inner = file.number("projection_hidden_size", default=h)
    return normed(inner, wide, wide, text)


def gemma3(file: Keys, k: Keys, h: int, text: int) -> Weights:
    file.get("mm_tokens_per_image")
    return (matrix("projector", h, text), norm("projector_norm", "rmsnorm", h))


def llama4(file: Keys, k: Keys, h: int, text: int) -> Weights:
    """Pixel shuffle by pixel_shuffle_ratio, two layers without biases, then the projector."""
    wide, k_inner = k.number("intermediate_size"), k.number("projector_input_dim", default=4096)
    out = k.number("projector_output_dim", default=4096)
    return (
        matrix("adapter_1", wide, k_inner),
        matrix("adapter_2", out, out),
        matrix("projector", k.number("vision_output_dim", default=out), text),
    )


def idefics3(file: Keys, k: Keys, h: int, text: int) -> Weights:
    """Pixel shuffle by scale_factor, one matrix."""
    return (matrix("projector", h * file.number("scale_factor", "pixel_shuffle_factor", default=2) ** 2, text),)


def pixel_shuffle(file: Keys, h: int) -> int:
    """Width of the patches that the whole file joins."""
    return h * file.number("downsample_factor", default=2) ** 2


def gated(file: Keys, wide: int, text: int, usual: int) -> Weights:
    """A layer whose two halves multiply, and one to the text."""
    inner = file.number("alignment_intermediate_size", default=usual)
    return (linear("projector_1", wide, inner), linear("projector_2", inner // 2, text))


def aya_vision(file: Keys, k: Keys, h: int, text: int) -> Weights:
    wide = pixel_shuffle(file, h)
    return (norm("projector_norm", "layernorm", wide), *gated(file, wide, text, text))


def paddle_ocr(file: Keys, k: Keys, h: int, text: int) -> Weights:
    """A norm, 2 x 2 patches into channels, two layers."""
    wide = merged(k, h)
    return normed(h, wide, wide, text)


def muse(file: Keys, k: Keys, h: int, text: int) -> Weights:
    """2 x 2 patches into channels, an adapter of two layers, a projection; no biases."""
    wide, width = file.number("out_hidden_size", default=4 * h), file.number("projector_hidden_size", default=4096)
    return (*mlp2("adapter", wide, width, width, False), matrix("projector", width, text))


def glm_narrow(file: Keys, k: Keys, h: int, text: int) -> Weights:
    """GLM's merger with a width of its own (GLM-OCR, GLM-5-next)."""
    usual = k.number("out_hidden_size", default=text) * k.number("in_channels", default=3)
    return glm(k, h, text, k.get("projection_intermediate_size") or usual)


def ernie_vl(file: Keys, k: Keys, h: int, text: int) -> Weights:
    """A resampler over space, then over pairs of frames, then a projection."""
    wide, frames = merged(k, h), k.number("temporal_merge_size", default=2)
    return (
        *mlp2("spatial", wide, wide, wide), norm("spatial_norm", "layernorm", wide), *mlp2("temporal", wide * frames, wide, wide),
        norm("temporal_norm", "layernorm", wide), linear("projector", wide, text), norm("projector_norm", "rmsnorm", text),
    )  # fmt: skip


def resampler(file: Keys, k: Keys, h: int, text: int) -> Weights:
    """MiniCPM-V: learned queries of the text's width attend the patches, then norms and one matrix."""
    file.get("slice_config", "patch_size", "vision_batch_size", "drop_vision_last_layer")
    narrow = (matrix("keys_values", h, text),) if h != text else ()
    return (
        vector("queries", file.number("query_num", default=64) * text), *narrow, linear("attention_keys_values", text, 2 * text),
        linear("attention_queries_out", text, text, copies=2), norm("resampler_norms", "layernorm", 3 * text),
        matrix("projector", text, text),
    )  # fmt: skip


def downsample(file: Keys, k: Keys, h: int, text: int) -> Weights:
    """DeepSeek-VL2: 2 x 2 patches into channels, two layers, the ends of lines and views."""
    p = file.child("projector_config") or file
    p.get("n_embed", "depth", "mlp_ratio", "input_dim")
    wide = h * int(p.get("downsample_ratio", default=2)) ** 2
    inner = int(text * p.get("mlp_ratio", default=1))
    return (*mlp2("projector", wide, inner, text), vector("separators", 2 * text))


def ovis25(file: Keys, k: Keys, h: int, text: int) -> Weights:
    """Soft visual words: a head over a visual vocabulary, four words of which are marks, and a table of its embeddings."""
    k.get("hidden_stride", "num_patches", "fullatt_block_indexes", "window_size", "temporal_patch_size")
    file.get("disable_tie_weight", "hidden_size", "conversation_formatter_class")
    words = file.number("visual_vocab_size")
    head = matrix("visual_head", h * k.number("hidden_stride", default=2) ** 2, words - 4)
    return (head, norm("visual_head_norm", "layernorm", words - 4), vector("visual_words", words * text))


def phi3_projector(file: Keys, k: Keys, h: int, text: int) -> Weights:
    """Phi-3 Vision: 2 x 2 patches into channels, two layers, the ends of lines and of views."""
    wide = h * k.number("spatial_merge_size") ** 2
    return (*mlp2("projector", wide, text, text), vector("separators", 2 * wide))


def molmo_projector(file: Keys, k: Keys, h: int, text: int) -> Weights:
    """Molmo: attention over 2 x 2 patches of two layers, a gated layer, embeddings of padding and of 128 further words."""
    width, patches = int(file.config["text_config"]["intermediate_size"]), k.number("spatial_merge_size") ** 2
    return (
        linear("pooling_qkv", 2 * h, h, copies=3), linear("pooling_out", h, h), vector("padding", patches * h),
        matrix("up", h, 2 * width), matrix("down", width, text), vector("further_words", 128 * text),
    )  # fmt: skip


def got_ocr(file: Keys, k: Keys, h: int, text: int) -> Weights:
    """GOT-OCR 2: two convolutions up to the text's width, and one layer."""
    neck = k.number("output_channels", default=256)
    return (
        matrix("convolution_1", 9 * neck, 2 * neck),
        matrix("convolution_2", 9 * 2 * neck, text),
        linear("projector", text, text),
    )


# -- tables --------------------------------------------------------------------------------------------------------------

BY_PARENT: dict[str, Projector] = {
    **dict.fromkeys(("llava", "video_llava"), llava),
    **dict.fromkeys(
        ("llava_next", "llava_onevision", "llava_next_video"),
        lambda file, k, h, text: (*llava(file, k, h, text), vector("image_newline", text))),
    "vipllava": lambda file, k, h, text: wide_normed(  # several layers of the encoder side by side
        h * len(file.get("vision_feature_layers", "vision_feature_layer", default=[-2, -5, -8, -11, 6])), text),
    **dict.fromkeys(
        ("internvl", "internvl_chat", "qianfan_ocr"),
        lambda file, k, h, text: wide_normed(int(h / file.get("downsample_ratio", default=0.5) ** 2), text)),
    **dict.fromkeys(
        ("mistral3", "lighton_ocr", "mistral_large4"),
        lambda file, k, h, text: (
            norm("projector_norm", "rmsnorm", h), matrix("patch_merger", h * file.number("spatial_merge_size", default=2) ** 2, h),
            *mlp2("projector", h, text, text, bool(file.get("multimodal_projector_bias", default=False))))),
    **dict.fromkeys(("deepseek_vl", "video_llama_3"), aligner), **dict.fromkeys(("gemma3", "shieldgemma2"), gemma3),
    **dict.fromkeys(("minicpmv4_6", "minicpmv4_7"), minicpm_v), **dict.fromkeys(("muse_glimmer", "muse_spark"), muse),
    **dict.fromkeys(("idefics3", "smolvlm", "modernvbert"), idefics3), "idefics2": perceiver,
    "ultravbert": lambda file, k, h, text: (*idefics3(file, k, h, text), norm("projector_norm", "rmsnorm", text)),
    "hyperclovax_vision_v2": lambda file, k, h, text: (
        *qwen25_vl(file, k, h, text), linear("projector", k.number("out_hidden_size", default=text), text)),
    # one layer, as wide as the file says (the text, where the file is to work)
    "paligemma": lambda file, k, h, text: (linear("projector", h, file.number("projection_dim", default=text)),),
    "git": lambda file, k, h, text: (linear("projector", h, text), norm("projector_norm", "layernorm", text)),
    "cohere2_vision": lambda file, k, h, text: gated(file, pixel_shuffle(file, h), text, 36864),
    "gemma4": one, "paddleocr_vl": paddle_ocr, "lfm2_vl": pixel_unshuffle,
    "aya_vision": aya_vision, "ovis2": ovis2, "aria": aria, "molmo2": molmo2, "minicpmv": resampler, "deepseek_vl_v2": downsample,
    "ovis2_5": ovis25, "phi3_v": phi3_projector, "molmo": molmo_projector,
}  # fmt: skip
"""Projectors that belong to the whole model rather than to its vision encoder."""

QWEN3 = (
    "qwen3_vl", "qwen3_vl_vision", "qwen3_vl_moe", "qwen3_vl_moe_vision", "qwen3_5", "qwen3_5_vision", "qwen3_5_moe",
    "qwen3_5_moe_vision", "qwen4_exp_vision", "qwen3_omni_moe_vision_encoder", "cohere_compass_vision",
)  # fmt: skip
QWEN25 = ("qwen2_5_vl", "qwen2_5_vl_vision", "qwen2_5_omni_vision_encoder", "exaone4_5_vision")

BY_TOWER: dict[str, Projector] = {
    **dict.fromkeys(QWEN3, qwen3_vl), **dict.fromkeys(QWEN25, qwen25_vl),
    "qwen2_vl_vision": lambda file, k, h, text: merger(k, h, text, "hidden_size"),
    "dots3_note_vision_encoder": lambda file, k, h, text: merger(k, h, text, "adapter_out_dim"),
    **dict.fromkeys(("glm_ocr_vision", "glm5_next_vision"), glm_narrow),
    "glm4v_vision": lambda file, k, h, text: glm(k, h, text, k.number("intermediate_size")),
    **dict.fromkeys(("kimi_k25_vision", "kimi_k3_vision"), kimi), "gemma3n_vision": gemma3n_embedder, "gemma4_vision": one,
    "ernie4_5_vl_moe_vision": ernie_vl, "got_ocr2_vision": got_ocr, "llama4_vision_model": llama4,
    "minimax_m3_vl_vision": minimax_m3,
    "mllama_vision_model": lambda file, k, h, text: (linear("projector", k.number("vision_output_dim"), text),),
    # two layers; the ends of lines and of images
    "phi4_multimodal_vision": lambda file, k, h, text: (*mlp2("projector", h, text, text), vector("separators", 2 * h)),
    # two convolutions of 3 x 3 that double the channels, then a projector
    "step3p5_vision": lambda file, k, h, text: (
        linear("downsample_1", 9 * h, 2 * h), linear("downsample_2", 18 * h, 4 * h),
        linear("projector", 4 * h, text, bias=bool(file.get("projector_bias", default=False)))),
}  # fmt: skip
"""Projectors by the vision encoder's model_type, where the whole model has none of its own."""
