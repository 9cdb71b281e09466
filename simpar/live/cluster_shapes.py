"""What a calibration has to measure for a set of layouts: every kernel shape and every collective that their programs price."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from simpar.costs.memory_bound import OPTIMIZER_TIERS, STREAM
from simpar.graph.kernel_types import Kernel
from simpar.graph.types import Elementwise, Loss, Norm
from simpar.live.cluster_copies import context_bytes, sharded_bytes
from simpar.live.cluster_predict import Predicted, optimizer_parameters
from simpar.parallel.beside import op_of
from simpar.parallel.blocks import LocalBlock
from simpar.parallel.keys import BlockOp, Gather, Reduce
from simpar.parallel.local_layer import LocalLayer
from simpar.parallel.traffic import calls_of
from simpar.parallel.work import AttentionWork, Gemm, GroupedGemm, LocalOp, MemoryWork
from simpar.specs.model import TransformerSpec

Shape = dict[str, Any]
REFERENCE_BYTES = (4 * 2**10, 256 * 2**10, 4 * 2**20, 32 * 2**20)
"""Sizes at which every collective in use is measured besides the exact ones."""
ADAM_PIECE = 512
"""The optimizer is timed on square weights of this width, as many as make up the elements."""
NEAR = 1.05
ADDED_WIDTH, ADDED_BYTES = 4096, {"fp32": 12.0, "bf16": 6.0}
"""Width of rows that stand for a sum of gradients, and bytes read and written for each element."""
_ONCE, _TWICE = {"fp32": 4.0, "bf16": 2.0}, {"fp32": 8.0, "bf16": 4.0}
MOVED_BYTES = {
    "copy": _TWICE, "composite": _ONCE, "zero": _ONCE, "row_take": _TWICE, "row_product": {"fp32": 8.0, "bf16": 8.0},
}  # fmt: skip
"""Bytes read and written for each element of a copy, of a sum over rows, of what is set to zero, of rows taken, and of gradients of
rows weighed in fp32."""
CHAINS = ("composite", "loss_chain", STREAM)
"""Classes that several ops run in: their shapes name the op as well (`chain`)."""
_ACTIVATIONS = {"fp32": "fp32"}
"""Precision of training -> dtype of activations; bf16 for all others."""


def shapes_of(predictions: Sequence[Predicted]) -> list[Shape]:
    """Kernel shapes of all layouts, each once, in order of appearance."""
    found: dict[str, Shape] = {}
    for p in predictions:
        for shape in _shapes(p):
            found.setdefault(repr(shape), shape)
    return list(found.values())


def collectives_of(predictions: Sequence[Predicted]) -> list[Shape]:
    """Collectives of all layouts: exact sizes, those within 5 % of each other once, and a few reference sizes of each kind."""
    wanted: dict[tuple[str, int], set[int]] = {}
    for p in predictions:
        layout = p.priced.layout
        for key in p.priced.program.price_keys:
            for call in calls_of(layout, key):
                ranks = 2 if call.name == "send_recv" else layout.placement(call.dimension).size
                if ranks > 1:
                    wanted.setdefault((call.name, ranks), set()).add(round(call.bytes))
        if layout.mesh.world_size > 1:
            wanted.setdefault(("all_reduce", layout.mesh.world_size), set()).add(4)
    found = []
    for (name, ranks), exact in wanted.items():
        most = max(exact)
        kept: list[int] = []
        for size in sorted(exact | {b for b in REFERENCE_BYTES if b <= 2 * most}):
            if not kept or size > NEAR * kept[-1]:
                kept.append(size)
        found += [{"collective": name, "bytes": size, "ranks": ranks} for size in kept]
    return found


def _shapes(p: Predicted) -> Iterator[Shape]:
    layout, dtype = p.priced.layout, _ACTIVATIONS.get(p.priced.layout.training.precision, "bf16")
    for key in p.priced.program.price_keys:
        if isinstance(key, BlockOp):
            block = layout.stage_blocks[key.stage][key.block]
            if beside := round(context_bytes(layout, op_of(layout, key)) / 64) * 64:
                dims = {"rows": 4, "width": beside // 64}
                yield {"op": "memory", "kernel": "permute", "shape": [beside], "dtype": "fp32", "dims": {**dims, "transposed": 1}}
            yield from shape_of(op_of(layout, key), block, gated=_gated(layout.scenario.model), dtype=dtype)
        elif isinstance(key, Gather | Reduce) and layout.plan.zero_stage == 3:
            for call, moved in zip(calls_of(layout, key), sharded_bytes(layout, key), strict=True):
                ranks, reduces = layout.placement(call.dimension).size, int(isinstance(key, Reduce))
                dims = {"elements": round(call.bytes / 4), "ranks": ranks, "reduces": reduces}
                yield {"op": "memory", "kernel": "copy", "shape": [round(moved)], "dtype": "fp32", "dims": dims}
    spec = layout.framework
    for parameters in optimizer_parameters(p.priced):
        pieces = max(1, round(parameters / ADAM_PIECE**2))
        moved = parameters * spec.optimizer.optimizer_traffic_bytes
        dims = {"rows": pieces, "width": ADAM_PIECE}
        assert spec.optimizer.optimizer_kernel in OPTIMIZER_TIERS
        yield {"op": "memory", "kernel": "adam", "shape": [round(moved)], "dtype": "fp32", "dims": dims}


def _gated(model: object) -> int:
    return int(isinstance(model, TransformerSpec) and model.gated_mlp)


def shape_of(op: LocalOp, block: LocalBlock, *, gated: int, dtype: str) -> Iterator[Shape]:
    """The shape of an op; none for collectives.

    Args:
        gated: 1 = gate and up come packed from one product, 2 = from two, 0 = there is no gate.
        dtype: of activations.
    """
    work = op.work
    direction: str
    if isinstance(work, Gemm):
        direction = _direction(work)
        yield {"op": "gemm", "shape": [work.m, work.n, work.k], "dtype": work.dtype, "direction": direction}
    elif isinstance(work, GroupedGemm):
        direction = _direction(work)
        shape = [work.groups, round(work.tokens), work.n, work.k]
        yield {"op": "grouped_gemm", "shape": shape, "dtype": work.dtype, "direction": direction}
    elif isinstance(work, AttentionWork):
        yield {
            "op": "attention", "dtype": work.dtype, "direction": "backward" if work.backward else "forward", "causal": work.causal,
            "shape": [work.batch, work.sequence_q, work.sequence_kv, work.heads, work.kv_heads, work.head_dim],
        }  # fmt: skip
    elif isinstance(work, MemoryWork) and work.bytes_moved:  # None where other kernels do it all (ROW_SUMS).
        # By name and not by phase: recomputation runs forwards in a backward.
        name = op.name.removesuffix(".backward")
        direction = "forward" if name == op.name else "backward"
        chain: Shape = {}
        local = LocalLayer(block.layer, block.options)
        source = next((k for k in local.kernels if k.node.name == name), None)
        if source is None:
            # Gradients added outside their products, those of biases summed over rows, weights and gradients moved to a
            # collective's buffer, rows of a token added up: as many bytes.
            each = MOVED_BYTES.get(work.kernel, ADDED_BYTES)[dtype]
            chain = {"chain": "row_sum"} if work.kernel == "composite" else {}
            width = min(ADDED_WIDTH, max(1, round(work.bytes_moved / each)))
            dims = {"rows": max(1, round(work.bytes_moved / each / width)), "width": width}
        else:
            dims = _dims(source, local, gated=gated)
            chain = {"chain": chain_of(source)} if source.price in CHAINS else {}
        moved = [round(work.bytes_moved)]
        yield {"op": "memory", "kernel": work.kernel, **chain, "shape": moved, "dtype": dtype, "direction": direction, "dims": dims}


def chain_of(kernel: Kernel) -> str:
    """What a memory-bound kernel computes, by the class of one kernel that does it, where its own class tells only how it runs."""
    node = kernel.node
    if kernel.price not in CHAINS:
        return kernel.price
    if isinstance(node, Norm):
        return "norm"
    if isinstance(node, Loss):
        return "cross_entropy"
    return "rope" if isinstance(node, Elementwise) and node.op == "rope" else "activation"


def _direction(work: Gemm | GroupedGemm) -> str:
    return "wgrad_accumulate" if work.direction == "wgrad" and work.accumulate_fp32 else work.direction


def _dims(kernel: Kernel, local: LocalLayer, *, gated: int) -> dict[str, int]:
    """Sizes of a memory-bound op on one rank."""
    layout = local.layout(kernel.node)

    def elements(axes: tuple[str, ...]) -> int:
        return max(1, round(local.shards.local(axes, layout)))

    axes = kernel.forward[0][0] if kernel.forward else local.axes(kernel.node.outputs[0])
    runs = chain_of(kernel)
    if runs == "rope":
        heads = sum(elements(axes[2:3]) for axes, _ in kernel.forward)
        return {"rows": elements(axes[:2]), "heads": heads, "head_dim": local.layer.size("head_dim")}
    if kernel.price == "embedding":
        table = local.axes(kernel.node.parameters[0])
        vocabulary = round(local.shards.extent(table[0], "tensor"))
        return {"rows": elements(axes[:-1]), "width": local.layer.size(axes[-1]), "vocabulary": vocabulary}
    if runs == "gate" or (runs == "activation" and (len(kernel.forward) > 1 or kernel.price in CHAINS)):
        # A chain is a gate's non-linearity and its product, over what is narrow.
        narrow, gated = kernel.forward[-1][0], max(gated, int(kernel.price in CHAINS))
        return {"rows": elements(axes[:-1]), "width": elements(narrow) // elements(axes[:-1]), "gated": gated}
    return {"rows": elements(axes[:-1]), "width": elements(axes) // elements(axes[:-1])}
