"""Schedules against what the papers and frameworks state: closed forms, peaks, orders."""

from __future__ import annotations

import doctest
from collections.abc import Callable
from pathlib import Path

import pytest

from simpar import schedules
from simpar.errors import InputError
from simpar.schedules import NO_INDEX, SCHEDULES, Action, Chain, Phase, Schedule, build_schedule, parse_action
from simpar.schedules import action as action_module

COSTS = [
    {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0},
    {"F": 1.0, "B": 2.5, "I": 1.5, "W": 1.0},
    {"F": 2.0, "B": 3.5, "I": 2.0, "W": 1.5},
]


def ideal(schedule: Schedule, costs: dict[str, float]) -> float:
    """What each rank would take without any idling, in stage units."""
    return schedule.num_microbatches * len(schedule.stages_of(0)) / schedule.replicas * (costs["F"] + costs["B"])


# --- actions ---------------------------------------------------------------------------------------------------

TEXTS = [
    "2F0", "3I1", "3W1", "0B12", "(0F4;7B1)OVERLAP_F_B", "(3F2;0I1)OVERLAP_F_B",
    "1SEND_F3", "2RECV_F3", "2SEND_B0", "1RECV_B0", "4UNSHARD", "4RESHARD", "12REDUCE_GRAD",
]  # fmt: skip


@pytest.mark.parametrize("text", TEXTS)
def test_action_text_round_trip(text: str) -> None:
    assert str(parse_action(text)) == text
    assert parse_action(f" {text} ") == parse_action(text)


def test_action_fields() -> None:
    assert parse_action("12F34") == Action(12, Phase.F, 34)
    assert parse_action("7UNSHARD") == Action(7, Phase.UNSHARD, NO_INDEX)
    pair = parse_action("(0F4;7B1)OVERLAP_F_B")
    assert pair.leaves == (Action(0, Phase.F, 4), Action(7, Phase.B, 1))
    assert pair.computes
    assert parse_action("2F0").leaves == (Action(2, Phase.F, 0),)
    assert not parse_action("2SEND_F0").computes


@pytest.mark.parametrize(
    "text",
    ["", "F0", "2F", "2X0", "2UNSHARD0", "-1F0", "2F0 3F0", "(0F4;7B1)", "(0F4)OVERLAP_F_B", "(7B1;0F4)OVERLAP_F_B",
     "(0F4;7B1", "(0F4;1F4)OVERLAP_F_B", "2OVERLAP_F_B", "2f0", "1F" + "9" * 5000],
)  # fmt: skip
def test_action_text_that_is_none(text: str) -> None:
    with pytest.raises(InputError, match="not an action"):
        parse_action(text)


def parse_row(text: str) -> tuple[Action, ...]:
    return tuple(map(parse_action, text.split()))


# --- closed forms ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 2), (3, 7), (4, 4), (5, 12), (8, 32)])
def test_gpipe_1f1b_and_naive_bubbles(p: int, m: int, costs: dict[str, float]) -> None:
    F, B = costs["F"], costs["B"]
    for name in ("gpipe", "1f1b"):
        schedule = build_schedule(name, p, m)
        assert schedule.unit_makespan(**costs) == pytest.approx((m + p - 1) * (F + B))
        assert schedule.unit_bubble(**costs) == pytest.approx((p - 1) * (F + B))
    assert build_schedule("naive", p, m).unit_makespan(**costs) == pytest.approx(m * p * (F + B))


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize(("p", "m", "v"), [(2, 4, 2), (4, 8, 3), (4, 8, 1), (3, 9, 5), (8, 32, 2), (8, 32, 4)])
@pytest.mark.parametrize("name", ["interleaved", "interleaved_bfs"])
def test_interleaving_divides_the_bubble_by_v(name: str, p: int, m: int, v: int, costs: dict[str, float]) -> None:
    # In units of a virtual stage, 1/v of a rank's work, the bubble of 1F1B stays what it is.
    schedule = build_schedule(name, p, m, v)
    assert schedule.unit_bubble(**costs) == pytest.approx((p - 1) * (costs["F"] + costs["B"]))
    assert schedule.unit_makespan(**costs) == pytest.approx(ideal(schedule, costs) + schedule.unit_bubble(**costs))


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize(("p", "m"), [(2, 4), (3, 3), (5, 10), (8, 8), (8, 32)])
def test_zero_bubble_with_1f1b_memory(p: int, m: int, costs: dict[str, float]) -> None:
    expected = (p - 1) * (costs["F"] + costs["B"] - 2 * costs["W"])
    assert build_schedule("zb-h1", p, m).unit_bubble(**costs) == pytest.approx(expected)
    for v in (1, 2, 3):
        assert build_schedule("interleaved_zb", p, m, v).unit_bubble(**costs) == pytest.approx(expected)


@pytest.mark.parametrize(("p", "m"), [(2, 3), (3, 5), (4, 7), (4, 30), (7, 13), (8, 32)])
def test_zb_h2_has_no_inner_bubble(p: int, m: int) -> None:
    schedule = build_schedule("zb-h2", p, m)
    assert schedule.unit_bubble(flush=False) == 0.0
    # With a flush, the last rank's late start is all that is left.
    assert schedule.unit_bubble() == p - 1
    for costs in COSTS:
        expected = (p - 1) * (costs["F"] + costs["B"] - 3 * costs["W"])
        assert schedule.unit_bubble(flush=False, **costs) == pytest.approx(max(0.0, expected))


def test_zb_h2_with_too_few_microbatches_still_idles() -> None:
    assert build_schedule("zb-h2", 4, 6).unit_bubble(flush=False) > 0.0


@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 3), (3, 5), (4, 30), (8, 32)])
def test_zb_v_has_no_inner_bubble(p: int, m: int) -> None:
    schedule = build_schedule("zb-v", p, m)
    assert schedule.unit_bubble(flush=False) == 0.0
    assert schedule.unit_bubble() == p - 1


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("saved", [0.0, 0.5])
@pytest.mark.parametrize(("p", "m"), [(2, 4), (2, 10), (4, 8), (6, 24), (8, 20), (16, 32)])
def test_dualpipe_bubble(p: int, m: int, saved: float, costs: dict[str, float]) -> None:
    F, B, W = costs["F"], costs["B"], costs["W"]
    pair = F + B - saved
    # Overlapped pairs take less time than their parts, so the bubble is counted within the makespan.
    bubble = build_schedule("dualpipe", p, m).unit_bubble(overlap=pair, **costs)
    stated = (p // 2 - 1) * (pair + B - 3 * W)
    # DeepSeek's formula is exact where a forward and an input gradient cost the same, else a bound (for I > F).
    assert bubble <= stated + 1e-9
    if costs["F"] == costs["I"]:
        assert bubble == pytest.approx(stated)
    # DualPipeV folds the same rows onto half as many ranks: S = p stages on p / 2 ranks.
    folded = build_schedule("dualpipe-v", p // 2, m // 2)
    assert folded.unit_bubble(overlap=pair, **costs) == pytest.approx(bubble)


@pytest.mark.parametrize(("p", "bubble"), [(2, 3.0), (4, 9.0), (8, 22.0), (16, 48.0)])
def test_v_half_idles_half_as_long_as_1f1b(p: int, bubble: float) -> None:
    # In half-stage units 1F1B idles 2 (p - 1)(F + B) = 6 (p - 1).
    schedule = build_schedule("v-half", p, 3 * p)
    assert schedule.unit_bubble() == bubble
    assert schedule.unit_bubble() <= 1.1 * (6 * (p - 1)) / 2


@pytest.mark.parametrize("p", [2, 3, 4, 5, 8, 16, 33])
def test_v_min_idles_two_thirds_as_long_as_1f1b(p: int) -> None:
    assert build_schedule("v-min", p, 2 * p).unit_bubble() <= 6 * p * 2 / 3


def test_makespan_of_overlapped_pairs() -> None:
    schedule = build_schedule("dualpipe-v", 4, 8)
    one_by_one = schedule.unit_makespan()
    # A pair that takes as long as its parts only makes others wait for the whole of it.
    assert one_by_one < schedule.unit_makespan(overlap=3.0)
    assert schedule.unit_makespan(overlap=2.0) < one_by_one


# --- peaks -----------------------------------------------------------------------------------------------------

PEAKS: dict[str, Callable[[int, int, int, int], int]] = {
    # name -> stage activations that rank r of p may hold, given m and v
    "naive": lambda p, m, v, r: 1,
    "gpipe": lambda p, m, v, r: m,
    "1f1b": lambda p, m, v, r: min(m, p - r),
    "interleaved": lambda p, m, v, r: min(m * v, 2 * (p - r - 1) + (v - 1) * p + 1),
    "interleaved_bfs": lambda p, m, v, r: m * v,
    "interleaved_zb": lambda p, m, v, r: min(m * v, p * v),
    "zb-h1": lambda p, m, v, r: min(m, p),
    "zb-h2": lambda p, m, v, r: min(m, 2 * p - 1),
    "zb-v": lambda p, m, v, r: min(2 * m, 2 * p),
    "dualpipe": lambda p, m, v, r: p + 1,
    "dualpipe-v": lambda p, m, v, r: 2 * p + 1,
}


@pytest.mark.parametrize("name", PEAKS)
@pytest.mark.parametrize(("p", "rounds"), [(2, 2), (4, 2), (6, 3), (8, 4)])
def test_peak_equals_the_stated_one(name: str, p: int, rounds: int) -> None:
    family = SCHEDULES[name]
    for v in [family.virtual_stages] if family.virtual_stages else [1, 2, 4]:
        schedule = family.build(p, rounds * p, v)
        stated = tuple(PEAKS[name](p, rounds * p, v, rank) for rank in range(p))
        assert schedule.peak_in_flight() == stated


def test_interleaved_peak_of_the_first_rank() -> None:
    # Korthikanti et al. 2022: p (1 + (p-1)/(p v)) full stages, here in stage units (times v).
    for p, v in [(4, 2), (8, 4)]:
        assert build_schedule("interleaved", p, 4 * p, v).peak_in_flight()[0] == p * v + p - 1


@pytest.mark.parametrize("p", [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 31])
def test_v_half_and_v_min_peaks(p: int) -> None:
    m = 2 * p + 1
    assert max(build_schedule("v-half", p, m).peak_in_flight()) <= 2 * ((p + 2) // 2)
    assert max(build_schedule("v-min", p, m).peak_in_flight()) <= 2 * ((p + 4) // 3)


def test_peak_released_by_the_input_gradient() -> None:
    schedule = build_schedule("zb-h1", 4, 8)
    assert schedule.peak_in_flight() == (4, 4, 4, 4)
    assert schedule.peak_in_flight(released_by=Phase.I) == (4, 3, 2, 1)
    assert build_schedule("1f1b", 4, 8).peak_in_flight(released_by=Phase.I) == (4, 3, 2, 1)


# --- orders ----------------------------------------------------------------------------------------------------


def text(schedule: Schedule) -> list[str]:
    return [" ".join(map(str, row)) for row in schedule.rows]


def test_orders_small_enough_to_read() -> None:
    assert text(build_schedule("1f1b", 2, 3)) == ["0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"]
    assert text(build_schedule("gpipe", 2, 2)) == ["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"]
    assert text(build_schedule("naive", 2, 2)) == ["0F0 0B0 0F1 0B1", "1F0 1B0 1F1 1B1"]
    assert text(build_schedule("interleaved_bfs", 2, 2, 2))[1] == "1F0 1F1 3F0 3F1 3B1 3B0 1B1 1B0"
    assert text(build_schedule("interleaved", 2, 2, 2))[1] == "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1"
    assert text(build_schedule("zb-h1", 2, 2)) == ["0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1I0 1F1 1I1 1W0 1W1"]
    assert text(build_schedule("zb-h2", 2, 3)) == [
        "0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2",
        "1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 1W2",
    ]


def test_interleaved_with_one_stage_is_not_1f1b() -> None:
    # torch warms up with 2(p-r-1) forwards whatever v is, so its peak is 15 and not 8 microbatches.
    assert build_schedule("interleaved", 8, 32, 1).peak_in_flight()[0] == 15
    assert build_schedule("1f1b", 8, 32).peak_in_flight()[0] == 8


def test_zb_h1_is_interleaved_zb_with_one_stage() -> None:
    assert build_schedule("zb-h1", 4, 12).rows == build_schedule("interleaved_zb", 4, 12, 1).rows


def test_interleaved_groups() -> None:
    # Megatron-LM: groups of 4, the last one partial; each group passes both stages before the next begins.
    schedule = build_schedule("interleaved", 2, 6, 2, microbatch_group_size=4)
    schedule.check()
    forwards = tuple(action for action in schedule.rows[0] if action.phase is Phase.F)
    assert forwards == parse_row("0F0 0F1 0F2 0F3 2F0 2F1 2F2 2F3 0F4 0F5 2F4 2F5")
    warmup = [action.phase for action in schedule.rows[0]].index(Phase.B) - 1
    assert warmup == 2 * (2 - 0 - 1) + (2 - 1) * 4
    extra = build_schedule("interleaved", 2, 6, 2, microbatch_group_size=4, extra_warmup=1)
    extra.check()
    assert [action.phase for action in extra.rows[0]].index(Phase.B) - 1 == warmup + 1


def test_interleaved_default_group_is_p_or_torchs_round() -> None:
    assert build_schedule("interleaved", 4, 12, 2) == build_schedule("interleaved", 4, 12, 2, microbatch_group_size=4)
    assert build_schedule("interleaved", 4, 10, 2) == build_schedule("interleaved", 4, 10, 2, microbatch_group_size=5)


def test_dualpipe_chains() -> None:
    schedule = build_schedule("dualpipe", 4, 8)
    assert schedule.replicas == 2
    assert schedule.stages_per_model == 4
    assert schedule.num_stages == 8
    assert schedule.stage_to_rank == (0, 1, 2, 3, 3, 2, 1, 0)
    assert [schedule.model_stage(stage) for stage in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert schedule.chains == (Chain(range(4), range(4)), Chain(range(4, 8), range(4, 8)))
    # Rank 0 enters the first direction, and ends the second: it holds the first and the last part of the model.
    assert [schedule.model_stage(stage) for stage in schedule.stages_of(0)] == [0, 3]
    # The two directions do not wait for each other: the last stage of one is not followed by the other's first.
    assert schedule.prerequisites(Action(4, Phase.F, 5)) == []
    assert schedule.prerequisites(Action(3, Phase.B, 0)) == [Action(3, Phase.F, 0)]


# --- the dependency rule ---------------------------------------------------------------------------------------


def test_prerequisites() -> None:
    whole, split = build_schedule("1f1b", 3, 4), build_schedule("zb-h1", 3, 4)
    assert whole.prerequisites(Action(0, Phase.F, 1)) == []
    assert whole.prerequisites(Action(2, Phase.F, 1)) == [Action(1, Phase.F, 1)]
    assert whole.prerequisites(Action(1, Phase.B, 1)) == [Action(1, Phase.F, 1), Action(2, Phase.B, 1)]
    assert whole.prerequisites(Action(2, Phase.B, 1)) == [Action(2, Phase.F, 1)]
    assert split.prerequisites(Action(1, Phase.I, 3)) == [Action(1, Phase.F, 3), Action(2, Phase.I, 3)]
    assert split.prerequisites(Action(1, Phase.W, 3)) == [Action(1, Phase.I, 3)]
    assert split.splits_backward
    assert not whole.splits_backward


def test_prerequisites_where_whole_and_split_backwards_meet() -> None:
    # DualPipeV splits the first backwards of the way up on rank 0 only; the next rank runs them whole or split.
    schedule = build_schedule("dualpipe-v", 2, 4)
    rows = [[leaf for action in row for leaf in action.leaves] for row in schedule.rows]
    everything = {leaf for row in rows for leaf in row}
    for leaf in everything:
        assert everything.issuperset(schedule.prerequisites(leaf))
    pair = next(action for action in schedule.rows[0] if action.parts)
    assert schedule.prerequisites(pair) == [needed for leaf in pair.leaves for needed in schedule.prerequisites(leaf)]


@pytest.mark.parametrize("name", SCHEDULES)
def test_arrays_say_the_same_as_the_rows(name: str) -> None:
    family = SCHEDULES[name]
    schedule = family.build(4, 8, family.virtual_stages or 2)
    order = schedule.as_arrays()
    leaves = [leaf for row in schedule.rows for action in row for leaf in action.leaves]
    actions = [
        Action(int(s), tuple(Phase)[code], int(m)) for s, code, m in zip(order.stage, order.phase, order.microbatch, strict=True)
    ]
    assert actions == leaves
    assert schedule.splits_backward == any(leaf.phase is Phase.W for leaf in leaves)
    for leaf, entries in zip(leaves, order.prerequisites.tolist(), strict=True):
        assert [actions[entry] for entry in entries if entry >= 0] == schedule.prerequisites(leaf)
    for rank, row in enumerate(schedule.rows):
        stages = order.stage[order.rank_start[rank] : order.rank_start[rank + 1]]
        assert stages.tolist() == [leaf.stage for action in row for leaf in action.leaves]
    assert order.overlapped().sum() == 2 * sum(bool(action.parts) for row in schedule.rows for action in row)
    with pytest.raises(ValueError, match="read-only"):
        order.stage[0] = 1


# --- the documentation -----------------------------------------------------------------------------------------


def test_documented_examples_are_true() -> None:
    for failed, attempted in (
        doctest.testmod(schedules),
        doctest.testmod(action_module),
        doctest.testfile(str(Path(__file__).parents[1] / "docs/schedules.md"), module_relative=False),
    ):
        assert attempted
        assert not failed


def test_every_schedule_is_documented() -> None:
    text = (Path(__file__).parents[1] / "docs/schedules.md").read_text()
    for name in SCHEDULES:
        assert f"`{name}`" in text
