"""Families whose layers have sizes of their own: heads and windows by layer, widths found by search, small oddities."""

from __future__ import annotations

from typing import Any

from simpar.model.decoder import Decoder
from simpar.model.family import Weights
from simpar.model.pieces import linear, matrix, vector
from simpar.specs.mixers import AttentionSpec, BranchSpec, CustomSpec, ExpertsSpec, FeedForwardSpec, WeightSpec


class Llama4(Decoder):
    """Chunked attention with RoPE, each no_rope_layer_interval-th layer full without; experts each so many layers."""

    def layer_type(self, i: int) -> str:
        marks = self.k.listed("no_rope_layers")
        every = self.k.get("no_rope_layer_interval", default=4)
        return "chunked_attention" if (marks[i] if marks else (i + 1) % every) else "full_attention"


class MimoV2(Decoder):
    """Window layers with heads of their own and sinks (MiMo-V2)."""

    def layer_type(self, i: int) -> str:
        if self.k.listed("hybrid_layer_pattern"):
            return super().layer_type(i)
        return "full_attention" if i == 0 or (i + 1) % 6 == 0 else "sliding_attention"

    def shared_width(self, width: int) -> int:
        self.k.meet("n_shared_experts", self.k.get("n_shared_experts", default=0), 0, "the number that its class builds")
        return 0

    def attention_fields(self, i: int) -> dict[str, Any]:
        fields = super().attention_fields(i)
        v = self.k.get("v_head_dim", default=self.head_dim)
        if "sliding" not in self.types[i]:
            return {**fields, "v_head_dim": v, "sinks": bool(self.k.get("add_full_attention_sink_bias", default=False))}
        size = self.k.get("sliding_window_size")  # its reference attends so many earlier tokens and the query's own
        return {
            **fields,
            "num_heads": self.k.get("swa_num_attention_heads", default=fields["num_heads"]),
            "num_key_value_heads": self.k.get("swa_num_key_value_heads", default=2 * fields["num_key_value_heads"]),
            "head_dim": self.k.get("swa_head_dim", default=fields["head_dim"]),
            "v_head_dim": self.k.get("swa_v_head_dim", default=v),
            "window": size + 1 if size else fields["window"],
            "sinks": bool(self.k.get("add_swa_attention_sink_bias", default=True)),
        }


class Step(Decoder):
    """Step-3.5 and 3.7: a gate per head, window layers with a head count of their own, experts from the fourth layer on."""

    def __init__(self, keys: Any, family: Any) -> None:
        super().__init__(keys, family)
        self.kv_heads = keys.number("num_attention_groups", "num_key_value_heads", default=self.kv_heads)

    def attention_fields(self, i: int) -> dict[str, Any]:
        fields = super().attention_fields(i)
        if "sliding" in self.types[i]:
            other = self.k.get("attention_other_setting", default={})
            fields["num_heads"] = other.get("num_attention_heads") or self.k.get(
                "num_sliding_attention_heads", default=fields["num_heads"]
            )
        return fields

    def is_expert_layer(self, i: int) -> bool:
        listed = self.k.get("moe_layers_enum")
        if listed is not None:
            items = listed.split(",") if isinstance(listed, str) else listed
            return i in {int(item) for item in items if str(item).strip()}
        if self.k.listed("mlp_layer_types") or self.k.get("first_k_dense_replace") is not None:
            return super().is_expert_layer(i)
        return i >= 3

    def shared_width(self, width: int) -> int:
        return int(self.k.get("share_expert_dim", "share_expert_dims", default=super().shared_width(width)))


class NemotronNas(Decoder):
    """Blocks found by search: attention with its own groups or none, feed-forwards of any width or none (DeciLM)."""

    def __init__(self, keys: Any, family: Any) -> None:
        self.blocks = keys.listed("block_configs") or []
        super().__init__(keys, family)
        if len(self.blocks) != self.num_layers:
            keys.violate("block_configs", "...", f"has {len(self.blocks)} entries for {self.num_layers} layers")
            self.blocks = [{}] * self.num_layers

    def layer_types(self) -> list[str]:
        return ["full_attention" if self.part(i, "attention") == "own" else "attention_less" for i in range(self.num_layers)]

    def part(self, i: int, name: str) -> str:
        """Whether block `i` keeps this part, has a matrix in its place, or has none."""
        block = self.blocks[i].get(name, {}) if i < len(self.blocks) else {}
        if block.get("no_op"):
            return "none"
        return "linear" if block.get("replace_with_linear") else "own"

    def replaced(self) -> CustomSpec:
        return CustomSpec(label="linear", extra=(matrix("linear", self.hidden, self.hidden),))

    def mixer(self, i: int) -> tuple[BranchSpec, ...]:
        kept = self.part(i, "attention")
        if kept != "own":
            return (self.replaced(),) if kept == "linear" else ()
        fields = self.attention_fields(i)
        groups = self.blocks[i].get("attention", {}).get("n_heads_in_group") or 1
        window = self.blocks[i].get("attention", {}).get("window_length")
        return (AttentionSpec(**{**fields, "num_key_value_heads": self.heads // groups, "window": window}),)

    def feed_forward(self, i: int) -> tuple[BranchSpec, ...]:
        kept = self.part(i, "ffn")
        if kept != "own":
            return (self.replaced(),) if kept == "linear" else ()
        width = int(2 * (self.blocks[i].get("ffn", {}).get("ffn_mult") or 1) * self.hidden / 3)
        return (FeedForwardSpec(width=256 * (-(-width // 256)), bias=self.flag("mlp_bias"), activation=self.activation()),)


class MllamaText(Decoder):
    """Llama 3.2 Vision: some layers attend image tokens instead of text."""

    def layer_type(self, i: int) -> str:
        return "cross_attention" if i in (self.k.get("cross_attention_layers") or []) else "full_attention"

    def attention_fields(self, i: int) -> dict[str, Any]:
        fields = super().attention_fields(i)
        if self.types[i] != "cross_attention":
            return fields
        tokens = 4 * 1601  # tiles of 560 pixels in patches of 14, with a class token
        return {**fields, "cross": True, "causal": False, "qk_norm": "head", "position": "none", "keys": tokens}


class JetMoe(Decoder):
    """Experts in the query and output projections of attention as well."""

    def mixer(self, i: int) -> tuple[BranchSpec, ...]:
        e, per = self.k.number("num_local_experts"), self.k.number("num_experts_per_tok")
        d, kv = self.k.number("kv_channels"), self.k.number("num_key_value_heads")
        q = d * kv
        extra = (
            matrix("router", self.hidden, e),
            matrix("q_experts", self.hidden, q, copies=e, uses=float(per)),
            matrix("out_experts", q, self.hidden, copies=e, uses=float(per)),
            matrix("kv", self.hidden, 2 * q),
            vector("bias", self.hidden),
        )
        return (CustomSpec(label=f"attention with {e} experts", attention_columns=2 * q * per, extra=extra),)

    def experts(self, i: int) -> ExpertsSpec:
        return ExpertsSpec(**self.expert_fields(i), extra=(vector("bias", self.hidden),))


class BitNet(Decoder):
    """Norms before the output projections."""

    def mlp(self, i: int) -> FeedForwardSpec:
        mlp = super().mlp(i)
        return mlp.model_copy(update={"extra": (vector("sub_norm", mlp.width),)})


class HunyuanDense(Decoder):
    """Keys and values of its own in every layer, whatever the share factor of the family's largest model."""

    def __init__(self, keys: Any, family: Any) -> None:
        super().__init__(keys, family)
        if not keys.get("use_cla", default=False):
            keys.get("cla_share_factor")


class HunyuanMoe(HunyuanDense):
    """Every expert, the shared one too, as wide as `intermediate_size`; counts may be lists, one entry per layer."""

    def is_expert_layer(self, i: int) -> bool:
        return True

    def expert_fields(self, i: int) -> dict[str, Any]:
        number, per_token = self.k.get("num_experts", default=1), self.k.get("moe_topk", "num_experts_per_tok", default=1)
        width = self.k.number("intermediate_size")
        return {
            "num_experts": number[i] if isinstance(number, list) else number,
            "num_experts_per_tok": per_token[i] if isinstance(per_token, list) else per_token,
            "width": width, "shared_width": width, "activation": self.activation(),
        }  # fmt: skip


class ErnieVl(Decoder):
    """ERNIE 4.5 VL: experts for text and, narrower, for image tokens in every layer; a text token meets the first."""

    def expert_fields(self, i: int) -> dict[str, Any]:
        fields, widths = super().expert_fields(i), self.k.get("moe_intermediate_size")
        counts = self.k.get("moe_num_experts")
        number = counts[-1] if isinstance(counts, list) else counts
        vision = matrix("vision_experts", self.hidden, 3 * widths[-1], copies=number, uses=0.0)
        router = matrix("vision_router", self.hidden, number, uses=0.0)
        return {**fields, "extra": (vision, router, vector("vision_router_bias", number))}


class Doge(Decoder):
    """A dynamic mask by head and weights on both residuals; experts by product keys."""

    def attention_extra(self, i: int) -> Weights:
        bias = self.flag("attention_bias")
        mask = linear("dynamic_mask", self.kv_heads * self.head_dim, self.kv_heads, bias=bias)
        return (mask, vector("mask_scale", self.kv_heads))

    def has_experts(self) -> bool:
        return bool(self.k.get("is_moe", default=False))

    def feed_forward(self, i: int) -> tuple[BranchSpec, ...]:
        """A dense feed-forward, and in the mixture single neurons chosen by the best of two sets of keys."""
        mlp = self.mlp(i)
        if not self.has_experts():
            return (mlp,)
        number, chosen = self.k.number("num_experts"), self.k.number("num_experts_per_tok")
        router = matrix("router", self.hidden, 2 * int(number**0.5))
        pools = (WeightSpec(name=n, inputs=self.hidden, copies=number, uses=float(chosen)) for n in ("down", "up"))
        return (mlp.model_copy(update={"extra": (*mlp.extra, router, *pools)}),)
