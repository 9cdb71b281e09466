"""Objectives, limits, fronts, robust ranking and ties of the layout search, against every layout of small spaces simulated."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from search_layouts import OFFLOADS, SMALL, Known, every_layout, small_space

from simpar.errors import InputError
from simpar.result.interval import Interval
from simpar.searching.answer import TIE, Answer, answer, is_tied
from simpar.searching.find import find, find_over
from simpar.searching.incumbents import rounded
from simpar.searching.objective import (
    FROM_RESULT,
    LARGER_IS_BETTER,
    OBJECTIVES,
    SIMPLE,
    Constraint,
    Measure,
    dominates,
    look_up,
    oriented,
    pace,
    parse_constraints,
    parse_front,
)
from simpar.searching.parts import Wish, measure_of, pricing_of, widest
from simpar.searching.space import Space

TIGHT = (*[t for t in SMALL if not t.startswith(("offload", "schedule", "micro", "cp=", "tp=", "pp="))], "schedule=1f1b",
         "micro_batch_size=4", "cp=1", "tp=1,4", "pp=1,2", *OFFLOADS)  # fmt: skip
"""A space in which offloading decides what needs least memory."""
BIGGER = (*[t for t in SMALL if not t.startswith(("schedule", "cp=", "tp="))], "schedule=1f1b", "cp=1", "tp=1,4")
"""Fewer layouts of several cluster sizes."""


def measure(space: Space, wish: Wish | None = None) -> Measure:
    return measure_of(space, wish or Wish(), pricing_of(space))


def metrics(space: Space, known: Known) -> dict[str, float]:
    return measure(space).metrics(known.seconds, known.bytes)


def ask(space: Space, **wish: Any) -> Answer:
    return answer([find(space, Wish(**wish))])


# -- one objective ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("objective", [n for n in OBJECTIVES if n != "num_gpus"])
def test_the_best_of_every_objective_is_the_best_of_all_layouts(objective: str) -> None:
    space, metric = small_space(), OBJECTIVES[objective]
    every = sorted(oriented(metrics(space, k), metric) for k in every_layout())
    found = ask(space, objective=objective, keep=5)
    assert sorted(oriented(c.metrics, metric) for c in found.candidates) == pytest.approx(every[:5], rel=1e-9)
    assert found.finished
    assert found.gap == 0.0


def test_least_memory_counts_offloading() -> None:
    """What fits without offloading still needs more memory than with it."""
    space = small_space(allow=TIGHT)
    found = ask(space, objective="memory_headroom", keep=3)
    every = sorted(every_layout(allow=TIGHT), key=lambda k: k.bytes)
    assert every[0].choice.offload.optimizer
    assert found.candidates[0].scored.device_bytes == pytest.approx(every[0].bytes, rel=1e-9)


def test_metrics_are_those_of_the_simulation() -> None:
    space = small_space()
    for c in ask(space, keep=4).candidates:
        assert c.metrics["step_time_s"] == pytest.approx(c.result.step_time_s, rel=1e-12)
        assert c.metrics["tokens_per_s_per_gpu"] == pytest.approx(c.result.tokens_per_s_per_gpu, rel=1e-12)
        assert c.metrics["peak_memory_bytes"] == pytest.approx(c.result.worst_rank.device_bytes, rel=1e-12)
        assert c.metrics["memory_headroom_bytes"] == pytest.approx(c.result.device_memory_bytes - c.result.worst_rank.device_bytes)
        # Rent of 8 GPUs for a step, over its tokens.
        assert c.metrics["cost_usd_per_token"] == pytest.approx(8 * c.result.step_time_s / 3600 * 2.0 / (8 * 8192))


# -- limits ----------------------------------------------------------------------------------------------------------------

LIMITS = (
    ("step_time<=~",), ("step_time>=~",), ("memory<~",), ("headroom>=~",), ("mfu>=~", "memory<=60GiB"),
    ("layout.pp>=2", "layout.tp<4"), ("tokens_per_s_per_gpu>=~",), ("energy_per_token<=~",), ("exposed_communication_s<=~",),
)  # fmt: skip
"""Where ~ stands for the median of all layouts, so that a limit always leaves some and takes some."""


@pytest.mark.parametrize("texts", LIMITS, ids=["+".join(t) for t in LIMITS])
def test_limits_leave_exactly_the_layouts_that_keep_them(texts: tuple[str, ...]) -> None:
    space, every = small_space(), every_layout()

    def median(text: str) -> str:
        metric = parse_constraints([text.replace("~", "0")])[0].metric
        values = sorted(look_up({**k.result.to_json(), **metrics(space, k)}, metric) for k in every)
        return text.replace("~", repr(values[len(values) // 2]))

    limits = parse_constraints([median(text) for text in texts])

    def keeps(known: Known) -> bool:
        simple, full = metrics(space, known), known.result.to_json()
        return all(c.holds(simple if c.metric in SIMPLE else full) for c in limits)

    wanted = sorted((k for k in every if keeps(k)), key=lambda k: k.seconds)
    assert len(wanted) < len(every), "the limit leaves everything: it tests nothing"
    found = ask(space, constraints=limits, keep=4)
    assert [c.metrics["step_time_s"] for c in sorted(found.candidates, key=lambda c: c.value)] == pytest.approx(
        [k.seconds for k in wanted[:4]], rel=1e-9
    )


def test_a_limit_that_nothing_keeps_is_a_result() -> None:
    found = ask(small_space(), constraints=parse_constraints(["step_time_s<=0.01"]))
    assert found.candidates == ()
    assert found.finished
    assert found.counts("rejected")["misses a constraint"] > 0
    assert sum(found.counts("rejected").values()) == found.size


def test_every_number_of_a_result_may_be_limited() -> None:
    """The table of names is what `simulate` prints; texts, lists and flags aside."""

    def leaves(value: Any, path: str = "") -> list[str]:
        if isinstance(value, dict):
            return [leaf for name, inner in value.items() for leaf in leaves(inner, f"{path}.{name}" if path else name)]
        return [path] if isinstance(value, int | float) and not isinstance(value, bool) else []

    result = every_layout()[0].result.to_json()
    printed = {p for p in leaves(result) if not p.startswith(("waterfall_s", "uncertainty.step_time_s.dominated_by"))}
    # Each under its own name, or under that of a simple metric or of the cluster.
    assert printed - {*FROM_RESULT, *SIMPLE} == {"device_memory_bytes", "world_size"}
    # Dimensions that are not in use have no communication_s; everything else in the table is printed.
    assert {n for n in FROM_RESULT if not n.startswith("communication_s")} <= {*printed, "exposed_communication_s"}


def test_limits_are_read_with_units_signs_and_short_names() -> None:
    read = parse_constraints(["memory<70GiB,step_time_s<=900 ms", "mfu >= 45%"])
    assert read == (
        Constraint("peak_memory_bytes", True, 70 * 2.0**30, True), Constraint("step_time_s", True, 0.9),
        Constraint("mfu", False, 0.45),
    )  # fmt: skip
    assert not read[0].holds({"peak_memory_bytes": 70 * 2.0**30})
    assert Constraint("layout.pp", True, 4).holds({"layout": {"pp": 4}})
    assert not Constraint("layout.pp", True, 4, strict=True).holds({"layout": {"pp": 4}})
    assert look_up({"exposed_communication_s": {"tp": 1.0, "dp": 2.0}}, "exposed_communication_s") == 3.0


@pytest.mark.parametrize(
    ("text", "hint"),
    [("memory", "write it as"), ("memroy<5GiB", "did you mean 'memory'"), ("memory<lots", "not a quantity"),
     ("mfu<x", "not a number"), ("mfu<=nan", "finite"), ("step_time<5 GiB", "unknown unit")],
)  # fmt: skip
def test_unreadable_limits_are_explained(text: str, hint: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_constraints(["mfu<1", text, "bubbel<1"])
    assert hint in str(caught.value)
    assert "bubbel" in str(caught.value), "all that is wrong is said at once"


def test_a_deadline_is_a_limit_on_the_pace() -> None:
    assert pace("15.6T", "60d") == Constraint("tokens_per_s", False, 15.6e12 / (60 * 86400))
    for tokens, deadline in (("", "60d"), ("1T", ""), ("many", "60d"), ("0", "60d"), ("1T", "60"), ("1T", "0 s"), ("1.2.3T", "1d")):
        with pytest.raises(InputError, match=r"--tokens|--deadline"):
            pace(tokens, deadline)


MEASURE = Measure(64, 8, 1e6, 5e16, 1e15, 2.0, 150.0, 900.0, 80e9)


@given(st.sampled_from([m for m in SIMPLE if "memory" not in m and "num" not in m]), st.floats(0.9, 100.0))
def test_the_longest_step_for_a_limit_meets_it(metric: str, seconds: float) -> None:
    value = MEASURE.metrics(seconds, 0.0)[metric]
    assert MEASURE.longest(metric, value) == pytest.approx(seconds, rel=1e-9)
    longer, shorter = (oriented(MEASURE.metrics(each, 0.0), metric) for each in (1.01 * seconds, seconds))
    assert longer > shorter


def test_energy_is_idle_power_all_the_time_and_the_rest_at_peak() -> None:
    ideal = 5e16 / (64 * 1e15)
    joules = 64 * (150.0 * 2.0 + 750.0 * ideal)
    assert MEASURE.metrics(2.0, 0.0)["energy_j_per_token"] == pytest.approx(joules / 1e6)
    assert MEASURE.longest("tokens_per_s", 0.0) == inf


# -- fronts ----------------------------------------------------------------------------------------------------------------


def brute_front(points: list[dict[str, float]], names: tuple[str, ...]) -> set[tuple[float, ...]]:
    # Times that differ by the order of a sum are equal, as in the search.
    same = [{n: rounded(p[n]) for n in names} for p in points]
    kept = [p for p in same if not any(dominates(q, p, names) for q in same)]
    return {tuple(round(p[n], 9 - len(str(int(abs(p[n]))))) for n in names) for p in kept}


@pytest.mark.parametrize("text", ["step_time,memory", "headroom,tokens_per_s_per_gpu", "step_time,cost_per_token",
                                  "memory,energy_per_token,tokens_per_s", "headroom,gpus"])  # fmt: skip
def test_the_front_is_what_nothing_dominates(text: str) -> None:
    space, names = small_space(), parse_front(text)
    found = ask(space, front=names, within=0.0)
    assert brute_front([c.metrics for c in found.candidates], names) == brute_front(
        [metrics(space, k) for k in every_layout()], names
    )
    assert not any(dominates(a.metrics, b.metrics, names) for a in found.candidates for b in found.candidates)


def test_the_front_counts_offloading() -> None:
    space, names = small_space(allow=TIGHT), ("step_time_s", "peak_memory_bytes")
    found = ask(space, front=names, within=0.0)
    every = [metrics(space, k) for k in every_layout(allow=TIGHT)]
    assert brute_front([c.metrics for c in found.candidates], names) == brute_front(every, names)


def test_the_usual_front_is_within_a_percent_of_every_layout() -> None:
    space = small_space()
    found = ask(space, front=("step_time_s", "peak_memory_bytes"))
    for known in every_layout():
        assert any(
            c.scored.step_time_s <= 1.01 * known.seconds * (1 + 1e-9) and c.scored.device_bytes <= 1.01 * known.bytes * (1 + 1e-9)
            for c in found.candidates
        )


def test_a_front_over_cluster_sizes_and_three_metrics() -> None:
    names = ("step_time_s", "peak_memory_bytes", "num_gpus")
    spaces = [small_space(n, BIGGER) for n in (1, 2)]
    found = answer(find_over(spaces, Wish(front=names, within=0.0)))
    every = [metrics(s, k) for n, s in zip((1, 2), spaces, strict=True) for k in every_layout(n, BIGGER)]
    assert brute_front([c.metrics for c in found.candidates], names) == brute_front(every, names)
    assert {c.metrics["num_gpus"] for c in found.candidates} == {8.0, 16.0}


@pytest.mark.parametrize(
    "text", ["step_time", "step_time,memory,energy_per_token,gpus", "step_time,speed", "gpus,num_gpus", "step_time,mfu"]
)
def test_impossible_fronts(text: str) -> None:
    with pytest.raises(InputError, match="--pareto"):
        parse_front(text)


# -- robust ----------------------------------------------------------------------------------------------------------------


def test_robust_ranks_by_the_upper_end_of_the_interval() -> None:
    space = small_space()
    every = sorted(k.result.step_interval.high for k in every_layout())
    found = ask(space, robust=True, keep=6)
    assert sorted(c.metrics["step_time_s"] for c in found.candidates) == pytest.approx(every[:6], rel=1e-9)
    for c in found.candidates:
        assert c.metrics["step_time_s"] == pytest.approx(c.result.step_interval.high, rel=1e-9)


def test_robust_limits_hold_at_the_upper_end() -> None:
    space = small_space()
    ends = sorted(k.result.step_interval.high for k in every_layout())
    limit = (ends[3] + ends[4]) / 2
    found = ask(space, robust=True, constraints=(Constraint("step_time_s", True, limit),), keep=10)
    assert len(found.candidates) == 4
    slow = ask(space, robust=True, constraints=(Constraint("step_time_s", False, limit),), keep=1)
    assert slow.candidates[0].metrics["step_time_s"] == pytest.approx(ends[4], rel=1e-9)


def test_a_robust_front_is_that_of_the_upper_ends() -> None:
    space, names = small_space(), ("step_time_s", "peak_memory_bytes")
    found = ask(space, front=names, within=0.0, robust=True)
    every = [measure(space).metrics(k.result.step_interval.high, k.bytes) for k in every_layout()]
    assert brute_front([c.metrics for c in found.candidates], names) == brute_front(every, names)


def test_no_interval_ends_below_what_the_bounds_assume() -> None:
    """Exactness of the robust search rests on it."""
    factor = widest(small_space())
    assert factor > 1.0
    for known in every_layout():
        assert known.result.step_interval.high >= known.seconds * factor * (1 - 1e-12)


# -- fewest GPUs -----------------------------------------------------------------------------------------------------------


def test_fewest_gpus_that_meet_a_deadline() -> None:
    spaces = [small_space(n, BIGGER) for n in (1, 2)]
    fastest = {n: min(k.seconds for k in every_layout(n, BIGGER)) for n in (1, 2)}
    tokens = 8 * 8192
    for seconds, nodes in ((fastest[1] * 1.001, 1), (fastest[1] * 0.999, 2), (fastest[2] * 1.001, 2)):
        limit = pace(str(tokens * 1000.0), f"{seconds * 1000.0} s")
        found = answer(find_over(spaces, Wish("num_gpus", keep=3, constraints=(limit,))), asked=2)
        assert found.best is not None
        assert found.best.result.world_size == 8 * nodes
        assert found.best.value == 8 * nodes
        assert found.best.scored.step_time_s <= seconds * (1 + 1e-9)
        assert found.finished, "sizes above the one that will do need no search"
    sooner = Constraint("step_time_s", True, fastest[2] * 0.999)
    too_soon = answer(find_over(spaces, Wish("num_gpus", constraints=(sooner,))), asked=2)
    assert too_soon.best is None
    assert too_soon.finished


def test_several_sizes_rank_together() -> None:
    spaces = [small_space(n, BIGGER) for n in (1, 2)]
    found = answer(find_over(spaces, Wish("tokens_per_s_per_gpu", keep=5)))
    every = [metrics(s, k)["tokens_per_s_per_gpu"] for n, s in zip((1, 2), spaces, strict=True) for k in every_layout(n, BIGGER)]
    assert sorted((c.value for c in found.candidates), reverse=True) == pytest.approx(sorted(every, reverse=True)[:5], rel=1e-9)


# -- ties ------------------------------------------------------------------------------------------------------------------


def test_ties_are_within_the_uncertainty() -> None:
    close = ("recompute=none,full:1,full:2", "tp=2")
    space = small_space(allow=[*(t for t in SMALL if "recompute" not in t and "tp=" not in t), *close])
    found = ask(space, keep=8)
    tied = [c for c in found.candidates if c.tied]
    rest = [c for c in found.candidates if not c.tied]
    fastest = found.candidates[0]
    assert fastest.tied
    assert len(tied) > 1
    assert rest
    assert [c.value for c in found.candidates] == sorted(c.value for c in found.candidates)
    for c in found.candidates:
        assert c.tied == (c.value <= fastest.value * (1.0 + TIE))


def test_a_narrow_interval_tells_close_layouts_apart() -> None:
    first = ask(small_space(), keep=1).candidates[0]
    close = replace(first, value=1.005 * first.value)
    sure = replace(first.result, step_interval=Interval(0.999 * first.value, 1.001 * first.value))
    assert is_tied(first, close, Wish())
    assert not is_tied(replace(first, result=sure), close, Wish())
    assert not is_tied(first, replace(first, value=1.011 * first.value), Wish())
    # Neither memory nor a number of GPUs is uncertain in this way.
    assert not is_tied(first, close, Wish("memory_headroom"))
    assert not is_tied(first, close, Wish("num_gpus"))


def test_orientation_of_metrics() -> None:
    assert {m for m in SIMPLE if oriented(dict.fromkeys(SIMPLE, 1.0), m) < 0} == set(LARGER_IS_BETTER)
