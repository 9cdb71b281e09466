"""YAML of fine-tuning frameworks read into a scenario: axolotl, LLaMA-Factory and TRL, with accelerate's configuration beside them.
Each has its names and defaults; what they mean is one thing."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Unpack

from simpar.boundary import MOST_CONFIG_BYTES, parse_json, parse_yaml, read_text, reader
from simpar.errors import InputError, Violation
from simpar.interop.axolotl import OPTIMIZERS
from simpar.interop.carried import Imported, Outside, Reading, settled, settled_on_gpus
from simpar.interop.deepspeed_import import layout
from simpar.interop.finetune import ATTENTION, LIGER, LIGER_KEYS, MLP, QV
from simpar.interop.resolved import model_named, nested, whole
from simpar.specs.optimizers import KINDS

_KERNELS: Final = {
    "flash_attention_2": "fa2", "fa2": "fa2", "flash_attention_3": "fa3", "fa3": "fa3", "eager": "unfused", "disabled": "unfused",
    "flex_attention": "flex", "sdpa": "auto", "auto": "auto", "None": "auto",
}  # fmt: skip
_LIGER: Final = (*LIGER.values(), "cross_entropy", "fused_linear_cross_entropy")
_BY_NAME: Final = {
    **{name: ours for ours, name in OPTIMIZERS.items() if ours != "adam"},
    "adamw_hf": "adamw", "adamw_apex_fused": "adamw", "adamw_8bit": "adamw-8bit",
    "paged_adamw_32bit": "adamw", "adamw_torch_8bit": "adamw-fp8",
}  # fmt: skip
"""transformers.training_args.OptimizerNames and axolotl's."""


@dataclass(frozen=True, slots=True)
class _Dialect:
    """A framework's file.

    Attributes:
        framework: of the scenario.
        names: what is read -> its key.
        defaults: where the file says nothing, by what is read.
        another: keys that make another model or step: refused unless accepted.
        noted: keys that may change a step, and are not read.
        adapter: the key that asks for low-rank adapters, and its default.
        only: keys of which other values are another training.
    """

    framework: str
    names: Mapping[str, str]
    defaults: Mapping[str, Any]
    another: tuple[str, ...]
    noted: tuple[str, ...]
    adapter: tuple[str, Any]
    only: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


_TRAINER: Final = {
    "model": "model_name_or_path", "micro": "per_device_train_batch_size", "accumulation": "gradient_accumulation_steps",
    "optimizer": "optim", "checkpointing": "gradient_checkpointing", "compile": "torch_compile", "bf16": "bf16", "fp16": "fp16",
    "deepspeed": "deepspeed", "fsdp": "fsdp", "fsdp_config": "fsdp_config",
}  # fmt: skip
_SHARED: Final = ("auto_find_batch_size", "torch_empty_cache_steps", "modules_to_save", "lora_modules_to_save", "additional_target")
_OPEN_INSTRUCT: Final = frozenset(
    {"use_lora", "use_qlora", "use_slow_tokenizer", "dataset_mixer", "dataset_mixer_list", "with_tracking"}
)
"""Keys of open-instruct, whose files look like TRL's: a loop and defaults of its own."""
DIALECTS: Final[dict[str, _Dialect]] = {
    # src/axolotl/utils/schemas at 067b021c8; loaders/model.py quantises twice.
    "axolotl": _Dialect(
        "axolotl",
        {
            "model": "base_model", "length": "sequence_len", "micro": "micro_batch_size", "optimizer": "optimizer",
            "accumulation": "gradient_accumulation_steps", "checkpointing": "gradient_checkpointing", "compile": "torch_compile",
            "bf16": "bf16", "fp16": "fp16", "packing": "sample_packing", "attention": "attn_implementation", "rank": "lora_r",
            "targets": "lora_target_modules", "deepspeed": "deepspeed", "fsdp": "fsdp", "fsdp_config": "fsdp_config",
            "tp": "tensor_parallel_size", "cp": "context_parallel_size", "shards": "dp_shard_size", "replicas": "dp_replicate_size",
            "4bit": "load_in_4bit", "8bit": "load_in_8bit", "dropout": "lora_dropout", "dora": "peft_use_dora",
        },
        {"length": 512, "micro": 1, "bf16": "auto", "nested": True},
        ("rl", "reward_model", "process_reward_model", "unfrozen_parameters", "relora", "relora_steps", "lisa_n_layers", "qat",
         "expert_parallel_size", "pipeline_parallel_size", "gptq", "max_packed_sequence_len"),
        (*_SHARED, "fp8", "lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "flash_attn_fuse_mlp",
         "activation_offloading", "unsloth_lora_mlp", "layer_offloading"),
        ("adapter", None),
    ),
    # src/llamafactory/hparams at ff6d4d12e; model/adapter.py turns trained weights into fp32 unless pure_bf16.
    "llama-factory": _Dialect(
        "llama-factory",
        {
            **_TRAINER, "length": "cutoff_len", "packing": "packing", "attention": "flash_attn", "rank": "lora_rank",
            "targets": "lora_target", "liger": "enable_liger_kernel", "pure": "pure_bf16", "dropout": "lora_dropout",
            "dora": "use_dora",
        },
        {"length": 2048, "micro": 8, "rank": 8, "targets": "all", "nested": True, "checkpointing": True,
         "attention": "auto", "pure": False},
        ("use_galore", "use_apollo", "use_badam", "use_muon", "use_adam_mini", "use_unsloth", "mixture_of_depths", "use_llama_pro",
         "use_kt", "use_mca", *(f"{kind}_model_parallel_size" for kind in ("tensor", "pipeline", "expert"))),
        (*_SHARED, "use_unsloth_gc", "fp8", "shift_attn", "upcast_layernorm"),
        ("finetuning_type", "lora"),
        {"stage": ("sft", "pt"), "finetuning_type": ("lora", "full")},
    ),
    # trl/trainer/{base,sft,model}_config.py at f2cd57710.
    "trl": _Dialect(
        "trl",
        {
            **_TRAINER, "length": "max_length", "packing": "packing", "attention": "attn_implementation", "rank": "lora_r",
            "targets": "lora_target_modules", "liger": "use_liger_kernel", "nested": "use_bnb_nested_quant",
            "offload": "activation_offloading", "4bit": "load_in_4bit", "8bit": "load_in_8bit", "dtype": "dtype",
            "dropout": "lora_dropout", "dora": "use_dora",
        },
        {"length": 1024, "micro": 8, "checkpointing": True, "bf16": "auto", "dtype": "float32", "dropout": 0.05},
        ("beta", "max_prompt_length", "num_generations", "reward_model_path", "teacher_model_name_or_path"),
        (*_SHARED, "padding_free"),
        ("use_peft", False),
    ),
}  # fmt: skip
"""Framework -> its file."""
_OLDER: Final = {"max_length": "max_seq_length", "dtype": "torch_dtype"}
"""TRL's names until 2025."""


def dialect_of(table: Mapping[str, Any]) -> str | None:
    """The framework whose file it is."""
    if "base_model" in table:
        return "axolotl"
    if "model_name_or_path" in table and not _OPEN_INSTRUCT & set(table):
        return "llama-factory" if {"finetuning_type", "template", "stage"} & set(table) else "trl"
    return None


@reader("file", "a YAML configuration of axolotl, LLaMA-Factory or TRL")
def load(
    text: str,
    *,
    file: str = "",
    accept: Collection[str] = (),
    model: str | None = None,
    sequence_length: int | None = None,
    accelerate: str | Path | dict[str, Any] | None = None,
    **outside: Unpack[Outside],
) -> Imported:
    """The scenario of a run that fine-tunes.

    Args:
        model, sequence_length: instead of the file's.
        accelerate: accelerate's configuration, its path or what is in it.

    Raises:
        InputError: a model that is not here, another kind of training, values or files that are missing.
    """
    table = parse_yaml(text, file or "the configuration")
    dialect = dialect_of(table) if isinstance(table, dict) else None
    if dialect is None:
        right = "base_model (axolotl) or model_name_or_path (TRL, LLaMA-Factory)"
        raise InputError([Violation("file", file or "-", "names no model to train", right, file)])
    run = _Run(DIALECTS[dialect], {k: v for k, v in table.items() if v is not None}, file)
    run.refuse(accept)
    reading = run.reading(model, sequence_length)
    if accelerate is None:
        if not run.shards and dialect != "axolotl":
            reading.warnings.append(
                "how GPUs share the model does not stand in the file: each is taken to hold a copy (--accelerate)"
            )
        return settled(reading, text, file, outside)
    place = file if isinstance(accelerate, dict) else str(accelerate)
    table = accelerate if isinstance(accelerate, dict) else parse_yaml(read_text(Path(place), MOST_CONFIG_BYTES), Path(place))
    _read_accelerate(reading, table, place)
    return settled_on_gpus(reading, text, file, outside)


class _Run:
    """One file, by what its keys mean."""

    def __init__(self, dialect: _Dialect, table: dict[str, Any], file: str) -> None:
        self.dialect, self.table, self.file = dialect, table, file
        self.warnings: list[str] = []

    def get(self, what: str) -> Any:
        name = self.dialect.names.get(what, "")
        value = self.table.get(name, self.table.get(_OLDER.get(name, "")))
        return self.dialect.defaults.get(what) if value is None else value

    def number(self, what: str, default: int = 1) -> int:
        return whole(self.get(what) or default, self.dialect.names[what], self.file)

    def refuse(self, accept: Collection[str]) -> None:
        """Raises:
        InputError: it trains something else than next tokens, or another model.
        """
        on = {n: v for n in self.dialect.another if (v := self.table.get(n)) and not (v == 1 and n.endswith("_size"))}
        on |= {n: v for n, known in self.dialect.only.items() if (v := self.table.get(n, known[0])) not in known}
        wrong = {n: v for n, v in on.items() if not {n, "all"} & set(accept)}
        if wrong:
            rule = "makes another model or step, and is not read"
            raise InputError([Violation(n, v, rule, f"a scenario by hand, or --accept {n}", self.file) for n, v in wrong.items()])
        self.warnings += [f"{name} = {value}: left out, as accepted" for name, value in on.items()]
        noted = [f"{n} = {v!r}" for n in self.dialect.noted if (v := self.table.get(n)) not in (None, False, [], "")]
        self.warnings += [f"{text}: not in the scenario; the step may differ" for text in noted]

    def reading(self, model: str | None, sequence_length: int | None) -> Reading:
        """What it says by itself."""
        model = str(model or self.get("model"))
        reading = Reading(
            {"name": Path(self.file).stem or "imported", "framework": self.dialect.framework, "cluster": {}}, self.warnings
        )
        reading.table["model"] = model_named(model, self.dialect.names["model"], self.file)
        micro, accumulation = self.number("micro"), self.number("accumulation")
        plan: dict[str, Any] = {"zero_stage": 0, "sequence_parallel": False, "tp": self.number("tp") if self.get("tp") else 1}
        if (cp := self.number("cp") if self.get("cp") else 1) > 1:
            plan |= {"cp": cp, "cp_style": "ring"}
        checkpointing = None if self.table.get("disable_gradient_checkpointing") else self.get("checkpointing")
        plan["recompute"] = "full" if checkpointing else "none"
        if self.get("offload") or checkpointing == "offload":
            plan["offload"] = {"activations": 1.0}
        reading.table["plan"] = plan
        length = sequence_length or self.number("length")
        reading.table["training"] = training = {
            "sequence_length": length, "micro_batch_size": micro, "global_batch_size": micro, "precision": self._precision(),
            "optimizer": self._optimizer(), "compile": bool(self.get("compile")),
            "attention_kernel": self._attention(), **self._losses(),
        }  # fmt: skip
        self._adapters(training)
        packs = bool(self.get("packing")) or bool(self.table.get("neat_packing")) or self.table.get("stage") == "pt"
        kind = "packed documents are taken as one of" if packs else "sequences are taken to be padded to"
        self.warnings.append(f"lengths of the data do not stand in the file: {kind} {length} tokens")
        self._sharding(plan)
        if plan["zero_stage"] == 0 and training.get("trainable") != "lora":
            training |= self._resting()
        reading.finish = lambda raw, world: _finish(raw, world, accumulation)
        return reading

    def _precision(self) -> str:
        if self.get("fp16"):
            return "fp16"
        # Without mixed precision products are as wide as the weights are loaded.
        narrow = self.get("bf16") or self.get("pure") or str(self.get("dtype")) == "bfloat16"
        return "bf16" if narrow else "tf32" if self.table.get("tf32") else "fp32"

    def _resting(self) -> dict[str, Any]:
        """Whether trained weights rest in bf16: said, or by the dtype they are loaded in (without sharding)."""
        if self.get("bf16") == "full" or self.get("pure"):
            return {"pure_bf16": True}
        if "pure" in self.dialect.names:
            return {"pure_bf16": False}
        return {} if self.get("dtype") in (None, "auto") else {"pure_bf16": str(self.get("dtype")) == "bfloat16"}

    def _optimizer(self) -> str:
        name = self.get("optimizer")
        if name is not None and name not in _BY_NAME:
            self.warnings.append(f"{self.dialect.names['optimizer']} = {name!r}: taken as AdamW")
        found = _BY_NAME.get(str(name), "adamw")
        # DeepSpeed has kernels of its own.
        return "adamw" if KINDS[found].kernel and self.get("deepspeed") else found

    def _attention(self) -> str:
        legacy = {"flash_attention": "flash_attention_2", "sdp_attention": "sdpa", "eager_attention": "eager",
                  "flex_attention": "flex_attention"}  # fmt: skip
        name = str(self.get("attention") or next((v for k, v in legacy.items() if self.table.get(k) is True), None))
        if name not in _KERNELS:
            self.warnings.append(f"{self.dialect.names['attention']} = {name!r}: taken as the framework's default")
        return _KERNELS.get(name, "auto")

    def _losses(self) -> dict[str, Any]:
        if self.get("liger"):  # transformers integrations/liger.py: fused_linear_cross_entropy unless told otherwise
            on = {key: nested(self.table, f"liger_kernel_config.{key}", key != "cross_entropy") for key in _LIGER}
            loss = "linear" if on["fused_linear_cross_entropy"] else "fused" if on["cross_entropy"] else "auto"
            return {"fused_kernels": [ours for ours, key in LIGER.items() if on[key]], "cross_entropy": loss}
        found: dict[str, Any] = {"fused_kernels": [k for k, key in LIGER_KEYS.items() if self.table.get(f"liger_{key}")]}
        plugins = [str(p) for p in self.table.get("plugins") or ()]
        for name, ours in (("liger_fused_linear_cross_entropy", "linear"), ("liger_cross_entropy", "fused"),
                           ("chunked_cross_entropy", "chunked"), ("flash_attn_cross_entropy", "fused")):  # fmt: skip
            if self.table.get(name):
                found.setdefault("cross_entropy", ours)
        if any("CutCrossEntropy" in p for p in plugins) and self.table.get("cut_cross_entropy", True):
            found["cross_entropy"] = "tiled"
        return found

    def _adapters(self, training: dict[str, Any]) -> None:
        """Low-rank adapters, and the format of what they stand on."""
        kind = self.table.get(*self.dialect.adapter)
        if kind not in ("lora", "qlora", True):
            return
        targets = self.get("targets")
        names = {t.strip() for t in targets.split(",")} if isinstance(targets, str) else set(map(str, targets or ()))
        every = bool(self.table.get("lora_target_linear")) or bool(names & {"all", "all-linear", *MLP})
        # peft's default of Llama and its like (utils/constants.py TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING).
        modules = "all" if every else "qv" if names <= set(QV) else "attention"
        if names and names <= set(MLP):
            modules = "mlp"
        if modules == "attention" and names != set(ATTENTION):
            self.warnings.append(f"adapters on {', '.join(sorted(names))}: taken to be on the four matmuls of attention")
        training |= {"trainable": "lora", "lora_rank": self.number("rank", 16), "lora_modules": modules}
        training |= {"lora_dropout": self.get("dropout") or 0.0, "dora": bool(self.get("dora"))}
        bits = self.table.get("quantization_bit") or (4 if self.get("4bit") or kind == "qlora" else 8 if self.get("8bit") else 0)
        twice = self.table.get("double_quantization", self.get("nested"))
        training["base_weights"] = {4: "nf4-double" if twice else "nf4", 8: "int8"}.get(bits, "auto")

    def _sharding(self, plan: dict[str, Any]) -> None:
        """DeepSpeed's or FSDP's; else copies (DDP)."""
        if said := self.get("deepspeed"):
            plan |= _engine(said, self.dialect.names["deepspeed"], self.file, plan.get("offload", {}))
        elif self.get("fsdp") or self.get("fsdp_config") or self.get("shards"):
            words = self.get("fsdp") or []
            _read_fsdp(plan, self.get("fsdp_config") or {}, words.split() if isinstance(words, str) else words)
        for what in ("shards", "replicas"):
            if self.get(what):
                plan[f"_{what}"] = self.number(what)

    @property
    def shards(self) -> bool:
        """Whether the file says how ranks share the model."""
        return bool(self.get("deepspeed") or self.get("fsdp") or self.get("fsdp_config"))


def _engine(said: Any, name: str, file: str, offload: dict[str, Any]) -> dict[str, Any]:
    """The layout of a DeepSpeed configuration, a table or a file beside this one or above it.

    Raises:
        InputError: no such file.
    """
    if isinstance(said, str):
        found = next((p for base in (Path(), *Path(file).parents) if (p := base / said).is_file()), None)
        if found is None:
            raise InputError([Violation(name, said, "is no file here", "the file, where the run finds it", file)])
        said = parse_json(read_text(found, MOST_CONFIG_BYTES), found, "a JSON configuration of DeepSpeed")
    plan = layout(said, file)
    return {**plan, "offload": {**offload, **plan.get("offload", {})}}


def _read_fsdp(plan: dict[str, Any], config: Mapping[str, Any], words: Collection[str] = ()) -> None:
    """FSDP's configuration, keys with or without their prefix (accelerate utils/dataclasses.py, FullyShardedDataParallelPlugin)."""
    said = {str(k).removeprefix("fsdp_"): v for k, v in config.items()}
    strategy = str(said.get("sharding_strategy") or next(iter(words), "full_shard")).lower()
    keeps = strategy in ("shard_grad_op", "2", "hybrid_shard_zero2") or said.get("reshard_after_forward") in (
        False,
        "SHARD_GRAD_OP",
    )
    plan |= {"zero_stage": 0 if strategy == "no_shard" else 3, "reshard_after_forward": not keeps}
    if strategy.startswith("hybrid"):
        plan["_per_node"] = True
    if said.get("offload_params") or said.get("cpu_offload") or "offload" in words:
        plan["offload"] = {**plan.get("offload", {}), "optimizer": True, "parameters": True}
    if said.get("activation_checkpointing"):
        plan["recompute"] = "full"


def _read_accelerate(reading: Reading, said: Any, file: str) -> None:
    """accelerate's configuration: how many processes, and how they share the model.

    Raises:
        InputError: another kind of file.
    """
    if not isinstance(said, dict) or "distributed_type" not in said:
        raise InputError(
            [Violation("--accelerate", file, "is no configuration of accelerate", "a YAML with distributed_type", file)]
        )
    plan, kind = reading.table["plan"], str(said["distributed_type"])
    gpus = whole(said.get("num_processes", 1), "num_processes", file)
    reading.table["cluster"] |= {"num_gpus": gpus, "num_nodes": whole(said.get("num_machines", 1), "num_machines", file)}
    if kind == "FSDP":
        _read_fsdp(plan, said.get("fsdp_config") or {})
    elif kind == "DEEPSPEED":
        config = said.get("deepspeed_config") or {}
        if path := config.get("deepspeed_config_file"):
            plan |= _engine(path, "deepspeed_config_file", file, plan.get("offload", {}))
        else:
            places = {"offload_optimizer": "optimizer", "offload_param": "parameters"}
            offload = {ours: True for theirs, ours in places.items() if config.get(f"{theirs}_device", "none") != "none"}
            plan |= {"zero_stage": whole(config.get("zero_stage", 2), "zero_stage", file)}
            plan["offload"] = {**plan.get("offload", {}), **offload}
    for name, ours in (("tp", "tp"), ("cp", "cp"), ("dp_shard", "_shards"), ("dp_replicate", "_replicas")):
        if (size := nested(said, f"parallelism_config.parallelism_config_{name}_size", 1)) > 1:
            plan[ours] = size
    if plan.get("cp", 1) > 1:
        plan["cp_style"] = "all_gather"
    # Outside FSDP and DeepSpeed, ranks hold copies; the dtype of weights at rest then counts, which was read without them.
    if plan["zero_stage"]:
        reading.table["training"].pop("pure_bf16", None)


def _finish(raw: dict[str, Any], world: int, accumulation: int) -> None:
    """What needs the number of GPUs: data ranks, their batch, and a copy's shards."""
    plan, training = raw["plan"], raw["training"]
    dp = max(world // (plan["tp"] * plan.get("cp", 1)), 1)
    replicas, shards = plan.pop("_replicas", 1), plan.pop("_shards", 0)
    if plan.pop("_per_node", False):
        replicas = raw["cluster"].get("num_nodes") or 1
    if shards:
        dp = shards * replicas  # on other GPUs than those the scenario's rules say so
    if replicas > 1:
        plan["shard_size"] = max(dp // replicas, 1) * plan.get("cp", 1)
    if not any(plan.get("offload", {}).values()):
        plan.pop("offload", None)
    if world == 1 and not nested(plan, "offload.parameters"):
        plan["zero_stage"] = 0
    plan["dp"] = dp
    training["global_batch_size"] = training["micro_batch_size"] * accumulation * dp
