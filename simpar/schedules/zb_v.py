"""ZB-V: two stages per rank, placed down and back up the ranks; no bubble inside the pipeline at 1F1B's memory.

The last stage lies on the first rank, so a microbatch's backward starts where its forward ended, and every
rank has work as soon as the first gradient appears.
"""

from __future__ import annotations

from simpar.schedules.action import Action, Phase
from simpar.schedules.family import ScheduleFamily
from simpar.schedules.schedule import Schedule, v_placement

_PHASES = {str(phase): phase for phase in (Phase.F, Phase.I, Phase.W)}


class _Rank:
    """A rank's row as it grows: the next microbatch of each (stage, phase) is one more than the last."""

    def __init__(self, down: int, up: int) -> None:
        self.stages = (down, up)
        self.row: list[Action] = []
        self.count = [dict.fromkeys(_PHASES, 0) for _ in self.stages]

    def run(self, which: int, phases: str) -> None:
        """Add these phases of the rank's stage `which` (0 on the way down, 1 on the way up)."""
        stage, count = self.stages[which], self.count[which]
        for phase in phases:
            self.row.append(Action(stage, _PHASES[phase], count[phase]))
            count[phase] += 1

    def weights(self, which: int) -> None:
        """Add the weight gradients that are left over."""
        self.run(which, "W" * (self.count[which]["I"] - self.count[which]["W"]))


def _order(num_ranks: int, num_microbatches: int, virtual_stages: int) -> Schedule:
    # Fewer microbatches than fill the pipeline run the same order, with the missing ones left out.
    filled = max(2 * num_ranks - 1, num_microbatches)
    rows = tuple(
        tuple([action for action in _row(rank, num_ranks, filled) if action[2] < num_microbatches]) for rank in range(num_ranks)
    )
    return Schedule("zb-v", num_ranks, num_microbatches, v_placement(num_ranks), rows)


def _row(rank: int, num_ranks: int, num_microbatches: int) -> list[Action]:
    own = _Rank(rank, 2 * num_ranks - 1 - rank)
    after = num_ranks - rank  # this rank and those after it
    # Fill: forwards down, then both ways, then the way up with its first gradients.
    for _ in range(2 * after - 1):
        own.run(0, "F")
    for _ in range(rank):
        own.run(1, "F")
        own.run(0, "F")
    for _ in range(after):
        own.run(1, "FIW")
    # Steady: one microbatch down and one up in turn.
    down = 2 * after - 1 + rank
    for m in range(down, num_microbatches + after - 1):
        own.run(0, "FIW" if m < num_microbatches else "IW")
        own.run(1, "FIW")
    # Drain: gradients of both ways without weights, then the way down with its own, then the weights left
    # over.
    for _ in range(rank):
        own.run(0, "I")
        own.run(1, "I")
    for _ in range(after):
        own.run(0, "IW")
    own.weights(1)
    own.weights(0)
    return own.row


ZB_V = ScheduleFamily(
    name="zb-v",
    summary="two stages per rank in V shape, split backwards: no inner bubble if F = I = W, 1F1B's memory",
    source="Qi et al. 2023, arXiv 2401.10241, section 6; torch ScheduleZBVZeroBubble",
    order=_order,
    virtual_stages=2,
    splits_backward=True,
    torch_class="ScheduleZBVZeroBubble",
)
