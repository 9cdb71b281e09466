"""What nanotron's data parallelism costs: buckets without sharding, one late all-reduce and a gather by pieces with it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from simpar.costs.key_price import unpacking_s
from simpar.costs.pricer import LayoutPricer
from simpar.parallel.keys import Gather, OptimizerStep, Reduce
from simpar.parallel.layout import Layout
from simpar.parallel.traffic import state_collectives, tensor_parameters
from simpar.parallel.work import MemoryWork
from simpar.result.gathers import update_bytes
from simpar.result.memory import static_state
from simpar.result.requests import rank_events
from simpar.specs.framework import framework
from simpar.specs.scenario import Scenario, make_scenario
from simpar.step import cost_models, prepare, simulate

MODEL = {
    "kind": "transformer", "hidden_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 32, "num_key_value_heads": 32,
    "head_dim": 64, "intermediate_size": 8192, "vocab_size": 32768, "gated_mlp": True, "activation": "silu", "norm": "rmsnorm",
    "max_position_embeddings": 4096, "position": "rope", "tie_word_embeddings": True,
}  # fmt: skip


def scenario(zero: int, nodes: int = 4, tp: int = 1, batch: int = 1, name: str = "nanotron") -> Scenario:
    """Data-parallel training of a small model, `batch` sequences per rank."""
    dp = 8 * nodes // tp
    return Scenario.model_validate({
        "name": "nanotron", "model": MODEL, "framework": name,
        "cluster": {"hardware": "dgx-h100", "num_nodes": nodes},
        "plan": {"tp": tp, "sequence_parallel": tp > 1, "dp": dp, "zero_stage": zero, "overlap_grad_reduce": True},
        "training": {"sequence_length": 4096, "global_batch_size": batch * dp, "micro_batch_size": 1},
    })  # fmt: skip


def priced(zero: int, nodes: int = 4, tp: int = 1) -> tuple[Layout, LayoutPricer]:
    """The layout and its pricer."""
    found = scenario(zero, nodes, tp)
    layout = Layout.of(found, 1)
    return layout, LayoutPricer(layout, *cost_models(found, layout.hardware))


def test_sharded_gradients_are_all_reduced_whole_after_the_backward() -> None:
    """ZeRO-1: one fp32 all-reduce of everything, whatever the plan says of overlap; without sharding beside the backward."""
    layout, _ = priced(1)
    blocks = len(layout.stage_blocks[0])
    calls = state_collectives(layout, Reduce(0, 0, blocks))
    parameters = sum(layout.block_parameters(0, 0, blocks))
    assert [(c.name, c.bytes, c.repeat) for c in calls] == [("all_reduce", 4.0 * parameters, 1.0)]
    assert not layout.overlap_grad_reduce
    assert priced(0)[0].overlap_grad_reduce
    assert simulate(scenario(1)).step_time_s > simulate(scenario(0)).step_time_s


def test_other_frameworks_scatter() -> None:
    """Megatron-Core's distributed optimizer reduce-scatters beside the backward."""
    layout = Layout.of(scenario(1, name="megatron-core"), 1)
    assert {c.name for c in state_collectives(layout, Reduce(0, 0, 2))} == {"reduce_scatter"}
    assert layout.overlap_grad_reduce


def test_buckets_carry_all_gradients() -> None:
    """Without sharding the buckets' bytes add up to 4 per weight, and one holds its cap and half a tensor."""
    layout, pricer = priced(0)
    blocks = len(layout.stage_blocks[0])
    (call,) = state_collectives(layout, Reduce(0, 0, blocks))
    parameters = sum(layout.block_parameters(0, 0, blocks))
    assert call.bytes * call.repeat == pytest.approx(4.0 * parameters)
    assert call.bytes / 4.0 == pytest.approx(25.0 * 2**20 / 2.0 + tensor_parameters(layout) / 2.0)
    whole = pricer.price(Reduce(0, 0, blocks)).seconds
    assert whole <= sum(pricer.price(Reduce(0, i, i + 1)).seconds for i in range(blocks)) * (1 + 1e-12)


def test_the_trainer_reduces_in_buckets_of_fp32_weights() -> None:
    """accelerate wraps the model alike; its weights are fp32 under autocast, so that a bucket holds half as many."""
    layout = Layout.of(scenario(0, name="transformers").model_copy(update={"framework_version": "2025-06"}), 1)
    blocks = len(layout.stage_blocks[0])
    (call,) = state_collectives(layout, Reduce(0, 0, blocks))
    assert call.bytes * call.repeat == pytest.approx(layout.state_bytes.reduce * sum(layout.block_parameters(0, 0, blocks)))
    assert call.bytes / layout.state_bytes.reduce == pytest.approx(25.0 * 2**20 / 4.0 + tensor_parameters(layout) / 2.0)


@pytest.mark.parametrize("tp", [1, 2])
def test_unpacking_takes_a_piece_for_every_tensor_and_rank(tp: int) -> None:
    """The gather's host time grows with the data-parallel ranks, not with the weights on a rank."""
    spec = framework("nanotron", "2025-02")
    found = {}
    for nodes in (32, 128):
        layout, pricer = priced(1, nodes, tp)
        blocks = len(layout.stage_blocks[0])
        found[nodes] = unpacking_s(Gather(0, 0, blocks), layout, pricer._work)
    tensors = 4 * 6 + 2  # four layers of four matrices and two norms; last norm, and embedding and head, which are one
    more = tensors * (128 - 32) * 8 / tp * spec.host.launch_s
    assert found[128] - found[32] == pytest.approx(more)


def test_tensor_parameters_is_the_mean() -> None:
    """Weights over tensors: closed form of the small model."""
    weights = 4 * (4 * 2048 * 2048 + 3 * 2048 * 8192 + 2 * 2048) + 32768 * 2048 + 2048
    assert tensor_parameters(priced(1)[0]) == pytest.approx(weights / 26)


def test_unsharded_part_of_the_update_stays() -> None:
    """Norm, clipping and zeroing pass over all gradients however many ranks share the optimizer."""
    layout, pricer = priced(1)
    parameters = sum(layout.block_parameters(0, 0, len(layout.stage_blocks[0])))
    floor = pricer._work(MemoryWork("copy", parameters * layout.framework.optimizer.whole_gradient_bytes)).seconds
    memory = layout.calibration.memory
    assert pricer.price(OptimizerStep(0)).seconds > memory * floor


def test_accumulation_is_paid_once_per_microbatch() -> None:
    """Ten bytes per weight and backward: the blocks' backward holds a kernel for each of its tensors, the forward none.

    A tied matrix gets a gradient from either end.
    """
    layout, _ = priced(0)
    *others, head = layout.stage_blocks[0]
    for block in (*others, replace(head, dense_parameters=head.dense_parameters + layout.tied_extra)):
        adds = [op.work for op in block.backward if op.name == "accumulation.wgrad"]
        assert sum(w.bytes_moved for w in adds if isinstance(w, MemoryWork)) == pytest.approx(10.0 * block.dense_parameters)
        assert not any(op.name.startswith("accumulation") for op in block.forward)
        assert [op.name for op in block.weight_gradient].count("accumulation.wgrad") == len(adds)


def test_overlap_rule() -> None:
    """One rule for everybody: the plan's choice, else the default, never with gradients reduced whole."""
    spec = framework("nanotron", "2025-02").data
    assert spec.reduces_beside_backward(0, None)
    assert not spec.reduces_beside_backward(0, False)
    assert not any(spec.reduces_beside_backward(1, chosen) for chosen in (None, True, False))
    assert replace(spec, sharded_grad_reduce="scatter").reduces_beside_backward(1, None)


def test_gathered_weights_pass_through_buffers() -> None:
    """ZeRO-1: an update holds 4 bytes more per weight of the rank, half of them in one tensor and half in a piece per data rank."""
    layout, _ = priced(1)
    held = dict(static_state(layout, [0]))
    assert update_bytes(layout, held["optimizer"]) == pytest.approx(4.0 * held["parameters"] / layout.state_bytes.parameter)
    assert update_bytes(priced(0)[0], held["optimizer"]) == 0.0
    sizes = [event[1] for event in rank_events(layout, [0], []) if event[1]]
    ranks = layout.shard_ranks
    *pieces, whole = sizes[-ranks - 1 :]
    assert len(set(pieces)) == 1
    assert whole == pytest.approx(ranks * pieces[0], rel=1e-6)


def test_gathered_inputs_stay_until_nanotron_gathers_again() -> None:
    """Two inputs of a layer's column-parallel products, tokens x 4096 of 2 bytes: whole, or a rank's eighth."""
    table = {
        "name": "gathered", "model": "llama3.1-8b", "framework": "nanotron", "cluster": {"hardware": "dgx-h100", "num_nodes": 1},
        "plan": {"tp": 8, "sequence_parallel": True, "zero_stage": 1},
        "training": {"sequence_length": 4096, "global_batch_size": 2, "micro_batch_size": 2, "precision": "bf16"},
    }  # fmt: skip
    before, after = (
        prepare(make_scenario(table | {"framework_version": month})).layout.stage_blocks[0][1].saved_bytes
        for month in ("2024-07", "2024-08")
    )
    assert before - after == 2 * (1 - 1 / 8) * 2 * 4096 * 4096 * 2
