"""The general reader of a decoder's config.json: sizes, the kind of every layer, attention and feed-forward of each.

A family (simpar/model/families.py) says what its file does not: which norms, biases and gates its class builds. A family with
mixers of its own derives from `Decoder` and overrides the method that builds them.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from simpar.model.config_keys import EXPERT_CLASSES, EXPERTS, PER_TOKEN, TIED, UNDERSTOOD, Keys
from simpar.model.family import Family, Layout, Weights
from simpar.model.pieces import deal, lookup, norm_extra, vector
from simpar.specs.architecture import MOST_LAYERS, ArchitectureSpec, LayerSpec, StackSpec, SublayerSpec
from simpar.specs.mixers import (
    AttentionSpec,
    BranchSpec,
    ExpertsSpec,
    FeedForwardSpec,
    IndexerSpec,
    LatentAttentionSpec,
    WeightSpec,
)

StepNorm = Literal["none", "pre", "post", "sandwich"]
MAMBA = ("mamba", "mamba2", "linear_attention", "hybrid", "hybrid_mamba")
RECURRENT = (*MAMBA, "conv", "recurrent", "mlstm")
"""Kinds of layer that a family may give another mixer than softmax attention."""


class Decoder:
    """Reads one decoder; `architecture()` is the result."""

    streams: ClassVar[str] = ""
    """Key of the residual streams that run side by side, of a family with more than one."""

    def __init__(self, keys: Keys, family: Family) -> None:
        self.k, self.f = keys, family
        self.hidden = keys.size("hidden_size", "n_embd", "d_model", "n_embed")
        self.num_layers = keys.size("num_hidden_layers", "n_layer", "num_layers")
        if self.num_layers > MOST_LAYERS:
            keys.violate("num_hidden_layers", self.num_layers, "is more than any model's", f"at most {MOST_LAYERS:,}")
            self.num_layers = 1
        self.heads = keys.number("num_attention_heads", "n_head", "num_heads", default=1)
        self.kv_heads = self._kv_heads()
        default = max(1, self.hidden // self.heads)
        self.head_dim = default if keys.config.get("head_dim") == 0 else keys.number("head_dim", "kv_channels", default=default)
        if family.square:
            keys.meet("head_dim", self.head_dim, self.hidden / self.heads, f"hidden_size / num_attention_heads ({self.heads})")
        changes = keys.get("per_layer_config", default={})
        self.changes: dict[int, dict[str, Any]] = {int(i): v for i, v in changes.items()}
        self.types = self.layer_types()
        keys.used.update(UNDERSTOOD)
        named = (s for s in (family.qkv_bias, family.o_bias, family.mlp_bias, family.qk_norm) if isinstance(s, str))
        keys.used.update(name for setting in named for name in setting.split("|"))
        if keys.get("sparse_config"):  # InfLLM v2 (MiniCPM 4): blocks are skipped beyond `dense_len` tokens
            keys.note("sparse_config: attention that skips blocks of a long text is read as full attention")
        if set(keys.config.get("attn_type_list") or [0]) == {1} and "attn_type_list" not in keys.used:
            keys.used.add("attn_type_list")  # softmax everywhere
        keys.used.update(name for name, value in family.constants().items() if keys.config.get(name) in value)

    def at(self, i: int, name: str, default: Any) -> Any:
        """`name` of layer `i` where the file lists it by layer, else `default`."""
        return self.changes.get(i, {}).get(name, default)

    def _kv_heads(self) -> int:
        names = ("num_key_value_heads", "num_kv_heads", "multi_query_group_num")
        if any(name in self.k.config for name in names) and not self.k.has(*names):
            return self.heads
        return self.k.number(*names, default=self.heads)

    def flag(self, setting: bool | str) -> bool:
        """A family's setting, or the keys that it names ("a|b": the first that the file has)."""
        return bool(self.k.get(*setting.split("|"), default=False)) if isinstance(setting, str) else setting

    # Which kind of mixer a layer has

    def layer_types(self) -> list[str]:
        """The attention's kind, layer by layer, in the words of transformers' `layer_types`."""
        given = self.k.listed("layer_types", "layers_block_type", "attention_types")
        if given and all(isinstance(kind, str) for kind in given):
            if len(given) < self.num_layers:
                rule = f"has {len(given)} entries for {self.num_layers} layers"
                self.k.violate("layer_types", "...", rule, "one entry per layer")
            self.k.get("sliding_window_pattern", "full_attention_interval", "global_attn_every_n_layers")
            return [*given, *["full_attention"] * self.num_layers][: self.num_layers]
        return [self.layer_type(i) for i in range(self.num_layers)]

    def layer_type(self, i: int) -> str:
        """The kind of layer `i` by the older keys."""
        if self.f.turns:
            return self.f.turns[i % len(self.f.turns)]
        marks = self.k.listed("hybrid_layer_pattern", "sliding_window_layout")
        if marks:
            return "sliding_attention" if marks[i] else "full_attention"
        interval = self.k.get("full_attention_interval")
        if interval:
            return "full_attention" if (i + 1) % interval == 0 else "linear_attention"
        window = self.window()
        every = self.k.get(
            "sliding_window_pattern", "_sliding_window_pattern", "global_attn_every_n_layers", default=self.f.full_every
        )
        if isinstance(every, str):
            return "sliding_attention" if every[i % len(every)] in "Ll" and window else "full_attention"
        if every and window:
            return "full_attention" if (i + 1) % every == 0 else "sliding_attention"
        if window is None:
            return "full_attention"
        # Qwen: layers from `max_window_layers` on have the window.
        first = int(self.k.get("max_window_layers", default=0)) if self.k.get("use_sliding_window") else 0
        return "sliding_attention" if i >= first else "full_attention"

    def window(self) -> int | None:
        """The sliding window's width in keys; None = no layer has one."""
        marked = ("sliding_window_size",) if self.k.has("sliding_window_layout") else ()
        width: int | None = self.k.get("sliding_window", "attention_window_size", *marked)
        switch = self.k.get("use_sliding_window")
        if switch is not None:
            return width if switch else None
        self.k.has("layer_types", "hybrid_layer_pattern", "sliding_window_pattern")  # which layers have it, `layer_types` reads
        return width

    # Which layers have experts

    def has_experts(self) -> bool:
        """Whether any layer has. Where the class's default is not several, one expert is a dense feed-forward."""
        number, most = self.k.get(*EXPERTS, default=0), self.f.dense_up_to
        if most is None:
            most = -1 if any((self.k.defaults.get(name) or 0) > 1 for name in EXPERTS) else 1
        return isinstance(number, list) or number > most

    def is_expert_layer(self, i: int) -> bool:
        """Whether layer `i` (from 0) routes its tokens to experts."""
        if not self.has_experts():
            return False
        kinds = self.k.listed("mlp_layer_types")
        if kinds:
            return bool(kinds[i] != "dense")
        listed = self.k.listed("moe_layers", "moe_layer_idx")
        if listed:
            return i in listed
        names = ("moe_layer_freq", "moe_layer_interval", "interleave_moe_layer_step", "decoder_sparse_step")
        freq = self.k.get(*names, "moe_layer_layout", "is_moe_layer", default=1)
        if isinstance(freq, list):
            return bool(freq[i])
        names = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index", "first_k_dense")
        first = self.k.get(*names, default=self.f.first_dense)
        last = self.k.get("moe_layer_end_index", default=-1)
        if i < first or (last not in (None, -1) and i > last) or i in (self.k.get("mlp_only_layers") or []):
            return False
        if self.k.get("expert_layer_period"):
            return bool(i % self.k.get("expert_layer_period") == self.k.get("expert_layer_offset", default=0))
        counts_from_one = self.k.get("interleave_moe_layer_step", "decoder_sparse_step", "moe_layer_interval") is not None
        return bool((i + 1 if counts_from_one else i) % (freq or 1) == 0)

    # What a layer holds

    def attention(self, i: int) -> BranchSpec:
        """Softmax attention of layer `i`."""
        if self.k.get("kv_lora_rank"):
            return LatentAttentionSpec(**self.latent_fields(i))
        return AttentionSpec(**self.attention_fields(i))

    def attention_fields(self, i: int) -> dict[str, Any]:
        """Fields of a plain attention; families with sizes by layer change them."""
        kind, bias = self.types[i], self.flag(self.f.qkv_bias)
        qk_norm = self.f.qk_norm
        if qk_norm not in ("none", "head", "full"):
            qk_norm = "head" if self.flag(qk_norm) else "none"
        fields: dict[str, Any] = {
            "num_heads": self.at(i, "num_attention_heads", self.heads),
            "num_key_value_heads": self.at(i, "num_key_value_heads", self.kv_heads),
            "head_dim": self.at(i, "head_dim", self.head_dim),
            "q_bias": bias, "k_bias": bias, "v_bias": bias, "o_bias": self.flag(self.f.o_bias),
            "qk_norm": qk_norm, "qk_norm_kind": self.f.qk_norm_kind, "gate": self.f.gate, "sinks": self.f.sinks,
            "packed": self.f.packed,
            "position": "absolute" if self.f.positions else self.f.position, "rope_factor": self.rope_factor(),
            "causal": self.flag(self.f.causal), "extra": self.attention_extra(i),
        }  # fmt: skip
        if "sliding" in kind:
            fields["window"] = self.window() or self.k.get("sliding_window")
        elif "chunked" in kind:
            fields["chunk"] = self.k.number("attention_chunk_size")
        return {**fields, **self.f.attention(self, i)}

    def attention_extra(self, i: int) -> Weights:
        """Weights that a plain attention has beside its projections and norms."""
        return self.f.attention_extra(self, i)

    def rope_factor(self) -> bool:
        """Whether YaRN's factor of sine and cosine is another than 1 (transformers modeling_rope_utils.py)."""
        scaling = self.k.get("rope_scaling", "rope_parameters")
        found = scaling if isinstance(scaling, dict) else {}
        own, all_dim = found.get("attention_factor"), found.get("mscale_all_dim")
        grown = found.get("factor", 1.0) > 1.0 and not (all_dim and all_dim == found.get("mscale"))
        return found.get("rope_type", found.get("type")) == "yarn" and bool(grown if own is None else own != 1.0)

    def latent_fields(self, i: int) -> dict[str, Any]:
        """Fields of a multi-head latent attention, with an indexer where the file has one."""
        return {
            "num_heads": self.at(i, "num_attention_heads", self.heads),
            "q_lora_rank": self.at(i, "q_lora_rank", self.k.get("q_lora_rank", default=0)),
            "kv_lora_rank": self.at(i, "kv_lora_rank", self.k.number("kv_lora_rank")),
            "qk_nope_head_dim": self.at(i, "qk_nope_head_dim", self.k.get("qk_nope_head_dim", default=0)),
            "qk_rope_head_dim": self.at(i, "qk_rope_head_dim", self.k.get("qk_rope_head_dim", default=0)),
            "v_head_dim": self.at(i, "v_head_dim", self.k.number("v_head_dim", default=self.hidden // self.heads)),
            "window": self.window() if "sliding" in self.types[i] else None,
            "a_bias": self.flag("attention_bias"),
            "gate": self.f.gate,
            "indexer": self.indexer(i),
        }

    def indexer(self, i: int) -> IndexerSpec | None:
        """The indexer of a sparse attention (DeepSeek-V3.2, GLM-5)."""
        if not self.k.get("index_topk") or "sliding" in self.types[i]:
            return None
        return IndexerSpec(
            num_heads=self.k.number("index_n_heads"),
            head_dim=self.k.number("index_head_dim"),
            top_k=self.k.number("index_topk"),
            owned=self.owns_index(i),
        )

    def owns_index(self, i: int) -> bool:
        kinds = self.k.listed("indexer_types")
        if kinds:
            return bool(kinds[i] == "full")
        every, offset = self.k.get("index_topk_freq", default=1), self.k.get("index_skip_topk_offset", default=0)
        return bool(i < offset or every == 1 or (i - offset) % every == every - 1)

    def activation(self) -> str:
        names = ("hidden_act", "hidden_activation", "activation_function", "mlp_hidden_act", "activation")
        name = self.k.get(*names, default=self.f.activation)
        if not isinstance(name, str):
            self.k.violate(names[0], name, "must be the name of a function", "expected a Hugging Face config.json")
        return str(name)

    def intermediate(self, i: int) -> int:
        """Width of layer `i`'s dense feed-forward."""
        if self.f.width:
            return self.f.width(self, i)
        width = self.k.get("dense_intermediate_size", "intermediate_size_mlp", "prefix_dense_intermediate_size")
        if width is None or not self.has_experts():
            width = self.k.get("intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim", "d_ff", "dff")
        if isinstance(width, list):
            return int(width[i])
        if width is None and self.k.get("hidden_ratio"):  # of flash-linear-attention: two thirds, up to a multiple of 256
            return 256 * (-(-int(self.hidden * self.k.get("hidden_ratio") * 2 / 3) // 256))
        if width is None:
            return 4 * self.hidden
        return int(width)

    def mlp(self, i: int) -> FeedForwardSpec:
        """The dense feed-forward of layer `i`."""
        bias = self.flag(self.f.mlp_bias)
        scalars = (vector("activation", self.f.mlp_scalars),) if self.f.mlp_scalars else ()
        width = self.at(i, "intermediate_size", self.intermediate(i))
        return FeedForwardSpec(width=width, gated=self.f.gated, bias=bias, activation=self.activation(), extra=scalars)

    def experts(self, i: int) -> ExpertsSpec:
        """The experts of layer `i`."""
        return ExpertsSpec(**self.expert_fields(i))

    def expert_width(self) -> int:
        width = self.k.get("moe_intermediate_size", "expert_ffn_hidden_size", "moe_ffn_hidden_size", "expert_intermediate_size")
        if isinstance(width, list):
            width = width[0]
        return int(width) if width else self.k.number("intermediate_size")

    def expert_fields(self, i: int) -> dict[str, Any]:
        """Fields of routed experts under any family's names."""
        width = self.expert_width()
        return {
            "num_experts": self.k.number(*EXPERTS),
            "num_experts_per_tok": self.k.number(*PER_TOKEN),
            "width": width,
            "gated": self.f.gated,
            "bias": self.f.expert_bias,
            "activation": self.activation(),
            "limit": self.k.get("swiglu_limit") if self.f.gated else None,
            "router_bias": self.flag(self.f.router_bias),
            "shared_width": self.shared_width(width),
            "shared_gate": self.f.shared_gate,
            "num_groups": self.k.get("n_group", "num_expert_group", "num_expert_groups", default=0) or 0,
            "top_groups": self.k.get("topk_group", default=0) or 0,
            "transformers_class": EXPERT_CLASSES.get(self.k.model_type, "modules"),
        }

    def shared_width(self, width: int) -> int:
        """Total width of the shared experts."""
        if self.f.shared:
            return self.f.shared(self, width)
        given = self.k.get("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size")
        if given:
            return int(given) * int(self.k.get("n_shared_experts", default=1) if self.k.has("shared_intermediate_size") else 1)
        number = self.k.get("n_shared_experts", "num_shared_experts", "num_shared_expert", "moe_num_shared_experts", default=0)
        if isinstance(number, list):
            number = number[0]
        return int(number or 0) * width

    def feed_forward(self, i: int) -> tuple[BranchSpec, ...]:
        """Feed-forward branches of layer `i`."""
        return (self.experts(i),) if self.is_expert_layer(i) else (self.mlp(i),)

    def mixer(self, i: int) -> tuple[BranchSpec, ...]:
        """Mixing branches of layer `i`."""
        return (self.recurrence(i) if self.types[i] in RECURRENT else self.attention(i),)

    def recurrence(self, i: int) -> BranchSpec:
        """What layer `i` has in place of softmax attention where its kind says so."""
        return self.attention(i)

    def layout(self, i: int) -> Layout:
        """How attention and feed-forward of layer `i` stand to the residual stream and its norms."""
        if isinstance(self.f.layout, str):
            return self.f.layout
        key, usual, with_it, without = self.f.layout
        return with_it if self.k.get(key, default=usual) else without

    def norms(self, i: int, layout: StepNorm) -> tuple[StepNorm, StepNorm]:
        """Norms of attention and of feed-forward of layer `i` where one follows the other."""
        return layout, layout

    def sublayers(self, i: int) -> tuple[SublayerSpec, ...]:
        """Residual steps of layer `i`."""
        mixer, feed, layout = self.mixer(i), self.feed_forward(i), self.layout(i)
        if layout == "parallel" or layout == "parallel_norms":
            return (SublayerSpec(branches=(*mixer, *feed), num_norms=1 if layout == "parallel" else 2),)
        steps = zip((mixer, feed), self.norms(i, layout), strict=True)
        return tuple(SublayerSpec(branches=branches, norm=norm) for branches, norm in steps if branches)

    def layer_extra(self, i: int) -> Weights:
        """Weights of layer `i` outside its residual steps."""
        return self.f.layer_extra(self, i)

    def layer(self, i: int) -> LayerSpec:
        """Layer `i`."""
        return LayerSpec(sublayers=self.sublayers(i), extra=self.layer_extra(i))

    # The whole

    def stack(self) -> StackSpec:
        """All layers, equal ones as one kind."""
        layers, pattern = deal([self.layer(i) for i in range(self.num_layers)], self.types)
        norms = {"norm": self.f.norm, "final_norm": self.final_norm()}
        streams = {"residual_streams": self.k.number(self.streams)} if self.streams else {}
        return StackSpec(hidden_size=self.hidden, layers=layers, pattern=pattern, extra=self.stack_extra(), **norms, **streams)

    def stack_extra(self) -> Weights:
        """Weights of the stack outside its layers."""
        return self.f.stack_extra(self)

    def final_norm(self) -> bool:
        """Whether a norm follows the last layer."""
        return self.f.final_norm

    def further(self) -> Weights:
        """Weights of the model outside its stack, beside positions and the norm of the embedding."""
        return self.f.further(self)

    def tied(self) -> bool:
        return bool(self.k.get(*TIED, default=self.f.tied)) and self.f.tied is not None

    def outside(self) -> dict[str, Any]:
        """Fields of the model beside its stacks."""
        extra: list[WeightSpec] = []
        rows = self.k.get("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", default=8192)
        if self.f.positions:
            rows = self.k.number(self.f.positions) + self.f.position_offset
            extra.append(lookup("position", rows, self.hidden))
        if self.f.embedding_norm:
            extra.append(norm_extra("embedding_norm", self.f.norm, self.hidden))
        return {
            "vocab_size": self.vocabulary(),
            "tie_word_embeddings": self.tied(),
            "head_bias": self.flag(self.f.head_bias),
            "max_position_embeddings": rows if isinstance(rows, int) and rows > 0 else 8192,
            "num_nextn_predict_layers": self.mtp_layers(),
            "dropout": self.k.dropout(),
            # Where experts have biases of their own, the router's is one more of them and balances nothing (GPT-OSS).
            "even_routing": self.k.balances_experts() or (self.flag(self.f.router_bias) and not self.f.expert_bias),
            "embedding_rows": self.f.rows(self),
            "extra": (*extra, *self.further()),
        }

    def vocabulary(self) -> int:
        return self.k.size("vocab_size")

    def mtp_layers(self) -> int:
        """Modules of multi-token prediction."""
        return int(self.k.get("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules", "mtp_num_layers", default=0))

    def architecture(self) -> ArchitectureSpec:
        """What the file describes."""
        return ArchitectureSpec(stacks=(self.stack(),), **self.outside())
