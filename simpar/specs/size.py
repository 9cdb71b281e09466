"""How large a scenario is before anything of it is built, and what is refused for its size.

The limits are above any system that exists; what lies under them is answered in seconds to minutes. `SIMPAR_LIMIT` (the command
line's --limit) raises one: "ops=5e7,layers=10000".
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from simpar.errors import InputError, Violation
from simpar.specs.architecture import ArchitectureSpec
from simpar.specs.counts import layer_count, microbatches, model_stages
from simpar.specs.encoders import layer_counts
from simpar.specs.model import CnnSpec, MlpSpec, TransformerSpec
from simpar.specs.reference import of_reference, other_model, reference_of
from simpar.specs.scenario_spec import Scenario

VARIABLE: Final = "SIMPAR_LIMIT"
LIMITS: Final = {"ranks": 10_000_000, "layers": 10_000, "ops": 3_000_000, "bytes": 2**60, "incidents": 20_000_000}
"""GPUs, layers of a model, ops of one pipeline in the program that is built, bytes of one tensor or of all parameters, failures and
maintenance windows of all repetitions of a plan.

An op takes about 30 us and 1.4 KB (measured), a layer about 1 ms with its allocations (equal ones are split and priced once), an
incident about 20 us.
"""
_OPS_PER_LAYER: Final = 24
"""At op detail, of one pass through a block: its kernels and collectives."""


@dataclass(frozen=True, slots=True)
class Passes:
    """What one pipeline runs in a step.

    Attributes:
        microbatches: per data-parallel rank.
        stages: virtual ones.
        layers: of the model.
    """

    microbatches: int
    stages: int
    layers: int

    def ops(self, detail: str, microbatches: int | None = None) -> int:
        """Ops of the program at a level of detail, of the whole step or of one with another number of micro-batches."""
        passes = 2 * (self.microbatches if microbatches is None else microbatches)
        per_layer = {"stage": 0, "layer": 1, "op": _OPS_PER_LAYER}[detail]
        return passes * (2 * self.stages + per_layer * self.layers)


def limits() -> dict[str, int]:
    """The limits in force.

    Raises:
        InputError: SIMPAR_LIMIT names no limit or no number.
    """
    found = dict(LIMITS)
    for part in filter(None, (p.strip() for p in os.environ.get(VARIABLE, "").split(","))):
        name, _, text = part.partition("=")
        try:
            number = float(text.replace("_", ""))
        except ValueError:
            number = 0.0
        if name not in found or not 1 <= number < 1e18:
            right = f"such as ops=5e7; names: {', '.join(found)}"
            raise InputError([Violation("--limit", part, "is no limit", right)])
        found[name] = int(number)
    return found


def passes_of(scenario: Scenario) -> Passes:
    """What one pipeline of `scenario` runs."""
    layers, other = layer_count(scenario.model) + layer_counts(scenario), reference_of(scenario)
    if other is not None:
        layers += layer_count(other.model)
    return Passes(max(microbatches(scenario), 1), model_stages(scenario.plan), layers)


def check_ops(scenario: Scenario, ops: int) -> None:
    """Refuse a program of so many ops.

    Raises:
        InputError: more than the limit.
    """
    most = limits()["ops"]
    if ops > most:
        passes = passes_of(scenario)
        what = f"{passes.microbatches:,} micro-batches on {passes.stages} stages"
        if scenario.effects.expand:
            what += f", each of {scenario.world_size:,} ranks by itself"
        rule = f"a step of {what} is about {ops:,} ops, more than {most:,}"
        right = f"a smaller batch, a larger micro_batch_size, or --limit ops={ops:.0e}"
        field, value = "training.global_batch_size", scenario.training.global_batch_size
        raise InputError([Violation(field, value, rule, right, scenario.file)])


def too_large(scenario: Scenario) -> list[Violation]:
    """What of the scenario no system comes near, told before anything is built from it."""
    most, other = limits(), other_model(scenario)
    found = [*_layers(scenario, most["layers"]), *_ranks(scenario, most["ranks"])] or [*_bytes(scenario, most["bytes"])]
    if other is None:
        return found
    beside = [*_layers(other, most["layers"])] or [*_bytes(other, most["bytes"])]
    return [*found, *(of_reference(v) for v in beside)]


def _layers(scenario: Scenario, most: int) -> Iterator[Violation]:
    model = scenario.model
    names = {TransformerSpec: ("num_hidden_layers", "num_decoder_layers", "num_nextn_predict_layers"), MlpSpec: ("depth",)}
    counts = [(f"model.{n}", getattr(model, n)) for n in names.get(type(model), ())]
    if isinstance(model, CnnSpec):
        counts = [("model.layers", len(model.layers))]
    for field, count in counts:
        if count > most:
            yield Violation(field, count, f"more than {most:,} layers", f"fewer, or --limit layers={count}", scenario.file)


def _ranks(scenario: Scenario, most: int) -> Iterator[Violation]:
    cluster, plan = scenario.cluster, scenario.plan
    try:
        gpus = scenario.world_size
    except InputError:  # hardware that cannot be read is told by the checks that follow
        gpus = cluster.num_nodes
    if (cluster.gpus_per_node or 1) > most:
        yield Violation("cluster.gpus_per_node", cluster.gpus_per_node, f"more than {most:,} GPUs", "such as 8", scenario.file)
    elif gpus > most:
        where = ("cluster.parts", len(cluster.parts)) if cluster.parts else ("cluster.num_nodes", cluster.num_nodes)
        yield Violation(*where, f"{gpus:,} in all: more than {most:,} GPUs", f"fewer, or --limit ranks={gpus}", scenario.file)
    for name in ("tp", "cp", "pp", "dp", "ep", "etp", "virtual_stages", "shard_size", "microbatch_group_size"):
        value = getattr(plan, name, None)
        if value is not None and value > most:
            yield Violation(f"plan.{name}", value, f"more than {most:,}", "at most the GPUs of the cluster", scenario.file)


def _bytes(scenario: Scenario, most: int) -> Iterator[Violation]:
    """Parameters, and the largest tensor of a micro-batch."""
    model, training = scenario.model, scenario.training
    inputs = max(given.per_sample * (given.tokens or 1) for given in (training.images, training.audio))
    tokens = training.micro_batch_size * max(training.sequence_length, inputs)
    if isinstance(model, TransformerSpec):
        experts = model.moe.num_experts * model.moe.moe_intermediate_size if model.moe is not None else 0
        heads = model.num_attention_heads * model.head_dim
        width = max(model.hidden_size, model.intermediate_size, heads, model.vocab_size)
        layers = model.num_hidden_layers + model.num_decoder_layers
        parameters = 4 * model.hidden_size * (layers * (model.intermediate_size + experts + heads) + model.vocab_size)
    elif isinstance(model, MlpSpec):
        width = max(model.width, model.input_size or 1, model.output_size or 1)
        parameters = 4 * model.width * (model.width * model.depth + width)
    elif isinstance(model, ArchitectureSpec):
        width = max(model.text.hidden_size, model.vocab_size, *(size for _, size in model.tensor_widths()))
        experts = model.moe.num_experts * model.moe.moe_intermediate_size if model.moe is not None else 0
        parameters = 4 * model.text.hidden_size * (model.num_layers * (width + experts) + model.vocab_size)
    else:
        width = max(model.image_size**2 * max([model.in_channels, *(layer.out_channels or 1 for layer in model.layers)]), 1)
        parameters = 0
    if 2 * parameters > most:
        rule = f"about {parameters:.3g} parameters take more than {most:.3g} bytes"
        yield Violation("model", model.name or model.kind, rule, "smaller widths", scenario.file)
    if 4 * tokens * width > most:
        rule = f"a tensor of {tokens:,} tokens and width {width:,} takes more than {most:.3g} bytes"
        field = "training.sequence_length" if training.sequence_length > 1 else "training.micro_batch_size"
        yield Violation(field, getattr(training, field.partition(".")[2]), rule, "fewer tokens in a micro-batch", scenario.file)
