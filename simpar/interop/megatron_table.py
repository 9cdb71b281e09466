"""Megatron-LM's arguments as it resolved them, by their argparse names, turned into the flags that say the same.

They stand in the table that every run prints (megatron/training/arguments.py, _print_args), in a checkpoint's `args`, in the
configurations of Megatron-Bridge and Primus. Every argument is there with its default, so one that is off says nothing.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from simpar.errors import InputError

_BEGIN: Final = re.compile(r"-{3,} (?:updated )?arguments -{3,}")
_END: Final = " end of arguments "
_LINE: Final = re.compile(r"^\s{0,3}([A-Za-z_]\w*)\s\.*\s?(.*?)\s*$")
_PREFIX: Final = re.compile(r"^(?:\[(?:rank|default)\d+\]:\s?|\d+:\s|\[\d+,\d+\]<std(?:out|err)>:\s?|\([^)]*pid=[^)]*\)\s?)+")
_NEGATIVE: Final = {
    "add_bias_linear": "disable-bias-linear", "overlap_p2p_comm": "no-overlap-p2p-communication",
    "gradient_accumulation_fusion": "no-gradient-accumulation-fusion", "masked_softmax_fusion": "no-masked-softmax-fusion",
    "bias_gelu_fusion": "no-bias-gelu-fusion", "bias_swiglu_fusion": "no-bias-swiglu-fusion",
    "bias_dropout_fusion": "no-bias-dropout-fusion", "apply_rope_fusion": "no-rope-fusion",
    "persist_layer_norm": "no-persist-layer-norm",
}  # fmt: skip
"""Argument that is on by default -> the flag that turns it off."""
_OTHER_NAMES: Final = {
    "fp8": "fp8-format", "fp4": "fp4-format", "virtual_pipeline_model_parallel_size": "num-virtual-stages-per-pipeline-rank",
    "num_moe_experts": "num-experts", "layernorm_zero_centered_gamma": "apply-layernorm-1p",
}  # fmt: skip
_DERIVED: Final = frozenset({
    "rank", "local_rank", "data_parallel_size", "params_dtype", "consumed_train_samples", "consumed_valid_samples", "iteration",
    "encoder_num_layers", "encoder_seq_length", "variable_seq_lengths", "transformer_pipeline_model_parallel_size", "model_type",
    "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16",
})  # fmt: skip

_DEFAULTS: Final[dict[str, Any]] = {
    "add_position_embedding": True, "bert_binary_head": True, "bert_embedder_type": "megatron", "cpu_offloading_activations": True,
    "dsa_indexer_rotate_activation": True, "dsa_indexer_scoring_relu": True, "img_dim": 224, "img_h": 224, "img_w": 224,
    "kv_lora_rank": 32, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "linear_value_head_dim": 128, "mamba_head_dim": 64, "mamba_inference_conv_states_dtype": "bf16",
    "mamba_inference_ssm_states_dtype": "bf16", "mamba_num_groups": 8, "mamba_state_dim": 128, "mhc_init_gating_factor": 0.01,
    "mhc_num_residual_streams": 4, "mhc_sinkhorn_iterations": 20, "mup_attn_scale_power": 1.0, "mup_embedding_mult": 1.0,
    "mup_output_mult": 1.0, "mup_width_mult": 1.0, "num_channels": 3, "num_classes": 1000,
    "outer_dp_sharding_strategy": "no_shard", "patch_dim": 16, "qk_head_dim": 128, "qk_pos_emb_head_dim": 64,
    "relative_attention_max_distance": 128, "relative_attention_num_buckets": 32, "retro_encoder_attention_dropout": 0.1,
    "retro_encoder_hidden_dropout": 0.1, "retro_encoder_layers": 2, "retro_num_neighbors": 2, "retro_num_retrieved_chunks": 2,
    "retro_verify_neighbor_count": True, "rl_consumption_granularity": "B", "rl_default_temperature": 1.0, "rl_default_top_k": -1,
    "rl_kv_cache_management_mode": "persist", "rl_parallel_generation_tasks": 512, "rl_prompts_per_eval": 32,
    "rl_sequence_packing_algo": "fifo", "rl_sequence_packing_bin_size": 8192, "rl_sequence_packing_max_sequences_per_bin": 50,
    "rl_submission_granularity": "B", "v_head_dim": 128, "vision_backbone_type": "vit", "vision_pretraining_type": "classify",
}  # fmt: skip
"""Defaults of arguments that go with another one, which is off: every table has them (megatron/training/arguments.py and the
configuration classes whose fields it prints, v2.5 to core 0.19 and main of August 2026; the same value in all of them)."""


def arguments_in(text: str) -> dict[str, str]:
    """Argument -> printed value, of the last table in a log; empty where there is none."""
    found: dict[str, str] = {}
    table: dict[str, str] | None = None
    for raw in text.splitlines():
        line = _PREFIX.sub("", raw)
        if _BEGIN.search(line):
            table = {}
        elif _END in line and table is not None:
            found, table = table, None
        elif table is not None and (match := _LINE.match(line)):
            table[match[1]] = match[2]
    if table:  # cut inside the table
        raise InputError("the table of arguments is cut: its end is missing; expected the log from its begin on")
    return found


def printed_value(text: str) -> Any:
    """The Python value of a printed one; texts and objects stay texts."""
    enum = re.fullmatch(r"[A-Za-z]\w*\.(\w+)|<\w+\.(\w+): [^>]*>", text)
    if text.startswith("torch.") or (enum and not text[0].isdigit()):
        return text.removeprefix("torch.") if text.startswith("torch.") else (enum[1] or enum[2] if enum else text)
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def flags_of(arguments: Mapping[str, Any]) -> dict[str, list[str]]:
    """Flag -> values, of arguments by their argparse names; what is off or none is left out."""
    found: dict[str, list[str]] = {}
    for name, value in arguments.items():
        if name in _DERIVED or value is None or (name in _DEFAULTS and str(value) == str(_DEFAULTS[name])):
            continue
        if name in _NEGATIVE:
            if value is False:
                found[_NEGATIVE[name]] = []
            continue
        flag = _OTHER_NAMES.get(name, name.replace("_", "-"))
        if value is True:
            found[flag] = []
        elif value is not False and not (value in ([], (), "") or (isinstance(value, dict) and not value)):
            found[flag] = _values(flag, value)
    if arguments.get("num_layers_per_virtual_pipeline_stage") is not None:
        found.pop("num-virtual-stages-per-pipeline-rank", None)
    if found.get("pipeline-model-parallel-size", ["1"]) == ["1"] or "num-virtual-stages-per-pipeline-rank" not in found:
        found.pop("no-overlap-p2p-communication", None)  # printed off without interleaving, where it has no effect
    return found


def _values(flag: str, value: Any) -> list[str]:
    if isinstance(value, list | tuple):
        if flag in ("moe-layer-freq", "window-size", "linear-attention-freq"):
            return ["[" + ",".join(map(str, value)) + "]" if flag != "window-size" else ",".join(map(str, value))]
        return [str(v) for v in value]
    return [str(value)]


def arguments_of_checkpoint(path: Path) -> dict[str, Any]:
    """The `args` of a checkpoint: model_optim_rng.pt or common.pt, or a folder that holds one. No class in it is loaded.

    Raises:
        InputError: no such file, or no args in it.
    """
    from simpar.interop.inert_pickle import Inert, load_inert

    expected = "a checkpoint of Megatron-LM: model_optim_rng.pt, or common.pt"
    if path.is_dir():
        names = ("common.pt", "model_optim_rng.pt")
        file = next(
            (p for n in names for p in (path / n, *sorted(path.glob(f"*/{n}")), *sorted(path.glob(f"*/*/{n}"))) if p.is_file()),
            None,
        )
        if file is None:
            raise InputError(f"{path}: holds neither {' nor '.join(names)}; expected a checkpoint's folder, iter_0000100")
        path = file
    value = load_inert(path, expected)
    args = value.get("args") if isinstance(value, dict) else None
    state = args.state if isinstance(args, Inert) else args
    if not isinstance(state, dict):
        raise InputError(f"{path}: holds no args; expected {expected}")
    return {str(name): _plain(v) for name, v in state.items()}


def _plain(value: Any) -> Any:
    from simpar.interop.inert_pickle import Inert

    if isinstance(value, Inert):
        # An enumeration is made from its value; its name is not stored, the value of Megatron's are numbers or texts.
        return value.args[0] if value.args and isinstance(value.args[0], str) else None
    if isinstance(value, str) and value.startswith("torch."):
        return value.removeprefix("torch.")
    return value
