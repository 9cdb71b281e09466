"""nanotron: a scenario as the YAML file of run_train.py (config classes of 2024 to 2026), which is read back to see what it says.

nanotron cuts a pipeline by the cost of its blocks (semantics: specs/counts.py), numbers ranks tp, cp, dp,
pp from the fastest on, with experts tp, cp, pp, dp (parallel/context.py), and has no settings for what its runtime always does.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, Final

from simpar.errors import InputError, Violation
from simpar.interop.carried import carried
from simpar.interop.launch import beside, gpu_violations, torchrun, work_violations
from simpar.interop.meaning import meaning, recompute_of, schedule_name, semantics, stage_counts
from simpar.interop.nanotron_import import DTYPES, ENGINES, SHAPE, cost_split, placement, read_config
from simpar.specs.counts import microbatches, resolved_dp
from simpar.specs.model import TransformerSpec
from simpar.specs.scenario import Scenario

_FACTS: Final = frozenset({
    "plan.overlap_grad_reduce", "plan.overlap_param_gather", "plan.overlap_p2p", "plan.synchronous_optimizer",
    "training.compile", "training.cross_entropy",
})  # fmt: skip
"""What nanotron's runtime always does, whatever a scenario assumes of it."""


def violations(scenario: Scenario) -> list[Violation]:
    """What of a scenario nanotron refuses to run, or does otherwise."""
    if not isinstance(scenario.model, TransformerSpec):
        return [Violation("model", scenario.model.kind, "nanotron trains transformers", "a model of kind transformer")]
    work = work_violations(scenario, "nanotron")
    return [*gpu_violations(scenario, "nanotron"), *work, *_rules(scenario, scenario.model)]


def _rules(scenario: Scenario, model: TransformerSpec) -> Iterator[Violation]:
    plan, training, means = scenario.plan, scenario.training, meaning(scenario)
    if plan.pp > 1 and schedule_name(scenario) not in ENGINES:
        yield Violation("plan.schedule", plan.schedule, "nanotron has two pipeline engines", "1f1b or gpipe (afab)")
    if plan.cp > 1:
        yield Violation("plan.cp", plan.cp, "no context parallelism of nanotron is known here", "1")
    own = placement(experts=model.moe is not None)
    if means["plan.placement"] != tuple(n for n in own.split("-") if n in means["plan.placement"]):
        yield Violation("plan.placement", plan.placement, "nanotron numbers ranks in its own order", own)
    if plan.overlap_tp and plan.tp > 1 and not plan.sequence_parallel:
        rule = "nanotron overlaps the collectives of sequence parallelism (tensor_parallel/functional.py)"
        yield Violation("plan.overlap_tp", True, rule, "sequence_parallel = true, or false")
    spec = recompute_of(scenario)
    if spec.num_layers is not None or spec.uniform_layers * spec.every > 1:
        yield Violation("plan.recompute", plan.recompute, "nanotron checkpoints every layer or none", "full or none")
    if plan.zero_stage > 1:
        yield Violation("plan.zero_stage", plan.zero_stage, "nanotron shards optimizer states at most", "0 or 1")
    if model.head_dim * model.num_attention_heads != model.hidden_size:
        right = str(model.hidden_size // model.num_attention_heads)
        yield Violation("model.head_dim", model.head_dim, "nanotron's heads share the width out", right)
    if plan.pp > 1 and plan.virtual_stages == 1 and (cut := cost_split(model, plan.pp)) != stage_counts(scenario):
        rule = "nanotron cuts the pipeline by the cost of its blocks, the head's included"
        yield Violation("plan.layers_per_stage", stage_counts(scenario), rule, f"{list(cut)}")
    if training.precision not in DTYPES:
        yield Violation("training.precision", training.precision, "nanotron does not train in this", f"one of {', '.join(DTYPES)}")
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
            "pp_engine": ENGINES.get(schedule_name(scenario), "1f1b"),
            "tp_mode": "REDUCE_SCATTER" if plan.sequence_parallel else "ALL_REDUCE",
            "tp_linear_async_communication": plan.overlap_tp and plan.tp > 1,
            "recompute_layer": recompute_of(scenario).granularity == "full",
        },
        "model": {
            "ddp_bucket_cap_mb": 25,
            "dtype": DTYPES.get(training.precision, "bfloat16"),
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
            "batch_accumulation_per_replica": microbatches(scenario),
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
    table: dict[str, Any] = {name: getattr(model, name) for name in SHAPE}
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


def yaml_text(table: dict[str, Any]) -> str:
    """A configuration as block YAML in its own order, each text on one line, whatever it holds."""
    import yaml

    class OneLine(yaml.SafeDumper):  # type: ignore[misc]  # PyYAML is untyped
        """Escapes line breaks: a part of a name must not read as a comment line of the file."""

    def scalar(dumper: Any, text: str) -> Any:
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"')

    OneLine.add_representer(str, scalar)
    text: str = yaml.dump(table, Dumper=OneLine, sort_keys=False, allow_unicode=True, width=sys.maxsize)
    return text.rstrip("\n")


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
        **beside(scenario, "nanotron"),
    }


def _unsaid(scenario: Scenario) -> frozenset[str]:
    kernel = {"training.attention_kernel"} if scenario.training.attention_kernel in ("auto", "fa2") else set()
    return _FACTS | kernel
