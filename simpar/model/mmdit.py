"""Diffusion transformers with two streams, image and text: FLUX and its kin, Stable Diffusion 3, Qwen-Image, HunyuanVideo."""

from __future__ import annotations

from simpar.model.config_keys import Keys
from simpar.model.pieces import deal, encoder_attention, in_turn, linear, once, vector
from simpar.specs.architecture import ArchitectureSpec, LayerSpec, StackSpec, SublayerSpec
from simpar.specs.mixers import AttentionSpec, ExpertsSpec, FeedForwardSpec, WeightSpec

TEXT_TOKENS = 512
"""Text tokens beside the image's: T5's length in FLUX and Wan."""


def embedder(name: str, inputs: int, h: int) -> tuple[WeightSpec, ...]:
    """Two layers on a vector per sample (time, guidance, pooled text)."""
    return (once(f"{name}_1", inputs, h), once(f"{name}_2", h, h))


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
        keys.get("vocab_size", "tie_word_embeddings", "axes_dims_rope", "sample_size", "qk_norm")

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
            extra += [once("text_qkv", h, 3 * h, bias=bias)] + ([] if last else [once("text_out", h, h, bias=bias)])
            extra += [vector("text_qk_norm", 2 * d)] if norms else []
        joint, own = self.text_tokens(), tuple(extra)
        return encoder_attention(self.heads, h, bias=bias, o_bias=text_stream and bias, joint_keys=joint, extra=own)

    def mlp(self, *extra: WeightSpec) -> FeedForwardSpec:
        return FeedForwardSpec(width=self.width, gated=self.gated, bias=self.bias, activation="gelu", extra=extra)

    def double(self, i: int) -> LayerSpec:
        h, wide = self.hidden, self.width * (2 if self.gated else 1)
        last = self.text_ends() and i == self.num_double - 1
        text = () if last else (once("text_up", h, wide, bias=self.bias), once("text_down", self.width, h, bias=self.bias))
        steps = in_turn(*self.mixers(i, last), self.mlp(*text), modulated=True)
        return LayerSpec(sublayers=steps, extra=self.modulation(i, last))

    def mixers(self, i: int, last: bool) -> tuple[AttentionSpec, ...]:
        return (self.attention(True, last),)

    def text_ends(self) -> bool:
        """The last double block has no text stream after its attention."""
        return False

    def modulation(self, i: int, last: bool) -> tuple[WeightSpec, ...]:
        h = self.hidden
        return (once("modulation", h, 6 * h), once("text_modulation", h, (2 if last else 6) * h)) if self.modulated else ()

    def single(self) -> LayerSpec:
        """Attention and feed-forward side by side, one output matrix over both."""
        step = SublayerSpec(branches=(self.attention(False), self.mlp()), modulated=True)
        return LayerSpec(sublayers=(step,), extra=(once("modulation", self.hidden, 3 * self.hidden),) if self.modulated else ())

    def ends(self) -> list[WeightSpec]:
        """Patches in and out, the text's projection, the last modulation."""
        k, h = self.k, self.hidden
        channels, patch = k.number("in_channels", "input_dim"), k.number("patch_size", default=1)
        out = k.get("out_channels", default=channels)
        k.get("input_dim")
        return [
            linear("image_in", channels, h, bias=self.bias), once("text_in", k.number("joint_attention_dim"), h, bias=self.bias),
            once("out_modulation", h, 2 * h, bias=self.bias), linear("out", h, patch * patch * out, bias=self.bias),
        ]  # fmt: skip

    def outside(self) -> list[WeightSpec]:
        """Weights around the blocks."""
        k, h = self.k, self.hidden
        found = [*self.ends(), *embedder("time", 256, h), *embedder("pooled_text", k.number("pooled_projection_dim"), h)]
        return found + (list(embedder("guidance", 256, h)) if k.get("guidance_embeds", default=False) else [])

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
        self.k.get("use_layer3d_rope")
        h, text = self.hidden, self.k.number("joint_attention_dim")
        return [*self.ends(), *embedder("time", 256, h), vector("text_norm", text)]


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
        made = [
            once("guidance_in", inside, wide),
            once("guidance_out", wide, h),
            vector("guidance_norms", depth * wide),
        ]
        made += [once(f"guidance_{n}", wide, wide) for n in range(2 * depth)]
        return [w for w in self.ends() if w.name != "out_modulation"] + made


class Flux2(MMDiT):
    """No biases, gated feed-forwards, one modulation for all blocks of a kind."""

    bias, gated, modulated = False, True, False

    def outside(self) -> list[WeightSpec]:
        k, h = self.k, self.hidden
        self.ratio = k.get("mlp_ratio", default=3.0)
        time = k.number("timestep_guidance_channels", default=256)
        plain = {"uses": 0.0, "bias": False}
        made = [*embedder("time", time, h), *(embedder("guidance", time, h) if k.get("guidance_embeds", default=True) else ())]
        made += [linear("double_modulation", h, 12 * h), linear("single_modulation", h, 3 * h)]
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
        return (
            once("modulation", h, (9 if self.dual(i) else 6) * h),
            once("text_modulation", h, (2 if last else 6) * h),
        )

    def ends(self) -> list[WeightSpec]:
        k, h = self.k, self.hidden
        k.get("caption_projection_dim", "pos_embed_max_size")
        patch, channels = k.number("patch_size", default=2), k.number("in_channels", default=16)
        return [
            linear("image_in", channels * patch * patch, h), once("text_in", k.number("joint_attention_dim"), h),
            once("out_modulation", h, 2 * h), linear("out", h, patch * patch * k.get("out_channels", default=channels)),
        ]  # fmt: skip


class HunyuanVideo(MMDiT):
    """Video patches; the text passes a refiner of its own."""

    def ends(self) -> list[WeightSpec]:
        k, h = self.k, self.hidden
        self.ratio = k.get("mlp_ratio", default=4.0)
        volume = k.number("patch_size", default=2) ** 2 * k.number("patch_size_t", default=1)
        return [
            linear("image_in", k.number("in_channels") * volume, h), once("out_modulation", h, 2 * h),
            linear("out", h, volume * k.number("out_channels")),
        ]  # fmt: skip

    def outside(self) -> list[WeightSpec]:
        k, h = self.k, self.hidden
        text, wide = k.number("text_embed_dim"), self.width
        refiner = [once("text_in", text, h), *embedder("refiner_time", 256, h), *embedder("refiner_text", text, h)]
        for n in range(k.number("num_refiner_layers", default=2)):
            refiner += [
                once(f"refiner_{n}_qkv", h, 3 * h),
                once(f"refiner_{n}_out", h, h),
                vector(f"refiner_{n}_norms", 4 * h),
            ]
            refiner += [once(f"refiner_{n}_up", h, wide), once(f"refiner_{n}_down", wide, h)]
            refiner.append(once(f"refiner_{n}_modulation", h, 2 * h))
        return [*super().outside(), *refiner]


class HiDream(MMDiT):
    """HiDream-I1: routed and shared experts for the image's tokens, dense feed-forwards for the text's, norms over all heads; each
    layer takes a projection of its own of the text (HiDream.ai 2025, arXiv 2505.22705).
    """

    def qk_norm(self) -> bool:
        return False

    def inner(self, width: int) -> int:
        """Two thirds of `width`, up to a multiple of 256."""
        return 256 * -(-int(2 * width / 3) // 256)

    def joint(self, text_stream: bool) -> AttentionSpec:
        attention = self.attention(text_stream)
        norms = vector("qk_norms", (4 if text_stream else 2) * self.hidden)
        return attention.model_copy(update={"o_bias": True, "extra": (*attention.extra, norms)})

    def block(self, text_stream: bool) -> LayerSpec:
        k, h = self.k, self.hidden
        width = self.inner(4 * h)
        feed: ExpertsSpec | FeedForwardSpec = FeedForwardSpec(width=width)
        if experts := k.get("num_routed_experts", default=4):
            chosen = k.number("num_activated_experts", default=2)
            feed = ExpertsSpec(num_experts=experts, num_experts_per_tok=chosen, width=width, shared_width=self.inner(2 * h))
        extra = [once("modulation", h, (12 if text_stream else 6) * h)]
        if text_stream:
            extra += [once("text_up", h, 2 * width, bias=False), once("text_down", width, h, bias=False)]
        steps = in_turn(self.joint(text_stream), feed, modulated=True)
        return LayerSpec(sublayers=steps, extra=tuple(extra))

    def double(self, i: int) -> LayerSpec:
        return self.block(True)

    def single(self) -> LayerSpec:
        return self.block(False)

    def outside(self) -> list[WeightSpec]:
        k, h = self.k, self.hidden
        k.get("llama_layers")
        patch, channels = k.number("patch_size", default=2), k.number("in_channels", default=16)
        last, each = k.get("caption_channels", default=[4096, 4096])
        texts = [once("text_in", last, h, bias=False)]
        texts += [once(f"text_in_{n}", each, h, bias=False) for n in range(self.num_double + self.num_single)]
        return [
            linear("image_in", channels * patch * patch, h), once("out_modulation", h, 2 * h),
            linear("out", h, patch * patch * int(k.get("out_channels") or channels)), *texts, *embedder("time", 256, h),
            *embedder("pooled_text", k.number("text_emb_dim", default=2048), h),
        ]  # fmt: skip


MMDIT_READERS: dict[str, type[MMDiT]] = {
    **dict.fromkeys(("flux", "FluxModel", "FluxTransformer2DModel"), MMDiT),
    "Flux2Transformer2DModel": Flux2, "ChromaTransformer2DModel": Chroma, "QwenImageTransformer2DModel": QwenImage,
    "SD3Transformer2DModel": SD3, "HunyuanVideoTransformer3DModel": HunyuanVideo,
    "HiDreamImageTransformer2DModel": HiDream,
}  # fmt: skip
