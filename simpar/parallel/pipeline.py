"""Pipeline parallelism: which layers each virtual stage holds, and what crosses a stage boundary."""

from __future__ import annotations

from dataclasses import dataclass

from simpar.errors import InputError, Violation
from simpar.specs.plan import PlanSpec


@dataclass(frozen=True, slots=True)
class StageLayers:
    """One virtual stage: a run of layers.

    Attributes:
        first, count: its layers.
        embedding, head: whether they are on it.
        shares: it has the head, on the rank of the embedding: a tied matrix is there once.
        encoders: layers of encoders beside the decoder, [first, last).
    """

    first: int
    count: int
    embedding: bool
    head: bool
    shares: bool = False
    encoders: tuple[int, int] = (0, 0)


def split_layers(
    num_layers: int, num_stages: int, plan: PlanSpec, *, ends_meet: bool = False, encoders: int = 0
) -> tuple[StageLayers, ...]:
    """Layers of each of `num_stages` virtual stages.

    User-given `layers_per_stage` wins; otherwise stages are even after `first_stage_less_layers` and
    `last_stage_less_layers` have been taken off the ends, and what does not divide goes to the middle stages first.

    Args:
        ends_meet: one rank holds the first stage and the last (one rank alone, V-shaped placements).
        encoders: layers of encoders beside the decoder: on the first stage, or on `encoder_stages` of their own.

    Raises:
        InputError: a given split of the wrong length or sum.
    """
    # What is left to cost is even until it is decided (step.py).
    counts = [] if plan.layers_per_stage == "auto" else list(plan.layers_per_stage or ())
    if counts:
        if len(counts) != num_stages or sum(counts) != num_layers:
            rule = f"needs {num_stages} numbers (pp x virtual_stages) that add up to {num_layers} layers"
            raise InputError([Violation("plan.layers_per_stage", tuple(counts), rule)])
    else:
        counts = [0] * plan.encoder_stages + _even(num_layers, num_stages - plan.encoder_stages, plan)
    stages, first, encoder = [], 0, 0
    begins = plan.encoder_stages
    shares = _even_counts(encoders, begins) if begins else [encoders]
    for index, count in enumerate(counts):
        head = index == num_stages - 1
        own = (encoder, encoder := encoder + shares[index]) if index < len(shares) else (encoder, encoder)
        stages.append(StageLayers(first, count, index == begins, head, head and ends_meet and not begins, own))
        first += count
    return tuple(stages)


def _even(num_layers: int, num_stages: int, plan: PlanSpec) -> list[int]:
    if plan.embedding_alone and num_stages > 2:
        return [0, *_even_counts(num_layers, num_stages - 2), 0]
    less_first, less_last = plan.first_stage_less_layers, plan.last_stage_less_layers
    padded = num_layers + less_first + less_last
    counts = _even_counts(padded, num_stages)
    counts[0] -= less_first
    counts[-1] -= less_last
    return counts


def _even_counts(num_layers: int, num_stages: int) -> list[int]:
    """As even as possible; the remainder goes to the stages after the first, which also holds the embedding."""
    base, extra = divmod(num_layers, num_stages)
    order = [*range(1, num_stages - 1), 0, num_stages - 1][:num_stages] if num_stages > 1 else [0]
    counts = [base] * num_stages
    for index in order[:extra]:
        counts[index] += 1
    return counts


def boundary_bytes(whole: float, plan: PlanSpec) -> float:
    """Bytes one rank sends to the next stage: its slice of the activation (sequence and context parallel split it)."""
    split = plan.cp * (plan.tp if plan.sequence_parallel else 1)
    return whole / split
