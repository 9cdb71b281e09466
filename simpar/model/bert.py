"""Bidirectional text encoders with a masked-language head: BERT and its kin, ModernBERT, EuroBERT."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from simpar.model.decoder import Decoder, StepNorm
from simpar.model.family import Weights
from simpar.model.pieces import depthwise, linear, lookup, norm_extra, vector
from simpar.specs.architecture import SublayerSpec
from simpar.specs.mixers import BranchSpec, FeedForwardSpec


@dataclass(frozen=True, slots=True)
class BertKind:
    """What a model type of this line builds around its layers, where it is not as BERT."""

    positions: str = "table"
    """table: learned, one row per position; none: rotary, ALiBi or relative ones; a number: further rows."""
    token_types: bool = True
    embedding_norm: bool = True
    dense: bool = True
    """A dense layer and a norm before the logits."""
    pooler: bool = False
    """A pooler beside the head (unused by its loss)."""
    second_bias: bool = True
    """An untied head has the transform's bias and its own."""
    narrow: bool = True
    """Positions and token types are as wide as the word embedding."""
    outside: Callable[[Decoder], Weights] | None = None
    inside: Callable[[Decoder, int], dict[str, Any]] | None = None
    """Changes of the attention's fields in layer `i`."""


class Bert(Decoder):
    """An encoder with learned positions; a dense layer and a norm before the tied head."""

    @property
    def kind(self) -> BertKind:
        return KINDS.get(self.k.model_type, BertKind())

    def layer_types(self) -> list[str]:
        self.k.get("add_cross_attention")
        return ["bidirectional"] * self.num_layers

    def attention_fields(self, i: int) -> dict[str, Any]:
        return {**super().attention_fields(i), **(self.kind.inside(self, i) if self.kind.inside else {})}

    def has_head(self) -> bool:
        """A file that names the bare model has no head (and a pooler in its place)."""
        names = self.k.get("architectures", default=[])
        return not (isinstance(names, list) and names and str(names[0]).endswith("Model"))

    def outside(self) -> dict[str, Any]:
        fields, h, kind = super().outside(), self.hidden, self.kind
        width = self.k.get("embedding_size", "input_embedding_size", default=h)
        extra = list(self.tables(width if kind.narrow else h))
        if width != h:
            extra.append(linear("embedding_projection", width, h))
        if self.has_head() and kind.dense:
            extra.append(linear("head_dense", h, width))
            extra.append(norm_extra("head_norm", self.f.norm, width))
        if self.has_head() and not self.tied() and kind.second_bias:
            extra.append(vector("head_second_bias", self.vocabulary()))
        if not self.has_head() or kind.pooler:
            extra.append(linear("pooler", h, h, uses=0.0))
        extra += kind.outside(self) if kind.outside else ()
        return {
            **fields, "embedding_size": width if width != h else 0, "tie_word_embeddings": self.tied(), "head": self.has_head(),
            "head_bias": self.has_head(), "extra": tuple(extra),
        }  # fmt: skip

    def tables(self, width: int) -> Weights:
        """Positions, token types and the norm over their sum."""
        kind, found = self.kind, []
        if kind.positions != "none" and self.k.get("position_biased_input", default=True):
            rows = self.k.number("max_position_embeddings") + (int(kind.positions) if kind.positions.isdigit() else 0)
            found.append(lookup("position", rows, width))
        types = self.k.get("type_vocab_size", default=0)
        if types and kind.token_types:
            found.append(lookup("token_type", types, width))
        if kind.embedding_norm:
            found.append(norm_extra("embedding_norm", self.f.norm, width))
        return tuple(found)


class Albert(Bert):
    """One layer's weights for all layers."""

    def sublayers(self, i: int) -> tuple[SublayerSpec, ...]:
        group, steps = i * self.k.number("num_hidden_groups", default=1) // self.num_layers, super().sublayers(i)
        inner = self.k.get("inner_group_num", default=1)
        return tuple(
            step.model_copy(update={"shared_weights": f"group_{group}_{number}"}) for number in range(inner) for step in steps
        )


class Gte(Bert):
    """Gated feed-forwards with a bias on the second product alone."""

    def mlp(self, i: int) -> FeedForwardSpec:
        return super().mlp(i).model_copy(update={"bias": False, "extra": (vector("down_bias", self.hidden),)})


class FNet(Bert):
    """Fourier transforms in attention's place."""

    def mixer(self, i: int) -> tuple[BranchSpec, ...]:
        return ()

    def layer_extra(self, i: int) -> Weights:
        return (norm_extra("fourier_norm", self.f.norm, self.hidden),)


class Esm(Bert):
    """ESM 2: rotary or learned positions, a norm before the layers only where the file says so."""

    def tables(self, width: int) -> Weights:
        rotary = self.k.get("position_embedding_type", default="absolute") == "rotary"
        normed = self.k.get("emb_layer_norm_before", default=False)
        return tuple(
            w for w in super().tables(width) if not ((rotary and w.name == "position") or (not normed and "norm" in w.name))
        )


class ModernBertDecoder(Decoder):
    """Local attention with a full layer each global_attn_every_n_layers; no norm before the first attention, a dense layer before
    the head."""

    def layer_type(self, i: int) -> str:
        every = self.k.get("global_attn_every_n_layers", default=3)
        return "sliding_attention" if i % every else "full_attention"

    def norms(self, i: int, layout: StepNorm) -> tuple[StepNorm, StepNorm]:
        return layout if i else "none", layout

    def further(self) -> Weights:
        h, bias = self.hidden, bool(self.k.get("classifier_bias", default=False))
        return (linear("head_dense", h, h, bias=bias), norm_extra("head_norm", self.f.norm, h))


class ModernBert(ModernBertDecoder):
    """The encoder, whose window counts both sides."""

    def window(self) -> int | None:
        return self.k.number("local_attention", default=128) // 2


def _block_sparse(d: Decoder, i: int) -> dict[str, Any]:
    """BigBird: three blocks of neighbours, two global ones and some at random."""
    if d.k.get("attention_type", default="block_sparse") != "block_sparse":
        return {}
    size = d.k.number("block_size", default=64)
    return {"keys": size * (5 + d.k.get("num_random_blocks", default=3))}


def _longformer(d: Decoder, i: int) -> dict[str, Any]:
    """A window to both sides; global tokens, a few, have projections of their own."""
    window = d.k.get("attention_window", default=512)
    width, h = window[i] if isinstance(window, list) else window, d.hidden
    own = linear("global_qkv", h, 3 * h, uses=0.0)
    return {"window": width // 2, "extra": (own,)}


def _deberta(d: Decoder, i: int) -> dict[str, Any]:
    """Disentangled attention: scores between content and relative positions, both ways (He et al. 2020, arXiv 2006.03654)."""
    if not d.k.get("relative_attention", default=False):
        return {}
    kinds = d.k.get("pos_att_type", default=[])
    kinds = kinds.split("|") if isinstance(kinds, str) else kinds
    d.k.get("norm_rel_ebd", "talking_head")
    own = () if d.k.get("share_att_key", default=False) else _positions(d, kinds)
    return {"joint_keys": _span(d) * len(kinds), "extra": own}


def _positions(d: Decoder, kinds: list[str]) -> Weights:
    """Projections of the relative positions where they are not the content's."""
    named = {"c2p": ("position_key", False), "p2c": ("position_query", True)}
    v2 = d.k.model_type == "deberta-v2"
    return tuple(linear(named[kind][0], d.hidden, d.hidden, bias=v2 or named[kind][1], uses=0.0) for kind in kinds if kind in named)


def _span(d: Decoder) -> int:
    """Rows of relative positions to one side."""
    buckets = d.k.get("position_buckets", default=-1)
    furthest = d.k.get("max_relative_positions", default=-1)
    limit = furthest if furthest and furthest > 0 else d.k.number("max_position_embeddings")
    return int(buckets if buckets and buckets > 0 else limit)


def _relative_table(d: Decoder) -> Weights:
    """DeBERTa's embeddings of relative positions, with a norm in the second version."""
    if not d.k.get("relative_attention", default=False):
        return ()
    table = lookup("relative_positions", 2 * _span(d), d.hidden)
    normed = "layer_norm" in str(d.k.get("norm_rel_ebd", default="none"))
    found = (table, norm_extra("relative_norm", "layernorm", d.hidden)) if normed else (table,)
    taps = d.k.get("conv_kernel_size", default=0)
    if not taps:
        return found
    wide = d.hidden // d.k.get("conv_groups", default=1)
    conv = linear("first_convolution", taps * wide, d.hidden, uses=1.0)
    return (*found, conv, norm_extra("convolution_norm", "layernorm", d.hidden))


def _frames(d: Decoder) -> Weights:
    """GIT over videos: an embedding for each frame."""
    frames, vision = d.k.get("num_image_with_embedding", default=0), d.k.config.get("vision_config") or {}
    return (vector("frames", frames * vision.get("hidden_size", 768)),) if frames else ()


def _nystrom(d: Decoder, i: int) -> dict[str, Any]:
    """Landmarks in place of all keys, and a depthwise convolution over the values."""
    taps = d.k.get("conv_kernel_size", default=65)
    conv = (depthwise("convolution", taps, d.heads),) if taps else ()
    return {"keys": 2 * d.k.number("num_landmarks", default=64), "extra": conv}


KINDS: Final[dict[str, BertKind]] = {
    "bert-generation": BertKind(token_types=False, dense=False),
    "big_bird": BertKind(pooler=True, inside=_block_sparse),
    "megatron-bert": BertKind(embedding_norm=False), "xlm-roberta-xl": BertKind(embedding_norm=False),
    # a sinusoidal table that is kept as a parameter
    "roformer": BertKind(
        positions="none", outside=lambda d: (vector("sinusoids", d.k.number("max_position_embeddings") * d.head_dim),)),
    # relative positions shared by all layers
    "mpnet": BertKind(token_types=False, outside=lambda d: (
        lookup("relative_bias", d.k.number("relative_attention_num_buckets", default=32), d.heads),)),
    "distilbert": BertKind(second_bias=False), "electra": BertKind(second_bias=False),
    # version 1: one product for queries, keys and values, biases for the first and the last
    "deberta": BertKind(inside=lambda d, i: {**_deberta(d, i), "k_bias": False}, outside=_relative_table, narrow=False),
    "deberta-v2": BertKind(inside=_deberta, outside=_relative_table, narrow=False),
    "nomic_bert": BertKind(positions="none"), "jina_embeddings_v3": BertKind(positions="none"),
    "gte": BertKind(positions="none", second_bias=False),
    # places, heights and widths on the page
    "layoutlm": BertKind(
        pooler=True, outside=lambda d: (lookup("boxes", 4 * d.k.number("max_2d_position_embeddings"), d.hidden),)),
    "longformer": BertKind(inside=_longformer),
    # a contact head over the attention maps of all layers
    "esm": BertKind(token_types=False, outside=lambda d: (vector("contact_head", d.num_layers * d.heads + 1),)),
    "nystromformer": BertKind(positions="2", inside=_nystrom), "yoso": BertKind(positions="2"), "mra": BertKind(positions="2"),
    "git": BertKind(token_types=False, dense=False, second_bias=False, outside=_frames),
    "fnet": BertKind(pooler=True, outside=lambda d: (linear("embedding_projection", d.hidden, d.hidden),)),
}  # fmt: skip
"""Model type -> how it differs from BERT; one that is not here does not."""

BERT_LIKE: Final = (
    "bert", "roberta", "xlm-roberta", "camembert", "electra", "ernie", "data2vec-text", "distilbert", "albert", "ibert", *KINDS,
)  # fmt: skip
"""Model types of this line."""
