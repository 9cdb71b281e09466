"""The kernels of one rank as a list of shapes: what its prediction prices, its calibration measures and its torch model runs.

simpar prices queries, keys and values as one product, and gate and up as one; the rank's model, like torchtitan's, runs them one
by one. `executed` is the only place that knows it: prices are moved to it (`unpacked_s`), calibration measures it (`shapes_of`),
and what torch runs is compared with it in the tests.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, Final

from simpar.costs.pricer import LayoutPricer
from simpar.live.bench_gemm import sizes
from simpar.live.cluster_shapes import shape_of
from simpar.parallel.beside import op_of
from simpar.parallel.blocks import LocalBlock
from simpar.parallel.keys import BlockOp, OptimizerStep, Overlapped
from simpar.parallel.layout import Layout
from simpar.parallel.local_layer import LocalLayer
from simpar.parallel.work import AttentionWork, Gemm, GroupedGemm, LocalOp
from simpar.result.interpret import Priced
from simpar.specs.model import TransformerSpec
from simpar.step import cost_models

Kernel = Gemm | GroupedGemm | AttentionWork
Shape = dict[str, Any]
ADAM_PIECE: Final = 4096
"""Width of the square weights on which the optimizer's update is timed."""


def counted(priced: Priced, role: int) -> list[tuple[object, int]]:
    """(price key, how many ops of the role have it)."""
    program = priced.program
    counts: dict[int, int] = defaultdict(int)
    for index in program.price[program.role == role].tolist():
        counts[index] += 1
    return [(program.price_keys[index], count) for index, count in counts.items()]


def ops_of(priced: Priced, key: object) -> list[tuple[LocalOp, LocalBlock, str]]:
    """Ops inside blocks that a key stands for, with their block and phase (F, B, I, W)."""
    blocks = priced.layout.stage_blocks
    if isinstance(key, BlockOp):
        return [(op_of(priced.layout, key), blocks[key.stage][key.block], key.phase)]
    if isinstance(key, Overlapped):
        forward = [(op, b, "F") for b in blocks[key.forward_stage] for op in b.forward]
        return forward + [(op, b, "B") for b in blocks[key.backward_stage] for op in b.backward]
    return []


def executed(op: LocalOp, block: LocalBlock) -> tuple[Kernel, ...]:
    """The products and attention kernels that the rank's model runs for a priced op; empty for ops that are neither."""
    work, name, degrees = op.work, op.name.partition(".")[0], block.options.degrees
    if isinstance(work, AttentionWork):
        # What visits in a ring has as many heads as the queries.
        visits = degrees.cp > 1 and not work.causal
        return (work._replace(kv_heads=work.heads) if visits else work,)
    if not isinstance(work, Gemm | GroupedGemm):
        return ()
    parts = _parts(block, name) if name.endswith(("/qkv", "/fc1")) else ()
    # Per-op recomputation repeats single products: they are no sum of all parts.
    return tuple(work._replace(n=n) for n in parts) if len(parts) > 1 and sum(parts) == work.n else (work,)


def _parts(block: LocalBlock, name: str) -> tuple[int, ...]:
    """Columns of the matrices that are packed in a product: queries, keys, values; gate and up."""
    local = LocalLayer(block.layer, block.options)
    node = next((n for n in block.layer.nodes if n.name == name), None)
    if node is None:
        return ()
    axis = block.layer.axis[local.axes(node.outputs[0])[-1]]
    return tuple(round(local.shards.local(part, local.layout(node))) for part in axis.parts)


def unpacked_s(priced: Priced, role: int) -> float:
    """Seconds of a step by which the products of a rank take longer one by one than as simpar packs them."""
    pricer, more = _pricer(priced), 0.0
    for key, count in counted(priced, role):
        for op, block, _ in ops_of(priced, key):
            parts = executed(op, block)
            if parts and parts != (op.work,):
                apart = sum(pricer.op_price(op._replace(work=part)).seconds for part in parts)
                more += count * (apart - pricer.op_price(op).seconds)
    return more


def kernel_key(work: Kernel) -> tuple[Any, ...]:
    """("gemm", smaller and larger side, depth) of what is multiplied, ("grouped_gemm", groups, ...) of experts, or attention's."""
    if isinstance(work, AttentionWork):
        pass_ = "attention_backward" if work.backward else "attention"
        return (pass_, work.batch, work.sequence_q, work.sequence_kv, work.heads, work.kv_heads, work.head_dim)
    m = work.m if isinstance(work, Gemm) else round(work.tokens / work.groups)
    rows, columns, depth = sizes((m, work.n, work.k), work.direction)
    kind = ("gemm",) if isinstance(work, Gemm) else ("grouped_gemm", work.groups)
    return (*kind, min(rows, columns), max(rows, columns), depth)


def shapes_of(roles: Sequence[tuple[Priced, int]]) -> list[Shape]:
    """Shapes of all ranks for `simpar calibrate --shapes`, each once, those first that take most of the ranks' time together."""
    seconds: dict[str, float] = defaultdict(float)
    found: dict[str, Shape] = {}
    for priced, role in roles:
        for shape, time_s in _shapes(priced, role):
            found.setdefault(repr(shape), shape)
            seconds[repr(shape)] += time_s
    return [found[name] for name in sorted(found, key=lambda n: -seconds[n])]


def _shapes(priced: Priced, role: int) -> Iterator[tuple[Shape, float]]:
    pricer, gated = _pricer(priced), 2 if _model(priced.layout).gated_mlp else 0
    for key, count in counted(priced, role):
        for op, block, _ in ops_of(priced, key):
            for part in executed(op, block) or (op.work,):
                own = op._replace(work=part)
                for shape in shape_of(own, block, gated=gated, dtype="bf16"):
                    if shape["op"] == "attention":
                        shape["batch_first"] = 1
                    if "rope" in (shape.get("kernel"), shape.get("chain")):
                        shape["dims"]["complex"] = 1
                    yield shape, count * pricer.op_price(own).seconds
        if isinstance(key, OptimizerStep) and key.rank == role:
            yield from _update(priced, key)


def _update(priced: Priced, key: OptimizerStep) -> Iterator[tuple[Shape, float]]:
    layout = priced.layout
    dense, experts = layout.held_parameters(priced.held[key.rank], trainable=True)
    own = dense / layout.shard_ranks + experts / layout.expert_shard_ranks
    moved = own * layout.framework.optimizer.optimizer_traffic_bytes
    dims = {"rows": max(1, round(own / ADAM_PIECE**2)), "width": ADAM_PIECE}
    index = priced.program.price_keys.index(key)
    yield {"op": "memory", "kernel": "adam", "shape": [round(moved)], "dtype": "fp32", "dims": dims}, priced.prices[index].seconds


def _model(layout: Layout) -> TransformerSpec:
    assert isinstance(layout.scenario.model, TransformerSpec)
    return layout.scenario.model


def _pricer(priced: Priced) -> LayoutPricer:
    return LayoutPricer(priced.layout, *cost_models(priced.layout.scenario, priced.layout.hardware))
