"""gpt-neox: its YAML (megatron/neox_arguments), keys with hyphens or underscores."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final, Unpack

from simpar.boundary import parse_yaml, reader
from simpar.errors import InputError, Violation
from simpar.interop.carried import Imported, Outside, Reading
from simpar.interop.deepspeed_import import not_read
from simpar.interop.megatron_import import of_reading, read_options
from simpar.interop.resolved import nested, whole

_POSITIONS: Final = {
    "rotary": "rope",
    "learned": "learned_absolute",
    "sinusoidal": "none",
    "alibi": "alibi",
    "rpe": "relative",
    "none": "none",
}
_GATED: Final = {"swiglu": "swiglu", "geglu": "geglu"}
_ONE_SUM: Final = "gpt_j_residual: gpt-neox sums attention and MLP over its tensor ranks at once, here each on its own"
"""megatron/model/transformer.py, `self.reduce`."""
_REFUSED: Final = (
    "moe_num_experts",
    "mamba_selective_scan_fusion",
    "attention_config",
    "use_mup",
)
_OPTIMIZERS: Final = {"adam": "adamw", "cpu_adam": "adamw", "cpu_torch_adam": "adamw", "sgd": "sgd-momentum"}
"""megatron/training.py, get_optimizer."""
_DEFAULTS: Final = {
    "moe_num_experts": 1,
    "mamba_selective_scan_fusion": False,
    "use_mup": False,
}


@reader("file", "a YAML configuration of gpt-neox")
def load(text: str, *, file: str = "", accept: Collection[str] = (), **outside: Unpack[Outside]) -> Imported:
    """The scenario of one merged configuration.

    Raises:
        InputError: sizes are missing, a setting changes the model and is not read, or the rules of `megatron_import.load`.
    """
    raw = parse_yaml(text, file or "the configuration")
    table = {str(k).replace("-", "_"): v for k, v in raw.items()} if isinstance(raw, dict) else {}
    missing = [n for n in ("num_layers", "hidden_size", "num_attention_heads", "seq_length") if n not in table]
    if missing:
        rule = f"does not say {', '.join(missing)}"
        raise InputError([Violation("file", file or "-", rule, "gpt-neox's files of a run, merged into one", file)])
    wrong = []
    for name in _REFUSED:
        value = table.get(name, _DEFAULTS.get(name))
        plain = _DEFAULTS.get(name) == value or value is None
        if name == "attention_config":
            plain = value is None or {str(k[0][0] if isinstance(k[0], list) else k[0]) for k in value} <= {"global", "flash"}
        if not plain and not {name, name.replace("_", "-"), "all"} & set(accept):
            wrong.append(
                Violation(name, value, "changes the model and is not read", f"a scenario by hand, or --accept {name}", file)
            )
    if not {"train_batch_size", "train_micro_batch_size_per_gpu"} & set(table):
        rule = "says neither train_batch_size nor train_micro_batch_size_per_gpu"
        wrong.append(Violation("file", file or "-", rule, "gpt-neox's files of a run, merged into one", file))
    if wrong:
        raise InputError(wrong)
    flags = _flags(table, file)
    reading = read_options(flags, file, accept, resolved=True)
    _beside_flags(reading, table)
    if table.get("gpt_j_residual"):
        reading.table["model"] |= {"parallel_block": True, "block_norms": 1 if table.get("gpt_j_tied") else 2}
        if flags["tensor-model-parallel-size"] != ["1"]:
            reading.warnings.append(_ONE_SUM)
    return of_reading(reading, flags, text, file, outside)


def _beside_flags(reading: Reading, t: dict[str, Any]) -> None:
    """What Megatron-LM has no flag for: biases apart, attention without a kernel of its own, optimizers, a whole batch."""
    model, training = reading.table["model"], reading.table["training"]
    attention, mlp = bool(t.get("use_bias_in_attn_linear", True)), bool(t.get("use_bias_in_mlp", True))
    if isinstance(model, dict):
        model |= {"attention_bias": attention, "attention_out_bias": attention, "mlp_bias": mlp}
    if not (t.get("te_mha") or t.get("te_fp8_mha")):  # megatron/model/transformer.py: flash where attention_config names it
        training["attention_kernel"] = "fa2" if "flash" in str(t.get("attention_config")) else "unfused"
    if t.get("te_fp8_mha"):
        reading.warnings.append("te_fp8_mha: products are taken to be of 16 bits")
    name = str(nested(t, "optimizer.type", "adam")).lower()
    if name not in _OPTIMIZERS:
        reading.warnings.append(f"optimizer.type = {name!r}: taken as AdamW")
    training["optimizer"] = _OPTIMIZERS.get(name, "adamw")
    if t.get("use_bnb_optimizer"):
        reading.warnings.append("use_bnb_optimizer: states are taken to be in fp32, not in 8 bits")
    zero = nested(t, "zero_optimization", {})
    if nested(zero, "offload_optimizer.device", "none") != "none" or zero.get("cpu_offload") or name.startswith("cpu_"):
        reading.table["plan"]["offload"] = {"optimizer": True}
    if training["precision"] == "bf16":
        # deepspeed/runtime/engine.py, get_data_types: gradients of the model's dtype unless nothing is sharded.
        narrow = nested(t, "data_types.grad_accum_dtype", "fp32" if not zero.get("stage") else "bf16")
        training["gradient_dtype"] = "fp32" if narrow == "fp32" else "bf16"
    reading.warnings += not_read(t, {"zero_optimization.reduce_bucket_size": 5e8})
    if "train_micro_batch_size_per_gpu" not in t:
        _split_batch(reading, whole(t.get("gradient_accumulation_steps") or 1, "gradient_accumulation_steps", ""))


def _split_batch(reading: Reading, accumulation: int) -> None:
    """The micro-batch of a whole batch (megatron/neox_arguments/arguments.py, calculate_batch_parameters)."""
    finish = reading.finish

    def finished(table: dict[str, Any], world: int) -> None:
        if finish is not None:
            finish(table, world)
        training = table["training"]
        training["micro_batch_size"] = max(training["global_batch_size"] // (table["plan"].get("dp", 1) * accumulation), 1)

    reading.finish = finished


def _width(t: dict[str, Any], hidden: int, gated: bool, file: str) -> int:
    """Of the MLP: a gated one takes a third of the size that is written (megatron/model/transformer.py, September 2024 on)."""
    written = t.get("intermediate_size") or int((t.get("expansion_factor") or 4) * hidden)
    size = whole(written, "intermediate_size", file)
    multiple = whole(t.get("mlp_multiple_of") or 1, "mlp_multiple_of", file)
    return -(-(int(size * 2 / 3) // 2 if gated else size) // multiple) * multiple


def _flags(t: dict[str, Any], file: str) -> dict[str, list[str]]:
    hidden = whole(t["hidden_size"], "hidden_size", file)
    activation = str(t.get("activation", "gelu"))
    found = {
        "num-layers": t["num_layers"], "hidden-size": hidden, "num-attention-heads": t["num_attention_heads"],
        "seq-length": t["seq_length"], "max-position-embeddings": t.get("max_position_embeddings", t["seq_length"]),
        "ffn-hidden-size": _width(t, hidden, activation in _GATED, file),
        "tensor-model-parallel-size": t.get("model_parallel_size", 1),
        "pipeline-model-parallel-size": max(whole(t.get("pipe_parallel_size", 1) or 1, "pipe_parallel_size", file), 1),
        "position-embedding-type": _POSITIONS.get(str(t.get("pos_emb", "learned")), str(t.get("pos_emb"))),
        "normalization": {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}.get(str(t.get("norm", "layernorm")), str(t.get("norm"))),
        "hidden-dropout": t.get("hidden_dropout", 0.0), "attention-dropout": t.get("attention_dropout", 0.0),
        "zero-stage": nested(t, "zero_optimization.stage", 0),
    }  # fmt: skip
    if "train_micro_batch_size_per_gpu" in t:
        found["micro-batch-size"] = t["train_micro_batch_size_per_gpu"]
    if "train_batch_size" in t:
        found["global-batch-size"] = t["train_batch_size"]
    elif "gradient_accumulation_steps" in t and "train_micro_batch_size_per_gpu" in t:
        found["gradient-accumulation-steps"] = t["gradient_accumulation_steps"]
    flags = {name: [str(value)] for name, value in found.items()}
    precision = "bf16" if nested(t, "bf16.enabled") or t.get("precision") == "bfloat16" else "fp16" if (
        nested(t, "fp16.enabled") or t.get("precision") == "fp16") else ""  # fmt: skip
    switches = {
        precision: bool(precision), activation: activation in _GATED, "sequence-parallel": bool(t.get("sequence_parallel")),
        "untie-embeddings-and-output-weights": bool(t.get("no_weight_tying")), "deepspeed": True,
        "disable-bias-linear": t.get("use_bias_in_mlp", True) is False and t.get("use_bias_in_attn_linear", True) is False,
    }  # fmt: skip
    flags |= {name: [] for name, on in switches.items() if on}
    if t.get("num_kv_heads"):
        flags |= {"group-query-attention": [], "num-query-groups": [str(t["num_kv_heads"])]}
    if t.get("checkpoint_activations"):
        count = [str(t.get("checkpoint_num_layers", 1))]
        flags |= {"recompute-granularity": ["full"], "recompute-method": ["uniform"], "recompute-num-layers": count}
    if t.get("sliding_window_width"):
        flags["window-size"] = [str(t["sliding_window_width"])]
    if t.get("vocab_size"):
        flags["padded-vocab-size"] = [str(t["vocab_size"])]
    return flags
