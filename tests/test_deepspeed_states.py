"""What DeepSpeed's ZeRO keeps, sends and fetches, after its own source; and torch's attention where no fused kernel takes it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from test_training_states import WEIGHTS, allocated, resting, small

from simpar.parallel.keys import Gather, Reduce
from simpar.parallel.traffic import state_collectives, stays_gathered
from simpar.specs.scenario import make_scenario
from simpar.step import prepare, simulate

RECENT = "2025-10"


def zero(stage: int, micro_batches: int = 1, **training: Any) -> Any:
    return small("deepspeed", 4, RECENT, {"zero_stage": stage}, global_batch_size=4 * micro_batches, **training)


def test_only_sharded_weights_have_a_buffer_of_gradients() -> None:
    """stage3.py __create_grad_partitions..; stage_1_and_2.py frees what it has reduced and makes gradients of the part in step."""
    assert {stage: resting(zero(stage))["gradients"] for stage in (1, 2, 3)} == {1: 0.0, 2: 0.0, 3: 2.0 * WEIGHTS / 4}
    assert resting(zero(1, 2))["gradients"] == 2.0 * WEIGHTS  # they wait for the last micro-batch
    assert [prepare(zero(stage)).layout.framework.optimizer.persist(stage) for stage in (1, 2, 3)] == [False, False, True]


def test_gradients_are_as_wide_as_what_is_trained_but_in_pipelines() -> None:
    piped = {"zero_stage": 1, "pp": 2}
    layouts = [prepare(small("deepspeed", 4, RECENT, plan, global_batch_size=8)).layout for plan in ({"zero_stage": 2}, piped)]
    assert [layout.gradient_dtype for layout in layouts] == ["bf16", "fp32"]
    # The fp32 copy of a rank's part that the update makes; gradients that are fp32 need none.
    assert [layout.update_bytes for layout in layouts] == [4.0, 0.0]
    assert prepare(zero(2, gradient_dtype="fp32")).layout.update_bytes == 0.0


@pytest.mark.parametrize(("stage", "kind"), [(1, "all_reduce"), (2, "all_reduce"), (3, "reduce_scatter")])
def test_whole_gradients_are_all_reduced(stage: int, kind: str) -> None:
    layout = prepare(zero(stage)).layout
    assert [call.name for call in state_collectives(layout, Reduce(0, 0, 1))] == [kind]


def _gathers(model: str) -> tuple[list[bool], list[int]]:
    """Which blocks stay gathered, and how often each is gathered in a step."""
    job = {
        "model": model, "framework": "deepspeed", "framework_version": RECENT,
        "cluster": {"hardware": "dgx-h100", "num_nodes": 1}, "plan": {"zero_stage": 3, "recompute": "none"},
        "training": {"sequence_length": 1024, "global_batch_size": 8},
    }  # fmt: skip
    priced = prepare(make_scenario(job))
    (blocks,) = priced.layout.stage_blocks
    program = priced.program
    counts = np.bincount(program.price, minlength=len(program.price_keys))
    times = [0] * len(blocks)
    for key, count in zip(program.price_keys, counts, strict=True):
        if isinstance(key, Gather):
            for index in range(key.first, key.last):
                times[index] += int(count)
    return stays_gathered(priced.layout, blocks), times


def test_weights_that_come_again_soon_are_not_fetched_again() -> None:
    """partitioned_param_coordinator.py __params_to_release: within stage3_max_reuse_distance, 1e9 weights."""
    stays, times = _gathers("llama3.2-1b")
    assert 0 < sum(stays) < len(stays)
    assert stays == sorted(stays)
    stays_8b, times_8b = _gathers("llama3.1-8b")
    assert sum(stays_8b) < sum(stays)
    for kept, fetched in ((stays, times), (stays_8b, times_8b)):
        assert fetched == [1 if stay else 2 for stay in kept]


@pytest.mark.parametrize(
    ("hardware", "version", "heads", "wide"),
    [("t4", RECENT, 2, True), ("t4", RECENT, 8, False), ("t4", "2025-06", 2, False), ("l4", RECENT, 2, False)],
)
def test_grouped_keys_meet_the_math_backend_before_ampere(hardware: str, version: str, heads: int, wide: bool) -> None:
    """transformers 4.54 hands torch grouped keys; no FlashAttention is there for sm_75, and the memory-efficient kernel takes as
    many keys as queries (transformers issue 48633). The math backend keeps scores in fp32, and has two gradients of them."""

    def scenario(tokens: int) -> Any:
        model = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 2, "num_attention_heads": 8,
                 "num_key_value_heads": heads, "head_dim": 128, "vocab_size": 512, "tie_word_embeddings": False}  # fmt: skip
        return make_scenario({
            "model": model, "framework": "transformers", "framework_version": version,
            "cluster": {"hardware": hardware, "num_nodes": 1, "num_gpus": 1}, "plan": {"recompute": "none"},
            "training": {"sequence_length": tokens, "global_batch_size": 1, "precision": "fp16"},
        })  # fmt: skip

    layout = prepare(scenario(2048)).layout
    assert (layout.attention_kernel == "unfused") is wide
    assert layout.kernels.library.unfused_attention_fp32 is wide
    short, long = (allocated(scenario(tokens)) for tokens in (2048, 4096))
    pairs = 8 * (4096**2 - 2048**2)
    # Two layers' softmax, and two gradients of the last one's; without them a few bytes a token.
    assert ((long - short) / pairs > 2 * 4 + 2 * 4) is wide
    if wide:
        assert (long - 2 * short) / (8 * (4096**2 - 2 * 2048**2)) < 18


def test_the_update_shows_in_the_peak_where_nothing_else_does() -> None:
    """One short micro-batch: the peak is that of the step, which holds an fp32 gradient of the rank's part."""
    scenario = small("deepspeed", 2, RECENT, {"zero_stage": 1}, sequence_length=64, global_batch_size=2)
    (first, *_) = simulate(scenario).memory
    rest = sum(amount for _, amount in first.static)
    assert first.allocated_bytes - rest >= 4.0 * WEIGHTS / 2
