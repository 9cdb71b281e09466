"""What the runtime takes of a device, by version: context, NCCL's buffers, workspaces of matrix products."""

from __future__ import annotations

from typing import Any

import pytest

from simpar.evidence.predicted import first_step_bytes, prediction_of
from simpar.parallel.layout import Layout
from simpar.result.outside import outside_bytes, workspaces
from simpar.result.result import Result
from simpar.specs.framework import framework, framework_names
from simpar.specs.framework_runtime import RUNTIME, MiB
from simpar.specs.scenario import make_scenario
from simpar.step import simulate

GiB = 2.0**30


def step(framework: str, version: str, plan: dict[str, Any], *, hardware: str = "dgx-h100", nodes: int = 1, **more: Any) -> Result:
    """A simulated step of a small model."""
    table = {
        "name": "runtime", "model": more.pop("model", "llama3.1-8b"), "framework": framework, "framework_version": version,
        "cluster": {"hardware": hardware, "num_nodes": nodes}, "plan": plan,
        "training": {"sequence_length": 2048, "global_batch_size": 16, "precision": "bf16"}, **more,
    }  # fmt: skip
    return simulate(make_scenario(table), detail="stage")


def outside(result: Result) -> dict[str, float]:
    """Bytes outside the allocator of the first rank, by name."""
    return dict(result.memory[0].outside)


@pytest.mark.parametrize(
    ("version", "context", "pair", "group"),
    [
        ("2021-06", 1.5 * GiB, 544 * MiB, 688 * MiB),
        ("2022-12", 426 * MiB, 544 * MiB, 688 * MiB),
        ("2025-01", 426 * MiB, 544 * MiB, 688 * MiB),
        ("2025-06", 426 * MiB, 544 / 3.5 * MiB, 688 / 3.5 * MiB),
    ],
)
def test_context_and_communicators_follow_the_version(version: str, context: float, pair: float, group: float) -> None:
    result = step("plain", version, {"tp": 2, "pp": 4})
    assert outside(result) == pytest.approx({"context": context, "nccl": pair + group})


def test_a_container_of_megatron_is_ahead_of_the_wheels() -> None:
    assert (
        framework("megatron-core", "2024-10").allocator.nccl_group_bytes
        < framework("torchtitan", "2024-10").allocator.nccl_group_bytes
    )
    assert (
        framework("megatron-core", "2024-05").allocator.nccl_group_bytes
        == framework("torchtitan", "2024-05").allocator.nccl_group_bytes
    )


@pytest.mark.parametrize(("nodes", "ep", "peers"), [(1, 8, 7), (1, 4, 3), (2, 16, 0), (1, 1, 0)])
def test_all_to_all_inside_a_domain_has_buffers_for_every_peer(nodes: int, ep: int, peers: int) -> None:
    result = step("megatron-core", "2024-05", {"ep": ep, "recompute": "full"}, nodes=nodes, model="qwen3-30b-a3b")
    groups = sum(result.layout.placement(d).size > 1 for d in ("dp", "ep"))
    groups += 2  # all ranks; the data ranks once more, without context parallelism
    assert outside(result)["nccl"] == pytest.approx(groups * 688 * MiB + peers * 448 * MiB)


def test_measured_totals() -> None:
    """NCCL issue 1685: 1.06 GB in use on 8 H100 before the first all-to-all, 4.34 GB after it."""
    before = sum(outside(step("plain", "2025-01", {"tp": 8})).values())
    assert before == pytest.approx(1.06e9, rel=0.12)
    assert before + 7 * framework("plain", "2025-01").allocator.nccl_peer_bytes == pytest.approx(4.34e9, rel=0.06)


@pytest.mark.parametrize(
    ("name", "version", "architecture", "sizes"),
    [
        ("plain", "2022-12", "hopper", []),
        ("plain", "2023-06", "ampere", [8_519_680.0] * 2),
        ("plain", "2023-06", "hopper", [32 * MiB] * 2),
        ("plain", "2025-12", "blackwell", [8_519_680.0] * 2),
        ("plain", "2026-06", "blackwell", [32 * MiB] * 2),
        ("megatron-core", "2024-01", "ampere", [8_519_680.0] * 2 + [4 * MiB]),
        ("megatron-core", "2024-01", "hopper", [32 * MiB] * 3),
        ("torch-steps", "2025-12", "hopper", []),
        ("plain", "2025-12", "tpu", []),
        ("plain", "2025-12", "cpu", []),
    ],
)
def test_workspaces_follow_version_and_architecture(name: str, version: str, architecture: str, sizes: list[float]) -> None:
    assert list(workspaces(framework(name, version), architecture)) == sizes


def test_workspaces_rest_inside_the_allocator() -> None:
    result = step("megatron-core", "2024-05", {"tp": 4, "pp": 2})
    for rank in result.memory:
        assert rank.at_peak["workspaces"] == 96 * MiB
        assert dict(rank.static)["workspaces"] == 96 * MiB


@pytest.mark.parametrize("hardware", ["tpu-v4", "cpu-gloo"])
def test_no_cuda_no_context(hardware: str) -> None:
    training = {"sequence_length": 2048, "global_batch_size": 16, "precision": "fp32"}
    cluster = {"hardware": hardware, "num_nodes": 1}
    layout = Layout.of(make_scenario({"name": "runtime", "model": "llama3.1-8b", "cluster": cluster, "training": training}), 1)
    assert dict(outside_bytes(layout)) == {"context": 0.0, "nccl": 0.0}


def test_measured_steps_have_none_of_it() -> None:
    """Their allocator is read directly, and they ran without a communicator's buffers in it."""
    spec = framework("torch-steps", "2026-06")
    assert (
        spec.allocator.context_bytes,
        spec.allocator.nccl_pair_bytes,
        spec.allocator.nccl_group_bytes,
        spec.allocator.nccl_peer_bytes,
    ) == (0, 0, 0, 0)


@pytest.mark.parametrize("name", [name for name in framework_names() if not name.startswith("torch-steps")])
def test_every_framework_stands_on_the_runtime(name: str) -> None:
    old, new = framework(name, "2020-01"), framework(name, "2026-11")
    assert old.allocator.context_bytes >= new.allocator.context_bytes > 0
    assert old.allocator.nccl_group_bytes >= new.allocator.nccl_group_bytes > 0
    assert new.allocator.blas_workspace_bytes


def test_rows_are_in_order_and_have_sources() -> None:
    assert [row.since for row in RUNTIME] == sorted(row.since for row in RUNTIME)
    assert all(row.source for row in RUNTIME)


def test_moments_are_not_there_while_the_first_batch_goes_through() -> None:
    """Apex's and TransformerEngine's Adam make them in the first update: ten bytes per parameter and the activations before it,
    eighteen after it, whichever is more; every later step has both."""
    base = {"name": "first", "cluster": {"hardware": "dgx-b200", "num_nodes": 1}, "framework": "megatron-core",
            "plan": {"tp": 1, "pp": 1, "dp": 8, "zero_stage": 0, "recompute": "none"}}  # fmt: skip
    for micro, sequence in ((1, 512), (8, 4096)):
        training = {"sequence_length": sequence, "global_batch_size": 8 * micro, "micro_batch_size": micro}
        found = simulate(make_scenario({**base, "model": "llama3.2-1b", "training": training}))
        worst = found.worst_rank
        static = dict(worst.static)
        first = first_step_bytes(found.layout, worst)
        moments = static["optimizer"] * 2 / 3
        assert first == pytest.approx(max(worst.allocated_bytes - moments, sum(static.values())), rel=1e-6)
        assert (first == pytest.approx(sum(static.values()))) == (micro == 1)
        assert prediction_of(found).first_step_bytes == first < worst.allocated_bytes


@pytest.mark.parametrize(("version", "kept"), [("2025-11", 1), ("2026-03", 0)])
def test_exchanges_hidden_behind_another_micro_batch_keep_its_activations(version: str, kept: int) -> None:
    """Megatron-LM gave the backward's plan back only behind all layers of both micro-batches until PR 2236 of January 2026."""

    def peak(**changes: Any) -> tuple[float, float]:
        table = {
            "model": "qwen3-30b-a3b", "framework": "megatron-core", "framework_version": version,
            "cluster": {"hardware": "dgx-b200", "num_nodes": 1}, "plan": {"ep": 8, "overlap_ep": True, **changes},
            "training": {"sequence_length": 4096, "global_batch_size": 16, "micro_batch_size": 1, "precision": "bf16"},
        }  # fmt: skip
        result = simulate(make_scenario(table))
        return result.memory[0].allocated_bytes, sum(block.saved_bytes for block in result.layout.stage_blocks[0])

    (hidden, one), (plain, _) = peak(), peak(overlap_ep=False)
    assert hidden - plain == pytest.approx(kept * one)


@pytest.mark.parametrize(("framework", "version", "apart"), [
    ("megatron-core", "2023-09", True), ("megatron-core", "2023-12", False), ("nemo", "2023-09", False),
    ("megatron-deepspeed", "2023-09", True), ("megatron-deepspeed", "2024-01", True),
])  # fmt: skip
def test_swiglu_in_two_operations_keeps_what_silu_makes(framework: str, version: str, apart: bool) -> None:
    """Llama 3.1 8B, two bytes of each of 14,336 and 2,048 tokens: Megatron-LM has one kernel for it since November 2023."""
    block = step(framework, version, {"recompute": "none"}).layout.stage_blocks[0][1]
    saved = dict(block.saved)
    assert saved["mlp/activation_in"] == 2 * 2 * 14336 * 2048
    assert saved.get("mlp/activation_gate", 0.0) == 2 * 14336 * 2048 * apart
