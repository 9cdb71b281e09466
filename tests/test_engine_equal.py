"""Both engines have one semantics: equal finish times, bit by bit; networkx's longest path agrees."""

from __future__ import annotations

from itertools import pairwise

import networkx as nx
import numpy as np
import pytest
import simpy
from engine_programs import chain, prices, programs, table
from hypothesis import given
from hypothesis import strategies as st

from simpar.engine import discrete_event
from simpar.engine.discrete_event import Effects, run
from simpar.engine.jitter import Noise
from simpar.engine.longest_path import Sweep, longest_path, longest_path_batch
from simpar.errors import DeadlockError, InputError, InternalError
from simpar.program.builder import ProgramBuilder
from simpar.program.program import OpKind, Program, Stream


def replayed(program, table_, **options):
    return run(program, table_, Effects(**options))


def outcome(engine, program, table_, **options):
    try:
        timeline = engine(program, table_, **options)
    except DeadlockError as error:
        return error.cycle
    return timeline.start.tobytes(), timeline.finish.tobytes()


@given(st.data())
def test_engines_agree_bit_by_bit(data):
    program = data.draw(programs())
    table_ = data.draw(prices(program))
    options = {
        "slow_factors": data.draw(st.sampled_from([None, {r: 1.0 + r / 7 for r in program.role_streams}])),
        "noise": data.draw(st.sampled_from([None, Noise(0.1, 0.2, 0.05)])),
        "seed": 3,
    }
    assert outcome(replayed, program, table_, **options) == outcome(longest_path, program, table_, **options)


@given(st.data())
def test_numpy_and_python_sweeps_agree_bit_by_bit(data):
    program = data.draw(programs(acyclic=True))
    table_ = data.draw(prices(program))
    seconds = np.stack([table_.seconds, table_.seconds[::-1], 3 * table_.seconds])
    finish = longest_path_batch(program, seconds, finish=True)
    spans = longest_path_batch(program, seconds)
    for row, by_op, span in zip(seconds, finish, spans, strict=True):
        timeline = longest_path(program, table(row))
        assert timeline.finish.tobytes() == by_op.tobytes()
        assert timeline.makespan == span


def longest_by_networkx(program: Program, seconds: np.ndarray) -> float:
    graph = nx.DiGraph()
    graph.add_node("end")
    ptr, ops = program.predecessors
    for op in range(program.num_ops):
        graph.add_edge(op, "end", weight=seconds[program.price[op]])
        for before in ops[ptr[op] : ptr[op + 1]].tolist():
            graph.add_edge(before, op, weight=seconds[program.price[before]])
    return nx.dag_longest_path_length(graph)


@given(st.data())
def test_networkx_agrees(data):
    program = data.draw(programs(acyclic=True))
    table_ = data.draw(prices(program))
    assert longest_path(program, table_).makespan == pytest.approx(longest_by_networkx(program, table_.seconds), rel=1e-12)


def test_a_dependency_that_the_order_of_a_stream_implies_is_none() -> None:
    """Of four ops on a stream the last waits for the first, as it does anyway, and for a send. Waiting for a later op deadlocks."""
    builder = ProgramBuilder("one stream")
    lanes = {True: Stream(0, "pp"), False: Stream(0, "compute")}

    def add(key: str, *deps: str) -> None:
        builder.add(key, kind=OpKind.OTHER, role=0, streams=[lanes[key == "s"]], price=0, deps=deps)

    for key, *deps in ("a", "b", "sa", "c", "dabs"):
        add(key, *deps)
    ptr, ops = builder.build().predecessors
    assert [ops[a:b].tolist() for a, b in pairwise(ptr)] == [[], [0], [0], [1], [2, 3]]
    add("e", "f")
    add("f", "f")
    with pytest.raises(DeadlockError):
        builder.build().check()


@given(st.data())
def test_semantics_hold_on_the_timeline(data):
    """Checked without the predecessor arrays: dependencies finished, streams serial and in order, no idle waiting."""
    program = data.draw(programs(acyclic=True))
    timeline = run(program, data.draw(prices(program)))
    releases = [[0.0] for _ in range(program.num_ops)]
    for op in range(program.num_ops):
        releases[op] += timeline.finish[program.dep_ops[program.dep_ptr[op] : program.dep_ptr[op + 1]]].tolist()
    for first, last in zip(program.stream_ptr[:-1], program.stream_ptr[1:], strict=True):
        ops = program.stream_ops[first:last]
        for before, after in pairwise(ops):
            releases[after].append(timeline.finish[before])
    assert timeline.start.tolist() == [max(times) for times in releases]


@given(st.data())
def test_reducing_a_price_never_delays_any_op(data):
    program = data.draw(programs(acyclic=True))
    table_ = data.draw(prices(program))
    if not program.price_keys:
        return
    index = data.draw(st.integers(0, len(program.price_keys) - 1))
    cheaper = table_.seconds.copy()
    cheaper[index] *= data.draw(st.floats(0.0, 1.0))
    assert (run(program, table(cheaper)).finish <= run(program, table_).finish).all()


@given(st.data())
def test_one_event_per_op(data):
    program = data.draw(programs(acyclic=True))
    table_ = data.draw(prices(program))
    assert counted(program, table_)[1] == program.num_ops


def counted(program, table_, **options):
    """(timeline, SimPy events scheduled)."""
    events = 0

    class Counting(simpy.Environment):
        def schedule(self, *args, **kwargs):
            nonlocal events
            events += 1
            super().schedule(*args, **kwargs)

    original, discrete_event.Environment = discrete_event.Environment, Counting
    try:
        return run(program, table_, Effects(**options)), events
    finally:
        discrete_event.Environment = original


def test_deadlock_names_the_cycle():
    crossed = [("a0", [(0, "compute")], ["b1"]), ("b0", [(0, "compute")], []),
               ("b1", [(1, "compute")], []), ("a1", [(1, "compute")], [])]  # fmt: skip
    program = chain("fine", crossed).build()
    assert run(program, table([1.0] * 4)).makespan == 3.0
    crossed[2] = ("b1", [(1, "compute")], ["b0"])
    program = chain("crossed", crossed).build()
    messages = set()
    for engine in (run, longest_path, lambda p, t: longest_path_batch(p, t.seconds[None])):
        with pytest.raises(DeadlockError) as caught:
            engine(program, table([1.0] * 4))
        messages.add(caught.value.cycle)
    assert len(messages) == 1
    assert len(messages.pop()) == 3


def test_rendezvous_waits_for_both_streams():
    program = chain(
        "rendezvous",
        [("x", [(0, "compute")], []), ("y", [(1, "compute")], []), ("z", [(0, "compute"), (1, "compute")], [])],
    ).build()
    timeline = run(program, table([1.0, 3.0, 0.5]))
    assert timeline.start.tolist() == [0.0, 0.0, 3.0]
    assert timeline.makespan == 3.5
    assert timeline.busy_s().tolist() == [1.5, 3.5]


def test_ops_of_streams_stand_in_order_of_time():
    program = chain("overlap", [("f", [(0, "compute")], []), ("c", [(0, "dp")], []), ("d", [(0, "dp")], ["f"])]).build()
    timeline = run(program, table([4.0, 1.0, 2.0]))
    assert timeline.stream_ops(0, ["compute", "dp"]).tolist() == [1, 0, 2]
    assert timeline.stream_ops(7).tolist() == []


def test_empty_program():
    program = chain("empty", []).build()
    for engine in (run, longest_path):
        assert engine(program, table([])).makespan == 0.0
    assert longest_path_batch(program, np.zeros((3, 0))).tolist() == [0.0, 0.0, 0.0]


def test_wrong_prices_are_bugs_and_wrong_factors_are_input_errors():
    program = chain("two", [("f", [(0, "compute")], []), ("g", [(0, "compute")], [])]).build()
    for wrong in ([1.0], [1.0, -1.0], [1.0, np.nan], [np.inf, 1.0]):
        for engine in (run, longest_path):
            with pytest.raises(InternalError):
                engine(program, table(wrong))
        with pytest.raises(InternalError):
            longest_path_batch(program, np.array([wrong]))
    with pytest.raises(InputError) as caught:
        run(program, table([1.0, 1.0]), Effects(slow_factors={0: 1.1, 5: 1.5}))
    assert len(caught.value.violations) == 1
    assert "slow_factors[5]" in str(caught.value)


def test_sweep_is_prepared_once():
    program = chain("kept", [("f", [(0, "compute")], [])]).build()
    assert Sweep.of(program) is Sweep.of(program)
