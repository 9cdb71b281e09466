"""Shorter steps: programs as lowering makes them, times as the engine finds them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_size import SMALL

from simpar.engine.slowed_paths import timeline
from simpar.errors import InputError
from simpar.program.program import Program
from simpar.program.shorter import leave_out, rounds
from simpar.result.folded import with_microbatches
from simpar.schedules import SCHEDULES
from simpar.specs.scenario import make_scenario
from simpar.step import prepare, run


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


def steps(few: int, more: int, detail: Any = "stage", **plan: Any) -> tuple[Program, Program | None]:
    """The program of few micro-batches, and that of more without a round."""
    step = make_scenario({**SMALL, "plan": {"tp": 1, "pp": 4, **plan}})
    short, long = (prepare(with_microbatches(step, count), detail=detail) for count in (few, more))
    found = rounds(short.schedule, long.schedule)
    left = found and leave_out(long.program, long.schedule, found, (more - few) // long.schedule.replicas)
    return short.program, left or None


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
@pytest.mark.parametrize("zero_stage", [1, 3])
@pytest.mark.parametrize("detail", ["stage", "op"])
def test_without_a_round_it_is_the_shorter_step(schedule: str, zero_stage: int, detail: str) -> None:
    virtual = SCHEDULES[schedule].virtual_stages or (2 if "interleaved" in schedule else 1)
    more = 36 if "interleaved" in schedule else 34 if SCHEDULES[schedule].replicas > 1 else 33
    short, left = steps(32, more, detail, schedule=schedule, virtual_stages=virtual, zero_stage=zero_stage)
    # Where all forwards come before all backwards, none of them comes between the rounds of the other.
    assert (left is None) == (schedule in ("gpipe", "interleaved_bfs"))
    if left is None:
        return
    assert described(left) == described(short)


def test_a_wait_across_the_round_is_for_another_micro_batch() -> None:
    """Interleaved over few rounds: backwards behind the round wait for forwards of the warm-up, which are not one as the other."""
    short, left = steps(16, 20, schedule="interleaved", virtual_stages=4)
    assert left is not None
    assert described(left) == described(short)


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(
    schedule=st.sampled_from(sorted(SCHEDULES)), detail=st.sampled_from(["stage", "layer", "op"]),
    cuts=st.sets(st.integers(1, 15), min_size=7, max_size=7), zero_stage=st.integers(0, 3), tp=st.sampled_from([1, 2]),
    more=st.sampled_from([{}, {"offload": {"activations": 0.5}}, {"recompute": "full"}]),
    framework=st.sampled_from(["megatron-core", "torchtitan", "deepspeed"]),
)  # fmt: skip
def test_the_recurrence_finds_the_times_of_the_engine(
    schedule: str, detail: Any, cuts: set[int], zero_stage: int, tp: int, more: dict[str, Any], framework: str
) -> None:
    """Whatever runs beside the compute of stages of unequal length."""
    virtual = SCHEDULES[schedule].virtual_stages or (2 if "interleaved" in schedule else 1)
    ends = sorted(cuts)[2 - virtual :: 3 - virtual]
    layers = [b - a for a, b in zip([0, *ends], [*ends, 16], strict=True)]
    plan = {
        "tp": tp,
        "pp": 4,
        "schedule": schedule,
        "virtual_stages": virtual,
        "layers_per_stage": layers,
        "zero_stage": zero_stage,
    }
    table = {**SMALL, "cluster": {"hardware": "dgx-h100", "num_nodes": 2}, "framework": framework}
    try:
        step = prepare(with_microbatches(make_scenario({**table, "plan": {**plan, **more}}), 16), detail=detail)
    except InputError:  # A framework without the schedule.
        return
    found, engine = timeline(step.program, step.table), run(step)
    assert np.abs(found.start - engine.start).max() <= 1e-14 * engine.makespan
    assert np.abs(found.finish - engine.finish).max() <= 1e-14 * engine.makespan
