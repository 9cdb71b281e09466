"""torchtune's YAML of full and LoRA recipes (recipes/*_finetune_*.py at bd2a0fc7c) read into a scenario."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final, Unpack

from simpar.boundary import parse_yaml, reader
from simpar.errors import InputError, Violation
from simpar.interop.carried import Imported, Outside, Reading, settled
from simpar.interop.finetune import QV
from simpar.interop.resolved import model_named, nested, whole
from simpar.interop.torchtune import OPTIMIZERS
from simpar.specs.models_io import preset_called
from simpar.specs.optimizers import KINDS

_BY_NAME: Final = {str(v["_component_"]): name for name, v in OPTIMIZERS.items() if not KINDS[name].kernel}
_LOSSES: Final = {"LinearCrossEntropyLoss": "chunked", "CEWithChunkedOutputLoss": "chunked", "CrossEntropyLoss": "unfused"}
_ANOTHER: Final = (
    "ref_checkpointer",
    "teacher_model",
    "kd_loss",
    "quantizer",
    "policy",
    "reward_and_value_model",
    "expert_parallel_dim",
)
_NOTED: Final = ("enable_fp8_training", "model.apply_lora_to_output")
_ATTENTION: Final = {"q_proj", "k_proj", "v_proj", "output_proj"}


@reader("file", "a YAML configuration of torchtune")
def load(
    text: str,
    *,
    file: str = "",
    accept: Collection[str] = (),
    model: str | None = None,
    sequence_length: int | None = None,
    **outside: Unpack[Outside],
) -> Imported:
    """The scenario of a configuration.

    Args:
        model, sequence_length: instead of the file's.

    Raises:
        InputError: another recipe than supervised fine-tuning, a model that is not here, or no length of sequences.
    """
    table = parse_yaml(text, file or "the configuration")
    builder = str(nested(table, "model._component_", ""))
    if not builder:
        raise InputError([Violation("file", file or "-", "is no configuration of torchtune", "model._component_", file)])
    loss = str(nested(table, "loss._component_", "LinearCrossEntropyLoss")).rpartition(".")[2]
    others = [n for n in (*_ANOTHER, "loss") if n in table and (n != "loss" or loss not in _LOSSES)]
    wrong = [
        Violation(n, "...", "is another recipe, which is not read", f"a scenario by hand, or --accept {n}", file)
        for n in others
        if not {n, "all"} & set(accept)
    ]
    length = sequence_length or nested(table, "tokenizer.max_seq_len")
    if length is None:
        rule = "does not say how long sequences are"
        wrong.append(Violation("tokenizer.max_seq_len", None, rule, "--sequence-length, the longest of a batch", file))
    if wrong:
        raise InputError(wrong)
    name = Path(file).stem or "imported"
    reading = Reading({"name": name, "framework": "torchtune", "cluster": {}})
    reading.table["model"] = _model(builder, model, file)
    reading.warnings += [f"{n}: left out, as accepted" for n in others]
    reading.warnings += [f"{n} = {v}: not in the scenario; the step may differ" for n in _NOTED if (v := nested(table, n))]
    packs = "packed documents are taken as one of" if nested(table, "dataset.packed") else "sequences are taken to be padded to"
    reading.warnings.append(f"lengths of the data do not stand in the file: {packs} {length} tokens")
    reading.table["plan"] = _plan(table, file)
    reading.table["training"] = _training(table, reading, file) | {
        "sequence_length": length, "cross_entropy": _LOSSES.get(loss, "auto"), **_adapters(table, builder, reading, file),
    }  # fmt: skip
    accumulation = whole(table.get("gradient_accumulation_steps") or 1, "gradient_accumulation_steps", file)
    replicas = whole(table.get("data_parallel_replicate_dim") or 1, "data_parallel_replicate_dim", file)
    reading.finish = lambda raw, world: _finish(raw, world, accumulation, replicas)
    return settled(reading, text, file, outside)


def _model(builder: str, said: str | None, file: str) -> Any:
    """The model of a builder: llama3_1_8b is Llama 3.1 8B, qwen2_5_1_5b_base Qwen2.5 1.5B."""
    if said:
        return model_named(said, "--model", file)
    words = re.sub(r"^q?lora_|_(base|instruct)$", "", builder.rpartition(".")[2]).split("_")
    named = (".".join(words[:cut]) + "-" + ".".join(words[cut:]) for cut in range(1, len(words)))
    found = next((name for text in named if (name := preset_called(text))), None)
    if found is None:
        raise InputError([Violation("model._component_", builder, "is no model known here", "--model with its config.json", file)])
    return found


def _plan(t: dict[str, Any], file: str) -> dict[str, Any]:
    plan: dict[str, Any] = {
        "tp": whole(t.get("tensor_parallel_dim") or 1, "tensor_parallel_dim", file), "sequence_parallel": False,
        "cp": whole(t.get("context_parallel_dim") or 1, "context_parallel_dim", file), "cp_style": "all_gather",
        "recompute": "full" if t.get("enable_activation_checkpointing") else "none",
        "reshard_after_forward": bool(t.get("fsdp_reshard_after_forward", True)),
    }  # fmt: skip
    places = {"optimizer": t.get("fsdp_cpu_offload"), "parameters": t.get("fsdp_cpu_offload")}
    offload: dict[str, Any] = {name: True for name, on in places.items() if on}
    if t.get("enable_activation_offloading"):
        offload["activations"] = 1.0
    return plan | ({"offload": offload} if offload else {})


def _training(t: dict[str, Any], reading: Reading, file: str) -> dict[str, Any]:
    optimizer = str(nested(t, "optimizer._component_", "torch.optim.AdamW"))
    if optimizer not in _BY_NAME:
        reading.warnings.append(f"optimizer._component_ = {optimizer!r}: taken as AdamW")
    found = _BY_NAME.get(optimizer, "adamw")
    if found == "adamw" and "optimizer" in t and not nested(t, "optimizer.fused"):
        found = "adamw-foreach"  # torch's default on a GPU
    micro = whole(t.get("batch_size") or 1, "batch_size", file)
    return {
        "micro_batch_size": micro, "global_batch_size": micro, "precision": "fp32" if t.get("dtype") == "fp32" else "bf16",
        "optimizer": found, "compile": bool(t.get("compile")),
        "optimizer_in_backward": bool(t.get("optimizer_in_bwd")),
    }  # fmt: skip


def _adapters(t: dict[str, Any], builder: str, reading: Reading, file: str) -> dict[str, Any]:
    name = builder.rpartition(".")[2]
    if not name.startswith(("lora_", "qlora_")):
        return {}
    every, modules = bool(nested(t, "model.apply_lora_to_mlp")), set(nested(t, "model.lora_attn_modules", _ATTENTION))
    chosen = "all" if every else "qv" if modules == set(QV) else "attention"
    if every and not modules:
        chosen = "mlp"
    if modules != _ATTENTION and chosen not in ("qv", "mlp"):
        reading.warnings.append(f"adapters on {', '.join(sorted(modules))}: taken to be on the four matmuls of attention")
    quantised = name.startswith("qlora_") or nested(t, "model.quantize_base")
    return {
        "trainable": "lora", "lora_rank": whole(nested(t, "model.lora_rank", 8), "model.lora_rank", file),
        "lora_modules": chosen, "base_weights": "nf4-double" if quantised else "auto",
        "lora_dropout": nested(t, "model.lora_dropout", 0.0), "dora": bool(nested(t, "model.use_dora", False)),
    }  # fmt: skip


def _finish(raw: dict[str, Any], world: int, accumulation: int, replicas: int) -> None:
    """What the number of GPUs decides: several run the distributed recipe, which shards, one the other, which does not."""
    plan, training = raw["plan"], raw["training"]
    dp = max(world // (plan["tp"] * plan["cp"]), 1)
    plan |= {"dp": dp, "zero_stage": 3 if world > 1 else 0}
    if plan["cp"] == 1:
        plan.pop("cp_style", None)
    if replicas > 1:
        plan["shard_size"] = max(dp // replicas, 1) * plan["cp"]
    if world == 1 and "offload" in plan:
        plan["offload"] = {"activations": plan["offload"].get("activations", 0.0)}
    training["global_batch_size"] = training["micro_batch_size"] * accumulation * dp
