"""What waits for what by a framework's choice: sends, launches, the update."""

from __future__ import annotations

from simpar.parallel.layout import Layout
from simpar.schedules import Schedule
from simpar.specs.framework import FrameworkSpec
from simpar.specs.plan import PlanSpec


def p2p_blocks(layout: Layout, schedule: Schedule) -> bool:
    """Whether a send holds the sender's compute stream (batched isend/irecv waited for between steps)."""
    kinds = {
        "zero_bubble": schedule.splits_backward or schedule.replicas > 1,
        "interleaved": len(schedule.stage_to_rank) > schedule.num_ranks,
    }
    return not layout.framework.overlaps_p2p(layout.plan.overlap_p2p, **kinds)


def one_queue(layout: Layout) -> bool:
    """Whether kernels of all streams start in the order of their launch (Kernels.one_queue; not from Blackwell on)."""
    asks = layout.plan.tp > 1 or layout.plan.cp > 1
    return layout.framework.kernels.one_queue and asks and layout.hardware.gpu.architecture in ("volta", "ampere", "ada", "hopper")


def reductions_block(layout: Layout) -> bool:
    """Whether the backward of a fully sharded group waits until the gradients of the group before are reduced.

    XLA makes all-gathers asynchronous on TPUs, reduce-scatters only where the SparseCore takes them, which flags ask for before
    Ironwood and MaxText's recipes do not (benchmarks/xla_flags_library.py: CF_FOR_ALL_GATHER is all that they name).
    """
    return one_queue(layout) or layout.hardware.gpu.architecture == "tpu"


def optimizer_waits(layout: Layout, schedule: Schedule) -> bool:
    """Whether every rank waits for the gradients of all ranks (their global norm) before its update."""
    return update_waits(layout.plan, layout.framework, splits=schedule.splits_backward)


def update_waits(plan: PlanSpec, spec: FrameworkSpec, *, splits: bool) -> bool:
    """The same of any layout of a plan whose schedule runs input and weight gradients apart, or does not."""
    if plan.synchronous_optimizer is not None:
        return plan.synchronous_optimizer
    return not (spec.optimizer.optimizer_post_validation and splits)
