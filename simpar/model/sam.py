"""Segment Anything's image encoder, on its own before a decoder that reads pages (GOT-OCR 2)."""

from __future__ import annotations

from simpar.model.config_keys import Keys
from simpar.model.pieces import deal, encoder_attention, in_turn, linear, matrix, vector
from simpar.specs.architecture import LayerSpec, StackSpec
from simpar.specs.mixers import FeedForwardSpec


def sam_stack(k: Keys) -> StackSpec:
    """Attention within windows but in a few layers, relative positions along both sides of what attends itself (Kirillov et al.
    2023, arXiv 2304.02643), a neck of two convolutions."""
    h, heads, neck = k.number("hidden_size"), k.number("num_attention_heads"), k.number("output_channels", default=256)
    image, patch = k.number("image_size", default=1024), k.number("patch_size", default=16)
    side, window, whole = image // patch, k.get("window_size", default=14), k.get("global_attn_indexes", default=())
    bias, relative = bool(k.get("qkv_bias", default=True)), bool(k.get("use_rel_pos", default=True))
    mlp = FeedForwardSpec(width=k.number("mlp_dim", default=4 * h), gated=False, bias=True, activation="gelu")
    layers = []
    for i in range(k.number("num_hidden_layers")):
        near = window and i not in whole
        rows = 2 * (2 * (window if near else side) - 1)
        extra = (vector("relative_positions", rows * (h // heads)),) if relative else ()
        keys = window**2 if near else None
        attention = encoder_attention(heads, h, bias=bias, o_bias=True, keys=keys, extra=extra)
        layers.append(LayerSpec(sublayers=in_turn(attention, mlp)))
    kinds, pattern = deal(layers, ["vision"] * len(layers))
    stem = [linear("patches", k.number("num_channels", default=3) * patch**2, h)]
    stem += [vector("positions", side * side * h)] if k.get("use_abs_pos", default=True) else []
    end = (matrix("neck_1", h, neck), matrix("neck_2", 9 * neck, neck), vector("neck_norms", 4 * neck))
    return StackSpec(
        name="vision", hidden_size=h, layers=kinds, pattern=pattern, norm="layernorm", final_norm=False, tower=True,
        extra=(*stem, *end),
    )  # fmt: skip
