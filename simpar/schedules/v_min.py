"""V-Min: a third of 1F1B's activations at about two thirds of its bubble."""

from __future__ import annotations

from simpar.schedules.building_block import repeat_block
from simpar.schedules.family import ScheduleFamily
from simpar.schedules.schedule import Schedule


def _order(num_ranks: int, num_microbatches: int, virtual_stages: int) -> Schedule:
    return repeat_block("v-min", num_ranks, num_microbatches, slopes=(1, 1, 1, 1))


V_MIN = ScheduleFamily(
    name="v-min",
    summary="two stages per rank in V shape, at most (p + 4) // 3 microbatches held, about 2/3 of 1F1B's bubble",
    source="Qi et al. 2024, arXiv 2405.15362; block and drain are derived here, peaks as published",
    order=_order,
    virtual_stages=2,
    splits_backward=True,
)
