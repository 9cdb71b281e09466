"""Diffusion transformers as diffusers writes them: FLUX and its kin (MMDiT), DiT and its kin, Wan (video)."""

from __future__ import annotations

from typing import Any

from simpar.model.config_keys import Keys
from simpar.model.decoder import deal, vector
from simpar.specs.architecture import (
    ArchitectureSpec,
    AttentionSpec,
    BranchSpec,
    FeedForwardSpec,
    LayerSpec,
    LinearAttentionSpec,
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


class MMDiT:
    """Double blocks with weights of their own for image and text, joint attention, then single blocks on both streams in one.

    FLOPs are of an image token: the text stream's weights and the modulation, once per sample, are held and not counted.
    """

    bias, gated, ratio = True, False, 4.0
    modulated = True
    """Every block makes its shifts, scales and gates from the time embedding."""

    def __init__(self, keys: Keys) -> None:
        self.k = keys
        self.heads = keys.number("num_attention_heads")
        self.dim = keys.number("attention_head_dim")
        self.hidden = self.heads * self.dim
        self.num_double = keys.number("num_layers", "num_blocks")
        self.num_single = keys.get("num_single_layers", default=0)
        keys.get("vocab_size", "tie_word_embeddings", "axes_dims_rope", "rope_axes_dim", "sample_size", "qk_norm")

    @property
    def width(self) -> int:
        return int(self.ratio * self.hidden)

    def qk_norm(self) -> bool:
        return True

    def text_tokens(self) -> int:
        return TEXT_TOKENS

    def attention(self, text_stream: bool, last: bool = False) -> AttentionSpec:
        h, d, bias = self.hidden, self.dim, self.bias
        norms = self.qk_norm()
        extra = [vector("qk_norm", 2 * d)] if norms else []
        if text_stream:
            extra += [_w("text_qkv", h, 3 * h, 0.0, bias)] + ([] if last else [_w("text_out", h, h, 0.0, bias)])
            extra += [vector("text_qk_norm", 2 * d)] if norms else []
        return AttentionSpec(
            num_heads=self.heads, num_key_value_heads=self.heads, head_dim=d, causal=False, q_bias=bias, k_bias=bias, v_bias=bias,
            o_bias=text_stream and bias, joint_keys=self.text_tokens(), extra=tuple(extra),
        )  # fmt: skip

    def mlp(self, *extra: WeightSpec) -> FeedForwardSpec:
        return FeedForwardSpec(width=self.width, gated=self.gated, bias=self.bias, activation="gelu", extra=extra)

    def double(self, i: int) -> LayerSpec:
        h, wide = self.hidden, self.width * (2 if self.gated else 1)
        last = self.text_ends() and i == self.num_double - 1
        text = () if last else (_w("text_up", h, wide, 0.0, self.bias), _w("text_down", self.width, h, 0.0, self.bias))
        branches = (*self.mixers(i, last), self.mlp(*text))
        steps = tuple(SublayerSpec(branches=(b,), norm="none") for b in branches)
        return LayerSpec(sublayers=steps, extra=self.modulation(i, last))

    def mixers(self, i: int, last: bool) -> tuple[AttentionSpec, ...]:
        return (self.attention(True, last),)

    def text_ends(self) -> bool:
        """The last double block has no text stream after its attention."""
        return False

    def modulation(self, i: int, last: bool) -> tuple[WeightSpec, ...]:
        h = self.hidden
        return (_w("modulation", h, 6 * h, 0.0), _w("text_modulation", h, (2 if last else 6) * h, 0.0)) if self.modulated else ()

    def single(self) -> LayerSpec:
        """Attention and feed-forward side by side, one output matrix over both."""
        step = SublayerSpec(branches=(self.attention(False), self.mlp()), norm="none")
        return LayerSpec(sublayers=(step,), extra=(_w("modulation", self.hidden, 3 * self.hidden, 0.0),) if self.modulated else ())

    def ends(self) -> list[WeightSpec]:
        """Patches in and out, the text's projection, the last modulation."""
        k, h = self.k, self.hidden
        channels, patch = k.number("in_channels", "input_dim"), k.number("patch_size", default=1)
        out = k.get("out_channels", default=channels)
        k.get("disable_guidance_embedder", "input_dim")
        return [
            _w("image_in", channels, h, bias=self.bias), _w("text_in", k.number("joint_attention_dim"), h, 0.0, self.bias),
            _w("out_modulation", h, 2 * h, 0.0, self.bias), _w("out", h, patch * patch * out, bias=self.bias),
        ]  # fmt: skip

    def outside(self) -> list[WeightSpec]:
        """Weights around the blocks."""
        k, h = self.k, self.hidden
        found = [*self.ends(), *_embedder("time", 256, h), *_embedder("pooled_text", k.number("pooled_projection_dim"), h)]
        return found + (list(_embedder("guidance", 256, h)) if k.get("guidance_embeds", default=False) else [])

    def architecture(self) -> ArchitectureSpec:
        every = [self.double(i) for i in range(self.num_double)] + [self.single()] * self.num_single
        names = ["double"] * self.num_double + ["single"] * self.num_single
        layers, pattern = deal(every, names)
        stack = StackSpec(
            name="diffusion", hidden_size=self.hidden, layers=layers, pattern=pattern, norm="unweighted", final_norm=False,
            extra=tuple(self.outside()),
        )  # fmt: skip
        return ArchitectureSpec(head=False, stacks=(stack,))


class QwenImage(MMDiT):
    """Double blocks alone; a norm on the text."""

    def outside(self) -> list[WeightSpec]:
        self.k.get("guidance_embeds", "zero_cond_t", "use_additional_t_cond", "use_layer3d_rope")
        h, text = self.hidden, self.k.number("joint_attention_dim")
        return [*self.ends(), *_embedder("time", 256, h), vector("text_norm", text)]


class Chroma(MMDiT):
    """FLUX's blocks whose modulations one network makes for all."""

    modulated = False

    def outside(self) -> list[WeightSpec]:
        k, h = self.k, self.hidden
        inside, wide, depth = (
            k.number("approximator_num_channels"),
            k.number("approximator_hidden_dim"),
            k.number("approximator_layers"),
        )
        made = [_w("guidance_in", inside, wide, 0.0), _w("guidance_out", wide, h, 0.0), vector("guidance_norms", depth * wide)]
        made += [_w(f"guidance_{n}", wide, wide, 0.0) for n in range(2 * depth)]
        return [w for w in self.ends() if w.name != "out_modulation"] + made


class Flux2(MMDiT):
    """No biases, gated feed-forwards, one modulation for all blocks of a kind."""

    bias, gated, modulated = False, True, False

    def outside(self) -> list[WeightSpec]:
        k, h = self.k, self.hidden
        self.ratio = k.get("mlp_ratio", default=3.0)
        time = k.number("timestep_guidance_channels", default=256)
        k.get("rope_theta")
        plain = {"uses": 0.0, "bias": False}
        made = [*_embedder("time", time, h), *(_embedder("guidance", time, h) if k.get("guidance_embeds", default=True) else ())]
        made += [_w("double_modulation", h, 12 * h), _w("single_modulation", h, 3 * h)]
        return [*self.ends(), *(w.model_copy(update=plain) for w in made)]

    @property
    def width(self) -> int:
        return int(self.k.get("mlp_ratio", default=3.0) * self.hidden)


class SD3(MMDiT):
    """Stable Diffusion 3: double blocks alone, the last without a text stream; some with a second attention (3.5 medium)."""

    def qk_norm(self) -> bool:
        return bool(self.k.get("qk_norm"))

    def text_ends(self) -> bool:
        return True

    def text_tokens(self) -> int:
        return 154  # CLIP's 77 and T5's 77

    def dual(self, i: int) -> bool:
        return i in self.k.get("dual_attention_layers", default=[])

    def mixers(self, i: int, last: bool) -> tuple[AttentionSpec, ...]:
        first = self.attention(True, last)
        if not self.dual(i):
            return (first,)
        own = [vector("qk_norm", 2 * self.dim)] if self.qk_norm() else []
        return (first, first.model_copy(update={"joint_keys": 0, "extra": tuple(own)}))

    def modulation(self, i: int, last: bool) -> tuple[WeightSpec, ...]:
        h = self.hidden
        return (_w("modulation", h, (9 if self.dual(i) else 6) * h, 0.0), _w("text_modulation", h, (2 if last else 6) * h, 0.0))

    def ends(self) -> list[WeightSpec]:
        k, h = self.k, self.hidden
        k.get("caption_projection_dim", "pos_embed_max_size")
        patch, channels = k.number("patch_size", default=2), k.number("in_channels", default=16)
        return [
            _w("image_in", channels * patch * patch, h), _w("text_in", k.number("joint_attention_dim"), h, 0.0),
            _w("out_modulation", h, 2 * h, 0.0), _w("out", h, patch * patch * k.get("out_channels", default=channels)),
        ]  # fmt: skip


class HunyuanVideo(MMDiT):
    """Video patches; the text passes a refiner of its own."""

    def ends(self) -> list[WeightSpec]:
        k, h = self.k, self.hidden
        self.ratio = k.get("mlp_ratio", default=4.0)
        k.get("rope_theta", "image_condition_type")
        volume = k.number("patch_size", default=2) ** 2 * k.number("patch_size_t", default=1)
        return [
            _w("image_in", k.number("in_channels") * volume, h), _w("out_modulation", h, 2 * h, 0.0),
            _w("out", h, volume * k.number("out_channels")),
        ]  # fmt: skip

    def outside(self) -> list[WeightSpec]:
        k, h = self.k, self.hidden
        text, wide = k.number("text_embed_dim"), self.width
        refiner = [_w("text_in", text, h, 0.0), *_embedder("refiner_time", 256, h), *_embedder("refiner_text", text, h)]
        for n in range(k.number("num_refiner_layers", default=2)):
            refiner += [
                _w(f"refiner_{n}_qkv", h, 3 * h, 0.0),
                _w(f"refiner_{n}_out", h, h, 0.0),
                vector(f"refiner_{n}_norms", 4 * h),
            ]
            refiner += [_w(f"refiner_{n}_up", h, wide, 0.0), _w(f"refiner_{n}_down", wide, h, 0.0)]
            refiner.append(_w(f"refiner_{n}_modulation", h, 2 * h, 0.0))
        return [*super().outside(), *refiner]


class DiT:
    """Blocks of attention and feed-forward with adaptive norms; the class and the time enter through them (Peebles and Xie 2022)."""

    text_tokens = 0
    qk_norm: Any = "none"

    def __init__(self, keys: Keys) -> None:
        self.k = keys
        self.heads, self.dim = keys.number("num_attention_heads"), keys.number("attention_head_dim")
        self.hidden = self.heads * self.dim
        self.bias = bool(keys.get("attention_bias", default=True))
        keys.get("sample_size", "norm_num_groups", "upcast_attention", "norm_elementwise_affine", "attention_type", "qk_norm")
        keys.get(
            "num_embeds_ada_norm", "max_text_seq_length", "sample_width", "sample_height", "sample_frames", "attention_out_bias"
        )

    def own(self) -> BranchSpec:
        """Attention among the image's tokens."""
        bias: dict[str, Any] = dict.fromkeys(("q_bias", "k_bias", "v_bias"), self.bias)
        return AttentionSpec(
            num_heads=self.heads, num_key_value_heads=self.heads, head_dim=self.dim, causal=False, o_bias=True, qk_norm=self.qk_norm,
            joint_keys=self.text_tokens, **bias,
        )  # fmt: skip

    def mlp(self) -> BranchSpec:
        return FeedForwardSpec(width=4 * self.hidden, gated=False, bias=True, activation="gelu")

    def branches(self) -> tuple[BranchSpec, ...]:
        return (self.own(), self.mlp())

    def conditioning(self) -> tuple[WeightSpec, ...]:
        """What a layer makes its shifts, scales and gates from; DiT embeds time and class in every layer."""
        h = self.hidden
        classes = WeightSpec(
            name="classes", kind="lookup", inputs=self.k.number("num_embeds_ada_norm", default=1000) + 1, outputs=h
        )
        return (*_embedder("time", 256, h), classes, _w("modulation", h, 6 * h, 0.0))

    def volume(self) -> int:
        """Values of one patch and channel."""
        return self.k.number("patch_size", default=2) ** 2

    def ends(self) -> tuple[WeightSpec, ...]:
        channels, out = self.k.number("in_channels", default=4), self.k.get("out_channels")
        return (
            _w("patches", channels * self.volume(), self.hidden), _w("out", self.hidden, self.volume() * (out or channels)),
            *self.around(),
        )  # fmt: skip

    def around(self) -> tuple[WeightSpec, ...]:
        return (_w("out_modulation", self.hidden, 2 * self.hidden, 0.0),)

    def architecture(self) -> ArchitectureSpec:
        layer = LayerSpec(
            sublayers=tuple(SublayerSpec(branches=(b,), norm="none") for b in self.branches()), extra=self.conditioning()
        )
        depth = self.k.number("num_layers")
        layers, pattern = deal([layer] * depth, ["image"] * depth)
        stack = StackSpec(
            name="diffusion", hidden_size=self.hidden, layers=layers, pattern=pattern, norm="unweighted", final_norm=False,
            extra=self.ends(),
        )  # fmt: skip
        return ArchitectureSpec(head=False, stacks=(stack,))


class PixArt(DiT):
    """Cross-attention to the text, one modulation for all layers (Chen et al. 2023, arXiv 2310.00426)."""

    text_length = 300
    micro_conditions = True

    def cross(self) -> AttentionSpec:
        """Queries of the image; keys and values of the text come once per sample."""
        k, h = self.k, self.hidden
        heads, dim = k.get("num_cross_attention_heads", default=self.heads), k.get("cross_attention_head_dim", default=self.dim)
        text = k.get("cross_attention_dim", default=h)
        pair = (_w("k", text, heads * dim, 0.0), _w("v", text, heads * dim, 0.0))
        normed = (vector("k_norm", heads * dim),) if self.qk_norm == "full" else ()
        return AttentionSpec(
            num_heads=heads, num_key_value_heads=heads, head_dim=dim, causal=False, q_bias=True, o_bias=True, cross=True,
            keys=self.text_length, key_value="query_only", qk_norm=self.qk_norm, extra=(*pair, *normed),
        )  # fmt: skip

    def branches(self) -> tuple[BranchSpec, ...]:
        return (self.own(), self.cross(), self.mlp())

    def conditioning(self) -> tuple[WeightSpec, ...]:
        return (vector("modulation", 6 * self.hidden),)

    def around(self) -> tuple[WeightSpec, ...]:
        k, h = self.k, self.hidden
        found = [*_embedder("time", 256, h), _w("time_modulation", h, 6 * h, 0.0), vector("out_modulation", 2 * h)]
        given = k.get("use_additional_conditions")
        if self.micro_conditions and (given if given is not None else k.get("sample_size") == 128):
            third = h // 3
            found += [*_embedder("resolution", 256, third), *_embedder("aspect_ratio", 256, third)]
        text = k.get("caption_channels")
        return (*found, *((_w("text_1", text, h, 0.0), _w("text_2", h, h, 0.0)) if text else ()))


class Ltx(PixArt):
    """LTX-Video: norms over all queries and keys."""

    qk_norm: Any = "full"
    text_length = 128
    micro_conditions = False

    def volume(self) -> int:
        return self.k.number("patch_size", default=1) ** 2 * self.k.number("patch_size_t", default=1)


class Sana(PixArt):
    """Linear attention among the image's tokens and a gated feed-forward with a depthwise convolution (Xie et al. 2024)."""

    micro_conditions = False

    def own(self) -> BranchSpec:
        self.k.get("guidance_embeds_scale", "timestep_scale", "interpolation_scale")
        if self.k.get("guidance_embeds", default=False) or self.k.get("qk_norm"):
            self.k.unknown.append(("guidance_embeds", True, "embedded guidance and normed queries of Sana Sprint are not read"))
        out = (vector("out_bias", self.hidden),)
        return LinearAttentionSpec(
            num_heads=self.heads, key_head_dim=self.dim, value_head_dim=self.dim, gate=False, chunk=1, bias=False, extra=out
        )

    def mlp(self) -> BranchSpec:
        width = int(self.k.get("mlp_ratio", default=2.5) * self.hidden)
        conv = WeightSpec(name="depthwise", kind="conv", inputs=9, outputs=2 * width, bias=True)
        return FeedForwardSpec(width=width, gated=True, bias=False, extra=(conv, vector("up_bias", 2 * width)))

    def volume(self) -> int:
        return self.k.number("patch_size", default=1) ** 2

    def around(self) -> tuple[WeightSpec, ...]:
        return (*super().around(), vector("caption_norm", self.hidden))


class CogVideoX(DiT):
    """Text and video tokens in one sequence; adaptive norms with weights from a narrow time embedding."""

    text_tokens = 226
    qk_norm: Any = "head"

    def own(self) -> BranchSpec:
        norms = vector("norm_biases", 2 * self.dim)
        return super().own().model_copy(update={"qk_norm": "head", "extra": (norms,)})

    def conditioning(self) -> tuple[WeightSpec, ...]:
        time = self.k.number("time_embed_dim", default=512)
        return (*(_w(f"modulation_{n}", time, 6 * self.hidden, 0.0) for n in (1, 2)), vector("norms", 4 * self.hidden))

    def volume(self) -> int:
        return self.k.number("patch_size", default=2) ** 2 * (self.k.get("patch_size_t") or 1)

    def around(self) -> tuple[WeightSpec, ...]:
        k, h = self.k, self.hidden
        time = k.number("time_embed_dim", default=512)
        k.get("flip_sin_to_cos", "freq_shift", "temporal_compression_ratio", "patch_bias", "use_rotary_positional_embeddings")
        if k.get("use_learned_positional_embeddings", default=False) or k.get("ofs_embed_dim"):
            k.unknown.append(
                ("use_learned_positional_embeddings", True, "learned positions of the image-to-video model are not read")
            )
        return (
            _w("text_in", k.number("text_embed_dim", default=4096), h, 0.0), _w("time_1", h, time, 0.0), _w("time_2", time, time, 0.0),
            vector("final_norms", 4 * h), _w("out_modulation", time, 2 * h, 0.0),
        )  # fmt: skip


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
    **dict.fromkeys(("flux", "FluxModel", "FluxTransformer2DModel"), MMDiT),
    **dict.fromkeys(("wan", "WanModel", "WanTransformer3DModel"), Wan),
    "Flux2Transformer2DModel": Flux2, "ChromaTransformer2DModel": Chroma, "QwenImageTransformer2DModel": QwenImage,
    "SD3Transformer2DModel": SD3, "HunyuanVideoTransformer3DModel": HunyuanVideo, "DiTTransformer2DModel": DiT,
    "PixArtTransformer2DModel": PixArt, "LTXVideoTransformer3DModel": Ltx, "SanaTransformer2DModel": Sana,
    "CogVideoXTransformer3DModel": CogVideoX,
}  # fmt: skip
