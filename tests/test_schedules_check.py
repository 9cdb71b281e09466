"""What a schedule refuses: shapes that do not fit its family, and orders that cannot run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from simpar.errors import InputError, UnknownNameError
from simpar.schedules import SCHEDULES, Action, Chain, Schedule, build_schedule, parse_action


def parse_row(text: str) -> tuple[Action, ...]:
    return tuple(map(parse_action, text.split()))


# --- what a shape must be --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "p", "m", "v", "field", "right"),
    [
        ("1f1b", 4, 8, 2, "virtual_stages", "set it to 1"),
        ("zb-v", 4, 8, 1, "virtual_stages", "set it to 2"),
        ("dualpipe-v", 4, 7, 2, "num_microbatches", "use 8 or more"),
        ("dualpipe", 3, 8, 1, "num_ranks", "use 2 or 4"),
        ("dualpipe", 4, 9, 1, "num_microbatches", "use 10"),
        ("dualpipe", 4, 6, 1, "num_microbatches", "use 8 or more"),
        ("interleaved", 4, 11, 2, "num_microbatches", "use 10 or 12"),
        ("interleaved_zb", 3, 10, 2, "num_microbatches", "use 9 or 12"),
        ("gpipe", 0, 8, 1, "num_ranks", "any positive integer"),
    ],
)
def test_shape_that_does_not_fit(name: str, p: int, m: int, v: int, field: str, right: str) -> None:
    (violation,) = SCHEDULES[name].requirements(p, m, v)
    assert violation.field == field
    assert violation.value == {"num_ranks": p, "num_microbatches": m, "virtual_stages": v}[field]
    assert right in violation.right
    with pytest.raises(InputError) as caught:
        build_schedule(name, p, m, v)
    assert caught.value.violations == (violation,)


@pytest.mark.parametrize(("name", "p", "m"), [("interleaved", 4, 11), ("interleaved_zb", 3, 10), ("dualpipe", 3, 7)])
def test_the_right_values_named_are_right(name: str, p: int, m: int) -> None:
    shape = {"num_ranks": p, "num_microbatches": m}
    for violation in SCHEDULES[name].requirements(p, m, None):
        for word in violation.right.split():
            if word.isdigit():
                fixed = shape | {violation.field: int(word)}
                left = {v.field for v in SCHEDULES[name].requirements(fixed["num_ranks"], fixed["num_microbatches"], None)}
                assert violation.field not in left


def test_all_violations_at_once() -> None:
    fields = [v.field for v in SCHEDULES["dualpipe"].requirements(5, 7)]
    assert fields == ["num_ranks", "num_microbatches", "num_microbatches"]
    fields = [v.field for v in SCHEDULES["1f1b"].requirements(0, -1, 3, colour="red")]
    assert fields == ["num_ranks", "num_microbatches", "virtual_stages", "colour"]


@pytest.mark.parametrize(("m", "group"), [(8, 3), (9, 4), (11, 8)])
def test_group_size_that_megatron_refuses(m: int, group: int) -> None:
    (violation,) = SCHEDULES["interleaved"].requirements(4, m, 2, microbatch_group_size=group)
    assert violation.field == "microbatch_group_size"


def test_negative_extra_warmup() -> None:
    (violation,) = SCHEDULES["interleaved"].requirements(4, 8, 2, extra_warmup=-1)
    assert violation.field == "extra_warmup"


def test_default_virtual_stages() -> None:
    assert build_schedule("zb-v", 3, 6).num_stages == 6
    assert build_schedule("interleaved", 3, 6).num_stages == 3


def test_unknown_name_names_the_closest() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'zb-h1'"):
        build_schedule("zb_h1", 2, 2)


def test_registry_states_facts() -> None:
    for name, family in SCHEDULES.items():
        schedule = family.build(4, 16, family.virtual_stages or 2)
        assert schedule.splits_backward == family.splits_backward
        assert schedule.replicas == family.replicas
        assert schedule.name == family.name
        assert SCHEDULES[family.name] is family
        assert name == family.name or (name, family.name) == ("interleaved_1f1b", "interleaved")
        assert family.source
        assert family.summary


# --- orders that cannot run ------------------------------------------------------------------------------------


def broken(schedule: Schedule, rank: int, step: int, action: str) -> Schedule:
    """`schedule` with one cell overwritten, or left out if `action` is empty."""
    row = list(schedule.rows[rank])
    row[step : step + 1] = [parse_action(action)] if action else []
    return replace(schedule, rows=(*schedule.rows[:rank], tuple(row), *schedule.rows[rank + 1 :]))


def message_of(schedule: Schedule) -> str:
    with pytest.raises(InputError) as caught:
        schedule.check()
    return str(caught.value)


@pytest.mark.parametrize(
    ("rank", "step", "action", "expected"),
    [
        (1, 2, "1F0", "rank 1, step 2 = '1F0': each action runs once; it already runs at rank 1, step 0"),
        (1, 2, "1F9", "stage 1 has no microbatch 9; its microbatches are 0 to 3"),
        (1, 2, "7F1", "there is no stage 7; stages are 0 to 1"),
        (1, 2, "0F1", "stage 0 is not on this rank; it is on rank 0"),
        (1, 2, "1SEND_F1", "a schedule holds compute actions only"),
        (1, 2, "", "stage 1 = 'no F of microbatch 1'"),
        (1, 3, "1W1", "stage 1 = 'no I of microbatch 1'"),
        (1, 3, "1W0", "a backward runs either whole (B) or split (I and W)"),
    ],
)
def test_check_names_the_cell(rank: int, step: int, action: str, expected: str) -> None:
    message = message_of(broken(build_schedule("1f1b", 2, 4), rank, step, action))
    assert expected in message
    if expected.startswith("stage 1 = "):
        assert "step  " not in message  # what is missing stands in no cell
    else:
        assert f">{action}<" in message


def test_check_finds_an_order_against_its_own_prerequisite() -> None:
    schedule = build_schedule("1f1b", 2, 2)
    swapped = replace(schedule, rows=(schedule.rows[0], (*schedule.rows[1][1::-1], *schedule.rows[1][2:])))
    assert "1B0': waits for ever for 1F0 (later in this row, at step 1)" in message_of(swapped)


def test_check_finds_a_deadlock_between_ranks() -> None:
    schedule = build_schedule("1f1b", 2, 2)
    rows = (parse_row("0F0 0B0 0F1 0B1"), parse_row("1F1 1F0 1B0 1B1"))
    message = message_of(replace(schedule, rows=rows))
    assert "rank 0, step 1 = '0B0': waits for ever for 1B0 (at rank 1, step 2, which is never reached)" in message
    assert "rank 1, step 0 = '1F1': waits for ever for 0F1 (at rank 0, step 2, which is never reached)" in message
    assert message.splitlines()[-3:] == [
        "step    0      1      2    3",
        "rank 0  0F0    >0B0<  0F1  0B1",
        "rank 1  >1F1<  1F0    1B0  1B1",
    ]


def test_check_finds_a_pair_that_waits_for_itself() -> None:
    schedule = Schedule("pair", 1, 1, (0,), ((parse_action("(0F0;0B0)OVERLAP_F_B"),),))
    assert "waits for ever for 0F0 (in the same cell)" in message_of(schedule)


def test_check_lists_everything_and_cuts_the_grid() -> None:
    schedule = build_schedule("1f1b", 2, 200)
    message = message_of(broken(broken(schedule, 0, 300, "0F500"), 1, 290, "1B500"))
    assert "0F500" in message
    assert "1B500" in message
    assert "of 400)" in message
    assert len(message) < 2000


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"num_ranks": 3}, "one row per rank"),
        ({"stage_to_rank": (0, 2)}, "is not a rank"),
        ({"copies": (Chain(range(1), range(4)),)}, "each of the stages 0 to 1 exactly once"),
        ({"copies": (Chain(range(2), range(3)),)}, "each of the microbatches 0 to 3 exactly once"),
    ],
)
def test_check_of_the_frame(change: dict[str, object], expected: str) -> None:
    assert expected in message_of(replace(build_schedule("1f1b", 2, 4), **change))


def test_long_lists_of_missing_actions_are_cut() -> None:
    schedule = build_schedule("gpipe", 1, 20)
    assert "0, 1, 2, 3, 4, 5, 6, 7 and 12 more" in message_of(replace(schedule, rows=(schedule.rows[0][:20],)))
