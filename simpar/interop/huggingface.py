"""Hugging Face: a scenario as TrainingArguments, TRL's sft command and accelerate's configuration (transformers 5.23, TRL 1.16,
accelerate 1.15, whose field names the tests read)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

from simpar.errors import InputError, Violation
from simpar.interop import deepspeed
from simpar.interop.finetune import (
    LIGER,
    data_comment,
    fine_tunes,
    hub_name,
    lora_modules,
    offloaded_together,
    rules,
    whole_activations,
    whole_sequences,
)
from simpar.interop.launch import beside, nodes_and_gpus
from simpar.interop.meaning import data_ranks, meaning, recompute_of, replicas_and_shards, semantics
from simpar.interop.nanotron import yaml_text
from simpar.specs.counts import microbatches
from simpar.specs.scenario import Scenario

OFFLOADING: Final = frozenset({"trl"})
"""Trainers that offload activations (TRL's `activation_offloading`)."""
ENGINES: Final = frozenset({"deepspeed"})
"""Frameworks that shard by themselves; the Trainer takes them as its engine at any stage."""
OPTIMIZERS: Final = {
    "adamw": "adamw_torch_fused", "adam": "adamw_torch_fused", "adamw-8bit": "adamw_bnb_8bit", "sgd": "sgd",
    "adamw-8bit-paged": "paged_adamw_8bit", "adamw-4bit": "adamw_torch_4bit", "adamw-fp8": "adamw_torch_8bit",
    "adafactor": "adafactor", "lion": "lion_32bit", "adamw-fused": "adamw_torch_fused", "adamw-foreach": "adamw_torch",
}  # fmt: skip
"""transformers.training_args.OptimizerNames."""
_LOSSES: Final = {"auto": None, "unfused": None, "linear": "Liger", "tiled": "chunked_nll"}


def violations(scenario: Scenario) -> list[Violation]:
    """What of a scenario the Trainer cannot run or its files cannot say."""
    plain = {"plan.ep": 1, "training.optimizer_in_backward": False}
    found = list(rules(scenario, "the Trainer", zero=(0, 1, 2, 3), losses=_LOSSES, optimizers=OPTIMIZERS, plain=plain))
    return [*found, *_rules(scenario)] if fine_tunes(scenario) else found


def _rules(scenario: Scenario) -> Iterator[Violation]:
    plan, training = scenario.plan, scenario.training
    yield from whole_sequences(scenario, "accelerate")
    if training.cross_entropy == "linear" and not training.fused_kernels:
        rule = "the Trainer takes it from Liger, with its other kernels"
        yield Violation("training.fused_kernels", False, rule, 'true, or cross_entropy = "auto"')
    if plan.tp > 1 and plan.zero_stage != 3:
        yield Violation("plan.tp", plan.tp, "accelerate splits matmuls beside FSDP 2 alone", "1, or zero_stage = 3")
    yield from whole_activations(scenario, "the Trainer")
    if plan.cp > 1 and (plan.zero_stage != 3 or plan.cp_style == "ulysses"):
        yield Violation(
            "plan.cp", plan.cp, "accelerate's context parallelism goes with FSDP 2", 'zero_stage = 3, cp_style = "all_gather"'
        )
    if plan.offload.activations and training.trainable == "all" and scenario.framework not in OFFLOADING:
        yield Violation(
            "plan.offload.activations", plan.offload.activations, "TRL alone offloads activations", '0, or framework = "trl"'
        )
    if uses_deepspeed(scenario) and (found := deepspeed.violations(scenario)):
        yield from (v for v in found if v.field in ("plan.shard_size", "plan.offload.optimizer", "plan.cp_style"))
    else:
        yield from offloaded_together(scenario)


def uses_deepspeed(scenario: Scenario) -> bool:
    """Whether states are sharded by DeepSpeed: its own framework, and the stages that FSDP does not have."""
    return data_ranks(scenario) > 1 and (scenario.plan.zero_stage in (1, 2) or scenario.framework in ENGINES)


def rests_in_bf16(scenario: Scenario) -> bool:
    """Whether trained weights rest in bf16 without an fp32 copy: what is asked for, else what transformers of that time does."""
    own, training = semantics(scenario).optimizer, scenario.training
    if training.pure_bf16 is not None or training.trainable == "lora":
        return bool(training.pure_bf16)
    return own.pure_bf16 and not (scenario.plan.zero_stage > 0 and own.sharded_weights_fp32)


def training_arguments(scenario: Scenario) -> dict[str, Any]:
    """Fields of TrainingArguments."""
    training, plan = scenario.training, scenario.plan
    full = recompute_of(scenario).granularity == "full"
    found: dict[str, Any] = {
        "output_dir": "out", "max_steps": 50, "learning_rate": 2e-5, "logging_steps": 1, "save_strategy": "no",
        "per_device_train_batch_size": training.micro_batch_size, "gradient_accumulation_steps": microbatches(scenario),
        "bf16": training.precision == "bf16" and not rests_in_bf16(scenario), "fp16": training.precision == "fp16",
        "optim": OPTIMIZERS.get(training.optimizer, "adamw_torch_fused"),
        "torch_compile": bool(meaning(scenario)["training.compile"]),
        # FSDP checkpoints by itself (accelerate.yaml); both would recompute twice.
        "gradient_checkpointing": full and (plan.zero_stage != 3 or uses_deepspeed(scenario)),
        "use_liger_kernel": bool(training.fused_kernels), "max_grad_norm": 1.0,
    }  # fmt: skip
    if not isinstance(training.fused_kernels, bool) and training.fused_kernels:
        found["liger_kernel_config"] = {key: training.fuses(ours) for ours, key in LIGER.items()}
    if uses_deepspeed(scenario):
        found["deepspeed"] = "deepspeed.json"
    return found


def sft_arguments(scenario: Scenario) -> dict[str, Any]:
    """Fields of TRL's SFTConfig, ModelConfig and ScriptArguments beside those of TrainingArguments."""
    training = scenario.training
    narrow = training.trainable == "lora" and training.base_weights != "fp32"
    found: dict[str, Any] = {
        **training_arguments(scenario), "model_name_or_path": hub_name(scenario), "dataset_name": "trl-lib/Capybara",
        "max_length": training.sequence_length, "packing": True, "attn_implementation": "flash_attention_2",
        "dtype": "bfloat16" if rests_in_bf16(scenario) or narrow else "float32",
        "activation_offloading": scenario.plan.offload.activations == 1.0,
    }  # fmt: skip
    if training.cross_entropy == "tiled":
        found["loss_type"] = "chunked_nll"
    if training.trainable == "lora":
        found |= {
            "use_peft": True, "lora_r": training.lora_rank, "lora_alpha": 2 * training.lora_rank,
            "lora_target_modules": lora_modules(scenario), "load_in_8bit": training.base_weights == "int8",
            "load_in_4bit": training.base_weights.startswith("nf4"), "bnb_4bit_quant_type": "nf4",
            "use_bnb_nested_quant": training.base_weights == "nf4-double", "lora_dropout": training.lora_dropout,
            "use_dora": training.dora,
        }  # fmt: skip
    return found


def accelerate_config(scenario: Scenario) -> dict[str, Any]:
    """Fields of accelerate's ClusterConfig."""
    plan, training = scenario.plan, scenario.training
    nodes, _ = nodes_and_gpus(scenario)
    sharded = plan.zero_stage == 3 and data_ranks(scenario) > 1 and not uses_deepspeed(scenario)
    kind = "DEEPSPEED" if uses_deepspeed(scenario) else "FSDP" if sharded else "MULTI_GPU" if scenario.world_size > 1 else "NO"
    mixed = "no" if rests_in_bf16(scenario) or training.precision in ("fp32", "tf32") else training.precision
    found: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE", "distributed_type": kind, "mixed_precision": mixed, "use_cpu": False,
        "debug": False, "num_processes": scenario.world_size, "num_machines": nodes, "machine_rank": 0,
        "rdzv_backend": "c10d",
        "main_training_function": "main", "downcast_bf16": "no", "same_network": True,
    }  # fmt: skip
    if kind == "DEEPSPEED":
        found["deepspeed_config"] = {"deepspeed_config_file": "deepspeed.json", "zero3_init_flag": plan.zero_stage == 3}
    if kind == "FSDP":
        found["fsdp_config"] = {
            "fsdp_version": 2, "fsdp_reshard_after_forward": plan.reshard_after_forward,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_offload_params": plan.offload.parameters,
            "fsdp_activation_checkpointing": recompute_of(scenario).granularity == "full",
            "fsdp_cpu_ram_efficient_loading": True, "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        }  # fmt: skip
        replicas, shards = replicas_and_shards(scenario)
        if replicas > 1 or plan.tp > 1 or plan.cp > 1:
            found["parallelism_config"] = {
                "parallelism_config_dp_replicate_size": replicas, "parallelism_config_dp_shard_size": shards,
                "parallelism_config_tp_size": plan.tp, "parallelism_config_cp_size": plan.cp,
            }  # fmt: skip
    return found


def deepspeed_config(scenario: Scenario) -> dict[str, Any]:
    """DeepSpeed's configuration under the Trainer, which makes the optimizer; one on the host stays DeepSpeed's own."""
    found = deepspeed.configuration(scenario)
    if not scenario.plan.offload.optimizer:
        del found["optimizer"]
        found["zero_allow_untested_optimizer"] = True
    return found


def export(scenario: Scenario) -> dict[str, str]:
    """File name -> text: TRL's arguments, plain TrainingArguments, accelerate's configuration, scripts and the rank map.

    Raises:
        InputError: everything that the Trainer cannot run or its files cannot say.
    """
    if found := violations(scenario):
        raise InputError(found)
    nodes, _ = nodes_and_gpus(scenario)
    launch = "accelerate launch --config_file accelerate.yaml"
    if nodes > 1:
        launch += ' --machine_rank "${SLURM_NODEID:-0}" --main_process_ip "${MASTER_ADDR:-localhost}" --main_process_port 29500'
    script = (
        "#!/bin/bash\nset -e\n# With a script of your own that parses TrainingArguments:\n"
        f'# {launch} "${{SCRIPT:-train.py}}" training_args.yaml\n{launch} -m trl.scripts.sft --config sft.yaml "$@"\n'
    )
    files = {
        "sft.yaml": data_comment(scenario) + yaml_text(sft_arguments(scenario)) + "\n",
        "training_args.yaml": yaml_text(training_arguments(scenario)) + "\n",
        "accelerate.yaml": yaml_text(accelerate_config(scenario)) + "\n",
        "huggingface.sh": script,
        **beside(scenario, "huggingface"),
    }
    if uses_deepspeed(scenario):
        files["deepspeed.json"] = json.dumps(deepspeed_config(scenario), indent=2) + "\n"
    return files
