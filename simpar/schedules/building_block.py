"""V-Half and V-Min: V-shaped schedules from a repeated building block, after "Pipeline Parallelism with Controllable Memory".

One microbatch's passes are laid out on a grid of unit time: down the ranks (F of the first stages), up (F
of the second), down (I), up (I), each arm with its own slope, and the weight gradients in the slots left
free. Every six slots (two stages of F, I and W) the next microbatch starts the same block. Slots must not
collide, and the slopes set how long activations live, hence the memory. The grid only fixes the order:
squeezing out idle time is what any replay does. The paper also reorders the ends; here only weight
gradients move, into the gaps of the drain.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

from simpar.errors import InternalError
from simpar.schedules.action import Action, Phase
from simpar.schedules.family import Order, ScheduleFamily
from simpar.schedules.schedule import Schedule, v_placement

_INTERVAL = 6


def _repeated(name: str, slopes: tuple[int, int, int, int]) -> Order:
    """Repeats the smallest block with these `slopes`: slots per rank on the four arms."""

    def order(num_ranks: int, num_microbatches: int, virtual_stages: int) -> Schedule:
        rows = []
        for rank, times in enumerate(_block(num_ranks, slopes)):
            down, up = rank, 2 * num_ranks - 1 - rank
            passes = zip(times, (down, up, up, down, up, down), "FFIIWW", strict=True)
            timed = [(t + _INTERVAL * m, stage, Phase(phase), m) for t, stage, phase in passes for m in range(num_microbatches)]
            rows.append(tuple(Action(stage, phase, m) for _, stage, phase, m in sorted(timed)))
        return _fill_drain(Schedule(name, num_ranks, num_microbatches, v_placement(num_ranks), tuple(rows)))

    return order


@cache
def _block(num_ranks: int, slopes: tuple[int, int, int, int]) -> tuple[tuple[int, ...], ...]:
    """Per rank, when the first microbatch runs F, F, I, I, W, W of its stages (down, up, up, down, up, down).

    Of all blocks whose arms follow each other within one interval, the one with the least memory, then length.
    """
    best: tuple[int, int] | None = None
    chosen: tuple[tuple[int, ...], ...] = ()
    for gaps in product(range(1, _INTERVAL + 1), repeat=3):
        arms = _arms(num_ranks, slopes, gaps)
        if any(len({time % _INTERVAL for time in times}) < len(arms) for times in zip(*arms, strict=True)):
            continue
        ranks = [_with_weights(times) for times in zip(*arms, strict=True)]
        peak, length = max(peak for peak, _ in ranks), arms[3][0]
        if best is None or (peak, length) < best:
            best, chosen = (peak, length), tuple(times for _, times in ranks)
    if not chosen:
        raise InternalError(f"no building block with slopes {slopes} for {num_ranks} ranks")
    return chosen


def _arms(num_ranks: int, slopes: Sequence[int], gaps: Sequence[int]) -> list[list[int]]:
    """Times per rank of F down, F up, I down, I up, each arm `gap` slots after the end of the one before."""
    arms: list[list[int]] = []
    begin = 0
    for slope, gap, downwards in zip(slopes, (*gaps, 0), (True, False, True, False), strict=True):
        arm = [begin + slope * rank for rank in range(num_ranks)]
        begin = arm[-1] + gap
        arms.append(arm if downwards else arm[::-1])
    return arms


def _with_weights(times: Sequence[int]) -> tuple[int, tuple[int, ...]]:
    """(peak stage activations, times with both W) of a rank: each W in a free slot soon after its I."""
    forward_down, forward_up, input_up, input_down = times
    free = [slot for slot in range(_INTERVAL) if slot not in {time % _INTERVAL for time in times}]
    options = []
    for slot_up, slot_down in (free, free[::-1]):
        weight_up = input_up + 1 + (slot_up - input_up - 1) % _INTERVAL
        weight_down = input_down + 1 + (slot_down - input_down - 1) % _INTERVAL
        spans = ((forward_down, weight_down), (forward_up, weight_up))
        # Microbatches begun and not ended at each moment of the steady state; moments count from far below 0.
        held = [
            sum((moment - first) // _INTERVAL - (moment - last) // _INTERVAL for first, last in spans)
            for moment in range(_INTERVAL)
        ]
        options.append((max(held), weight_up + weight_down, (*times, weight_up, weight_down)))
    peak, _, chosen = min(options)
    return peak, chosen


def _fill_drain(schedule: Schedule) -> Schedule:
    """Move the weight gradients after each rank's last forward into the gaps between its input gradients."""
    drains = [_Drain.of(row) for row in schedule.rows]
    # With all weight gradients at the end, a replay shows when the input gradients could run at the earliest.
    early = replace(schedule, rows=tuple((*d.head, *d.gradients, *d.waiting, *map(_weight, d.gradients)) for d in drains))
    played, rank_start = early.replay(), early.as_arrays().rank_start
    rows = []
    for rank, drain in enumerate(drains):
        row, ready = list(drain.head), deque(drain.waiting)
        first = rank_start[rank] + len(row)
        clock = played.finish[first - 1]
        for entry, gradient in enumerate(drain.gradients, start=first):
            while ready and clock < played.start[entry]:
                row.append(ready.popleft())
                clock += 1.0
            row.append(gradient)
            ready.append(_weight(gradient))
            clock = played.finish[entry]
        rows.append((*row, *ready))
    return replace(schedule, rows=tuple(rows))


@dataclass(frozen=True, slots=True)
class _Drain:
    """A row in parts: up to its last forward; the input gradients after it; weight gradients that wait there."""

    head: tuple[Action, ...]
    gradients: tuple[Action, ...]
    waiting: tuple[Action, ...]

    @classmethod
    def of(cls, row: tuple[Action, ...]) -> _Drain:
        cut = 1 + max(position for position, action in enumerate(row) if action.phase is Phase.F)
        gradients = tuple(action for action in row[cut:] if action.phase is Phase.I)
        later = set(map(_weight, gradients))
        waiting = tuple(action for action in row[cut:] if action.phase is Phase.W and action not in later)
        return cls(row[:cut], gradients, waiting)


def _weight(gradient: Action) -> Action:
    return Action(gradient.stage, Phase.W, gradient.microbatch)


V_HALF = ScheduleFamily(
    name="v-half",
    summary="two stages per rank in V shape, at most (p + 2) // 2 microbatches held, about half 1F1B's bubble",
    source="Qi et al. 2024, arXiv 2405.15362; block and drain are derived here, peaks as published",
    order=_repeated("v-half", slopes=(1, 2, 1, 2)),
    virtual_stages=2,
    splits_backward=True,
)
V_MIN = ScheduleFamily(
    name="v-min",
    summary="two stages per rank in V shape, at most (p + 4) // 3 microbatches held, about 2/3 of 1F1B's bubble",
    source="Qi et al. 2024, arXiv 2405.15362; block and drain are derived here, peaks as published",
    order=_repeated("v-min", slopes=(1, 1, 1, 1)),
    virtual_stages=2,
    splits_backward=True,
)
