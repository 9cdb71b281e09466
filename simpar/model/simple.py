"""Deep MLPs and convolutional nets as layer graphs.

Every second layer of an MLP is split by its inputs, the others by their outputs; convolutions split their filters and need all
channels of the layer before unless they are grouped (AlexNet's two columns meet at conv3 and the linear layers).
"""

from __future__ import annotations

from simpar.graph.build import LayerBuilder
from simpar.graph.types import Axis, Layer
from simpar.specs.model import CnnSpec, ConvLayerSpec, MlpSpec


def mlp_layers(model: MlpSpec, micro_batch: int) -> tuple[Layer, ...]:
    """One graph per layer."""
    layers = []
    widths = [model.input_size or model.width, *[model.width] * (model.depth - 1), model.output_size or model.width]
    for index in range(model.depth):
        column, last = index % 2 == 0, index == model.depth - 1
        wide, whole = (widths[index + 1], widths[index]) if column else (widths[index], widths[index + 1])
        axes = [Axis("batch", micro_batch), Axis("hidden", whole), Axis("ffn", wide, "tensor")]
        layer = LayerBuilder("head" if last else "layer", axes)
        source, made = ("batch hidden", "batch ffn") if column else ("batch ffn", "batch hidden")
        x = layer.input("mlp/in" if column else "mlp/hidden", source, data=index == 0)
        x = layer.linear(f"mlp/layer{'_column' if column else '_row'}", x, made, module="mlp",
                         to="mlp/loss_in" if last else "mlp/activation_in", bias=model.bias)  # fmt: skip
        x = (
            layer.loss("mlp/loss", x, "batch", kind="classes")
            if last
            else layer.elementwise("mlp/activation", [x], "relu", module="mlp")
        )
        layers.append(layer.done(x))
    return tuple(layers)


def cnn_layers(model: CnnSpec, micro_batch: int, split: int = 1) -> tuple[Layer, ...]:
    """One graph per layer that holds weights; pooling joins the layer before it.

    Args:
        split: the tensor-parallel degree: a grouped convolution whose groups are a multiple of it sees its own channels alone.
    """
    layers: list[tuple[LayerBuilder, str]] = []
    channels, side = model.in_channels, model.image_size
    weighted = [layer for layer in model.layers if layer.kind != "pool"]
    for spec in model.layers:
        if spec.kind == "pool":
            side = _side(spec, side)
            layer, x = layers[-1]
            layers[-1] = (layer, layer.elementwise("pool", [x], "pool", module="pool"))
            continue
        inputs, convolution = channels * side * side, spec.kind == "conv"
        side = _side(spec, side) if convolution else 1
        taps = channels // spec.groups * spec.kernel_size**2 if convolution else inputs
        layer = _cnn_layer(
            spec, spec is weighted[0], spec is weighted[-1], (micro_batch, inputs, taps, side * side), channels, split
        )
        layers.append((layer, layer.nodes[-1].outputs[0]))
        channels = spec.out_channels or channels
    return tuple(layer.done(x) for layer, x in layers)


def _side(spec: ConvLayerSpec, side: int) -> int:
    return (side + 2 * spec.padding - spec.kernel_size) // spec.stride + 1


def _cnn_layer(
    spec: ConvLayerSpec, first: bool, last: bool, sizes: tuple[int, int, int, int], channels: int, split: int
) -> LayerBuilder:
    """A convolution or linear layer with what follows it; `sizes`: images, input elements, taps, output positions."""
    images, inputs, taps, positions = sizes
    own = spec.kind == "conv" and spec.groups > 1 and spec.groups % split == 0
    axes = [Axis("batch", images), Axis("inputs", inputs, "" if first else "tensor"), Axis("taps", taps),
            Axis("positions", positions), Axis("filters", spec.out_channels or channels, "tensor")]  # fmt: skip
    layer = LayerBuilder("head" if last else "layer", axes)
    x = layer.input("cnn/in", "batch inputs", data=first)
    x = layer.convolution(f"cnn/{spec.kind}", x, "batch positions filters", ("taps", "filters"), to="cnn/out", grouped=own)
    if last:
        layer.loss("cnn/loss", x, "batch positions", kind="classes")
    else:
        layer.elementwise("cnn/relu", [x], "relu", module="cnn")
    return layer
