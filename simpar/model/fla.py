"""Families of flash-linear-attention: recurrences by heads, each with what its layer holds beside queries, keys and values.

Shapes are those of fla 0.6; its classes write few keys, so the defaults stand here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

from simpar.model.config_keys import Keys
from simpar.model.decoder import Decoder
from simpar.model.family import Family
from simpar.model.hybrids import PureMamba
from simpar.model.pieces import depthwise, linear, matrix, vector
from simpar.specs.mixers import (
    AttentionSpec,
    BranchSpec,
    CustomSpec,
    DeltaSpec,
    FeedForwardSpec,
    LatentAttentionSpec,
    LinearAttentionSpec,
    WeightSpec,
)

CHUNK = 64


class Fla(Decoder):
    """A recurrence in every layer but those that `attn` lists, which have softmax attention."""

    hidden_ratio = 4.0

    def __init__(self, keys: Keys, family: Family) -> None:
        keys.get("gate_fn", "gate_logit_normalizer", "use_output_norm", "use_output_gate")
        self.attn = keys.child("attn", like="fla_attention")
        super().__init__(keys, family)

    def layer_types(self) -> list[str]:
        if self.attn is None:
            return ["linear_attention"] * self.num_layers
        listed = self.attn.get("layers", default=[])
        kind = "sliding_attention" if self.attn.get("window_size") else "full_attention"
        return [kind if i in listed else "linear_attention" for i in range(self.num_layers)]

    def recurrence(self, i: int) -> BranchSpec:
        return MIXERS[self.k.model_type](self)

    def attention(self, i: int) -> BranchSpec:
        return softmax_attention(self.attn or self.k, self.hidden)

    def intermediate(self, i: int) -> int:
        self.k.config = {"hidden_ratio": self.hidden_ratio, **self.k.config}
        return super().intermediate(i)

    def vocabulary(self) -> int:
        return self.k.number("vocab_size", default=32000)

    def affine(self, values: int) -> int:
        """Weights of a norm on the output; fla can switch them off."""
        return values if self.k.get("elementwise_affine", default=True) else 0

    def short_conv(self, default: bool) -> dict[str, Any]:
        """The short convolutions over queries, keys and values."""
        taps, bias = self.k.number("conv_size", default=4), bool(self.k.get("conv_bias", default=False))
        used = bool(self.k.get("use_short_conv", default=default))
        return {"conv_kernel": taps if used else 0, "conv_bias": bias}

    def expanded(self, k: float, v: float) -> tuple[int, int]:
        """Widths of all keys and of all values."""
        return round(self.hidden * self.k.get("expand_k", default=k)), round(self.hidden * self.k.get("expand_v", default=v))


class RetNet(Fla):
    hidden_ratio = 2.0


class Samba(PureMamba):
    """Mamba and windowed attention by turns, each with a feed-forward."""

    def __init__(self, keys: Keys, family: Family) -> None:
        self.attn = keys.child("attn", like="fla_attention")
        super().__init__(keys, family)

    layer_types = Fla.layer_types
    attention = Fla.attention

    def feed_forward(self, i: int) -> tuple[BranchSpec, ...]:
        wide = int(self.hidden * self.k.get("hidden_ratio", default=4) * 2 / 3)  # intermediate_size is Mamba's
        return (FeedForwardSpec(width=256 * (-(-wide // 256))),)


class RwkvFla(Fla):
    """RWKV 6 and 7: LayerNorms with one more before the first layer, token shift in both halves."""

    def channel_width(self, ratio: float) -> int:
        wide = int(self.hidden * self.k.get("hidden_ratio", default=ratio))
        width: int | None = self.k.get("intermediate_size")
        return width or 32 * (-(-wide // 32))


class Rwkv6(RwkvFla):
    """Data-dependent decay (Peng et al. 2024, arXiv 2404.05892)."""

    def feed_forward(self, i: int) -> tuple[BranchSpec, ...]:
        h = self.hidden
        extra = (vector("token_shift", 2 * h), matrix("receptance", h, h))
        return (FeedForwardSpec(width=self.channel_width(3.5), gated=False, activation="relu2", extra=extra),)


class Rwkv7(RwkvFla):
    """A generalised delta rule with vector gates from low ranks (Peng et al. 2025, arXiv 2503.14456)."""

    def recurrence(self, i: int) -> BranchSpec:
        k, h = self.k, self.hidden
        dim = k.get("head_dim") or h // k.number("num_heads")
        values = k.get("value_dim", default=h)
        values = values[i] if isinstance(values, list) else values
        ranks = [k.get(f"{n}_low_rank_dim") or self.low_rank(n, dim) for n in ("decay", "a", "v", "gate")]
        decay, a, v, gate = ranks
        low = [*_low("decay", h, decay, h), *_low("a", h, a, h), *(_low("v", h, v, values) if i else ())]
        low += _low("gate", h, gate, values, bias=False)
        own = vector("token_shift_and_keys", 6 * h + 3 * h + values)  # six shifts, k_k, k_a, r_k, the norm's biases
        return LinearAttentionSpec(
            num_heads=h // dim, key_head_dim=dim, value_head_dim=values * dim // h, gate=False, norm_size=values,
            scan="dplr", chunk=16, extra=(*low, own),
        )  # fmt: skip

    def low_rank(self, name: str, head_dim: int) -> int:
        """Ranks that grow with the square root of the width where the file leaves them open."""
        factor = {"decay": 2.5, "a": 2.5, "v": 1.7, "gate": 5.0}[name] * (1.0 if name == "gate" else head_dim / 64)
        return max(32, 32 * int(0.5 + factor * math.sqrt(self.hidden) / 32))

    def feed_forward(self, i: int) -> tuple[BranchSpec, ...]:
        shift = (vector("token_shift", self.hidden),)
        return (FeedForwardSpec(width=self.channel_width(4), gated=False, activation="relu2", extra=shift),)


class FlaLatent(Fla):
    """Latent attention without a key norm of its own."""

    def layer_types(self) -> list[str]:
        return ["full_attention"] * self.num_layers

    def attention(self, i: int) -> BranchSpec:
        return LatentAttentionSpec(**self.latent_fields(i))


class FlaTransformer(Fla):
    """flash-linear-attention's own transformer, and its forgetting one (a decay per head on the scores)."""

    def layer_types(self) -> list[str]:
        return ["sliding_attention" if self.k.get("window_size") else "full_attention"] * self.num_layers

    def attention(self, i: int) -> BranchSpec:
        extra: tuple[WeightSpec, ...] = ()
        if self.k.model_type == "forgetting_transformer":
            extra = (linear("forget", self.hidden, self.heads),)
            if self.k.get("use_output_gate", default=False):
                extra += (matrix("gate", self.hidden, self.hidden),)
        norm: Any = "head" if self.k.get("qk_norm", default=False) else "none"
        return softmax_attention(self.k, self.hidden, heads=self.heads, qk_norm=norm, extra=extra)


def softmax_attention(k: Keys, hidden: int, heads: int = 0, **fields: Any) -> AttentionSpec:
    """fla's Attention by its own keys."""
    heads, bias = heads or k.number("num_heads"), bool(k.get("qkv_bias", default=False))
    return AttentionSpec(
        num_heads=heads, num_key_value_heads=k.get("num_kv_heads", default=heads), head_dim=hidden // heads,
        q_bias=bias, k_bias=bias, v_bias=bias, window=k.get("window_size"), **fields,
    )  # fmt: skip


def _low(name: str, inputs: int, rank: int, outputs: int, bias: bool = True) -> tuple[WeightSpec, ...]:
    """Two products by a narrow middle; the second may have a bias."""
    return (matrix(f"{name}_down", inputs, rank), linear(f"{name}_up", rank, outputs, bias=bias))


def _retention(d: Fla, k: float = 1.0, v: float = 2.0) -> LinearAttentionSpec:
    """Retention (Sun et al. 2023, arXiv 2307.08621): a fixed decay per head."""
    heads, (keys, values) = d.heads, d.expanded(k, v)
    return LinearAttentionSpec(
        num_heads=heads, num_key_value_heads=d.k.get("num_kv_heads"), key_head_dim=keys // heads, value_head_dim=values // heads,
        gate=bool(d.k.get("use_output_gate", default=True)), norm_size=d.affine(values // heads), chunk=CHUNK,
        **d.short_conv(default=False),
    )  # fmt: skip


def _gla(d: Fla) -> LinearAttentionSpec:
    """Gated linear attention (Yang et al. 2023, arXiv 2312.06635): a decay per channel from a low rank."""
    base = _retention(d, 0.5, 1.0)
    keys = base.key_head_dim * (base.num_key_value_heads or base.num_heads)
    return base.model_copy(update={"extra": _low("decay", d.hidden, d.k.get("gate_low_rank_dim", default=16), keys)})


def _linear(d: Fla) -> LinearAttentionSpec:
    """Linear attention with a learned feature map."""
    base = _retention(d, 1.0, 1.0)
    name, dim = d.k.get("feature_map", default="elementwise_product"), base.key_head_dim
    sides = 1 if d.k.get("tie_feature_map_qk", default=False) else 2
    layers = {"elementwise_product": 2, "t2r": 1, "hedgehog": 1}.get(name, 0)
    maps = tuple(linear(f"feature_map_{n}", dim, dim, copies=sides, uses=float(2 * base.num_heads)) for n in range(layers))
    return base.model_copy(update={"gate": False, "extra": maps})


def _hgrn2(d: Fla) -> LinearAttentionSpec:
    """Qin et al. 2024, arXiv 2404.07904: forget gates as keys, heads of `expand_ratio`."""
    dim = d.k.get("expand_ratio") or d.hidden // d.k.number("num_heads")
    return LinearAttentionSpec(
        num_heads=d.hidden // dim, key_head_dim=dim, value_head_dim=dim, gate=False, norm_size=d.affine(d.hidden), chunk=CHUNK,
        **d.short_conv(default=False),
    )  # fmt: skip


def _lightnet(d: Fla) -> LinearAttentionSpec:
    """HGRN2 with a gate from a low rank."""
    rank = d.k.get("gate_low_rank_dim", default=128)
    return _hgrn2(d).model_copy(update={"extra": _low("gate", d.hidden, rank, d.hidden, bias=False)})


def _hgrn(d: Fla) -> CustomSpec:
    """Qin et al. 2023, arXiv 2311.04823: an elementwise recurrence between input, forget and output gates."""
    inner = int(d.hidden * d.k.get("expand_ratio", default=1))
    d.short_conv(default=False)
    extra = (matrix("input_forget_gate", d.hidden, 3 * inner), matrix("out", inner, d.hidden), vector("norm", d.affine(inner) or 1))
    return CustomSpec(label="gated recurrence (HGRN)", kernel_flops=3.0 * inner, extra=extra)


def _slots(d: Fla) -> CustomSpec:
    """Gated slot attention (Zhang et al. 2024, arXiv 2409.07146) and ABC: two linear recurrences over a few slots."""
    gated = d.k.model_type == "abc"
    keys, values = d.expanded(0.5 if gated else 1.0, 1.0)
    heads, slots = d.heads, d.k.number("num_slots", default=64)
    d.short_conv(default=False)
    k, v = keys // heads, values // heads
    scan = heads * (2.0 * CHUNK * (k + slots) + 4.0 * k * slots + 2.0 * CHUNK * (slots + v) + 4.0 * slots * v)
    extra = [matrix("qk", d.hidden, 2 * keys), matrix("v", d.hidden, values), matrix("slots", d.hidden, heads * slots)]
    extra += [matrix("gate", d.hidden, values)] if gated else []
    norm = vector("norm", d.affine(v if gated else values) or 1)
    return CustomSpec(label="slot attention", kernel_flops=scan, extra=(*extra, norm, matrix("out", values, d.hidden)))


def _rwkv6(d: Fla) -> LinearAttentionSpec:
    heads, (keys, values), h = d.heads, d.expanded(0.5, 1.0), d.hidden
    rank = 5 * d.k.number("proj_low_rank_dim", default=32)
    decay = _low("decay", h, d.k.number("gate_low_rank_dim", default=64), keys)
    own = vector("shift_bonus_norm", 6 * h + keys + values)  # one shift, five biases, the bonus, the norm's biases
    return LinearAttentionSpec(
        num_heads=heads, key_head_dim=keys // heads, value_head_dim=values // heads, norm_size=values, chunk=CHUNK,
        extra=(matrix("shift_down", h, rank), matrix("shift_up", rank, h), *decay, own),
    )  # fmt: skip


def _delta(d: Fla, **changes: Any) -> DeltaSpec:
    """The gated delta rule (Yang et al. 2024, arXiv 2412.06464) and its kin."""
    heads, dim = d.heads, d.k.number("head_dim", default=256)
    fields: dict[str, Any] = {
        "num_key_heads": heads, "num_value_heads": d.k.number("num_v_heads", default=heads), "key_head_dim": dim,
        "value_head_dim": int(dim * d.k.get("expand_v", default=2)), "gate": bool(d.k.get("use_gate", default=True)),
        **d.short_conv(default=True),
    }  # fmt: skip
    return DeltaSpec(**{**fields, **changes})


def _delta_net(d: Fla) -> DeltaSpec:
    """Yang et al. 2024, arXiv 2406.06484: no decay, widths by expand_k and expand_v."""
    (keys, values), heads = d.expanded(1.0, 1.0), d.heads
    gate = bool(d.k.get("use_gate", default=False))
    return _delta(d, key_head_dim=keys // heads, value_head_dim=values // heads, decay="none", gate=gate)


def _product(d: Fla) -> DeltaSpec:
    """DeltaProduct (Siems et al. 2025, arXiv 2502.10297): several Householder steps per token."""
    steps = d.k.number("num_householder", default=1)
    base = _delta(d, decay="head" if d.k.get("use_forget_gate", default=True) else "none")
    if steps == 1:
        return base
    keys, values = base.num_value_heads * base.key_head_dim, base.num_value_heads * base.value_head_dim
    conv = depthwise("more_conv", max(1, base.conv_kernel), (steps - 1) * (keys + values))
    more = matrix("more_steps", d.hidden, (steps - 1) * (keys + values + base.num_value_heads))
    return base.model_copy(update={"extra": (more, conv) if base.conv_kernel else (more,)})


def _comba(d: Fla) -> DeltaSpec:
    """Hu et al. 2025, arXiv 2506.02475: a feedback decay and a direct path per head."""
    extra = vector("feedback", d.heads * (2 if d.k.get("use_inner_decay", default=True) else 1))
    return _delta(d).model_copy(update={"extra": (extra,)})


def _kda(d: Fla) -> DeltaSpec:
    """Kimi Delta Attention (arXiv 2510.26692): decays per channel and gates through a head's width."""
    base = _delta(d, value_head_dim=1, gate=True)
    values = int(base.key_head_dim * d.k.get("expand_v", default=1))
    bias = vector("gate_bias", base.num_value_heads * values)
    changes = {"value_head_dim": values, "decay": "channel", "decay_rank": values, "gate_rank": values, "extra": (bias,)}
    return base.model_copy(update=changes)


MIXERS: Final[dict[str, Callable[[Fla], BranchSpec]]] = {
    "retnet": _retention, "gla": _gla, "linear_attn": _linear, "hgrn2": _hgrn2, "lightnet": _lightnet, "hgrn": _hgrn,
    "gsa": _slots, "abc": _slots, "rwkv6": _rwkv6, "delta_net": _delta_net, "gated_deltanet": _delta,
    "gated_deltaproduct": _product, "comba": _comba, "kda": _kda,
}  # fmt: skip
"""Model type -> its recurrence."""
