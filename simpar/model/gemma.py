"""Gemma 3n and 4: streams mixed by AltUp, per-layer embeddings, keys shared by layers, experts beside the dense feed-forward."""

from __future__ import annotations

from typing import Any

from simpar.model.decoder import Decoder
from simpar.model.family import Weights
from simpar.model.pieces import lookup, matrix, vector
from simpar.specs.mixers import BranchSpec, ExpertsSpec


class Gemma3n(Decoder):
    """Four streams mixed by AltUp, low-rank LAuReL branches, per-layer embeddings, keys shared by the last layers."""

    streams = "altup_num_inputs"

    def intermediate(self, i: int) -> int:
        width = self.k.get("intermediate_size", default=16384)
        return int(width[i] if isinstance(width, list) else width)

    def attention_fields(self, i: int) -> dict[str, Any]:
        fields = super().attention_fields(i)
        return {**fields, "key_value": "shared"} if i >= self.num_layers - shared_keys(self) else fields

    def layer_extra(self, i: int) -> Weights:
        h, rank, n = self.hidden, self.k.number("laurel_rank"), self.k.number("altup_num_inputs")
        altup = (
            vector("altup_scale_and_norm", 2 * h),
            matrix("altup_correction", n, n),
            matrix("altup_prediction", n, n * n),
            matrix("altup_router", h, n),
        )
        laurel = (
            matrix("laurel_left", h, rank),
            matrix("laurel_right", rank, h),
            vector("laurel_norm", h),
        )
        return (*altup, *laurel, *per_layer_inputs(self))

    def stack_extra(self) -> Weights:
        h, n = self.hidden, self.k.number("altup_num_inputs")
        return (
            *per_layer_embeddings(self),
            matrix("altup_projections", h, h, copies=n - 1),
            matrix("altup_unembed_projections", h, h, copies=n - 1),
        )


def shared_keys(d: Decoder) -> int:
    """Last layers that use the keys and values of earlier ones."""
    number = int(d.k.get("num_kv_shared_layers", default=0) or 0)
    if number > d.num_layers:
        d.k.violate("num_kv_shared_layers", number, "is more than the layers", f"at most {d.num_layers}")
    return number


def per_layer_inputs(d: Decoder) -> Weights:
    """Gemma 3n and 4: what a layer does with its row of that table."""
    width = d.k.get("hidden_size_per_layer_input", default=0)
    if not width:
        return ()
    return (
        matrix("per_layer_gate", d.hidden, width),
        matrix("per_layer_projection", width, d.hidden),
        vector("per_layer_norm", d.hidden),
    )


def per_layer_embeddings(d: Decoder) -> Weights:
    """Gemma 3n and 4: a second table with a row for every layer, and its projection from the hidden state."""
    width = d.k.get("hidden_size_per_layer_input", default=0)
    if not width:
        return ()
    rows = d.k.number("vocab_size_per_layer_input", default=d.k.number("vocab_size"))
    return (
        lookup("per_layer_embedding", rows, d.num_layers * width),
        matrix("per_layer_model_projection", d.hidden, d.num_layers * width),
        vector("per_layer_projection_norm", width),
    )


class Gemma4(Decoder):
    """Global layers with wider heads whose values are the keys; experts beside the dense feed-forward; per-layer inputs."""

    def layer_type(self, i: int) -> str:
        return "full_attention" if (i + 1) % 6 == 0 or i == self.num_layers - 1 else "sliding_attention"

    def shares_keys(self, i: int) -> bool:
        return i >= self.num_layers - shared_keys(self)

    def attention_fields(self, i: int) -> dict[str, Any]:
        fields = super().attention_fields(i)
        heads, kv = self.k.get("global_head_dim"), self.k.get("num_global_key_value_heads")
        twice = bool(self.k.get("attention_k_eq_v", default=False))
        if "full" in self.types[i]:
            if i not in self.changes:
                fields["head_dim"] = heads or (
                    512 if self.k.model_type.startswith("gemma4") and not self.changes else self.head_dim
                )
            if twice:
                fields["num_key_value_heads"] = kv or fields["num_key_value_heads"]
                fields["key_value"] = "key_only"
        if self.shares_keys(i):
            fields["key_value"] = "shared"
        return fields

    def intermediate(self, i: int) -> int:
        wide = bool(self.k.get("use_double_wide_mlp", default=False)) and self.shares_keys(i)
        return self.k.number("intermediate_size") * (2 if wide else 1)

    def feed_forward(self, i: int) -> tuple[BranchSpec, ...]:
        if not self.k.get("enable_moe_block", default=False):
            return (self.mlp(i),)
        fields = self.expert_fields(i)
        extra = (vector("router_scales", self.hidden + fields["num_experts"]), vector("norms", 3 * self.hidden))
        return (self.mlp(i), ExpertsSpec(**fields, extra=extra))
