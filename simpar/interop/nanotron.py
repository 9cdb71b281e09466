"""nanotron: a scenario as the YAML file of run_train.py (config classes of 2024 to 2026), which is read back to see what it says.

nanotron cuts a pipeline by the cost of its blocks (semantics: specs/layer_split.py), numbers ranks tp, cp, dp,
pp from the fastest on, with experts tp, cp, pp, dp (parallel/context.py), and has no settings for what its runtime always does.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import ConfigDict, Field

from simpar.boundary import parse_yaml, reader
from simpar.errors import InputError, Violation
from simpar.interop.carried import Imported, Reading, carried, settled_on_gpus
from simpar.interop.launch import gpu_violations, rank_map, sbatch, torchrun, work_violations
from simpar.interop.meaning import meaning, recompute_of, schedule_name, semantics, stage_counts
from simpar.specs.base import Spec, validate
from simpar.specs.counts import resolved_dp
from simpar.specs.layer_split import split_by_cost
from simpar.specs.model import TransformerSpec
from simpar.specs.scenario import Scenario

Positive = Annotated[int, Field(gt=0)]
_ENGINES: Final = {"1f1b": "1f1b", "gpipe": "afab"}
_DTYPES: Final = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_SHAPE: Final = (
    "hidden_size", "intermediate_size", "max_position_embeddings", "num_attention_heads", "num_hidden_layers",
    "num_key_value_heads", "tie_word_embeddings", "vocab_size", "attention_bias",
)  # fmt: skip
_FACTS: Final = frozenset({
    "plan.overlap_grad_reduce", "plan.overlap_param_gather", "plan.overlap_p2p", "plan.synchronous_optimizer",
    "training.compile", "training.cross_entropy",
})  # fmt: skip
"""What nanotron's runtime always does, whatever a scenario assumes of it."""


_KIND: Final = re.compile(r"is_\w+_config")
_KINDS: Final = ("is_llama_config", "is_qwen2_config")
_USUAL: Final[dict[str, Any]] = {
    "_attn_implementation": "flash_attention_2", "_use_doc_masking": False, "flex_attention_mask": None, "no_rope_layer": None,
    "z_loss_enabled": False,
}  # fmt: skip
"""Settings of a model that may change a step, and what is taken for them."""
_PLAIN: Final = re.compile(r"[A-Za-z_]\w*")
_WORDS: Final = frozenset({"true", "false", "yes", "no", "on", "off", "null", "y", "n"})
"""Words that YAML does not take for a text."""
_ESCAPED: Final = {'"': '\\"', "\\": "\\\\"}


def cost_split(model: TransformerSpec, stages: int) -> tuple[int, ...]:
    """Layers of each stage as nanotron deals them out: matmul weights of a block, and of the head."""
    hidden = model.hidden_size
    block = 4 * model.num_attention_heads * model.head_dim * hidden + 3 * model.intermediate_size * hidden
    return split_by_cost(model.num_hidden_layers, float(block), float(model.vocab_size * hidden), stages)


def placement(*, experts: bool) -> str:
    """The order in which nanotron numbers ranks (parallel/context.py, without and with mixture of experts)."""
    return "tp-cp-ep-pp-dp" if experts else "tp-cp-ep-dp-pp"


def violations(scenario: Scenario) -> list[Violation]:
    """What of a scenario nanotron refuses to run, or does otherwise."""
    if not isinstance(scenario.model, TransformerSpec):
        return [Violation("model", scenario.model.kind, "nanotron trains transformers", "a model of kind transformer")]
    work = work_violations(scenario, "nanotron")
    return [*gpu_violations(scenario, "nanotron"), *work, *_rules(scenario, scenario.model)]


def _rules(scenario: Scenario, model: TransformerSpec) -> Iterator[Violation]:
    plan, training, means = scenario.plan, scenario.training, meaning(scenario)
    if plan.pp > 1 and schedule_name(scenario) not in _ENGINES:
        yield Violation("plan.schedule", plan.schedule, "nanotron has two pipeline engines", "1f1b or gpipe (afab)")
    if plan.cp > 1:
        yield Violation("plan.cp", plan.cp, "no context parallelism of nanotron is known here", "1")
    own = placement(experts=model.moe is not None)
    if means["plan.placement"] != tuple(n for n in own.split("-") if n in means["plan.placement"]):
        yield Violation("plan.placement", plan.placement, "nanotron numbers ranks in its own order", own)
    if plan.overlap_tp and plan.tp > 1 and not plan.sequence_parallel:
        rule = "nanotron overlaps the collectives of sequence parallelism (tensor_parallel/functional.py)"
        yield Violation("plan.overlap_tp", True, rule, "sequence_parallel = true, or false")
    if plan.zero_stage > 1:
        yield Violation("plan.zero_stage", plan.zero_stage, "nanotron shards optimizer states at most", "0 or 1")
    if model.head_dim * model.num_attention_heads != model.hidden_size:
        right = str(model.hidden_size // model.num_attention_heads)
        yield Violation("model.head_dim", model.head_dim, "nanotron's heads share the width out", right)
    if plan.pp > 1 and plan.virtual_stages == 1 and (cut := cost_split(model, plan.pp)) != stage_counts(scenario):
        rule = "nanotron cuts the pipeline by the cost of its blocks, the head's included"
        yield Violation("plan.layers_per_stage", stage_counts(scenario), rule, f"{list(cut)}")
    if training.precision not in _DTYPES:
        yield Violation("training.precision", training.precision, "nanotron does not train in this", f"one of {', '.join(_DTYPES)}")
    if training.optimizer not in ("adamw", "adam", "sgd"):
        yield Violation("training.optimizer", training.optimizer, "nanotron does not have it", "adamw or sgd")
    if training.attention_kernel not in ("auto", "fa2"):
        yield Violation(
            "training.attention_kernel", training.attention_kernel, "nanotron attends by FlashAttention 2", "auto or fa2"
        )
    if means["training.gradient_dtype"] not in ("fp32", training.precision):
        right = f"fp32 or {training.precision}"
        yield Violation("training.gradient_dtype", training.gradient_dtype, "nanotron accumulates in fp32 or not at all", right)
    if training.cross_entropy not in ("auto", semantics(scenario).head.loss):
        yield Violation("training.cross_entropy", training.cross_entropy, "no setting of nanotron", "auto")
    if means["training.compile"]:
        yield Violation("training.compile", True, "nanotron runs eagerly", "false")


def configuration(scenario: Scenario) -> dict[str, Any]:
    """The tables of the file."""
    training, plan, dp = scenario.training, scenario.plan, resolved_dp(scenario)
    model = scenario.model
    assert isinstance(model, TransformerSpec)
    return {
        "general": {"project": "simpar", "run": scenario.name, "seed": 42, "ignore_sanity_checks": True},
        "parallelism": {
            "dp": dp,
            "pp": plan.pp,
            "tp": plan.tp,
            "context_parallel_size": plan.cp,
            "expert_parallel_size": plan.ep,
            "pp_engine": _ENGINES.get(schedule_name(scenario), "1f1b"),
            "tp_mode": "REDUCE_SCATTER" if plan.sequence_parallel else "ALL_REDUCE",
            "tp_linear_async_communication": plan.overlap_tp and plan.tp > 1,
            "recompute_layer": recompute_of(scenario).granularity == "full",
        },
        "model": {
            "ddp_bucket_cap_mb": 25,
            "dtype": _DTYPES.get(training.precision, "bfloat16"),
            "init_method": {"std": 0.02},
            "make_vocab_size_divisible_by": 1,
            "model_config": _model(model),
        },
        "optimizer": {
            "accumulate_grad_in_fp32": meaning(scenario)["training.gradient_dtype"] == "fp32",
            "clip_grad": 1.0,
            "learning_rate_scheduler": {"learning_rate": 3e-4, "lr_warmup_steps": 2, "lr_warmup_style": "linear"},
            "optimizer_factory": _optimizer(training.optimizer),
            "weight_decay": 0.01,
            "zero_stage": plan.zero_stage,
        },
        "tokenizer": {"tokenizer_name_or_path": "gpt2"},
        "tokens": {
            "batch_accumulation_per_replica": training.global_batch_size // (training.micro_batch_size * dp),
            "micro_batch_size": training.micro_batch_size,
            "sequence_length": training.sequence_length,
            "train_steps": 50,
        },
        "data_stages": [{"name": "random", "start_training_step": 1, "data": {"dataset": None, "seed": 42}}],
        "checkpoints": {"checkpoints_path": "checkpoints", "checkpoint_interval": 1000},
        "logging": {"iteration_step_info_interval": 1, "log_level": "info"},
    }


def _optimizer(name: str) -> dict[str, Any]:
    if name == "sgd":
        return {"name": "sgd"}
    return {"name": "adamW", "adam_beta1": 0.9, "adam_beta2": 0.95, "adam_eps": 1e-8, "torch_adam_is_fused": True}


def _model(model: TransformerSpec) -> dict[str, Any]:
    """A Llama, or a Qwen2 where there are experts or a window."""
    table: dict[str, Any] = {name: getattr(model, name) for name in _SHAPE}
    table |= {"hidden_act": model.activation, "_attn_implementation": "flash_attention_2"}
    if model.moe is None and model.sliding_window is None:
        return {"is_llama_config": True, **table}
    table = {"is_qwen2_config": True, **table}
    if model.sliding_window is not None:
        table["sliding_window_size"] = model.sliding_window
    if model.moe is not None:
        # An expert has the width of the dense layer it stands for.
        table["intermediate_size"] = model.moe.moe_intermediate_size
        table["moe_config"] = {
            "num_experts": model.moe.num_experts,
            "top_k": model.moe.num_experts_per_tok,
            "moe_intermediate_size": model.moe.moe_intermediate_size,
        }
        if width := model.moe.shared_expert_intermediate_size:
            table["moe_config"] |= {"enable_shared_expert": True, "shared_expert_intermediate_size": width}
    return table


class _Table(Spec):
    """A table of the file; what is not read here is nanotron's own business."""

    model_config = ConfigDict(extra="ignore")


class _Parallelism(_Table):
    dp: Positive = 1
    pp: Positive = 1
    tp: Positive = 1
    context_parallel_size: Positive = 1
    expert_parallel_size: Positive = 1
    pp_engine: str | None = None
    tp_mode: str | None = None
    tp_linear_async_communication: bool | None = None
    recompute_layer: bool = False


class _Experts(_Table):
    """What is left out is as in nanotron's class, whatever the model's width."""

    num_experts: Positive = 8
    top_k: Positive = 2
    moe_intermediate_size: Positive = 1408
    enable_shared_expert: bool = False
    shared_expert_intermediate_size: Positive = 5632


class _ModelConfig(_Table):
    hidden_size: Positive
    intermediate_size: Positive
    num_hidden_layers: Positive
    num_attention_heads: Positive
    vocab_size: Positive
    num_key_value_heads: Positive | None = None
    max_position_embeddings: Positive | None = None
    tie_word_embeddings: bool | None = None
    attention_bias: bool | None = None
    hidden_act: str = "silu"
    sliding_window_size: Positive | None = None
    moe_config: _Experts | None = None


class _Model(_Table):
    model_config_: _ModelConfig = Field(alias="model_config")
    dtype: str = "bfloat16"
    make_vocab_size_divisible_by: Positive = 1


class _Factory(_Table):
    name: str = "adamW"


class _Optimizer(_Table):
    zero_stage: Annotated[int, Field(ge=0)] = 0
    accumulate_grad_in_fp32: bool = True
    optimizer_factory: _Factory = _Factory()


class _Tokens(_Table):
    micro_batch_size: Positive
    sequence_length: Positive
    batch_accumulation_per_replica: Positive = 1


class _File(_Table):
    """What is read of a configuration (nanotron src/nanotron/config/config.py)."""

    parallelism: _Parallelism
    model: _Model
    tokens: _Tokens
    optimizer: _Optimizer = _Optimizer()


def _warnings(table: dict[str, Any], file: str, accept: Collection[str]) -> list[str]:
    """What may change a step and is not read.

    Raises:
        InputError: what makes another model or step and is not read, where it is not in `accept`.
    """
    config = _inner(table, "model", "model_config")
    experts = _inner(config, "moe_config")
    layers = experts.get("layers", [-1])
    kinds = [name for name, on in config.items() if on is True and _KIND.fullmatch(name) and name not in _KINDS]
    another: list[tuple[str, Any]] = [(f"model.model_config.{name}", True) for name in kinds]
    if layers not in ([-1], list(range(config.get("num_hidden_layers") or 0))):
        another.append(("model.model_config.moe_config.layers", layers))
    if table.get("doremi"):
        another.append(("doremi", "..."))
    refused = [(name, value) for name, value in another if not {name, "all"} & set(accept)]
    if refused:
        rule = "makes another model or step, and is not read"
        raise InputError(
            [Violation(n, v, rule, f"a scenario by hand, or --accept {n} to go on without it", file) for n, v in refused]
        )
    found = [f"{name} = {value}: left out, as accepted; the model is another one without it" for name, value in another]
    for part, section, usual in (
        (_inner(table, "parallelism"), "parallelism", {"tp_recompute_allgather": True}),
        (_inner(table, "model"), "model", {"ddp_bucket_cap_mb": 25}),
        (config, "model.model_config", _USUAL),
        (experts, "model.model_config.moe_config", {"token_dispatcher_type": "alltoall"}),
    ):
        for name, value in usual.items():
            if part.get(name) not in (value, None):
                found.append(f"{section}.{name} = {part[name]} is not read; taken as {value}")
    return found


def _inner(table: dict[str, Any], *names: str) -> dict[str, Any]:
    for name in names:
        table = found if isinstance(found := table.get(name), dict) else {}
    return table


def read_config(text: str, file: str = "", accept: Collection[str] = ()) -> Reading:
    """What a configuration says by itself.

    Args:
        accept: names of what is not read and left out all the same; "all" for every one.

    Raises:
        InputError: no configuration of nanotron, or every key that is missing or of another kind, together.
    """
    table = parse_yaml(text, file or "the configuration")
    if not isinstance(table, dict) or not {"parallelism", "model", "tokens"} <= set(table):
        right = "parallelism, model and tokens"
        raise InputError([Violation("file", file or "-", "is no configuration of nanotron", right)])
    warnings = _warnings(table, file, accept)
    said = validate(_File, {k: v for k, v in table.items() if v is not None or k != "optimizer"}, file=file)
    parallel, tokens, optimizer = said.parallelism, said.tokens, said.optimizer
    gpus = parallel.dp * parallel.pp * parallel.tp * parallel.context_parallel_size
    name = Path(file).stem if file else "imported"
    reading = Reading({"name": name, "framework": "nanotron", "cluster": {"num_gpus": gpus}}, warnings)
    reading.table["model"] = model = _read_model(said.model.model_config_, file)
    if (unit := said.model.make_vocab_size_divisible_by) > 1:
        model["vocab_size"] = -(-model["vocab_size"] // (unit * parallel.tp)) * unit * parallel.tp
    names = {engine: name for name, engine in _ENGINES.items()}
    plan: dict[str, Any] = {
        "dp": parallel.dp,
        "pp": parallel.pp,
        "tp": parallel.tp,
        "cp": parallel.context_parallel_size,
        "schedule": names.get((parallel.pp_engine or "afab").lower(), "gpipe"),
        "sequence_parallel": (parallel.tp_mode or "").upper() == "REDUCE_SCATTER" or parallel.tp == 1,
        "overlap_tp": bool(parallel.tp_linear_async_communication) and parallel.tp > 1,
        "zero_stage": optimizer.zero_stage,
        "recompute": "full" if parallel.recompute_layer else "none",
    }
    plan["placement"] = placement(experts="moe" in model)
    if "moe" in model:
        plan |= {"ep": parallel.expert_parallel_size, "etp": 1 if parallel.expert_parallel_size > 1 else parallel.tp}
    if parallel.pp > 1:
        plan["layers_per_stage"] = list(cost_split(validate(TransformerSpec, model, file=file, prefix="model"), parallel.pp))
    reading.table["plan"] = plan
    dtype = {v: k for k, v in _DTYPES.items()}.get(said.model.dtype, "bf16")
    reading.table["training"] = {
        "sequence_length": tokens.sequence_length,
        "micro_batch_size": tokens.micro_batch_size,
        "global_batch_size": tokens.micro_batch_size * tokens.batch_accumulation_per_replica * parallel.dp,
        "precision": dtype,
        "optimizer": "sgd" if optimizer.optimizer_factory.name.lower() == "sgd" else "adamw",
        "gradient_dtype": "fp32" if optimizer.accumulate_grad_in_fp32 else dtype,
    }
    return reading


def _read_model(config: _ModelConfig, file: str) -> dict[str, Any]:
    heads = config.num_attention_heads
    if config.hidden_size < heads:
        rule = f"must be at least num_attention_heads ({heads})"
        raise InputError([Violation("model.model_config.hidden_size", config.hidden_size, rule, "a multiple of it", file)])
    found: dict[str, Any] = {name: value for name in _SHAPE if (value := getattr(config, name)) is not None}
    found.setdefault("num_key_value_heads", heads)
    found |= {"head_dim": config.hidden_size // heads, "activation": config.hidden_act}
    if config.sliding_window_size:
        found["sliding_window"] = config.sliding_window_size
    if (experts := config.moe_config) is not None:
        found["moe"] = {
            "num_experts": experts.num_experts,
            "num_experts_per_tok": experts.top_k,
            "moe_intermediate_size": experts.moe_intermediate_size,
        }
        if experts.enable_shared_expert:
            shared = {"shared_expert_intermediate_size": experts.shared_expert_intermediate_size, "shared_expert_gate": True}
            found["moe"] |= shared
    return found


@reader("file", "a configuration of nanotron, YAML")
def load(
    text: str, *, file: str = "", hardware: str | None = None, num_nodes: int | None = None, accept: Collection[str] = ()
) -> Imported:
    """The scenario of a configuration.

    Raises:
        InputError: no such configuration, or rules that the scenario breaks; all together.
    """
    return settled_on_gpus(read_config(text, file, accept), text, file, {"hardware": hardware, "num_nodes": num_nodes})


def yaml_text(value: Any, indent: int = 0) -> str:
    """Mappings, sequences of mappings, and plain scalars as block YAML."""
    pad, lines = " " * indent, []
    for name, inner in value.items():
        if isinstance(inner, dict):
            lines.append(f"{pad}{name}:\n{yaml_text(inner, indent + 2)}")
        elif isinstance(inner, list):
            lines.append(f"{pad}{name}:" if inner else f"{pad}{name}: []")
            lines += [
                f"{pad}- {yaml_text(item, indent + 2).lstrip() if isinstance(item, dict) else _scalar(item)}" for item in inner
            ]
        else:
            lines.append(f"{pad}{name}: {_scalar(inner)}")
    return "\n".join(lines)


def _scalar(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, float):
        # YAML 1.1 takes 1e-08 for a string: a mantissa with a point makes it a number.
        text = repr(value)
        return text if "." in text.split("e")[0] else text.replace("e", ".0e")
    if isinstance(value, str):
        return value if _PLAIN.fullmatch(value) and value.lower() not in _WORDS else _quoted(value)
    return str(value)


def _quoted(text: str) -> str:
    """In double quotes on one line, whatever the text holds."""
    return '"' + "".join(_ESCAPED.get(c, c if c.isprintable() else f"\\U{ord(c):08x}") for c in text) + '"'


def export(scenario: Scenario) -> dict[str, str]:
    """File name -> text: the YAML file, the script that starts it, the Slurm script and the rank map.

    Raises:
        InputError: everything that nanotron cannot run or its file cannot say.
    """
    found = violations(scenario)
    if not isinstance(scenario.model, TransformerSpec):
        raise InputError(found)
    text = yaml_text(configuration(scenario)) + "\n"
    comments = carried(scenario, read_config(text), "nanotron", found, _unsaid(scenario))
    line = torchrun(scenario, "run_train.py", '--config-file nanotron.yaml "$@"')
    return {
        "nanotron.yaml": "\n".join(comments) + "\n# Data, tokenizer, steps and learning rate are yours.\n" + text,
        "nanotron.sh": f"#!/bin/bash\nset -e\nexport CUDA_DEVICE_MAX_CONNECTIONS=1\n\n{line}\n",
        "nanotron.sbatch": sbatch(scenario, "bash nanotron.sh", "nanotron"),
        "rank_map.csv": rank_map(scenario),
    }


def _unsaid(scenario: Scenario) -> frozenset[str]:
    kernel = {"training.attention_kernel"} if scenario.training.attention_kernel in ("auto", "fa2") else set()
    return _FACTS | kernel


__all__ = ["configuration", "cost_split", "export", "load", "read_config", "violations", "yaml_text"]
