"""Kernels of a scan in chunks as they are executed: what they move, how many there are and how many of them Triton launches."""

from __future__ import annotations

from typing import Final, NamedTuple

from simpar.graph.kernel_types import HALF, Kernel, KernelPlan, Traffic, kept_whole
from simpar.graph.types import Layer, Scan


class Launches(NamedTuple):
    """Kernels of a scan in one direction, and those of them that Triton's launcher starts from Python."""

    kernels: int
    triton: int


LAUNCHES: Final[dict[str, tuple[Launches, Launches]]] = {
    "ssd": (Launches(5, 5), Launches(35, 14)), "diagonal": (Launches(5, 0), Launches(10, 0)),
    **dict.fromkeys(("linear", "delta", "dplr"), (Launches(5, 5), Launches(10, 10))),
}  # fmt: skip
"""Kind of scan -> forward and backward. Mamba 2 (state-spaces/mamba e9594ce, mamba_ssm/ops/triton/ssd_combined.py): cumulative
sums, chunk states, their passing on, C B^T, outputs. Backward the first four again, gradients of states, their passing back, dx,
dB, dC, dCB, two products of it, decays and their sums in Triton; the convolution again (MambaSplitConv1dScanCombinedFn, called by
Megatron's mixer and transformers) and 20 of torch's: sums over splits, clones, zeros, sums of decays.
Linear attention's are rough."""

STATES: Final = (12.0, 34.0)
"""Bytes per element of chunk states, forward and backward: fp32 written and read, 16 bits written and read; backward fp32 from
kernel to kernel (written, read, written), their gradients too (written), both read and cast on the way back, dstates read by dx and
dB, states by dC."""
SCORES: Final = (8.0, 24.0)
"""Of C B^T in fp32, by group: written and read; again with two readers, its gradient with two."""
STEPS: Final = (26.0, 146.0)
"""Of a head's step and decay, nearly all in fp32; backward 60 of them in torch's own sums."""
MIXED: Final = (4.0, 16.0)
"""Of inputs, B and C: two readers; five and a gradient, the convolution made again."""
OUT: Final = (2.0, 10.0)
"""Of the output: written; its gradient read by five kernels."""


def scan(layer: Layer, node: Scan, plan: KernelPlan) -> Kernel:
    """Inputs and output pass once, twice in the backward, which makes states again; a scan of Mamba 2 moves what its kernels do.

    What the kernel keeps of its inputs is the node's.
    """
    keeps = tuple(kept_whole(layer, name) for name in node.saved or node.inputs)
    if node.kind == "ssd":
        forward, backward = (_ssd(layer, node, direction) for direction in (0, 1))
    else:
        forward = tuple((layer.tensor[name].axes, HALF) for name in (*node.inputs, *node.outputs))
        backward = tuple((axes, 2 * each) for axes, each in forward)
    first, second = (each.kernels for each in LAUNCHES[node.kind])
    return Kernel(node, "scan", forward, backward, first, keeps, backward_launches=second)


def _ssd(layer: Layer, node: Scan, direction: int) -> Traffic:
    token = (node.batch, node.sequence)
    return (
        (layer.tensor[node.inputs[0]].axes, MIXED[direction]),
        (layer.tensor[node.outputs[0]].axes, OUT[direction]),
        ((*token, node.heads), STEPS[direction]),
        ((*token, node.heads, node.key_dim, node.value_dim), STATES[direction] / node.chunk),
        ((*token, node.groups or node.heads), SCORES[direction] * node.chunk),
    )
