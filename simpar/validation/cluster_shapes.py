"""What a calibration has to measure for a set of layouts: every kernel shape and every collective that their programs price."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from simpar.costs.memory_bound import OPTIMIZER_TIERS
from simpar.parallel.keys import BlockOp, Gather, Reduce
from simpar.parallel.local_shapes import LocalShapes
from simpar.parallel.split import LocalBlock
from simpar.parallel.work import AttentionWork, Gemm, GroupedGemm, LocalOp, MemoryWork
from simpar.specs.model import TransformerSpec
from simpar.validation.cluster_predict import Predicted, calls_of, context_bytes, op_of, optimizer_parameters, sharded_bytes
from simpar.workload.ops import Op

Shape = dict[str, Any]
REFERENCE_BYTES = (4 * 2**10, 256 * 2**10, 4 * 2**20, 32 * 2**20)
"""Sizes at which every collective in use is measured besides the exact ones."""
ADAM_PIECE = 512
"""The optimizer is timed on square weights of this width, as many as make up the elements."""
NEAR = 1.05


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
    layout = p.priced.layout
    for key in p.priced.program.price_keys:
        if isinstance(key, BlockOp):
            block = layout.stage_blocks[key.stage][key.block]
            if beside := round(context_bytes(layout, op_of(layout, key)) / 64) * 64:
                dims = {"rows": 4, "width": beside // 64}
                yield {"op": "memory", "kernel": "permute", "shape": [beside], "dtype": "fp32", "dims": {**dims, "transposed": 1}}
            yield from _shape(op_of(layout, key), block, backward=key.phase != "F", gated=_gated(layout.scenario.model))
        elif isinstance(key, Gather | Reduce) and layout.plan.zero_stage == 3:
            for call, moved in zip(calls_of(layout, key), sharded_bytes(layout, key), strict=True):
                ranks, reduces = layout.placement(call.dimension).size, int(isinstance(key, Reduce))
                dims = {"elements": round(call.bytes / 4), "ranks": ranks, "reduces": reduces}
                yield {"op": "memory", "kernel": "copy", "shape": [round(moved)], "dtype": "fp32", "dims": dims}
    spec = layout.framework
    for parameters in optimizer_parameters(p.priced):
        pieces = max(1, round(parameters / ADAM_PIECE**2))
        moved = parameters * spec.optimizer_traffic_bytes
        dims = {"rows": pieces, "width": ADAM_PIECE}
        assert spec.optimizer_kernel in OPTIMIZER_TIERS
        yield {"op": "memory", "kernel": "adam", "shape": [round(moved)], "dtype": "fp32", "dims": dims}


def _gated(model: object) -> bool:
    return isinstance(model, TransformerSpec) and model.gated_mlp


def _shape(op: LocalOp, block: LocalBlock, *, backward: bool, gated: bool) -> Iterator[Shape]:
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
    elif isinstance(work, MemoryWork):
        name = op.name.removesuffix(".backward")
        source = next(o for o in block.block.ops if o.name == name)
        dims = _dims(source, LocalShapes(block.block, block.options), gated=gated)
        direction = "backward" if backward else "forward"
        moved = [round(work.bytes_moved)]
        yield {"op": "memory", "kernel": work.kernel, "shape": moved, "dtype": "fp32", "direction": direction, "dims": dims}


def _direction(work: Gemm | GroupedGemm) -> str:
    return "wgrad_accumulate" if work.direction == "wgrad" and work.accumulate_fp32 else work.direction


def _dims(op: Op, shapes: LocalShapes, *, gated: bool) -> dict[str, int]:
    """Sizes of a memory-bound op on one rank."""

    def local(axes: str) -> int:
        return max(1, round(shapes.local(axes, op.region)))

    axes = op.forward_bytes[0][0] if op.forward_bytes else "bsd"
    if op.kernel == "rope":
        heads = sum(local(axes[2]) for axes, _ in op.forward_bytes)
        return {"rows": local("bs"), "heads": heads, "head_dim": shapes.size["h"]}
    if op.kernel == "embedding":
        rows = local("bs") * (shapes.degrees.tp if shapes.degrees.sequence_parallel and op.region == "residual" else 1)
        vocabulary = round(shapes._axis("v", shapes.degrees.weight_divisor("v", op.region)))
        return {"rows": rows, "width": shapes.size["d"], "vocabulary": vocabulary}
    if op.kernel == "activation" and axes.endswith(("u", "g")):
        width = axes[:-1] + {"u": "f", "g": "x"}[axes[-1]]
        return {"rows": local(axes[:-1]), "width": local(width) // local(axes[:-1]), "gated": int(gated)}
    return {"rows": local(axes[:-1]), "width": local(axes) // local(axes[:-1])}
