"""1F1B: after a warm-up one forward and one backward in turn, so that few activations are held; and its interleaved form: several
stages per rank, visited depth-first in groups of microbatches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from simpar.errors import Violation
from simpar.schedules.action import Action, Phase
from simpar.schedules.family import ScheduleFamily
from simpar.schedules.schedule import Schedule, loop_placement

Row = tuple[Action, ...]
"""The actions of one rank, in order."""


def round_size(num_ranks: int, num_microbatches: int) -> int:
    """Microbatches that visit a stage in a row when the user sets no group size.

    torch's rule: as many rounds as whole groups of p fit, of equal size. It is p whenever p divides m, where
    Megatron-LM has the same default.
    """
    return num_microbatches // max(1, num_microbatches // num_ranks)


def equal_rounds(num_ranks: int, num_microbatches: int, *ignored: int) -> Iterator[Violation]:
    """Torch's demand on m: it must split into rounds of equal size."""
    rounds = max(1, num_microbatches // num_ranks)
    if num_microbatches % rounds:
        below = num_microbatches - num_microbatches % rounds
        above = -(-num_microbatches // num_ranks) * num_ranks
        rule = f"must be a multiple of its {rounds} rounds (m // p, with p = {num_ranks})"
        yield Violation("num_microbatches", num_microbatches, rule, f"use {below} or {above}")


def visits(num_microbatches: int, virtual_stages: int, group: int) -> list[tuple[int, int]]:
    """(local stage, microbatch) in the order of a rank's forwards: group by group, each through every stage.

    The last group may be smaller. Backwards go through the same list with the local stages counted from the
    end.
    """
    return [
        (local, m)
        for first in range(0, num_microbatches, group)
        for local in range(virtual_stages)
        for m in range(first, min(first + group, num_microbatches))
    ]


def _rules(
    num_ranks: int,
    num_microbatches: int,
    virtual_stages: int,
    microbatch_group_size: int | None = None,
    extra_warmup: int = 0,
) -> Iterator[Violation]:
    if extra_warmup < 0:
        yield Violation("extra_warmup", extra_warmup, "must not be negative", "0 or 1")
    group = microbatch_group_size
    if group is None:
        yield from equal_rounds(num_ranks, num_microbatches)
        return
    if group < num_ranks:
        rule = f"must be at least the number of pipeline ranks, {num_ranks}"
        yield Violation("microbatch_group_size", group, rule, f"use {num_ranks}")
    elif 0 < num_microbatches % group < num_ranks:
        rule = f"leaves a last group of {num_microbatches % group} of the {num_microbatches} microbatches"
        right = f"the last group must be whole or hold at least {num_ranks} microbatches"
        yield Violation("microbatch_group_size", group, rule, right)


def looped(
    name: str, shape: tuple[int, int, int], group: int, backward: Phase, row: Callable[[int, list[Action], list[Action]], Row]
) -> Schedule:
    """The schedule of (ranks, microbatches, stages per rank) that go round the ranks: `row` orders the forwards and the gradients
    (`backward`) of a rank, which both go through its stages in groups of `group` microbatches."""
    num_ranks, num_microbatches, virtual_stages = shape
    visited = visits(num_microbatches, virtual_stages, group)
    rows = []
    for rank in range(num_ranks):
        forwards = [Action(local * num_ranks + rank, Phase.F, m) for local, m in visited]
        gradients = [Action((virtual_stages - 1 - local) * num_ranks + rank, backward, m) for local, m in visited]
        rows.append(row(rank, forwards, gradients))
    return Schedule(name, num_ranks, num_microbatches, loop_placement(num_ranks, virtual_stages), tuple(rows))


def _order(num_ranks: int, num_microbatches: int, virtual_stages: int) -> Schedule:
    def row(rank: int, forwards: list[Action], backwards: list[Action]) -> Row:
        return one_forward_one_backward(forwards, backwards, num_ranks - rank - 1)

    return looped("1f1b", (num_ranks, num_microbatches, 1), num_microbatches, Phase.B, row)


def _interleaved(
    num_ranks: int,
    num_microbatches: int,
    virtual_stages: int,
    microbatch_group_size: int | None = None,
    extra_warmup: int = 0,
) -> Schedule:
    group = microbatch_group_size or round_size(num_ranks, num_microbatches)

    def row(rank: int, forwards: list[Action], backwards: list[Action]) -> Row:
        warmup = 2 * (num_ranks - rank - 1) + (virtual_stages - 1) * group + extra_warmup
        return one_forward_one_backward(forwards, backwards, warmup)

    return looped("interleaved", (num_ranks, num_microbatches, virtual_stages), group, Phase.B, row)


def one_forward_one_backward(forwards: list[Action], backwards: list[Action], warmup: int) -> Row:
    """`warmup` forwards (or all), then forwards and backwards in turn, then the backwards left over."""
    warmup = min(warmup, len(forwards))
    row = forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        row += (forward, backward)
    return (*row, *backwards[len(forwards) - warmup :])


ONE_F_ONE_B = ScheduleFamily(
    name="1f1b",
    summary="one forward, one backward after p - r - 1 warm-up forwards; rank r holds p - r microbatches",
    source="PipeDream-Flush (Narayanan et al. 2021, arXiv 2006.09503), Megatron-LM, torch as executed",
    order=_order,
    virtual_stages=1,
    torch_class="Schedule1F1B",
)
INTERLEAVED = ScheduleFamily(
    name="interleaved",
    summary="1F1B over v stages per rank, depth-first: the bubble shrinks by v, communication grows by v",
    source="Narayanan et al. 2021, arXiv 2104.04473; Megatron-LM's group size; torch ScheduleInterleaved1F1B. "
    "With one stage per rank it warms up twice as long as 1F1B, as torch does",
    order=_interleaved,
    rules=_rules,
    options=("microbatch_group_size", "extra_warmup"),
    torch_class="ScheduleInterleaved1F1B",
)
