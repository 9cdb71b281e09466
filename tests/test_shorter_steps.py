"""A step a round shorter is read off the longer one: the program that lowering makes, the times that the engine finds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from test_size import SMALL

from simpar.engine.timeline import Timeline
from simpar.program.program import Program
from simpar.program.shorter import LeftOut, leave_out, rounds
from simpar.result.folded import with_microbatches
from simpar.result.interpret import Priced
from simpar.result.regime import without_round
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


def without(long: Priced, left: LeftOut, tolerance: float = 1e-14) -> Timeline | None:
    timeline = run(long)
    return without_round(timeline, left, tolerance * timeline.makespan)


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
    times, timeline = without(long, left), run(short)
    if times is not None:
        assert times.start == pytest.approx(timeline.start, rel=0.0, abs=1e-13 * timeline.makespan)
        assert times.finish == pytest.approx(timeline.finish, rel=0.0, abs=1e-13 * timeline.makespan)
        # To the last bit an op starts with the end of one that it waited for, as in the engine.
        assert set(times.start.tolist()) <= {0.0, *times.finish.tolist()}


@pytest.mark.parametrize(("schedule", "virtual"), [("1f1b", 1), ("interleaved", 2), ("v-half", 2), ("dualpipe-v", 2)])
def test_times_are_read_off_once_rounds_are_alike(schedule: str, virtual: int) -> None:
    _, long, left = steps(32, 36 if schedule == "interleaved" else 33, schedule=schedule, virtual_stages=virtual)
    assert left is not None
    assert without(long, left) is not None


def test_nothing_is_read_off_a_round_that_takes_its_time() -> None:
    """Every op from the round before on comes later, the longer the later: none is the one a round earlier moved."""
    _, long, left = steps(32, 33, schedule="1f1b")
    assert left is not None
    timeline = run(long)
    first, begin, stop, _ = left.rows[0]
    slower = np.where(np.arange(long.program.num_ops) >= 2 * begin - stop, 1.001, 1.0)
    assert first < 2 * begin - stop
    assert without_round(Timeline(long.program, timeline.start * slower, timeline.finish * slower), left, 1e-9) is None


def test_a_wait_across_the_round_is_for_another_micro_batch() -> None:
    """Interleaved over few rounds: backwards behind the round wait for forwards of the warm-up, which are not one as the other."""
    short, _, left = steps(16, 20, schedule="interleaved", virtual_stages=4)
    assert left is not None
    assert described(left.program) == described(short.program)
