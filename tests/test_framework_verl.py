"""verl's actor in its training phase: torch's FSDP with a loss, a recomputation and limits of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import simpar
from simpar.errors import InputError
from simpar.evidence.row_framework import framework_of
from simpar.interop.configs import load_config
from simpar.specs.framework import family_of, framework
from simpar.specs.scenario import Scenario
from simpar.step import simulate

CONFIG = """
data: {max_prompt_length: 512, max_response_length: 1536}
actor_rollout_ref:
  model: {path: meta-llama/Llama-3.1-8B-Instruct}
  rollout: {n: 4}
  actor: {strategy: STRATEGY, ppo_mini_batch_size: 64, ppo_micro_batch_size_per_gpu: 2, use_torch_compile: true}
trainer: {n_gpus_per_node: 8, nnodes: 1}
"""


def scenario(**changes: Any) -> Scenario:
    usual: dict[str, Any] = {
        "model": "llama3.1-8b", "hardware": "dgx-h100", "num_nodes": 1, "framework": "verl", "framework_version": "2026-01",
        "global_batch_size": 32, "micro_batch_size": 2, "sequence_length": 2048, "zero_stage": 3, "recompute": "full",
    }  # fmt: skip
    return simpar.load(**{**usual, **changes})


def logits_of(version: str) -> float:
    """Bytes per logit that the head keeps for its backward."""
    head = simulate(scenario(framework_version=version)).layout.stage_blocks[0][-1]
    return dict(head.saved)["head/logits"] / (2 * 2048 * 128_256)


@pytest.mark.parametrize(
    ("version", "copies"), [("2024-11", 2.0), ("2025-01", 1.0), ("2025-03", 1.0), ("2025-04", 0.0), ("2026-01", 0.0)]
)
def test_what_stays_of_logits_by_date(version: str, copies: float) -> None:
    """fp32 logits and a gradient beside them; 16-bit ones with their gradient and the entropy's; the gradient in their place."""
    assert framework("verl", version).head.logits_fp32_copies == copies
    assert logits_of(version) == pytest.approx(2.0 + 4.0 * copies)


def test_the_composition() -> None:
    one, two = framework("verl", "2026-01"), framework("verl-fsdp2", "2026-01")
    assert one.data.fsdp_reduce_dtype == two.data.fsdp_reduce_dtype == "fp32"
    assert (one.data.fsdp_root, two.data.fsdp_root) == ("all", "tied")
    assert two.host.fsdp_group_cpu_s == framework("torchtitan", "2026-01").host.fsdp_group_cpu_s != one.host.fsdp_group_cpu_s
    assert two.head == one.head
    assert (one.conventions.recompute_default, one.conventions.only_cp_style) == ("full", "ulysses")
    assert {family_of("verl"), family_of("verl-fsdp2")} == {family_of("torch-fsdp")}


@pytest.mark.parametrize("changes", [{}, {"cp": 2, "cp_style": "ulysses"}, {"shard_size": 4}, {"reshard_after_forward": False},
                                     {"framework": "verl-fsdp2", "offload": {"optimizer": True, "parameters": True}}])  # fmt: skip
def test_plans_of_an_actor(changes: dict[str, Any]) -> None:
    assert 0.5 < simulate(scenario(**changes)).step_time_s < 60.0


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"tp": 2}, r"plan.tp = 2: verl splits no layer; 1, or another one"), ({"pp": 2}, r"plan.pp = 2: verl has no pipeline"),
     ({"model": "mixtral-8x7b", "ep": 2}, r"plan.ep = 2: verl splits no experts"),
     ({"zero_stage": 1}, r"plan.zero_stage = 1: .*0 or 3"),
     ({"offload": {"parameters": True}}, r"verl does not have it; a framework that does: .*verl-fsdp2")],
)  # fmt: skip
def test_what_there_is_not_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        scenario(**changes)


@pytest.mark.parametrize(("strategy", "name"), [("fsdp", "verl"), ("fsdp2", "verl-fsdp2"), ("megatron", "megatron-core")])
def test_its_configurations_are_read_as_it(strategy: str, name: str, tmp_path: Path) -> None:
    """use_torch_compile compiles the entropy and no layer."""
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG.replace("STRATEGY", strategy))
    found = load_config(path, hardware="dgx-h100").scenario
    assert (found.framework, found.training.compile, found.training.global_batch_size) == (name, None, 256)


@pytest.mark.parametrize(
    ("stated", "name"), [("verl 0.5", "verl"), ("verl (FSDP2)", "verl-fsdp2"), ("verl, Megatron", "megatron-core")]
)
def test_rows_that_name_verl(stated: str, name: str) -> None:
    assert framework_of({"framework": stated}) == (name, [])
