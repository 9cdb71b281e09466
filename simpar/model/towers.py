"""Vision and audio encoders beside a decoder, and the projectors between: stacks that no text token passes."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from simpar.model.config_keys import Keys
from simpar.model.pieces import deal, encoder_attention, in_turn, linear, norm_extra, uniform, vector
from simpar.model.projectors import QWEN3, QWEN25, Weights, mlp2
from simpar.model.sam import sam_stack
from simpar.specs.architecture import LayerSpec, StackSpec
from simpar.specs.mixers import CustomSpec, ExpertsSpec, FeedForwardSpec, NormKind

Extra = Callable[[Keys, int], Weights]
"""Weights around an encoder's layers, of (its keys, its width)."""


@dataclass(frozen=True, slots=True)
class Tower:
    """What a vision encoder's class builds without asking its file."""

    norm: NormKind = "layernorm"
    bias: bool = True
    k_bias: bool = True
    o_bias: bool | Literal["qkv"] | None = None
    """Where it is not as `bias`; qkv: as queries, keys and values."""
    mlp_bias: bool | None = True
    """None: as the attention's."""
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
    square: bool = False
    """The heads' widths add up to the width, whatever `head_dim` says."""
    embed_dim: bool = False
    """The width is `embed_dim`; `hidden_size` is the text's (Qwen2-VL)."""
    width: str = ""
    """Key of the feed-forward's width where it is not the usual one."""
    extra: Extra | None = None


def vision_stack(k: Keys, t: Tower) -> StackSpec:
    """The layers of a vision encoder."""
    if k.config.get("use_moe") is False:  # InternViT writes the sizes of experts that it does not build
        k.used.update(n for n in k.config if re.search("moe|expert|noisy_gate|use_rts|use_(weighted_)?residual", n))
    widths = ("embed_dim",) if t.embed_dim else ("vt_hidden_size", "hidden_size", "embed_dim", "width", "d_model")
    h = k.number(*widths, default=1024)
    depth = k.number("vt_num_hidden_layers", "depth", "num_hidden_layers", "layers", "encoder_layers", default=1)
    heads = k.number("vt_num_attention_heads", "num_heads", "num_attention_heads", "attention_heads", "heads", default=1)
    width = k.get("vt_intermediate_size", "intermediate_size", "encoder_ffn_dim", "mlp_dim")
    if t.width:  # the class sets it from this key, whatever intermediate_size says
        width = k.get(t.width) if t.width != "mlp_ratio" else None
    width = int(width if width else h * k.get("mlp_ratio", default=4))
    dim = k.get("head_dim", default=k.get("qkv_hidden_size", default=h) // heads)
    if t.square:
        k.meet("head_dim", dim, h / heads, f"hidden_size / num_attention_heads ({heads})")
    every = bool(k.get("attention_bias", default=t.bias))
    bias = bool(k.get("qkv_bias", "qv_bias", default=every))
    out = every if t.o_bias is None else bias if t.o_bias == "qkv" else t.o_bias
    norm = NORMS.get(str(k.given("norm_type")), t.norm)
    qk_norm = "full" if k.get("use_qk_norm", "qk_normalization", default=False) else t.qk_norm
    attention = encoder_attention(
        heads, h, num_key_value_heads=k.get("num_key_value_heads", default=heads), head_dim=dim,
        q_bias=bool(k.get("query_bias", default=bias)), k_bias=bool(k.get("key_bias", default=bias and t.k_bias)),
        v_bias=bool(k.get("value_bias", default=bias)),
        o_bias=bool(k.get("proj_bias", default=out)),
        qk_norm=qk_norm, qk_norm_kind=t.norm if t.qk_norm != "none" else "rmsnorm",
    )  # fmt: skip
    scale = (vector("layer_scale", h),) if t.layer_scale else ()
    side = _side(k)
    gated = bool(k.get("use_gated_mlp", "use_swiglu_ffn", default=t.gated))
    if k.given("use_swiglu_ffn"):  # DINOv2 giant: two thirds, up to a multiple of 8
        width = (int(width * 2 / 3) + 7) // 8 * 8
    mlp_bias = bool(k.get("mlp_bias", default=every if t.mlp_bias is None else t.mlp_bias))
    mlp = FeedForwardSpec(width=width, gated=gated, bias=mlp_bias)
    final_norm = t.final_norm or k.get("use_mean_pooling") is False
    layer = LayerSpec(sublayers=in_turn(attention, mlp, norm=t.layer, extra=scale))
    return uniform(
        "vision", layer, depth, name="vision", hidden_size=h, norm=norm, final_norm=final_norm, tower=True,
        extra=(*_stem(k, t, h), *(t.extra(k, h) if t.extra else ())),
        input_tokens=side**2 + t.tokens if t.positions == "grid" else 0,
    )  # fmt: skip


NORMS: dict[str, NormKind] = {"rms_norm": "rmsnorm", "layer_norm": "layernorm"}
"""InternViT's names."""


def _side(k: Keys) -> int:
    """Patches along a side of an image of the file's size."""
    image, patch = k.get("image_size", default=224), k.get("patch_size", "encoder_patch_size", default=14)
    image, patch = (int(v[0] if isinstance(v, list) else v) for v in (image, patch))
    return image // patch


def joined_patches(file: Keys, k: Keys, patches: int) -> int:
    """Patches that become one token of the text; `patches` of an image, 0 = it may have any size."""
    sides = [file.given(name) or k.given(name) for name in ("spatial_merge_size", "downsample_factor", "scale_factor")]
    sides += [k.given("pooling_kernel_size"), k.given("merge_kernel_size")]
    sides += [1.0 / ratio for ratio in (file.given("downsample_ratio"), k.given("pixel_shuffle_ratio")) if ratio]
    tokens = file.given("mm_tokens_per_image")
    if tokens and patches:
        return max(patches // int(tokens), 1)
    side = next((s for s in sides if s), STRIDES.get(k.model_type, 1))
    return round(side[0] * side[1] if isinstance(side, list) else float(side) ** 2)


STRIDES = {"step3p5_vision": 4}
"""By how many patches the projector's convolutions step, where no key says it."""


def _stem(k: Keys, t: Tower, h: int) -> Weights:
    """Patches to channels, positions, class tokens."""
    patch = k.get("patch_size", "encoder_patch_size", default=14)
    patch = int(patch[0] if isinstance(patch, list) else patch)
    side = _side(k)
    channels = k.number("num_channels", "in_channels", "in_chans", default=3)
    frames = k.number("temporal_patch_size", default=2) if t.temporal else 1
    found = [linear("patches", channels * frames * patch * patch, h, bias=t.patch_bias)]
    if t.positions == "grid" and k.get("use_absolute_position_embeddings", default=True):
        found.append(vector("positions", (side**2 + t.tokens) * h))
    elif t.positions not in ("none", "grid"):
        found.append(vector("positions", k.number(*t.positions.split("|")) * h))
    if t.tokens:
        found.append(vector("tokens", t.tokens * h))
    if t.pre_norm:
        found.append(norm_extra("pre_norm", t.norm, h))
    return tuple(found)


def mllama_stack(k: Keys) -> StackSpec:
    """Llama 3.2 Vision's encoder: local layers, then gated global ones."""
    base = vision_stack(k, TOWERS["mllama_vision_model"])
    local = base.layers["vision"]
    count, wide = k.number("num_hidden_layers"), k.number("num_global_layers")
    layers = {"local": local, "global": LayerSpec(sublayers=local.sublayers, extra=(vector("gates", 2),))}
    tiles = base.input_tokens * k.number("max_num_tiles")
    return base.model_copy(update={"layers": layers, "pattern": (f"local*{count}", f"global*{wide}"), "input_tokens": tiles})


def dots_stack(k: Keys) -> StackSpec:
    """dots3's encoder: no biases, experts in the last layers, their number by layer."""
    base = vision_stack(k, TOWERS["dots3_note_vision_encoder"])
    attention, dense = base.layers["vision"].sublayers
    kinds, sizes = k.listed("mlp_layer_types"), k.get("per_layer_config", default={})
    routed = k.listed("pyramid_num_routed") or ([-1] * 25 + [*range(4, 65, 4), 64] if kinds is None else [])
    if routed or kinds is None:
        kinds = ["sparse" if number > 0 else "dense" for number in routed]
        sizes = {str(i): {"num_local_experts": number} for i, number in enumerate(routed)}
    every: list[LayerSpec] = []
    for i in range(k.number("num_hidden_layers")):
        feed = dense
        if i < len(kinds) and kinds[i] == "sparse":
            number = sizes.get(str(i), {}).get("num_local_experts", k.number("num_local_experts"))
            chosen = k.number("num_experts_per_tok", default=2)
            experts = ExpertsSpec(num_experts=number, num_experts_per_tok=chosen, width=k.number("moe_intermediate_size"))
            feed = dense.model_copy(update={"branches": (experts,)})
        every.append(LayerSpec(sublayers=(attention, feed)))
    layers, pattern = deal(every, ["vision"] * len(every))
    return base.model_copy(update={"layers": layers, "pattern": pattern})


MOBILENETS = {"mobilenetv5_300m_enc": 294_126_912}
"""timm's encoders of convolutions -> their parameters: what the totals of Gemma 3n E2B and E4B alike leave beside text and sound
(an assumption: not counted from timm)."""


def mobilenet_stack(k: Keys) -> StackSpec:
    """An encoder of convolutions: its weights as one; their work is not known, as each meets another number of positions."""
    name = str(k.get("architecture", default=""))
    if name not in MOBILENETS:
        k.unknown.append(("architecture", name, f"an encoder that is not known; known are {', '.join(MOBILENETS)}"))
    k.note(f"{k.path}architecture = {name}: its weights are counted, the work of its convolutions is not")
    weights = CustomSpec(label="convolutions", extra=(vector("convolutions", MOBILENETS.get(name, 1)),))
    layer = LayerSpec(sublayers=in_turn(weights, norm="none"))
    return uniform(
        "convolutions", layer, 1, name="vision", hidden_size=k.number("hidden_size"), final_norm=False, tower=True, input_tokens=256
    )


def siglip_head(k: Keys, h: int) -> Weights:
    """Attention pooling: a probe, an attention, a norm and a feed-forward."""
    if not k.get("vision_use_head", default=True):
        return ()
    return (
        vector("head_probe", h), linear("head_attention", h, h, copies=4), norm_extra("head_norm", "layernorm", h),
        *mlp2("head", h, k.number("intermediate_size"), h),
    )  # fmt: skip


def mask_token(k: Keys, h: int, default: bool = False) -> Weights:
    return (vector("mask_token", h),) if k.get("use_mask_token", default=default) else ()


def further_tokens(k: Keys, h: int, registers: int = 4) -> Weights:
    """Mask and register tokens."""
    return (vector("further_tokens", (1 + k.get("num_register_tokens", default=registers)) * h),)


def patch_norm(k: Keys, h: int) -> Weights:
    """A norm on the patches (Ovis 2)."""
    return (norm_extra("patch_norm", "rmsnorm", h),)


def muse_positions(k: Keys, h: int) -> Weights:
    """A grid of positions for the largest image."""
    return (vector("positions", k.number("pos_emb_height") * k.number("pos_emb_width") * h),)


def kimi_positions(k: Keys, h: int) -> Weights:
    """A grid of positions that is interpolated to the image's."""
    high, wide = (k.number(f"init_pos_emb_{side}", f"pos_emb_{side}", default=64) for side in ("height", "width"))
    return (vector("positions", high * wide * h),)


def mllama_tiles(k: Keys, h: int) -> Weights:
    """Embeddings of every aspect ratio before and after, gated; the global layers' gates."""
    tiles, ratios = k.number("max_num_tiles"), len(k.get("supported_aspect_ratios", default=[])) + 1
    patches = (k.number("image_size") // k.number("patch_size")) ** 2 + 1
    norms = norm_extra("pre_norm", "layernorm", h)
    return (vector("tile_positions", ratios * tiles * (patches + 2) * h + 3), norms)


WHOLE: dict[str, Callable[[Keys], StackSpec]] = {
    "mllama_vision_model": mllama_stack, "dots3_note_vision_encoder": dots_stack, "got_ocr2_vision": sam_stack,
    "gemma3n_vision": mobilenet_stack,
}  # fmt: skip
"""Vision encoders with layers of several kinds."""
CLIP = Tower(patch_bias=False, tokens=1, pre_norm=True)
TYPE_OF_PARENT: dict[str, str] = {
    "kimi_k25": "kimi_k25_vision", "kimi_vl": "kimi_k25_vision", "kimi_k3": "kimi_k3_vision", "step3p7": "step3p5_vision",
    "llama4": "llama4_vision_model", "mllama": "mllama_vision_model",
    "glm4v": "glm4v_vision", "glm4v_moe": "glm4v_vision", "minimax_m3_vl": "minimax_m3_vl_vision",
    "deepseek_vl_v2": "deepseek_vl_v2_vision", "minicpmv": "minicpmv_vision",
    "internvl_chat": "internvl_vision", "glmga": "glm4v_vision", "molmo2": "molmo2_vision",
}  # fmt: skip
"""A vision encoder's type where its own object does not say it."""

TOWERS: dict[str, Tower] = {
    **dict.fromkeys(QWEN3, Tower(temporal=True, positions="num_position_embeddings", final_norm=False)),
    **dict.fromkeys(
        QWEN25, Tower(norm="rmsnorm", temporal=True, positions="none", patch_bias=False, gated=True, final_norm=False)),
    **dict.fromkeys(
        ("glm_ocr_vision", "glm5_next_vision"),
        Tower(norm="rmsnorm", mlp_bias=None, gated=True, qk_norm="head", temporal=True, positions="none")),
    **dict.fromkeys(
        ("paddleocr_vl_vision", "minicpmv4_6_vision", "minicpmv4_7_vision", "idefics2_vision", "siglip2_navit", "minicpmv_vision",
         "idefics3_vision", "smolvlm_vision", "got_ocr2_vision", "gemma3n_vision"),
        Tower()),
    **dict.fromkeys(("siglip_vision_model", "deepseek_vl_v2_vision", "phi4_multimodal_vision"), Tower(extra=siglip_head)),
    **dict.fromkeys(("clip_vision_model", "git_vision_model"), CLIP), "molmo_vision": replace(CLIP, final_norm=False),
    **dict.fromkeys(
        ("muse_glimmer_vision", "muse_spark_vision"),
        Tower(temporal=True, patch_bias=False, positions="none", pre_norm=True, extra=muse_positions)),
    "qwen2_vl_vision": Tower(embed_dim=True, temporal=True, positions="none", patch_bias=False, final_norm=False),
    "dots3_note_vision_encoder": Tower(
        norm="rmsnorm", bias=False, mlp_bias=False, gated=True, qk_norm="head", positions="none", extra=patch_norm),
    "ernie4_5_vl_moe_vision": Tower(positions="none", patch_bias=False),
    "ovis2_vision": Tower(norm="rmsnorm", bias=False, o_bias="qkv", mlp_bias=False, gated=True, extra=patch_norm),
    "video_llama_3_vision": Tower(positions="none"), "molmo2_vision": Tower(positions="num_position_embeddings", final_norm=False),
    "qianfan_ocr_vision": Tower(o_bias=True, tokens=1, layer_scale=True, final_norm=False, extra=mask_token),
    "siglip2_vision_model": Tower(positions="num_patches", extra=siglip_head),
    "kimi_k25_vision": Tower(positions="none", extra=kimi_positions),
    "kimi_k3_vision": Tower(
        norm="rmsnorm", bias=False, mlp_bias=False, patch_bias=False, positions="none", extra=kimi_positions),
    "gemma4_vision": Tower(
        norm="rmsnorm", bias=False, mlp_bias=False, gated=True, qk_norm="head", patch_bias=False, positions="none",
        layer="sandwich", final_norm=False,
        extra=lambda k, h: (vector("positions", 2 * k.number("position_embedding_size", default=10240) * h),)),
    "step3p5_vision": Tower(patch_bias=False, pre_norm=True, final_norm=False, layer_scale=True, width="mlp_ratio"),
    "internvl_vision": Tower(bias=False, o_bias=True, tokens=1, layer_scale=True, final_norm=False, extra=mask_token),
    "pixtral": Tower(
        norm="rmsnorm", bias=False, mlp_bias=False, gated=True, patch_bias=False, positions="none", pre_norm=True, final_norm=False,
        square=True),
    "llama4_vision_model": CLIP,
    "minimax_m3_vl_vision": Tower(temporal=True, patch_bias=False, positions="none", pre_norm=True, final_norm=False),
    "mllama_vision_model": Tower(bias=False, patch_bias=False, tokens=1, extra=mllama_tiles),
    "glm4v_vision": Tower(
        norm="rmsnorm", bias=False, o_bias=False, mlp_bias=False, gated=True, temporal=True, width="out_hidden_size",
        extra=lambda k, h: (norm_extra("post_convolution_norm", "rmsnorm", h),)),
    "dinov3_vit": Tower(
        k_bias=False, positions="none", tokens=1, layer_scale=True, extra=lambda k, h: further_tokens(k, h, registers=0)),
    "vit": Tower(tokens=1), "deit": Tower(tokens=2),
    "dinov2": Tower(tokens=1, layer_scale=True, extra=lambda k, h: mask_token(k, h, default=True)),
}  # fmt: skip
"""Vision encoder's model_type -> what it builds."""
