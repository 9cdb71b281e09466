"""Encoders of images and sound beside a decoder: what each has to work on in a step, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal

from simpar.errors import Violation
from simpar.specs.architecture import ArchitectureSpec, StackSpec
from simpar.specs.mixers import AttentionSpec
from simpar.specs.scenario_spec import Scenario
from simpar.specs.training import EncoderInputSpec

FIELDS: Final[dict[str, Literal["images", "audio"]]] = {"vision": "images", "audio": "audio"}
"""Name of an encoder's stack -> the field of [training] that feeds it."""
KINDS: Final = {"images": "vision", "audio": "audio"}


def encoders_of(scenario: Scenario) -> Iterator[tuple[StackSpec, EncoderInputSpec]]:
    """Encoders that the step runs, with what each sample brings them."""
    for stack in _towers(scenario):
        name = FIELDS.get(stack.name)
        if name is not None and (given := getattr(scenario.training, name)).per_sample:
            yield stack, given


def input_tokens(stack: StackSpec, given: EncoderInputSpec) -> int:
    """Tokens of one input in the encoder; 0 = neither the file nor the user says."""
    return given.tokens or stack.input_tokens


def idle_encoders(scenario: Scenario) -> list[str]:
    """Names of the encoders that the step leaves out."""
    run = {stack.name for stack, _ in encoders_of(scenario)}
    return [stack.name for stack in _towers(scenario) if stack.name not in run]


def layer_counts(scenario: Scenario) -> int:
    """Layers of the encoders that the step runs, their projectors as one more each."""
    return sum(len(stack.sequence()) + 1 for stack, _ in encoders_of(scenario))


def _towers(scenario: Scenario) -> tuple[StackSpec, ...]:
    model = scenario.model
    return tuple(stack for stack in model.stacks if stack.tower) if isinstance(model, ArchitectureSpec) else ()


def encoder_rules(scenario: Scenario, stages: int) -> Iterator[Violation]:
    """What is wrong with the encoders' inputs and stages; `stages` are the virtual stages of the model."""
    training, names = scenario.training, {stack.name for stack in _towers(scenario)}
    for field, kind in KINDS.items():
        given: EncoderInputSpec = getattr(training, field)
        if not given.per_sample:
            for name in ("tokens", "frozen"):
                if getattr(given, name) != EncoderInputSpec.model_fields[name].default:
                    rule = "belongs to a step with inputs for the encoder"
                    yield Violation(f"training.{field}.{name}", getattr(given, name), rule, f"training.{field}.per_sample = 1")
        elif kind not in names:
            rule = f"the model has no {kind} encoder"
            right = f"0; its encoders: {', '.join(sorted(names))}" if names else "0"
            yield Violation(f"training.{field}.per_sample", given.per_sample, rule, right)
    for stack, given in encoders_of(scenario):
        yield from _inputs(scenario, stack, given)
    own = scenario.plan.encoder_stages
    if own and not any(True for _ in encoders_of(scenario)):
        rule = "no encoder runs in the step"
        yield Violation("plan.encoder_stages", own, rule, "0, or training.images.per_sample of at least 1")
    elif own >= stages:
        yield Violation("plan.encoder_stages", own, f"leaves none of {stages} stages to the decoder", f"at most {stages - 1}")
    elif own > layer_counts(scenario):
        yield Violation(
            "plan.encoder_stages", own, "more stages than the encoders have layers", f"at most {layer_counts(scenario)}"
        )
    elif own and any(counts := _own_layers(scenario)):
        rule = f"the first {own} stages hold the encoders alone"
        yield Violation("plan.layers_per_stage", counts, rule, "0 layers for each of them")


def _own_layers(scenario: Scenario) -> tuple[int, ...]:
    given = scenario.plan.layers_per_stage
    return given[: scenario.plan.encoder_stages] if isinstance(given, tuple) else ()


def _inputs(scenario: Scenario, stack: StackSpec, given: EncoderInputSpec) -> Iterator[Violation]:
    field, tokens = f"training.{FIELDS[stack.name]}", input_tokens(stack, given)
    if not tokens:
        yield Violation(f"{field}.tokens", None, "the encoder takes inputs of any size", "patches of one image, such as 1024")
    elif tokens < stack.merge:
        rule = f"the projector joins {stack.merge} tokens to one of the decoder's"
        yield Violation(f"{field}.tokens", tokens, rule, f"at least {stack.merge}")
    if given.frozen != "none" and scenario.training.trainable == "lora":
        rule = "low-rank adaptation leaves encoders frozen"
        yield Violation(f"{field}.frozen", given.frozen, rule, 'leave it out, or training.trainable = "all"')
    length, taken = scenario.training.sequence_length, given.per_sample * (tokens // stack.merge)
    if taken > length and not _crosses(scenario):
        rule = f"{given.per_sample} x {tokens // stack.merge} tokens of a sample's {length}"
        right = f"at most {length // max(tokens // stack.merge, 1)}, or a longer training.sequence_length"
        yield Violation(f"{field}.per_sample", given.per_sample, rule, right)


def _crosses(scenario: Scenario) -> bool:
    """Whether the decoder reads the encoder's output by cross-attention, so that it takes no place in the sequence."""
    model = scenario.model
    branches = model.branches() if isinstance(model, ArchitectureSpec) else ()
    return any(isinstance(branch, AttentionSpec) and branch.cross for branch in branches)
