"""What a rank's device holds that is not the model's: the context and NCCL outside the allocator, matmul workspaces inside it."""

from __future__ import annotations

from typing import Final

from simpar.parallel.layout import Layout
from simpar.specs.framework import FrameworkSpec

_WITHOUT_CUDA: Final = ("cpu", "tpu")
"""Architectures without a CUDA context, NCCL and cuBLAS; what AMD's runtime takes is assumed to be the same (no source)."""
_ALL_TO_ALL_RANKS: Final = 8
"""Most ranks of a group inside one NVLink domain that has all channels with every peer; measured on 8. With ranks outside of it
NCCL uses the fewest channels of any pair, one or two (ncclTopoComputeP2pChannels), too few to count."""
_HOST_THREADS: Final = 2
"""That multiply, each with a workspace of its own: the caller's and autograd's (torch CublasHandlePool.cpp)."""


def outside_bytes(layout: Layout) -> tuple[tuple[str, float], ...]:
    """(what, bytes) outside the allocator of a rank: the context, its communicators, and what the cluster's own runs showed beside
    every term."""
    spec = layout.framework
    learned = (("site", layout.site.peak_memory_bytes),) if layout.site is not None and layout.site.peak_memory_bytes else ()
    if layout.hardware.gpu.architecture in _WITHOUT_CUDA:
        return (("context", 0.0), ("nccl", 0.0), *learned)
    sizes = [size for d in ("tp", "cp", "pp", "dp", "ep") if (size := layout.placement(d).size) > 1]
    buffers = sum(spec.allocator.nccl_pair_bytes if size == 2 else spec.allocator.nccl_group_bytes for size in sizes)
    if sizes:
        buffers += (
            spec.allocator.communicators * spec.allocator.nccl_group_bytes
            + spec.allocator.pair_communicators * spec.allocator.nccl_pair_bytes
        )
    experts = layout.placement("ep")
    if experts.num_domains == 1 and experts.size <= _ALL_TO_ALL_RANKS:
        buffers += (experts.size - 1) * spec.allocator.nccl_peer_bytes
    return (("context", spec.allocator.context_bytes), ("nccl", buffers), *learned)


def workspaces(framework: FrameworkSpec, architecture: str) -> tuple[float, ...]:
    """Bytes of each workspace of matrix products inside the allocator."""
    if architecture in _WITHOUT_CUDA:
        return ()
    blas, engine = dict(framework.allocator.blas_workspace_bytes), dict(framework.allocator.engine_workspace_bytes)
    each = [blas.get(architecture, blas.get("", 0.0))] * _HOST_THREADS + [engine.get(architecture, engine.get("", 0.0))]
    return tuple(size for size in each if size)
