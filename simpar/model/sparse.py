"""Families of sparse and latent attention: indexers, compressed keys, hyper-connections, shortcut and zero experts."""

from __future__ import annotations

from typing import Any, ClassVar

from simpar.model.decoder import Decoder, StepNorm
from simpar.model.family import Weights
from simpar.model.pieces import matrix, vector
from simpar.specs.architecture import SublayerSpec
from simpar.specs.mixers import BranchSpec, CustomSpec, ExpertsSpec, FeedForwardSpec, IndexerSpec, WeightSpec


class MiniMaxM3(Decoder):
    """Block-sparse attention by a small indexer (MiniMax M3)."""

    def layer_types(self) -> list[str]:
        sparse = self.k.child("sparse_attention_config")
        self.sparse = sparse or self.k
        marks = sparse.listed("sparse_attention_freq") if sparse else None
        if marks and not self.k.listed("layer_types"):
            return ["minimax_m3_sparse" if mark else "full_attention" for mark in marks[: self.num_layers]]
        return super().layer_types()

    def attention_fields(self, i: int) -> dict[str, Any]:
        fields = super().attention_fields(i)
        if "sparse" not in self.types[i]:
            return fields
        r = self.sparse
        block = r.number("sparse_block_size", "index_block_size")
        blocks = r.number("sparse_topk_blocks", "index_topk_blocks")  # the local block is always one of them
        r.get("sparse_local_block", "index_local_blocks", "sparse_disable_index_value", "use_sparse_attention", "sparse_init_block",
              "sparse_score_type")  # fmt: skip
        index = IndexerSpec(
            num_heads=r.number("sparse_num_index_heads", "index_n_heads"),
            head_dim=r.number("sparse_index_dim", "index_head_dim"),
            top_k=blocks * block,
            block=block,
        )
        return {**fields, "indexer": index}


class DeepseekV4(Decoder):
    """One key head that is also the value, compressed keys per layer, four residual streams, experts everywhere."""

    streams = "hc_mult"
    ratios: ClassVar = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}

    def layer_types(self) -> list[str]:
        ratios = self.k.listed("compress_ratios")
        if ratios and not self.k.listed("layer_types"):
            if len(ratios) < self.num_layers or any(ratio not in self.ratios for ratio in ratios):
                self.k.violate("compress_ratios", "...", "must be 0, 4 or 128 for every layer")
                return ["sliding_attention"] * self.num_layers
            return [self.ratios[ratio] for ratio in ratios[: self.num_layers]]
        return super().layer_types()

    def layer_type(self, i: int) -> str:
        return self.ratios[4] if i >= 2 and i % 2 else self.ratios[128]

    def is_expert_layer(self, i: int) -> bool:
        return True

    def expert_width(self) -> int:
        width, other = super().expert_width(), self.k.config.get("intermediate_size")
        if other is not None:
            self.k.meet("intermediate_size", other, width, "moe_intermediate_size")
        return width

    def expert_fields(self, i: int) -> dict[str, Any]:
        fields = super().expert_fields(i)
        bias = (vector("shared_bias", 2 * fields["width"] + self.hidden),) if self.flag("mlp_bias") else ()
        return {**fields, "extra": bias}

    def mixer(self, i: int) -> tuple[BranchSpec, ...]:
        k, d, h = self.k, self.head_dim, self.hidden
        rates = k.get("compress_rates", default={})
        rank, groups, o_rank = k.number("q_lora_rank"), k.number("o_groups"), k.number("o_lora_rank")
        q = self.heads * d
        weights = [
            matrix("q_down", h, rank), matrix("q_up", rank, q),
            matrix("kv", h, d), vector("norms", rank + d), vector("sinks", self.heads),
            matrix("out_down", q // groups, o_rank, copies=groups),
            matrix("out_up", groups * o_rank, h),
        ]  # fmt: skip
        compress, top, index_heads, index_dim = 0, 0, 0, 0
        if "compressed" in self.types[i]:
            sparse = self.types[i] == self.ratios[4]
            compress = (
                rates.get(self.types[i]) or k.get("compress_rate_csa" if sparse else "compress_rate_hca") or (4 if sparse else 128)
            )
            width = 2 * d if sparse else d
            weights += compressor("compressor", h, width, d, compress)
            if sparse:
                index_heads, index_dim, top = k.number("index_n_heads"), k.number("index_head_dim"), k.number("index_topk")
                weights += compressor("index", h, 2 * index_dim, index_dim, compress)
                weights += [
                    matrix("index_q", rank, index_heads * index_dim),
                    matrix("index_weights", h, index_heads),
                ]
        return (
            CustomSpec(
                label=f"multi-query latent attention ({self.heads} heads of {d})", attention_columns=2 * q,
                window=k.number("sliding_window"), compress=compress, top_k=top, index_columns=index_heads * index_dim,
                extra=tuple(weights),
            ),
        )  # fmt: skip


def compressor(name: str, hidden: int, width: int, key: int, rate: int) -> list[WeightSpec]:
    """Keys pooled over `rate` tokens: values, softmax gates, positions within the block, a norm."""
    return [
        matrix(f"{name}_kv_gate", hidden, 2 * width),
        vector(f"{name}_position_norm", rate * width + key),
    ]


def hyper_connections(d: Decoder, *, mixes: bool = True) -> tuple[WeightSpec, ...]:
    """Manifold-constrained hyper-connections of a layer's attention and feed-forward: one projection of all streams to the maps
    that read and write them, and (`mixes`) mix all with all; HY-V4 has no mix.
    """
    n = d.k.number("hc_mult")
    outputs = (2 + n * mixes) * n
    found: list[WeightSpec] = []
    for name in ("attention", "feed_forward"):
        found += [matrix(f"{name}_streams", n * d.hidden, outputs), vector(f"{name}_streams_base", outputs + 2 + mixes)]
    return tuple(found)


def hyper_head(d: Decoder) -> tuple[WeightSpec, ...]:
    """The streams summed by learned weights before the head."""
    n = d.k.number("hc_mult")
    return (matrix("head_streams", n * d.hidden, n), vector("head_streams_base", n + 1))


class HyV4(Decoder):
    """Latent attention with sinks, a gate and a shared indexer; four streams without a mix (HY-V4)."""

    streams = "hc_mult"

    def latent_fields(self, i: int) -> dict[str, Any]:
        return {**super().latent_fields(i), "gate": "element", "extra": (vector("sinks", self.heads),)}

    def owns_index(self, i: int) -> bool:
        return super().owns_index(i) if self.k.listed("indexer_types") else i == 0 or i % 4 == 1


class Longcat(Decoder):
    """Two attentions and two dense feed-forwards per layer; the experts start after the first attention and end with the layer."""

    def __init__(self, keys: Any, family: Any) -> None:
        number, halves = keys.config.get("num_layers"), keys.config.get("num_hidden_layers")
        if number and halves:
            keys.meet("num_hidden_layers", halves, 2 * number, "2 x num_layers")
        if halves:  # its class counts every half of a layer
            keys.config = {**keys.config, "num_hidden_layers": number or halves // 2}
        super().__init__(keys, family)

    def latent_fields(self, i: int) -> dict[str, Any]:
        fields = super().latent_fields(i)
        parts = fields["qk_nope_head_dim"] + fields["qk_rope_head_dim"]
        self.k.meet("qk_head_dim", self.k.config.get("qk_head_dim", parts), parts, "qk_nope_head_dim + qk_rope_head_dim")
        return fields

    def sublayers(self, i: int) -> tuple[SublayerSpec, ...]:
        width = self.k.number("ffn_hidden_size", "intermediate_size")
        attention = SublayerSpec(branches=(self.attention(i),))
        dense = FeedForwardSpec(width=width, activation=self.activation())
        zero = self.k.get("zero_expert_num", default=0)
        fields = {**self.expert_fields(i), "zero_experts": zero}
        # transformers holds the up-projections of the experts that have no weights; they are never used
        idle = (matrix("idle_zero_experts", self.hidden, 2 * fields["width"], copies=zero, uses=0.0),) if zero else ()
        first = SublayerSpec(branches=(dense, ExpertsSpec(**fields, extra=idle)))
        return (attention, first, attention, SublayerSpec(branches=(dense,)))


class AxK1(Decoder):
    """A.X K1: DeepSeek-V3 with a norm after the experts."""

    def norms(self, i: int, layout: StepNorm) -> tuple[StepNorm, StepNorm]:
        return layout, "sandwich" if self.is_expert_layer(i) else layout


class AxK2(Decoder):
    """A.X K2: norms with a low-rank gate, queries and an output gate from a latent twice as wide."""

    def latent_fields(self, i: int) -> dict[str, Any]:
        fields = super().latent_fields(i)
        rank, heads = fields["q_lora_rank"], fields["num_heads"]
        query = heads * (fields["qk_nope_head_dim"] + fields["qk_rope_head_dim"])
        second = matrix("q_up_second", rank, query)
        gate = matrix("gate", 2 * rank, heads * fields["v_head_dim"])
        return {**fields, "extra": (second, gate)}

    def layer_extra(self, i: int) -> Weights:
        rank = self.k.number("gated_norm_rank")
        gates = 2 if self.is_expert_layer(i) else 1
        return (
            matrix("norm_gate_down", self.hidden, rank, copies=gates),
            matrix("norm_gate_up", rank, self.hidden, copies=gates),
        )


class Dots3Note(Decoder):
    """Indexed latent attention with layers of windowed latent attention of another geometry between."""

    def layer_type(self, i: int) -> str:
        windows = self.k.get("use_sliding_window", default=True) and i >= 2 and i % 4 != 1
        return "sliding_attention" if windows else "indexed_attention"

    def latent_fields(self, i: int) -> dict[str, Any]:
        fields = super().latent_fields(i)
        return {**fields, "extra": (vector("rope_norm", fields["qk_rope_head_dim"]),)}
