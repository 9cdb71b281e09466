"""Diffusion transformers as diffusers writes them: FLUX (MMDiT), Wan (video)."""

from __future__ import annotations

from typing import Any

from simpar.model.config_keys import Keys
from simpar.model.decoder import deal, vector
from simpar.specs.architecture import (
    ArchitectureSpec,
    AttentionSpec,
    FeedForwardSpec,
    LayerSpec,
    StackSpec,
    SublayerSpec,
    WeightSpec,
)

TEXT_TOKENS = 512
"""Text tokens beside the image's: T5's length in FLUX and Wan."""


def _w(name: str, inputs: int, outputs: int, uses: float | None = None, bias: bool = True) -> WeightSpec:
    return WeightSpec(name=name, inputs=inputs, outputs=outputs, bias=bias, uses=uses)


def _embedder(name: str, inputs: int, h: int) -> tuple[WeightSpec, ...]:
    """Two layers on a vector per sample (time, guidance, pooled text)."""
    return (_w(f"{name}_1", inputs, h, 0.0), _w(f"{name}_2", h, h, 0.0))


class Flux:
    """FLUX.1: double blocks with weights of their own for image and text, then single blocks on both streams in one.

    FLOPs are of an image token: the text stream's weights and the modulation, once per sample, are held and not counted.
    """

    def __init__(self, keys: Keys) -> None:
        self.k = keys
        self.heads = keys.number("num_attention_heads")
        self.dim = keys.number("attention_head_dim")
        self.hidden = self.heads * self.dim
        self.num_double = keys.number("num_layers", "num_blocks")
        self.num_single = keys.get("num_single_layers", default=0)

    def attention(self, text_stream: bool) -> AttentionSpec:
        h, d = self.hidden, self.dim
        extra = [vector("qk_norm", 2 * d)]
        if text_stream:
            extra += [_w("text_qkv", h, 3 * h, 0.0), _w("text_out", h, h, 0.0), vector("text_qk_norm", 2 * d)]
        return AttentionSpec(
            num_heads=self.heads, num_key_value_heads=self.heads, head_dim=d, causal=False, q_bias=True, k_bias=True, v_bias=True,
            o_bias=text_stream, joint_keys=TEXT_TOKENS, extra=tuple(extra),
        )  # fmt: skip

    def double(self) -> LayerSpec:
        h = self.hidden
        mlp = FeedForwardSpec(
            width=4 * h,
            gated=False,
            bias=True,
            activation="gelu",
            extra=(_w("text_up", h, 4 * h, 0.0), _w("text_down", 4 * h, h, 0.0)),
        )
        modulation = (_w("modulation", h, 6 * h, 0.0), _w("text_modulation", h, 6 * h, 0.0))
        steps = tuple(SublayerSpec(branches=(b,), norm="none") for b in (self.attention(True), mlp))
        return LayerSpec(sublayers=steps, extra=modulation)

    def single(self) -> LayerSpec:
        """Attention and feed-forward side by side, one output matrix over both."""
        h = self.hidden
        mlp = FeedForwardSpec(width=4 * h, gated=False, bias=True, activation="gelu")
        step = SublayerSpec(branches=(self.attention(False), mlp), norm="none")
        return LayerSpec(sublayers=(step,), extra=(_w("modulation", h, 3 * h, 0.0),))

    def architecture(self) -> ArchitectureSpec:
        k, h = self.k, self.hidden
        channels, patch = k.number("in_channels", "input_dim"), k.number("patch_size", default=1)
        out = k.get("out_channels", default=channels)
        k.get("vocab_size", "tie_word_embeddings", "disable_guidance_embedder", "input_dim", "axes_dims_rope")
        extra = [
            _w("image_in", channels, h), _w("text_in", k.number("joint_attention_dim"), h, 0.0), *_embedder("time", 256, h),
            *_embedder("pooled_text", k.number("pooled_projection_dim"), h),
            _w("out_modulation", h, 2 * h, 0.0), _w("out", h, patch * patch * out),
        ]  # fmt: skip
        if k.get("guidance_embeds", default=False):
            extra += _embedder("guidance", 256, h)
        every = [self.double()] * self.num_double + [self.single()] * self.num_single
        names = ["double"] * self.num_double + ["single"] * self.num_single
        layers, pattern = deal(every, names)
        stack = StackSpec(
            name="diffusion", hidden_size=h, layers=layers, pattern=pattern, norm="unweighted", final_norm=False, extra=tuple(extra)
        )
        return ArchitectureSpec(head=False, stacks=(stack,))


def _size(keys: Keys, *names: str, default: int | None = None) -> int:
    return keys.number(*names, default=default)


class Wan:
    """Wan 2.1: self-attention over the video's latents, cross-attention to the text, one shared modulation.

    FLOPs are of a latent token: keys and values of the text, time and modulation come once per sample.
    """

    def __init__(self, keys: Keys) -> None:
        self.k = keys
        self.heads = _size(keys, "num_attention_heads", "num_heads")
        self.hidden = _size(keys, "dim", default=self.heads * keys.get("attention_head_dim", default=128))
        self.layers = _size(keys, "num_layers")
        self.image = str(keys.get("has_image_input", default="false")).lower() == "true" or bool(
            keys.get("image_dim", "added_kv_proj_dim", default=0)
        )

    def layer(self) -> LayerSpec:
        h, d = self.hidden, self.hidden // self.heads
        biases: dict[str, Any] = dict.fromkeys(("q_bias", "k_bias", "v_bias", "o_bias"), True)
        base: dict[str, Any] = {"num_heads": self.heads, "num_key_value_heads": self.heads, "head_dim": d, "causal": False}
        own = AttentionSpec(**base, **biases, qk_norm="full")
        text = [_w("k", h, h, 0.0), _w("v", h, h, 0.0), vector("k_norm", h)]
        if self.image:
            text += [_w("image_k", h, h, 0.0), _w("image_v", h, h, 0.0), vector("image_k_norm", h)]
        tokens = self.k.get("text_len", default=TEXT_TOKENS)
        cross = AttentionSpec(
            **base, q_bias=True, o_bias=True, cross=True, keys=tokens, key_value="query_only", qk_norm="full", extra=tuple(text)
        )
        mlp = FeedForwardSpec(width=_size(self.k, "ffn_dim"), gated=False, bias=True, activation="gelu")
        steps = (
            SublayerSpec(branches=(own,), num_norms=0), SublayerSpec(branches=(cross,), num_norms=1),
            SublayerSpec(branches=(mlp,), num_norms=0),
        )  # fmt: skip
        return LayerSpec(sublayers=steps, extra=(vector("modulation", 6 * h),))

    def architecture(self) -> ArchitectureSpec:
        k, h = self.k, self.hidden
        patch = k.get("patch_size", default=[1, 2, 2])
        volume = patch[0] * patch[1] * patch[2]
        text, time = _size(k, "text_dim", default=4096), _size(k, "freq_dim", default=256)
        extra = [
            _w("patches", volume * _size(k, "in_channels", "in_dim"), h), _w("text_1", text, h, 0.0), _w("text_2", h, h, 0.0),
            *_embedder("time", time, h), _w("time_modulation", h, 6 * h, 0.0), vector("out_modulation", 2 * h),
            _w("out", h, volume * _size(k, "out_channels", "out_dim", default=16)),
        ]  # fmt: skip
        k.get(
            "model_type",
            "cross_attn_norm",
            "qk_norm",
            "tie_word_embeddings",
            "in_dim",
            "out_dim",
            "rope_max_seq_len",
            "window_size",
        )
        if self.image:
            width = _size(k, "image_dim", default=1280)
            extra += [vector("image_norms", 2 * width + 2 * h), _w("image_1", width, width, 0.0), _w("image_2", width, h, 0.0)]
        layers, pattern = deal([self.layer()] * self.layers, ["video"] * self.layers)
        stack = StackSpec(
            name="diffusion", hidden_size=h, layers=layers, pattern=pattern, norm="layernorm", final_norm=False, extra=tuple(extra)
        )
        return ArchitectureSpec(head=False, stacks=(stack,))


DIFFUSION_READERS: dict[str, Any] = {
    "flux": Flux, "FluxModel": Flux, "FluxTransformer2DModel": Flux, "wan": Wan, "WanModel": Wan, "WanTransformer3DModel": Wan,
}  # fmt: skip
