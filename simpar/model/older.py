"""Families from before Llama: GPT-2 and its kin, with their own names of everything."""

from __future__ import annotations

from typing import Any

from simpar.model.decoder import Decoder
from simpar.model.family import Layout, Weights
from simpar.model.pieces import matrix
from simpar.specs.architecture import LayerSpec
from simpar.specs.mixers import BranchSpec, ExpertsSpec, FeedForwardSpec


class GptNeo(Decoder):
    """Global and local attention by turns; biases on the output projection alone."""

    def layer_types(self) -> list[str]:
        listed = self.k.listed("attention_layers")
        pairs = self.k.listed("attention_types") or []
        kinds = listed or [kind for names, count in pairs for _ in range(count) for kind in names]
        kinds = kinds or ["global", "local"] * self.num_layers
        return ["sliding_attention" if kind == "local" else "full_attention" for kind in kinds[: self.num_layers]]


class Falcon(Decoder):
    """One or two norms before attention and feed-forward side by side; one key head, or several in the newer layout."""

    def attention_fields(self, i: int) -> dict[str, Any]:
        fields = super().attention_fields(i)
        kv = self.k.get("num_kv_heads", default=self.heads)
        if not self.k.get("new_decoder_architecture", default=False):
            kv = 1 if self.k.get("multi_query", default=True) else self.heads
        alibi = {"position": "alibi"} if self.k.get("alibi", default=False) else {}
        return {**fields, "num_key_value_heads": kv, **alibi}

    def layout(self, i: int) -> Layout:
        if self.k.get("new_decoder_architecture", default=False):
            return "parallel" if self.k.get("num_ln_in_parallel_attn", default=2) == 1 else "parallel_norms"
        return "parallel" if self.k.get("parallel_attn", default=True) else "pre"


class Mpt(Decoder):
    """ALiBi, no biases, sizes partly in attn_config."""

    def __init__(self, keys: Any, family: Any) -> None:
        super().__init__(keys, family)
        inner = keys.child("attn_config", like="mpt_attention")
        if inner is not None:
            self.kv_heads = inner.get("kv_n_heads", default=self.heads)
            inner.used.update(inner.config)

    def intermediate(self, i: int) -> int:
        self.k.meet("expansion_ratio", self.k.get("expansion_ratio", default=4), 4, "the class's ratio")
        return 4 * self.hidden


class Dbrx(Decoder):
    """Sizes in attn_config and ffn_config; experts in every layer."""

    def __init__(self, keys: Any, family: Any) -> None:
        super().__init__(keys, family)
        inner, self.ffn = keys.child("attn_config"), keys.child("ffn_config")
        if inner is not None:
            self.kv_heads = inner.get("kv_n_heads", default=1)

    def is_expert_layer(self, i: int) -> bool:
        return True

    def experts(self, i: int) -> ExpertsSpec:
        keys = self.ffn or self.k
        return ExpertsSpec(
            num_experts=keys.number("moe_num_experts", default=4),
            num_experts_per_tok=keys.number("moe_top_k", default=1),
            width=keys.number("ffn_hidden_size", default=3584),
        )


class Opt(Decoder):
    """Positions from 2 on; the 350M model projects its narrower embedding and has no last norm."""

    def width(self) -> int:
        """Of the embedding."""
        return int(self.k.get("word_embed_proj_dim", default=self.hidden))

    def outside(self) -> dict[str, Any]:
        return {**super().outside(), "embedding_size": self.width() if self.width() != self.hidden else 0}

    def further(self) -> Weights:
        width = self.width()
        if width == self.hidden:
            return ()
        return (
            matrix("project_in", width, self.hidden, uses=1.0),
            matrix("project_out", self.hidden, width, uses=1.0),
        )

    def final_norm(self) -> bool:
        return self.layout(0) == "pre" and not self.k.get("_remove_final_layer_norm", default=False)


class ChatGlm(Decoder):
    """ChatGLM 2 to 4: few key heads where the file says so, a padded vocabulary."""

    def __init__(self, keys: Any, family: Any) -> None:
        super().__init__(keys, family)
        grouped = keys.get("multi_query_attention", default=False)
        self.kv_heads = keys.number("multi_query_group_num", default=1) if grouped else self.heads

    def vocabulary(self) -> int:
        return self.k.number("padded_vocab_size", "vocab_size")


class OpenElm(Decoder):
    """Heads and widths by layer (Mehta et al. 2024, arXiv 2404.14619)."""

    def __init__(self, keys: Any, family: Any) -> None:
        given = {"hidden_size": keys.config.get("model_dim"), "num_hidden_layers": keys.config.get("num_transformer_layers")}
        self.kv, self.q = keys.listed("num_kv_heads") or [1], keys.listed("num_query_heads") or [1]
        keys.config = {**keys.config, **given, "num_key_value_heads": self.kv[0], "num_attention_heads": self.q[0]}
        super().__init__(keys, family)

    def attention_fields(self, i: int) -> dict[str, Any]:
        return {**super().attention_fields(i), "num_heads": self.q[i], "num_key_value_heads": self.kv[i]}

    def intermediate(self, i: int) -> int:
        """A multiple of the width, rounded to the nearest multiple of the divisor and never down by a tenth."""
        factors, divisor = self.k.get("ffn_multipliers"), self.k.number("ffn_dim_divisor", default=256)
        wide = self.hidden * (factors[i] if isinstance(factors, list) else factors)
        near = max(divisor, int(wide + divisor / 2) // divisor * divisor)
        return int(near + divisor if near < 0.9 * wide else near)

    def tied(self) -> bool:
        return bool(self.k.get("share_input_output_layers", default=True))


class Arctic(Decoder):
    """Dense feed-forwards beside the experts (Snowflake Arctic): attention and dense in one residual step each, experts from
    the layer's input."""

    def is_expert_layer(self, i: int) -> bool:
        return bool((i + 1) % self.k.number("moe_layer_frequency", default=1) == 0)

    def feed_forward(self, i: int) -> tuple[BranchSpec, ...]:
        feed = super().feed_forward(i)
        if not self.is_expert_layer(i) or not self.k.get("use_residual", "parallel_attn_mlp_res", default=False):
            return feed
        return (FeedForwardSpec(width=self.hidden, activation=self.activation()), *feed)

    def layer(self, i: int) -> LayerSpec:
        attention, feed = super().layer(i).sublayers
        return LayerSpec(sublayers=(attention, feed.model_copy(update={"num_norms": len(feed.branches)})))


class Grok(Decoder):
    """Norms before and after; Grok 2 has a dense feed-forward beside the experts, on the same norms."""

    def activation(self) -> str:
        return "gelu"

    def feed_forward(self, i: int) -> tuple[BranchSpec, ...]:
        dense = (self.mlp(i),) if self.k.get("residual_moe", default=False) else ()
        return (*dense, self.experts(i))
