"""What torch's FSDP2 holds of gradients that replicas sum up, against torch."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from simpar.result.gathers import held_reductions
from simpar.specs.scenario import make_scenario
from simpar.step import simulate

torch = pytest.importorskip("torch")
HIDDEN = 64


@pytest.fixture
def ranks() -> Iterator[None]:
    """A process group of four whose collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
        yield
        torch.distributed.destroy_process_group()


def test_fsdp2_holds_what_replicas_sum_up_to_the_end_of_the_backward(ranks: None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    layers = [torch.nn.Linear(HIDDEN, HIDDEN, bias=False, dtype=torch.bfloat16) for _ in range(3)]
    model: Any = torch.nn.Sequential(*layers)
    for layer in (*layers, model):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    held: list[int] = []

    def look(*_: Any) -> None:
        groups = [layer._get_fsdp_state()._fsdp_param_group for layer in model]
        held.extend(0 if (s := g._all_reduce_state) is None else s.all_reduce_input.untyped_storage().nbytes() for g in groups)

    model[0].register_full_backward_hook(look)
    model(torch.randn(4, HIDDEN, dtype=torch.bfloat16, requires_grad=True)).sum().backward()
    assert held == [0, HIDDEN * HIDDEN // 2 * 4, HIDDEN * HIDDEN // 2 * 4]
    assert model[0].weight.grad.dtype == torch.bfloat16


def _run(plan: dict[str, Any], **training: Any) -> Any:
    return simulate(make_scenario({
        "name": "replicas", "model": "llama3.1-8b", "framework": "torchtitan", "framework_version": "2026-04",
        "cluster": {"hardware": "dgx-h200", "num_nodes": 1}, "plan": {"zero_stage": 3, "recompute": "full", **plan},
        "training": {"sequence_length": 4096, "global_batch_size": 8, "micro_batch_size": 1, "precision": "bf16", **training},
    }))  # fmt: skip


@pytest.mark.parametrize(
    ("plan", "training", "bytes_per_weight"),
    [
        ({"shard_size": 2}, {"pure_bf16": True, "gradient_dtype": "fp32"}, 4 / 2),
        ({"shard_size": 2}, {}, 0),  # fp32 gradients rest as what was summed up
        ({}, {"pure_bf16": True, "gradient_dtype": "fp32"}, 0),  # no replicas
    ],
)
def test_reduced_gradients_wider_than_they_rest_are_held(
    plan: dict[str, Any], training: dict[str, Any], bytes_per_weight: float
) -> None:
    layout = _run(plan, **training).layout
    block = layout.stage_blocks[0][1]
    assert held_reductions(layout, block) == bytes_per_weight * block.dense_parameters


def test_held_reductions_are_there_when_the_backward_ends() -> None:
    """One shard a replica: all but the first block's 8.03 billion gradients stand in fp32 beside 2 bytes each that rest."""
    wide = {"pure_bf16": True, "gradient_dtype": "fp32"}
    alone, narrow = _run({"shard_size": 1}, **wide), _run({"shard_size": 1}, **wide | {"gradient_dtype": "bf16"})
    layer = alone.layout.stage_blocks[0][1].dense_parameters
    more = alone.memory[0].allocated_bytes - narrow.memory[0].allocated_bytes
    assert more > 4.0 * 31 * layer
