"""Low-rank pairs beside frozen products on one rank: their weights, and what they add to a pass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from simpar.graph.pairs import Pairs
from simpar.graph.types import Einsum, Node
from simpar.parallel.work import Direction, Gemm, GroupedGemm, MemoryWork, Work
from simpar.specs.framework_policies import Kernels
from simpar.specs.training import BASE_BYTES, HALVES, TrainingSpec

if TYPE_CHECKING:
    from simpar.parallel.local_layer import LocalLayer


def pairs_of_run(training: TrainingSpec, library: Kernels, *, wide: bool, compiled: bool, whole: bool) -> Pairs | None:
    """How the pairs of a run compute; None where it has none.

    wide: they are of fp32 beside 16-bit weights; whole: where a run has autocast it meets whole weights, not a unit's 16-bit ones.
    Under autocast, which a run of pure bf16 has not, peft's layers on bitsandbytes cast no input (tuners/lora/bnb.py:
    requires_conversion), nor do those beside weights of fp32, whose inputs are. Beside a quantised weight A and B are of fp32
    whatever was asked for (https://github.com/huggingface/peft/issues/2889, 2025-11), and autocast casts both to 16 bits in each
    forward, backward their gradients to fp32.
    A compiler joins the two casts, and draws the dropped elements again from their seed.
    """
    if training.trainable != "lora":
        return None
    autocast = not training.pure_bf16
    joined = autocast and (training.base_weights != "auto" or compiled)
    quantised = training.base_weights in BASE_BYTES and training.precision in HALVES
    narrowed = whole and autocast and not compiled and quantised and library.adapters != "packed"
    return Pairs(
        training.lora_modules, packed=library.adapters == "packed", wide=wide and not joined, autocast=autocast,
        narrowed=narrowed, dropout=training.lora_dropout > 0 and not compiled, dora=training.dora,
    )  # fmt: skip


def pairs_of(local: LocalLayer, node: Node) -> Pairs | None:
    """How the pairs beside `node` compute; None where there are none."""
    pairs = local.options.kernels.pairs
    return pairs if local.options.lora_rank and pairs is not None and pairs.adapted(node) else None


def trained_weights(local: LocalLayer, node: Node) -> float:
    """Trained weights beside `node`: r (k + n), of several pairs r k each, and n magnitudes."""
    if (pairs := pairs_of(local, node)) is None:
        return 0.0
    assert isinstance(node, Einsum)
    whole = local.product(node, "forward")
    groups = whole.groups if isinstance(whole, GroupedGemm) else 1
    magnitudes = whole.n * _share(local, node, pairs) if pairs.dora else 0.0
    return float(groups * (local.options.lora_rank * _width(local, node, pairs) + magnitudes))


def added(local: LocalLayer, node: Node, *, backward: bool) -> Iterator[tuple[str, Work, int]]:
    """(suffix of its name, work, launches) of all that pairs add to a pass of `node`, in order; nothing where it has none."""
    if (pairs := pairs_of(local, node)) is None:
        return
    assert isinstance(node, Einsum)
    count, layout = pairs.of(node), local.layout(node)
    source = count * local.shards.local(local.axes(node.inputs[0]), layout)
    out = _share(local, node, pairs) * local.shards.local(local.axes(node.outputs[0]), layout)
    suffix, implementation = ".backward" if backward else "", local.options.memory_implementation
    if pairs.wide:
        # What is read to fp32, and under autocast back to 16 bits, as both weights are; backward of gradients the other way.
        moved, kernels = (12.0 * source + 6.0 * trained_weights(local, node), 4) if pairs.autocast else (6.0 * source, 1)
        yield f".cast{suffix}", MemoryWork("cast", moved, kernels * count, implementation), kernels * count
    elif pairs.narrowed:
        yield f".cast{suffix}", MemoryWork("cast", 6.0 * trained_weights(local, node), 2 * count, implementation), 2 * count
    if pairs.dropout:
        yield f".dropout{suffix}", MemoryWork("residual", (2 * pairs.element + 1) * source, count, implementation), count
    directions: tuple[Direction, ...] = ("wgrad", "dgrad") if backward else ("forward",)
    for direction in directions:
        yield f".{direction}" if backward else "", _matmul(local, node, pairs, direction), 2 * count
    # One kernel scales, one adds, unless a compiler joins them; a sum of 16 bits and fp32 is fp32, and cast back (and backward).
    scaled = 0.0 if local.options.kernels.library.fused_residual else 4.0
    if pairs.in_fp32:
        moved, kernels = ((2 * scaled + 12.0) * out + 6.0 * source, 4) if backward else ((2 * scaled + 16.0) * out, 3)
    else:
        moved, kernels = scaled * out + 6.0 * (source if backward else out), 2
    yield f".add{suffix}", MemoryWork("residual", moved, kernels * count, implementation), kernels * count
    yield from _magnitudes(local, node, pairs, backward=backward)


def _magnitudes(local: LocalLayer, node: Einsum, pairs: Pairs, *, backward: bool) -> Iterator[tuple[str, Work, int]]:
    """What magnitudes add to a pair's pass.

    Forward: the pair's product of a unit matrix, which is the weights' change; the norms of the changed weights; the results of
    product and pair scaled and summed. Backward of the scaling: no gradient passes through the norms.
    """
    if (moves := pairs.magnitudes) is None:
        return
    count, suffix, implementation = pairs.of(node), ".backward" if backward else "", local.options.memory_implementation
    share = _share(local, node, pairs)
    if pairs.repeats:
        yield f".repeated{suffix}", local.product(node, "dgrad" if backward else "forward"), count
    if not backward:
        change, rows = _matmul(local, node, pairs, "forward"), local.product(node, "forward").k
        if isinstance(change, GroupedGemm):
            yield ".change", change._replace(tokens=change.groups * rows), 2 * count
        else:
            yield ".change", change._replace(m=rows), 2 * count
        each, kernels = moves.norms
        moved = share * local.shards.weights(node) * (each + local.options.dequantised_bytes)
        yield ".norms", MemoryWork("residual", moved, kernels * count, implementation), kernels * count
    if not local.options.kernels.library.fused_residual:
        each, kernels = moves.backward if backward else moves.forward
        moved = each * share * local.shards.local(local.axes(node.outputs[0]), local.layout(node))
        yield f".magnitudes{suffix}", MemoryWork("residual", moved, kernels * count, implementation), kernels * count


def _matmul(local: LocalLayer, node: Einsum, pairs: Pairs, direction: Direction) -> Gemm | GroupedGemm:
    """All low-rank matmuls of `node` as one of their summed width (n + k columns of the rank; k for each pair)."""
    whole, rank, dtype = local.product(node, direction), local.options.lora_rank, "fp32" if pairs.in_fp32 else "bf16"
    width = _width(local, node, pairs)
    if isinstance(whole, GroupedGemm):
        return GroupedGemm(whole.groups, whole.tokens, rank, width, dtype, direction, whole.accumulate_fp32)
    return Gemm(whole.m, rank, width, dtype, direction)


def _width(local: LocalLayer, node: Einsum, pairs: Pairs) -> int:
    whole = local.product(node, "forward")
    return round(whole.n * _share(local, node, pairs)) + pairs.of(node) * whole.k


def _share(local: LocalLayer, node: Einsum, pairs: Pairs) -> float:
    """Share of a product's outputs that have a pair: all, or those of queries and values in linears of their own."""
    if pairs.modules != "qv" or pairs.of(node) == 1:
        return 1.0
    parts = [local.layer.volume(part) for part in local.layer.axis[local.axes(node.outputs[0])[-1]].parts]
    return 1.0 - parts[1] / sum(parts) if len(parts) == 3 else 2.0 / 3.0
