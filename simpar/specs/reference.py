"""A model that runs forward beside the trained one: the step that it has, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final

from simpar.errors import Violation
from simpar.specs.architecture import ModelSpec, TokenModel
from simpar.specs.scenario_spec import Scenario
from simpar.specs.training import EncoderInputSpec

FIELD: Final = "training.reference_model"
NO_EXPERTS: Final = "the model has no experts"
"""A rule that one of two models may break: the other one has them."""


def reference_of(scenario: Scenario) -> Scenario | None:
    """The scenario of the model beside the trained one: a copy of that, or another model under the same degrees.

    The layers of another model are spread evenly over the stages, whatever the plan says of the trained one's.
    """
    beside = scenario.training.reference_model
    if beside is False:
        return None
    alone: dict[str, object] = {"reference_model": False, "images": EncoderInputSpec(), "audio": EncoderInputSpec()}
    if beside is True:
        return scenario.model_copy(update={"training": scenario.training.model_copy(update=alone)})
    training = scenario.training.model_copy(update={**alone, "trainable": "all"})
    even = {"layers_per_stage": None, "first_stage_less_layers": 0, "last_stage_less_layers": 0, "embedding_alone": False}
    return scenario.model_copy(
        update={"model": beside, "training": training, "plan": scenario.plan.model_copy(update=even)}
    )  # fmt: skip


def other_model(scenario: Scenario) -> Scenario | None:
    """`reference_of` where it is of another shape than the trained model."""
    return None if isinstance(scenario.training.reference_model, bool) else reference_of(scenario)


def models_of(scenario: Scenario) -> tuple[ModelSpec, ...]:
    """The trained model, and another one beside it."""
    other = other_model(scenario)
    return (scenario.model,) if other is None else (scenario.model, other.model)


def expert_model(scenario: Scenario) -> TokenModel | None:
    """The first of them that has experts."""
    return next((model for model in models_of(scenario) if isinstance(model, TokenModel) and model.moe), None)


def of_reference(found: Violation) -> Violation:
    """A rule broken by the reference, in the words of the scenario that names it."""
    name, dot, rest = found.field.partition(".")
    field = f"{FIELD}{dot}{rest}" if name == "model" else found.field
    return replace(found, field=field, rule=f"{found.rule}, of {FIELD}")


def rules_of_all(scenario: Scenario, rules: Callable[[Scenario], Iterable[Violation]]) -> list[Violation]:
    """Rules that the trained model breaks, and another one beside it; and what the two must have in common."""
    found, other = list(rules(scenario)), other_model(scenario)
    if other is None:
        return found
    beside = list(rules(other))
    # Degrees of experts serve the model that has some.
    neither = {v.field for v in found if v.rule == NO_EXPERTS} & {v.field for v in beside if v.rule == NO_EXPERTS}
    found = [v for v in found if v.rule != NO_EXPERTS or v.field in neither]
    found += [of_reference(v) for v in beside if v.rule != NO_EXPERTS]
    if not (isinstance(other.model, TokenModel) and isinstance(scenario.model, TokenModel)):
        rule = "both models of a distillation are models of tokens"
        found.append(Violation(FIELD, other.model.name or other.model.kind, rule, "true, for a copy of the trained one"))
    return found
