"""Traces of simulated steps with known distortions: each difference goes to its own cause."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kineto_of_step import later_gaps, one_late, slower_gemms, stepped, write_kineto

from simpar.errors import InputError
from simpar.interop.kineto_step import read_steps
from simpar.live.trace_diff import GROUPS, TraceDiff, diff
from simpar.live.trace_partition import ORDER, partition
from simpar.live.trace_slices import Slice, predicted_slices
from simpar.program.program import OpKind, PriceTable
from simpar.result.interpret import Priced
from simpar.specs.scenario import Scenario, make_scenario
from simpar.step import prepare

MODEL = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 6, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "vocab_size": 32000,
}  # fmt: skip
PLANS = {
    "alone": {"dp": 1}, "sharded": {"dp": 8, "zero_stage": 3}, "tensor": {"tp": 4, "dp": 2},
    "pipeline": {"tp": 2, "pp": 2, "dp": 2}, "full": {"tp": 2, "pp": 2, "dp": 2, "recompute": "full"},
}  # fmt: skip


@lru_cache(maxsize=16)
def scenario(plan: str, interference: bool = True) -> Scenario:
    """Small, one node; sequences so long that an eager host keeps ahead of the device."""
    degrees = PLANS[plan]
    ranks = 1
    for name in ("tp", "pp", "dp"):
        ranks *= int(degrees.get(name, 1))
    return make_scenario({
        "name": plan, "model": MODEL, "framework": "torchtitan", "framework_version": "2025-06",
        "cluster": {"hardware": "dgx-h100", "num_nodes": 1, "num_gpus": ranks}, "plan": degrees,
        "training": {"sequence_length": 16384, "micro_batch_size": 1, "global_batch_size": 4 * int(degrees["dp"])},
        "effects": {"interference": interference},
    })  # fmt: skip


@lru_cache(maxsize=16)
def priced(plan: str, interference: bool = True) -> Priced:
    """Op by op."""
    found = prepare(scenario(plan, interference), detail="op")
    return replace(found, table=PriceTable(found.table.seconds, float(interference) * found.table.interference))


def compared(plan: str, path: Path, rank: int | None = None, interference: bool = True) -> TraceDiff:
    """The trace at `path` against the undistorted prediction."""
    return diff(scenario(plan, interference), partial(read_steps, path), rank)


def change(found: TraceDiff, name: str) -> float:
    """Seconds that a cause adds."""
    return next((c.difference_s for c in found.causes if c.name == name), 0.0)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("launches", [True, False])
def test_an_undistorted_step_has_no_difference(tmp_path: Path, plan: str, launches: bool) -> None:
    write_kineto(priced(plan), tmp_path / "t.json.gz", launches=launches)
    found = compared(plan, tmp_path / "t.json.gz")
    assert found.measured_step_s == pytest.approx(found.predicted_step_s, rel=1e-3)
    for cause in found.causes:
        # Without the host's calls a long gap cannot be told from a wait, nor the host's last gap of a pass from the wait for
        # what is received after it.
        if (launches and scenario(plan).plan.pp == 1) or cause.group not in ("bubble", "launch gaps", "other"):
            assert abs(cause.difference_s) < 2e-3 * found.predicted_step_s, cause
    assert abs(sum(found.group(g) for g in ("bubble", "launch gaps", "other"))) < 2e-3 * found.predicted_step_s
    assert abs(found.group("launch gaps")) < 0.01 * found.predicted_step_s or not launches
    assert not found.late
    assert all(r.measured_s == pytest.approx(r.predicted_s, rel=1e-3) for r in found.ops)
    assert all(r.predicted_count == r.measured_count for r in found.collectives if r.dimension != "pp")


@pytest.mark.parametrize("plan", PLANS)
def test_causes_add_up(tmp_path: Path, plan: str) -> None:
    write_kineto(later_gaps(slower_gemms(priced(plan), 1.2), 5e-5), tmp_path / "t.json", steps=3)
    found = compared(plan, tmp_path / "t.json")
    assert found.steps == 2  # the last has no end
    assert sum(c.predicted_s for c in found.causes) == pytest.approx(found.predicted_step_s)
    assert sum(c.measured_s for c in found.causes) == pytest.approx(found.measured_step_s)
    total = sum(found.group(name) for name in GROUPS)
    assert total == pytest.approx(found.measured_step_s - found.predicted_step_s)


@pytest.mark.parametrize("plan", PLANS)
def test_slower_matmuls_are_compute(tmp_path: Path, plan: str) -> None:
    # Without interference: a longer matmul beside the same collective is slowed for a smaller part of its time.
    write_kineto(slower_gemms(priced(plan, interference=False), 1.1), tmp_path / "t.json.gz")
    found = compared(plan, tmp_path / "t.json.gz", interference=False)
    gemms = next(c for c in found.causes if c.name == "gemm")
    assert gemms.measured_s == pytest.approx(1.1 * gemms.predicted_s, rel=1e-3)
    assert abs(change(found, "attention")) < 1e-3 * found.predicted_step_s
    slower = [r.measured_s / r.predicted_s for r in found.ops if r.kind == "gemm"]
    assert slower == pytest.approx([1.1] * len(slower), rel=0.01)
    others = sum(abs(found.group(name)) for name in ("communication", "launch gaps", "other"))
    assert others < 0.05 * gemms.difference_s


@pytest.mark.parametrize("plan", ["alone", "tensor", "pipeline"])
def test_late_launches_are_launch_gaps(tmp_path: Path, plan: str) -> None:
    extra = 200e-6
    # Without interference: what is late runs beside another part of a collective.
    own = priced(plan, interference=False)
    write_kineto(later_gaps(own, extra), tmp_path / "t.json.gz")
    found = compared(plan, tmp_path / "t.json.gz", interference=False)
    gaps = sum(s.kind == "launch" for s in predicted_slices(own, stepped(later_gaps(own, extra)), 0))
    # The last gap of a step may lie under the wait for the gradients of the others.
    assert change(found, "launch") == pytest.approx(gaps * extra, rel=0.08)
    assert abs(found.group("compute")) < 0.01 * gaps * extra


@pytest.mark.parametrize("plan", ["tensor", "pipeline"])
def test_one_late_collective_is_named(tmp_path: Path, plan: str) -> None:
    base = priced(plan)
    program = base.program
    wires = np.flatnonzero((program.kind == OpKind.COLLECTIVE) & (program.role == 0) & (program.layer == 2))
    op, extra = int(wires[len(wires) // 2]), 3e-3
    write_kineto(one_late(base, op, extra), tmp_path / "t.json.gz")
    found = compared(plan, tmp_path / "t.json.gz")
    assert change(found, "tp") == pytest.approx(extra, rel=0.05)
    (late,) = found.late
    assert (late.dimension, late.layer, late.microbatch) == ("tp", 2, int(program.microbatch[op]))
    assert late.measured_s - late.predicted_s == pytest.approx(extra, rel=0.01)
    assert abs(found.group("compute")) < 0.01 * extra


def test_a_stage_that_waits_for_a_slow_one_shows_a_bubble(tmp_path: Path) -> None:
    """The slow host is that of the first stage; the second only waits, inside receives that run until data comes."""
    base = priced("pipeline")
    program = base.program
    slow = base
    for op in np.flatnonzero((program.role == 0) & (program.kind == OpKind.FORWARD) & (program.layer == 1))[:4]:
        slow = one_late(slow, int(op), 2e-3)
    write_kineto(slow, tmp_path / "t.json.gz", role=1, rank=4, steps=3)
    found = compared("pipeline", tmp_path / "t.json.gz")
    assert (found.rank, found.pipeline_rank) == (4, 1)
    waited = change(found, "bubble")
    assert waited > 1e-3
    assert waited == pytest.approx(found.measured_step_s - found.predicted_step_s, rel=0.05)


@given(st.lists(st.tuples(st.sampled_from(ORDER), st.integers(0, 40), st.integers(0, 40)), max_size=12), st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_partition_against_counting(spans: list[tuple[str, int, int]], end: int) -> None:
    slices = [Slice(float(min(a, b)), float(max(a, b)), kind, kind, "") for kind, a, b in spans]
    found = partition(slices, 0.0, float(end), "idle")
    counted: dict[str, float] = {}
    for moment in range(end):
        running = [s.kind for s in slices if s.start_s <= moment < s.end_s]
        cause = min(running, key=ORDER.index) if running else "idle"
        counted[cause] = counted.get(cause, 0.0) + 1.0
    assert found.seconds == counted
    assert sum(b - a for a, b in found.idle) == counted.get("idle", 0.0)


def test_a_trace_of_another_rank_or_size_is_named(tmp_path: Path) -> None:
    write_kineto(priced("tensor"), tmp_path / "t.json", rank=0)
    with pytest.raises(InputError, match=r"--rank = 8: the scenario has 8 ranks"):
        compared("tensor", tmp_path / "t.json", 8)
    trace = json.loads((tmp_path / "t.json").read_text())
    trace["distributedInfo"] |= {"rank": 99, "world_size": 128}
    (tmp_path / "t.json").write_text(json.dumps(trace))
    with pytest.raises(InputError, match=r"distributedInfo\.rank = 99: the scenario has 8 ranks"):
        compared("tensor", tmp_path / "t.json")
    assert "128 ranks" in " ".join(compared("tensor", tmp_path / "t.json", 1).notes)
