"""axolotl: a scenario as its YAML (names of axolotl/utils/schemas of 2026), with the plugins that the memory options need."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

from simpar.errors import InputError, Violation
from simpar.interop import huggingface
from simpar.interop.finetune import (
    LIGER_KEYS,
    data_comment,
    fine_tunes,
    hub_name,
    lora_modules,
    offloaded_together,
    rules,
    whole_activations,
)
from simpar.interop.launch import beside, torchrun
from simpar.interop.meaning import data_ranks, meaning, recompute_of, replicas_and_shards
from simpar.interop.nanotron import yaml_text
from simpar.specs.counts import microbatches
from simpar.specs.scenario import Scenario

_LOSSES: Final = {"auto": None, "unfused": None, "fused": "liger_cross_entropy", "linear": "liger_fused_linear_cross_entropy",
                  "tiled": "cut_cross_entropy", "chunked": "chunked_cross_entropy"}  # fmt: skip
OPTIMIZERS: Final = {**huggingface.OPTIMIZERS, "adamw-4bit": "ao_adamw_4bit", "adamw-fp8": "ao_adamw_fp8", "muon": "muon"}
"""transformers' names, and axolotl's own (CustomSupportedOptimizers)."""
_LIGER: Final = "axolotl.integrations.liger.LigerPlugin"
_CUT: Final = "axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"


def violations(scenario: Scenario) -> list[Violation]:
    """What of a scenario axolotl cannot run or its file cannot say."""
    plain = {"training.optimizer_in_backward": False}
    found = list(rules(scenario, "axolotl", zero=(0, 1, 2, 3), losses=_LOSSES, optimizers=OPTIMIZERS, plain=plain))
    return [*found, *_rules(scenario)] if fine_tunes(scenario) else found


def _rules(scenario: Scenario) -> Iterator[Violation]:
    plan = scenario.plan
    yield from whole_activations(scenario, "axolotl")
    if plan.cp > 1 and plan.cp_style != "ring":
        yield Violation("plan.cp_style", plan.cp_style, "axolotl passes keys and values in a ring", "ring")
    if scenario.training.base_weights == "fp32":
        yield Violation("training.base_weights", "fp32", "axolotl loads frozen weights in 16 bits or fewer", "auto")
    if not huggingface.uses_deepspeed(scenario):
        yield from offloaded_together(scenario)


def configuration(scenario: Scenario) -> dict[str, Any]:
    """The keys of the file."""
    training, plan = scenario.training, scenario.plan
    lora, offloads = training.trainable == "lora", plan.offload.activations == 1.0
    full = recompute_of(scenario).granularity == "full"
    found: dict[str, Any] = {
        "base_model": hub_name(scenario), "output_dir": "out", "datasets": [{"path": "tatsu-lab/alpaca", "type": "alpaca"}],
        "sequence_len": training.sequence_length, "sample_packing": True, "pad_to_sequence_len": True,
        "micro_batch_size": training.micro_batch_size, "gradient_accumulation_steps": microbatches(scenario), "max_steps": 50,
        "optimizer": OPTIMIZERS.get(training.optimizer, "adamw_torch_fused"), "learning_rate": 2e-5,
        "bf16": training.precision == "bf16", "fp16": training.precision == "fp16", "tf32": training.precision == "tf32",
        "gradient_checkpointing": "offload" if full and offloads else full, "flash_attention": True,
        "torch_compile": bool(meaning(scenario)["training.compile"]),
    }  # fmt: skip
    if offloads and not full:
        found["activation_offloading"] = True
    if training.pure_bf16:
        found |= {"bf16": "full"}
    if lora:
        quantised = training.base_weights
        found |= {
            "adapter": "qlora" if quantised.startswith("nf4") else "lora", "lora_r": training.lora_rank,
            "lora_alpha": 2 * training.lora_rank, "lora_target_modules": lora_modules(scenario),
            "lora_dropout": training.lora_dropout, "peft_use_dora": training.dora,
            "load_in_4bit": quantised.startswith("nf4"), "load_in_8bit": quantised == "int8",
        }  # fmt: skip
    found |= _kernels(scenario) | _sharding(scenario)
    return found


def _kernels(scenario: Scenario) -> dict[str, Any]:
    training, plugins, found = scenario.training, [], {}  # type: Any, list[str], dict[str, Any]
    if training.fused_kernels or training.cross_entropy in ("fused", "linear"):
        plugins.append(_LIGER)
    found |= {f"liger_{key}": True for ours, key in LIGER_KEYS.items() if training.fuses(ours)}
    if training.cross_entropy == "tiled":
        plugins.append(_CUT)
    if (key := _LOSSES.get(training.cross_entropy)) is not None:
        found[key] = True
    return ({"plugins": plugins} if plugins else {}) | found


def _sharding(scenario: Scenario) -> dict[str, Any]:
    plan = scenario.plan
    found: dict[str, Any] = {}
    if huggingface.uses_deepspeed(scenario):
        return {"deepspeed": "deepspeed.json"}
    if plan.zero_stage == 3 and data_ranks(scenario) > 1:
        replicas, shards = replicas_and_shards(scenario)
        found |= {
            "fsdp_version": 2, "dp_shard_size": shards,
            "fsdp_config": {"offload_params": plan.offload.parameters, "reshard_after_forward": plan.reshard_after_forward,
                            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "state_dict_type": "SHARDED_STATE_DICT"},
        }  # fmt: skip
        found |= {"dp_replicate_size": replicas} if replicas > 1 else {}
    for name, size in (("tensor_parallel_size", plan.tp), ("context_parallel_size", plan.cp)):
        found |= {name: size} if size > 1 else {}
    return found


def export(scenario: Scenario) -> dict[str, str]:
    """File name -> text: the YAML file, scripts and the rank map; DeepSpeed's file where it shards.

    Raises:
        InputError: everything that axolotl cannot run or its file cannot say.
    """
    if found := violations(scenario):
        raise InputError(found)
    line = torchrun(scenario, "-m axolotl.cli.train axolotl.yaml", '"$@"')
    files = {
        "axolotl.yaml": data_comment(scenario) + yaml_text(configuration(scenario)) + "\n",
        "axolotl.sh": f"#!/bin/bash\nset -e\n{line}\n",
        **beside(scenario, "axolotl"),
    }
    if huggingface.uses_deepspeed(scenario):
        files["deepspeed.json"] = json.dumps(huggingface.deepspeed_config(scenario), indent=2) + "\n"
    return files
