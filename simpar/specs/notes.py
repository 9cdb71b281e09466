"""What is unusual about a scenario, and what of it is not modelled: said beside every result."""

from __future__ import annotations

from collections.abc import Iterator

from simpar.specs.architecture import ArchitectureSpec, TokenModel
from simpar.specs.counts import layer_count, model_stages
from simpar.specs.model import TransformerSpec
from simpar.specs.plan import RecomputeSpec
from simpar.specs.scenario import Scenario
from simpar.specs.stage_plan import hosts, part_notes


def scenario_notes(scenario: Scenario) -> list[str]:
    """What is unusual but not wrong, one sentence each."""
    model, plan, notes = scenario.model, scenario.plan, []
    length = scenario.training.sequence_length
    if isinstance(model, TokenModel) and length > model.max_position_embeddings:
        limit = model.max_position_embeddings
        notes.append(f"training.sequence_length {length} is beyond the model's max_position_embeddings {limit}")
    if isinstance(model, ArchitectureSpec) and any(stack.tower for stack in model.stacks):
        towers = ", ".join(stack.name for stack in model.stacks if stack.tower)
        notes.append(f"the step is the decoder's on text: the {towers} encoder and its projector are left out, weights and work")
    stages, layers = model_stages(plan), layer_count(model)
    less = plan.first_stage_less_layers + plan.last_stage_less_layers
    if not plan.layers_per_stage and not plan.embedding_alone and (layers + less) % stages:
        notes.append(f"{layers} layers do not divide evenly over {stages} pipeline stages: some hold one more")
    alone = [(h.scenario.plan.tp, h.hardware.domain_size) for h in hosts(scenario)] or [(plan.tp, scenario.hardware.domain_size)]
    for tp, domain in dict.fromkeys(alone):
        if tp > domain:
            notes.append(f"plan.tp {tp} is wider than the scale-up domain of {domain} GPUs")
    return [*notes, *part_notes(scenario), *_not_modelled(scenario), *_simplified(scenario)]


def _not_modelled(scenario: Scenario) -> Iterator[str]:
    """Options that are read and exported, and change nothing in a simulation; one sentence each."""
    model, plan = scenario.model, scenario.plan
    if isinstance(model, TransformerSpec) and model.activation in ("relu", "squared_relu"):
        yield f"model.activation {model.activation!r} is not modelled: priced, and kept for the backward, as gelu is"
    if plan.delay_wgrad:
        yield "plan.delay_wgrad is not modelled: weight gradients run in their own backward, unless the schedule splits it"
    if isinstance(plan.recompute, RecomputeSpec) and plan.recompute.uniform_layers > 1:
        every = plan.recompute.uniform_layers
        yield f"plan.recompute.uniform_layers {every} is not modelled: every layer is checkpointed by itself"


def _simplified(scenario: Scenario) -> Iterator[str]:
    """Options that are modelled more simply than they work."""
    plan = scenario.plan
    if plan.overlap_ep and plan.ep > 1 and not plan.schedule.startswith("dualpipe"):
        yield (
            "plan.overlap_ep: exchanges are hidden as if every forward of one micro-batch ran beside a backward of another, "
            "warm-up and cool-down included"
        )


__all__ = ["scenario_notes"]
