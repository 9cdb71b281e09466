"""Families of 2026 with arrangements of their own: GLM-5-next, Muse, Mistral Large 4, ZAYA."""

from __future__ import annotations

from math import isqrt
from typing import Any

from simpar.model.decoder import Decoder, StepNorm
from simpar.model.family import Weights
from simpar.model.linear import KimiLinear, QwenNext
from simpar.model.pieces import depthwise, linear, lookup, matrix, vector
from simpar.specs.mixers import IndexerSpec, WeightSpec


class Glm5Next(KimiLinear):
    """Kimi Delta Attention, three to one with indexed latent attention over pooled index keys, on hyper-connections."""

    streams = "hc_mult"

    def layer_type(self, i: int) -> str:
        return "indexed_attention" if i % 4 == 3 else "linear_attention"

    def indexer(self, i: int) -> IndexerSpec | None:
        index = super().indexer(i)
        return index.model_copy(update={"compress": self.k.number("index_kpool", default=1)}) if index else None

    def latent_fields(self, i: int) -> dict[str, Any]:
        fields, pool = super().latent_fields(i), self.k.number("index_kpool", default=1)
        index: IndexerSpec | None = fields["indexer"]
        if index is None or not index.owned:
            return fields
        gate = matrix("index_pool_gate", self.hidden, index.head_dim)
        return {**fields, "extra": (gate, vector("index_pool_positions", pool * index.head_dim))}


class MuseSpark(Decoder):
    """Windows with a full layer in four, which is without RoPE; experts in a narrower space, with norms on the way in and out; a
    gate vector on both residuals."""

    def norms(self, i: int, layout: StepNorm) -> tuple[StepNorm, StepNorm]:
        return layout, "sandwich"

    def expert_fields(self, i: int) -> dict[str, Any]:
        width = self.k.number("moe_hidden_size")
        return {**super().expert_fields(i), "input_size": width, "extra": (vector("latent_norms", 2 * width),)}


class MistralLarge4(Decoder):
    """Indexed latent attention in every layer, each fourth without RoPE and with wider keys; learned scales of the softmax."""

    def __init__(self, keys: Any, family: Any) -> None:
        super().__init__(keys, family)
        if keys.config.get("kv_source_layers") == list(range(self.num_layers)):
            keys.used.add("kv_source_layers")  # no layer takes another's keys

    def latent_fields(self, i: int) -> dict[str, Any]:
        fields = super().latent_fields(i)
        marks = self.k.listed("no_rope_layers")
        if not (marks[i] if marks else (i + 1) % 4):
            fields |= {"qk_nope_head_dim": fields["qk_nope_head_dim"] + fields["qk_rope_head_dim"], "qk_rope_head_dim": 0}
        index: IndexerSpec | None = fields["indexer"]
        own = 2 * self.hidden + 2 * index.num_heads if index and index.owned else 0
        return {**fields, "extra": (vector("softmax_scales", 2 * self.heads + own),)}


class Zaya(Decoder):
    """Compressed convolutional attention, a router of three layers with one choice to skip, scaled residuals."""

    def attention_extra(self, i: int) -> Weights:
        d, mixed = self.head_dim, (self.heads + self.kv_heads) * self.head_dim
        taps = (self.k.number("cca_time0", default=2), self.k.number("cca_time1", default=2))
        return (
            depthwise("depthwise", taps[0], mixed, bias=True),
            depthwise("grouped", taps[1] * d, mixed, bias=True),
            vector("temperature", self.kv_heads),
        )

    def expert_fields(self, i: int) -> dict[str, Any]:
        width = self.k.number("router_hidden_size")
        fields = {**super().expert_fields(i), "router": "none", "zero_experts": 1}
        inner = tuple(linear(f"router_{n}", width, width) for n in (1, 2))
        router = (
            linear("router_down", self.hidden, width), *inner,
            matrix("router_out", width, fields["num_experts"] + 1),
            vector("router_norm", width * (2 if i else 1)),
        )  # fmt: skip
        return {**fields, "extra": router}


class Inkling(Decoder):
    """Short convolutions beside keys, values and both outputs; learned relative logits; window layers with heads of their own."""

    def conv(self, name: str, width: int) -> WeightSpec:
        """A depthwise convolution of the layer's short kernel."""
        return depthwise(name, self.k.number("conv_kernel_size", default=4), width)

    def relative(self, i: int, heads: int) -> tuple[WeightSpec, ...]:
        """Queries of the relative positions, and their logits over the extent (a window layer's is the window)."""
        width, extent = self.k.number("d_rel", default=16), self.k.number("rel_extent", default=1024)
        extent = (self.window() or extent) if "sliding" in self.types[i] else extent
        logits = matrix("relative_logits", width, extent, uses=float(heads))
        return (matrix("relative_queries", self.hidden, heads * width), logits)

    def attention_fields(self, i: int) -> dict[str, Any]:
        fields = super().attention_fields(i)
        if "sliding" in self.types[i]:
            fields |= {
                "num_heads": self.k.get("swa_num_attention_heads", default=self.heads), "window": self.window(),
                "num_key_value_heads": self.k.get("swa_num_key_value_heads", default=self.kv_heads),
                "head_dim": self.k.get("swa_head_dim", default=self.head_dim),
            }  # fmt: skip
        convs = self.conv("key_value_convolution", 2 * fields["num_key_value_heads"] * fields["head_dim"])
        return {**fields, "position": "relative", "extra": (convs, *self.relative(i, fields["num_heads"]))}

    def expert_fields(self, i: int) -> dict[str, Any]:
        """The router scores the shared experts as well."""
        fields, shared = super().expert_fields(i), self.k.get("n_shared_experts", default=0)
        rows = (matrix("shared_scores", self.hidden, shared),) if shared else ()
        return {**fields, "extra": (*rows, vector("scale", 1))}

    def layer_extra(self, i: int) -> Weights:
        return (self.conv("attention_convolution", self.hidden), self.conv("feed_forward_convolution", self.hidden))


class Inkling2(Inkling):
    """Clipped queries and a sink from the token; full layers with dynamic convolutions; attention over earlier blocks' outputs."""

    def attention_fields(self, i: int) -> dict[str, Any]:
        fields, k = super().attention_fields(i), self.k
        heads, d, groups = fields["num_heads"], fields["head_dim"], fields["num_key_value_heads"]
        own = [matrix("sinks", self.hidden, heads), vector("clips", heads * (d + k.number("d_rel")))]
        if "sliding" not in self.types[i]:
            taps = k.number("conv_kernel_size", default=4)
            own.append(matrix("dynamic_taps", self.hidden, taps * groups, copies=2))
        return {**fields, "extra": (*fields["extra"], *own)}

    def expert_fields(self, i: int) -> dict[str, Any]:
        return {**super().expert_fields(i), "extra": ()}

    def layer_extra(self, i: int) -> Weights:
        """A query over the blocks' outputs before attention (none in the first layer; three, with norms, where layers are full) and
        before the feed-forward."""
        full = "sliding" not in self.types[i]
        queries = (3 if full else 1 if i else 0) + 1
        return (*super().layer_extra(i), vector("block_queries", (queries + 2 * full) * self.hidden))

    def vocabulary(self) -> int:
        """The embedding is padded, the head is not."""
        return self.k.number("unpadded_vocab_size", default=super().vocabulary())


class Phi4Adapters(Decoder):
    """Phi-4-multimodal: adapters for images and for speech on every matrix; a text token meets neither."""

    def layer_extra(self, i: int) -> Weights:
        h, wide = self.hidden, self.intermediate(i)
        qkv = (self.heads + 2 * self.kv_heads) * self.head_dim
        pairs = ((h, qkv), (self.heads * self.head_dim, h), (h, 2 * wide), (wide, h))
        ranks = {name: (self.k.get(name) or {}).get("r", 0) for name in ("vision_lora", "speech_lora")}
        return tuple(
            matrix(f"{name}_{n}", rank, a + b, uses=0.0) for name, rank in ranks.items() if rank for n, (a, b) in enumerate(pairs)
        )


class Qwen4(QwenNext):
    """Streams side by side that a learned gate of low rank mixes before each sublayer; gated DeltaNet and full attention over the
    keys that a small indexer chooses; embeddings of hashed n-grams at listed layers (transformers modular_qwen4_exp.py)."""

    streams = "hc_count"

    def layer_types(self) -> list[str]:
        return ["indexed_attention" if kind == "full_attention" else kind for kind in super().layer_types()]

    def attention_fields(self, i: int) -> dict[str, Any]:
        k, pool = self.k, self.k.number("indexer_compress_ratio")
        index = IndexerSpec(
            num_heads=k.number("indexer_n_heads"), head_dim=k.number("indexer_head_dim"), top_k=k.number("indexer_budget"),
            block=pool, compress=pool,
        )  # fmt: skip
        return {**super().attention_fields(i), "indexer": index}

    def mix(self, name: str) -> tuple[WeightSpec, ...]:
        """A norm of all streams and the gates of what a sublayer reads of them."""
        wide, rank = self.k.number("hc_count") * self.hidden, self.k.number("hc_lowrank")
        down = matrix(f"{name}_mix_down", wide, rank)
        return (vector(f"{name}_streams_norm", wide), down, matrix(f"{name}_mix_up", rank, wide))

    def norms(self, i: int, layout: StepNorm) -> tuple[StepNorm, StepNorm]:
        return "none", "none"

    def layer_extra(self, i: int) -> Weights:
        streams = self.k.number("hc_count")
        extra = [
            w for name in ("attention", "feed_forward")
            for w in (*self.mix(name), matrix(f"{name}_inject", streams * self.hidden, streams))
        ]  # fmt: skip
        places = sorted(set(self.k.get("ple_layer_ids") or ()))
        ngrams = self.ngrams(places.index(i + 1)) if i + 1 in places else ()
        return (*extra, *ngrams)

    def ngrams(self, place: int) -> tuple[WeightSpec, ...]:
        """A table whose heads hash n-grams of 2 to ngram_size tokens, each into as many rows as a prime of its own; keys by stream,
        a value and a depthwise convolution."""
        k, h = self.k, self.hidden
        wide, size = k.number("hc_count") * h, k.number("ple_embed_dim", default=h)
        heads = (k.number("ngram_size") - 1) * k.number("heads_per_ngram")
        rows = primes(k.number("ngram_vocab_size_base"), place * heads, heads)
        multiple = k.number("make_ngram_vocab_size_divisible_by")
        return (
            lookup("ngrams", multiple * -(-rows // multiple), size // heads),
            matrix("ngram_keys", size, wide), matrix("ngram_value", size, h),
            vector("ngram_norms", 3 * wide),
            depthwise("ngram_convolution", k.number("ple_conv_kernel_size", default=4), wide),
        )  # fmt: skip


def primes(start: int, skipped: int, count: int) -> int:
    """Sum of `count` primes from `start` on, after the first `skipped`."""
    value = start - 1
    found: list[int] = []
    while len(found) < skipped + count:
        value += 1
        if value > 1 and all(value % divisor for divisor in range(2, isqrt(value) + 1)):
            found.append(value)
    return sum(found[skipped:])
