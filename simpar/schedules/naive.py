"""Naive model parallelism: one microbatch at a time, so that only one rank ever works."""

from __future__ import annotations

from simpar.schedules.action import Action, Phase
from simpar.schedules.family import ScheduleFamily
from simpar.schedules.schedule import Schedule, loop_placement


def _order(num_ranks: int, num_microbatches: int, virtual_stages: int) -> Schedule:
    rows = tuple(
        tuple(Action(rank, phase, m) for m in range(num_microbatches) for phase in (Phase.F, Phase.B)) for rank in range(num_ranks)
    )
    return Schedule("naive", num_ranks, num_microbatches, loop_placement(num_ranks, 1), rows)


NAIVE = ScheduleFamily(
    name="naive",
    summary="forward and backward of one microbatch after the other, without any overlap between ranks",
    source="the baseline of the GPipe paper (Huang et al. 2019, arXiv 1811.06965, figure 2b)",
    order=_order,
    virtual_stages=1,
)
