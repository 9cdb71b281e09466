"""A model as the ordered list of blocks that a pipeline cuts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from simpar.specs.model import CnnSpec, MlpSpec, TransformerSpec
from simpar.workload.ops import Block, op_parameters
from simpar.workload.simple import cnn_blocks, mlp_blocks
from simpar.workload.style import BlockStyle
from simpar.workload.transformer import axis_sizes, embedding_block, head_block, layer_block, mtp_block


@dataclass(frozen=True, slots=True)
class Network:
    """Blocks in order.

    Attributes:
        embedding: before the first layer, or None.
        layers: one block per layer; equal layers share one object.
        head: norm, logits and loss, or None where the last layer holds the loss.
        mtp: multi-token-prediction modules, run before the head on the last stage.
        mtp_head: logits and loss of each module, with the head's own weight.
        boundary_bytes: activation passed between layers, one micro-batch, unsplit, before each layer (and after the last).
        tied: head and embedding share the weight.
    """

    embedding: Block | None
    layers: tuple[Block, ...]
    head: Block | None
    mtp: tuple[Block, ...]
    mtp_head: Block | None
    boundary_bytes: tuple[float, ...]
    tied: bool

    @property
    def tied_head(self) -> Block | None:
        """The head where its matrix is the embedding's, else none."""
        return self.head if self.tied else None

    @property
    def parameters(self) -> int:
        """All weights, a tied matrix once."""
        blocks = [b for b in (self.embedding, *self.layers, *self.mtp, self.head) if b is not None]
        total = sum(op_parameters(op, block.size) for block in blocks for op in block.ops)
        if self.tied and self.head is not None:
            total -= self.head.size["d"] * self.head.size["v"]
        return total


def padded_vocabulary(vocab: int, multiple: int, ranks: int = 1) -> int:
    """`vocab` with each of `ranks` tensor ranks' share rounded up to a multiple (Megatron: 128); 0: rounded down to whole words."""
    if not multiple:
        return vocab // ranks * ranks
    return -(-vocab // (multiple * ranks)) * multiple * ranks


@lru_cache(maxsize=512)
def transformer_network(
    model: TransformerSpec, micro_batch: int, sequence: int, style: BlockStyle, vocab: int | None = None
) -> Network:
    """The blocks of a transformer for one micro-batch of `micro_batch` sequences."""
    sizes = axis_sizes(model, micro_batch, sequence, vocab)
    present = {model.is_moe_layer(i) for i in range(model.num_hidden_layers)}
    kinds = {moe: layer_block(model, sizes, style, moe=moe) for moe in present}
    layers = [kinds[model.is_moe_layer(i)] for i in range(model.num_hidden_layers)]
    if model.num_decoder_layers:
        decoder = {moe: layer_block(model, sizes, style, moe=moe, cross_attention=True) for moe in kinds}
        layers += [decoder[model.is_moe_layer(i)] for i in range(model.num_decoder_layers)]
    mtp = tuple(mtp_block(model, sizes, style, moe=model.moe is not None) for _ in range(model.num_nextn_predict_layers))
    boundary = 2.0 * micro_batch * sequence * model.hidden_size
    return Network(
        embedding_block(model, sizes, style), tuple(layers), head_block(model, sizes, style), mtp,
        head_block(model, sizes, style, norm=False) if mtp else None, (boundary,) * (len(layers) + 1), model.tie_word_embeddings,
    )  # fmt: skip


@lru_cache(maxsize=512)
def simple_network(model: MlpSpec | CnnSpec, micro_batch: int, element_bytes: float, split: int) -> Network:
    """The blocks of an MLP or a convolutional net."""
    if isinstance(model, MlpSpec):
        blocks = mlp_blocks(model, micro_batch, element_bytes)
        width = element_bytes * micro_batch
        boundaries = [width * (model.input_size or model.width)] + [width * model.width] * len(blocks)
    else:
        blocks = cnn_blocks(model, micro_batch, element_bytes, split)
        boundaries = [element_bytes * micro_batch * b.size["d"] for b in blocks] + [0.0]
    return Network(None, blocks, None, (), None, tuple(boundaries), tied=False)
