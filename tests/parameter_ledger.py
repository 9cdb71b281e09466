"""An exact ledger of a model's parameters: path-named terms, one formula per line, summed at the end.

It knows nothing of the graphs whose weights simpar counts: two independent counts.

Counts are the model's own: vocabulary padding, tensor-parallel replication and the like belong to the framework.
Every shipped preset is checked against its published count in tests/test_models_parameters.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias

from simpar.specs.model import CnnSpec, ConvLayerSpec, MlaSpec, MlpSpec, MoeSpec, TransformerSpec

Term: TypeAlias = tuple[str, int]
Ledger: TypeAlias = tuple[Term, ...]
Model: TypeAlias = TransformerSpec | MlpSpec | CnnSpec


def parameters(model: Model) -> Ledger:
    """Every parameter of `model`: (path, count), layers of a kind added up, without multi-token prediction.

    Paths start with "embedding/", "layers.", "final/" or "head/". The modules for multi-token prediction are listed by
    `mtp_parameters`, because published counts leave them out.
    """
    if isinstance(model, TransformerSpec):
        outside = [*_embedding(model), *_output(model)]
    else:
        outside = []
    inside: dict[str, int] = {}
    for index in range(num_layers(model)):
        for path, count in layer_parameters(model, index):
            inside[f"layers.{path}"] = inside.get(f"layers.{path}", 0) + count
    return (*((path, count) for path, count in outside if count), *inside.items())


def total(ledger: Ledger) -> int:
    """Sum of a ledger's terms."""
    return sum(count for _, count in ledger)


def total_parameters(model: Model) -> int:
    """All parameters of `model`, without multi-token prediction."""
    return total(parameters(model))


def embedding_parameters(model: Model) -> int:
    """Word embedding and, where it is not tied, output projection: what "non-embedding" counts leave out."""
    return sum(count for path, count in parameters(model) if path in ("embedding/word", "head/weight"))


def active_parameters(model: Model) -> int:
    """Parameters that one token meets: routed experts count num_experts_per_tok times, all the rest once."""
    return sum(_active(model, path, count) for path, count in parameters(model))


def mtp_parameters(model: Model) -> Ledger:
    """The multi-token-prediction modules of `model` (DeepSeek-V3); embedding and head are shared with the model."""
    if not isinstance(model, TransformerSpec) or not model.num_nextn_predict_layers:
        return ()
    modules, h = model.num_nextn_predict_layers, model.hidden_size
    layer = layer_parameters(model, model.num_hidden_layers - 1)
    return (
        ("mtp.projection", modules * 2 * h * h),
        ("mtp.input_norms", modules * 2 * _norm(model, h)),
        ("mtp.final_norm", modules * _norm(model, h)),
        *((f"mtp.{path}", modules * count) for path, count in layer),
    )


def num_layers(model: Model) -> int:
    """Layers `layer_parameters` can be asked for: transformer layers (encoder, then decoder), MLP or CNN layers."""
    if isinstance(model, TransformerSpec):
        return model.num_hidden_layers + model.num_decoder_layers
    if isinstance(model, MlpSpec):
        return model.depth + (model.input_size is not None) + (model.output_size is not None)
    return len(model.layers)


def layer_parameters(model: Model, layer_index: int) -> Ledger:
    """The terms of layer `layer_index` (from 0; decoder layers follow the encoder's)."""
    terms: Iterable[Term]
    if isinstance(model, TransformerSpec):
        terms = _transformer_layer(model, layer_index)
    elif isinstance(model, MlpSpec):
        terms = _mlp_layer(model, layer_index)
    else:
        terms = _cnn_layers(model)[layer_index]
    return tuple((path, count) for path, count in terms if count)


def _active(model: Model, path: str, count: int) -> int:
    if not isinstance(model, TransformerSpec) or model.moe is None or not path.startswith("layers.moe/experts/"):
        return count
    return count // model.moe.num_experts * model.moe.num_experts_per_tok


def _norm(model: TransformerSpec, width: int) -> int:
    """A weight per channel; LayerNorm has a bias too."""
    return width if model.norm == "rmsnorm" else 2 * width


def _embedding(model: TransformerSpec) -> Iterator[Term]:
    h, stacks = model.hidden_size, 2 if model.num_decoder_layers else 1
    yield "embedding/word", model.vocab_size * h
    yield "embedding/position", model.max_position_embeddings * h if model.position == "learned" else 0
    yield "embedding/relative", stacks * model.relative_position_buckets * model.num_attention_heads
    yield "embedding/norm", _norm(model, h) if model.embedding_norm else 0


def _output(model: TransformerSpec) -> Iterator[Term]:
    h, stacks = model.hidden_size, 2 if model.num_decoder_layers else 1
    yield "final/norm", stacks * _norm(model, h) if model.final_norm else 0
    yield "head/weight", 0 if model.tie_word_embeddings else model.vocab_size * h
    yield "head/bias", model.vocab_size if model.head_bias else 0


def _transformer_layer(model: TransformerSpec, index: int) -> Iterator[Term]:
    is_decoder = index >= model.num_hidden_layers
    yield "norm", model.block_norms * _norm(model, model.hidden_size)
    yield from _mla(model, model.mla) if model.mla else _attention(model, "attention")
    if is_decoder:
        yield "cross_attention/norm", _norm(model, model.hidden_size)
        yield from _attention(model, "cross_attention")
    moe_index = index - model.num_hidden_layers if is_decoder else index
    if model.moe and model.is_moe_layer(moe_index):
        yield from _moe(model, model.moe)
    else:
        yield from _feed_forward(model, "mlp", model.intermediate_size, 1)


def _attention(model: TransformerSpec, path: str) -> Iterator[Term]:
    h, d = model.hidden_size, model.head_dim
    q, kv = model.num_attention_heads * d, model.num_key_value_heads * d
    yield f"{path}/q", h * q
    yield f"{path}/k", h * kv
    yield f"{path}/v", h * kv
    yield f"{path}/qkv_bias", q + 2 * kv if model.attention_bias else 0
    yield f"{path}/out", q * h
    yield f"{path}/out_bias", h if model.attention_out_bias else 0
    yield f"{path}/qk_norm", 2 * d if model.qk_norm else 0


def _mla(model: TransformerSpec, mla: MlaSpec) -> Iterator[Term]:
    """DeepSeek-V2, arXiv 2405.04434 section 2.1: low-rank queries and a joint low-rank key and value."""
    h, n = model.hidden_size, model.num_attention_heads
    query = n * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    yield "attention/q", 0 if mla.q_lora_rank else h * query
    yield "attention/q_down", h * mla.q_lora_rank
    yield "attention/q_norm", _norm(model, mla.q_lora_rank)
    yield "attention/q_up", mla.q_lora_rank * query
    yield "attention/kv_down", h * (mla.kv_lora_rank + mla.qk_rope_head_dim)
    yield "attention/kv_norm", _norm(model, mla.kv_lora_rank)
    yield "attention/kv_up", mla.kv_lora_rank * n * (mla.qk_nope_head_dim + mla.v_head_dim)
    yield "attention/out", n * mla.v_head_dim * h


def _feed_forward(model: TransformerSpec, path: str, width: int, count: int) -> Iterator[Term]:
    """`count` feed-forward blocks of `width`."""
    h = model.hidden_size
    yield f"{path}/gate", count * h * width if model.gated_mlp else 0
    yield f"{path}/up", count * h * width
    yield f"{path}/down", count * width * h
    bias = h + (2 if model.gated_mlp else 1) * width
    yield f"{path}/bias", count * bias if model.mlp_bias else 0


def _moe(model: TransformerSpec, moe: MoeSpec) -> Iterator[Term]:
    h = model.hidden_size
    yield "moe/router", h * moe.num_experts
    yield "moe/router_bias", moe.num_experts if moe.router_bias else 0
    yield from _feed_forward(model, "moe/experts", moe.moe_intermediate_size, moe.num_experts)
    if moe.shared_expert_intermediate_size:
        yield from _feed_forward(model, "moe/shared", moe.shared_expert_intermediate_size, 1)
        yield "moe/shared_gate", h if moe.shared_expert_gate else 0


def _mlp_layer(model: MlpSpec, index: int) -> Iterator[Term]:
    has_input = model.input_size is not None
    rows = model.input_size if has_input and index == 0 else model.width
    is_output = model.output_size is not None and index == num_layers(model) - 1
    columns = model.output_size if is_output else model.width
    assert rows is not None
    assert columns is not None
    yield "linear/weight", rows * columns
    yield "linear/bias", columns if model.bias else 0


def _cnn_layers(model: CnnSpec) -> list[tuple[Term, ...]]:
    """The terms of every layer, carrying channels and image size along."""
    found: list[tuple[Term, ...]] = []
    channels, size = model.in_channels, model.image_size
    for layer in model.layers:
        terms, channels, size = _cnn_layer(layer, channels, size)
        found.append(terms)
    return found


def _cnn_layer(layer: ConvLayerSpec, channels: int, size: int) -> tuple[tuple[Term, ...], int, int]:
    """Terms of `layer` for an input of `channels` images of `size` squared; and the output's channels and size."""
    out = layer.out_channels or channels
    if layer.kind == "linear":
        inputs = channels * size * size
        return (("linear/weight", inputs * out), ("linear/bias", out)), out, 1
    size = (size + 2 * layer.padding - layer.kernel_size) // layer.stride + 1
    if layer.kind == "pool":
        return (), channels, size
    weight = out * (channels // layer.groups) * layer.kernel_size**2
    return (("conv/weight", weight), ("conv/bias", out)), out, size
