"""Families of linear attention and the delta rule, alone or with a full attention every so many layers."""

from __future__ import annotations

from typing import Any

from simpar.model.decoder import Decoder
from simpar.model.family import Layout
from simpar.model.pieces import linear, matrix, vector
from simpar.specs.architecture import SublayerSpec
from simpar.specs.mixers import BranchSpec, CustomSpec, DeltaSpec, LinearAttentionSpec

_KERNELS = ("short_conv_kernel_size", "linear_conv_kernel_dim")


class QwenNext(Decoder):
    """Gated DeltaNet with a gated full attention each full_attention_interval (Qwen3-Next, Qwen3.5)."""

    def layer_type(self, i: int) -> str:
        interval = self.k.number("full_attention_interval", default=4)
        return "full_attention" if (i + 1) % interval == 0 else "linear_attention"

    def attention_fields(self, i: int) -> dict[str, Any]:
        """The gate is part of the queries' projection, biases included."""
        fields = super().attention_fields(i)
        return {**fields, "gate_bias": fields["q_bias"] and fields["gate"] == "element"}

    def recurrence(self, i: int) -> BranchSpec:
        return DeltaSpec(
            num_key_heads=self.k.number("linear_num_key_heads"),
            num_value_heads=self.k.number("linear_num_value_heads"),
            key_head_dim=self.k.number("linear_key_head_dim"),
            value_head_dim=self.k.number("linear_value_head_dim"),
            conv_kernel=self.k.number("linear_conv_kernel_dim", default=4),
        )


class LaraMini(QwenNext):
    """Gated DeltaNet, windows and, each fifth layer, full attention without positions; experts everywhere."""

    def layer_type(self, i: int) -> str:
        return ("linear_attention", "sliding_attention", "linear_attention", "full_attention", "sliding_attention")[i % 5]

    def attention_fields(self, i: int) -> dict[str, Any]:
        fields = super().attention_fields(i)
        return fields if "sliding" in self.types[i] else {**fields, "position": "none"}


class JetNemotron(Decoder):
    """Jet blocks (a gated delta rule whose values pass a convolution with kernels made of the token), full and window attention.

    Sizes of both stand in `efficient_attention_config` (NVlabs/Jet-Nemotron, jetai/modeling/hf/jet_block.py).
    """

    def window(self) -> int | None:
        swa = self.k.get("efficient_attention_config", default={}).get("swa", {})
        return int(swa["window_size"]) if "window_size" in swa else None

    def layer_types(self) -> list[str]:
        names = {"jet": "linear_attention", "attn": "full_attention", "swa": "sliding_attention"}
        return [names.get(kind, kind) for kind in super().layer_types()]

    def recurrence(self, i: int) -> BranchSpec:
        jet = self.k.get("efficient_attention_config", default={}).get("jet", {})
        heads, dim, kernel = jet.get("num_heads", 6), jet.get("head_dim", 256), jet.get("conv_size", 4)
        values = int(heads * dim * jet.get("expand_v", 2.0))
        inner = values // jet.get("dconv_generator_reduction", 8)
        generator = (matrix("kernel_1", self.hidden, inner), linear("kernel_2", inner, values * kernel))
        return DeltaSpec(
            num_key_heads=heads, num_value_heads=heads, key_head_dim=dim, value_head_dim=values // heads, conv_kernel=0,
            extra=generator,
        )  # fmt: skip


class OlmoHybrid(QwenNext):
    """Gated DeltaNet with a norm before it, full attention with norms after (OLMo)."""

    def layout(self, i: int) -> Layout:
        return "pre" if self.types[i] == "linear_attention" else "post"

    def attention_fields(self, i: int) -> dict[str, Any]:
        return {**super().attention_fields(i), "qk_norm": "full"}


class KimiLinear(Decoder):
    """Kimi Delta Attention, three to one with latent attention without positions."""

    decay_rank_is_head = True

    def layer_types(self) -> list[str]:
        lists = self.k.child("linear_attn_config")
        if lists is not None:
            full = lists.get("full_attn_layers", default=[])
            lists.get("kda_layers")
            self.linear = lists
            return ["full_attention" if i + 1 in full else "linear_attention" for i in range(self.num_layers)]
        self.linear = self.k
        return super().layer_types()

    def layer_type(self, i: int) -> str:
        group = self.k.get("layer_group_size")
        if group:
            return "full_attention" if (i + 1) % group == 0 or i >= self.num_layers // group * group else "linear_attention"
        return "full_attention" if i and i % 4 == 0 else "linear_attention"

    def recurrence(self, i: int) -> BranchSpec:
        nested = self.linear is not self.k
        heads = self.linear.number("num_heads" if nested else "linear_num_heads", default=self.heads)
        dim = self.linear.number("head_dim" if nested else "linear_head_dim", default=self.head_dim)
        rank = dim if self.decay_rank_is_head else 0
        gate_rank = 0 if nested and self.linear.get("use_full_rank_gate", default=False) else rank
        return DeltaSpec(
            num_key_heads=heads, num_value_heads=heads, key_head_dim=dim, value_head_dim=dim,
            conv_kernel=self.linear.number(*(_KERNELS if nested else reversed(_KERNELS)), default=4),
            decay="channel", decay_rank=rank, gate_rank=gate_rank,
        )  # fmt: skip

    def latent_fields(self, i: int) -> dict[str, Any]:
        fields = super().latent_fields(i)
        return {**fields, "gate": "element"} if self.k.get("mla_use_output_gate", default=False) else fields

    def expert_fields(self, i: int) -> dict[str, Any]:
        """Kimi K3: experts in a narrower space, with a norm on the way back."""
        fields, latent = super().expert_fields(i), self.k.get("routed_expert_hidden_size")
        norm = (vector("latent_norm", latent),) if latent and self.k.get("latent_moe_use_norm", default=False) else ()
        return {**fields, "input_size": latent, "extra": norm}


class BailingHybrid(KimiLinear):
    """Ling and Ring 2.5: Kimi Delta Attention with full-rank gates, latent attention with a gate per head."""

    decay_rank_is_head = False

    def layer_type(self, i: int) -> str:
        return "full_attention" if (i + 1) % self.k.number("layer_group_size") == 0 else "linear_attention"


class BailingLinear(Decoder):
    """Ling and Ring linear 2.0: lightning attention with norms of queries and keys, one softmax layer in `layer_group_size`."""

    def layer_type(self, i: int) -> str:
        group = self.k.number("layer_group_size", default=1)
        return "full_attention" if (i + 1) % group == 0 or i >= self.num_layers // group * group else "linear_attention"

    def recurrence(self, i: int) -> BranchSpec:
        h, d = self.heads, self.head_dim
        kv = self.kv_heads if self.k.get("use_linear_gqa", default=False) else h
        norms = (vector("qk_norms", 2 * d),) if self.k.get("use_qk_norm", default=False) else ()
        return LinearAttentionSpec(
            num_heads=h, num_key_value_heads=kv, key_head_dim=d, value_head_dim=d, norm_size=h * d, chunk=64, extra=norms
        )


class MiniMaxHybrid(Decoder):
    """Lightning attention, one softmax layer in so many (MiniMax-Text-01, M1)."""

    def layer_types(self) -> list[str]:
        kinds = self.k.listed("attn_type_list")
        if kinds:
            return ["full_attention" if kind else "linear_attention" for kind in kinds[: self.num_layers]]
        return super().layer_types()

    def shared_width(self, width: int) -> int:
        self.k.meet(
            "shared_intermediate_size", self.k.get("shared_intermediate_size", default=0), 0, "the width that its class builds"
        )
        return 0

    def recurrence(self, i: int) -> BranchSpec:
        h, d = self.heads, self.head_dim
        chunk = self.k.number("block_size", default=256)
        return LinearAttentionSpec(num_heads=h, key_head_dim=d, value_head_dim=d, norm_size=h * d, chunk=chunk)


class Rwkv(Decoder):
    """RWKV-4: time mix and channel mix, each with a token shift."""

    def layer_types(self) -> list[str]:
        return ["rwkv"] * self.num_layers

    def sublayers(self, i: int) -> tuple[SublayerSpec, ...]:
        h = self.hidden
        inner, width = self.k.number("attention_hidden_size", default=h), self.k.number("intermediate_size", default=4 * h)
        time = CustomSpec(
            label="RWKV time mix",
            kernel_flops=7.0 * inner,
            extra=(
                vector("decay_first", 2 * inner), vector("token_shift", 3 * h),
                matrix("key_value_receptance", h, 3 * inner), matrix("out", inner, h),
            ),
        )  # fmt: skip
        channel = CustomSpec(
            label="RWKV channel mix",
            extra=(
                vector("token_shift", 2 * h), matrix("key", h, width),
                matrix("receptance", h, h), matrix("value", width, h),
            ),
        )  # fmt: skip
        return (SublayerSpec(branches=(time,)), SublayerSpec(branches=(channel,)))


class Xlstm(Decoder):
    """Matrix LSTM: linear attention with input and forget gates, chunkwise."""

    def __init__(self, keys: Any, family: Any) -> None:
        blocks, width = keys.get("num_blocks"), keys.get("embedding_dim")
        keys.config = {"hidden_size": width, **keys.config, **({"num_hidden_layers": blocks} if blocks else {})}
        super().__init__(keys, family)
        keys.meet("embedding_dim", self.hidden if width is None else width, self.hidden, "hidden_size")

    def layer_types(self) -> list[str]:
        return ["mlstm"] * self.num_layers

    def recurrence(self, i: int) -> BranchSpec:
        heads, h = self.k.number("num_heads"), self.hidden
        qk, v = int(h * self.k.get("qk_dim_factor", default=0.5)), int(h * self.k.get("v_dim_factor", default=1.0))
        gates = linear("input_forget_gates", h, 2 * heads)
        return LinearAttentionSpec(
            num_heads=heads, key_head_dim=qk // heads, value_head_dim=v // heads, norm_size=v,
            chunk=self.k.number("chunk_size", default=64), extra=(gates,),
        )  # fmt: skip

    def intermediate(self, i: int) -> int:
        multiple = self.k.number("ffn_round_up_to_multiple_of", default=64)
        return multiple * (-(-int(self.hidden * self.k.get("ffn_proj_factor", default=2.667)) // multiple))
