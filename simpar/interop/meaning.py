"""What a scenario's fields come to once defaults are resolved and fields without effect are set aside.

Two scenarios with the same meaning simulate the same step, however they are written: dp left out or given, "auto" or "1f1b",
a split of layers by rule or by list. Launch files say the meaning; how it was written travels beside them (carried.py).
"""

from __future__ import annotations

from typing import Any, Final

from simpar.graph.types import GELUS
from simpar.interop.megatron_hybrid import same_steps, steps_of, steps_per_stage
from simpar.parallel.pipeline import split_layers
from simpar.schedules import SCHEDULES
from simpar.specs.architecture import ArchitectureSpec, has_experts
from simpar.specs.checks import DIMENSIONS
from simpar.specs.counts import layer_count, model_stages, resolved_dp, resolved_etp
from simpar.specs.framework import FrameworkSpec, framework
from simpar.specs.model import TransformerSpec
from simpar.specs.optimizers import KINDS
from simpar.specs.plan import RecomputeSpec
from simpar.specs.scenario import Scenario

DESCRIPTIVE: Final = frozenset({"name", "source", "published_parameters", "published_as", "published_scope", "published_rounding",
                                   "dropout", "packed_attention", "even_routing"})  # fmt: skip
"""Fields of a model that say where it comes from, what its file proposes for a run, how its own code is written."""

ADAM: Final = ("adam", "adamw", "adamw-fused", "adamw-foreach")
"""Optimizers that differ at most in how they go over the weights."""


def schedule_name(scenario: Scenario) -> str:
    """The schedule in force, by its first name in the table."""
    plan = scenario.plan
    asked = framework(scenario.framework, scenario.framework_version).pipeline.named(plan.schedule, plan.pp, plan.virtual_stages)
    if asked not in SCHEDULES:
        return asked
    family = SCHEDULES[asked]
    return next(name for name, other in SCHEDULES.items() if other is family)


def stage_counts(scenario: Scenario) -> tuple[int, ...]:
    """Layers of each virtual stage."""
    plan = scenario.plan
    return tuple(s.count for s in split_layers(layer_count(scenario.model), model_stages(plan), plan))


def _stage_steps(scenario: Scenario) -> tuple[int, ...]:
    """The same in residual steps where a model is a list of them: frameworks that number steps call each a layer."""
    model, counts = scenario.model, stage_counts(scenario)
    return steps_per_stage(model, counts) if isinstance(model, ArchitectureSpec) and steps_of(model) is not None else counts


def recompute_of(scenario: Scenario) -> RecomputeSpec:
    """The plan's recomputation in full; selective names its modules, what has no effect is at its default."""
    value = scenario.plan.recompute
    spec = RecomputeSpec(granularity=value) if isinstance(value, str) else value
    if spec.granularity == "none":
        return RecomputeSpec(granularity="none")
    if spec.granularity == "selective":
        return RecomputeSpec(granularity="selective", modules=tuple(sorted(spec.modules or ("core_attn",))))
    if spec.num_layers is not None:
        if spec.num_layers >= max(stage_counts(scenario)):
            return RecomputeSpec(granularity="full")
        return RecomputeSpec(granularity="full", method="block", num_layers=spec.num_layers)
    return RecomputeSpec(granularity="full", uniform_layers=spec.uniform_layers, every=spec.every)


def data_ranks(scenario: Scenario) -> int:
    """Ranks that states are sharded over: dp * cp."""
    return resolved_dp(scenario) * scenario.plan.cp


def replicas_and_shards(scenario: Scenario) -> tuple[int, int]:
    """Data-parallel replicas of a sharded model, and ranks of each (context-parallel ranks counted out)."""
    plan, dp = scenario.plan, resolved_dp(scenario)
    if plan.zero_stage == 0:
        return dp, 1
    shards = (plan.shard_size or data_ranks(scenario)) // plan.cp
    return dp // max(shards, 1), max(shards, 1)


def semantics(scenario: Scenario) -> FrameworkSpec:
    """The framework's behaviour that the scenario is simulated with."""
    return framework(scenario.framework, scenario.framework_version)


def meaning(scenario: Scenario) -> dict[str, Any]:
    """Field path -> value, of the plan, the training step and the model; None where the field has no effect."""
    return {**plan_meaning(scenario), **_training(scenario), **model_meaning(scenario)}


def plan_meaning(scenario: Scenario) -> dict[str, Any]:
    """The plan's part of `meaning`."""
    plan, spec = scenario.plan, semantics(scenario)
    experts = has_experts(scenario.model)
    interleaved = schedule_name(scenario).startswith("interleaved") and plan.virtual_stages > 1 and plan.pp > 1
    shards = data_ranks(scenario)
    degrees = {"dp": resolved_dp(scenario), **{n: getattr(plan, n) for n in DIMENSIONS if n != "dp"}}
    found = {
        **{name: getattr(plan, name) for name in type(plan).model_fields},
        "dp": resolved_dp(scenario),
        "sequence_parallel": plan.sequence_parallel or plan.tp == 1,
        "cp_style": plan.cp_style if plan.cp > 1 else None,
        "etp": resolved_etp(plan) if experts else None,
        "ep_dispatcher": plan.ep_dispatcher if plan.ep > 1 else None,
        "overlap_ep": plan.overlap_ep and plan.ep > 1,
        "overlap_tp": plan.overlap_tp and plan.tp > 1,
        "schedule": schedule_name(scenario),
        "virtual_stages": model_stages(plan) // plan.pp,
        "microbatch_group_size": (plan.microbatch_group_size or plan.pp) if interleaved else None,
        "layers_per_stage": _stage_steps(scenario),
        "first_stage_less_layers": None,
        "last_stage_less_layers": None,
        "embedding_alone": None,
        "shard_size": (plan.shard_size or shards) if plan.zero_stage and shards > 1 else None,
        "reshard_after_forward": plan.reshard_after_forward if plan.zero_stage == 3 and shards > 1 else None,
        "defer_reduction": _defers(scenario, spec) if shards > 1 else None,
        "placement": tuple(n for n in plan.placement.split("-") if degrees[n] > 1),
        "recompute": recompute_of(scenario),
        "overlap_grad_reduce": spec.data.reduces_beside_backward(plan.zero_stage, plan.overlap_grad_reduce) if shards > 1 else None,
        "overlap_param_gather": (
            _chosen(plan.overlap_param_gather, spec.data.overlap_param_gather) if plan.zero_stage in (1, 2) and shards > 1 else None
        ),
        "overlap_p2p": _overlap_p2p(scenario, spec) if plan.pp > 1 else None,
        "synchronous_optimizer": _chosen(plan.synchronous_optimizer, not spec.optimizer.optimizer_post_validation),
    }
    return {f"plan.{name}": value for name, value in found.items()}


def _defers(scenario: Scenario, spec: FrameworkSpec) -> bool | None:
    plan, training = scenario.plan, scenario.training
    several = training.global_batch_size > training.micro_batch_size * resolved_dp(scenario)
    if plan.zero_stage < 3 or plan.pp > 1 or not several:
        return None
    return _chosen(plan.defer_reduction, spec.data.fsdp_defers_reduction)


def _chosen(value: bool | None, default: bool) -> bool:
    return default if value is None else value


def _overlap_p2p(scenario: Scenario, spec: FrameworkSpec) -> bool:
    """As the lowering takes it."""
    name, plan = schedule_name(scenario), scenario.plan
    zero_bubble = "zb" in name or name.startswith(("dualpipe", "v-"))
    return spec.overlaps_p2p(plan.overlap_p2p, zero_bubble=zero_bubble, interleaved=plan.virtual_stages > 1)


def adam_kernel(scenario: Scenario) -> str:
    """How an update of Adam goes over the weights: as the run says, or as its framework does."""
    return KINDS[scenario.training.optimizer].update_kernel(semantics(scenario).optimizer)[0]


def _training(scenario: Scenario) -> dict[str, Any]:
    training, spec = scenario.training, semantics(scenario)
    found = {
        **{name: getattr(training, name) for name in type(training).model_fields},
        # Megatron's adam and torch's AdamW: the weight decay is decoupled in both, the step's work is the same.
        "optimizer": f"adamw, {adam_kernel(scenario)}" if training.optimizer in ADAM else training.optimizer,
        "gradient_dtype": _gradient_dtype(
            scenario, training.gradient_dtype or spec.optimizer.gradients(training.precision, scenario.plan.pp)
        ),
        "loss_parallel": _chosen(training.loss_parallel, spec.head.logits_vocab_parallel) if scenario.plan.tp > 1 else None,
        "compile": _compiled(training.compile, spec),
        "cuda_graph_scope": training.cuda_graph_scope if training.cuda_graphs else None,
        # Who goes to which expert is not a setting of the run, but a fixed capacity is.
        "routing": training.routing.capacity_factor,
        "dropout": training.dropout or 0.0,
        "lora_rank": training.lora_rank if training.trainable == "lora" else None,
    }
    return {f"training.{name}": value for name, value in found.items()}


def _compiled(asked: bool | str | None, spec: FrameworkSpec) -> bool | str:
    """What is compiled; a loss that the framework never compiles makes no difference."""
    if asked is None:
        return spec.kernels.compile
    return asked if spec.head.logits_fp32_copies_compiled is not None else asked in (True, "model")


def _gradient_dtype(scenario: Scenario, dtype: str) -> str:
    """16-bit gradients have the 16-bit type of the run."""
    return dtype if dtype == "fp32" else "fp16" if scenario.training.precision == "fp16" else "bf16"


def model_meaning(scenario: Scenario) -> dict[str, Any]:
    """The model's part of `meaning`."""
    model = scenario.model
    found = {name: value for name, value in model.model_dump().items() if name not in DESCRIPTIVE}
    if isinstance(model, TransformerSpec):
        if model.activation in GELUS:
            found["activation"] = "gelu"
        if model.position != "learned":
            found["max_position_embeddings"] = None
        if model.mla is not None:
            found["head_dim"] = None
        if model.moe is not None and model.moe.first_k_dense_replace == 0 and model.moe.moe_layer_freq == 1:
            found["intermediate_size"] = None
    elif isinstance(model, ArchitectureSpec) and (steps := same_steps(model)) is not None:
        found["stacks"] = steps
        if not model.extra:
            found["max_position_embeddings"] = None
    return {f"model.{name}": value for name, value in found.items()}
