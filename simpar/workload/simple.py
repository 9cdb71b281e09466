"""Deep MLPs and convolutional nets as blocks over the same axes.

MLP layers alternate column- and row-parallel under tensor parallelism; convolutions split their output channels and gather
the input channels where a layer sees all of them (AlexNet's two columns exchange at conv3 and the linear layers).
"""

from __future__ import annotations

from simpar.specs.model import CnnSpec, MlpSpec
from simpar.workload.ops import Block, Op, OpType, Region, Seam, Tensor


def mlp_blocks(model: MlpSpec, micro_batch: int, element_bytes: float = 2.0) -> tuple[Block, ...]:
    """One block per layer; every second layer is row-parallel."""
    blocks = []
    widths = [model.input_size or model.width, *[model.width] * (model.depth - 1), model.output_size or model.width]
    for index in range(model.depth):
        column = index % 2 == 0
        inner, outer = widths[index], widths[index + 1]
        last = index == model.depth - 1
        if column:
            sizes = {"b": micro_batch, "s": 1, "d": inner, "f": outer}
            equation, source = "bsd,df->bsf", Tensor("mlp/in", "bsd", element_bytes, "residual")
            act = ("bsf", "tensor")
        else:
            sizes = {"b": micro_batch, "s": 1, "f": inner, "d": outer}
            equation, source = "bsf,fd->bsd", Tensor("mlp/hidden", "bsf", element_bytes, "tensor")
            act = ("bsd", "residual")
        matmul = Op(f"mlp/layer{'_column' if column else '_row'}", OpType.MATMUL, "mlp", "tensor", equation=equation,
                    saves=(source,), bias=model.bias, needs_input_gradient=index > 0)  # fmt: skip
        region: Region = "tensor" if column else "residual"
        activation = Op("mlp/activation", OpType.MEMORY, "mlp", region, kernel="activation",
                        forward_bytes=((act[0], 2 * element_bytes),), backward_bytes=((act[0], 3 * element_bytes),),
                        saves=(Tensor("mlp/activation_in", act[0], element_bytes, region),))  # fmt: skip
        items: list[Op | Seam] = [Seam("mlp_in", ("bsd",), "mlp", element_bytes), matmul]
        if not column:
            items = [matmul, Seam("mlp_out", ("bsd",), "mlp", element_bytes)]
        if column and last:
            items.append(Seam("column_out", ("bsf",), "mlp", element_bytes))
        if last:
            activation = Op("mlp/loss", OpType.MEMORY, "loss", region, kernel="cross_entropy",
                            forward_bytes=((act[0], 3 * element_bytes),), backward_bytes=((act[0], 3 * element_bytes),),
                            saves=(Tensor("mlp/loss_in", act[0], element_bytes, region),))  # fmt: skip
        items.append(activation)
        blocks.append(Block("head" if last else "layer", tuple(items), tuple(sorted(sizes.items()))))
    return tuple(blocks)


def cnn_blocks(model: CnnSpec, micro_batch: int, element_bytes: float = 4.0, split: int = 1) -> tuple[Block, ...]:
    """One block per layer that holds weights (pooling joins the layer before it); convolutions as implicit matmuls.

    `split` is the tensor-parallel degree: a grouped convolution whose groups are a multiple of it needs no exchange.
    """
    blocks: list[Block] = []
    channels, side = model.in_channels, model.image_size
    weighted = [layer for layer in model.layers if layer.kind != "pool"]
    for layer in model.layers:
        if layer.kind == "pool":
            side = (side + 2 * layer.padding - layer.kernel_size) // layer.stride + 1
            previous = blocks[-1]
            size = previous.size
            pool = Op("pool", OpType.MEMORY, "pool", "tensor", kernel="activation", forward_bytes=(("bsf", 1.25 * element_bytes),),
                      backward_bytes=(("bsf", 2 * element_bytes),))  # fmt: skip
            blocks[-1] = Block(previous.name, (*previous.items, pool), tuple(sorted(size.items())))
            continue
        first, last = layer is weighted[0], layer is weighted[-1]
        out = layer.out_channels or channels
        if layer.kind == "conv":
            input_elements = channels * side * side
            side = (side + 2 * layer.padding - layer.kernel_size) // layer.stride + 1
            inner = channels // layer.groups * layer.kernel_size**2
            positions, groups = side * side, layer.groups
        else:
            input_elements = inner = channels * side * side
            side, positions, groups = 1, 1, 1
        sizes = {"b": micro_batch, "s": positions, "c": inner, "f": out, "d": input_elements, "r": 1}
        local_input = groups % split == 0 and groups > 1
        source = Tensor("cnn/in", "bf" if local_input else "bd", element_bytes, "tensor")
        if local_input:
            sizes["x"] = input_elements
            source = Tensor("cnn/in", "bx", element_bytes, "tensor")
        matmul = Op(f"cnn/{layer.kind}", OpType.MATMUL, "cnn", "tensor", equation="bsc,cf->bsf", saves=(source,), bias=True,
                    needs_input_gradient=not first)  # fmt: skip
        activation = Op("cnn/loss" if last else "cnn/relu", OpType.MEMORY, "cnn", "tensor",
                        kernel="cross_entropy" if last else "activation", forward_bytes=(("bsf", 2 * element_bytes),),
                        backward_bytes=(("bsf", 3 * element_bytes),),
                        saves=(Tensor("cnn/out", "bsf", element_bytes, "tensor"),))  # fmt: skip
        exchange = [] if first or local_input else [Seam("channel_in", ("bd",), "cnn", element_bytes)]
        blocks.append(Block("head" if last else "layer", (*exchange, matmul, activation), tuple(sorted(sizes.items()))))
        channels = out
    return tuple(blocks)
