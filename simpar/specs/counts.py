"""Numbers that a scenario implies: data-parallel ranks, tensor ranks of an expert, virtual stages, layers and how they are
dealt out by what they cost."""

from __future__ import annotations

from typing import Final

from simpar.specs.architecture import ArchitectureSpec
from simpar.specs.model import CnnSpec, MlpSpec, TransformerSpec
from simpar.specs.plan import PlanSpec
from simpar.specs.scenario_spec import Scenario

ONE_CHUNK_SCHEDULES: Final = ("naive", "gpipe", "1f1b", "zb-h1", "zb-h2", "zb-1p", "zb-2p", "dualpipe")
"""Schedules with one model chunk per pipeline rank (DualPipe: one per direction)."""
TWO_CHUNK_SCHEDULES: Final = ("zb-v", "v-half", "v-min", "dualpipe-v")
"""Those with two, placed as a V."""


def divisors(whole: int) -> list[int]:
    """Ascending divisors of `whole`."""
    small = [d for d in range(1, int(whole**0.5) + 1) if whole % d == 0]
    return sorted({*small, *(whole // d for d in small)})


def resolved_dp(scenario: Scenario) -> int:
    """Data-parallel ranks: the plan's, or what tp * cp * pp leave of the cluster (at least 1)."""
    plan = scenario.plan
    return plan.dp or max(1, scenario.world_size // (plan.tp * plan.cp * plan.pp))


def microbatches(scenario: Scenario) -> int:
    """Micro-batches per step of one data-parallel rank: gradient accumulation."""
    return scenario.training.global_batch_size // (scenario.training.micro_batch_size * resolved_dp(scenario))


def resolved_etp(plan: PlanSpec) -> int:
    """Tensor parallelism inside an expert: the plan's, or tp without expert parallelism and 1 with it."""
    return plan.etp or (plan.tp if plan.ep == 1 else 1)


def model_stages(plan: PlanSpec) -> int:
    """Virtual stages that one copy of the model is cut into."""
    chunks = max(plan.virtual_stages, 2) if plan.schedule in TWO_CHUNK_SCHEDULES else plan.virtual_stages
    return plan.pp * chunks


def layer_count(model: TransformerSpec | MlpSpec | CnnSpec | ArchitectureSpec) -> int:
    """Layers that pipeline stages share out (multi-token-prediction modules are not among them)."""
    if isinstance(model, ArchitectureSpec):
        return model.num_layers
    if isinstance(model, TransformerSpec):
        return model.num_hidden_layers + model.num_decoder_layers
    if isinstance(model, MlpSpec):
        return model.depth + (model.input_size is not None) + (model.output_size is not None)
    return len(model.layers)


def split_by_cost(layers: int, layer_cost: float, head_cost: float, stages: int) -> tuple[int, ...]:
    """Layers per stage when blocks are dealt out by compute cost: a stage is closed by the block that passes its share.

    nanotron's build_model: blocks in order, the embedding free, the head as `head_cost`; a block goes to the current stage,
    and the stage ends when the running cost reaches its threshold, total * (stage + 1) / stages. Its later sources want it
    exceeded; the 16 layers of its published sweep, whose head costs four, say reached: the first rank's memory and the step time
    are those of 10 layers of two stages and of 5 of four.

    >>> split_by_cost(16, 1.0, 4.0, 2)
    (10, 6)
    """
    total = layers * layer_cost + head_cost
    counts, stage, running = [0] * stages, 0, 0.0
    for _ in range(layers):
        counts[stage] += 1
        running += layer_cost
        if running >= total * (stage + 1) / stages and stage < stages - 1:
            stage += 1
    return tuple(counts)
