"""verl: the training phase of the actor in a resolved Hydra configuration (verl/trainer/config of 2026)."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Unpack

from simpar.boundary import parse_yaml, reader
from simpar.errors import InputError, Violation
from simpar.interop.carried import Imported, Outside, Reading, settled
from simpar.interop.resolved import model_named, nested, unresolved, whole

_ACTOR = "actor_rollout_ref.actor"
_READ = (
    f"{_ACTOR}.strategy",
    f"{_ACTOR}.ppo_mini_batch_size",
    f"{_ACTOR}.ppo_micro_batch_size_per_gpu",
    "actor_rollout_ref.model.path",
)


@reader("file", "a resolved configuration of verl")
def load(text: str, *, file: str = "", accept: Collection[str] = (), **outside: Unpack[Outside]) -> Imported:
    """The scenario of one optimizer step of the actor: ppo_mini_batch_size prompts times rollout.n sequences of full length.

    Raises:
        InputError: no such configuration, values that are still ${...}, a model that is not here.
    """
    table = parse_yaml(text, file or "the configuration")
    if not isinstance(nested(table, _ACTOR), dict):
        raise InputError([Violation("file", file or "-", "is no configuration of verl", f"a table {_ACTOR}")])
    wrong = [p for p in unresolved(table) if p in _READ]
    if wrong:
        raise InputError(
            [Violation(wrong[0], nested(table, wrong[0]), "is not resolved", "the file under outputs/.hydra, resolved", file)]
        )
    return settled(_reading(table, file), text, file, outside)


def _reading(table: dict[str, Any], file: str) -> Reading:
    strategy = str(nested(table, f"{_ACTOR}.strategy", "fsdp"))
    if strategy not in ("fsdp", "fsdp2", "megatron"):
        raise InputError([Violation(f"{_ACTOR}.strategy", strategy, "is not read", "fsdp, fsdp2 or megatron", file)])
    per_node = whole(nested(table, "trainer.n_gpus_per_node", 8), "trainer.n_gpus_per_node", file)
    nodes = whole(nested(table, "trainer.nnodes", 1), "trainer.nnodes", file)
    lengths = [whole(nested(table, f"data.max_{p}_length", 512), f"data.max_{p}_length", file) for p in ("prompt", "response")]
    prompts = whole(nested(table, f"{_ACTOR}.ppo_mini_batch_size", 256), f"{_ACTOR}.ppo_mini_batch_size", file)
    samples = whole(nested(table, "actor_rollout_ref.rollout.n", 1), "actor_rollout_ref.rollout.n", file)
    reading = Reading({"name": "verl actor", "cluster": {"num_nodes": nodes, "num_gpus": nodes * per_node}})
    reading.table["model"] = model_named(
        str(nested(table, "actor_rollout_ref.model.path", "")), "actor_rollout_ref.model.path", file
    )
    micro = nested(table, f"{_ACTOR}.ppo_micro_batch_size_per_gpu")
    if micro is None and not nested(table, f"{_ACTOR}.use_dynamic_bsz"):
        name, rule = f"{_ACTOR}.ppo_micro_batch_size_per_gpu", "is not said, nor use_dynamic_bsz"
        raise InputError([Violation(name, None, rule, "one of them, which verl asks for too", file)])
    if nested(table, f"{_ACTOR}.use_dynamic_bsz"):
        budget = whole(nested(table, f"{_ACTOR}.ppo_max_token_len_per_gpu", 16384), f"{_ACTOR}.ppo_max_token_len_per_gpu", file)
        micro = max(budget // sum(lengths), 1)
        reading.warnings.append(f"use_dynamic_bsz: micro-batches of {budget} tokens are taken as {micro} sequences of full length")
    reading.warnings.append(
        f"the training phase alone: {prompts} prompts x {samples} sequences of {sum(lengths)} tokens, none shorter"
    )
    reading.table["training"] = {
        "sequence_length": sum(lengths), "global_batch_size": prompts * samples,
        "micro_batch_size": whole(micro, "micro batch", file),
        "precision": "bf16", "optimizer": "adamw",
    }  # fmt: skip
    if rank := nested(table, "actor_rollout_ref.model.lora_rank", 0):
        reading.table["training"] |= {"trainable": "lora", "lora_rank": rank, "lora_modules": "all"}
    reading.table |= _megatron(table, file) if strategy == "megatron" else _fsdp(table, file, strategy)
    engine = f"{_ACTOR}.{'megatron' if strategy == 'megatron' else 'fsdp_config'}"
    for name in ("param_offload", "grad_offload", "optimizer_offload"):
        if nested(table, f"{engine}.{name}"):
            # fsdp_workers.py and megatron_workers.py at b178a3cd5, update_actor: loaded before the phase, moved out after it.
            reading.warnings.append(
                f"{engine}.{name}: what it moves is on the GPU in this phase; the way there and back is left out"
            )
    if nested(table, "actor_rollout_ref.model.use_liger") and strategy != "megatron":
        reading.table["training"]["fused_kernels"] = True
    if nested(table, "actor_rollout_ref.model.enable_activation_offload"):
        reading.warnings.append("actor_rollout_ref.model.enable_activation_offload: activations are taken to stay on the GPU")
    if nested(table, "actor_rollout_ref.model.enable_gradient_checkpointing", True) and strategy != "megatron":
        reading.table["plan"]["recompute"] = "full"
    return reading


def _fsdp(table: dict[str, Any], file: str, strategy: str) -> dict[str, Any]:
    sequence = whole(nested(table, f"{_ACTOR}.ulysses_sequence_parallel_size", 1), "ulysses_sequence_parallel_size", file)
    config = nested(table, f"{_ACTOR}.fsdp_config", {})
    plan: dict[str, Any] = {"zero_stage": 3, "reshard_after_forward": bool(config.get("reshard_after_forward", True))}
    if sequence > 1:
        plan |= {"cp": sequence, "cp_style": "ulysses"}
    if (size := config.get("fsdp_size", -1)) and size > 0:
        plan["shard_size"] = size
    if strategy == "fsdp2" and config.get("offload_policy"):
        plan["offload"] = {"optimizer": True, "parameters": True}
    return {"framework": "verl-fsdp2" if strategy == "fsdp2" else "verl", "plan": plan}


def _megatron(table: dict[str, Any], file: str) -> dict[str, Any]:
    config = nested(table, f"{_ACTOR}.megatron", {})

    def degree(name: str) -> int:
        return whole(config.get(name) or 1, f"{_ACTOR}.megatron.{name}", file)

    plan: dict[str, Any] = {
        "tp": degree("tensor_model_parallel_size"), "pp": degree("pipeline_model_parallel_size"),
        "cp": degree("context_parallel_size"), "virtual_stages": degree("virtual_pipeline_model_parallel_size"),
        "sequence_parallel": bool(config.get("sequence_parallel", True)),
        "zero_stage": int(bool(config.get("use_distributed_optimizer", True))),
    }  # fmt: skip
    if degree("expert_model_parallel_size") > 1:
        plan |= {"ep": degree("expert_model_parallel_size"), "etp": degree("expert_tensor_parallel_size")}
    granularity = nested(config, "override_transformer_config.recompute_granularity")
    plan["recompute"] = granularity if granularity in ("full", "selective") else "none"
    return {"framework": "megatron-core", "plan": plan}
