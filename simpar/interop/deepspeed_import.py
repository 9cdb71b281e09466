"""DeepSpeed's JSON read back, with the model's config.json beside it: what the configuration alone does not say is asked for."""

from __future__ import annotations

from typing import Any, Final, Unpack

from simpar.boundary import parse_json, reader
from simpar.errors import InputError, Violation
from simpar.interop.carried import Imported, Outside, Reading, settled
from simpar.interop.resolved import model_named, nested, whole
from simpar.specs.models_io import load_model

_OPTIMIZERS: Final = {
    "adamw": "adamw", "adam": "adamw", "sgd": "sgd-momentum", "lion": "lion", "muon": "muon", "onebitadam": "adamw",
    "fusedadam": "adamw", "cpuadam": "adamw", "adafactor": "adafactor",
}  # fmt: skip
_WANTED: Final = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "zero_optimization")
_NEEDED: Final = (
    "train_micro_batch_size_per_gpu",
    "train_batch_size",
    "gradient_accumulation_steps",
    "bf16.enabled",
    "fp16.enabled",
)
_TAKEN: Final[dict[str, Any]] = {
    "zero_optimization.allgather_bucket_size": 5e8,
    "zero_optimization.stage3_prefetch_bucket_size": 5e7, "zero_optimization.stage3_max_live_parameters": 1e9,
    "zero_optimization.stage3_param_persistence_threshold": 1e5, "zero_optimization.zero_hpz_partition_size": 1,
    "compression_training": {}, "sparse_attention": {}, "progressive_layer_drop.enabled": False,
    "torch_autocast.enabled": False, "amp.enabled": False, "fp32_allreduce": False,
}  # fmt: skip
"""Settings that change a step and are not read, and DeepSpeed's defaults (runtime/zero/config.py, runtime/constants.py), which are
taken for them; those that transformers fills in ("auto") too."""


def not_read(table: dict[str, Any], more: dict[str, Any] | None = None) -> list[str]:
    """What of a configuration may change the step and has no field in a scenario; `more`: settings beside the usual ones."""
    taken = _TAKEN | (more or {})
    found = {name: nested(table, name, usual) for name, usual in taken.items()}
    return [
        f"{name} = {value}: not in the scenario, taken as {taken[name]}"
        for name, value in found.items()
        if value not in (taken[name], "auto", None)
    ]


@reader("file", "a JSON configuration of DeepSpeed")
def load(
    text: str,
    *,
    file: str = "",
    model: str | None = None,
    sequence_length: int | None = None,
    **outside: Unpack[Outside],
) -> Imported:
    """The scenario of a configuration.

    Args:
        model: a shipped one, or the path of a config.json.
        sequence_length: tokens per sequence.

    Raises:
        InputError: no such configuration; model, length or batch missing; values that are still "auto".
    """
    table = parse_json(text, file or "the configuration", "a JSON configuration of DeepSpeed")
    if not isinstance(table, dict) or not set(_WANTED) & set(table):
        raise InputError([Violation("file", file or "-", "is no configuration of DeepSpeed", f"one of {', '.join(_WANTED)}")])
    wrong = [
        Violation(p, "auto", "is not resolved", "the value that the Trainer puts there", file)
        for p in _NEEDED
        if nested(table, p) == "auto"
    ]
    for name, value in (("model", model), ("sequence-length", sequence_length)):
        if value is None:
            wrong.append(
                Violation(f"--{name}", None, "the file does not say it", "the model's config.json, and tokens per sequence", file)
            )
    if not {"train_batch_size", "train_micro_batch_size_per_gpu"} & set(table):
        rule = "says neither train_batch_size nor train_micro_batch_size_per_gpu"
        wrong.append(Violation("file", file or "-", rule, "one of them, which DeepSpeed asks for too", file))
    if wrong:
        raise InputError(wrong)
    return settled(_reading(table, file, str(model), int(sequence_length or 1)), text, file, outside)


def layout(table: dict[str, Any], file: str = "") -> dict[str, Any]:
    """The plan of a configuration by itself, as a raw table."""
    zero = table.get("zero_optimization") or {}
    stage = whole(zero.get("stage", 0), "zero_optimization.stage", file)
    tp = whole(nested(table, "tensor_parallel.autotp_size", 1) or 1, "tensor_parallel.autotp_size", file)
    cp = whole(table.get("sequence_parallel_size") or 1, "sequence_parallel_size", file)
    plan: dict[str, Any] = {"tp": tp, "sequence_parallel": False, "cp": cp, "zero_stage": stage}
    if cp > 1:
        plan["cp_style"] = "ulysses"
    overlap = zero.get("overlap_comm")
    plan["overlap_grad_reduce"] = stage == 3 if overlap in (None, "auto") else bool(overlap)
    if (bucket := zero.get("reduce_bucket_size")) not in (None, "auto", 5e8):
        plan["reduce_bucket_size"] = whole(bucket, "zero_optimization.reduce_bucket_size", file)
    if (size := zero.get("mics_shard_size", -1)) > 0:
        plan["shard_size"] = size
    offload: dict[str, Any] = {ours: True for ours, theirs in (("optimizer", "offload_optimizer"), ("parameters", "offload_param"))
                               if nested(zero, f"{theirs}.device", "none") != "none"}  # fmt: skip
    if "activation_checkpointing" in table:
        plan["recompute"] = "full"
        if nested(table, "activation_checkpointing.cpu_checkpointing"):
            offload["activations"] = 1.0
    return plan | ({"offload": offload} if offload else {})


def _reading(table: dict[str, Any], file: str, model: str, length: int) -> Reading:
    zero, plan = table.get("zero_optimization") or {}, layout(table, file)
    tp, cp = plan["tp"], plan["cp"]
    reading = Reading({"name": "imported", "framework": "deepspeed", "cluster": {}, "model": model_named(model, "--model", file)})
    for name in ("zero_quantized_weights", "zero_quantized_gradients"):
        if zero.get(name):
            reading.wrong.append(Violation(f"zero_optimization.{name}", True, "is not simulated", "false", file))
    reading.warnings += not_read(table)
    bf16, fp16 = nested(table, "bf16.enabled", default=False), nested(table, "fp16.enabled", default=False)
    named = reading.table["model"]
    width = named.get("hidden_size") if isinstance(named, dict) else getattr(load_model(named), "hidden_size", None)
    if zero.get("reduce_bucket_size") == "auto" and width:
        plan["reduce_bucket_size"] = int(width) ** 2  # transformers integrations/deepspeed.py trainer_config_finalize
    name = str(nested(table, "optimizer.type", "AdamW")).lower()
    if name not in _OPTIMIZERS:
        reading.warnings.append(f"optimizer.type = {name!r}: taken as AdamW")
    micro, accumulation = (table.get(f) for f in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"))
    reading.table |= {"plan": plan, "training": {
        "sequence_length": length, "precision": "bf16" if bf16 else "fp16" if fp16 else "fp32",
        "optimizer": _OPTIMIZERS.get(name, "adamw"), "micro_batch_size": 1, "global_batch_size": 1,
    }}  # fmt: skip
    if nested(table, "bf16.bf16_master_weights_and_grads"):
        reading.table["training"]["pure_bf16"] = True
    if dtype := {"fp32": "fp32", "bf16": "bf16", "fp16": "fp16"}.get(str(nested(table, "data_types.grad_accum_dtype"))):
        reading.table["training"]["gradient_dtype"] = dtype

    def finish(raw: dict[str, Any], world: int) -> None:
        """Two of batch, micro-batch and accumulation give the third."""
        dp = max(world // (tp * cp), 1)
        raw["plan"]["dp"] = dp
        whole_batch = table.get("train_batch_size")
        per_rank = micro or (whole_batch // (dp * (accumulation or 1)) if whole_batch else 1)
        raw["training"] |= {"micro_batch_size": per_rank, "global_batch_size": whole_batch or per_rank * (accumulation or 1) * dp}

    reading.finish = finish
    return reading
