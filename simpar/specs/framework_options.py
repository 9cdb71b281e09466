"""Options of a training or a plan that not every framework has: which, and how a scenario asks for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from simpar.errors import Violation
from simpar.specs.architecture import has_experts
from simpar.specs.counts import divisors, layer_count, model_stages, resolved_dp
from simpar.specs.framework import FrameworkSpec
from simpar.specs.framework_releases import Ability, Lack
from simpar.specs.scenario_spec import Scenario
from simpar.specs.training import BELOW_16_BITS

NARROW: Final = ("adamw-8bit", "adamw-8bit-paged", "adamw-4bit", "adamw-fp8", "lion", "shampoo", "adamw-fused", "adamw-foreach")
"""Optimizers of torch.optim, torchao, bitsandbytes and their like."""

_ASKS: Final[tuple[tuple[Ability, str, Callable[[Scenario], object]], ...]] = (
    ("pure_bf16", "training.pure_bf16", lambda s: s.training.pure_bf16 or None),
    ("optimizer_in_backward", "training.optimizer_in_backward", lambda s: s.training.optimizer_in_backward or None),
    ("narrow_optimizers", "training.optimizer", lambda s: s.training.optimizer if s.training.optimizer in NARROW else None),
    ("quantised_base", "training.base_weights", lambda s: None if s.training.base_weights == "auto" else s.training.base_weights),
    ("fused_kernels", "training.fused_kernels", lambda s: s.training.fused_kernels or None),
    ("host_parameters", "plan.offload.parameters", lambda s: s.plan.offload.parameters or None),
)  # fmt: skip
"""(Ability, field, its value where the scenario asks for it, else none)."""

_LACKS: Final[dict[Lack, tuple[str, Callable[[Scenario], object], str, str]]] = {
    "tensor_parallelism": ("plan.tp", lambda s: s.plan.tp if s.plan.tp > 1 else None, "splits no layer", "1, or another one"),
    "context_parallelism": ("plan.cp", lambda s: s.plan.cp if s.plan.cp > 1 else None, "splits no sequence", "1, or plan.tp"),
    "expert_parallelism": ("plan.ep", lambda s: s.plan.ep if s.plan.ep > 1 else None, "splits no experts", "1, or another one"),
    "pipelines": ("plan.pp", lambda s: s.plan.pp if s.plan.pp > 1 else None, "has no pipeline", "1, or another one"),
    "dropless_experts": (
        "training.routing.capacity_factor",
        lambda s: "none" if has_experts(s.model) and s.training.routing.capacity_factor is None else None,
        "trains experts with a capacity alone", "a number, such as 2.0",
    ),
    "partial_sharding": (
        "plan.zero_stage", lambda s: s.plan.zero_stage if s.plan.zero_stage in (1, 2) else None,
        "shards the states with the weights or not at all", "0 or 3",
    ),
}  # fmt: skip
"""What a framework can lack -> (field, its value where the scenario asks for it, else none; what it does instead; right values)."""


def dropout_of(scenario: Scenario, spec: FrameworkSpec) -> float:
    """The dropout in force: the run's, or what the model's file states where `spec` runs the model's own code."""
    stated, asked = getattr(scenario.model, "dropout", 0.0), scenario.training.dropout
    return asked if asked is not None else stated if spec.conventions.model_dropout else 0.0


def missing_options(scenario: Scenario, spec: FrameworkSpec, having: Callable[[Ability], list[str]]) -> Iterator[Violation]:
    """A violation for all that is asked for and `spec` has not; `having`: the frameworks that have an option."""
    for ability, field, value in ((a, f, ask(scenario)) for a, f, ask in _ASKS):
        if value is not None and ability not in spec.conventions.abilities:
            yield Violation(field, value, f"{spec.name} does not have it", f"a framework that does: {', '.join(having(ability))}")

    for name in spec.conventions.lacks:
        field, ask, rule, right = _LACKS[name]
        if (value := ask(scenario)) is not None:
            yield Violation(field, value, f"{spec.name} {rule}", right)
    if scenario.plan.pp > 1:
        yield from _pipeline(scenario, spec)


def _pipeline(scenario: Scenario, spec: FrameworkSpec) -> Iterator[Violation]:
    """What the pipeline engine of `spec` does not run."""
    plan, own = scenario.plan, spec.pipeline
    if own.schedules and plan.schedule not in ("auto", *own.schedules):
        yield Violation("plan.schedule", plan.schedule, f"{spec.name} has no such schedule", " or ".join(own.schedules))
    if own.layer_rounding != "equal":
        return
    layers, stages = layer_count(scenario.model), model_stages(plan)
    if layers % stages:
        right = f"pp x virtual_stages that divides them: {', '.join(map(str, divisors(layers)))}"
        yield Violation("plan.pp", plan.pp, f"{spec.name} gives every one of {stages} stages as many of {layers} layers", right)
    elif len(set(plan.layers_per_stage or ())) > 1 or plan.first_stage_less_layers or plan.last_stage_less_layers:
        rule = f"{spec.name} gives every stage as many layers"
        yield Violation("plan.layers_per_stage", plan.layers_per_stage, rule, f"leave it out: {layers // stages} each")


def option_conflicts(scenario: Scenario, spec: FrameworkSpec) -> Iterator[Violation]:
    """Options that exclude one another, or that mean nothing beside the rest of the scenario."""
    training, plan = scenario.training, scenario.plan
    if training.pure_bf16 and training.precision in ("fp32", "tf32"):
        rule = f"contradicts training.precision {training.precision!r}"
        yield Violation("training.pure_bf16", True, rule, "bf16, fp16 or an fp8 recipe")
    if training.base_weights == "fp32" and (
        not spec.optimizer.autocast or training.pure_bf16 or training.precision not in ("bf16", "fp16")
    ):
        rule = "frozen weights of fp32 are cast by autocast, which this run has not"
        yield Violation(
            "training.base_weights", "fp32", rule, "auto, or a framework under autocast in bf16 or fp16 (transformers, trl)"
        )
    if training.narrow_modules != "all":
        yield from _narrow_modules(scenario, spec)
    if not training.fp8_gather and training.precision != "fp8":
        rule = "is of fp8 weights with one scale a tensor"
        yield Violation("training.fp8_gather", False, rule, 'true, or training.precision = "fp8"')
    elif not training.fp8_gather and plan.zero_stage < 3:
        rule = "no weights are gathered that training.fp8_gather = false is of"
        yield Violation("plan.zero_stage", plan.zero_stage, rule, "3, or training.fp8_gather = true")
    if training.optimizer_in_backward:
        yield from _in_backward(scenario)
    for field in ("overlap_tp", "overlap_ep") if training.launch_blocking else ():
        if getattr(plan, field):
            yield Violation(f"plan.{field}", True, "no kernel runs beside another under training.launch_blocking", "false")
    if training.launch_blocking and plan.zero_stage == 3:
        rule = "weights that are gathered ahead come beside no kernel under training.launch_blocking: not modelled"
        yield Violation("plan.zero_stage", 3, rule, "0, 1 or 2")
    if plan.reduce_bucket_size and not spec.data.gradient_buffers:
        rule = f"{spec.name} has no buffers of so many gradients"
        yield Violation("plan.reduce_bucket_size", plan.reduce_bucket_size, rule, 'leave it out, or framework = "deepspeed"')
    if plan.offload.parameters and plan.zero_stage < 3:
        yield Violation("plan.offload.parameters", True, "needs weights that are gathered for each layer", "plan.zero_stage = 3")
    if training.lora_modules == "qv" and getattr(scenario.model, "mla", None):
        yield Violation(
            "training.lora_modules", "qv", "latent attention has no matmul of queries or values alone", "attention or all"
        )
    width = getattr(scenario.model, "hidden_size", None)
    if training.trainable == "lora" and width is not None and training.lora_rank > width:
        rule = f"is more than hidden_size ({width}), the width of every matrix on one side: a pair of that rank outgrows its matrix"
        yield Violation("training.lora_rank", training.lora_rank, rule, f"at most {width}")
    if training.trainable == "all":
        defaults = {"base_weights": "auto", "lora_adapters": 1, "lora_modules": "attention", "lora_dropout": 0.0, "dora": False}
        for name, default in defaults.items():
            if (value := getattr(training, name)) != default:
                yield Violation(f"training.{name}", value, "is of low-rank adaptation", 'training.trainable = "lora"')


def _narrow_modules(scenario: Scenario, spec: FrameworkSpec) -> Iterator[Violation]:
    field, given, precision = "training.narrow_modules", scenario.training.narrow_modules, scenario.training.precision
    if precision not in BELOW_16_BITS:
        yield Violation(field, given, f"training.precision {precision!r} is not below 16 bits", "all")
    elif not spec.kernels.separate_casts:
        yield Violation(field, given, f"{spec.name} has one precision for all", 'all, or framework = "torchtitan"')
    elif not has_experts(scenario.model):
        yield Violation(field, given, "the model has no experts", "all")


def _in_backward(scenario: Scenario) -> Iterator[Violation]:
    training, plan = scenario.training, scenario.plan
    ranks = resolved_dp(scenario)
    off = "or training.optimizer_in_backward = false"
    if plan.pp > 1:
        yield Violation("plan.pp", plan.pp, "an update in the backward allows no second micro-batch", f"1, {off}")
    elif training.global_batch_size > training.micro_batch_size * ranks:
        rule = "an update in the backward allows no second micro-batch"
        yield Violation(
            "training.micro_batch_size", training.micro_batch_size, rule, f"{training.global_batch_size // ranks}, {off}"
        )
    if plan.zero_stage in (1, 2):
        rule = "an update in the backward leaves no gradients to shard"
        yield Violation("plan.zero_stage", plan.zero_stage, rule, f"0 or 3, {off}")
    if training.optimizer == "none":
        yield Violation("training.optimizer_in_backward", True, "there is no update without an optimizer", "an optimizer")
    if plan.offload.optimizer:
        yield Violation("plan.offload.optimizer", True, "an update in the backward runs on the device", f"false, {off}")
