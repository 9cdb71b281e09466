"""The Megatron-LM export: every flag that a layout needs, and no silent loss."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from simpar.errors import InputError
from simpar.interop.megatron import flags, launch_script
from simpar.specs.scenario import read_scenario

SCENARIOS = Path(__file__).parent.parent / "scenarios"
LLAMA = SCENARIOS / "llama3.1-70b_h100x64_tp4cp2pp4.toml"


def test_a_dense_layout() -> None:
    found = flags(read_scenario(LLAMA))
    for flag in (
        "--tensor-model-parallel-size 4", "--pipeline-model-parallel-size 4", "--context-parallel-size 2", "--sequence-parallel",
        "--num-virtual-stages-per-pipeline-rank 5", "--use-distributed-optimizer", "--num-layers 80", "--hidden-size 8192",
        "--num-query-groups 8", "--swiglu", "--untie-embeddings-and-output-weights", "--bf16", "--disable-bias-linear",
    ):  # fmt: skip
        assert flag in found


def test_experts_and_latent_attention() -> None:
    changes = ["plan.schedule=interleaved", "plan.virtual_stages=2", "plan.zero_stage=1"]
    found = flags(read_scenario(SCENARIOS / "deepseek-v3_h800x2048_pp16ep64.toml", changes))
    for flag in ("--multi-latent-attention", "--num-experts 256", "--moe-router-topk 8", "--expert-model-parallel-size 64",
                 "--moe-shared-expert-intermediate-size 2048", "--kv-lora-rank 512", "--mtp-num-layers 1"):  # fmt: skip
        assert flag in found
    assert "--moe-layer-freq '([0]*3+[1]*58)'" in found


def test_what_megatron_cannot_run_is_named() -> None:
    with pytest.raises(InputError, match=r"plan\.schedule.*dualpipe"):
        flags(read_scenario(SCENARIOS / "deepseek-v3_h800x2048_pp16ep64.toml"))
    with pytest.raises(InputError, match="transformers"):
        flags(read_scenario(SCENARIOS / "mlp-4096x24_a100x8_dp8.toml"))


def test_the_script_is_shell() -> None:
    text = launch_script(read_scenario(LLAMA))
    assert "--nnodes 8 --nproc-per-node 8" in text
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
