"""HBM traffic of kernels that add gradients up over micro-batches, and of those that bring them into what is reduced."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from simpar.parallel.job import Job

DDP_COPIES: Final = 2
"""Kernels that read and write each gradient beside torch's DistributedDataParallel, whose buckets lie apart: into its bucket,
divided by the ranks, and back (torch csrc/distributed/c10d/reducer.cpp, mark_variable_ready_dense and copy_bucket_to_grad)."""


def accumulation_bytes(job: Job) -> float:
    """HBM bytes per weight and micro-batch where kernels add gradients up: one of 16 bits and the sum read, the sum written; a cast
    before that reads and writes too."""
    optimizer = job.framework.optimizer
    if job.defers_reduction:
        return 2.0 + 2.0 * job.state_bytes.reduce
    if optimizer.gradient_adds == "autograd":
        return _autograd_bytes(job)
    if not optimizer.gradient_adds or (optimizer.gradient_adds == "pipelines" and job.plan.pp == 1):
        return 0.0
    total = 4.0 if job.gradient_dtype == "fp32" else 2.0
    cast = 2.0 * total if optimizer.gradient_add_casts and total > 2.0 else 0.0
    return 2.0 + cast + 2.0 * total


def _autograd_bytes(job: Job) -> float:
    """The same of torch's AccumulateGrad, which adds in place to the gradient that is there; the first is that gradient."""
    if _reduces_each(job):
        return 0.0
    first = 0 if job.framework.optimizer.persist(job.plan.zero_stage) else 1
    return 3.0 * job.state_bytes.gradient * (job.num_microbatches - first) / job.num_microbatches


def reduce_copy_bytes(job: Job) -> float:
    """HBM bytes per weight and micro-batch of filling what is reduced: once a step where the last alone reduces."""
    data, bucket = job.framework.data, job.state_bytes.bucket
    if job.gathers_by_layer:
        copies = data.fsdp_reduce_copy_bytes
    elif bucket:
        copies = DDP_COPIES * 2.0 * bucket
    else:
        copies = data.reduce_copies * 2.0 * job.state_bytes.reduce if job.mesh.dp * job.mesh.cp > 1 else 0.0
    return copies if _reduces_each(job) else copies / job.num_microbatches


def _reduces_each(job: Job) -> bool:
    """Whether no gradient waits for the next micro-batch's: each one's are reduced to the rank's own part."""
    sharded = job.plan.zero_stage == 2 and job.plan.pp == 1 and job.mesh.dp * job.mesh.cp > 1
    return sharded or (job.gathers_by_layer and not job.defers_reduction)
