"""The policy of a framework's device memory beside the model's; see framework_policies.py."""

from __future__ import annotations

from dataclasses import dataclass

from simpar.specs.framework_policies import Policy


@dataclass(frozen=True, slots=True)
class Allocator(Policy):
    """Device memory beside the model's: contexts, communicators and workspaces, and how the allocator rounds.

    Attributes:
        context_bytes: CUDA context with the kernels loaded.
        nccl_pair_bytes: buffers of one communicator of two ranks.
        nccl_group_bytes: the same of more ranks.
        nccl_peer_bytes: buffers of an all-to-all inside one NVLink domain for each other rank.
        communicators, pair_communicators: more in use than one per dimension of the layout, of any number of ranks and of two.
        blas_workspace_bytes: (architecture, bytes) of one cuBLAS workspace; an architecture that is missing takes the one of "".
        engine_workspace_bytes: the same of the workspace of TransformerEngine's matmuls.
        contiguous_buffers: weights and gradients are copied into one buffer each at the start (Megatron's DDP).
        fragmentation: reserved over what the allocator reserves for the replayed requests: what the replay does not see (side
            streams, workspaces); the default is the median over the ranks of SimuMax's measured B200 runs (v1.2).
        expandable_segments: the setting of the launch scripts; _one_node: of the script of a single node, not of several.
        pending_collectives: buffers of tensor-parallel collectives that are freed but not yet there for others, as the host runs
            ahead (torch before 2.8 records NCCL's stream on them); they count as reserved, not as allocated.
        planned: the compiler gives every buffer of a step its place in one allocation before it runs, so that nothing is cached.
    """

    context_bytes: float = 0.0
    nccl_pair_bytes: float = 0.0
    nccl_group_bytes: float = 0.0
    nccl_peer_bytes: float = 0.0
    communicators: int = 0
    pair_communicators: int = 0
    blas_workspace_bytes: tuple[tuple[str, float], ...] = ()
    engine_workspace_bytes: tuple[tuple[str, float], ...] = ()
    contiguous_buffers: bool = True
    fragmentation: float = 1.025
    expandable_segments: bool = False
    expandable_segments_one_node: bool = False
    pending_collectives: int = 0
    planned: bool = False
