"""What a rank's device holds that is not the model's: the context and NCCL outside the allocator, matmul workspaces inside it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from simpar.specs.framework import FrameworkSpec
from simpar.topology.placement import GroupPlacement

_WITHOUT_CUDA: Final = ("cpu", "tpu")
"""Architectures without a CUDA context, NCCL and cuBLAS; what AMD's runtime takes is assumed to be the same (no source)."""
_ALL_TO_ALL_RANKS: Final = 8
"""Most ranks of a group inside one NVLink domain that has all channels with every peer; measured on 8. With ranks outside of it
NCCL uses the fewest channels of any pair, one or two (ncclTopoComputeP2pChannels), too few to count."""
_Named = tuple[tuple[str, float], ...]


def outside_bytes(framework: FrameworkSpec, architecture: str, groups: Mapping[str, GroupPlacement]) -> _Named:
    """(what, bytes) outside the allocator: the context, and the communicators of a rank.

    Args:
        groups: dimension of the layout (tp, cp, pp, dp, ep) -> where a group of it sits.
    """
    if architecture in _WITHOUT_CUDA:
        return (("context", 0.0), ("nccl", 0.0))
    sizes = [group.size for group in groups.values() if group.size > 1]
    buffers = [framework.nccl_pair_bytes if size == 2 else framework.nccl_group_bytes for size in sizes]
    extra = framework.communicators * framework.nccl_group_bytes + framework.pair_communicators * framework.nccl_pair_bytes
    experts = groups["ep"]
    near = experts.num_domains == 1 and experts.size <= _ALL_TO_ALL_RANKS
    peers = (experts.size - 1) * framework.nccl_peer_bytes if near else 0.0
    return (("context", framework.context_bytes), ("nccl", sum(buffers) + (extra if buffers else 0.0) + peers))


_HOST_THREADS: Final = 2
"""That multiply, each with a workspace of its own: the caller's and autograd's (torch CublasHandlePool.cpp)."""


def workspaces(framework: FrameworkSpec, architecture: str) -> tuple[float, ...]:
    """Bytes of each workspace of matrix products inside the allocator."""
    if architecture in _WITHOUT_CUDA:
        return ()
    blas, engine = dict(framework.blas_workspace_bytes), dict(framework.engine_workspace_bytes)
    each = [blas.get(architecture, blas.get("", 0.0))] * _HOST_THREADS + [engine.get(architecture, engine.get("", 0.0))]
    return tuple(size for size in each if size)
