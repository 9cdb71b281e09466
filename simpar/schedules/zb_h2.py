"""ZB-H2: no bubble inside the pipeline, for about twice 1F1B's memory.

Rank r warms up with 2(p - r) - 1 forwards, as many as fit into the time until the first gradient reaches
it. To end without a gap as well, the last ranks must have given their gradients away early: rank r holds
back 2r weight gradients, which it runs at the end. With F = I = W the ranks' rows form a parallelogram
without a hole.
"""

from __future__ import annotations

from simpar.schedules.family import ScheduleFamily
from simpar.schedules.interleaved_zb import one_stage_each
from simpar.schedules.schedule import Schedule


def _order(num_ranks: int, num_microbatches: int, virtual_stages: int) -> Schedule:
    return one_stage_each("zb-h2", num_ranks, num_microbatches, apart=2)


ZB_H2 = ScheduleFamily(
    name="zb-h2",
    summary="split backwards and a longer warm-up: no bubble if F = I = W; 2p - 1 microbatches on every rank",
    source="Qi et al. 2023, arXiv 2401.10241, section 2.2; the order is derived here",
    order=_order,
    virtual_stages=1,
    splits_backward=True,
)
