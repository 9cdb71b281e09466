"""What is unusual about a scenario, and what of it is not modelled: said beside every result."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from simpar.specs.architecture import ArchitectureSpec, TokenModel
from simpar.specs.counts import layer_count, model_stages
from simpar.specs.encoders import FIELDS, encoders_of, idle_encoders, input_tokens
from simpar.specs.framework import framework
from simpar.specs.framework_options import dropout_of
from simpar.specs.model import TransformerSpec
from simpar.specs.plan import RecomputeSpec
from simpar.specs.reference import expert_model, other_model
from simpar.specs.scenario_spec import Scenario
from simpar.specs.stage_plan import hosts, part_notes
from simpar.specs.training import balanced_by_bias, spread_of

_OF_ADAPTERS: Final = ("lora_rank", "lora_modules", "lora_dropout", "dora", "lora_adapters", "base_weights")


def scenario_notes(scenario: Scenario) -> list[str]:
    """What is unusual but not wrong, one sentence each."""
    model, plan, notes = scenario.model, scenario.plan, []
    length = scenario.training.sequence_length
    if isinstance(model, TokenModel) and length > model.max_position_embeddings:
        limit = model.max_position_embeddings
        notes.append(f"training.sequence_length {length} is beyond the model's max_position_embeddings {limit}")
    notes += _encoders(scenario)
    stages, layers = model_stages(plan) - plan.encoder_stages, layer_count(model)
    less = plan.first_stage_less_layers + plan.last_stage_less_layers
    if not plan.layers_per_stage and not plan.embedding_alone and (layers + less) % stages:
        notes.append(f"{layers} layers do not divide evenly over {stages} pipeline stages: some hold one more")
    alone = [(h.scenario.plan.tp, h.hardware.domain_size) for h in hosts(scenario)] or [(plan.tp, scenario.hardware.domain_size)]
    for tp, domain in dict.fromkeys(alone):
        if tp > domain:
            notes.append(f"plan.tp {tp} is wider than the scale-up domain of {domain} GPUs")
    dropout = dropout_of(scenario, framework(scenario.framework, scenario.framework_version))
    if dropout and scenario.training.dropout is None:
        notes.append(f"dropout {dropout:g}, as the model's file says; training.dropout = 0 trains without")
    return [*notes, *_loads(scenario), *_idle(scenario), *part_notes(scenario), *_not_modelled(scenario), *_simplified(scenario)]


def _idle(scenario: Scenario) -> Iterator[str]:
    """Fields of low-rank adaptation that are not as usual where everything is trained."""
    training = scenario.training
    usual = type(training).model_fields
    written = [name for name in _OF_ADAPTERS if getattr(training, name) != usual[name].default]
    if training.trainable != "lora" and written:
        yield f"training.{', '.join(written)}: without effect, as training.trainable is {training.trainable!r} and not 'lora'"


def _loads(scenario: Scenario) -> Iterator[str]:
    """How far the experts' loads are assumed apart, where nobody says it and ranks wait for the fullest."""
    model, routing = expert_model(scenario), scenario.training.routing
    if model is None or model.moe is None or scenario.plan.ep == 1 or routing.capacity_factor is not None:
        return
    if routing.kind == "lognormal" and routing.spread is None:
        why = "balanced by a bias" if balanced_by_bias(model, model.moe) else "trained"
        yield (
            f"assumed: experts' loads differ by {spread_of(routing, model, model.moe):.0%} of their mean (a router that is {why}; "
            "training.routing.spread), none with training.routing.kind = 'balanced', as benchmarks force it"
        )


def _encoders(scenario: Scenario) -> Iterator[str]:
    """Encoders beside the decoder, those left out and those that run; what comes before a model without a vocabulary."""
    if isinstance(scenario.model, ArchitectureSpec) and not scenario.model.vocab_size:
        yield "a model without a vocabulary: its tokens (latents, text embeddings, patches) are given, its loss is elementwise"
    if left := idle_encoders(scenario):
        fields = ", ".join(f"training.{FIELDS[name]}.per_sample" for name in left if name in FIELDS)
        more = f" ({fields} puts them in)" if fields else ""
        yield f"the {', '.join(left)} encoder and its projector are left out, weights and work{more}"
    cp = scenario.plan.cp
    for stack, given in encoders_of(scenario):
        tokens = input_tokens(stack, given)
        what = f"{given.per_sample} x {tokens} tokens of every sample in the {stack.name} encoder"
        yield f"{what}, of which {given.per_sample * (tokens // stack.merge)} reach the decoder"
        if cp > 1:
            yield f"every context-parallel rank runs the {stack.name} encoder on all inputs (as Megatron-Core's pretrain_vlm does)"


def _not_modelled(scenario: Scenario) -> Iterator[str]:
    """Options that are read and exported, and change nothing in a simulation; one sentence each."""
    model, plan = scenario.model, scenario.plan
    if isinstance(model, TransformerSpec) and model.activation in ("relu", "squared_relu"):
        yield f"model.activation {model.activation!r} is not modelled: priced, and kept for the backward, as gelu is"
    if plan.delay_wgrad:
        yield "plan.delay_wgrad is not modelled: weight gradients run in their own backward, unless the schedule splits it"


def _simplified(scenario: Scenario) -> Iterator[str]:
    """Options that are modelled more simply than they work."""
    plan, model = scenario.plan, scenario.model
    if scenario.training.document_lengths and isinstance(model, ArchitectureSpec):
        own = {
            branch.kind for branch in model.branches() if branch.kind in ("custom", "delta", "mamba1", "mamba2", "linear_attention")
        }
        if own or any(getattr(branch, "indexer", None) for branch in model.branches()):
            yield "training.document_lengths: scans, indexers and compressed keys work as if a sequence were one document"
    if other := other_model(scenario):
        name = other.model.name or "another model"
        yield f"training.reference_model: {name} runs forward on the same stages; a loss on both models' outputs is not priced"
    if plan.zero_stage == 3 and isinstance(plan.recompute, RecomputeSpec) and plan.recompute.uniform_layers > 1:
        yield "plan.recompute.uniform_layers: weights are gathered as if every layer were checkpointed by itself"
    if plan.overlap_ep and plan.ep > 1 and not plan.schedule.startswith("dualpipe"):
        yield (
            "plan.overlap_ep: exchanges are hidden as if every forward of one micro-batch ran beside a backward of another, "
            "warm-up and cool-down included"
        )
