"""The matrices that an optimizer works on as a whole (Muon, SOAP, Shampoo), and what it keeps beside its moments (Adafactor)."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

from simpar.graph.types import Convolution, Custom, Einsum, Layer, Lookup, Node, View
from simpar.parallel.adapters import trained_weights
from simpar.parallel.blocks import LocalBlock
from simpar.parallel.local_layer import LocalLayer
from simpar.parallel.split_options import SplitOptions
from simpar.specs.optimizers import OptimizerKind

NEWTON_SCHULZ_STEPS: Final = 5
"""Jordan et al. 2024, "Muon"; the default of Megatron-LM (muon_num_ns_steps), DeepSpeed and torch.optim.Muon."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """`count` equal weight matrices of one rank.

    Attributes:
        expert: of a routed expert.
        outside: embedding table or output projection.
        whole: rows and columns of the matrix that it is a part of, where tensor parallelism cuts it.
    """

    rows: int
    columns: int
    count: int = 1
    expert: bool = False
    outside: bool = False
    whole: tuple[int, int] | None = None

    @property
    def joined(self) -> Matrix:
        """The same, not cut."""
        rows, columns = self.whole or (self.rows, self.columns)
        return Matrix(rows, columns, self.count, self.expert, self.outside)

    @property
    def weights(self) -> float:
        """Weights of all of them."""
        return float(self.rows * self.columns * self.count)


@lru_cache(maxsize=4096)
def _matrices(layer: Layer, options: SplitOptions) -> tuple[Matrix, ...]:
    local = LocalLayer(layer, options)
    found: list[Matrix] = []
    for node in (node for node in layer.nodes if node.name not in options.borrowed):
        found += _lora(local, node) if options.lora_rank else _of_node(local, node)
    return tuple(found)


def matrices(blocks: Iterable[LocalBlock]) -> tuple[Matrix, ...]:
    """Trained weight matrices of these blocks on one rank, as tensor and expert parallelism cut them.

    Packed queries, keys and values count as three matrices (Megatron-LM: muon_split_qkv).
    """
    return tuple(matrix for block in blocks if not block.options.frozen for matrix in _matrices(block.layer, block.options))


def _of_node(local: LocalLayer, node: Node) -> list[Matrix]:
    """Tables and output projection are left to Adam (Megatron-LM: is_embedding_or_output_parameter)."""
    expert = local.layout(node) == "expert"

    def size(axes: tuple[str, ...]) -> int:
        return round(local.shards.product(axes, "tensor"))

    def uncut(axes: tuple[str, ...]) -> int:
        return local.layer.volume(axes)

    def made_of(out: tuple[str, ...], inner: tuple[str, ...], count: int = 1) -> Matrix:
        shape, whole = (size(out), size(inner)), (uncut(out), uncut(inner))
        return Matrix(*shape, count, expert, local.is_logits(node), None if whole == shape else whole)

    if isinstance(node, Lookup):
        return [Matrix(size(axes[:1]), size(axes[1:]), outside=True) for axes in map(local.axes, node.parameters)]
    if isinstance(node, Custom | View):  # (copies,) inputs, outputs of a weight beside those that a mixer implies
        shapes = [axes for axes in map(local.axes, node.parameters) if len(axes) > 1]
        return [made_of(axes[-1:], axes[-2:-1], size(axes[:-2])) for axes in shapes]
    if not isinstance(node, Einsum | Convolution) or not node.weight:
        return []
    group, output = local.layer.grouping(node), local.axes(node.outputs[0])
    each = [axis for axis in local.axes(node.weight) if axis != group]
    inner = tuple(axis for axis in each if axis not in output)
    made = tuple(axis for axis in each if axis in output)
    parts = local.layer.axis[made[-1]].parts if made else ()
    if len(parts) == 3:
        return [made_of(part, inner) for part in parts]
    return [made_of(made, inner, size((group,)) if group else 1)]


def _lora(local: LocalLayer, node: Node) -> list[Matrix]:
    trained = trained_weights(local, node)
    rank = local.options.lora_rank
    return [Matrix(rank, round(trained / rank), expert=local.layout(node) == "expert")] if trained else []


def more_moments(kind: OptimizerKind, blocks: Iterable[LocalBlock]) -> tuple[float, float]:
    """Bytes by which the moments of these blocks' (dense, expert) weights exceed `kind.moments` per weight, on one rank before
    they are sharded: of tables and vectors, the rows and columns of a factored moment, and preconditioners of whole matrices."""
    if kind.moments == kind.other_moments and kind.factors is None:
        return 0.0, 0.0
    found = [0.0, 0.0]
    for block in blocks:
        others = [block.dense_parameters, block.expert_parameters]
        if block.options.lora_rank:
            others = [block.lora_parameters - block.lora_experts, block.lora_experts]
        for matrix in matrices([block]):
            if kind.whole and matrix.outside:
                continue
            if kind.factors is not None:
                sides = kind.factors.sides(matrix.joined.rows, matrix.joined.columns)
                found[matrix.expert] += 4.0 * kind.factors.kept * matrix.count * sum(side**2 * many for side, _, many in sides)
            others[matrix.expert] -= matrix.weights
            if kind.factored:
                found[matrix.expert] += 4.0 * matrix.count * (matrix.rows + matrix.columns)
        for expert in (0, 1):
            found[expert] += max(others[expert], 0.0) * (kind.other_moments - kind.moments)
    return found[0], found[1]


def dealt_out(kind: OptimizerKind, found: tuple[Matrix, ...], shards: int) -> tuple[Matrix, ...]:
    """The matrices of the busiest of `shards` ranks when whole matrices are dealt out to them, the largest first to the one with
    the fewest weights (Megatron-LM layer_wise_optimizer.py)."""
    return _dealt_out(kind, found, shards) if shards > 1 else found


@lru_cache(maxsize=512)
def _dealt_out(kind: OptimizerKind, found: tuple[Matrix, ...], shards: int) -> tuple[Matrix, ...]:
    alone = [one for m in found for one in [replace(m, count=1)] * m.count]
    heap = [(0.0, rank) for rank in range(shards)]
    held: list[list[Matrix]] = [[] for _ in range(shards)]
    for matrix in sorted(alone, key=lambda m: -m.weights):
        weights, rank = heapq.heappop(heap)
        held[rank].append(matrix)
        heapq.heappush(heap, (weights + matrix.weights, rank))
    return tuple(max(held, key=lambda own: whole_flops(kind, own)))


def whole_flops(kind: OptimizerKind, found: Iterable[Matrix]) -> float:
    """FLOPs of an update's products of these matrices, and of their preconditioners' decompositions, in a step."""
    if kind.factors is None:
        return newton_schulz_flops(found)
    total, factors = 0.0, kind.factors
    for matrix in found:
        for side, across, many in factors.sides(matrix.rows, matrix.columns):
            each = 2.0 * factors.products * side**2 * across + (2.0 + factors.decomposition) * side**3 / factors.every
            total += matrix.count * many * each
    return total


def newton_schulz_flops(found: Iterable[Matrix]) -> float:
    """FLOPs to orthogonalise these matrices: X X^T, its square, and their sum times X, of a x b with a <= b, in every step."""
    total = 0.0
    for matrix in found:
        a, b = sorted((matrix.rows, matrix.columns))
        total += NEWTON_SCHULZ_STEPS * matrix.count * (4.0 * a * a * b + 2.0 * a**3)
    return total
