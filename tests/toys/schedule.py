"""A pipeline schedule: one microbatch through forward and backward before the next one starts."""

from simpar.schedules import SCHEDULES, Action, Phase, Schedule, ScheduleFamily
from simpar.schedules.schedule import loop_placement


def order(num_ranks: int, num_microbatches: int, virtual_stages: int) -> Schedule:
    phases = (Phase.F, Phase.B)
    rows = tuple(tuple(Action(rank, phase, m) for m in range(num_microbatches) for phase in phases) for rank in range(num_ranks))
    return Schedule("toy", num_ranks, num_microbatches, loop_placement(num_ranks, 1), rows)


SCHEDULES.add("toy", ScheduleFamily(name="toy", summary="one at a time", source="tests", order=order, virtual_stages=1))
