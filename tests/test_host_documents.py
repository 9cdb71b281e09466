"""Host time of what goes through packed documents one by one."""

from __future__ import annotations

from typing import Any

import pytest

from simpar.costs.host import REORDERED, ROTATED, launch_seconds
from simpar.costs.pricer import LayoutPricer
from simpar.evidence.row_framework import framework_of
from simpar.parallel.layout import Layout
from simpar.specs.scenario import make_scenario
from simpar.step import cost_models


def launched(
    framework: str, phase: str, *, document: int = 0, version: str = "2026-07", model: str = "qwen3-8b", block: int = 1, **plan: Any
) -> float:
    """Host seconds of a layer of a model on a sequence of 8192 tokens."""
    chosen = make_scenario({
        "model": model, "framework": framework, "framework_version": version,
        "cluster": {"hardware": "dgx-h100", "num_nodes": 1}, "plan": {"tp": 2, **plan},
        "training": {"sequence_length": 8192, "global_batch_size": 8, "document_lengths": (document,) if document else ()},
    })  # fmt: skip
    layout = Layout.of(chosen, 1)
    pricer = LayoutPricer(layout, *cost_models(chosen, layout.hardware))
    return launch_seconds(pricer.layout, pricer.block(layout.stage_blocks[0][block], phase), phase)


def more(framework: str, phase: str, **plan: Any) -> float:
    """Seconds that each of 16 documents adds."""
    return (launched(framework, phase, document=512, **plan) - launched(framework, phase, **plan)) / 16


def test_an_unfused_rotary_embedding_turns_documents_one_by_one() -> None:
    forward, backward = 2 * ROTATED["F"] * 9e-6, 2 * ROTATED["B"] * 6e-6
    assert more("megatron-bridge-tuning", "F") == pytest.approx(forward)
    assert more("megatron-bridge-tuning", "B") == pytest.approx(backward)
    assert more("megatron-bridge-tuning", "B", recompute="full") == pytest.approx(forward + backward)
    assert more("megatron-bridge-tuning", "F", cp=2) == pytest.approx(forward)


@pytest.mark.parametrize("phase", ["F", "B"])
def test_a_fused_one_does_not(phase: str) -> None:
    assert more("megatron-bridge", phase) == more("torchtitan", phase) == pytest.approx(0.0)
    assert more("megatron-bridge", phase, cp=2) == pytest.approx(0.0)


@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("phase", ["F", "B"])
def test_splitting_heads_by_all_to_all_puts_chunks_of_documents_in_order(phase: str, cp: int) -> None:
    assert more("megatron-core", phase, cp=cp, cp_style="ulysses") == pytest.approx(2 * cp * REORDERED[phase] * 9e-6)


@pytest.mark.parametrize(
    ("version", "rotated", "reordered"),
    [("2025-09", 24, 0), ("2025-12", 0, 48), ("2026-05", 0, 48), ("2026-06", 24, 48), ("2026-08", 24, 48), ("2026-09", 0, 0)],
)
def test_when_documents_go_one_by_one(version: str, rotated: int, reordered: int) -> None:
    """Launches of a forward for each document, and for each of its chunks."""
    forward = more("megatron-bridge-tuning", "F", version=version)
    assert forward == pytest.approx(rotated * 9e-6)
    spread = more("megatron-bridge-tuning", "F", version=version, cp=2, cp_style="ulysses")
    assert spread - forward == pytest.approx(4 * reordered * 9e-6)


def test_layers_without_a_rotary_embedding_turn_none() -> None:
    assert more("megatron-core", "F", model="gpt3-175b") == pytest.approx(0.0)
    mamba = {"model": "nemotron3-nano-30b-a3b", "tp": 1, "cp": 2, "cp_style": "ulysses"}
    assert more("megatron-core", "F", **mamba) == pytest.approx(0.0)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"task": "sft"}, "megatron-bridge-defaults"),
        ({"task": "sft", "model_name": "gpt-oss-20b"}, "megatron-bridge-tuning"),
        ({"task": "lora"}, "megatron-bridge-defaults"),
        ({"task": "pretrain"}, "megatron-bridge"),
        ({"task": "sft", "model_name": "Llama-3.1-8B"}, "megatron-bridge"),
        ({"task": "sft", "framework": "NeMo"}, "nemo"),
    ],
)
def test_which_runs_have_it_unfused(changes: dict[str, str], name: str) -> None:
    assert framework_of({"model_name": "Qwen3-8B", "framework": "Megatron-Bridge", **changes})[0] == name
