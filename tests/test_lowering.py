"""Lowering: schedules become programs whose times and memory follow closed forms; details and foldings agree."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest

from simpar.engine.longest_path import longest_path
from simpar.parallel.keys import Compute, OptimizerStep, Send
from simpar.program.lower import _Lowering
from simpar.program.program import COMPUTE_KINDS, OpKind, PriceTable, Program
from simpar.result.interpret import interpret
from simpar.schedules import SCHEDULES
from simpar.specs.scenario import Scenario, make_scenario
from simpar.step import prepare, run


def scenario(
    plan: dict[str, object] | None = None, *, nodes: int = 4, gpus: int | None = None, batch: int = 64,
    framework: str = "megatron-core", **training: object,
) -> Scenario:  # fmt: skip
    return make_scenario(
        {
            "name": "test",
            "framework": framework,
            "model": {
                "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
                "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256,
            },
            "cluster": {"hardware": "dgx-h100", "num_nodes": nodes, "num_gpus": gpus or 8 * nodes},
            "plan": plan or {},
            "training": {"sequence_length": 4096, "global_batch_size": batch, **training},
        }
    )  # fmt: skip


@pytest.mark.parametrize(
    ("pp", "schedule", "v"),
    [(4, "1f1b", 1), (4, "gpipe", 1), (8, "1f1b", 1), (4, "interleaved", 2), (4, "interleaved", 4)],
)
def test_unit_prices_give_the_closed_form(pp: int, schedule: str, v: int) -> None:
    """(m + (p-1)/v) (F + B) per rank when every stage costs the same and nothing else costs anything."""
    s = scenario({"pp": pp, "tp": 2, "schedule": schedule, "virtual_stages": v}, batch=64)
    priced = prepare(s, detail="stage")
    m = priced.layout.num_microbatches
    seconds = np.zeros(len(priced.program.price_keys))
    for index, key in enumerate(priced.program.price_keys):
        if isinstance(key, Compute):
            whole = len(priced.layout.stage_blocks[key.stage])
            seconds[index] = (1.0 if key.phase == "F" else 2.0) * (key.last - key.first) / whole / v
    timeline = longest_path(priced.program, PriceTable(seconds, np.zeros_like(seconds)))
    assert timeline.makespan == pytest.approx(3.0 * (m + (pp - 1) / v))


PLANS = [
    {"pp": 4, "tp": 2},
    {"pp": 4, "tp": 4, "virtual_stages": 2},
    {"pp": 4, "tp": 2, "schedule": "zb-h1"},
    {"pp": 4, "tp": 2, "schedule": "zb-v", "virtual_stages": 2},
    {"tp": 2, "zero_stage": 3},
    {"tp": 2, "zero_stage": 1, "overlap_param_gather": False},
    {"tp": 2, "cp": 2, "zero_stage": 2},
    {"pp": 2, "tp": 2, "zero_stage": 3},
    {"pp": 4, "tp": 2, "schedule": "dualpipe"},
    {"pp": 4, "tp": 2, "offload": {"activations": 0.5}},
]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_details_and_expansion_agree(plan: dict[str, object]) -> None:
    """Stage, layer and op detail and the full expansion give one step time, memory peak and waterfall."""
    s = scenario(plan, nodes=2, batch=32, framework="torchtitan" if plan.get("zero_stage") == 3 else "megatron-core")
    base = prepare(s)
    reference = interpret(base, run(base, "longest_path"))
    for kwargs in ({"detail": "stage"}, {"detail": "op"}, {"expand": True}, {"detail": "op", "expand": True}):
        priced = prepare(s, **kwargs)  # type: ignore[arg-type]
        result = interpret(priced, run(priced, "longest_path"))
        assert result.step_time_s == pytest.approx(reference.step_time_s, rel=2e-3)
        assert result.worst_rank.allocated_bytes == pytest.approx(reference.worst_rank.allocated_bytes, rel=0.02)
        assert sum(v for _, v in result.waterfall()) == pytest.approx(result.step_time_s)


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_engines_are_bit_identical_without_interference(plan: dict[str, object]) -> None:
    priced = prepare(scenario(plan, nodes=2, batch=32))
    a, b = run(priced, "longest_path"), run(priced, interference=False)
    assert np.array_equal(a.finish, b.finish)


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_memory_returns_to_its_resting_level(plan: dict[str, object]) -> None:
    """Everything allocated in a step is freed in it, and nothing is freed before it was allocated."""
    priced = prepare(scenario(plan, nodes=2, batch=32))
    result = interpret(priced, run(priced))
    for rank in result.memory:
        assert np.abs(rank.dynamic[-1]).max() < 1.0
        assert rank.dynamic.min() > -1.0


def test_in_flight_activations_follow_1f1b() -> None:
    """Rank r of 1F1B holds p - r micro-batches at its peak."""
    priced = prepare(scenario({"pp": 4, "tp": 2}, batch=64))
    result = interpret(priced, run(priced))
    column = 3
    for rank, memory in enumerate(result.memory):
        blocks = priced.layout.stage_blocks[rank]
        kept = sum(v for b in blocks for n, v in b.saved if n != "head/logits")
        assert memory.dynamic[:, column].max() == pytest.approx((4 - rank) * kept, rel=1e-6)


def test_single_rank_has_no_communication() -> None:
    priced = prepare(scenario({}, nodes=1, gpus=1, batch=8))
    kinds = set(priced.program.kind.tolist())
    assert kinds <= {int(k) for k in COMPUTE_KINDS}
    assert not any(isinstance(k, Send) for k in priced.program.price_keys)


def test_blocking_sends_cost_what_a_wire_delay_does_not_hide() -> None:
    """Sends that hold the compute stream can only slow the step."""
    fast, slow = (prepare(scenario({"pp": 4, "tp": 2, "overlap_p2p": overlap})) for overlap in (True, False))
    assert run(slow, "longest_path").makespan >= run(fast, "longest_path").makespan


def test_gradient_reduction_waits_for_its_backward() -> None:
    """Every gradient bucket starts after the last backward of its blocks, and the optimizer after every bucket."""
    priced = prepare(scenario({"pp": 2, "tp": 2}))
    timeline, program = run(priced), priced.program
    reduce = np.flatnonzero(program.kind == OpKind.REDUCE_GRADIENTS)
    optimizer = np.flatnonzero(program.kind == OpKind.OPTIMIZER)
    assert len(reduce)
    assert timeline.start[optimizer].min() >= timeline.finish[reduce].max()
    for op in reduce:
        same = (program.stage == program.stage[op]) & (program.kind == OpKind.BACKWARD) & (program.layer >= program.layer[op])
        last = program.microbatch == program.microbatch.max()
        inside = timeline.finish[same & last & (program.layer == program.layer[op])]
        assert timeline.start[op] >= inside.max() - 1e-12


def test_conservation_of_state() -> None:
    """Shards of the optimizer state over all ranks add up to the whole."""
    s = scenario({"tp": 4, "pp": 2, "zero_stage": 1}, nodes=4)
    priced = prepare(s)
    result = interpret(priced, run(priced))
    whole = 12.0 * priced.layout.network.parameters
    per_pipeline_rank = [dict(m.static)["optimizer"] for m in result.memory]
    mesh = priced.layout.mesh
    # Norm weights and padding are replicated or added, hence not exact.
    assert sum(per_pipeline_rank) * mesh.tp * mesh.dp == pytest.approx(whole, rel=0.01)


def test_optimizer_prices_exist_for_every_rank() -> None:
    priced = prepare(scenario({"pp": 4, "tp": 2}))
    assert {k.rank for k in priced.program.price_keys if isinstance(k, OptimizerStep)} == {0, 1, 2, 3}


def test_offload_trades_memory_for_host_copies() -> None:
    """Offloading halves nothing but the resting activations, and never speeds the step up."""
    plain, away = (prepare(scenario({"pp": 4, "tp": 2, "offload": {"activations": f}})) for f in (0.0, 0.8))
    a, b = interpret(plain, run(plain, "longest_path")), interpret(away, run(away, "longest_path"))
    assert b.worst_rank.allocated_bytes < a.worst_rank.allocated_bytes
    assert b.step_time_s >= a.step_time_s


def test_optimizer_offload_frees_the_states() -> None:
    plain, away = (prepare(scenario({"tp": 2, "offload": {"optimizer": o}})) for o in (False, True))
    a, b = interpret(plain, run(plain)), interpret(away, run(away))
    assert dict(a.memory[0].static)["optimizer"] > 0
    assert dict(b.memory[0].static)["optimizer"] == 0
    assert b.step_time_s > a.step_time_s


@pytest.mark.parametrize(("p", "m"), [(2, 8), (4, 16), (8, 32)])
def test_wire_delay_of_1f1b(p: int, m: int) -> None:
    """(m + p - 1)(F + B) + 2c (m (p - 1) / p + p - 2) for a one-way delay c that nothing hides."""
    s = scenario({"pp": p, "tp": 1, "dp": 1, "overlap_p2p": True, "zero_stage": 0}, nodes=1, gpus=p, batch=m)
    priced = prepare(s, detail="stage")
    seconds = np.zeros(len(priced.program.price_keys))
    forward, backward, delay = 1.0, 2.0, 0.125
    for index, key in enumerate(priced.program.price_keys):
        if isinstance(key, Compute):
            whole = len(priced.layout.stage_blocks[key.stage])
            seconds[index] = (forward if key.phase == "F" else backward) * (key.last - key.first) / whole
        elif isinstance(key, Send):
            seconds[index] = delay
    timeline = longest_path(priced.program, PriceTable(seconds, np.zeros_like(seconds)))
    expected = (m + p - 1) * (forward + backward) + 2 * delay * (m * (p - 1) / p + p - 2)
    assert timeline.makespan == pytest.approx(expected)


def last_backwards(program: Program) -> dict[int, list[int]]:
    """Role -> its backwards in order, each by its last op."""
    found: dict[int, dict[tuple[int, int], int]] = {}
    for op in np.flatnonzero(program.kind == OpKind.BACKWARD).tolist():
        found.setdefault(int(program.role[op]), {})[int(program.stage[op]), int(program.microbatch[op])] = op
    return {role: list(ops.values()) for role, ops in found.items()}


@pytest.mark.parametrize("v", [1, 2])
def test_pipeline_ranks_of_megatron_launch_their_reductions_together(v: int) -> None:
    """Megatron-Core schedules.py: rank r reduces a chunk r backwards after its last one, what is left after all of them."""
    priced = prepare(scenario({"pp": 4, "tp": 2, "virtual_stages": v}), detail="stage")
    program, timeline = priced.program, longest_path(priced.program, priced.table)
    backwards = last_backwards(program)
    reduced = np.flatnonzero(program.kind == OpKind.REDUCE_GRADIENTS)
    assert set(program.stage[reduced].tolist()) == set(range(4 * v))
    for op in reduced.tolist():
        rank, stage = int(program.role[op]), int(program.stage[op])
        own = backwards[rank]
        if v == 1 and rank == 0:
            continue  # bucket by bucket inside its last backward
        last = max(i for i, b in enumerate(own) if program.stage[b] == stage)
        trigger = own[min(last + rank, len(own) - 1)]
        assert timeline.start[op] >= timeline.finish[trigger]
        assert timeline.start[op] < timeline.finish[own[-1]] or trigger == own[-1]


def test_reductions_together_are_closer_in_time_than_each_at_its_end() -> None:
    """The first chunk to finish: its reductions start within the time of one backward, though its backwards end p - 1 apart."""
    starts = {}
    for name in ("megatron-core", "torchtitan"):
        priced = prepare(scenario({"pp": 4, "tp": 2, "virtual_stages": 2, "zero_stage": 2}, framework=name), detail="stage")
        program, timeline = priced.program, longest_path(priced.program, priced.table)
        chunk = (program.kind == OpKind.REDUCE_GRADIENTS) & (program.stage >= 4)
        first = [timeline.start[chunk & (program.role == rank)].min() for rank in range(4)]
        starts[name] = (max(first) - min(first)) / np.median((timeline.finish - timeline.start)[program.kind == OpKind.BACKWARD])
    assert starts["megatron-core"] < 1.1 < starts["torchtitan"]


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
@pytest.mark.parametrize("detail", ["stage", "layer"])
@pytest.mark.parametrize("expand", [False, True])
def test_passes_alike_are_put_as_the_first_of_them(
    schedule: str, detail: str, expand: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program is, op by op, the one that is worked out anew for every pass."""
    virtual = SCHEDULES[schedule].virtual_stages or (2 if "interleaved" in schedule else 1)
    s = scenario({"tp": 8, "pp": 2, "schedule": schedule, "virtual_stages": virtual}, batch=16)
    stamped = prepare(s, detail=detail, expand=expand).program
    monkeypatch.setattr(_Lowering, "_each_by_itself", True)
    whole = prepare(s, detail=detail, expand=expand).program
    for field in fields(whole):
        one, other = getattr(stamped, field.name), getattr(whole, field.name)
        assert np.array_equal(one, other) if isinstance(other, np.ndarray) else one == other, field.name
