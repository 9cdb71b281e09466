"""GPipe: all forwards, then all backwards; the same over several stages per rank (looped breadth-first); and the baseline of its
paper: one microbatch at a time, only one rank ever works.
"""

from __future__ import annotations

from collections.abc import Callable

from simpar.schedules.action import Action, Phase
from simpar.schedules.family import Order, ScheduleFamily
from simpar.schedules.schedule import Schedule, loop_placement


def _sorted_by(name: str, turn: Callable[[Action], tuple[int, ...]]) -> Order:
    """Forwards and backwards of a rank's stages, those with the lowest `turn` first."""

    def order(num_ranks: int, num_microbatches: int, virtual_stages: int) -> Schedule:
        rows = []
        for rank in range(num_ranks):
            stages = range(rank, num_ranks * virtual_stages, num_ranks)
            passes = (Action(s, phase, m) for phase in (Phase.F, Phase.B) for s in stages for m in range(num_microbatches))
            rows.append(tuple(sorted(passes, key=turn)))
        return Schedule(name, num_ranks, num_microbatches, loop_placement(num_ranks, virtual_stages), tuple(rows))

    return order


def _breadth_first(action: Action) -> tuple[int, ...]:
    """All microbatches through a rank's first stage, then its next; backwards the other way round."""
    return (0, action.stage, action.microbatch) if action.phase is Phase.F else (1, -action.stage, -action.microbatch)


GPIPE = ScheduleFamily(
    name="gpipe",
    summary="all forwards, then all backwards; holds every microbatch's activations",
    source="Huang et al. 2019, arXiv 1811.06965; backwards in ascending order, as torch ScheduleGPipe",
    order=_sorted_by("gpipe", lambda action: (action.phase is Phase.B, action.microbatch)),
    virtual_stages=1,
    torch_class="ScheduleGPipe",
)
INTERLEAVED_BFS = ScheduleFamily(
    name="interleaved_bfs",
    summary="GPipe over v stages per rank: all microbatches through one stage, then the next; bubble / v",
    source="Lamy-Poirier 2022, arXiv 2211.05953; torch ScheduleLoopedBFS",
    order=_sorted_by("interleaved_bfs", _breadth_first),
    torch_class="ScheduleLoopedBFS",
)
NAIVE = ScheduleFamily(
    name="naive",
    summary="forward and backward of one microbatch after the other, without any overlap between ranks",
    source="the baseline of the GPipe paper (Huang et al. 2019, arXiv 1811.06965, figure 2b)",
    order=_sorted_by("naive", lambda action: (action.microbatch, action.phase is Phase.B)),
    virtual_stages=1,
)
