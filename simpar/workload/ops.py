"""Work as data: ops over named axes, seams where a parallel dimension may put a collective, blocks of both.

Axis letters (one meaning everywhere):

    b sequences in a micro-batch    s query positions      t key positions        d hidden size
    n query heads                   k key/value heads      h query/key head dim   j value head dim
    p packed q, k, v width          f feed-forward width   u fc1 output width     v vocabulary
    e experts                       y token-expert rows    q query latent         l key/value latent
    z up-projected query width      w up-projected kv width   c input channels    o other width

A *region* says how activations are laid out where an op stands: ``residual`` (between the tensor-parallel parts; split
along the sequence under sequence parallelism), ``tensor`` (heads, widths and vocabulary split), ``expert`` (after dispatch).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import prod
from typing import Literal

Region = Literal["residual", "tensor", "expert"]
Axes = tuple[tuple[str, int], ...]
"""Axis letter -> size, as sorted pairs so that it hashes."""


class OpType(StrEnum):
    """How an op is priced."""

    MATMUL = "matmul"
    GROUPED_MATMUL = "grouped_matmul"
    ATTENTION = "attention"
    MEMORY = "memory"


@dataclass(frozen=True, slots=True)
class Tensor:
    """A named activation: `axes` letters, bytes per element, and the region it lives in."""

    name: str
    axes: str
    element_bytes: float
    region: Region


@dataclass(frozen=True, slots=True)
class Op:
    """One forward op; its backward follows from it.

    Attributes:
        name: path within the block, "attention/qkv".
        type: how it is priced.
        module: the recomputation unit it belongs to ("attention", "core_attn", "layernorm", "mlp", "moe_act", ...).
        region: layout of its activations.
        equation: matmuls: "bsd,dp->bsp"; the second operand is the weight.
        kernel: memory-bound class ("norm", "activation", "rope", "residual", "cross_entropy", "embedding", "permute").
        forward_bytes, backward_bytes: memory-bound traffic as (axes, bytes per element) pairs, summed.
        saves: tensors kept for the backward; a tensor of the same name is kept once per block.
        bias: the matmul has a bias of its output width.
        parameters: weights of a memory-bound op (norms, embeddings), as axes; () = none.
        causal: attention only.
        needs_input_gradient: False for the first op of the network.
        kernels: launches in forward (backward: twice as many).
    """

    name: str
    type: OpType
    module: str
    region: Region
    equation: str = ""
    kernel: str = ""
    forward_bytes: tuple[tuple[str, float], ...] = ()
    backward_bytes: tuple[tuple[str, float], ...] = ()
    saves: tuple[Tensor, ...] = ()
    bias: bool = False
    parameters: tuple[str, ...] = ()
    causal: bool = True
    needs_input_gradient: bool = True
    kernels: int = 1

    @property
    def weight_axes(self) -> str:
        """Letters of the weight of a matmul, "" for other ops."""
        return self.equation.split(",")[1].split("->")[0] if self.equation else ""

    @property
    def output_axes(self) -> str:
        """Letters of a matmul's output."""
        return self.equation.split("->")[1]

    @property
    def input_axes(self) -> str:
        """Letters of a matmul's input."""
        return self.equation.split(",")[0]


@dataclass(frozen=True, slots=True)
class Seam:
    """A place where a dimension may need a collective on an activation with these axes."""

    name: str
    axes: tuple[str, ...]
    module: str
    element_bytes: float = 2.0


@dataclass(frozen=True, slots=True)
class Block:
    """A run of ops that is scheduled as one layer: embedding, transformer layer, head."""

    name: str
    items: tuple[Op | Seam, ...]
    sizes: Axes

    @property
    def size(self) -> dict[str, int]:
        """Axis sizes as a mapping."""
        return dict(self.sizes)

    @property
    def ops(self) -> tuple[Op, ...]:
        """The ops without the seams."""
        return tuple(item for item in self.items if isinstance(item, Op))


def volume(axes: str, size: dict[str, int]) -> int:
    """Elements of a tensor with these axes."""
    return prod(size[a] for a in axes)


def matmul_flops(op: Op, size: dict[str, int]) -> int:
    """2 x the product of every axis in the equation (one multiply and one add per term)."""
    return 2 * volume("".join(sorted(set(op.equation) - set(",->"))), size)


def attention_flops(size: dict[str, int], *, causal: bool) -> float:
    """QK^T and PV of one micro-batch, all heads; causal counts the lower triangle only."""
    full = 2.0 * size["b"] * size["n"] * size["s"] * size["t"] * (size["h"] + size["j"])
    return full / 2 if causal else full


def op_parameters(op: Op, size: dict[str, int]) -> int:
    """Weights the op holds."""
    count = sum(volume(axes, size) for axes in op.parameters)
    if op.equation:
        count += volume(op.weight_axes, size)
        if op.bias:
            groups = "".join(a for a in op.weight_axes if a == "e")
            out = [a for a in op.output_axes if a in op.weight_axes and a != "e"]
            count += volume(groups + "".join(out), size)
    return count


def op_flops(op: Op, size: dict[str, int]) -> float:
    """Forward FLOPs of one micro-batch (memory-bound ops count none, as model FLOPs do)."""
    if op.type in (OpType.MATMUL, OpType.GROUPED_MATMUL):
        if op.type is OpType.GROUPED_MATMUL:
            # every row meets one expert: the expert axis does not multiply the work
            return 2.0 * volume("".join(sorted(set(op.equation) - set(",->e"))), size)
        return float(matmul_flops(op, size))
    if op.type is OpType.ATTENTION:
        return attention_flops(size, causal=op.causal)
    return 0.0
