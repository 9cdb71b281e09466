"""Looped breadth-first: every microbatch passes a rank's first stage before any passes its second."""

from __future__ import annotations

from simpar.schedules.action import Action, Phase
from simpar.schedules.family import ScheduleFamily
from simpar.schedules.schedule import Schedule, loop_placement


def _order(num_ranks: int, num_microbatches: int, virtual_stages: int) -> Schedule:
    microbatches = range(num_microbatches)
    rows = []
    for rank in range(num_ranks):
        stages = range(rank, num_ranks * virtual_stages, num_ranks)
        row = [Action(stage, Phase.F, m) for stage in stages for m in microbatches]
        row += [Action(stage, Phase.B, m) for stage in stages[::-1] for m in reversed(microbatches)]
        rows.append(tuple(row))
    placement = loop_placement(num_ranks, virtual_stages)
    return Schedule("interleaved_bfs", num_ranks, num_microbatches, placement, tuple(rows))


INTERLEAVED_BFS = ScheduleFamily(
    name="interleaved_bfs",
    summary="GPipe over v stages per rank: all microbatches through one stage, then the next; bubble / v",
    source="Lamy-Poirier 2022, arXiv 2211.05953; torch ScheduleLoopedBFS",
    order=_order,
    torch_class="ScheduleLoopedBFS",
)
