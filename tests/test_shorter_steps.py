"""A step that begins as another one is resumed where it differs: programs as lowering makes them, times as the engine has them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from test_size import SMALL

from simpar.engine.resume import head_of
from simpar.program.program import OpKind, PriceTable, Program
from simpar.program.shorter import LeftOut, leave_out, rounds
from simpar.result.folded import with_microbatches
from simpar.result.interpret import Priced
from simpar.result.shorter_steps import same_rows
from simpar.schedules import SCHEDULES
from simpar.specs.scenario import make_scenario
from simpar.step import prepare, run

Steps = tuple[Priced, Priced, LeftOut | None]


def described(program: Program) -> dict[str, Any]:
    """All of a program but what its ops are called and the numbers of its micro-batches."""
    waits = np.split(program.dep_ops, program.dep_ptr[1:-1])
    return {
        "streams": [(str(stream), program.ops_of(stream).tolist()) for stream in program.streams],
        "keys": [program.price_keys[price] for price in program.price],
        "waits": [sorted(ops.tolist()) for ops in waits],
        "ops": [getattr(program, name).tolist() for name in ("kind", "stage", "layer", "role")],
        "pairs": sorted((op, stage) for op, (stage, _) in program.pairs.items()),
    }


def steps(few: int, more: int, detail: Any = "stage", **plan: Any) -> Steps:
    """Steps of few and of more micro-batches, and the longer one without a round."""
    given = make_scenario({**SMALL, "plan": {"tp": 1, "pp": 4, **plan}})
    short, long = (prepare(with_microbatches(given, count), detail=detail) for count in (few, more))
    found = rounds(short.schedule, long.schedule)
    left = found and leave_out(long.program, long.schedule, found, (more - few) // long.schedule.replicas)
    return short, long, left or None


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
@pytest.mark.parametrize("zero_stage", [1, 3])
@pytest.mark.parametrize("detail", ["stage", "op"])
def test_without_a_round_it_is_the_shorter_step(schedule: str, zero_stage: int, detail: str) -> None:
    virtual = SCHEDULES[schedule].virtual_stages or (2 if "interleaved" in schedule else 1)
    more = 36 if "interleaved" in schedule else 34 if SCHEDULES[schedule].replicas > 1 else 33
    short, long, left = steps(32, more, detail, schedule=schedule, virtual_stages=virtual, zero_stage=zero_stage)
    # Where all forwards come before all backwards, none of them comes between the rounds of the other.
    assert (left is None) == (schedule in ("gpipe", "interleaved_bfs"))
    if left is None:
        return
    assert described(left.program) == described(short.program)
    if np.array_equal(short.table.seconds, long.table.seconds):
        head, whole = head_of(left.program, short.table, run(long), long.table, left.kept), run(short)
        resumed = run(replace(short, program=left.program), head=head)
        assert head.done > short.program.num_ops / 2
        assert np.array_equal(resumed.start, whole.start)
        assert np.array_equal(resumed.finish, whole.finish)


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
@pytest.mark.parametrize(("first", "second"), [(32, 56), (56, 32)])
@pytest.mark.parametrize("interference", [True, False])
def test_a_run_is_resumed_where_it_differs_from_another(schedule: str, first: int, second: int, interference: bool) -> None:
    """To the last bit, over stages of unequal length; breadth first, rows differ after the forwards of one chunk."""
    virtual = SCHEDULES[schedule].virtual_stages or (2 if "interleaved" in schedule else 1)
    split = [1, 3, 2, 2, 2, 3, 2, 1] if virtual == 2 else [3, 5, 6, 2]
    other, long, _ = steps(first, second, schedule=schedule, virtual_stages=virtual, layers_per_stage=split)
    known = run(other, interference=interference)
    head = head_of(long.program, long.table, known, other.table, same_rows(long, other))
    resumed, whole = (run(long, head=begun, interference=interference) for begun in (head, None))
    least = 0.1 if schedule in ("gpipe", "interleaved_bfs") else 0.5
    assert head.done > least * min(long.program.num_ops, other.program.num_ops)
    assert np.array_equal(resumed.start, whole.start)
    assert np.array_equal(resumed.finish, whole.finish)


def test_what_starts_behind_another_price_is_not_known() -> None:
    """The last stage's backwards take twice as long: known is what starts before its first one and has ended by then."""
    step, other, _ = steps(32, 32, schedule="1f1b")
    backward = (step.program.kind == OpKind.BACKWARD) & (step.program.stage == 3)
    slow = step.table.seconds * np.where(np.isin(np.arange(len(step.table.seconds)), step.program.price[backward]), 2.0, 1.0)
    slower = replace(step, table=PriceTable(slow, step.table.interference))
    known = run(other)
    head = head_of(slower.program, slower.table, known, other.table, np.arange(step.program.num_ops))
    first = known.start[backward].min()
    assert head.until == min(first, known.start[known.finish >= first].min())
    assert np.array_equal(~np.isnan(head.start), known.start < head.until)
    resumed, whole = run(slower, head=head), run(slower)
    assert np.array_equal(resumed.finish, whole.finish)


def test_a_wait_across_the_round_is_for_another_micro_batch() -> None:
    """Interleaved over few rounds: backwards behind the round wait for forwards of the warm-up, which are not one as the other."""
    short, _, left = steps(16, 20, schedule="interleaved", virtual_stages=4)
    assert left is not None
    assert described(left.program) == described(short.program)
