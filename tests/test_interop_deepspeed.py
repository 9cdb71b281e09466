"""DeepSpeed's JSON: consistent batches, ZeRO, offload, and every field either said, refused or a fact."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from simpar.errors import InputError
from simpar.interop import deepspeed, deepspeed_import
from simpar.interop.deepspeed import configuration, export, notes
from simpar.interop.meaning import meaning
from simpar.specs.scenario import Scenario, make_scenario, read_scenario

SCENARIOS = Path(__file__).parent.parent / "scenarios"
RUNNABLE = ("zero-7.5b_a100x64_zero0", "zero-7.5b_a100x64_zero1", "zero-7.5b_a100x64_zero2", "zero-7.5b_a100x64_zero3",
            "bloom-176b_a100x384_tp4pp12", "gpt3-175b_a100x384_tp8pp12", "mlp-4096x24_a100x8_dp8")  # fmt: skip


def scenario(plan: dict[str, Any], training: dict[str, Any] | None = None) -> Scenario:
    table = {
        "name": "zero",
        "model": "llama3.1-8b",
        "framework": "deepspeed",
        "cluster": {"hardware": "dgx-h100", "num_nodes": 2},
        "plan": {"sequence_parallel": False, **plan},
        "training": {"sequence_length": 8192, "global_batch_size": 64, "micro_batch_size": 1, **(training or {})},
    }
    return make_scenario(table)


@pytest.mark.parametrize("name", RUNNABLE)
def test_shipped_layouts(name: str) -> None:
    """DeepSpeed refuses to start where the three batch numbers do not agree."""
    made = read_scenario(SCENARIOS / f"{name}.toml")
    table = json.loads(export(made)["deepspeed.json"])
    dp = meaning(made)["plan.dp"]
    assert table["train_batch_size"] == table["train_micro_batch_size_per_gpu"] * table["gradient_accumulation_steps"] * dp
    assert table["zero_optimization"]["stage"] == made.plan.zero_stage
    assert table["bf16"]["enabled"] + table["fp16"]["enabled"] <= 1


def test_stage_three() -> None:
    freed = configuration(scenario({"zero_stage": 3}))["zero_optimization"]
    assert (freed["stage"], freed["stage3_max_reuse_distance"], freed["overlap_comm"]) == (3, 0, True)
    kept = configuration(scenario({"zero_stage": 3, "reshard_after_forward": False}))["zero_optimization"]
    assert kept["stage3_max_reuse_distance"] > 8e9
    assert kept["stage3_max_live_parameters"] > 8e9
    with pytest.raises(InputError, match="MiCS is gone"):
        export(scenario({"zero_stage": 3, "shard_size": 8}))


def test_offload_and_recomputation() -> None:
    table = configuration(scenario({"zero_stage": 2, "recompute": "full", "offload": {"optimizer": True, "activations": 1.0}}))
    assert table["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    assert table["activation_checkpointing"]["cpu_checkpointing"]


def test_what_the_script_must_build_stands_beside_the_launch_line() -> None:
    made = read_scenario(SCENARIOS / "gpt3-175b_a100x384_tp8pp12.toml")
    text = "\n".join(notes(made))
    assert "num_stages=12" in text
    assert "activation_checkpoint_interval=1" in text
    assert "gpt3-175b" in text
    script = export(made)["deepspeed.sh"]
    assert "--deepspeed_config deepspeed.json" in script
    assert "--nnodes 48 --nproc-per-node 8" in script
    assert configuration(made)["tensor_parallel"] == {"autotp_size": 8}


@pytest.mark.parametrize(
    ("plan", "training", "field"),
    [
        ({"pp": 2, "zero_stage": 0, "schedule": "gpipe"}, {}, "plan.schedule"),
        ({"pp": 2, "zero_stage": 0, "virtual_stages": 2, "schedule": "interleaved"}, {}, "plan.virtual_stages"),
        ({"tp": 2, "zero_stage": 3}, {}, "plan.zero_stage"),
        ({"tp": 2, "sequence_parallel": True}, {}, "plan.sequence_parallel"),
        ({"cp": 2, "cp_style": "ring"}, {}, "plan.cp_style"),
        ({"recompute": "selective"}, {}, "plan.recompute"),
        ({"zero_stage": 1, "shard_size": 4}, {}, "plan.shard_size"),
        ({"zero_stage": 0, "offload": {"optimizer": True}}, {}, "plan.offload.optimizer"),
        ({"offload": {"activations": 0.5}, "recompute": "full"}, {}, "plan.offload.activations"),
        ({"overlap_tp": True, "tp": 2}, {}, "plan.overlap_tp"),
        ({"placement": "tp-cp-ep-pp-dp", "pp": 2, "zero_stage": 1}, {}, "plan.placement"),
        ({}, {"precision": "fp8"}, "training.precision"),
        ({}, {"optimizer": "muon"}, "training.optimizer"),
        ({}, {"cuda_graphs": True}, "training.cuda_graphs"),
        ({}, {"trainable": "lora"}, "training.trainable"),
    ],
)
def test_each_loss_is_named(plan: dict[str, Any], training: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError) as caught:
        export(scenario(plan, training))
    assert field in {v.field for v in caught.value.violations}


SAID = frozenset({
    "plan.reshard_after_forward", "plan.defer_reduction", "training.loss_parallel", "plan.ep_dispatcher",
    "plan.layers_per_stage", "training.cross_entropy",
    "training.attention_kernel",
    "plan.tp", "plan.sequence_parallel", "plan.cp", "plan.cp_style", "plan.pp", "plan.ep", "plan.etp", "plan.dp",
    "plan.zero_stage", "plan.shard_size", "plan.shard_experts", "plan.schedule", "plan.recompute", "plan.offload",
    "plan.overlap_grad_reduce", "plan.reduce_bucket_size",
    "plan.placement", "training.global_batch_size", "training.micro_batch_size", "training.precision", "training.optimizer",
    "training.gradient_dtype", "training.sequence_length", "training.dropout", "training.compile", "training.routing",
    "training.pure_bf16", "plan.encoder_stages", "training.images", "training.audio", "training.reference_model",
    "training.document_lengths", "training.launch_blocking", "training.collective_checks",
})  # fmt: skip
"""Fields that the configuration or the comments of the launch script say, or that a rule below refuses."""
FACTS = frozenset({"plan.overlap_p2p", "plan.synchronous_optimizer", "plan.overlap_param_gather"})
"""What DeepSpeed's runtime does without a setting."""


def test_no_field_is_forgotten() -> None:
    """A field added to the plan or the training step must be said, refused or named a fact here."""
    known = {*SAID, *FACTS, *deepspeed.PLAIN}
    fields = {path for path in meaning(scenario({})) if path.startswith(("plan.", "training."))}
    assert fields == known


def test_memory_options_that_deepspeed_has_are_said_and_others_refused() -> None:
    table = {
        "model": "llama3.1-8b", "framework": "deepspeed", "cluster": {"hardware": "dgx-h100", "num_nodes": 1},
        "plan": {"zero_stage": 3, "offload": {"optimizer": True, "parameters": True}},
        "training": {"sequence_length": 2048, "global_batch_size": 8, "pure_bf16": True},
    }  # fmt: skip
    found = deepspeed.configuration(make_scenario(table))
    assert found["zero_optimization"]["offload_param"] == {"device": "cpu", "pin_memory": True}
    assert found["bf16"] == {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    library = make_scenario({**table, "training": {**table["training"], "fused_kernels": True}})  # type: ignore[dict-item]
    assert [v.field for v in deepspeed.violations(library)] == ["training.fused_kernels"]


@pytest.mark.parametrize(("stated", "elements"), [(5e8, None), (2e8, 200_000_000), ("auto", 4096**2)])
def test_sizes_of_gradient_buckets_come_back(stated: object, elements: int | None) -> None:
    """The Trainer puts the square of the hidden size where a configuration says auto."""
    table = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True},
             "zero_optimization": {"stage": 3, "reduce_bucket_size": stated}}  # fmt: skip
    found = deepspeed_import.load(json.dumps(table), model="llama3.1-8b", sequence_length=1024, hardware="dgx-h100", num_nodes=1)
    assert found.scenario.plan.reduce_bucket_size == elements
