"""A step that repeats itself is told from one that seems to: programs of a few ops a round, each rule alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from simpar.engine.longest_path import longest_path
from simpar.engine.timeline import Timeline
from simpar.program.builder import Place, ProgramBuilder
from simpar.program.program import FloatArray, IntArray, OpKind, PriceTable, Stream
from simpar.result import regime

Wait = Callable[[int, int], int]
TOLERANCE = 1e-9


def extends(first: Timeline, second: Timeline, **options: Any) -> bool:
    return regime.extends(regime.Step.of(first), regime.Step.of(second), **options)


def may_extend(second: Timeline, few: int, more: int, **options: Any) -> bool:
    return regime.may_extend(regime.Step.of(second), few, more, **options)


def foreseen(second: Timeline, *passes: int, **options: Any) -> tuple[float, bool] | None:
    return regime.foreseen(regime.Step.of(second), *passes, **options)


def as_far(index: int, count: int) -> int:
    """As far from the first as the op that waits."""
    return index


def step(count: int, head: float, seconds: tuple[float, float, float], wait: Wait = as_far) -> Timeline:
    """`count` ops on each of two ranks, the first rank's behind `head` seconds; a third rank's wait for one of both each.

    Args:
        seconds: of an op of each rank.
        wait: which of the first rank's ops the third rank's op waits for.
    """
    builder = ProgramBuilder("step")
    prices = (head, *seconds)

    def add(key: object, rank: int, price: int, *deps: object) -> None:
        kind = OpKind.OPTIMIZER if key == "head" else OpKind.FORWARD
        builder.add(key, kind=kind, role=rank, streams=[Stream(rank, "compute")], price=price, deps=deps, place=Place(rank))

    add("head", 0, 0)
    for index in range(count):
        add((0, index), 0, 1)
        add((1, index), 1, 2)
    for index in range(count):
        add((2, index), 2, 3, (0, wait(index, count)), (1, index))
    program = builder.build()
    return longest_path(program, PriceTable(np.array([prices[int(str(key))] for key in program.price_keys]), np.zeros(4)))


def seems_to_repeat(count: int, head: float, seconds: tuple[float, float, float], wait: Wait = as_far) -> bool:
    first, second = (step(count + more, head, seconds, wait) for more in (0, 4))
    return extends(first, second, interference=False, tolerance=TOLERANCE)


@pytest.mark.parametrize(("head", "seconds"), [(0.0, (1.0, 1.0, 0.5)), (3.0, (1.2, 1.0, 0.5)), (0.0, (1.0, 1.1, 0.5))])
def test_ranks_at_their_own_constant_speed_repeat_themselves(head: float, seconds: tuple[float, float, float]) -> None:
    assert seems_to_repeat(12, head, seconds)
    assert may_extend(step(16, head, seconds), 12, 16, tolerance=TOLERANCE)
    few, more, many = (step(count, head, seconds).makespan for count in (12, 16, 400))
    assert many == pytest.approx(few + (more - few) * (400 - 12) / 4, rel=1e-12)


@pytest.mark.parametrize("apart", [0.1, 0.01])
def test_slack_that_is_used_up_later_is_seen_now(apart: float) -> None:
    """The second rank is slower by `apart` and starts 3 s ahead: only after 3 / apart rounds the third waits for it, however few
    ops a round has. The steps before that differ by the same constants."""
    seconds, turn = (1.0, 1.0 + apart, 0.5), round(3 / apart)
    assert not seems_to_repeat(12, 3.0, seconds)
    few, more, many = (step(count, 3.0, seconds).makespan for count in (12, 16, 2 * turn))
    assert more - few == pytest.approx(4.0)
    assert many > few + (2 * turn - 12) + 1.0
    assert seems_to_repeat(2 * turn, 3.0, seconds)
    # It lasts for so many rounds of four as each uses up some of it, and no longer; where it ends is foreseen.
    two, rounds = [step(count, 3.0, seconds) for count in (12, 16)], (turn - 17) // 4
    assert extends(*two, interference=False, tolerance=TOLERANCE, further=rounds)
    assert not extends(*two, interference=False, tolerance=TOLERANCE, further=rounds + 2)
    needed, late = foreseen(two[1], 4, 16, 2 * turn, tolerance=TOLERANCE) or (0.0, False)
    assert late
    assert turn <= needed <= turn + 20
    assert foreseen(two[1], 4, 16, turn - 4, tolerance=TOLERANCE) == (8, False)


def test_what_repeats_itself_behind_slack_that_is_used_up_is_no_longer_waited_for() -> None:
    """3 s at 0.1 s an op are used up with the 30th of 50: from that one on rounds of four are alike, and two more show it."""
    assert foreseen(step(50, 3.0, (1.0, 1.1, 0.5)), 4, 50, 1000, tolerance=TOLERANCE) == (29 + 8, False)


@pytest.mark.parametrize(
    ("late", "may"),
    [(lambda n: 0.5 * (n >= 5), True), (lambda n: 0.5 * (n >= 13), True), (lambda n: 0.01 * n**2, False)],
    ids=["a jump at the sixth", "a jump at the end", "ever later"],
)  # fmt: skip
def test_without_a_round_that_is_the_one_before_moved_nothing_repeats(late: Callable[[IntArray], FloatArray], may: bool) -> None:
    """Of 16 ops of a kind, four a round; a jump leaves a round behind it or before it alone."""
    one = step(16, 0.0, (1.0, 1.1, 0.5))
    third = one.program.stage == 2
    moved = late(np.cumsum(third) - 1) * third
    assert may_extend(Timeline(one.program, one.start + moved, one.finish + moved), 12, 16, tolerance=TOLERANCE) == may


@pytest.mark.parametrize(("factor", "count", "seen"), [(0.5, 80, True), (0.8, 200, True), (0.8, 80, False)])
def test_how_soon_rounds_are_alike_that_come_near_is_foreseen(factor: float, count: int, seen: bool) -> None:
    """The third rank's ops come later by ever less; a round's difference to the next is within tolerance after that many rounds. Of
    one that is far off two such steps are waited for, and the two rounds behind them that show it."""
    one = step(count, 0.0, (1.0, 1.1, 0.5))
    late = np.where(one.program.stage == 2, factor ** ((np.cumsum(one.program.stage == 2) - 1) / 4), 0.0)
    found = foreseen(Timeline(one.program, one.start + late, one.finish + late), 4, count, 10**6, tolerance=TOLERANCE)
    rounds = np.log(TOLERANCE / (1 - factor) ** 2) / np.log(factor)
    assert found == (pytest.approx(4 * rounds + 8 if seen else 2 * count + 8, abs=5), False)


def test_a_step_of_too_few_rounds_foretells_nothing() -> None:
    assert foreseen(step(12, 0.0, (1.0, 1.1, 0.5)), 4, 12, 100, tolerance=TOLERANCE) is None


def test_a_wait_for_neither_as_far_from_the_first_nor_from_the_last_is_seen() -> None:
    assert seems_to_repeat(12, 0.0, (1.0, 0.5, 0.5), lambda index, count: count - 1)
    assert not seems_to_repeat(12, 0.0, (1.0, 0.5, 0.5), lambda index, count: count // 2)


def test_an_op_that_waits_for_something_unseen_is_no_regime() -> None:
    first, second = (step(count, 0.0, (1.0, 1.0, 0.5)) for count in (12, 16))
    late = [
        Timeline(one.program, one.start + (one.program.stage == 2), one.finish + (one.program.stage == 2))
        for one in (first, second)
    ]
    assert extends(first, second, interference=False, tolerance=TOLERANCE)
    assert not extends(*late, interference=False, tolerance=TOLERANCE)


def test_communication_beside_compute_keeps_step_with_it_where_each_slows_the_other() -> None:
    def beside(count: int) -> Timeline:
        builder, price = ProgramBuilder("step"), {OpKind.FORWARD: 1.0, OpKind.COLLECTIVE: 1.3}
        for index in range(count):
            for kind, stream in ((OpKind.FORWARD, "compute"), (OpKind.COLLECTIVE, "tp")):
                builder.add((kind, index), kind=kind, role=0, streams=[Stream(0, stream)], price=int(kind), place=Place(0))
        program = builder.build()
        return longest_path(
            program, PriceTable(np.array([price[OpKind(int(str(kind)))] for kind in program.price_keys]), np.zeros(2))
        )

    first, second = beside(12), beside(16)
    assert extends(first, second, interference=False, tolerance=TOLERANCE)
    assert not extends(first, second, interference=True, tolerance=TOLERANCE)
