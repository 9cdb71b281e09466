"""1F1B: after a warm-up, one forward and one backward in turn, so that few activations are held."""

from __future__ import annotations

from simpar.schedules.action import Action, Phase
from simpar.schedules.family import ScheduleFamily
from simpar.schedules.interleaved import one_forward_one_backward
from simpar.schedules.schedule import Schedule, loop_placement


def _order(num_ranks: int, num_microbatches: int, virtual_stages: int) -> Schedule:
    rows = []
    for rank in range(num_ranks):
        forwards, backwards = ([Action(rank, phase, m) for m in range(num_microbatches)] for phase in (Phase.F, Phase.B))
        rows.append(one_forward_one_backward(forwards, backwards, min(num_microbatches, num_ranks - rank - 1)))
    return Schedule("1f1b", num_ranks, num_microbatches, loop_placement(num_ranks, 1), tuple(rows))


ONE_F_ONE_B = ScheduleFamily(
    name="1f1b",
    summary="one forward, one backward after p - r - 1 warm-up forwards; rank r holds p - r microbatches",
    source="PipeDream-Flush (Narayanan et al. 2021, arXiv 2006.09503), Megatron-LM, torch as executed",
    order=_order,
    virtual_stages=1,
    torch_class="Schedule1F1B",
)
