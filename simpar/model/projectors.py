"""What stands between an encoder and a decoder, and what an encoder holds around its layers: functions that return weights.

A projector takes (whole file, encoder's keys, encoder's width, text's width); an encoder's extra weights (its keys, its width).
"""

from __future__ import annotations

from collections.abc import Callable

from simpar.model.config_keys import Keys
from simpar.model.pieces import linear, lookup, matrix, vector
from simpar.model.pieces import norm_extra as norm
from simpar.specs.mixers import NormKind, WeightSpec

Weights = tuple[WeightSpec, ...]
Projector = Callable[[Keys, Keys, int, int], Weights]
Extra = Callable[[Keys, int], Weights]


def mlp2(name: str, inputs: int, inner: int, outputs: int, bias: bool = True) -> tuple[WeightSpec, ...]:
    return (linear(f"{name}_1", inputs, inner, bias=bias), linear(f"{name}_2", inner, outputs, bias=bias))


def joined_weight(weight: WeightSpec, joined: int) -> WeightSpec:
    """A projector's weight, which meets `joined` tokens of the encoder as one."""
    once = joined > 1 and weight.kind == "linear" and weight.copies == 1 and weight.uses is None
    return weight.model_copy(update={"uses": 1.0 / joined}) if once else weight


def qwen2_vl(file: Keys, k: Keys, h: int, text: int) -> Weights:
    """Merger of 2 x 2 patches: a norm and two layers."""
    return _merger(k, h, text, "layernorm", "hidden_size")


def _merger(k: Keys, h: int, text: int, kind: NormKind, out: str) -> Weights:
    wide = h * k.number("spatial_merge_size", default=2) ** 2
    return (norm("merger_norm", kind, h), *mlp2("merger", wide, wide, k.number(out, default=text)))


def qwen25_vl(file: Keys, k: Keys, h: int, text: int) -> Weights:
    k.get("fullatt_block_indexes", "window_size")
    return _merger(k, h, text, "rmsnorm", "out_hidden_size")


def qwen3_vl(file: Keys, k: Keys, h: int, text: int) -> Weights:
    """The merger, and one more for each layer whose maps reach the decoder (DeepStack)."""
    found = [*_merger(k, h, text, "layernorm", "out_hidden_size")]
    wide, out = h * k.number("spatial_merge_size", default=2) ** 2, k.number("out_hidden_size", default=text)
    for i, _ in enumerate(k.get("deepstack_visual_indexes", default=[]) or []):
        found += [norm(f"deepstack_{i}_norm", "layernorm", wide), *mlp2(f"deepstack_{i}", wide, wide, out)]
    return tuple(found)


def llava(file: Keys, k: Keys, h: int, text: int) -> Weights:
    layers = file.get("vision_feature_layer", default=-2)
    count = len(layers) if isinstance(layers, list) else 1
    return mlp2("projector", h * count, text, text, bool(file.get("multimodal_projector_bias", default=True)))


def internvl(file: Keys, k: Keys, h: int, text: int) -> Weights:
    wide = int(h / file.get("downsample_ratio", default=0.5) ** 2)
    return (norm("projector_norm", "layernorm", wide), *mlp2("projector", wide, text, text))


def pixel_unshuffle(file: Keys, k: Keys, h: int, text: int) -> Weights:
    """LFM2-VL: 2 x 2 patches into channels, two layers."""
    file.get("encoder_patch_size")
    wide, inner = h * file.number("downsample_factor", default=2) ** 2, file.number("projector_hidden_size", default=2560)
    first = (norm("projector_norm", "layernorm", wide),) if file.get("projector_use_layernorm", default=True) else ()
    return (*first, *mlp2("projector", wide, inner, text, bool(file.get("projector_bias", default=True))))


def kimi(file: Keys, k: Keys, h: int, text: int) -> Weights:
    merge = k.get("merge_kernel_size", "spatial_merge_size", default=2)
    wide = h * (merge[0] * merge[1] if isinstance(merge, list) else merge**2)
    inner = file.number("projection_hidden_size", default=h)
    return (norm("projector_norm", "layernorm", inner), *mlp2("projector", wide, wide, text))


def kimi_positions(k: Keys, h: int) -> Weights:
    """A grid of positions that is interpolated to the image's."""
    rows = k.number("init_pos_emb_height", "pos_emb_height", default=64) * k.number(
        "init_pos_emb_width", "pos_emb_width", default=64
    )
    return (vector("positions", rows * h),)


def gemma3(file: Keys, k: Keys, h: int, text: int) -> Weights:
    file.get("mm_tokens_per_image")
    return (matrix("projector", h, text), norm("projector_norm", "rmsnorm", h))


def gemma3n_embedder(file: Keys, k: Keys, h: int, text: int) -> Weights:
    """Gemma 3n: a table of hard words beside what the encoder gives, a norm for each, one matrix."""
    file.get("vision_soft_tokens_per_image", "audio_soft_tokens_per_image")
    words = lookup("hard_words", k.number("vocab_size", default=128), h)
    return (words, norm("embedder_norms", "rmsnorm", 2 * h), matrix("projector", h, text))


def one(file: Keys, k: Keys, h: int, text: int) -> Weights:
    return (matrix("projector", h, text),)


def gemma4_positions(k: Keys, h: int) -> Weights:
    return (vector("positions", 2 * k.number("position_embedding_size", default=10240) * h),)


def llama4(file: Keys, k: Keys, h: int, text: int) -> Weights:
    """Pixel shuffle by pixel_shuffle_ratio, two layers without biases, then the projector."""
    wide, k_inner = k.number("intermediate_size"), k.number("projector_input_dim", default=4096)
    out = k.number("projector_output_dim", default=4096)
    return (
        matrix("adapter_1", wide, k_inner),
        matrix("adapter_2", out, out),
        matrix("projector", k.number("vision_output_dim", default=out), text),
    )


def mistral3(file: Keys, k: Keys, h: int, text: int) -> Weights:
    merge = file.number("spatial_merge_size", default=2)
    bias = bool(file.get("multimodal_projector_bias", default=False))
    return (
        norm("projector_norm", "rmsnorm", h), matrix("patch_merger", h * merge * merge, h),
        *mlp2("projector", h, text, text, bias),
    )  # fmt: skip


def glm4v(file: Keys, k: Keys, h: int, text: int) -> Weights:
    """A convolution of 2 x 2, a projection, a norm and a gated layer."""
    return _glm(k, h, text, k.number("intermediate_size"))


def _glm(k: Keys, h: int, text: int, inner: int) -> Weights:
    out, merge = k.number("out_hidden_size", default=text), k.number("spatial_merge_size", default=2)
    return (
        linear("downsample", h * merge * merge, out), matrix("merger", out, out), norm("merger_norm", "layernorm", out),
        matrix("merger_gate_up", out, 2 * inner), matrix("merger_down", inner, out),
    )  # fmt: skip


def idefics3(file: Keys, k: Keys, h: int, text: int) -> Weights:
    """Pixel shuffle by scale_factor, one matrix."""
    return (matrix("projector", h * file.number("scale_factor", "pixel_shuffle_factor", default=2) ** 2, text),)


def ultravbert(file: Keys, k: Keys, h: int, text: int) -> Weights:
    return (*idefics3(file, k, h, text), norm("projector_norm", "rmsnorm", text))


def llava_newline(file: Keys, k: Keys, h: int, text: int) -> Weights:
    return (*llava(file, k, h, text), vector("image_newline", text))


def cohere2_vision(file: Keys, k: Keys, h: int, text: int) -> Weights:
    """Pixel shuffle, a gated layer."""
    inner = file.number("alignment_intermediate_size", default=36864)
    return (
        linear("projector_1", h * file.number("downsample_factor", default=2) ** 2, inner),
        linear("projector_2", inner // 2, text),
    )


def aya_vision(file: Keys, k: Keys, h: int, text: int) -> Weights:
    """The same behind a norm."""
    wide = h * file.number("downsample_factor", default=2) ** 2
    inner = file.number("alignment_intermediate_size", default=text)
    return (norm("projector_norm", "layernorm", wide), linear("projector_1", wide, inner), linear("projector_2", inner // 2, text))


def siglip_head(k: Keys, h: int) -> Weights:
    """Attention pooling: a probe, an attention, a norm and a feed-forward."""
    if not k.get("vision_use_head", default=True):
        return ()
    width = k.number("intermediate_size")
    attention = linear("head_attention", h, h, copies=4)
    return (vector("head_probe", h), attention, norm("head_norm", "layernorm", h), *mlp2("head", h, width, h))


def glm4v_norms(k: Keys, h: int) -> Weights:
    return (norm("post_convolution_norm", "rmsnorm", h),)


def mllama_tiles(k: Keys, h: int) -> Weights:
    """Embeddings of every aspect ratio before and after, gated; the global layers' gates."""
    tiles, ratios = k.number("max_num_tiles"), len(k.get("supported_aspect_ratios", default=[])) + 1
    patches = (k.number("image_size") // k.number("patch_size")) ** 2 + 1
    norms = norm("pre_norm", "layernorm", h)
    return (vector("tile_positions", ratios * tiles * (patches + 2) * h + 3), norms)


def mllama_projector(file: Keys, k: Keys, h: int, text: int) -> Weights:
    return (linear("projector", k.number("vision_output_dim"), text),)


def step3(file: Keys, k: Keys, h: int, text: int) -> Weights:
    """Two convolutions of 3 x 3 that double the channels, then a projector."""
    bias = bool(file.get("projector_bias", default=False))
    return (
        linear("downsample_1", 9 * h, 2 * h),
        linear("downsample_2", 18 * h, 4 * h),
        linear("projector", 4 * h, text, bias=bias),
    )


def minimax_m3(file: Keys, k: Keys, h: int, text: int) -> Weights:
    wide = file.number("projector_hidden_size", default=text)
    inner = k.child("img_token_compression_config") or k
    inner.get("temporal_patch_size")
    file.get("img_token_compression_config", "multimodal_projector_bias")
    merge = inner.number("spatial_merge_size", default=2) ** 2
    return (*mlp2("projector", h, wide, text), *mlp2("merge", text * merge, wide, text))


def dino_mask(k: Keys, h: int) -> Weights:
    return (vector("mask_token", h),) if k.get("use_mask_token", default=True) else ()


def mask_token(k: Keys, h: int) -> Weights:
    return (vector("mask_token", h),) if k.get("use_mask_token", default=False) else ()


def projection_dim(file: Keys, k: Keys, h: int, text: int) -> Weights:
    """PaliGemma: one layer, as wide as the file says (the text, where the file is to work)."""
    return (linear("projector", h, file.number("projection_dim", default=text)),)


def registers(k: Keys, h: int) -> Weights:
    """Mask and register tokens."""
    return (vector("further_tokens", (1 + k.get("num_register_tokens", default=0)) * h),)


def aligner(file: Keys, k: Keys, h: int, text: int) -> Weights:
    """Two layers as wide as the text (DeepSeek-VL, VideoLLaMA 3, Audio Flamingo)."""
    return mlp2("projector", h, text, text, bool(file.get("projector_bias", default=True)))


def phi4(file: Keys, k: Keys, h: int, text: int) -> Weights:
    """Two layers; the ends of lines and of images."""
    return (*mlp2("projector", h, text, text), vector("separators", 2 * h))


def vipllava(file: Keys, k: Keys, h: int, text: int) -> Weights:
    """Several layers of the encoder side by side, a norm, two layers."""
    layers = file.get("vision_feature_layers", "vision_feature_layer", default=[-2, -5, -8, -11, 6])
    wide = h * len(layers)
    return (norm("projector_norm", "layernorm", wide), *mlp2("projector", wide, text, text))


def paddle_ocr(file: Keys, k: Keys, h: int, text: int) -> Weights:
    """A norm, 2 x 2 patches into channels, two layers."""
    wide = h * k.number("spatial_merge_size", default=2) ** 2
    return (norm("projector_norm", "layernorm", h), *mlp2("projector", wide, wide, text))


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


def hyperclovax(file: Keys, k: Keys, h: int, text: int) -> Weights:
    """Qwen 2.5's merger, then a projection."""
    return (*qwen25_vl(file, k, h, text), linear("projector", k.number("out_hidden_size", default=text), text))


def muse(file: Keys, k: Keys, h: int, text: int) -> Weights:
    """2 x 2 patches into channels, an adapter of two layers, a projection; no biases."""
    wide, width = file.number("out_hidden_size", default=4 * h), file.number("projector_hidden_size", default=4096)
    return (*mlp2("adapter", wide, width, width, False), matrix("projector", width, text))


def glm_narrow(file: Keys, k: Keys, h: int, text: int) -> Weights:
    """GLM's merger with a width of its own (GLM-OCR, GLM-5-next)."""
    usual = k.number("out_hidden_size", default=text) * k.number("in_channels", default=3)
    return _glm(k, h, text, k.get("projection_intermediate_size") or usual)


def ernie_vl(file: Keys, k: Keys, h: int, text: int) -> Weights:
    """A resampler over space, then over pairs of frames, then a projection."""
    wide, frames = h * k.number("spatial_merge_size", default=2) ** 2, k.number("temporal_merge_size", default=2)
    return (
        *mlp2("spatial", wide, wide, wide), norm("spatial_norm", "layernorm", wide), *mlp2("temporal", wide * frames, wide, wide),
        norm("temporal_norm", "layernorm", wide), linear("projector", wide, text), norm("projector_norm", "rmsnorm", text),
    )  # fmt: skip


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


def dots(file: Keys, k: Keys, h: int, text: int) -> Weights:
    """dots3: a norm, 2 x 2 patches into channels, two layers."""
    return _merger(k, h, text, "layernorm", "adapter_out_dim")


def embedding_norm(k: Keys, h: int) -> Weights:
    """A norm on the patches (Ovis 2)."""
    return (norm("patch_norm", "rmsnorm", h),)


def muse_positions(k: Keys, h: int) -> Weights:
    """A grid of positions for the largest image."""
    return (vector("positions", k.number("pos_emb_height") * k.number("pos_emb_width") * h),)
