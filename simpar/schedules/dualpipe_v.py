"""DualPipeV, and the order it shares with DualPipe: forwards and backwards of two directions overlap in pairs.

Both run the same rows. In DualPipeV the two directions are the way down and the way up of one model placed
as a V; in DualPipe they are two copies of the model, entered from both ends of the pipeline (see
`dualpipe`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from simpar.errors import Violation
from simpar.schedules.action import Action, Phase, overlapped
from simpar.schedules.family import ScheduleFamily
from simpar.schedules.schedule import Schedule, v_placement


class _Rank:
    """A rank's row as it grows. `near` is the stage that the rank enters first, `far` the one it enters second."""

    def __init__(self, near: int, far: int, first_near: int, first_far: int) -> None:
        self.row: list[Action] = []
        self.next_forward = {near: first_near, far: first_far}
        self.next_backward = {near: first_near, far: first_far}
        self.weights_due: deque[Action] = deque()

    def take_forward(self, stage: int) -> Action:
        self.next_forward[stage] += 1
        return Action(stage, Phase.F, self.next_forward[stage] - 1)

    def take_backward(self, stage: int, *, split: bool = False) -> Action:
        self.next_backward[stage] += 1
        microbatch = self.next_backward[stage] - 1
        if split:
            self.weights_due.append(Action(stage, Phase.W, microbatch))
        return Action(stage, Phase.I if split else Phase.B, microbatch)

    def forward(self, stage: int) -> None:
        self.row.append(self.take_forward(stage))

    def backward(self, stage: int, *, split: bool = False) -> None:
        self.row.append(self.take_backward(stage, split=split))

    def weight(self) -> None:
        """The longest-waiting weight gradient, if any waits."""
        if self.weights_due:
            self.row.append(self.weights_due.popleft())

    def pair(self, forward: int, backward: int) -> None:
        self.row.append(overlapped(self.take_forward(forward), self.take_backward(backward)))


def dual_row(
    depth: int, depths: int, microbatches: int, near: int, far: int, first_near: int = 0, first_far: int = 0
) -> tuple[Action, ...]:
    """The row of the rank at `depth` of `depths` on a V, with `microbatches` in each direction.

    Args:
        depth: 0 at the open end of the V, `depths` - 1 where its arms meet.
        depths: ranks along one arm.
        microbatches: how many pass each of the two stages; at least 2 * `depths`.
        near: the stage of the rank that its first microbatches enter.
        far: the other one.
        first_near: number of the first microbatch of `near`.
        first_far: number of the first microbatch of `far`.
    """
    own = _Rank(near, far, first_near, first_far)
    below = depths - depth - 1  # ranks between this one and the bottom of the V
    for _ in range(2 * below):
        own.forward(near)
    for _ in range(depth + 1):
        own.forward(near)
        own.forward(far)
    for _ in range(below):
        own.backward(far, split=True)
        own.weight()
        own.forward(far)
    for step in range(microbatches - 2 * depths + depth + 1):
        if step == 0 and below == 0:
            # At the bottom the first gradient needs the forward just before it: a pair would only wait
            # longer.
            own.forward(near)
            own.backward(far)
        else:
            own.pair(near, far)
        own.pair(far, near)
    for _ in range(below):
        own.backward(far)
        own.pair(far, near)
    # Drain. From the middle of this phase on, weight gradients wait to fill the gaps of the rest.
    for position in range(2 * (depth + 1)):
        own.backward(near if position % 2 else far, split=position > depth)
    for _ in range(below):
        own.weight()
        own.backward(near, split=True)
    for _ in range(depth + 1):
        own.weight()
    return tuple(own.row)


def _rules(num_ranks: int, num_microbatches: int, virtual_stages: int) -> Iterator[Violation]:
    if num_microbatches < 2 * num_ranks:
        rule = f"must be at least the number of stages, {2 * num_ranks} (2 per rank)"
        yield Violation("num_microbatches", num_microbatches, rule, f"use {2 * num_ranks} or more")


def _order(num_ranks: int, num_microbatches: int, virtual_stages: int) -> Schedule:
    rows = tuple(dual_row(rank, num_ranks, num_microbatches, near=rank, far=2 * num_ranks - 1 - rank) for rank in range(num_ranks))
    return Schedule("dualpipe-v", num_ranks, num_microbatches, v_placement(num_ranks), rows)


DUALPIPE_V = ScheduleFamily(
    name="dualpipe-v",
    summary="two stages per rank in V shape, overlapped forward-backward pairs, half the ranks of DualPipe",
    source="DeepSeek-AI DualPipe (DualPipeV, after Qi et al. 2024); torch ScheduleDualPipeV",
    order=_order,
    rules=_rules,
    virtual_stages=2,
    splits_backward=True,
    torch_class="ScheduleDualPipeV",
)
