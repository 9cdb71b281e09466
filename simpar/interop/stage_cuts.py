"""A pipeline's cut as a plan writes it: a rule that has a name where one gives these layers, else the list."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from simpar.errors import InputError
from simpar.parallel.pipeline import split_layers
from simpar.specs.plan import PlanSpec

_MOST_LESS = 4


def _rules() -> Iterator[dict[str, Any]]:
    """Fields of a plan that name a cut, the plainest first."""
    yield {}
    yield {"embedding_alone": True}
    ends = range(_MOST_LESS + 1)
    yield from ({"first_stage_less_layers": a, "last_stage_less_layers": b} for a in ends for b in ends if a or b)


def split_fields(counts: Sequence[int], pp: int) -> dict[str, Any]:
    """The plan's fields that cut `sum(counts)` layers into virtual stages of `counts` layers."""
    for fields in _rules():
        try:
            plan = PlanSpec(pp=pp, virtual_stages=len(counts) // pp, **fields)
            cut = [stage.count for stage in split_layers(sum(counts), len(counts), plan)]
        except (InputError, ValueError):
            continue
        if list(counts) == cut and _allowed(plan, counts):
            return fields
    return {"layers_per_stage": list(counts)}


def _allowed(plan: PlanSpec, counts: Sequence[int]) -> bool:
    """Whether a scenario may write this cut by rule (specs/checks.py): no empty stage but those of embedding and head."""
    less = plan.first_stage_less_layers + plan.last_stage_less_layers
    inner = counts[1:-1] if plan.embedding_alone else counts
    if plan.embedding_alone or less:
        return (
            len(counts) >= (3 if plan.embedding_alone else 2)
            and min(inner) >= 1
            and (plan.embedding_alone or (sum(counts) + less) % len(counts) == 0)
        )
    return min(counts) >= 1
