"""Layout facts that a published row does not state, as sets of admissible values instead of one guess."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from simpar.specs.open_values import PRIORS

Row = Mapping[str, Any]
USUAL: Final = 0.7
"""Weight of what the rules fill in (the framework's default of that month, a recipe): how often published runs that do state the
fact follow it."""
MOST_MICRO_BATCH: Final = 16


def with_open_facts(row: Row, table: dict[str, Any]) -> dict[str, Any]:
    """The scenario's `table` with the facts that `row` leaves open as sets; what the rules filled in weighs most.

    Recomputation, micro-batch size and virtual stages: the facts that move time and memory most and are most often not printed.
    """
    plan, training = dict(table["plan"]), dict(table["training"])
    if not row.get("recompute"):
        plan["recompute"] = _set("plan.recompute", plan["recompute"], PRIORS["plan.recompute"])
    if int(plan["pp"]) > 1 and not row.get("vpp") and plan.get("schedule") in ("1f1b", "interleaved"):
        per_rank = max(int(row["layers"]) // int(plan["pp"]), 1)
        fitting = {v: w for v, w in PRIORS["plan.virtual_stages"].items() if per_rank % v == 0}
        plan["virtual_stages"] = _set("plan.virtual_stages", plan["virtual_stages"], fitting)
        plan["schedule"] = "auto"
    if not row.get("micro_batch") and not row.get("grad_accum"):
        local = int(training["global_batch_size"]) // int(plan["dp"])
        sizes = {v: w for v, w in PRIORS["training.micro_batch_size"].items() if v <= MOST_MICRO_BATCH and local % v == 0}
        training["micro_batch_size"] = _set("training.micro_batch_size", training["micro_batch_size"], sizes)
    return {**table, "plan": plan, "training": training}


def _set(path: str, usual: Any, others: Mapping[Any, float]) -> Any:
    """{ any_of, weights } of the usual value and the others; the usual value itself where there is no other."""
    rest = {value: weight for value, weight in others.items() if value != usual}
    if not rest:
        return usual
    total = sum(rest.values())
    values, weights = [usual, *rest], [USUAL, *((1.0 - USUAL) * weight / total for weight in rest.values())]
    return {"any_of": values, "weights": weights}
