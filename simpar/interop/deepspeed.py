"""DeepSpeed: a scenario as its JSON configuration and launch script. The model, the pipeline and the experts are built by the
training script there, so the launch script says in comments what that script has to build."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

from simpar.errors import InputError, Violation
from simpar.interop.launch import beside, documents_text, gpu_violations, nodes_and_gpus, torchrun, work_violations
from simpar.interop.meaning import data_ranks, meaning, recompute_of, schedule_name, semantics
from simpar.interop.scenario_text import model_text
from simpar.specs.counts import microbatches
from simpar.specs.model import TransformerSpec
from simpar.specs.scenario import Scenario

_OPTIMIZERS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "adamw": ("AdamW", {"lr": 3e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}),
    "adam": ("Adam", {"lr": 3e-4, "betas": [0.9, 0.95]}),
    "sgd": ("SGD", {"lr": 0.1}),
    "sgd-momentum": ("SGD", {"lr": 0.1, "momentum": 0.9}),
}
_ORDER: Final = ("tp", "cp", "ep", "dp", "pp")
_ALL: Final = 10**13
"""More parameters than any model has."""
PLAIN: Final[dict[str, Any]] = {
    "plan.virtual_stages": 1, "plan.microbatch_group_size": None, "plan.overlap_tp": False, "plan.overlap_ep": False,
    "plan.delay_wgrad": False, "plan.embedding_alone": None, "plan.first_stage_less_layers": None,
    "plan.last_stage_less_layers": None, "training.cuda_graphs": False, "training.cuda_graph_scope": None,
    "training.trainable": "all", "training.lora_rank": None, "training.lora_modules": "attention", "training.lora_adapters": 1,
    "training.lora_dropout": 0.0, "training.dora": False, "training.narrow_modules": "all", "training.fp8_gather": True,
    "training.base_weights": "auto", "training.optimizer_in_backward": False, "training.fused_kernels": False,
    "plan.stage_tp": None, "plan.replica_microbatches": "auto",
}  # fmt: skip
"""Fields that DeepSpeed has no setting for, with the one value it runs."""


def violations(scenario: Scenario) -> list[Violation]:
    """What of a scenario DeepSpeed cannot run or its configuration cannot say."""
    means = meaning(scenario)
    found = [*gpu_violations(scenario, "DeepSpeed"), *work_violations(scenario, "DeepSpeed", documents=True)]
    found += [*_plan_rules(scenario), *_training_rules(scenario)]
    found += [
        Violation(path, means[path], "DeepSpeed has no setting for this", f"{value!r}")
        for path, value in PLAIN.items()
        if means[path] != value
    ]
    return found


def _plan_rules(scenario: Scenario) -> Iterator[Violation]:
    plan, means = scenario.plan, meaning(scenario)
    if plan.pp > 1:
        if schedule_name(scenario) != "1f1b":
            yield Violation("plan.schedule", plan.schedule, "DeepSpeed's pipeline engine has one schedule", "1f1b")
        if plan.zero_stage > 1:
            yield Violation(
                "plan.zero_stage", plan.zero_stage, "DeepSpeed's pipeline engine composes with ZeRO up to 1", "at most 1"
            )
    if means["plan.defer_reduction"]:
        rule = "DeepSpeed reduces after every backward of ZeRO 2 and 3 (engine.no_sync refuses them)"
        yield Violation("plan.defer_reduction", True, rule, "false, or leave it out")
    if plan.tp > 1 and plan.zero_stage == 3:
        yield Violation("plan.zero_stage", 3, "DeepSpeed's tensor parallelism composes with ZeRO up to 2", "at most 2, or tp = 1")
    if plan.tp > 1 and plan.sequence_parallel:
        rule = "DeepSpeed's tensor parallelism keeps activations whole"
        yield Violation("plan.sequence_parallel", True, rule, "false")
    if plan.cp > 1 and plan.cp_style != "ulysses":
        yield Violation("plan.cp_style", plan.cp_style, "DeepSpeed splits sequences by all-to-all", "ulysses")
    if plan.ep > 1 and plan.ep_dispatcher != "alltoall":
        yield Violation("plan.ep_dispatcher", plan.ep_dispatcher, "DeepSpeed exchanges tokens by all-to-all", "alltoall")
    counts = means["plan.layers_per_stage"]
    if max(counts) - min(counts) > 1 and not plan.encoder_stages:
        rule = "DeepSpeed's pipeline cuts uniformly"
        yield Violation("plan.layers_per_stage", counts, rule, "stages that differ by one layer at most")
    spec = recompute_of(scenario)
    if spec.granularity == "selective" or spec.num_layers is not None or spec.uniform_layers * spec.every > 1:
        yield Violation("plan.recompute", plan.recompute, "DeepSpeed checkpoints whole layers or none", "full or none")
    if means["plan.placement"] != tuple(n for n in _ORDER if n in means["plan.placement"]):
        yield Violation(
            "plan.placement", plan.placement, "DeepSpeed numbers ranks tp, dp, pp from the fastest on", "tp-cp-ep-dp-pp"
        )
    yield from _sharding_rules(scenario)


def _sharding_rules(scenario: Scenario) -> Iterator[Violation]:
    plan, means = scenario.plan, meaning(scenario)
    if means["plan.shard_size"] not in (None, data_ranks(scenario)):
        rule = "DeepSpeed shards over all ranks (MiCS is gone since 0.19)"
        yield Violation("plan.shard_size", plan.shard_size, rule, "leave it out")
    if plan.offload.optimizer and plan.zero_stage == 0:
        yield Violation("plan.offload.optimizer", True, "DeepSpeed offloads what ZeRO shards", "zero_stage of at least 1")
    if plan.offload.activations not in (0.0, 1.0):
        yield Violation("plan.offload.activations", plan.offload.activations, "all checkpoints go to the host or none", "0 or 1")
    elif plan.offload.activations and recompute_of(scenario).granularity != "full":
        rule = "DeepSpeed sends checkpoints of recomputed layers to the host"
        yield Violation("plan.offload.activations", plan.offload.activations, rule, '0, or recompute = "full"')
    default = semantics(scenario).data.overlap_param_gather
    if plan.zero_stage in (1, 2) and plan.overlap_param_gather not in (None, default):
        rule = "DeepSpeed has no setting for this"
        yield Violation("plan.overlap_param_gather", plan.overlap_param_gather, rule, f"{str(default).lower()}")


def _training_rules(scenario: Scenario) -> Iterator[Violation]:
    training, means = scenario.training, meaning(scenario)
    if training.precision not in ("bf16", "fp16", "fp32"):
        yield Violation("training.precision", training.precision, "DeepSpeed does not train in this", "bf16, fp16 or fp32")
    if training.optimizer not in _OPTIMIZERS:
        yield Violation("training.optimizer", training.optimizer, "DeepSpeed does not have it", f"one of {', '.join(_OPTIMIZERS)}")
    if means["training.gradient_dtype"] == "bf16" and training.precision == "fp16":
        yield Violation("training.gradient_dtype", "bf16", "gradients of an fp16 run", "fp16 or fp32")
    whole = semantics(scenario).head.logits_vocab_parallel
    if means["training.loss_parallel"] not in (None, whole):
        yield Violation("training.loss_parallel", training.loss_parallel, "the training script's matter", "leave it out")
    if training.cross_entropy not in ("auto", semantics(scenario).head.loss):
        yield Violation("training.cross_entropy", training.cross_entropy, "the training script's matter", "auto")


def configuration(scenario: Scenario) -> dict[str, Any]:
    """The JSON object. train_batch_size = micro-batch x accumulation x data-parallel ranks, as DeepSpeed checks."""
    training, plan = scenario.training, scenario.plan
    name, parameters = _OPTIMIZERS.get(training.optimizer, _OPTIMIZERS["adamw"])
    gradient = meaning(scenario)["training.gradient_dtype"]
    found: dict[str, Any] = {
        "train_batch_size": training.global_batch_size,
        "train_micro_batch_size_per_gpu": training.micro_batch_size,
        "gradient_accumulation_steps": microbatches(scenario),
        "steps_per_print": 1,
        "gradient_clipping": 1.0,
        "optimizer": {"type": name, "params": parameters},
        "bf16": {"enabled": training.precision == "bf16"},
        "fp16": {"enabled": training.precision == "fp16"},
        "data_types": {"grad_accum_dtype": gradient},
        "communication_data_type": gradient,
        "zero_optimization": _zero(scenario),
    }
    if training.pure_bf16:
        found["bf16"] |= {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    if training.optimizer.startswith("sgd") and plan.zero_stage:
        found["zero_allow_untested_optimizer"] = True
    if recompute_of(scenario).granularity == "full":
        found["activation_checkpointing"] = {
            "partition_activations": False,
            "cpu_checkpointing": plan.offload.activations == 1.0,
            "contiguous_memory_optimization": False,
        }
    if plan.tp > 1:
        found["tensor_parallel"] = {"autotp_size": plan.tp}
    if plan.cp > 1:
        found["sequence_parallel_size"] = plan.cp
    if meaning(scenario)["training.compile"]:
        found["compile"] = {"deepcompile": False}
    return found


def _zero(scenario: Scenario) -> dict[str, Any]:
    plan, means = scenario.plan, meaning(scenario)
    found: dict[str, Any] = {"stage": plan.zero_stage, "contiguous_gradients": True}
    found["overlap_comm"] = bool(means["plan.overlap_grad_reduce"])
    if plan.zero_stage:
        bucket = plan.reduce_bucket_size or int(semantics(scenario).data.bucket_elements_min) or 500_000_000
        found |= {"reduce_scatter": True, "reduce_bucket_size": bucket, "allgather_bucket_size": bucket}
    if plan.zero_stage == 3:
        # Gathered parameters stay while fewer than so many are alive and their next use is nearer than so many away.
        keep = means["plan.reshard_after_forward"] is False
        found |= {
            "stage3_prefetch_bucket_size": 50_000_000,
            "stage3_max_live_parameters": _ALL if keep else 1_000_000_000,
            "stage3_max_reuse_distance": _ALL if keep else 0,
        }
    if plan.offload.optimizer:
        found["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if plan.offload.parameters:
        found["offload_param"] = {"device": "cpu", "pin_memory": True}
    return found


def notes(scenario: Scenario) -> list[str]:
    """What the training script has to build, one line each."""
    plan, training, model = scenario.plan, scenario.training, scenario.model
    name = model_text(scenario)
    found = [f"model: {name if isinstance(name, str) else json.dumps(name)}", f"sequence length: {training.sequence_length}"]
    if training.document_lengths:
        found.append(f"data: {documents_text(scenario)}")
    if isinstance(model, TransformerSpec) and training.dropout:
        found.append(f"dropout: {training.dropout}")
    if plan.pp > 1:
        interval = 1 if recompute_of(scenario).granularity == "full" else 0
        found.append(
            f"pipeline: PipelineModule(layers, num_stages={plan.pp}, partition_method='uniform', "
            f"activation_checkpoint_interval={interval}); engine.train_batch() does the accumulation"
        )
    elif recompute_of(scenario).granularity == "full":
        found.append("recomputation: deepspeed.checkpointing.checkpoint around every layer")
    if plan.tp > 1:
        found.append(
            f"tensor parallelism: {plan.tp} ranks (tensor_parallel.autotp_size; with a pipeline, the topology's model axis)"
        )
    if plan.cp > 1:
        found.append(f"sequence parallelism: DistributedAttention over {plan.cp} ranks (Ulysses)")
    if plan.ep > 1:
        capacity = training.routing.capacity_factor
        dropless = f"capacity_factor={capacity}" if capacity else "drop_tokens=False"
        found.append(f"experts: deepspeed.moe.layer.MoE(ep_size={plan.ep}, {dropless}), use_residual=False")
    if meaning(scenario)["training.compile"]:
        found.append("compiled: engine.compile() after initialisation")
    return found


def export(scenario: Scenario) -> dict[str, str]:
    """File name -> text: the JSON file, the launch script, the Slurm script and the rank map.

    Raises:
        InputError: everything that DeepSpeed cannot run or its configuration cannot say.
    """
    if found := violations(scenario):
        raise InputError(found)
    nodes, per_node = nodes_and_gpus(scenario)
    comments = "".join(f"#   {line}\n" for line in notes(scenario))
    arguments = '--deepspeed --deepspeed_config deepspeed.json "$@"'
    line = torchrun(scenario, '"${SCRIPT:-train.py}"', arguments)
    script = (
        f"#!/bin/bash\nset -e\n# The training script, SCRIPT=..., builds:\n{comments}\n{line}\n\n# With DeepSpeed's own launcher:\n"
        f'# deepspeed --hostfile hostfile --num_nodes {nodes} --num_gpus {per_node} "${{SCRIPT:-train.py}}" {arguments}\n'
    )
    return {
        "deepspeed.json": json.dumps(configuration(scenario), indent=2) + "\n",
        "deepspeed.sh": script,
        **beside(scenario, "deepspeed"),
    }
