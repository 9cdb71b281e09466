"""ZB-H1, also called ZB1P: zero bubble at 1F1B's memory. Interleaved zero bubble with one stage per rank."""

from __future__ import annotations

from simpar.schedules.family import ScheduleFamily
from simpar.schedules.interleaved_zb import one_stage_each
from simpar.schedules.schedule import Schedule


def _order(num_ranks: int, num_microbatches: int, virtual_stages: int) -> Schedule:
    return one_stage_each("zb-h1", num_ranks, num_microbatches, apart=1)


ZB_H1 = ScheduleFamily(
    name="zb-h1",
    summary="1F1B with split backwards: bubble (p-1)(F+B-2W), p microbatches held on every rank",
    source="Qi et al. 2023, arXiv 2401.10241, section 2.1; torch ScheduleInterleavedZeroBubble with one stage",
    order=_order,
    virtual_stages=1,
    splits_backward=True,
    torch_class="ScheduleInterleavedZeroBubble",
)
