"""Diffusion transformers of one stream as diffusers writes them: DiT and its kin, Wan; the table of all of them."""

from __future__ import annotations

from typing import Any

from simpar.model.config_keys import Keys
from simpar.model.mmdit import MMDIT_READERS, TEXT_TOKENS, embedder
from simpar.model.pieces import depthwise, encoder_attention, in_turn, linear, lookup, once, uniform, vector
from simpar.specs.architecture import ArchitectureSpec, LayerSpec, SublayerSpec
from simpar.specs.mixers import AttentionSpec, BranchSpec, FeedForwardSpec, LinearAttentionSpec, WeightSpec


class DiT:
    """Attention and feed-forward with adaptive norms, through which class and time enter (Peebles and Xie 2022)."""

    text_tokens, patch = 0, 2
    qk_norm: Any = "none"

    def __init__(self, keys: Keys) -> None:
        self.k = keys
        self.heads, self.dim = keys.number("num_attention_heads"), keys.number("attention_head_dim")
        self.hidden = self.heads * self.dim
        self.bias = bool(keys.get("attention_bias", default=True))
        keys.get("sample_size", "norm_num_groups", "upcast_attention", "norm_elementwise_affine", "attention_type", "qk_norm")
        keys.get("num_embeds_ada_norm", "sample_width", "attention_out_bias")

    def own(self) -> BranchSpec:
        """Attention among the image's tokens."""
        return encoder_attention(
            self.heads, self.hidden, bias=self.bias, o_bias=True, qk_norm=self.qk_norm, joint_keys=self.text_tokens
        )

    def mlp(self) -> BranchSpec:
        return FeedForwardSpec(width=4 * self.hidden, gated=False, bias=True, activation="gelu")

    def branches(self) -> tuple[BranchSpec, ...]:
        return (self.own(), self.mlp())

    def step(self, branch: BranchSpec) -> SublayerSpec:
        """Between a norm without weights and a gate; the text comes in as it is (PixArt)."""
        plain = isinstance(branch, AttentionSpec) and branch.cross
        return SublayerSpec(branches=(branch,), **{"norm": "none"} if plain else {"modulated": True})

    def conditioning(self) -> tuple[WeightSpec, ...]:
        """What a layer makes its shifts, scales and gates from; DiT embeds time and class in every layer."""
        h = self.hidden
        classes = lookup("classes", self.k.number("num_embeds_ada_norm", default=1000) + 1, h)
        return (*embedder("time", 256, h), classes, once("modulation", h, 6 * h))

    def volume(self) -> int:
        """Values of one patch and channel."""
        return self.k.number("patch_size", default=self.patch) ** 2 * (self.k.get("patch_size_t") or 1)

    def ends(self) -> tuple[WeightSpec, ...]:
        channels, out = self.k.number("in_channels", default=4), self.k.get("out_channels")
        return (
            linear("patches", channels * self.volume(), self.hidden), linear("out", self.hidden, self.volume() * (out or channels)),
            *self.around(),
        )  # fmt: skip

    def around(self) -> tuple[WeightSpec, ...]:
        return (once("out_modulation", self.hidden, 2 * self.hidden),)

    def architecture(self) -> ArchitectureSpec:
        layer = LayerSpec(sublayers=tuple(self.step(branch) for branch in self.branches()), extra=self.conditioning())
        depth, fields = self.k.number("num_layers"), {"norm": "unweighted", "final_norm": False}
        stack = uniform("image_mlp", layer, depth, name="diffusion", hidden_size=self.hidden, extra=self.ends(), **fields)
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
        pair = (once("k", text, heads * dim), once("v", text, heads * dim))
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
        found = [*embedder("time", 256, h), once("time_modulation", h, 6 * h), vector("out_modulation", 2 * h)]
        given = k.get("use_additional_conditions")
        if self.micro_conditions and (given if given is not None else k.get("sample_size") == 128):
            third = h // 3
            found += [*embedder("resolution", 256, third), *embedder("aspect_ratio", 256, third)]
        text = k.get("caption_channels")
        return (*found, *((once("text_1", text, h), once("text_2", h, h)) if text else ()))


class Ltx(PixArt):
    """LTX-Video: norms over all queries and keys."""

    qk_norm: Any = "full"
    text_length, patch = 128, 1
    micro_conditions = False


class Sana(PixArt):
    """Linear attention among the image's tokens and a gated feed-forward with a depthwise convolution (Xie et al. 2024)."""

    micro_conditions, patch = False, 1

    def own(self) -> BranchSpec:
        if self.k.get("guidance_embeds", default=False) or self.k.get("qk_norm"):
            self.k.unknown.append(("guidance_embeds", True, "embedded guidance and normed queries of Sana Sprint are not read"))
        out = (vector("out_bias", self.hidden),)
        return LinearAttentionSpec(
            num_heads=self.heads, key_head_dim=self.dim, value_head_dim=self.dim, gate=False, chunk=1, bias=False, extra=out
        )

    def mlp(self) -> BranchSpec:
        width = int(self.k.get("mlp_ratio", default=2.5) * self.hidden)
        conv = depthwise("depthwise", 9, 2 * width, bias=True)
        return FeedForwardSpec(width=width, gated=True, bias=False, extra=(conv, vector("up_bias", 2 * width)))

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
        return (*(once(f"modulation_{n}", time, 6 * self.hidden) for n in (1, 2)), vector("norms", 4 * self.hidden))

    def around(self) -> tuple[WeightSpec, ...]:
        k, h = self.k, self.hidden
        time = k.number("time_embed_dim", default=512)
        k.get("freq_shift", "patch_bias")
        if k.get("use_learned_positional_embeddings", default=False) or k.get("ofs_embed_dim"):
            k.unknown.append(
                ("use_learned_positional_embeddings", True, "learned positions of the image-to-video model are not read")
            )
        return (
            once("text_in", k.number("text_embed_dim", default=4096), h), once("time_1", h, time),
            once("time_2", time, time),
            vector("final_norms", 4 * h), once("out_modulation", time, 2 * h),
        )  # fmt: skip


class NextDiT:
    """Lumina-Image 2.0 and Z-Image: text and image in one sequence through layers with norms on both sides of everything, after
    layers of their own for either (Qin et al. 2025, arXiv 2503.21758). FLOPs are of an image token; the text's own layers run once
    per sample.
    """

    time_width, time_inner = 1024, 1024

    def __init__(self, keys: Keys) -> None:
        self.k = keys
        self.hidden = keys.number("hidden_size", "dim")
        self.heads = keys.number("num_attention_heads", "n_heads")
        self.kv_heads = keys.number("num_kv_heads", "n_kv_heads", default=self.heads)
        self.time = min(self.hidden, self.time_width)
        keys.get("sample_size", "axes_dim_rope", "axes_dims", "qk_norm")
        if keys.get("siglip_feat_dim"):
            keys.unknown.append(("siglip_feat_dim", True, "a stream of reference images is not read"))

    def width(self) -> int:
        """Of the feed-forward."""
        multiple, factor = self.k.number("multiple_of", default=256), self.k.get("ffn_dim_multiplier") or 1.0
        return int(multiple * -(-int(factor * 4 * self.hidden) // multiple))

    def volume(self) -> int:
        """Values of one patch and channel."""
        return self.k.number("patch_size", default=2) ** 2

    def layer(self) -> LayerSpec:
        attention = encoder_attention(
            self.heads, self.hidden, bias=False, num_key_value_heads=self.kv_heads, qk_norm="head", joint_keys=TEXT_TOKENS
        )
        steps = in_turn(attention, FeedForwardSpec(width=self.width()), norm="sandwich", modulated=True)
        return LayerSpec(sublayers=steps, extra=(once("modulation", self.time, 4 * self.hidden),))

    def text_layer(self, n: int) -> tuple[WeightSpec, ...]:
        """A layer of the text's own: held, once per sample, without modulation."""
        h, d = self.hidden, self.hidden // self.heads
        return (
            once(f"text_{n}_qkv", h, h + 2 * self.kv_heads * d, bias=False), once(f"text_{n}_out", h, h, bias=False),
            once(f"text_{n}_up", h, 2 * self.width(), bias=False), once(f"text_{n}_down", self.width(), h, bias=False),
            vector(f"text_{n}_norms", 4 * h + 2 * d),
        )  # fmt: skip

    def pads(self) -> tuple[WeightSpec, ...]:
        return ()

    def architecture(self) -> ArchitectureSpec:
        k, h = self.k, self.hidden
        channels, text = k.number("in_channels", default=16), k.number("cap_feat_dim")
        own, depth = k.number("num_refiner_layers", "n_refiner_layers", default=2), k.number("num_layers", "n_layers")
        extra = [
            linear("patches", channels * self.volume(), h), vector("text_norm", text), once("text_in", text, h),
            once("time_1", 256, self.time_inner), once("time_2", self.time_inner, self.time),
            once("out_modulation", self.time, h),
            linear("out", h, self.volume() * int(k.get("out_channels", default=None) or channels)), *self.pads(),
        ]  # fmt: skip
        extra += [w for n in range(own) for w in self.text_layer(n)]
        fields = {"name": "diffusion", "hidden_size": h, "final_norm": False, "extra": tuple(extra)}
        stack = uniform("image_mlp", self.layer(), own + depth, **fields)
        return ArchitectureSpec(head=False, stacks=(stack,))


class ZImage(NextDiT):
    """Z-Image (Tongyi, 2025): a narrower time embedding, a feed-forward of eight thirds, pads that are learned."""

    time_width = 256

    def width(self) -> int:
        return int(self.hidden / 3 * 8)

    def volume(self) -> int:
        sizes, frames = self.k.get("all_patch_size", default=[2]), self.k.get("all_f_patch_size", default=[1])
        if len(sizes) > 1:
            self.k.unknown.append(("all_patch_size", "...", "ends for patches of several sizes: only the first is read"))
        return int(sizes[0]) ** 2 * int(frames[0])

    def pads(self) -> tuple[WeightSpec, ...]:
        return (vector("pads", 2 * self.hidden),)


class Wan:
    """Wan 2.1: self-attention over the video's latents, cross-attention to the text, one shared modulation.

    FLOPs are of a latent token: keys and values of the text, time and modulation come once per sample.
    """

    def __init__(self, keys: Keys) -> None:
        self.k = keys
        self.heads = keys.number("num_attention_heads", "num_heads")
        self.hidden = keys.number("dim", default=self.heads * keys.get("attention_head_dim", default=128))
        self.layers = keys.number("num_layers")
        self.image = str(keys.get("has_image_input", default="false")).lower() == "true" or bool(
            keys.get("image_dim", "added_kv_proj_dim", default=0)
        )

    def layer(self) -> LayerSpec:
        h = self.hidden
        own = encoder_attention(self.heads, h, qk_norm="full")
        text = [once("k", h, h), once("v", h, h), vector("k_norm", h)]
        if self.image:
            text += [once("image_k", h, h), once("image_v", h, h), vector("image_k_norm", h)]
        tokens = self.k.get("text_len", default=TEXT_TOKENS)
        cross = encoder_attention(
            self.heads, h, k_bias=False, v_bias=False, cross=True, keys=tokens, key_value="query_only", qk_norm="full",
            extra=tuple(text),
        )  # fmt: skip
        mlp = FeedForwardSpec(width=self.k.number("ffn_dim"), gated=False, bias=True, activation="gelu")
        own_step, mlp_step = in_turn(own, mlp, num_norms=0, modulated=True)
        steps = (own_step, *in_turn(cross, num_norms=1), mlp_step)
        return LayerSpec(sublayers=steps, extra=(vector("modulation", 6 * h),))

    def architecture(self) -> ArchitectureSpec:
        k, h = self.k, self.hidden
        patch = k.get("patch_size", default=[1, 2, 2])
        volume = patch[0] * patch[1] * patch[2]
        text, time = k.number("text_dim", default=4096), k.number("freq_dim", default=256)
        extra = [
            linear("patches", volume * k.number("in_channels", "in_dim"), h), once("text_1", text, h),
            once("text_2", h, h), *embedder("time", time, h), once("time_modulation", h, 6 * h),
            vector("out_modulation", 2 * h),
            linear("out", h, volume * k.number("out_channels", "out_dim", default=16)),
        ]  # fmt: skip
        k.get("cross_attn_norm", "qk_norm", "tie_word_embeddings", "in_dim", "out_dim", "window_size")
        if self.image:
            width = k.number("image_dim", default=1280)
            extra += [
                vector("image_norms", 2 * width + 2 * h),
                once("image_1", width, width),
                once("image_2", width, h),
            ]
        fields = {"name": "diffusion", "hidden_size": h, "norm": "layernorm", "final_norm": False, "extra": tuple(extra)}
        stack = uniform("video_mlp", self.layer(), self.layers, **fields)
        return ArchitectureSpec(head=False, stacks=(stack,))


DIFFUSION_READERS: dict[str, Any] = {
    **MMDIT_READERS,
    **dict.fromkeys(("wan", "WanModel", "WanTransformer3DModel"), Wan),
    "DiTTransformer2DModel": DiT, "PixArtTransformer2DModel": PixArt, "LTXVideoTransformer3DModel": Ltx,
    "SanaTransformer2DModel": Sana, "CogVideoXTransformer3DModel": CogVideoX,
    "Lumina2Transformer2DModel": NextDiT, "ZImageTransformer2DModel": ZImage,
}  # fmt: skip
