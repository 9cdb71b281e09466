"""Transformer layers as graphs: embedding, dense and expert layers, multi-token prediction, head with loss.

A graph says what is computed, for one micro-batch and unsplit. Which kernels do it is the framework's (graph/kernels.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from simpar.graph.build import LayerBuilder
from simpar.graph.masks import BIDIRECTIONAL, CAUSAL, Mask
from simpar.graph.types import GELUS, Axis, Elementwise, Layer, Lookup
from simpar.specs.model import MlaSpec, MoeSpec, TransformerSpec

TOKENS = "batch sequence hidden"


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch: sequences and their length; `vocabulary` where a framework pads it (0: the model's own)."""

    size: int
    sequence: int
    vocabulary: int = 0


def builder(name: str, model: TransformerSpec, batch: Batch) -> LayerBuilder:
    """An empty layer with the axes that all layers of `model` have."""
    latent = model.mla
    head = latent.qk_nope_head_dim + latent.qk_rope_head_dim if latent else model.head_dim
    return LayerBuilder(name, [
        Axis("batch", batch.size), Axis("sequence", batch.sequence, "sequence"), Axis("hidden", model.hidden_size),
        Axis("heads", model.num_attention_heads, "tensor"),
        Axis("kv_heads", model.num_attention_heads if latent else model.num_key_value_heads, "groups"),
        Axis("head_dim", head), Axis("value_dim", latent.v_head_dim if latent else model.head_dim),
    ])  # fmt: skip


def attention_mask(model: TransformerSpec, *, encoder: bool = False) -> Mask:
    """The mask of self-attention: a decoder's is causal, over a window where the model has one; an encoder sees everything."""
    if encoder:
        return BIDIRECTIONAL
    return Mask("window", model.sliding_window) if model.sliding_window else CAUSAL


def _attention(layer: LayerBuilder, model: TransformerSpec, x: str, path: str, mask: Mask) -> str:
    """Queries, keys and values as one product, attention, output projection."""
    if "qkv" not in layer.axes:
        layer.axis("qkv", parts=("heads head_dim", "kv_heads head_dim", "kv_heads value_dim"))
    parts = ("batch sequence heads head_dim", "batch sequence kv_heads head_dim")
    rotated = model.position == "rope" and path == "attention"
    names = ["projected"] * bool(model.qk_norm or rotated) + ["normed"] * bool(model.qk_norm and rotated)
    made = iter([*(f"{path}/qkv_{name}" for name in names), f"{path}/qkv_out"])
    qkv = layer.linear(f"{path}/qkv", x, "batch sequence qkv", module="attention", to=next(made), bias=model.attention_bias)
    layer.of_linears(qkv, 1 if model.packed_attention else 3)
    if model.qk_norm:
        kept = tuple(zip(parts, (f"{path}/qk_norm_in", f"{path}/k_norm_in"), strict=True))
        qkv = layer.norm(f"{path}/qk_norm", qkv, module="attention", to=next(made), parts=kept)
    if rotated:
        qkv = layer.elementwise(f"{path}/rope", [qkv], "rope", module="attention", to=next(made), over=parts)
    out = layer.attention(f"{path}/core", [qkv], "batch sequence heads value_dim", mask=mask, to=f"{path}/out")
    return layer.linear(f"{path}/proj", out, TOKENS, module="attention", bias=model.attention_out_bias)


def _latent_attention(layer: LayerBuilder, model: TransformerSpec, latent: MlaSpec, x: str, mask: Mask) -> str:
    """DeepSeek-V2, arXiv 2405.04434, section 2.1: queries, and keys with values, from narrow latents."""
    layer.axis("kv_latent", latent.kv_lora_rank)
    layer.axis("rope_dim", latent.qk_rope_head_dim)
    layer.axis("nope_dim", latent.qk_nope_head_dim)
    layer.axis("kv_latent_rope", parts=("kv_latent", "rope_dim"))
    layer.axis("query", parts=("heads head_dim",))
    layer.axis("key_value", parts=("heads nope_dim", "heads value_dim"))
    source = x
    if latent.q_lora_rank:
        layer.axis("q_latent", latent.q_lora_rank)
        down = layer.linear("attention/q_down", x, "batch sequence q_latent", module="attention", to="attention/q_norm_in")
        source = layer.norm("attention/q_norm", down, kind=model.norm, module="attention", to="attention/q_latent")
    both = layer.linear("attention/kv_down", x, "batch sequence kv_latent_rope", module="attention")
    down, rope = layer.view([both], ("attention/kv_norm_in", "batch sequence kv_latent"),
                            ("attention/key_rope", "batch sequence rope_dim"))  # fmt: skip
    values = layer.norm("attention/kv_norm", down, kind=model.norm, module="attention", to="attention/kv_latent")
    query = layer.linear("attention/q_up", source, "batch sequence query", module="mla_up_proj")
    values = layer.linear("attention/kv_up", values, "batch sequence key_value", module="mla_up_proj")
    for name, width in (("q", "head_dim"), ("k", "head_dim"), ("v", "value_dim")):
        layer.tensor(f"attention/{name}", f"batch sequence heads {width}")
    heads = ("attention/q", "attention/k", "attention/v")
    layer.add(Elementwise("attention/rope", (query, values, rope), heads, "mla_up_proj", op="latent_rope"))
    out = layer.attention("attention/core", heads, "batch sequence heads value_dim", mask=mask, to="attention/out")
    return layer.linear("attention/proj", out, TOKENS, module="attention")


def _widths(layer: LayerBuilder, model: TransformerSpec, name: str, size: int, split: str) -> tuple[str, str]:
    """The axes of a feed-forward: what the first product makes (gate and input side by side), what the second takes."""
    width = layer.axis(name, size, split)
    return layer.axis(f"{name}_in", parts=(width, width) if model.gated_mlp else (width,)), width


def activation_op(name: str, *, gated: bool) -> str:
    """The op of a feed-forward's activation, see `GELUS`."""
    return name if name in GELUS and not gated else "activation"


def _feed_forward(layer: LayerBuilder, model: TransformerSpec, x: str, path: str, size: int) -> str:
    """Two products with the activation (and its gate) between."""
    wide, narrow = _widths(layer, model, "ffn" if path == "mlp" else "shared_ffn", size, "tensor")
    both = layer.linear(f"{path}/fc1", x, f"batch sequence {wide}", module=path, to=f"{path}/activation_in", bias=model.mlp_bias)
    layer.of_linears(both, 1 + model.gated_mlp)
    op = activation_op(model.activation, gated=model.gated_mlp)
    out = layer.elementwise(f"{path}/activation", [both], op, module=path, to=f"{path}/fc2_in", out=f"batch sequence {narrow}")
    return layer.linear(f"{path}/fc2", out, TOKENS, module=path, bias=model.mlp_bias)


def _experts(layer: LayerBuilder, model: TransformerSpec, moe: MoeSpec, x: str) -> list[str]:
    """Routed experts, then shared ones; what they put out, to be summed."""
    layer.axis("experts", moe.num_experts, "experts")
    layer.axis("scores", moe.num_experts)
    batch, sequence = layer.axes["batch"].size, layer.axes["sequence"].size
    layer.axis("rows", batch * sequence * moe.num_experts_per_tok, "rows")
    wide, narrow = _widths(layer, model, "expert_ffn", moe.moe_intermediate_size, "expert_tensor")
    scores = layer.linear("moe/router", x, "batch sequence scores", module="moe", to="moe/logits", bias=moe.router_bias, wide=True)
    choice = layer.select("moe/topk", scores)
    rows = layer.permute("moe/permute", [x, choice], "rows hidden", to="moe/fc1_in")
    clamped = model.swiglu_limit is not None
    rows = layer.linear("moe/fc1", rows, f"rows {wide}", module="moe", to="moe/fc1_out" if clamped else "moe/activation_in",
                        bias=model.mlp_bias)  # fmt: skip
    layer.grouped("experts", layer.of_linears(rows, 1 + model.gated_mlp))
    if clamped:
        rows = layer.elementwise("moe/clamp", [rows], "clamp", module="moe_act", to="moe/activation_in")
    rows = layer.elementwise("moe/activation", [rows], "activation", module="moe_act", to="moe/fc2_in", out=f"rows {narrow}")
    rows = layer.grouped("experts", layer.linear("moe/fc2", rows, "rows hidden", module="moe", bias=model.mlp_bias))
    if model.mlp_bias:
        rows = layer.elementwise("moe/fc2_bias", [rows], "expert_bias", module="moe")
    found = [layer.permute("moe/unpermute", [rows, choice], TOKENS, back=True)]
    if moe.shared_expert_intermediate_size:
        found.append(_feed_forward(layer, model, x, "shared_experts", moe.shared_expert_intermediate_size))
        if moe.shared_expert_gate:
            found.append(layer.linear("shared_experts/gate", x, "batch sequence", module="shared_experts"))
    return found


def layer_graph(
    model: TransformerSpec, batch: Batch, *, moe: bool, mask: Mask = CAUSAL, cross_attention: bool = False
) -> Layer:  # fmt: skip
    """One transformer layer: attention (a decoder's second over the encoder's output), then a dense or expert feed-forward."""
    layer = builder("moe_layer" if moe else "layer", model, batch)
    return layer.done(_layer(layer, model, layer.input("input_norm_in", TOKENS), mask, moe=moe, cross=cross_attention))


def _layer(layer: LayerBuilder, model: TransformerSpec, x: str, mask: Mask, *, moe: bool, cross: bool = False) -> str:
    """The nodes of a transformer layer on `x`; its output."""
    normed = layer.norm("input_norm", x, kind=model.norm)
    if model.mla:
        out = _latent_attention(layer, model, model.mla, normed, mask)
    else:
        out = _attention(layer, model, normed, "attention", mask)
    if model.block_norms == 4:
        out = layer.norm("attention_post_norm", out, kind=model.norm)
    if cross:
        x = layer.residual("self_residual", out, x, to="cross_norm_in")
        out = _attention(layer, model, layer.norm("cross_norm", x, kind=model.norm), "cross", BIDIRECTIONAL)
    if model.parallel_block and not moe:
        if model.block_norms != 1:
            normed = layer.norm("mlp_norm", x, kind=model.norm)
        return layer.residual("residual", out, _feed_forward(layer, model, normed, "mlp", model.intermediate_size), x)
    x = layer.residual("attention_residual", out, x, to="mlp_norm_in")
    normed = layer.norm("mlp_norm", x, kind=model.norm)
    if moe:
        assert model.moe is not None
        outs = _experts(layer, model, model.moe, normed)
    else:
        outs = [_feed_forward(layer, model, normed, "mlp", model.intermediate_size)]
    if model.block_norms == 4:
        outs[0] = layer.norm("mlp_post_norm", outs[0], kind=model.norm)
    return layer.residual("mlp_residual", *outs, x)


def embedding_graph(model: TransformerSpec, batch: Batch) -> Layer:
    """Token (and learned position) lookup, BLOOM's norm after it."""
    layer = builder("embedding", model, batch)
    layer.axis("vocab", batch.vocabulary or model.vocab_size, "tensor")
    ids = layer.input("embedding/ids", "batch sequence", data=True, format="int64")
    x = layer.lookup("embedding/word", ids, "vocab hidden", TOKENS)
    if model.position == "learned":
        layer.axis("positions", model.max_position_embeddings)
        x = layer.lookup("embedding/position", ids, "positions hidden", TOKENS, add=x)
    x = layer.elementwise("embedding/dropout", [x], "dropout", module="embedding")
    if model.embedding_norm:
        x = layer.norm("embedding/norm", x, kind=model.norm)
    if model.num_decoder_layers and model.final_norm:
        # The encoder's own final norm; it has no layer of its own.
        x = layer.norm("embedding/encoder_final_norm", x, kind=model.norm)
    if model.relative_position_buckets:
        layer.axis("buckets", model.relative_position_buckets)
        layer.axis("bias_heads", model.num_attention_heads)
        tables = range(2 if model.num_decoder_layers else 1)
        held = tuple(layer.parameter(f"embedding/relative.weight{i}", "buckets bias_heads") for i in tables)
        bias = layer.tensor("embedding/relative.out", "buckets bias_heads")
        layer.add(Lookup("embedding/relative", (), (bias,), "embedding", held))
    return layer.done(x)


def head_graph(model: TransformerSpec, batch: Batch, *, norm: bool = True) -> Layer:
    """Final norm (a multi-token-prediction module brings its own), logits, loss."""
    layer = builder("head", model, batch)
    layer.axis("vocab", batch.vocabulary or model.vocab_size, "tensor")
    has_norm = model.final_norm and norm
    x = layer.input("final_norm_in" if has_norm else "head/in", TOKENS)
    if has_norm:
        x = layer.norm("final_norm", x, kind=model.norm, to="head/in")
    logits = layer.linear(
        "head/logits", x, "batch sequence vocab", module="head", to="head/logits", bias=model.head_bias, wide=True
    )
    return layer.done(layer.loss("head/loss", logits, "batch sequence"))


def mtp_graph(model: TransformerSpec, batch: Batch, *, moe: bool) -> Layer:
    """A multi-token-prediction module: two norms, a projection of the pair, a layer, a norm; its head is separate."""
    layer = builder("mtp_layer", model, batch)
    layer.axis("pair", parts=("hidden", "hidden"))
    hidden = layer.norm("mtp/hidden_norm", layer.input("mtp/hidden_norm_in", TOKENS), kind=model.norm, module="mtp")
    embedded = layer.norm("mtp/embedding_norm", layer.input("mtp/embedding_norm_in", TOKENS), kind=model.norm, module="mtp")
    (pair,) = layer.view([hidden, embedded], ("mtp/pair", "batch sequence pair"))
    x = layer.linear("mtp/proj", pair, TOKENS, module="mtp", to="input_norm_in")
    x = _layer(layer, model, x, attention_mask(model), moe=moe)
    return layer.done(layer.norm("mtp/final_norm", x, kind=model.norm, module="mtp"))
