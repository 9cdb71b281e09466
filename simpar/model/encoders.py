"""Encoder-decoders (T5, BART, Whisper)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from simpar.model.config_keys import Keys
from simpar.model.decoder import Decoder
from simpar.model.family import Family
from simpar.model.pieces import deal, encoder_attention, in_turn, linear, lookup, norm_extra
from simpar.specs.architecture import ArchitectureSpec, LayerSpec, StackSpec
from simpar.specs.mixers import AttentionSpec, BranchSpec, ExpertsSpec, FeedForwardSpec, NormKind, WeightSpec

SIDES = ("encoder", "decoder")


@dataclass(frozen=True, slots=True)
class Sides:
    """What an encoder-decoder's class builds without asking its file."""

    norm: NormKind = "layernorm"
    biased: bool = True
    k_bias: bool = True
    pre_norm: bool = True
    final_norm: bool = True
    embedding_norm: bool = False
    own_tables: int = 2
    """Further word embeddings (the encoder's and the decoder's own) where the head is not tied."""
    position_offset: int | None = 2
    """Rows of the learned position tables beyond max_position_embeddings; None = no tables."""
    bias_tables: int = 1
    """Tables of relative biases; 0 = one in every layer."""


T5_SIDES = Sides("rmsnorm", biased=False, k_bias=False, own_tables=0)
BART = Sides(pre_norm=False, final_norm=False, embedding_norm=True)
SIDES_OF = {
    **dict.fromkeys(("t5", "mt5", "longt5"), T5_SIDES), "umt5": replace(T5_SIDES, bias_tables=0),
    "switch_transformers": replace(T5_SIDES, own_tables=2),
    **dict.fromkeys(("bart", "plbart", "mvp", "led"), BART), "blenderbot-small": replace(BART, position_offset=0),
    "bigbird_pegasus": Sides(final_norm=False, embedding_norm=True, position_offset=0), "mbart": Sides(embedding_norm=True),
    **dict.fromkeys(("pegasus", "blenderbot"), Sides(position_offset=0)),  # sinusoids, stored as parameters
    "marian": Sides(pre_norm=False, final_norm=False, position_offset=0),
    **dict.fromkeys(("m2m_100", "nllb", "nllb-moe"), Sides(position_offset=None)),
    "speech_to_text": Sides(position_offset=None, own_tables=0), "whisper": Sides(k_bias=False, own_tables=0),
}  # fmt: skip


class EncoderDecoder:
    """An encoder and a decoder with cross-attention."""

    gated = False

    def __init__(self, keys: Keys, family: Family) -> None:
        self.k, self.f = keys, SIDES_OF[keys.model_type]
        self.hidden = keys.size("d_model", "hidden_size")
        self.vocab = keys.size("vocab_size")
        if keys.config.get("decoder_vocab_size") == self.vocab:
            keys.used.add("decoder_vocab_size")
        self.layers = [self.side(f"{side}_layers", f"num_{side}_layers", "num_layers", "num_hidden_layers") for side in SIDES]
        self.heads = [keys.number(f"{side}_attention_heads", "num_heads", "num_attention_heads") for side in SIDES]
        self.widths = [keys.number(f"{side}_ffn_dim", "d_ff", "intermediate_size") for side in SIDES]

    def side(self, *names: str) -> int:
        """A size of one side by the first of `names` that the file or its class gives; the last ones may be the other side's."""
        self.k.used.update(names)
        return self.k.number(next((name for name in names if self.k.given(name) is not None), names[0]))

    def head_dim(self, side: int) -> int:
        return self.hidden // self.heads[side]

    def attention(self, side: int, **changes: Any) -> AttentionSpec:
        own = {
            "head_dim": self.head_dim(side),
            "causal": side == 1,
            "k_bias": self.f.k_bias,
            "position": "absolute",
        }
        return encoder_attention(self.heads[side], self.hidden, bias=self.f.biased, **{**own, **changes})

    def feed_forward(self, side: int, i: int) -> BranchSpec:
        act = str(self.k.get("activation_function", "feed_forward_proj", default="relu"))
        return FeedForwardSpec(width=self.widths[side], gated=self.gated, bias=self.f.biased, activation=act)

    def layer(self, side: int, i: int) -> LayerSpec:
        cross = (self.attention(1, cross=True, causal=False),) if side else ()
        branches = (self.attention(side), *cross, self.feed_forward(side, i))
        return LayerSpec(sublayers=in_turn(*branches, norm="pre" if self.f.pre_norm else "post"))

    def stack(self, side: int) -> StackSpec:
        every = [self.layer(side, i) for i in range(self.layers[side])]
        layers, pattern = deal(every, [SIDES[side]] * len(every))
        return StackSpec(
            name=SIDES[side], hidden_size=self.hidden, layers=layers, pattern=pattern, norm=self.f.norm,
            final_norm=self.f.final_norm, extra=self.stack_extra(side),
        )  # fmt: skip

    def positions(self, side: int) -> int:
        return self.k.number("max_position_embeddings", default=1024) + (self.f.position_offset or 0)

    def stack_extra(self, side: int) -> tuple[WeightSpec, ...]:
        extra: list[WeightSpec] = []
        if self.f.position_offset is not None:
            extra.append(lookup("position", self.positions(side), self.hidden))
        if self.f.embedding_norm:
            extra.append(norm_extra("embedding_norm", self.f.norm, self.hidden))
        return tuple(extra)

    def architecture(self) -> ArchitectureSpec:
        tied = bool(self.k.get("tie_word_embeddings", default=True))
        own = lookup("own_words", self.vocab, self.hidden, copies=self.f.own_tables or 1)
        return ArchitectureSpec(
            vocab_size=self.vocab, tie_word_embeddings=tied, stacks=(self.stack(0), self.stack(1)),
            extra=() if tied or not self.f.own_tables else (own,),
        )  # fmt: skip


class T5(EncoderDecoder):
    """Relative biases in the first layer of each stack, RMS norms, no biases; v1.1 has a gated feed-forward and an own head."""

    def __init__(self, keys: Keys, family: Family) -> None:
        super().__init__(keys, family)
        if keys.config.get("tie_word_embeddings") is False:
            keys.note(
                "tie_word_embeddings = False: the head is a matrix of its own, as published; transformers ties where it has none"
            )
        named = str(keys.get("feed_forward_proj", default="relu")).startswith("gated")
        self.gated = bool(keys.config.get("is_gated_act", named))

    def head_dim(self, side: int) -> int:
        return self.k.number("d_kv")

    def stack_extra(self, side: int) -> tuple[WeightSpec, ...]:
        buckets = self.k.number("relative_attention_num_buckets", default=32)
        tables = self.f.bias_tables or self.layers[side]
        return (lookup("relative_bias", buckets, self.heads[side], copies=tables),)


class LongT5(T5):
    """Local attention in the encoder, with summaries of blocks as further keys in its other form."""

    def attention(self, side: int, **changes: Any) -> AttentionSpec:
        local = self.k.get("encoder_attention_type", default="local")
        radius = self.k.number("local_radius", default=127)
        return super().attention(side, **({"window": radius} if local == "local" and not side else {}), **changes)

    def architecture(self) -> ArchitectureSpec:
        if self.k.get("encoder_attention_type", default="local") != "local":
            self.k.unknown.append(("encoder_attention_type", "transient-global", "keys that summarise blocks are not counted"))
        return super().architecture()


class Switch(T5):
    """Top-1 experts each so many layers."""

    def feed_forward(self, side: int, i: int) -> BranchSpec:
        name, layers = SIDES[side], self.layers[side]
        step = self.k.get(f"{name}_sparse_step")
        if step is None:
            sparse = self.k.get(f"num_sparse_{name}_layers", default=0)
            step = layers // sparse if sparse else layers
        if (step and i % step == 1) or step == 1:
            return ExpertsSpec(
                num_experts=self.k.number("num_experts"),
                num_experts_per_tok=1,
                width=self.widths[side],
                gated=False,
                router_bias=bool(self.k.get("router_bias", default=False)),
            )
        return super().feed_forward(side, i)


class BigBirdPegasus(EncoderDecoder):
    """Pre-norm with one more norm, attention without biases, blocks of sparse attention in the encoder."""

    def attention(self, side: int, **changes: Any) -> AttentionSpec:
        bias = bool(self.k.get("use_bias", default=False))
        plain = dict.fromkeys(("q_bias", "k_bias", "v_bias", "o_bias"), bias)
        sparse = self.k.get("attention_type", default="block_sparse") == "block_sparse"
        size, at_random = self.k.number("block_size", default=64), self.k.get("num_random_blocks", default=3)
        if sparse and side == 0:
            plain["keys"] = size * (5 + at_random)
        return super().attention(side, **plain, **changes)


class Led(EncoderDecoder):
    """Longformer's windows in the encoder; global tokens have projections of their own."""

    def positions(self, side: int) -> int:
        return self.k.number(f"max_{SIDES[side]}_position_embeddings")

    def attention(self, side: int, **changes: Any) -> AttentionSpec:
        if side:
            return super().attention(side, **changes)
        window = self.k.get("attention_window", default=512)
        own = linear("global_qkv", self.hidden, 3 * self.hidden, uses=0.0)
        width = window[0] if isinstance(window, list) else window
        return super().attention(side, window=width // 2, extra=(own,), **changes)


class NllbMoe(EncoderDecoder):
    """Top-2 experts each so many layers."""

    def feed_forward(self, side: int, i: int) -> BranchSpec:
        step = self.k.number(f"{SIDES[side]}_sparse_step", default=4)
        if step == 0 or (i + 1) % step:
            return super().feed_forward(side, i)
        number, bias = self.k.number("num_experts"), bool(self.k.get("router_bias", default=False))
        return ExpertsSpec(
            num_experts=number, num_experts_per_tok=2, width=self.widths[side], gated=False, bias=True, router_bias=bias
        )


class SpeechToText(EncoderDecoder):
    """Convolutions with gated halves over filter banks."""

    def stack_extra(self, side: int) -> tuple[WeightSpec, ...]:
        if side:
            return ()
        sizes, middle = self.k.get("conv_kernel_sizes", default=[5, 5]), self.k.number("conv_channels", default=1024)
        inputs = self.k.number("input_feat_per_channel", default=80) * self.k.get("input_channels", default=1)
        last = len(sizes) - 1
        return tuple(
            linear(f"convolution_{n}", size * (inputs if n == 0 else middle // 2), 2 * self.hidden if n == last else middle)
            for n, size in enumerate(sizes)
        )  # fmt: skip


class Gemma2Stack(Decoder):
    """One side of T5Gemma."""

    def attention_fields(self, i: int) -> dict[str, Any]:
        return {**super().attention_fields(i), "causal": bool(self.k.config.get("is_decoder"))}

    def with_cross(self, layer: LayerSpec, width: int) -> LayerSpec:
        """`layer` with an attention over the encoder's output after its own."""
        own, feed = layer.sublayers
        fields = {"cross": True, "causal": False, "window": None, "kv_hidden_size": width if width != self.hidden else None}
        cross = own.branches[0].model_copy(update=fields)
        return LayerSpec(sublayers=(own, own.model_copy(update={"branches": (cross,)}), feed))


def t5gemma(k: Keys, family: Family) -> ArchitectureSpec:
    """Two stacks of Gemma 2's layers, the second with cross-attention, each with a word embedding of its own."""
    sides = k.child("encoder", like="t5_gemma_module"), k.child("decoder", like="t5_gemma_module")
    encoder, decoder = (Gemma2Stack(side or k, family) for side in sides)
    one = encoder.stack().model_copy(update={"name": "encoder"})
    layers = {name: decoder.with_cross(layer, encoder.hidden) for name, layer in decoder.stack().layers.items()}
    fields, words = decoder.outside(), encoder.vocabulary()
    own = lookup("own_words", words, encoder.hidden)
    tied = bool(k.get("tie_word_embeddings", default=True))
    stacks = (one, decoder.stack().model_copy(update={"layers": layers}))
    return ArchitectureSpec(**{**fields, "extra": (*fields["extra"], own), "tie_word_embeddings": tied}, stacks=stacks)


class Whisper(EncoderDecoder):
    """Two convolutions over the spectrogram, keys without bias."""

    def positions(self, side: int) -> int:
        return self.k.number(("max_source_positions", "max_target_positions")[side])

    def stack_extra(self, side: int) -> tuple[WeightSpec, ...]:
        extra = super().stack_extra(side)
        if side:
            return extra
        bins, h = self.k.number("num_mel_bins", default=80), self.hidden
        convolutions = (
            linear("convolution_1", 3 * bins, h),
            linear("convolution_2", 3 * h, h),
        )
        return (*extra, *convolutions)
