"""Megatron-Bridge's and NeMo's resolved configuration: run_config.yaml of a checkpoint, as plain data.

Keys: megatron.bridge.training.config (ConfigContainer) of 0.6, whose model part has the names of Megatron-Core's TransformerConfig.
`_target_` names classes; none of them is made.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, Final, Unpack

from simpar.boundary import parse_yaml, reader
from simpar.errors import InputError, Violation
from simpar.interop.carried import Imported, Outside
from simpar.interop.megatron_import import of_reading, read_options
from simpar.interop.megatron_table import flags_of
from simpar.interop.resolved import nested, unresolved

_ARGUMENTS: Final = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", "expert_model_parallel_size",
    "expert_tensor_parallel_size", "sequence_parallel", "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads",
    "kv_channels", "normalization", "add_bias_linear", "add_qkv_bias", "qk_layernorm", "hidden_dropout", "attention_dropout",
    "window_size", "multi_latent_attention", "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim",
    "moe_layer_freq", "moe_ffn_hidden_size", "moe_router_topk", "moe_shared_expert_intermediate_size", "moe_router_num_groups",
    "moe_router_group_topk", "moe_router_enable_expert_bias", "moe_grouped_gemm", "moe_token_dispatcher_type", "moe_enable_deepep",
    "moe_flex_dispatcher_backend", "moe_expert_capacity_factor", "recompute_granularity", "recompute_method",
    "recompute_num_layers", "recompute_modules", "mtp_num_layers", "cuda_graph_impl", "cuda_graph_scope", "enable_cuda_graph",
    "external_cuda_graph", "tp_comm_overlap", "cross_entropy_loss_fusion", "fp8", "fp8_recipe", "cp_comm_type", "bf16", "fp16",
    "overlap_moe_expert_parallel_comm", "delay_wgrad_compute", "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split", "microbatch_group_size_per_vp_stage", "pipeline_model_parallel_layout",
    "attention_backend", "experimental_attention_variant", "hybrid_override_pattern", "is_hybrid_model", "linear_attention_freq",
    "window_attn_skip_freq", "heterogeneous_block_specs", "softmax_type", "attention_output_gate", "mamba_state_dim",
    "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage", "cpu_offloading",
    "fine_grained_activation_offloading",
)  # fmt: skip
_RENAMED: Final = {
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
    "microbatch_group_size_per_vp_stage": "microbatch_group_size_per_virtual_pipeline_stage",
}
_RECIPES: Final = (("mxfp8", "mxfp8"), ("current_scaling", "tensorwise"), ("subchannel", "blockwise"), ("blockwise", "blockwise"),
                   ("delayed", "delayed"), ("fp8", "delayed"))  # fmt: skip


@reader("file", "a run_config.yaml of Megatron-Bridge")
def load(text: str, *, file: str = "", accept: Collection[str] = (), **outside: Unpack[Outside]) -> Imported:
    """The scenario of a resolved configuration; the number of GPUs is not in it.

    Raises:
        InputError: no such configuration, or the rules of `megatron_import.load`.
    """
    table = parse_yaml(printed_in(text) or text, file or "the configuration")
    if not isinstance(table, dict) or not isinstance(table.get("model"), dict) or not isinstance(table.get("train"), dict):
        raise InputError([Violation("file", file or "-", "is no run_config.yaml", "model and train tables")])
    if open_values := list(unresolved(table["model"]))[:4]:
        raise InputError([Violation(open_values[0], "${...}", "is not resolved", "the run_config.yaml of a checkpoint", file)])
    flags = flags_of(arguments(table))
    reading = read_options(flags, file, accept, resolved=True)
    reading.table["framework"] = "megatron-bridge"
    return of_reading(reading, flags, text, file, outside)


def printed_in(text: str) -> str:
    """The last configuration that a log prints; empty where it prints none."""
    found = re.findall(r"^-+ Task Configuration -+\n(.*?)^-{5,}", text, re.S | re.M)
    return found[-1] if found else ""


def arguments(table: Mapping[str, Any]) -> dict[str, Any]:
    """Megatron-LM's arguments that say the same."""
    model, train = table["model"], table["train"]
    found: dict[str, Any] = {_RENAMED.get(name, name): _plain(model[name]) for name in _ARGUMENTS if name in model}
    found |= {
        "num_experts": model.get("num_moe_experts"),
        "group_query_attention": model.get("num_query_groups") not in (None, model.get("num_attention_heads")),
        "num_query_groups": model.get("num_query_groups"),
        "untie_embeddings_and_output_weights": not model.get("share_embeddings_and_output_weights", True),
        "position_embedding_type": _plain(model.get("position_embedding_type", "learned_absolute")),
        # Until 2026 nothing held the model's length (its longest) to that of the data, which is what a step reads.
        "seq_length": nested(table, "dataset.seq_length") or nested(table, "dataset.sequence_length") or model.get("seq_length"),
        "micro_batch_size": train.get("micro_batch_size"), "global_batch_size": train.get("global_batch_size"),
        "virtual_pipeline_model_parallel_size": model.get("virtual_pipeline_model_parallel_size"),
        "padded_vocab_size": _vocabulary(model),
    }  # fmt: skip
    found |= _activation(model) | _precision(table) | _states(table)
    if nested(table, "peft.dim"):
        found["peft"] = f"rank {nested(table, 'peft.dim')}"
    return {name: value for name, value in found.items() if value is not None}


def _plain(value: Any) -> Any:
    """An enumeration by its argument, a class by its last name, others as they are."""
    if isinstance(value, Mapping) and "_target_" in value:
        arguments = value.get("_args_") or []
        return arguments[0] if arguments else str(value["_target_"]).rpartition(".")[2]
    return value


def _activation(model: Mapping[str, Any]) -> dict[str, Any]:
    name = str(_plain(model.get("activation_func", "gelu")))
    gated = bool(model.get("gated_linear_unit"))
    return {
        "swiglu": gated and name in ("silu", "swish"),
        "geglu": gated and "gelu" in name,
        "squared_relu": "squared_relu" in name,
    }


def _vocabulary(model: Mapping[str, Any]) -> int | None:
    size = model.get("vocab_size")
    if not isinstance(size, int) or not model.get("should_pad_vocab"):
        return size if isinstance(size, int) else None
    unit = int(model.get("make_vocab_size_divisible_by") or 128) * int(model.get("tensor_model_parallel_size") or 1)
    return -(-size // unit) * unit


def _precision(table: Mapping[str, Any]) -> dict[str, Any]:
    mixed = table.get("mixed_precision")
    name = mixed if isinstance(mixed, str) else ""
    said = mixed if isinstance(mixed, Mapping) else {}
    fp8 = said.get("fp8") or nested(table, "model.fp8") or ("hybrid" if "fp8" in name else None)
    recipe = said.get("fp8_recipe") or nested(table, "model.fp8_recipe") or next((r for word, r in _RECIPES if word in name), None)
    found: dict[str, Any] = {"fp8": fp8, "fp8_recipe": _plain(recipe) if fp8 else None}
    if "nvfp4" in name:
        found |= {"fp4": "e2m1", "fp8": None}
    half = "fp16" if "fp16" in name or said.get("fp16") else "bf16"
    reduced = said.get("grad_reduce_in_fp32", nested(table, "ddp.grad_reduce_in_fp32", True))
    return {**found, half: True, "grad_reduce_in_bf16": not reduced, "accumulate_allreduce_grads_in_fp32": bool(reduced)}


def _states(table: Mapping[str, Any]) -> dict[str, Any]:
    ddp, optimizer = table.get("ddp") or {}, table.get("optimizer") or {}
    names = ("overlap_grad_reduce", "overlap_param_gather", "use_megatron_fsdp", "data_parallel_sharding_strategy",
             "num_distributed_optimizer_instances")  # fmt: skip
    found = {name: _plain(ddp.get(name)) for name in names}
    found |= {"use_distributed_optimizer": ddp.get("use_distributed_optimizer") or optimizer.get("use_distributed_optimizer")}
    overlap = nested(table, "comm_overlap.tp_comm_overlap")
    found |= {"tp_comm_overlap": True} if overlap else {}
    return found | {
        "optimizer": _plain(optimizer.get("optimizer", "adam")), "optimizer_cpu_offload": optimizer.get("optimizer_cpu_offload"),
        "exp_avg_dtype": _dtype(optimizer.get("exp_avg_dtype")), "exp_avg_sq_dtype": _dtype(optimizer.get("exp_avg_sq_dtype")),
    }  # fmt: skip


def _dtype(value: Any) -> str | None:
    name = str(_plain(value)).removeprefix("torch.")
    return {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16"}.get(name)
