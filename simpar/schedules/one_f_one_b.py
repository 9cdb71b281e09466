"""1F1B: after a warm-up, one forward and one backward in turn, so that few activations are held."""

from __future__ import annotations

from simpar.schedules.action import Action, Phase
from simpar.schedules.family import ScheduleFamily
from simpar.schedules.schedule import Schedule, loop_placement


def _order(num_ranks: int, num_microbatches: int, virtual_stages: int) -> Schedule:
    rows = tuple(_row(rank, num_ranks, num_microbatches) for rank in range(num_ranks))
    return Schedule("1f1b", num_ranks, num_microbatches, loop_placement(num_ranks, 1), rows)


def _row(rank: int, num_ranks: int, num_microbatches: int) -> tuple[Action, ...]:
    warmup = min(num_microbatches, num_ranks - rank - 1)
    row = [Action(rank, Phase.F, m) for m in range(warmup)]
    for m in range(num_microbatches):
        if m + warmup < num_microbatches:
            row.append(Action(rank, Phase.F, m + warmup))
        row.append(Action(rank, Phase.B, m))
    return tuple(row)


ONE_F_ONE_B = ScheduleFamily(
    name="1f1b",
    summary="one forward, one backward after p - r - 1 warm-up forwards; rank r holds p - r microbatches",
    source="PipeDream-Flush (Narayanan et al. 2021, arXiv 2006.09503), Megatron-LM, torch as executed",
    order=_order,
    virtual_stages=1,
    torch_class="Schedule1F1B",
)
