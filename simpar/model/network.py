"""A model as the ordered list of layers that a pipeline cuts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from simpar.graph.ledger import parameters
from simpar.graph.types import Attention, Layer, Node
from simpar.model.simple import cnn_layers, mlp_layers
from simpar.specs.model import CnnSpec, MlpSpec


@dataclass(frozen=True, slots=True)
class EncoderInput:
    """What a micro-batch brings to an encoder beside the decoder.

    Attributes:
        encoder: name of the stack.
        count: inputs of a micro-batch; tokens: of one.
        frozen: none, encoder (its layers are not trained) or all (the projector neither).
    """

    encoder: str
    count: int
    tokens: int
    frozen: str = "none"


@dataclass(frozen=True, slots=True)
class EncoderLayer:
    """A layer of an encoder beside the decoder, or what leads from it to the decoder.

    Attributes:
        layer: its graph.
        frozen: it is not trained, and neither is anything before it.
        passes_on: elements that go to the next stage where one begins after it, a micro-batch's, unsplit.
    """

    layer: Layer
    frozen: bool
    passes_on: float


@dataclass(frozen=True, slots=True)
class Network:
    """Layers in order.

    Attributes:
        embedding: before the first layer, or None.
        layers: equal layers share one object.
        head: norm, logits and loss, or None where the last layer holds the loss.
        mtp: multi-token-prediction modules, run before the head on the last stage.
        mtp_head: logits and loss of each module, with the head's own weight.
        boundary_elements: activation passed between layers, one micro-batch, unsplit, before each layer (and after the last).
        tied: head and embedding share the weight.
        encoders: layers of encoders beside the decoder, before the embedding.
    """

    embedding: Layer | None
    layers: tuple[Layer, ...]
    head: Layer | None
    mtp: tuple[Layer, ...]
    mtp_head: Layer | None
    boundary_elements: tuple[float, ...]
    tied: bool
    encoders: tuple[EncoderLayer, ...] = ()

    @property
    def tied_head(self) -> Layer | None:
        """The head where its matrix is the embedding's, else none."""
        return self.head if self.tied else None

    @property
    def parameters(self) -> int:
        """All weights, a tied matrix once."""
        ends = (*(encoder.layer for encoder in self.encoders), self.embedding, *self.layers, *self.mtp, self.head)
        layers = [layer for layer in ends if layer is not None]
        total = sum(count for layer in layers for _, count in parameters(layer))
        if self.tied and self.head is not None:
            total -= self.head.elements("head/logits.weight")
        return total


def padded_vocabulary(vocab: int, multiple: int, ranks: int = 1) -> int:
    """`vocab` with each of `ranks` tensor ranks' share rounded up to a multiple (Megatron: 128); 0: rounded down to whole words."""
    if not multiple:
        return vocab // ranks * ranks
    return -(-vocab // (multiple * ranks)) * multiple * ranks


def packed(network: Network, documents: tuple[int, ...]) -> Network:
    """`network` on sequences that hold several documents each: no token attends one of another."""
    if not documents:
        return _interned(network)
    made: dict[Layer, Layer] = {}

    def inside(layer: Layer) -> Layer:
        if layer not in made:
            made[layer] = replace(layer, nodes=tuple(_inside(node, documents) for node in layer.nodes))
        return made[layer]

    return _interned(replace(network, layers=tuple(map(inside, network.layers)), mtp=tuple(map(inside, network.mtp))))


def _interned(network: Network) -> Network:
    """`network` of layers that other networks have too: those of one model differ in their ends alone, and what is known of a layer
    is found by the object at once, by its graph only after a comparison of all its nodes."""
    return replace(network, layers=tuple(map(_known, network.layers)), mtp=tuple(map(_known, network.mtp)))


@lru_cache(maxsize=4096)
def _known(layer: Layer) -> Layer:
    """The first of all equal layers."""
    return layer


def _inside(node: Node, documents: tuple[int, ...]) -> Node:
    if not isinstance(node, Attention) or node.queries != node.keys or node.mask.kind == "fixed":
        return node
    return replace(node, mask=replace(node.mask, documents=documents))


@lru_cache(maxsize=512)
def simple_network(model: MlpSpec | CnnSpec, micro_batch: int, split: int) -> Network:
    """The layers of an MLP or a convolutional net."""
    if isinstance(model, MlpSpec):
        layers = mlp_layers(model, micro_batch)
        sizes = [micro_batch * (model.input_size or model.width)] + [micro_batch * model.width] * len(layers)
    else:
        layers = cnn_layers(model, micro_batch, split)
        sizes = [layer.elements("cnn/in") for layer in layers] + [0]
    return Network(None, layers, None, (), None, tuple(map(float, sizes)), tied=False)
