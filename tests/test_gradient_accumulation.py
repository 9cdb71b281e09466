"""Gradients of micro-batches are added up in kernels of their own where no matmul does it."""

from __future__ import annotations

from typing import Any

import pytest

from simpar.parallel.layout import Layout
from simpar.parallel.work import MemoryWork
from simpar.specs.framework import framework, framework_names
from simpar.specs.scenario import make_scenario


def traffic(name: str, version: str, plan: dict[str, Any], **training: Any) -> float:
    """HBM bytes per weight of the additions in one backward of a stage without the vocabulary."""
    layout = Layout.of(make_scenario({
        "name": "adds", "model": "llama3.1-8b", "framework": name, "framework_version": version,
        "cluster": {"hardware": "dgx-a100-80gb", "num_nodes": 1}, "plan": plan,
        "training": {"sequence_length": 2048, "global_batch_size": 32, "micro_batch_size": 1, "precision": "bf16", **training},
    }), plan.get("pp", 1))  # fmt: skip
    block = layout.stage_blocks[0][1]
    adds = [op.work for op in block.backward if op.name == "accumulation.wgrad"]
    for work in adds:
        assert isinstance(work, MemoryWork)
    assert len(adds) == len([op for op in block.weight_gradient if op.name == "accumulation.wgrad"])
    return sum(work.bytes_moved for work in adds if isinstance(work, MemoryWork)) / block.dense_parameters


@pytest.mark.parametrize(
    ("name", "version", "plan", "training", "expected"),
    [
        ("megatron-core", "2021-09", {"tp": 4, "pp": 2}, {"precision": "fp16"}, 6.0),
        ("megatron-core", "2021-09", {"tp": 4, "pp": 2}, {}, 10.0),
        ("megatron-core", "2022-06", {"tp": 4, "pp": 2}, {}, 0.0),
        ("megatron-deepspeed", "2022-03", {"tp": 4, "pp": 2}, {}, 18.0),
        ("megatron-deepspeed", "2022-03", {"tp": 4, "pp": 2}, {"gradient_dtype": "fp16", "precision": "fp16"}, 6.0),
        ("aa-scaling", "2023-07", {"tp": 4, "pp": 2}, {}, 6.0),
        ("internevo", "2023-11", {"tp": 2}, {}, 6.0),
        ("torchtitan", "2025-01", {"tp": 4, "pp": 2, "zero_stage": 3}, {}, 10.0),
        ("torchtitan", "2025-01", {"tp": 4, "zero_stage": 3}, {}, 0.0),
        ("llama3-internal", "2024-07", {"tp": 4, "pp": 2, "zero_stage": 2}, {}, 10.0),
        ("nanotron", "2025-01", {"tp": 4, "pp": 2}, {}, 10.0),
        ("nanotron", "2025-01", {"tp": 4}, {}, 10.0),
        ("nanotron", "2025-01", {"tp": 4}, {"gradient_dtype": "bf16"}, 6.0),
    ],
)
def test_bytes_per_weight(name: str, version: str, plan: dict[str, Any], training: dict[str, Any], expected: float) -> None:
    assert traffic(name, version, plan, **training) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("name", framework_names())
def test_no_matmul_adds_where_a_kernel_does(name: str) -> None:
    for version in ("2020-06", "2021-09", "2022-06", "2023-12", "2025-06", "2026-10"):
        spec = framework(name, version)
        assert not (spec.kernels.wgrad_accumulation_fusion and spec.optimizer.gradient_adds)
