"""Encoders of images and spectrograms on their own, and pairs of encoders (CLIP, SigLIP)."""

from __future__ import annotations

from simpar.model.config_keys import Keys
from simpar.model.family import Family
from simpar.model.pieces import encoder_attention, in_turn, linear, lookup, matrix, uniform, vector
from simpar.model.projectors import Weights
from simpar.model.towers import TOWERS, Tower, further_tokens, vision_stack
from simpar.specs.architecture import ArchitectureSpec, LayerSpec, StackSpec
from simpar.specs.mixers import FeedForwardSpec, WeightSpec


def _distilled(k: Keys, h: int) -> Weights:
    """AST: overlapping patches of a spectrogram, a class and a distillation token."""
    patch, bins, frames = k.number("patch_size", default=16), k.number("num_mel_bins", default=128), k.number("max_length")
    rows = (bins - patch) // k.number("frequency_stride", default=10) + 1
    columns = (frames - patch) // k.number("time_stride", default=10) + 1
    return (vector("positions", (rows * columns + 2) * h),)


def _beit(k: Keys, h: int) -> Weights:
    """Masked tokens and relative positions by layer, where they are used; keys without bias."""
    depth, heads = k.number("num_hidden_layers"), k.number("num_attention_heads")
    rows = (2 * (k.number("image_size") // k.number("patch_size")) - 1) ** 2 + 3
    tables = depth if k.get("use_relative_position_bias", default=False) else 0
    tables += bool(k.get("use_shared_relative_position_bias", default=False))
    found = [vector("class_token", h)]
    found += [lookup("relative_bias", rows, heads, copies=tables)] if tables else []
    found += [vector("mask_token", h)] if k.get("use_mask_token", default=False) else []
    patches = (k.number("image_size") // k.number("patch_size")) ** 2 + 1
    found += [vector("positions", patches * h)] if k.get("use_absolute_position_embeddings", default=False) else []
    return tuple(found)


ALONE: dict[str, Tower] = {
    **{name: TOWERS[name] for name in ("vit", "deit", "dinov2", "dinov3_vit", "siglip_vision_model", "siglip2_vision_model")},
    "clip_vision_model": TOWERS["clip_vision_model"],
    "dinov2_with_registers": Tower(tokens=1, layer_scale=True, extra=further_tokens),
    **dict.fromkeys(("vit_mae", "vit_msn"), Tower(tokens=1)),
    "ijepa": Tower(),
    "beit": Tower(k_bias=False, positions="none", layer_scale=True, extra=_beit),
    "videomae": Tower(k_bias=False, positions="none", temporal=True, final_norm=False),
    "audio-spectrogram-transformer": Tower(positions="none", tokens=2, extra=_distilled),
}
"""Image and spectrogram encoders by model_type."""


def vit(k: Keys, family: Family) -> ArchitectureSpec:
    """A vision transformer on its own."""
    k.get("out_features", "out_indices", "stage_names", "reshape_hidden_states", "mask_ratio", "vocab_size")
    k.get(*(f"decoder_{n}" for n in ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")))
    if k.model_type == "audio-spectrogram-transformer":
        k.config = {"num_channels": 1, **k.config}
    if k.model_type == "videomae":
        k.config = {"temporal_patch_size": k.number("tubelet_size", default=2), **k.config}
    stack = vision_stack(k, ALONE[k.model_type]).model_copy(update={"tower": False})
    h = stack.hidden_size
    pooled = k.model_type in ("vit", "deit")
    extra = linear("pooler", h, k.get("pooler_output_size", default=h), uses=0.0)
    return ArchitectureSpec(stacks=(stack,), head=False, extra=(extra,) if pooled else ())


def text_stack(k: Keys) -> tuple[StackSpec, tuple[WeightSpec, ...]]:
    """The text encoder of a pair, and its positions."""
    h, heads = k.number("hidden_size"), k.number("num_attention_heads")
    causal = k.model_type == "clip_text_model"
    attention = encoder_attention(heads, h, causal=causal, position="absolute")
    mlp = FeedForwardSpec(width=k.number("intermediate_size"), gated=False, bias=True, activation="gelu")
    layer = LayerSpec(sublayers=in_turn(attention, mlp))
    rows = k.number("max_position_embeddings")
    head = (linear("pooler", h, k.number("projection_size", default=h), uses=0.0),)
    stack = uniform("text", layer, k.number("num_hidden_layers"), hidden_size=h, norm="layernorm")
    position = lookup("position", rows, h)
    return stack, (position, *(() if causal else head))


def text_encoder(k: Keys, family: Family) -> ArchitectureSpec:
    """The text half of a pair on its own."""
    stack, extra = text_stack(k)
    return ArchitectureSpec(vocab_size=k.number("vocab_size"), head=False, stacks=(stack,), extra=extra)


PAIRS = {
    "clip": ("clip_text_model", "clip_vision_model"), "siglip": ("siglip_text_model", "siglip_vision_model"),
    "siglip2": ("siglip2_text_model", "siglip2_vision_model"),
}  # fmt: skip
"""Models that nest the keys of two encoders, with the types of both."""


def pair(k: Keys, family: Family) -> ArchitectureSpec:
    """CLIP and SigLIP: an encoder of images beside one of text; FLOPs are of a text token."""
    names, parts = PAIRS[k.model_type], ("text_config", "vision_config")
    words, images = (
        k.child(part, like=name) or Keys({}, k.file, f"{part}.", name) for part, name in zip(parts, names, strict=True)
    )
    for part in (k, words, images):
        part.used.add("tie_word_embeddings")  # there is no head
    text, extra = text_stack(words)
    vision = vision_stack(images, TOWERS[names[1]])
    joint: Weights = (vector("logit_scale_and_bias", 2),)
    if k.model_type == "clip":  # projections into one space, once per sample, and the learned scale
        width = k.number("projection_dim", default=512)
        joint = (
            matrix("text_projection", text.hidden_size, width, uses=0.0),
            matrix("visual_projection", vision.hidden_size, width, uses=0.0), vector("logit_scale", 1),
        )  # fmt: skip
    return ArchitectureSpec(vocab_size=words.number("vocab_size"), head=False, stacks=(vision, text), extra=(*extra, *joint))
