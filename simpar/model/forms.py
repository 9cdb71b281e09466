"""The two forms of a transformer: `TransformerSpec` (all layers alike) and the general `ArchitectureSpec`."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from simpar.model.pieces import deal, norm_extra
from simpar.specs.architecture import ArchitectureSpec, LayerSpec, StackSpec, SublayerSpec, TokenModel
from simpar.specs.mixers import AttentionSpec, BranchSpec, ExpertsSpec, FeedForwardSpec, LatentAttentionSpec, WeightSpec
from simpar.specs.model import MoeSpec, TransformerSpec

ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "relu": "relu", "relu2": "squared_relu", "gelu": "gelu", "gelu_new": "gelu_new",
    "gelu_fast": "gelu_fast", "quick_gelu": "quick_gelu",
    "gelu_pytorch_tanh": "gelu", "gelu_python": "gelu", "squared_relu": "squared_relu",
}  # fmt: skip
"""Hugging Face's names of activations and TransformerSpec's."""


def general(model: TokenModel) -> ArchitectureSpec:
    """`model` in the general form."""
    return model if isinstance(model, ArchitectureSpec) else _general(model)


@lru_cache(maxsize=256)
def _general(model: TransformerSpec) -> ArchitectureSpec:
    """An encoder stack before the decoder's where it has one."""
    stacked = model.num_decoder_layers > 0
    stacks = [_stack(model, decoder=False, count=model.num_hidden_layers, name="encoder" if stacked else "decoder")]
    if stacked:
        stacks.append(_stack(model, decoder=True, count=model.num_decoder_layers, name="decoder"))
    extra: list[WeightSpec] = []
    if model.position == "learned":
        extra.append(WeightSpec(name="position", kind="lookup", inputs=model.max_position_embeddings, outputs=model.hidden_size))
    if model.embedding_norm:
        extra.append(norm_extra("embedding_norm", model.norm, model.hidden_size))
    return ArchitectureSpec(
        name=model.name, vocab_size=model.vocab_size, tie_word_embeddings=model.tie_word_embeddings, head_bias=model.head_bias,
        max_position_embeddings=model.max_position_embeddings, stacks=tuple(stacks), extra=tuple(extra),
        num_nextn_predict_layers=model.num_nextn_predict_layers, source=model.source, dropout=model.dropout,
        even_routing=model.even_routing or (model.moe is not None and model.moe.router_bias),
    )  # fmt: skip


def short(model: ArchitectureSpec) -> TransformerSpec | None:
    """`model` as a TransformerSpec, or None where that cannot say all of it."""
    if len(model.stacks) != 1 or not model.vocab_size or not model.head:
        return None
    stack = model.stacks[0]
    fields = _fields(model, stack)
    if fields is None:
        return None
    found = TransformerSpec(**fields)
    same = general(found).model_copy(update={"name": model.name, "source": model.source, "notes": model.notes})
    return found if _plain(same) == _plain(model) else None


def _plain(model: ArchitectureSpec) -> dict[str, Any]:
    """What the two forms must agree in: everything but names of layers, positions and published counts."""
    table = model.model_dump(exclude={"published_parameters", "published_as", "notes", "source", "name"})
    for stack in table["stacks"]:
        names = {name: f"layer {i}" for i, name in enumerate(stack["layers"])}
        stack["layers"] = {names[name]: layer for name, layer in stack["layers"].items()}
        stack["pattern"] = tuple("*".join([names[e.split("*")[0]], *e.split("*")[1:]]) for e in stack["pattern"])
        for layer in stack["layers"].values():
            for step in layer["sublayers"]:
                for branch in step["branches"]:
                    branch.pop("position", None)
                    branch["activation"] = ACTIVATIONS.get(branch.get("activation", ""), branch.get("activation"))
    return table


def _fields(model: ArchitectureSpec, stack: StackSpec) -> dict[str, Any] | None:
    """Fields of the TransformerSpec that `model` may be."""
    order = stack.sequence()
    branches = [b for name in order for step in stack.layers[name].sublayers for b in step.branches]
    attention = next((b for b in branches if isinstance(b, (AttentionSpec, LatentAttentionSpec))), None)
    dense = next((b for b in branches if isinstance(b, FeedForwardSpec)), None)
    experts = next((b for b in branches if isinstance(b, ExpertsSpec)), None)
    feed = dense or experts
    if attention is None or feed is None or stack.norm not in ("rmsnorm", "layernorm"):
        return None
    if feed.activation not in ACTIVATIONS:
        return None
    step = stack.layers[order[0]].sublayers[0]
    sandwich = step.norm == "sandwich"
    parallel = len(step.branches) > 1
    extra = {weight.name for weight in model.extra}
    fields: dict[str, Any] = {
        "name": model.name, "source": model.source, "dropout": model.dropout, "even_routing": model.even_routing,
        "hidden_size": stack.hidden_size, "num_hidden_layers": len(order),
        "intermediate_size": dense.width if dense else feed.width, "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_position_embeddings, "tie_word_embeddings": model.tie_word_embeddings,
        "gated_mlp": feed.gated, "activation": ACTIVATIONS[feed.activation], "mlp_bias": feed.bias, "norm": stack.norm,
        "final_norm": stack.final_norm, "head_bias": model.head_bias, "embedding_norm": "embedding_norm" in extra,
        "position": "learned" if "position" in extra else getattr(attention, "position", "rope"),
        "block_norms": 4 if sandwich else (step.num_norms or 1) if parallel else 2, "parallel_block": parallel,
        "num_nextn_predict_layers": model.num_nextn_predict_layers, "num_attention_heads": attention.num_heads,
    }  # fmt: skip
    if isinstance(attention, LatentAttentionSpec):
        names = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        if not attention.qk_nope_head_dim or not attention.qk_rope_head_dim:
            return None
        fields |= {
            "num_key_value_heads": attention.num_heads, "head_dim": attention.qk_nope_head_dim + attention.qk_rope_head_dim,
            "mla": {name: getattr(attention, name) for name in names},
        }  # fmt: skip
    else:
        fields |= {
            "num_key_value_heads": attention.num_key_value_heads, "head_dim": attention.head_dim,
            "qk_norm": attention.qk_norm == "head", "packed_attention": attention.packed,
            "attention_bias": attention.q_bias, "attention_out_bias": attention.o_bias, "sliding_window": attention.window,
        }  # fmt: skip
    if experts:
        fields["moe"] = _moe_fields(stack, experts)
    return fields if fields["num_attention_heads"] % fields["num_key_value_heads"] == 0 else None


def _moe_fields(stack: StackSpec, experts: ExpertsSpec) -> dict[str, Any]:
    """MoeSpec's fields: where the first expert layer stands, and how far apart they are."""
    order = stack.sequence()
    routed = [
        i for i, name in enumerate(order) if any(b.kind == "experts" for s in stack.layers[name].sublayers for b in s.branches)
    ]
    step = routed[1] - routed[0] if len(routed) > 1 else 1
    first = routed[0] if step == 1 else 0
    return {
        "num_experts": experts.num_experts, "num_experts_per_tok": experts.num_experts_per_tok,
        "moe_intermediate_size": experts.width,
        "shared_expert_intermediate_size": experts.shared_width, "shared_expert_gate": experts.shared_gate,
        "router_bias": experts.router_bias, "n_group": experts.num_groups, "topk_group": experts.top_groups,
        "moe_layer_freq": step, "first_k_dense_replace": first,
    }  # fmt: skip


def _stack(model: TransformerSpec, *, decoder: bool, count: int, name: str) -> StackSpec:
    stacked = model.num_decoder_layers > 0
    made = {moe: _layer(model, decoder=decoder, moe=moe) for moe in {model.is_moe_layer(i) for i in range(count)}}
    layers = [made[model.is_moe_layer(i)] for i in range(count)]
    kinds, pattern = deal(layers, ["decoder" if decoder else "encoder" if stacked else "full"] * count)
    relative = model.relative_position_buckets
    extra = (
        (WeightSpec(name="relative_bias", kind="lookup", inputs=relative, outputs=model.num_attention_heads),) if relative else ()
    )
    return StackSpec(
        name=name,
        hidden_size=model.hidden_size,
        layers=kinds,
        pattern=pattern,
        norm=model.norm,
        final_norm=model.final_norm,
        extra=extra,
    )


def _layer(model: TransformerSpec, *, decoder: bool, moe: bool) -> LayerSpec:
    encoder = model.num_decoder_layers > 0 and not decoder
    mixer: BranchSpec
    if model.mla:
        mixer = LatentAttentionSpec(num_heads=model.num_attention_heads, **model.mla.model_dump())
    else:
        mixer = _attention(model, causal=not encoder)
    feed = _feed_forward(model, model.moe if moe else None)
    if model.parallel_block and isinstance(feed, FeedForwardSpec):
        return LayerSpec(sublayers=(SublayerSpec(branches=(mixer, feed), num_norms=model.block_norms),))
    norm: Any = "sandwich" if model.block_norms == 4 else "pre"
    steps = [SublayerSpec(branches=(mixer,), norm=norm)]
    if decoder:
        cross = _attention(model, causal=False).model_copy(update={"cross": True, "window": None})
        steps.append(SublayerSpec(branches=(cross,)))
    steps.append(SublayerSpec(branches=(feed,), norm=norm))
    return LayerSpec(sublayers=tuple(steps))


def _attention(model: TransformerSpec, *, causal: bool) -> AttentionSpec:
    bias = model.attention_bias
    position: Any = "absolute" if model.position == "learned" else model.position
    return AttentionSpec(
        num_heads=model.num_attention_heads, num_key_value_heads=model.num_key_value_heads, head_dim=model.head_dim, causal=causal,
        window=model.sliding_window if causal else None, q_bias=bias, k_bias=bias, v_bias=bias, o_bias=model.attention_out_bias,
        qk_norm="head" if model.qk_norm else "none", position=position, packed=model.packed_attention,
    )  # fmt: skip


def _feed_forward(model: TransformerSpec, moe: MoeSpec | None) -> FeedForwardSpec | ExpertsSpec:
    if moe is None:
        width, act = model.intermediate_size, model.activation
        return FeedForwardSpec(width=width, gated=model.gated_mlp, bias=model.mlp_bias, activation=act)
    return ExpertsSpec(
        num_experts=moe.num_experts, num_experts_per_tok=moe.num_experts_per_tok, width=moe.moe_intermediate_size,
        gated=model.gated_mlp, limit=model.swiglu_limit,
        bias=model.mlp_bias, activation=model.activation, router_bias=moe.router_bias,
        shared_width=moe.shared_expert_intermediate_size,
        shared_gate=moe.shared_expert_gate, num_groups=moe.n_group, top_groups=moe.topk_group,
        transformers_class=moe.transformers_class,
    )  # fmt: skip
