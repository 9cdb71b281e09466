"""Families of state-space, convolution and recurrent mixers, alone or beside attention."""

from __future__ import annotations

from typing import Any

from simpar.model.decoder import MAMBA, Decoder
from simpar.model.family import Layout
from simpar.model.pieces import matrix, vector
from simpar.specs.architecture import SublayerSpec
from simpar.specs.mixers import (
    AttentionSpec,
    BranchSpec,
    CustomSpec,
    FeedForwardSpec,
    Mamba1Spec,
    Mamba2Spec,
    RecurrentSpec,
    ShortConvSpec,
    WeightSpec,
)


class PureMamba(Decoder):
    """Mamba 1 and 2: one mixer per layer, no feed-forward."""

    def layer_types(self) -> list[str]:
        return ["mamba"] * self.num_layers

    def recurrence(self, i: int) -> BranchSpec:
        return mamba1(self, **({"inner_size": inner} if (inner := self.k.config.get("intermediate_size")) else {}))

    def feed_forward(self, i: int) -> tuple[BranchSpec, ...]:
        return ()


class PureMamba2(PureMamba):
    def recurrence(self, i: int) -> BranchSpec:
        norm = bool(self.k.get("rmsnorm", "rms_norm", default=True))
        return mamba2(self, heads=("num_heads",), head_dim=("head_dim",), out_norm=norm)


def mamba1(d: Decoder, **changes: Any) -> Mamba1Spec:
    """Mamba 1 under any family's names."""
    rank = d.k.get("mamba_dt_rank", "time_step_rank", "dt_rank", default="auto")
    fields: dict[str, Any] = {
        "inner_size": int(d.k.get("mamba_expand", "expand", default=2) * d.hidden),
        "state_size": d.k.number("mamba_d_state", "state_size", "d_state"),
        "time_step_rank": -(-d.hidden // 16) if rank == "auto" else rank,
        "conv_kernel": d.k.number("mamba_d_conv", "conv_kernel", "d_conv", default=4),
        "conv_bias": bool(d.k.get("mamba_conv_bias", "use_conv_bias", default=True)),
        "bias": bool(d.k.get("mamba_proj_bias", "use_bias", default=False)),
    }
    return Mamba1Spec(**{**fields, **changes})


def mamba2(d: Decoder, heads: tuple[str, ...] = (), head_dim: tuple[str, ...] = (), **changes: Any) -> Mamba2Spec:
    """Mamba 2 under any family's names."""
    inner = int(d.k.get("mamba_d_ssm", default=0) or d.k.get("mamba_expand", "expand", default=2) * d.hidden)
    number = d.k.number(*heads, "mamba_n_heads", "mamba_num_heads", "n_mamba_heads", default=1)
    width = d.k.get(*head_dim, "mamba_d_head", "mamba_head_dim", "mamba_headdim", default="auto")
    fields: dict[str, Any] = {
        "num_heads": number,
        "head_dim": inner // number if width == "auto" else width,
        "num_groups": d.k.number("mamba_n_groups", "mamba_ngroups", "n_groups", default=1),
        "state_size": d.k.number("mamba_d_state", "ssm_state_size", "state_size"),
        "conv_kernel": d.k.number("mamba_d_conv", "conv_kernel", default=4),
        "conv_bias": bool(d.k.get("mamba_conv_bias", "use_conv_bias", default=True)),
        "bias": bool(d.k.get("mamba_proj_bias", "use_bias", default=False)),
        "chunk": d.k.number("mamba_chunk_size", "chunk_size", default=256),
    }
    return Mamba2Spec(**{**fields, **changes})


class Jamba(Decoder):
    """Mamba 1 with an attention layer each attn_layer_period, experts each expert_layer_period."""

    def layer_type(self, i: int) -> str:
        period, offset = self.k.number("attn_layer_period"), self.k.get("attn_layer_offset", default=0)
        return "full_attention" if i % period == offset else "mamba"

    def recurrence(self, i: int) -> BranchSpec:
        return mamba1(self, inner_norms=True)


class Mamba2Hybrid(Decoder):
    """Layers of Mamba 2 or attention, each with its feed-forward (Bamba, Granite 4)."""

    def __init__(self, keys: Any, family: Any) -> None:
        super().__init__(keys, family)
        if not set(self.types) & set(MAMBA):  # Granite 4 without state spaces keeps their sizes in its file
            keys.used.update(name for name in keys.config if name.startswith("mamba_"))

    def layer_type(self, i: int) -> str:
        return "full_attention" if i in self.k.get("attn_layer_indices", default=[]) else "mamba"

    def recurrence(self, i: int) -> BranchSpec:
        return mamba2(self)


class GraniteHybrid(Mamba2Hybrid):
    """Granite 4: routed experts (where there are any) and a shared feed-forward in every layer."""

    def feed_forward(self, i: int) -> tuple[BranchSpec, ...]:
        if self.has_experts():
            return (self.experts(i),)
        return (FeedForwardSpec(width=self.k.number("shared_intermediate_size"), activation=self.activation()),)


class FalconH1(Decoder):
    """Attention and Mamba 2 side by side on one norm."""

    def layer_types(self) -> list[str]:
        self.k.listed("layer_types", "layers_block_type")
        return ["hybrid"] * self.num_layers

    def mixer(self, i: int) -> tuple[BranchSpec, ...]:
        norm = bool(self.k.get("mamba_rms_norm", default=False))
        return (self.attention(i), mamba2(self, out_norm=norm, bias=bool(self.k.get("mamba_proj_bias", default=False))))


NEMOTRON_LETTERS = {"M": "mamba", "*": "full_attention", "-": "mlp", "E": "moe"}


class NemotronH(Decoder):
    """One mixer or feed-forward per layer, by a string of letters."""

    def __init__(self, keys: Any, family: Any) -> None:
        pattern = keys.get("hybrid_override_pattern")
        pattern = "".join(pattern) if isinstance(pattern, list) else pattern
        given = keys.listed("layers_block_type", "layer_types")
        names = [NEMOTRON_LETTERS.get(letter, letter) for letter in pattern.replace("|", "").split("/")[0]] if pattern else given
        self.names = names or ["mamba", "moe", "full_attention", "mlp"]
        for name in self.names:
            if name not in (*MAMBA, "full_attention", "attention", "mlp", "moe"):
                keys.violate("hybrid_override_pattern", name, "unknown kind of layer", f"one of {', '.join(NEMOTRON_LETTERS)}")
        if "num_hidden_layers" not in keys.config or keys.config["num_hidden_layers"] is None:
            keys.config = {**keys.config, "num_hidden_layers": len(self.names)}
        super().__init__(keys, family)
        self.num_layers = len(self.names)

    def layer_types(self) -> list[str]:
        return self.names

    def sublayers(self, i: int) -> tuple[SublayerSpec, ...]:
        kind = self.types[i]
        branch: BranchSpec
        if kind == "moe":
            branch = self.experts(i)
        elif kind == "mlp":
            branch = self.mlp(i)
        else:
            (branch,) = self.mixer(i)
        return (SublayerSpec(branches=(branch,)),)

    def recurrence(self, i: int) -> BranchSpec:
        return mamba2(self, bias=bool(self.k.get("use_bias", "mamba_proj_bias", default=False)))

    def expert_fields(self, i: int) -> dict[str, Any]:
        fields = super().expert_fields(i)
        shared = self.k.get("moe_shared_expert_intermediate_size", default=0)  # built whatever n_shared_experts says
        biases = (vector("shared_biases", int(shared) + self.hidden),) if shared and self.flag("mlp_bias") else ()
        return {**fields, "input_size": self.k.get("moe_latent_size"), "shared_width": int(shared), "extra": biases}


class Zamba2(Decoder):
    """Mamba 2 everywhere; at hybrid layers a shared block of attention and feed-forward on two streams side by side."""

    def layer_types(self) -> list[str]:
        given = self.k.listed("layers_block_type", "layer_types")
        hybrid = self.k.get("hybrid_layer_ids", default=[])
        return list(given)[: self.num_layers] if given else ["hybrid" if i in hybrid else "mamba" for i in range(self.num_layers)]

    def sublayers(self, i: int) -> tuple[SublayerSpec, ...]:
        steps = [SublayerSpec(branches=(self.state_space(),))]
        if "hybrid" in self.types[i]:
            use = sum("hybrid" in kind for kind in self.types[:i])
            steps = [*self.shared_block(use), *steps]
        return tuple(steps)

    def state_space(self) -> BranchSpec:
        """The mixer of every layer."""
        inner, heads = int(self.k.get("mamba_expand", default=2) * self.hidden), self.k.number("n_mamba_heads", default=8)
        return mamba2(self).model_copy(update={"head_dim": inner // heads, "conv_bias": True})

    def place(self, wide: int, width: int, head_columns: int) -> tuple[WeightSpec, ...]:
        """What one use of a shared block has of its own: adapters on its weights and a projection into the stream."""
        rank = self.k.number("adapter_rank", default=128)
        adapters = [
            matrix("adapter_down", self.hidden, rank),
            matrix("adapter_up", rank, 2 * width),
            matrix("projection", self.hidden, self.hidden),
        ]
        if self.k.get("use_shared_attention_adapter", default=False):
            adapters += [matrix("qkv_adapter_down", wide, rank, copies=3)]
            adapters += [matrix("qkv_adapter_up", rank, head_columns, copies=3)]
        return tuple(adapters)

    def shared_block(self, use: int) -> list[SublayerSpec]:
        """Block `use` of the alternating shared ones, with the adapters and the projection of this place."""
        block = f"block_{use % self.k.number('num_mem_blocks', default=1)}"
        wide, width, heads = 2 * self.hidden, self.k.number("intermediate_size", default=4 * self.hidden), self.heads
        if not self.tied() and not use:  # transformers ties the blocks and the head together, or nothing
            self.k.unknown.append(("tie_word_embeddings", False, "gives every place a block of its own in its class"))
        self.k.meet("attention_hidden_size", self.k.get("attention_hidden_size", default=wide), wide, "2 x hidden_size")
        head_dim = self.k.number("attention_head_dim", default=wide // heads)
        attention = AttentionSpec(
            num_heads=heads, num_key_value_heads=self.kv_heads, head_dim=head_dim, kv_hidden_size=wide,
            extra=(matrix("second_stream", wide - self.hidden, heads * head_dim),),
        )  # fmt: skip
        norms = (vector("norms", wide + self.hidden),)
        mlp = FeedForwardSpec(width=width, activation=self.activation())
        return [
            SublayerSpec(branches=(attention,), norm="none", shared_weights=block, extra=norms),
            SublayerSpec(branches=(mlp,), norm="none", shared_weights=block),
            SublayerSpec(
                branches=(CustomSpec(label="adapters of a shared block", extra=self.place(wide, width, heads * head_dim)),),
                norm="none",
            ),
        ]


class Zamba(Zamba2):
    """Mamba 1 with one shared block, without adapters."""

    def layer_type(self, i: int) -> str:
        period, offset = self.k.number("attn_layer_period", default=6), self.k.get("attn_layer_offset", default=4)
        return "hybrid" if i == 2 or (i > 2 and (i - 3) % period == offset) else "mamba"

    def layer_types(self) -> list[str]:
        return Decoder.layer_types(self)

    def state_space(self) -> BranchSpec:
        return mamba1(self)

    def place(self, wide: int, width: int, head_columns: int) -> tuple[WeightSpec, ...]:
        return (matrix("projection", self.hidden, self.hidden),)


class Lfm(Decoder):
    """Gated short convolutions with attention at listed layers (LFM2, LFM3)."""

    def layer_type(self, i: int) -> str:
        if full := self.k.get("full_attn_idxs"):
            return "full_attention" if i in full else "conv"
        if self.k.model_type != "lfm3":
            return "full_attention"
        return "full_attention" if i % 4 == 2 else "sliding_attention" if i % 4 == 0 and i else "conv"

    def attention_fields(self, i: int) -> dict[str, Any]:
        return {**super().attention_fields(i), **({} if self.k.get("use_attention_gate", default=True) else {"gate": "none"})}

    def layout(self, i: int) -> Layout:
        return super().layout(i) if self.k.get("use_sandwich_norm", default=True) else "pre"

    def intermediate(self, i: int) -> int:
        """LFM2 adjusts the width as Llama does: two thirds, times a factor, rounded up."""
        width = self.k.number("intermediate_size", "block_ff_dim")
        if not self.k.get("block_auto_adjust_ff_dim", default=False):
            return width
        factor, multiple = self.k.get("block_ffn_dim_multiplier", default=1.0), self.k.number("block_multiple_of", default=256)
        width = int(factor * int(2 * width / 3))
        return multiple * (-(-width // multiple))

    def recurrence(self, i: int) -> BranchSpec:
        bias = bool(self.k.get("conv_bias", default=False))
        return ShortConvSpec(width=self.hidden, kernel=self.k.number("conv_L_cache", default=3), bias=bias)


class Phi4Flash(Decoder):
    """SambaY: Mamba 1 and differential window attention by turns; the upper half attends one layer's keys and values, and gates one
    Mamba's output."""

    def layer_type(self, i: int) -> str:
        half = self.num_layers // 2
        if i % self.k.number("mb_per_layer", default=2) == 0:
            return "mamba" if i <= half else "gated_memory"
        return "sliding_attention" if i < half else "full_attention"

    def mixer(self, i: int) -> tuple[BranchSpec, ...]:
        inner, h = int(self.k.get("mamba_expand", default=2) * self.hidden), self.hidden
        if self.types[i] == "gated_memory":
            pair = (matrix("in", h, inner), matrix("out", inner, h))
            return (CustomSpec(label="gated memory", extra=pair),)
        if self.types[i] == "mamba":
            return (mamba1(self),)
        shared = {"key_value": "shared"} if i > self.num_layers // 2 + 1 else {}
        return (AttentionSpec(**{**self.attention_fields(i), **shared, "position": "none"}),)


class RecurrentGemma(Decoder):
    """Two recurrent layers for each one of local attention."""

    def layer_types(self) -> list[str]:
        given = self.k.listed("layers_block_type", "layer_types")
        cycle = given or self.k.get("block_types", "_block_types", default=["recurrent", "recurrent", "attention"])
        return [cycle[i % len(cycle)] for i in range(self.num_layers)]

    def attention_fields(self, i: int) -> dict[str, Any]:
        return {**super().attention_fields(i), "window": self.k.number("attention_window_size"), "o_bias": True}

    def recurrence(self, i: int) -> BranchSpec:
        width = self.k.number("lru_width", default=self.hidden)
        return RecurrentSpec(width=width, num_heads=self.heads, conv_kernel=self.k.number("conv1d_width", default=4))
