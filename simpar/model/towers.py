"""Vision and audio encoders beside a decoder, and the projectors between: stacks that no text token passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from simpar.model.config_keys import Keys
from simpar.model.decoder import norm_extra, vector
from simpar.specs.architecture import (
    AttentionSpec,
    FeedForwardSpec,
    LayerSpec,
    NormKind,
    StackSpec,
    SublayerSpec,
    WeightSpec,
)


@dataclass(frozen=True, slots=True)
class Tower:
    """What a vision encoder's class builds without asking its file."""

    norm: NormKind = "layernorm"
    bias: bool = True
    k_bias: bool = True
    o_bias: bool | None = None
    """Where it is not as `bias`."""
    mlp_bias: bool = True
    gated: bool = False
    qk_norm: str = "none"
    patch_bias: bool = True
    temporal: bool = False
    """Patches of several frames."""
    positions: str = "grid"
    """grid: one per patch of the image (and class token); a key with their number; none."""
    tokens: int = 0
    """Class and register tokens."""
    pre_norm: bool = False
    final_norm: bool = True
    layer: str = "pre"
    layer_scale: bool = False
    embed_dim: bool = False
    """The width is `embed_dim`; `hidden_size` is the text's (Qwen2-VL)."""
    width: str = ""
    """Key of the feed-forward's width where it is not the usual one."""
    extra: Callable[[Keys, int], tuple[WeightSpec, ...]] | None = None
    projector: Callable[[Keys, Keys, int, int], tuple[WeightSpec, ...]] | None = None
    """Weights between tower and text, of (whole file, tower's keys, tower's width, text's width)."""


def vision_stack(k: Keys, t: Tower) -> StackSpec:
    """The layers of a vision encoder."""
    h = k.number(
        *(("embed_dim",) if t.embed_dim else ()), "vt_hidden_size", "hidden_size", "embed_dim", "width", "d_model", default=1024
    )
    depth = k.number("vt_num_hidden_layers", "depth", "num_hidden_layers", "layers", "encoder_layers", default=1)
    heads = k.number("vt_num_attention_heads", "num_heads", "num_attention_heads", "attention_heads", "heads", default=1)
    width = k.get("vt_intermediate_size", "intermediate_size", "encoder_ffn_dim", "mlp_dim")
    if t.width:  # the class sets it from this key, whatever intermediate_size says
        width = k.get(t.width) if t.width != "mlp_ratio" else None
    width = int(width if width else h * k.get("mlp_ratio", default=4))
    dim = k.get("head_dim", default=k.get("qkv_hidden_size", default=h) // heads)
    attention = AttentionSpec(
        num_heads=heads, num_key_value_heads=k.get("num_key_value_heads", default=heads), head_dim=dim, causal=False,
        q_bias=t.bias, k_bias=t.bias and t.k_bias, v_bias=t.bias, o_bias=t.bias if t.o_bias is None else t.o_bias,
        qk_norm=t.qk_norm, qk_norm_kind=t.norm,
    )  # fmt: skip
    scale = (vector("layer_scale", h),) if t.layer_scale else ()
    mlp = FeedForwardSpec(width=width, gated=t.gated, bias=t.mlp_bias)
    steps = tuple(SublayerSpec(branches=(b,), norm=t.layer, extra=scale) for b in (attention, mlp))
    return StackSpec(
        name="vision", hidden_size=h, layers={"vision": LayerSpec(sublayers=steps)}, pattern=(f"vision*{depth}",), norm=t.norm,
        final_norm=t.final_norm, tower=True, extra=(*_stem(k, t, h), *(t.extra(k, h) if t.extra else ())),
    )  # fmt: skip


def _stem(k: Keys, t: Tower, h: int) -> tuple[WeightSpec, ...]:
    """Patches to channels, positions, class tokens."""
    patch = k.get("patch_size", "encoder_patch_size", default=14)
    patch = int(patch[0] if isinstance(patch, list) else patch)
    channels = k.number("num_channels", "in_channels", "in_chans", default=3)
    frames = k.number("temporal_patch_size", default=2) if t.temporal else 1
    found = [WeightSpec(name="patches", inputs=channels * frames * patch * patch, outputs=h, bias=t.patch_bias)]
    if t.positions == "grid":
        image = k.get("image_size", default=224)
        image = image[0] if isinstance(image, list) else image
        found.append(vector("positions", ((image // patch) ** 2 + t.tokens) * h))
    elif t.positions != "none":
        found.append(vector("positions", k.number(*t.positions.split("|")) * h))
    if t.tokens:
        found.append(vector("tokens", t.tokens * h))
    if t.pre_norm:
        found.append(norm_extra("pre_norm", t.norm, h))
    return tuple(found)


def _linear(name: str, inputs: int, outputs: int, bias: bool = True, copies: int = 1) -> WeightSpec:
    return WeightSpec(name=name, inputs=inputs, outputs=outputs, bias=bias, copies=copies)


def _mlp2(name: str, inputs: int, inner: int, outputs: int, bias: bool = True) -> tuple[WeightSpec, ...]:
    return (_linear(f"{name}_1", inputs, inner, bias), _linear(f"{name}_2", inner, outputs, bias))


Weights = tuple[WeightSpec, ...]


def _qwen2_vl(file: Keys, k: Keys, h: int, text: int) -> Weights:
    """Merger of 2 x 2 patches: a norm and two layers."""
    wide = h * k.number("spatial_merge_size", default=2) ** 2
    return (norm_extra("merger_norm", "layernorm", h), *_mlp2("merger", wide, wide, k.number("hidden_size", default=text)))


def _qwen25_vl(file: Keys, k: Keys, h: int, text: int) -> Weights:
    k.get("fullatt_block_indexes", "window_size", "tokens_per_second", "spatial_patch_size")
    wide = h * k.number("spatial_merge_size", default=2) ** 2
    out = k.number("out_hidden_size", default=text)
    return (norm_extra("merger_norm", "rmsnorm", h), *_mlp2("merger", wide, wide, out))


def _qwen3_vl(file: Keys, k: Keys, h: int, text: int) -> Weights:
    """The merger, and one more for each layer whose maps reach the decoder (DeepStack)."""
    wide = h * k.number("spatial_merge_size", default=2) ** 2
    out = k.number("out_hidden_size", default=text)
    found = [norm_extra("merger_norm", "layernorm", h), *_mlp2("merger", wide, wide, out)]
    for i, _ in enumerate(k.get("deepstack_visual_indexes", default=[]) or []):
        found += [norm_extra(f"deepstack_{i}_norm", "layernorm", wide), *_mlp2(f"deepstack_{i}", wide, wide, out)]
    return tuple(found)


def _llava(file: Keys, k: Keys, h: int, text: int) -> Weights:
    file.get("vision_feature_layer", "vision_feature_select_strategy", "image_seq_length", "projector_hidden_act")
    layers = file.get("vision_feature_layer", default=-2)
    count = len(layers) if isinstance(layers, list) else 1
    return _mlp2("projector", h * count, text, text, bool(file.get("multimodal_projector_bias", default=True)))


def _internvl(file: Keys, k: Keys, h: int, text: int) -> Weights:
    wide = int(h / file.get("downsample_ratio", default=0.5) ** 2)
    return (norm_extra("projector_norm", "layernorm", wide), *_mlp2("projector", wide, text, text))


def _pixel_unshuffle(file: Keys, k: Keys, h: int, text: int) -> Weights:
    """LFM2-VL: 2 x 2 patches into channels, two layers."""
    file.get("encoder_patch_size", "max_image_tokens", "min_image_tokens")
    wide, inner = h * file.number("downsample_factor", default=2) ** 2, file.number("projector_hidden_size", default=2560)
    norm = (norm_extra("projector_norm", "layernorm", wide),) if file.get("projector_use_layernorm", default=True) else ()
    return (*norm, *_mlp2("projector", wide, inner, text, bool(file.get("projector_bias", default=True))))


def _kimi(file: Keys, k: Keys, h: int, text: int) -> Weights:
    merge = k.get("merge_kernel_size", "spatial_merge_size", default=2)
    wide = h * (merge[0] * merge[1] if isinstance(merge, list) else merge**2)
    return (norm_extra("projector_norm", "layernorm", h), *_mlp2("projector", wide, wide, text))


def _kimi_positions(k: Keys, h: int) -> Weights:
    """A grid of positions that is interpolated to the image's."""
    k.get("init_pos_emb_time")
    rows = k.number("init_pos_emb_height", "pos_emb_height", default=64) * k.number(
        "init_pos_emb_width", "pos_emb_width", default=64
    )
    return (vector("positions", rows * h),)


def _gemma3(file: Keys, k: Keys, h: int, text: int) -> Weights:
    file.get("mm_tokens_per_image")
    return (_linear("projector", h, text, False), norm_extra("projector_norm", "rmsnorm", h))


def _one(bias: bool) -> Callable[[Keys, Keys, int, int], Weights]:
    return lambda file, k, h, text: (_linear("projector", h, text, bias),)


def _gemma4_positions(k: Keys, h: int) -> Weights:
    k.get("default_output_length", "pooling_kernel_size", "standardize", "use_clipped_linears", "global_head_dim", "layer_types")
    return (vector("positions", 2 * k.number("position_embedding_size", default=10240) * h),)


def _llama4(file: Keys, k: Keys, h: int, text: int) -> Weights:
    """Pixel shuffle by pixel_shuffle_ratio, two layers without biases, then the projector."""
    wide, k_inner = k.number("intermediate_size"), k.number("projector_input_dim", default=4096)
    k.get("pixel_shuffle_ratio", "projector_output_dim")
    out = k.number("projector_output_dim", default=4096)
    return (
        *_mlp2("adapter", wide, k_inner, out, False),
        _linear("projector", k.number("vision_output_dim", default=out), text, False),
    )


def _mistral3(file: Keys, k: Keys, h: int, text: int) -> Weights:
    merge = file.number("spatial_merge_size", default=2)
    bias = bool(file.get("multimodal_projector_bias", default=False))
    return (
        norm_extra("projector_norm", "rmsnorm", h), _linear("patch_merger", h * merge * merge, h, False),
        *_mlp2("projector", h, text, text, bias),
    )  # fmt: skip


def _glm4v(file: Keys, k: Keys, h: int, text: int) -> Weights:
    """A convolution of 2 x 2, a projection, a norm and a gated layer."""
    out, merge = k.number("out_hidden_size", default=text), k.number("spatial_merge_size", default=2)
    width = k.number("intermediate_size")
    return (
        _linear("downsample", h * merge * merge, out), _linear("merger", out, out, False), norm_extra("merger_norm",
        "layernorm", out),
        _linear("merger_gate_up", out, 2 * width, False), _linear("merger_down", width, out, False),
    )  # fmt: skip


def _idefics3(file: Keys, k: Keys, h: int, text: int) -> Weights:
    """Pixel shuffle by scale_factor, one matrix."""
    return (_linear("projector", h * file.number("scale_factor", default=2) ** 2, text, False),)


def _llava_newline(file: Keys, k: Keys, h: int, text: int) -> Weights:
    return (*_llava(file, k, h, text), vector("image_newline", text))


def _cohere2_vision(file: Keys, k: Keys, h: int, text: int) -> Weights:
    """Pixel shuffle, a gated layer."""
    inner = file.number("alignment_intermediate_size", default=36864)
    return (
        _linear("projector_1", h * file.number("downsample_factor", default=2) ** 2, inner),
        _linear("projector_2", inner // 2, text),
    )


def _siglip_head(k: Keys, h: int) -> Weights:
    """Attention pooling: a probe, an attention, a norm and a feed-forward."""
    if not k.get("vision_use_head", default=True):
        return ()
    width = k.number("intermediate_size")
    attention = _linear("head_attention", h, h, copies=4)
    return (vector("head_probe", h), attention, norm_extra("head_norm", "layernorm", h), *_mlp2("head", h, width, h))


def _glm4v_norms(k: Keys, h: int) -> Weights:
    return (norm_extra("post_convolution_norm", "rmsnorm", h),)


def _mllama_tiles(k: Keys, h: int) -> Weights:
    """Embeddings of every aspect ratio before and after, gated; the global layers' gates."""
    tiles, ratios = k.number("max_num_tiles"), len(k.get("supported_aspect_ratios", default=[])) + 1
    patches = (k.number("image_size") // k.number("patch_size")) ** 2 + 1
    norms = norm_extra("pre_norm", "layernorm", h)
    return (vector("tile_positions", ratios * tiles * (patches + 2) * h + 3), norms)


def mllama_stack(k: Keys) -> StackSpec:
    """Llama 3.2 Vision's encoder: local layers, then gated global ones."""
    base = vision_stack(k, TOWERS["mllama_vision_model"])
    local = base.layers["vision"]
    count, wide = k.number("num_hidden_layers"), k.number("num_global_layers")
    k.get("intermediate_layers_indices", "vision_output_dim", "supported_aspect_ratios")
    layers = {"local": local, "global": LayerSpec(sublayers=local.sublayers, extra=(vector("gates", 2),))}
    return base.model_copy(update={"layers": layers, "pattern": (f"local*{count}", f"global*{wide}")})


def _mllama_projector(file: Keys, k: Keys, h: int, text: int) -> Weights:
    return (_linear("projector", k.number("vision_output_dim"), text),)


def _step3(file: Keys, k: Keys, h: int, text: int) -> Weights:
    """Two convolutions of 3 x 3 that double the channels, then a projector."""
    bias = bool(file.get("projector_bias", default=False))
    return (_linear("downsample_1", 9 * h, 2 * h), _linear("downsample_2", 18 * h, 4 * h), _linear("projector", 4 * h, text, bias))


def _minimax_m3(file: Keys, k: Keys, h: int, text: int) -> Weights:
    wide = file.number("projector_hidden_size", default=text)
    inner = k.child("img_token_compression_config") or k
    inner.get("image_token_compression_method", "temporal_patch_size")
    file.get("img_token_compression_config", "multimodal_projector_bias")
    k.get("projection_dim", "position_embedding_type", "vocab_size", "image_size")
    merge = inner.number("spatial_merge_size", default=2) ** 2
    return (*_mlp2("projector", h, wide, text), *_mlp2("merge", text * merge, wide, text))


def _dino_mask(k: Keys, h: int) -> Weights:
    return (vector("mask_token", h),)


def _registers(k: Keys, h: int) -> Weights:
    """Mask and register tokens."""
    k.get("query_bias", "value_bias", "key_bias", "proj_bias", "mlp_bias", "use_gated_mlp", "layerscale_value", "apply_layernorm")
    return (vector("further_tokens", (1 + k.get("num_register_tokens", default=0)) * h),)


QWEN3 = Tower(temporal=True, positions="num_position_embeddings", final_norm=False, projector=_qwen3_vl)
SIGLIP = Tower(extra=_siglip_head)
BY_PARENT: dict[str, Callable[[Keys, Keys, int, int], Weights]] = {
    **dict.fromkeys(("llava",), _llava),
    **dict.fromkeys(("llava_next", "llava_onevision", "llava_next_video"), _llava_newline),
    **dict.fromkeys(("idefics3", "smolvlm"), _idefics3),
    "cohere2_vision": _cohere2_vision,
    **dict.fromkeys(("gemma3", "shieldgemma2"), _gemma3),
    **dict.fromkeys(("internvl",), _internvl),
    **dict.fromkeys(("mistral3", "lighton_ocr", "mistral_large4"), _mistral3),
    **dict.fromkeys(("lfm2_vl",), _pixel_unshuffle),
    "paligemma": _one(True),
    "gemma4": _one(False),
}
"""Projectors that belong to the whole model rather than to its vision encoder."""
TYPE_OF_PARENT: dict[str, str] = {
    "kimi_k25": "kimi_k25_vision", "kimi_k3": "kimi_k3_vision", "step3p7": "step3p5_vision", "mllama": "mllama_vision_model",
    "llama4": "llama4_vision_model",
    "glm4v": "glm4v_vision", "glm4v_moe": "glm4v_vision", "minimax_m3_vl": "minimax_m3_vl_vision",
    "internvl_chat": "internvl_vision",
}  # fmt: skip
"""A vision encoder's type where its own object does not say it."""

TOWERS: dict[str, Tower] = {
    **dict.fromkeys(
        ("qwen3_vl", "qwen3_vl_vision", "qwen3_vl_moe", "qwen3_vl_moe_vision", "qwen3_5", "qwen3_5_vision", "qwen3_5_moe",
         "qwen3_5_moe_vision", "qwen4_exp_vision"),
        QWEN3,
    ),
    "qwen2_vl": Tower(embed_dim=True, temporal=True, positions="none", patch_bias=False, final_norm=False, projector=_qwen2_vl),
    "qwen2_5_vl": Tower(
        norm="rmsnorm", temporal=True, positions="none", patch_bias=False, gated=True, final_norm=False, projector=_qwen25_vl
    ),
    "siglip_vision_model": SIGLIP,
    "idefics3_vision": Tower(), "smolvlm_vision": Tower(),
    "siglip2_vision_model": Tower(positions="num_patches", extra=_siglip_head),
    "clip_vision_model": Tower(patch_bias=False, tokens=1, pre_norm=True, final_norm=True),
    "kimi_k25_vision": Tower(positions="none", extra=_kimi_positions, projector=_kimi),
    "kimi_k3_vision": Tower(
        norm="rmsnorm", bias=False, mlp_bias=False, patch_bias=False, positions="none", extra=_kimi_positions, projector=_kimi
    ),
    "gemma4_vision": Tower(
        norm="rmsnorm", bias=False, mlp_bias=False, gated=True, qk_norm="head", patch_bias=False, positions="none",
        layer="sandwich",
        final_norm=False, extra=_gemma4_positions, projector=_one(False),
    ),
    "step3p5_vision": Tower(
        patch_bias=False, positions="grid", pre_norm=True, final_norm=False, layer_scale=True, width="mlp_ratio", projector=_step3
    ),
    "internvl_vision": Tower(bias=False, o_bias=True, tokens=1, layer_scale=True, final_norm=False),
    "pixtral": Tower(
        norm="rmsnorm", bias=False, mlp_bias=False, gated=True, patch_bias=False, positions="none", pre_norm=True, final_norm=False
    ),
    "llama4_vision_model": Tower(patch_bias=False, tokens=1, pre_norm=True, final_norm=True, projector=_llama4),
    "minimax_m3_vl_vision": Tower(
        temporal=True, patch_bias=False, positions="none", pre_norm=True, final_norm=False, projector=_minimax_m3
    ),
    "mllama_vision_model": Tower(bias=False, patch_bias=False, positions="grid", tokens=1, extra=_mllama_tiles,
    projector=_mllama_projector),
    "glm4v_vision": Tower(
        norm="rmsnorm", bias=False, mlp_bias=False, gated=True, temporal=True, width="out_hidden_size", extra=_glm4v_norms,
        projector=_glm4v
    ),
    "dinov3_vit": Tower(k_bias=False, positions="none", tokens=1, layer_scale=True, extra=_registers),
    "vit": Tower(tokens=1), "deit": Tower(tokens=2), "dinov2": Tower(tokens=1, layer_scale=True, extra=_dino_mask),
}  # fmt: skip
"""Vision encoder's model_type -> what it builds."""
