"""Compute beside communication progresses at 1 / (1 + f)."""

from __future__ import annotations

import pytest
from engine_programs import chain, prices, programs, table
from hypothesis import given
from hypothesis import strategies as st
from test_engine_equal import counted

from simpar.engine.discrete_event import Effects, run
from simpar.engine.interference import Interference
from simpar.engine.longest_path import longest_path


def one_compute(*communication: tuple[str, list[str]]):
    ops = [("compute", [(0, "compute")], [])]
    return chain("beside", ops + [(k, [(0, k)], deps) for k, deps in communication]).build()


def test_hidden_communication_stretches_compute():
    """Communication 2 s at f = 0.25 beside 10 s of compute: 2 s at 0.8 speed, so 0.4 s are lost."""
    timeline = run(one_compute(("dp", [])), table([10.0, 2.0], [0.0, 0.25]), Effects(interference=True))
    assert timeline.finish.tolist() == pytest.approx([10.4, 2.0], rel=1e-14)
    assert run(one_compute(("dp", [])), table([10.0, 2.0], [0.0, 0.25])).makespan == 10.0


def test_longer_communication_stretches_all_of_compute():
    timeline = run(one_compute(("dp", [])), table([4.0, 9.0], [0.0, 0.5]), Effects(interference=True))
    assert timeline.finish.tolist() == pytest.approx([6.0, 9.0], rel=1e-14)


def test_several_at_once_count_as_the_worst():
    """f = 0.5 on [0, 4], f = 1 on [0, 2]: speed 1/2, then 2/3, then 1; 1 + 4/3 done at 4 s, the rest of 5 s after."""
    timeline = run(one_compute(("dp", []), ("tp", [])), table([5.0, 4.0, 2.0], [0.0, 0.5, 1.0]), Effects(interference=True))
    assert timeline.finish[0] == pytest.approx(4.0 + 5.0 - 1.0 - 4.0 / 3.0, rel=1e-14)


def test_back_to_back_communication_is_one_long_one():
    together = run(one_compute(("dp", [])), table([9.0, 3.0], [0.0, 0.5]), Effects(interference=True))
    program = chain("split", [("c", [(0, "compute")], [])] + [(i, [(0, "dp")], []) for i in range(3)]).build()
    split, events = counted(program, table([9.0, 1.0, 1.0, 1.0], [0.0, 0.5, 0.5, 0.5]), interference=True)
    assert split.finish[0] == pytest.approx(together.finish[0], rel=1e-14)
    assert events == 5  # one per op, and one look at the compute op after it was delayed


def test_other_roles_and_blocking_communication_are_not_slowed():
    program = chain(
        "roles",
        [("a", [(0, "compute")], []), ("b", [(1, "compute")], []), ("x", [(1, "dp")], []),
         ("y", [(0, "compute"), (0, "tp")], [])],
    ).build()  # fmt: skip
    timeline = run(program, table([5.0, 5.0, 5.0, 1.0], [0.0, 0.0, 1.0, 1.0]), Effects(interference=True))
    assert timeline.finish.tolist() == [5.0, 7.5, 5.0, 6.0]


def test_roles_that_always_act_together_are_one():
    """Roles 0 and 1 take part in the same ops; with role 2 in only one of them, three roles fold to two."""
    both, wide = [(0, "compute"), (1, "compute")], [(0, "dp"), (1, "dp")]
    ops = [("f", both, []), ("c", wide, []), ("g", both, ["f"]), ("h", [*both, (2, "compute")], []), ("d", [*wide, (2, "dp")], [])]
    seconds, factors = [3.0, 2.0, 1.0, 2.0, 5.0], [0.0, 0.5, 0.0, 0.0, 0.25]
    program = chain("together", ops).build()
    beside = Interference(program, table(seconds, factors), frozenset())
    assert beside.loud == [(), (0,), (), (), (0, 1)]
    assert beside.slowed == [(0,), (), (0,), (0, 1), ()]
    alone = chain("alone", [(k, [s for s in streams if s[0] != 1], deps) for k, streams, deps in ops]).build()
    found = [run(p, table(seconds, factors), Effects(interference=True)).finish.tolist() for p in (program, alone)]
    assert found[0] == found[1] == pytest.approx([49 / 12, 2.0, 16 / 3, 23 / 3, 7.0], rel=1e-14)


@given(st.data())
def test_without_factors_nothing_changes(data):
    program = data.draw(programs(acyclic=True))
    table_ = data.draw(prices(program))
    quiet = table(table_.seconds)
    assert run(program, quiet, Effects(interference=True)).finish.tobytes() == longest_path(program, quiet).finish.tobytes()


@given(st.data())
def test_bounds_and_work(data):
    """Never faster than without, never slower than all compute at its worst factor; other ops keep their price."""
    program = data.draw(programs(acyclic=True))
    table_ = data.draw(prices(program))
    timeline = run(program, table_, Effects(interference=True))
    tolerance = 1e-9 * max(1.0, timeline.makespan)
    assert (timeline.finish >= longest_path(program, table_).finish - tolerance).all()
    worst = table(table_.seconds * (1.0 + table_.interference.max(initial=0.0)))
    assert (timeline.finish <= longest_path(program, worst).finish + tolerance).all()
    loud = table_.interference[program.price] > 0.0
    assert timeline.seconds[loud] == pytest.approx(table_.seconds[program.price][loud], abs=tolerance)


@given(st.data())
def test_at_most_three_events_per_op(data):
    program = data.draw(programs(acyclic=True))
    events = counted(program, data.draw(prices(program)), interference=True)[1]
    assert events <= 3 * program.num_ops
