"""torchtune: a scenario as the YAML of its recipes (0.6: recipes/configs and torchtune/models)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from simpar.errors import InputError, Violation
from simpar.interop.finetune import (
    ATTENTION,
    QV,
    data_comment,
    fine_tunes,
    offloaded_together,
    rules,
    whole_activations,
    whole_sequences,
)
from simpar.interop.launch import beside, nodes_and_gpus
from simpar.interop.meaning import meaning, recompute_of, replicas_and_shards
from simpar.interop.nanotron import yaml_text
from simpar.specs.counts import microbatches
from simpar.specs.models_io import preset_of
from simpar.specs.scenario import Scenario

_MODELS: Final = {
    "llama2-7b": ("llama2", "llama2_7b"), "llama2-13b": ("llama2", "llama2_13b"), "llama2-70b": ("llama2", "llama2_70b"),
    "llama3.1-8b": ("llama3_1", "llama3_1_8b"), "llama3.1-70b": ("llama3_1", "llama3_1_70b"),
    "llama3.1-405b": ("llama3_1", "llama3_1_405b"),
}  # fmt: skip
"""Preset -> module of torchtune.models, and its builder."""
OPTIMIZERS: Final[dict[str, dict[str, Any]]] = {
    "adamw": {"_component_": "torch.optim.AdamW", "fused": True, "lr": 2e-5},
    "adam": {"_component_": "torch.optim.Adam", "fused": True, "lr": 2e-5},
    "adamw-fused": {"_component_": "torch.optim.AdamW", "fused": True, "lr": 2e-5},
    "adamw-foreach": {"_component_": "torch.optim.AdamW", "fused": False, "lr": 2e-5},
    "adamw-8bit": {"_component_": "bitsandbytes.optim.AdamW8bit", "lr": 2e-5},
    "adamw-8bit-paged": {"_component_": "bitsandbytes.optim.PagedAdamW8bit", "lr": 2e-5},
    "adamw-4bit": {"_component_": "torchao.optim.AdamW4bit", "lr": 2e-5},
    "adamw-fp8": {"_component_": "torchao.optim.AdamWFp8", "lr": 2e-5},
    "sgd": {"_component_": "torch.optim.SGD", "lr": 2e-5},
}
"""Ours -> torchtune's component."""
_LOSSES: Final = {
    "auto": "torchtune.modules.loss.LinearCrossEntropyLoss", "chunked": "torchtune.modules.loss.LinearCrossEntropyLoss",
    "unfused": "torch.nn.CrossEntropyLoss",
}  # fmt: skip


def violations(scenario: Scenario) -> list[Violation]:
    """What of a scenario torchtune cannot run or its file cannot say."""
    found = list(
        rules(scenario, "torchtune", zero=(0, 3), losses=_LOSSES, optimizers=OPTIMIZERS, plain={"training.fused_kernels": False})
    )
    return [*found, *_rules(scenario)] if fine_tunes(scenario) else found


def _rules(scenario: Scenario) -> Iterator[Violation]:
    plan, training = scenario.plan, scenario.training
    yield from whole_sequences(scenario, "torchtune")
    if preset_of(scenario.model) not in _MODELS:
        name = getattr(scenario.model, "name", "")
        yield Violation("model", name, "no builder of torchtune is known for it here", f"one of {', '.join(_MODELS)}")
    if training.precision == "fp16":
        yield Violation("training.precision", "fp16", "torchtune trains in bf16 or fp32", "bf16 or fp32")
    if training.base_weights in ("int8", "fp32"):
        yield Violation("training.base_weights", training.base_weights, "torchtune's QLoRA is nf4", "nf4, nf4-double or auto")
    if training.trainable == "lora" and (plan.tp > 1 or plan.cp > 1 or plan.shard_size or training.optimizer_in_backward):
        yield Violation(
            "training.trainable", "lora", "torchtune's LoRA recipes shard over all ranks and update after the backward", "all"
        )
    if training.optimizer_in_backward and microbatches(scenario) > 1:
        rule = "torchtune updates in the backward of one micro-batch"
        yield Violation("training.optimizer_in_backward", True, rule, "a global batch of one micro-batch per rank, or false")
    yield from whole_activations(scenario, "torchtune")
    yield from offloaded_together(scenario)


def recipe_name(scenario: Scenario) -> str:
    """The recipe that runs it."""
    kind = "lora_finetune" if scenario.training.trainable == "lora" else "full_finetune"
    return f"{kind}_{'distributed' if scenario.world_size > 1 else 'single_device'}"


def configuration(scenario: Scenario) -> dict[str, Any]:
    """The keys of the file."""
    training, plan = scenario.training, scenario.plan
    module, builder = _MODELS[preset_of(scenario.model) or ""]
    model: dict[str, Any] = {"_component_": f"torchtune.models.{module}.{builder}"}
    if training.trainable == "lora":
        prefix = "qlora" if training.base_weights.startswith("nf4") else "lora"
        model = {
            "_component_": f"torchtune.models.{module}.{prefix}_{builder}",
            "lora_attn_modules": {"qv": list(QV), "mlp": []}.get(training.lora_modules, [*ATTENTION[:3], "output_proj"]),
            "apply_lora_to_mlp": training.lora_modules in ("all", "mlp"),
            "lora_rank": training.lora_rank, "lora_alpha": 2 * training.lora_rank,
            "lora_dropout": training.lora_dropout, "use_dora": training.dora,
        }  # fmt: skip
    found: dict[str, Any] = {
        "output_dir": "out", "model": model,
        "tokenizer": {"_component_": f"torchtune.models.{'llama2.llama2' if module == 'llama2' else 'llama3.llama3'}_tokenizer",
                      "path": "model/tokenizer.model", "max_seq_len": training.sequence_length},
        "dataset": {"_component_": "torchtune.datasets.alpaca_dataset", "packed": True},
        "checkpointer": {"_component_": "torchtune.training.FullModelHFCheckpointer", "checkpoint_dir": "model",
                         "checkpoint_files": [], "output_dir": "out", "model_type": "LLAMA2" if module == "llama2" else "LLAMA3"},
        "resume_from_checkpoint": False, "seed": None, "shuffle": True,
        "batch_size": training.micro_batch_size, "gradient_accumulation_steps": microbatches(scenario), "epochs": 1,
        "max_steps_per_epoch": 50, "optimizer": dict(OPTIMIZERS[training.optimizer]),
        "loss": {"_component_": _LOSSES[training.cross_entropy]}, "clip_grad_norm": None,
        "device": "cuda", "dtype": "fp32" if training.precision in ("fp32", "tf32") else "bf16",
        "enable_activation_checkpointing": recompute_of(scenario).granularity == "full",
        "enable_activation_offloading": plan.offload.activations == 1.0, "compile": bool(meaning(scenario)["training.compile"]),
        "metric_logger": {"_component_": "torchtune.training.metric_logging.DiskLogger", "log_dir": "out/logs"},
        "log_every_n_steps": 1, "log_peak_memory_stats": True,
    }  # fmt: skip
    if training.trainable == "all":
        found["optimizer_in_bwd"] = training.optimizer_in_backward
    if scenario.world_size > 1 and training.trainable == "lora":
        found |= {"fsdp_cpu_offload": plan.offload.parameters, "fsdp_reshard_after_forward": plan.reshard_after_forward}
    elif scenario.world_size > 1:
        replicas, shards = replicas_and_shards(scenario)
        if plan.tp > 1:
            found["tensor_parallel_plan"] = {"_component_": "torchtune.models.llama3.base_llama_tp_plan"}
        found |= {
            "tensor_parallel_dim": plan.tp, "context_parallel_dim": plan.cp, "data_parallel_replicate_dim": replicas,
            "data_parallel_shard_dim": shards, "fsdp_cpu_offload": plan.offload.parameters,
            "fsdp_reshard_after_forward": plan.reshard_after_forward,
        }  # fmt: skip
    return found


def export(scenario: Scenario) -> dict[str, str]:
    """File name -> text: the YAML file, scripts and the rank map.

    Raises:
        InputError: everything that torchtune cannot run or its file cannot say.
    """
    if found := violations(scenario):
        raise InputError(found)
    nodes, per_node = nodes_and_gpus(scenario)
    launch = "tune run"
    if scenario.world_size > 1:
        launch += f" --nnodes {nodes} --nproc_per_node {per_node}"
        launch += ' --rdzv_backend c10d --rdzv_endpoint "${MASTER_ADDR:-localhost}:29500"' if nodes > 1 else ""
    return {
        "torchtune.yaml": data_comment(scenario) + yaml_text(configuration(scenario)) + "\n",
        "torchtune.sh": f'#!/bin/bash\nset -e\n{launch} {recipe_name(scenario)} --config torchtune.yaml "$@"\n',
        **beside(scenario, "torchtune"),
    }
