"""Reasons: the runner-up and what it lacks, waterfalls, accounts that add up, the layout that needs least memory."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import pytest
from search_layouts import SMALL, every_layout, small_space

from simpar.searching.answer import Answer, answer
from simpar.searching.find import find
from simpar.searching.objective import parse_constraints
from simpar.searching.parts import Wish
from simpar.searching.runner_up import differences, turning_points, waterfalls
from simpar.searching.space import Space
from simpar.searching.why import inside, left_out, narrowed, shortage, why


@pytest.fixture(scope="module")
def found() -> Answer:
    return answer([find(small_space(), Wish(keep=3))])


def test_the_runner_up_is_the_best_of_all_other_meshes() -> None:
    found = answer([find(small_space(), Wish(keep=10, fold=True))])
    other, best = found.runner_up, found.best
    assert other is not None
    assert best is not None
    mine = best.scored.choice.mesh_key
    fastest = min(k.seconds for k in every_layout() if k.choice.mesh_key != mine)
    assert other.proven
    assert other.result.step_time_s == pytest.approx(fastest, rel=1e-9)
    assert other.slower_by == pytest.approx(fastest / best.result.step_time_s - 1.0, rel=1e-9)
    assert other.differs_in == differences(best.scored.choice, other.choice)
    assert other.choice.mesh_key != mine


def test_axes_that_mean_nothing_at_a_degree_of_one_are_no_difference() -> None:
    choice = every_layout()[0].choice
    one = replace(choice, group=replace(choice.group, tp=4, cp=1, ep=1, etp=4), variant=replace(choice.variant, cp_style="ring"))
    other = replace(one, group=replace(one.group, tp=2, cp=2, etp=2), variant=replace(one.variant, cp_style="all_gather"))
    assert differences(one, other) == {"tp": (4, 2), "cp": (1, 2)}
    split = replace(one, group=replace(one.group, cp=2))
    assert differences(split, other)["cp_style"] == ("ring", "all_gather")


def test_each_design_says_what_it_trades_against_the_best(found: Answer) -> None:
    best = found.candidates[0]
    assert best.trade is None
    assert best.to_json()["against_best"] is None
    for other in found.candidates[1:]:
        told = other.to_json()["against_best"]
        assert told["step_time_s"] == pytest.approx(other.result.step_time_s - best.result.step_time_s)
        memory = other.result.worst_rank.device_bytes - best.result.worst_rank.device_bytes
        assert told["peak_memory_bytes"] == pytest.approx(memory)
        mine, theirs = best.result.breakdown, other.result.breakdown
        more = {name: theirs.get(name, 0.0) - mine.get(name, 0.0) for name in {*mine, *theirs}}
        widest = sorted(more.values(), key=abs, reverse=True)
        assert list(told["by_category_s"].values()) == pytest.approx(widest[: len(told["by_category_s"])])
        assert all(more[name] == pytest.approx(seconds) for name, seconds in told["by_category_s"].items())
    assert any(c.trade.by_category_s for c in found.candidates[1:] if c.trade is not None)


def test_turning_points_make_both_equally_fast() -> None:
    """A category's seconds times the factor, in both, and the step times meet: by the breakdown, which adds up to the step."""
    ordered = sorted(every_layout(), key=lambda k: k.seconds)
    best, checked = ordered[0].result, 0
    for known in ordered[1:30:2]:
        other = known.result
        for name, factor in turning_points(best, other).items():
            a = best.step_time_s + (factor - 1.0) * best.breakdown.get(name, 0.0)
            b = other.step_time_s + (factor - 1.0) * other.breakdown.get(name, 0.0)
            assert a == pytest.approx(b, rel=1e-9)
            assert 0.1 <= factor <= 10.0
            checked += 1
    assert checked > 5
    assert turning_points(best, best) == {}


def test_waterfalls_stand_side_by_side_and_add_up() -> None:
    known = every_layout()
    a, b = known[0].result, known[-1].result
    rows = waterfalls(a, b)
    assert sum(x for _, x, _ in rows) == pytest.approx(a.step_time_s, rel=1e-6)
    assert sum(y for _, _, y in rows) == pytest.approx(b.step_time_s, rel=1e-6)
    assert len({name for name, _, _ in rows}) == len(rows)


def test_every_layout_is_accounted_for(found: Answer) -> None:
    document = found.to_json()
    assert document["kept"] + sum(document["rejected"].values()) == document["space_size"] == small_space().size
    assert all(count > 0 for count in document["rejected"].values())
    # Asked for all of them, what is rejected is exactly what does not fit.
    every = find(small_space(), Wish(keep=10_000))
    assert len(every.best) == len(every_layout())
    memory = sum(n for reason, n in every.account.rejected.items() if "fit" in reason)
    assert memory + len(every.best) == every.size
    assert memory > 0


def test_what_is_asked_may_go_beyond_the_space(found: Answer) -> None:
    """Every layout of a space is inside; a corner with a value that was not allowed is looked at, and said to be outside."""
    assert found.best is not None
    space = small_space()
    assert all(inside(space, choice) for choice in islice(space.choices(), 0, None, 7))
    other = replace(found.best.scored.choice, group=replace(found.best.scored.choice.group, tp=8))
    assert not inside(space, other)
    fewer = Space(space.template, {**space.restrictions, "micro_batch_size": (2,)}, space.framework)
    assert not any(inside(fewer, choice) for choice in islice(space.choices(), 10))
    free = Space(space.template, {}, space.framework)
    assert left_out(free, found.best.scored.choice) == ""
    wide = replace(other, group=replace(other.group, tp=2 * space.template.hardware.domain_size), micro_batch_size=64)
    assert "a scale-up domain of 8 GPUs and micro_batch_size stays within 32" in left_out(free, wide)
    assert "--allow tp=16 --allow micro_batch_size=64" in left_out(free, wide)


def test_why_not_is_the_best_of_the_corner(found: Answer) -> None:
    assert found.best is not None
    winner = found.best.scored.choice
    corner = [k for k in every_layout() if k.choice.group.tp == 4 and k.choice.group.pp == 2]
    reason = why(small_space(), Wish(), "tp=4,pp=2", winner)
    assert reason.result is not None
    assert reason.result.step_time_s == pytest.approx(min(k.seconds for k in corner), rel=1e-9)
    assert reason.slower_by == pytest.approx(reason.result.step_time_s / found.best.result.step_time_s - 1.0)
    assert reason.size == narrowed(small_space(), {"tp": (4,), "pp": (2,)}).size
    own = why(small_space(), Wish(), f"tp={winner.group.tp},pp={winner.group.pp},cp={winner.group.cp}", winner)
    assert own.slower_by == pytest.approx(0.0, abs=1e-9) or (own.slower_by is not None and own.slower_by < 0.0)


def test_a_corner_that_misses_a_limit_is_not_simulated_whole(found: Answer) -> None:
    assert found.best is not None
    limit = parse_constraints(("bubble_fraction<=0.0001",))
    reason = why(small_space(), Wish(constraints=limit), "pp=2", found.best.scored.choice)
    assert reason.result is not None
    assert reason.missed[0].startswith("bubble_fraction <= 0.0001 (0.")
    assert reason.account.evaluated["simulated"] <= 5
    assert reason.size > 30


def test_what_is_not_in_the_space_names_the_rule(found: Answer) -> None:
    assert found.best is not None
    winner = found.best.scored.choice
    for asked, hint in (("tp=8", "tp is restricted to 1,2,4"), ("pp=3", "pp is restricted to"), ("ep=2", "no experts"),
                        ("tp=4,pp=4", "tp x")):  # fmt: skip
        reason = why(small_space(), Wish(), asked, winner)
        assert reason.size == 0
        assert hint in "; ".join(reason.broken)


def test_the_shortage_is_the_least_that_any_layout_needs() -> None:
    """On devices of a fifth of the memory nothing of this space fits; what needs least is known from plenty."""
    allow = (*(t for t in SMALL if not t.startswith(("cp=", "schedule"))), "cp=1", "schedule=1f1b")
    space = small_space(allow=allow)
    least = min(k.bytes for k in every_layout(allow=allow))
    cluster = space.template.cluster.model_copy(update={"memory_scale": 0.2})
    small = replace(space, scenario=space.template.model_copy(update={"cluster": cluster}))
    assert not find(small, Wish()).best
    short = shortage(small)
    assert short is not None
    assert short.device_bytes == pytest.approx(0.2 * space.template.hardware.gpu.memory.value)
    assert short.needed_bytes == pytest.approx(least, rel=0.02), "what the allocator reserves depends on the room that it has"
    assert sum(short.by_category.values()) == pytest.approx(short.needed_bytes, rel=1e-9)
