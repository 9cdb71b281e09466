"""What DeepSpeed's ZeRO keeps, sends and fetches, after its own source; and torch's attention where no fused kernel takes it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from test_training_states import HIDDEN, LAYERS, TOKENS, WEIGHTS, allocated, resting, small

from simpar.costs.host import hooks_slowdown
from simpar.costs.key_price import KeyPrice, gradient_copies, handled
from simpar.costs.price import Price, Provenance
from simpar.costs.update_price import update_price
from simpar.errors import InputError
from simpar.evidence.row_framework import framework_of
from simpar.parallel.keys import Gather, Reduce
from simpar.parallel.traffic import state_collectives, stays_gathered
from simpar.program.program import OpKind
from simpar.result.gathers import fsdp_buffers
from simpar.specs.scenario import make_scenario
from simpar.step import prepare, simulate

RECENT = "2025-10"
_ALONE = KeyPrice(1.0, (("dp", 1.0),), (("dp", 0.0, 0.0),), 0.0, (), ())


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


def _buffers(stage: int, version: str = RECENT, **plan: Any) -> float:
    return resting(small("deepspeed", 4, version, {"zero_stage": stage, **plan}, global_batch_size=4)).get(
        "communication_buffers", 0.0
    )


def test_gradients_are_copied_into_buffers_of_a_bucket() -> None:
    """stage_1_and_2.py setup_buckets: reduce_bucket_size elements as wide as the weights, two with overlap_comm; stage3.py: one."""
    each = 2.0 * 5e8
    two = {"overlap_grad_reduce": True}
    assert [_buffers(stage) for stage in (0, 1, 2, 3)] == [0.0, each, each, each]
    assert [_buffers(stage, **two) for stage in (1, 2, 3)] == [2 * each, 2 * each, each]
    assert [_buffers(stage, "2023-10") for stage in (1, 2, 3)] == [0.0, each, each]  # stage 1 since PR 4887
    assert _buffers(1, pp=2) == 0.0  # bf16_optimizer.py has none
    assert [_buffers(stage, reduce_bucket_size=10**6, **two) for stage in (2, 3)] == [4e6, 2e6]
    with pytest.raises(InputError, match=r"plan\.reduce_bucket_size"):
        small("torchtitan", 4, RECENT, {"zero_stage": 3, "reduce_bucket_size": 10**6}, global_batch_size=4)


def _reductions(stage: int, micro_batches: int = 1, **plan: Any) -> tuple[Any, Any]:
    """The step of a model of four blocks (embedding, 2 layers, head) whose layers have a third as many weights as its ends."""
    layout = {"zero_stage": stage, "recompute": "none", **plan}
    result = simulate(small("deepspeed", 4, RECENT, layout, global_batch_size=4 * micro_batches), detail="stage")
    program = result.program
    return result, [i for i in range(len(program.kind)) if program.kind[i] == OpKind.REDUCE_GRADIENTS]


def test_gradients_wait_until_a_bucket_is_full() -> None:
    """One of 5e8 weights is never full here; of 4e7 the head and a layer fill one (33.6 + 16.8 million), of 1 each block."""
    plans: tuple[dict[str, int], ...] = ({}, {"reduce_bucket_size": 4 * 10**7}, {"reduce_bucket_size": 1})
    for stage in (2, 3):
        assert [len(_reductions(stage, **plan)[1]) for plan in plans] == [1, 2, 4]
        assert len(_reductions(stage, 3)[1]) == 3  # with every backward
    layout = {"zero_stage": 2, "recompute": "none"}
    fsdp = simulate(small("torchtune", 4, RECENT, layout, global_batch_size=4), detail="stage").program
    assert sum(kind == OpKind.REDUCE_GRADIENTS for kind in fsdp.kind) == 4  # a unit after the other


def test_gradients_of_stage_3_are_moved_three_times_before_they_leave() -> None:
    """Into the bucket, into the order of ranks, divided: 16 bits read and written each time."""
    assert prepare(zero(3)).layout.options.reduce_copy_bytes == 3 * (2.0 + 2.0)


def test_below_stage_3_updated_weights_are_gathered_before_the_step_returns() -> None:
    """stage_1_and_2.py step ends with all_gather_dp_groups: what follows the update is not hidden by the next forward."""
    for stage in (1, 2):
        result, _ = _reductions(stage)
        names = [OpKind(kind) for kind in result.program.kind]
        assert OpKind.GATHER_PARAMETERS in names[names.index(OpKind.OPTIMIZER) :]
        assert OpKind.GATHER_PARAMETERS not in names[: names.index(OpKind.OPTIMIZER)]


@pytest.mark.parametrize(
    ("name", "plan", "expected"),
    [
        # 2 bytes into a buffer, divided, into one tensor.
        ("deepspeed", {"zero_stage": 1}, 3 * (2.0 + 2.0)),
        ("deepspeed", {"zero_stage": 2}, 3 * (2.0 + 2.0)),
        ("deepspeed", {"zero_stage": 3}, 0.0),  # in the backward, layer by layer
        # torch's DistributedDataParallel: fp32 gradients into a bucket and out of it.
        ("torch-autocast", {"zero_stage": 0}, 2 * (4.0 + 4.0)),
        ("megatron-core", {"zero_stage": 1}, 0.0),
    ],
)
def test_whole_gradients_are_moved_around_their_reduction(name: str, plan: dict[str, Any], expected: float) -> None:
    layout = prepare(small(name, 4, RECENT, plan, global_batch_size=4)).layout
    moved: list[float] = []

    def priced(work: Any) -> Price:
        moved.append(work.bytes_moved)
        return Price(0.5, 0.25, 1.0, Provenance.MODEL)

    found = handled(_ALONE, Reduce(0, 0, 1), layout, priced)
    assert moved == ([expected * sum(layout.block_parameters(0, 0, 1))] if expected else [])
    slow = 0.5 * layout.calibration.memory if expected else 0.0
    assert (found.seconds, found.terms) == (1.0 + slow, (("dp", 1.0 + slow),))
    assert found.spread[0][1:] == ((slow, slow / 2) if expected else (0.0, 0.0))


@pytest.mark.parametrize(("training", "tensors"), [({}, 7 + 2), ({"trainable": "lora", "lora_modules": "all"}, 2 * 7)])
def test_hooks_of_small_gradients_take_longer_than_their_copies(training: dict[str, Any], tensors: int) -> None:
    """A layer's linears and norms, or both weights of the pairs beside the linears."""
    layout = prepare(zero(2, **training)).layout
    found = handled(_ALONE, Reduce(0, 1, 2), layout, lambda _: Price(0.0, 0.0, 0.0, Provenance.MODEL))
    assert found.seconds == pytest.approx(1.0 + tensors * 29e-6 * hooks_slowdown(layout), rel=1e-12)


@pytest.mark.parametrize(
    ("stage", "micro_batches", "expected"),
    [
        (1, 1, 4.0),  # down in fp32
        (1, 4, 2.0 + 2.0 + 4.0),  # reduced once, up and down like any after the first
        (2, 1, 4.0),
        (2, 4, (4 * 2.0 + 3 * 2.0 + 4.0) / 4),  # each down, what was there up for all but the first, once in fp32
        (3, 1, 2.0 + 2.0 + 4.0),
        (3, 4, (4 * 2.0 + 4 * 2.0 + 4.0) / 4),
    ],
)
def test_gradients_that_rest_on_the_host_go_there_with_their_reduction(stage: int, micro_batches: int, expected: float) -> None:
    plan = {"zero_stage": stage, "recompute": "none"}
    with_host, without = (
        prepare(small("deepspeed", 4, RECENT, {**plan, "offload": {"optimizer": away}}, global_batch_size=4 * micro_batches))
        for away in (True, False)
    )
    assert gradient_copies(with_host.layout) == expected
    link = with_host.layout.hardware.node.host_device_bandwidth.value
    for index, key in enumerate(with_host.program.price_keys):
        if not isinstance(key, Reduce):
            continue
        other = without.program.price_keys.index(key)
        longer, own = with_host.table.seconds[index], without.table.seconds[other]
        weights = sum(with_host.layout.block_parameters(key.stage, key.first, key.last))
        assert longer - own == pytest.approx(weights / 4 * expected / link, rel=0.05)


@pytest.mark.parametrize(("gpus", "expected"), [(4, 2.0), (1, 2.0 + 2.0)])
def test_the_update_brings_weights_up_and_gradients_down_where_nothing_was_reduced(gpus: int, expected: float) -> None:
    layout = prepare(
        small("deepspeed", gpus, RECENT, {"zero_stage": 2, "offload": {"optimizer": True}}, global_batch_size=4)
    ).layout
    copied: list[float] = []

    def priced(work: Any) -> Price:
        copied.append(work.bytes)
        return Price(0.0, 0.0, 0.0, Provenance.MODEL)

    update_price(layout, [0], priced, 0.0)
    assert copied == [pytest.approx(expected * sum(layout.held_parameters([0])) / gpus)]


def test_only_trained_gradients_go_to_the_host() -> None:
    plan = {"zero_stage": 3, "offload": {"optimizer": True}}
    layout = prepare(small("deepspeed", 4, RECENT, plan, global_batch_size=4, trainable="lora", lora_rank=8)).layout
    copied: list[float] = []

    def priced(work: Any) -> Price:
        copied.append(work.bytes)
        return Price(0.0, 0.0, 0.0, Provenance.MODEL)

    handled(_ALONE, Reduce(0, 1, 2), layout, priced)
    assert copied == [pytest.approx((2.0 + 2.0 + 4.0) * sum(layout.block_parameters(0, 1, 2, trainable=True)) / 4)]


def test_below_stage_3_nothing_is_computed_beside_a_reduction() -> None:
    """overlap_comm is off unless asked for (zero/config.py overlap_comm_valid)."""
    size = {"reduce_bucket_size": 1}
    alone, beside = (_reductions(2, overlap_grad_reduce=each, **size) for each in (False, True))
    for (result, found), holds in ((alone, True), (beside, False), (_reductions(2, **size), True), (_reductions(3, **size), False)):
        ptr, streams = result.program.op_streams
        kinds = [{result.program.streams[s].kind for s in streams[ptr[i] : ptr[i + 1]]} for i in found]
        assert all(("compute" in names) is holds for names in kinds)
    assert alone[0].step_time_s > beside[0].step_time_s
    result, found = alone
    assert dict(result.waterfall())["data parallel, exposed"] >= sum((result.timeline.finish - result.timeline.start)[found])


@pytest.mark.parametrize("version", [RECENT, "2025-12"])
def test_buffers_of_stages_1_and_2_are_gone_before_the_update(version: str) -> None:
    """_release_ipg_buffers; what the last bucket is reduced in (allreduce_bucket flattens it) is there beside them."""
    peaks = {}
    for size in (10**6, 10**9):
        plan = {"zero_stage": 2, "reduce_bucket_size": size, "overlap_grad_reduce": False}
        scenario = small("deepspeed", 2, version, plan, sequence_length=64, global_batch_size=2)
        (first, *_) = simulate(scenario).memory
        peaks[size] = first.allocated_bytes - sum(amount for name, amount in first.static if name != "communication_buffers")
    # Gradients of a rank's part, its fp32 copies of them; without the buffer, which would come on top.
    assert peaks[10**6] == pytest.approx((2.0 + 4.0) * WEIGHTS / 2, rel=0.01)
    assert peaks[10**9] == pytest.approx(2.0 * 10**9 + 2.0 * WEIGHTS + 2.0 * WEIGHTS / 2, rel=0.01)


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


def test_reduced_gradients_of_fp32_shards_are_fp32() -> None:
    """torch FSDP casts what it reduced to the dtype of the shards (FSDP1 _cast_grad_to_param_dtype, FSDP2 orig_dtype)."""
    assert prepare(small("torch-fsdp", 4, RECENT, {"zero_stage": 3}, global_batch_size=4)).layout.state_bytes.gradient == 4.0


def test_casts_of_autocast_are_gone_before_the_update() -> None:
    """A list-of-operations AdamW: weights, gradients, two moments and one tensor in between, all of fp32, and DDP's buckets."""
    plan = {"zero_stage": 0, "recompute": "full"}
    training = {"sequence_length": 64, "global_batch_size": 2, "optimizer": "adamw-foreach"}
    (first, *_) = simulate(small("torch-autocast", 2, RECENT, plan, **training)).memory
    work = dict(first.static)["workspaces"]
    assert first.allocated_bytes - work == pytest.approx((4.0 + 4.0 + 8.0 + 4.0 + 4.0) * WEIGHTS, rel=0.01)


@pytest.mark.parametrize(("name", "modules"), [("trl", 0), ("deepspeed", 0), ("megatron-core", 1)])
def test_models_of_transformers_have_no_modules_for_further_tokens(name: str, modules: int) -> None:
    job = {
        "model": "qwen3.5-9b", "framework": name, "framework_version": RECENT,
        "cluster": {"hardware": "dgx-h100", "num_nodes": 1}, "training": {"sequence_length": 1024, "global_batch_size": 8},
    }  # fmt: skip
    assert len(prepare(make_scenario(job)).layout.network.mtp) == modules


@pytest.mark.parametrize(("recompute", "casts"), [("none", 2.0), ("full", 0.0)])
def test_fsdp_under_autocast_alone_moves_fp32_and_keeps_casts(recompute: str, casts: float) -> None:
    """FSDP without MixedPrecision: flat parameters are gathered as they are; what autocast made of them waits for the backward."""
    plan = {"zero_stage": 3, "recompute": recompute}
    layouts = [prepare(small(name, 4, RECENT, plan, global_batch_size=4)).layout for name in ("torch-fsdp-autocast", "torch-fsdp")]
    assert [(layout.state_bytes.gather, layout.state_bytes.reduce) for layout in layouts] == [(4.0, 4.0), (2.0, 2.0)]
    assert [layout.kernels.autocast for layout in layouts] == ["own", ""]
    assert [fsdp_buffers(layout, WEIGHTS, [0]) for layout in layouts] == [casts * WEIGHTS, 0.0]
    alone, own = (allocated(small(name, 4, RECENT, plan, global_batch_size=4)) for name in ("torch-fsdp-autocast", "torch-fsdp"))
    assert alone - own > casts * WEIGHTS + 2.0 * TOKENS * HIDDEN * LAYERS  # the stream is of fp32


def test_buffers_come_with_the_first_gradient_since_december_2025() -> None:
    """PR 7665: a weight's hook sets them up, so that they are not beside the logits; before, backward_prologue did."""
    plan = {"zero_stage": 2, "reduce_bucket_size": 10**7, "overlap_grad_reduce": False, "recompute": "none"}
    before, since = (small("deepspeed", 4, version, plan, global_batch_size=8) for version in (RECENT, "2025-12"))
    assert [resting(scenario).get("communication_buffers", 0.0) for scenario in (before, since)] == [2e7, 0.0]
    assert allocated(before) - allocated(since) == pytest.approx(2e7)


@pytest.mark.parametrize(
    ("precision", "name"),
    [("bf16 (AMP)", "torch-fsdp-autocast"), ("bf16 (MixedPrecision), autocast", "torch-fsdp"), ("bf16", "torch-fsdp")],
)
def test_rows_of_fsdp_under_autocast_alone(precision: str, name: str) -> None:
    assert framework_of({"framework": "ATorch FSDP", "precision": precision, "zero_stage": 3})[0] == name
