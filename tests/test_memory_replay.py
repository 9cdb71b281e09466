"""One rank's requests replayed: they add up to what the closed forms say, and end where they began."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from simpar.engine.longest_path import longest_path
from simpar.parallel.lifetimes import lifetimes
from simpar.result.allocations import passes_of
from simpar.result.allocator import HOST_AHEAD, HOST_WAITS, AllocatorRules, replay
from simpar.result.interpret import interpret
from simpar.result.requests import rank_events, until_steady
from simpar.result.result import Result
from simpar.specs.scenario import make_scenario
from simpar.step import prepare

BASE: dict[str, Any] = {
    "name": "replay",
    "model": "llama3.1-8b",
    "framework": "megatron-core",
    "framework_version": "2025-12",
    "cluster": {"hardware": "dgx-h100", "num_nodes": 1},
    "plan": {},
    "training": {"sequence_length": 8192, "global_batch_size": 32, "micro_batch_size": 1, "precision": "bf16"},
}
PLANS: dict[str, dict[str, Any]] = {
    "tp8 sp": {"tp": 8, "sequence_parallel": True},
    "tp4": {"tp": 4},
    "tp2 pp4": {"tp": 2, "sequence_parallel": True, "pp": 4},
    "pp4 interleaved": {"pp": 4, "virtual_stages": 2, "schedule": "interleaved"},
    "pp4 zb-h1": {"pp": 4, "schedule": "zb-h1"},
    "cp4 full": {"cp": 4, "recompute": "full"},
    "tp2 selective": {"tp": 2, "sequence_parallel": True, "recompute": {"granularity": "selective", "modules": ("mlp",)}},
    "fsdp8": {"zero_stage": 3, "framework": "torchtitan"},
    "fsdp8 full": {"zero_stage": 3, "recompute": "full", "framework": "torchtitan"},
    "fsdp8 op": {"zero_stage": 3, "recompute": {"granularity": "selective", "modules": ("op",)}, "framework": "torchtitan"},
    "nanotron tp2": {"tp": 2, "sequence_parallel": True, "framework": "nanotron"},
    "pp4 llama3": {"pp": 4, "virtual_stages": 2, "schedule": "interleaved", "zero_stage": 2, "framework": "llama3-internal"},
}  # fmt: skip


def result_of(plan: dict[str, Any], **training: Any) -> Result:
    """The simulated step of BASE under `plan`."""
    plan = dict(plan)
    name = plan.pop("framework", BASE["framework"])
    version = BASE["framework_version"] if name == BASE["framework"] else "2025-01"
    table = {**BASE, "framework": name, "framework_version": version, "plan": plan, "training": {**BASE["training"], **training}}
    priced = prepare(make_scenario(table))
    return interpret(priced, longest_path(priced.program, priced.table))


def events_of(result: Result, rank: int) -> list[tuple[int, int, str]]:
    """The rank's requests."""
    layout, program = result.layout, result.program
    mine = np.flatnonzero(program.role == rank)
    mine = mine[np.argsort(result.timeline.start[mine], kind="stable")]
    passes = passes_of([program.price_keys[i] for i in program.price[mine]], layout.stage_blocks)
    per = layout.num_stages // layout.plan.pp
    return rank_events(layout, [rank + layout.plan.pp * chunk for chunk in range(per)], passes)


@pytest.mark.parametrize("name", PLANS)
def test_requests_add_up_to_the_closed_forms(name: str) -> None:
    """Two descriptions of one rank: tensor by tensor in order, and summed by block. They agree on the peak to 1.5 %.

    A backward in two parts is coarser: the sums free a block's rest at once.
    """
    result = result_of(PLANS[name])
    tolerance = 0.06 if "zb" in name else 0.015
    for memory in (result.memory[0], result.memory[-1]):
        peak = replay(events_of(result, memory.rank))
        assert peak.allocated_bytes == pytest.approx(memory.allocated_bytes, rel=tolerance)


@pytest.mark.parametrize("name", PLANS)
def test_every_tensor_is_freed_once_and_after_it_was_asked_for(name: str) -> None:
    result = result_of(PLANS[name])
    live: set[int] = set()
    seen: set[int] = set()
    for tensor, size, _ in events_of(result, 0):
        if size:
            assert tensor not in seen
            live.add(tensor)
            seen.add(tensor)
        else:
            live.remove(tensor)


@pytest.mark.parametrize("name", PLANS)
def test_blocks_leave_after_their_forward_what_the_split_says_is_saved(name: str) -> None:
    result = result_of(PLANS[name])
    for blocks in result.layout.stage_blocks:
        for block in blocks:
            held: dict[str, int] = {}
            for tensor, size in lifetimes(block).forward:
                if size:
                    held[tensor] = size
                else:
                    del held[tensor]
            saved = dict(block.saved)
            logits = saved.pop("head/logits", 0.0)
            found = sum(size for tensor, size in held.items() if not tensor.startswith(("head/logits", "loss.")))
            assert found == pytest.approx(sum(saved.values()), abs=len(saved))
            # Part of the logits' copies live in the backward only.
            assert sum(held.values()) - found <= logits + 1
            for tensor, size in lifetimes(block).backward:
                if size:
                    held[tensor] = size
                else:
                    del held[tensor]
            assert not held


@pytest.mark.parametrize("name", PLANS)
def test_reserved_lies_a_little_above_allocated(name: str) -> None:
    for memory in result_of(PLANS[name]).memory:
        assert memory.allocated_bytes <= memory.reserved_bytes <= 1.3 * memory.allocated_bytes


def test_more_micro_batches_reserve_no_more_than_the_steady_state() -> None:
    few, many = (result_of(PLANS["tp2 pp4"], global_batch_size=batch) for batch in (32, 128))
    for a, b in zip(few.memory, many.memory, strict=True):
        assert a.reserved_bytes == pytest.approx(b.reserved_bytes, rel=1e-9)


def test_the_passes_replayed_hold_the_most_in_flight() -> None:
    passes = [("F", 0, 0, 4)] * 4 + [("B", 0, 0, 4), ("F", 0, 0, 4)] * 20 + [("B", 0, 0, 4)] * 4
    kept = until_steady(passes)
    assert len(kept) < len(passes) / 2
    assert sum(p[0] == "F" for p in kept[:4]) == 4


def test_gradients_set_to_none_are_not_there_when_the_activations_peak() -> None:
    """One micro-batch: they grow while activations go; with two the first one's are there at the second one's peak."""
    one = result_of(PLANS["fsdp8"], global_batch_size=8).memory[0]
    two = result_of(PLANS["fsdp8"], global_batch_size=16).memory[0]
    assert not one.at_peak["gradients"]
    assert two.allocated_bytes - one.allocated_bytes == pytest.approx(two.at_peak["gradients"], rel=0.02)


def test_a_host_that_waits_for_receives_is_ahead_on_the_first_stage_only() -> None:
    """nanotron: the third forward in a row of the first stage is the first that the next stage does not take at once."""
    plan = {"tp": 2, "sequence_parallel": True, "framework": "nanotron"}
    two, four = (result_of({**plan, "pp": pp}, global_batch_size=64) for pp in (2, 4))
    assert HOST_AHEAD not in events_of(two, 0)
    assert HOST_AHEAD in events_of(four, 0)
    for rank in (1, 2, 3):
        events = events_of(four, rank)
        assert HOST_AHEAD not in events
        assert HOST_WAITS in events
    rules = AllocatorRules(pending_frees=50)
    events = [events_of(result, 0) for result in (two, four)]
    held = [replay(each, rules).reserved_bytes - replay(each).reserved_bytes for each in events]
    assert held[0] == 0 < held[1]
    assert HOST_WAITS not in events_of(result_of({"tp": 2, "sequence_parallel": True, "pp": 4}), 0)


@pytest.mark.parametrize("zero", [1, 3])
def test_an_update_holds_its_own_tensors_while_no_activations_are_there(zero: int) -> None:
    """InternEvo: 12 bytes of fp32 gradients and intermediate tensors per updated parameter, beside 12 of states."""
    plan = {"zero_stage": zero, "framework": "internevo", "recompute": "full"}
    short, long = (result_of(plan, sequence_length=tokens).memory[0] for tokens in (128, 131072))
    static = dict(short.static)
    resting = sum(static.values())
    assert short.allocated_bytes == pytest.approx(resting + static["optimizer"], rel=1e-3)
    assert short.at_peak["optimizer"] == pytest.approx(2 * static["optimizer"], rel=1e-9)
    assert long.at_peak["optimizer"] == static["optimizer"]
    peak = replay(events_of(result_of(plan, sequence_length=128), 0))
    assert peak.allocated_bytes == pytest.approx(short.allocated_bytes, rel=0.02)


def test_a_replay_takes_milliseconds() -> None:
    """Median of five, far above what a quiet machine needs, so that a busy one passes."""
    result = result_of(PLANS["tp8 sp"])
    events_of(result, 0)  # lifetimes of blocks are cached
    spent = []
    for _ in range(5):
        start = time.process_time()
        replay(events_of(result, 0))
        spent.append(time.process_time() - start)
    assert sorted(spent)[2] < 0.06


def test_attention_in_fp32_is_asked_for_as_it_is_counted() -> None:
    result = result_of({"framework": "plain", "dp": 8}, attention_kernel="unfused", sequence_length=2048)
    (memory,) = result.memory
    assert replay(events_of(result, 0)).allocated_bytes == pytest.approx(memory.allocated_bytes, rel=0.015)


@pytest.mark.parametrize(("framework", "version", "every"), [
    ("torchtitan", "2025-10", True), ("torchtitan", "2025-11", False), ("nemo-automodel", "2026-01", True),
    ("olmo-core", "2026-01", True),
])  # fmt: skip
@pytest.mark.parametrize("batches", [8, 16])
def test_outputs_that_the_last_stage_keeps(framework: str, version: str, every: bool, batches: int) -> None:
    """Beside one micro-batch in flight: 16-bit logits of all, or of the one that the schedule's loop names (torchtitan PR 1922)."""

    def last(count: int) -> tuple[float, float, int]:
        plan = {"pp": 4, "zero_stage": 1, "recompute": "full"}
        training = BASE["training"] | {"sequence_length": 2048, "global_batch_size": 2 * count}
        table = {**BASE, "framework": framework, "framework_version": version, "plan": plan, "training": training}
        priced = prepare(make_scenario(table))
        result = interpret(priced, longest_path(priced.program, priced.table))
        rank = result.memory[-1]
        return rank.allocated_bytes, rank.at_peak["logits"], replay(events_of(result, 3)).allocated_bytes

    logits, received = 2048 * 128256 * 2.0, 2048 * 4096 * 2.0  # what a stage receives goes through a buffer per micro-batch
    (one, of_one, replayed_one), (many, of_many, replayed_many) = last(1), last(batches)
    more = (batches - 1) * logits if every else 0.0
    assert of_many - of_one == pytest.approx(more, abs=1.0)
    assert many - one == pytest.approx(more + (batches - 1) * received, rel=0.03, abs=0.04 * logits)
    if not every:  # a replay ends with the passes that lead to the most in flight
        assert replayed_many - replayed_one == pytest.approx(many - one, abs=0.01 * logits)


@pytest.mark.parametrize(("framework", "tensors"), [("torch-autocast", 3), ("plain", 2)])
def test_a_compiled_model_that_returns_its_logits_holds_zeros_beside_their_gradient(framework: str, tensors: int) -> None:
    """16-bit logits of 8,192 tokens, 128,256 words: themselves, their gradient, and the zeros that stand for that of the output."""
    plan = {"zero_stage": 0, "framework": framework}
    head = result_of(plan, compile=True).layout.stage_blocks[0][-1]
    asked = [size for _, size in (*lifetimes(head).forward, *lifetimes(head).backward)]
    assert asked.count(2 * 8192 * 128256) == tensors
    assert dict(head.saved)["head/logits"] == tensors * 2 * 8192 * 128256
