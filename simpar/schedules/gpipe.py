"""GPipe: all forwards, then all backwards; and the baseline of its paper: one microbatch at a time, only one rank ever works."""

from __future__ import annotations

from collections.abc import Callable

from simpar.schedules.action import Action, Phase
from simpar.schedules.family import Order, ScheduleFamily
from simpar.schedules.schedule import Schedule, loop_placement


def _sorted_by(name: str, turn: Callable[[Action], tuple[int, ...]]) -> Order:
    """Forwards and backwards of one stage per rank, those with the lowest `turn` first."""

    def order(num_ranks: int, num_microbatches: int, virtual_stages: int) -> Schedule:
        passes = [(phase, m) for phase in (Phase.F, Phase.B) for m in range(num_microbatches)]
        rows = (sorted((Action(rank, phase, m) for phase, m in passes), key=turn) for rank in range(num_ranks))
        return Schedule(name, num_ranks, num_microbatches, loop_placement(num_ranks, virtual_stages), tuple(map(tuple, rows)))

    return order


GPIPE = ScheduleFamily(
    name="gpipe",
    summary="all forwards, then all backwards; holds every microbatch's activations",
    source="Huang et al. 2019, arXiv 1811.06965; backwards in ascending order, as torch ScheduleGPipe",
    order=_sorted_by("gpipe", lambda action: (action.phase is Phase.B, action.microbatch)),
    virtual_stages=1,
    torch_class="ScheduleGPipe",
)
NAIVE = ScheduleFamily(
    name="naive",
    summary="forward and backward of one microbatch after the other, without any overlap between ranks",
    source="the baseline of the GPipe paper (Huang et al. 2019, arXiv 1811.06965, figure 2b)",
    order=_sorted_by("naive", lambda action: (action.microbatch, action.phase is Phase.B)),
    virtual_stages=1,
)
