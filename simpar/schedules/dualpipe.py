"""DualPipe: two copies of the model, entered from both ends of the pipeline, with overlapped pairs.

The first half of the microbatches flows from rank 0 to rank p - 1, the second half the other way. Each
direction is a chain of its own: stages 0 to p - 1 lie on ranks 0 to p - 1, stages p to 2p - 1 on ranks p -
1 to 0. Stage s and stage p + s are two copies of the same part of the model (`Schedule.model_stage`) on
opposite ranks, whose gradients must be summed. Seen from either end, ranks 0 to p/2 - 1 and p - 1 to p/2
each run the rows of a DualPipeV.
"""

from __future__ import annotations

from collections.abc import Iterator

from simpar.errors import Violation
from simpar.schedules.dualpipe_v import dual_row
from simpar.schedules.family import ScheduleFamily
from simpar.schedules.order import Chain
from simpar.schedules.schedule import Schedule, v_placement


def _rules(num_ranks: int, num_microbatches: int, virtual_stages: int) -> Iterator[Violation]:
    if num_ranks % 2:
        yield Violation("num_ranks", num_ranks, "must be even", f"use {num_ranks - 1 or 2} or {num_ranks + 1}")
    if num_microbatches % 2:
        rule = "must be even, half for each direction"
        yield Violation("num_microbatches", num_microbatches, rule, f"use {num_microbatches + 1}")
    if num_microbatches < 2 * num_ranks:
        rule = f"must be at least twice the number of pipeline ranks, {2 * num_ranks}"
        yield Violation("num_microbatches", num_microbatches, rule, f"use {2 * num_ranks} or more")


def _order(num_ranks: int, num_microbatches: int, virtual_stages: int) -> Schedule:
    half = num_microbatches // 2
    rows = []
    for rank in range(num_ranks):
        forth, back = (rank, 0), (2 * num_ranks - 1 - rank, half)  # (stage, its first microbatch)
        near, far = (forth, back) if rank < num_ranks // 2 else (back, forth)
        depth = min(rank, num_ranks - 1 - rank)
        rows.append(dual_row(depth, num_ranks // 2, half, near[0], far[0], near[1], far[1]))
    chains = (
        Chain(range(num_ranks), range(half)),
        Chain(range(num_ranks, 2 * num_ranks), range(half, num_microbatches)),
    )
    return Schedule("dualpipe", num_ranks, num_microbatches, v_placement(num_ranks), tuple(rows), chains)


DUALPIPE = ScheduleFamily(
    name="dualpipe",
    summary="microbatches from both ends over two copies of the model, overlapped forward-backward pairs",
    source="DeepSeek-AI 2024, arXiv 2412.19437, section 3.2.1; github.com/deepseek-ai/DualPipe",
    order=_order,
    rules=_rules,
    virtual_stages=1,
    splits_backward=True,
    replicas=2,
)
