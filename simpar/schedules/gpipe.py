"""GPipe: all forwards, then all backwards."""

from __future__ import annotations

from simpar.schedules.action import Action, Phase
from simpar.schedules.family import ScheduleFamily
from simpar.schedules.schedule import Schedule, loop_placement


def _order(num_ranks: int, num_microbatches: int, virtual_stages: int) -> Schedule:
    rows = tuple(
        tuple(Action(rank, phase, m) for phase in (Phase.F, Phase.B) for m in range(num_microbatches)) for rank in range(num_ranks)
    )
    return Schedule("gpipe", num_ranks, num_microbatches, loop_placement(num_ranks, 1), rows)


GPIPE = ScheduleFamily(
    name="gpipe",
    summary="all forwards, then all backwards; holds every microbatch's activations",
    source="Huang et al. 2019, arXiv 1811.06965; backwards in ascending order, as torch ScheduleGPipe",
    order=_order,
    virtual_stages=1,
    torch_class="ScheduleGPipe",
)
