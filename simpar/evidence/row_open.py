"""Layout facts that a published run does not state, as sets of admissible values instead of one guess."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any, Final

from simpar.evidence.row_complete import RATE_ALONE
from simpar.evidence.row_experts import untrained
from simpar.evidence.row_machine import USUAL_BOARDS, own_board
from simpar.evidence.row_values import Row
from simpar.specs.architecture import ArchitectureSpec
from simpar.specs.models_io import load_model, model_from_table
from simpar.specs.open_values import PRIORS, is_open

USUAL: Final = 0.7
"""Weight of what the rules fill in (the framework's default of that month, a recipe): how often published runs that do state the
fact follow it."""
EVEN: Final = 0.5
"""Weight of either routing."""
_OTHERWISE: Final[dict[str, Any]] = {"training.cuda_graphs": False}
"""Field -> its one other value."""
COLLAPSED: Final = {"kind": "zipf", "alpha": 4.0}
"""Routing of a router that was hardly trained and that nothing balances: nine tokens in ten take the same experts, since those that
are chosen learn first (Shazeer et al. 2017, arXiv 1701.06538, section 4: "self-reinforcing")."""
MOST_MICRO_BATCH: Final = 16
BATCH: Final = "training.global_batch_size"
"""Open where a row states a rate and no batch: a step of each reading is one micro-batch on every rank."""


def open_facts(row: Row, table: Mapping[str, Any]) -> tuple[str, ...]:
    """Fields of the scenario's `table` that `row` leaves open.

    Recomputation, micro-batch size and virtual stages: the facts that move time and memory most and are most often not printed;
    the board, where that of the publisher's own machines is not the one that most have; whether an untrained router sends all
    tokens to the same experts, which only matters where these are one rank's.
    """
    plan, rate_alone = table["plan"], bool(row.get(RATE_ALONE))
    virtual = int(plan.get("pp") or 1) > 1 and not row.get("vpp") and plan.get("schedule") in ("1f1b", "interleaved")
    left_open = {
        "plan.recompute": not row.get("recompute"),
        "plan.virtual_stages": virtual,
        "training.micro_batch_size": rate_alone or (not row.get("micro_batch") and not row.get("grad_accum")),
        BATCH: rate_alone,
        "cluster.hardware": own_board(row) is not None,
        "training.routing": untrained(row) and int(plan.get("ep") or 1) > 1,
        "training.cuda_graphs": row.get("cuda_graphs") is None and bool(table["training"].get("cuda_graphs")),
    }
    return tuple(path for path, missing in left_open.items() if missing)


def with_sets(table: Mapping[str, Any], paths: Iterable[str]) -> dict[str, Any]:
    """The scenario's `table` with the fields at `paths` as sets; the value that stands there weighs most.

    Args:
        paths: fields of `open_facts`; another takes all values that it admits.
    """
    found, paths = copy.deepcopy(dict(table)), tuple(paths)
    plan, training = found["plan"], found["training"]
    for path in paths:
        if path == BATCH:  # follows from the micro-batch, see `spread.predict_run`
            continue
        others: dict[Any, float] = dict(PRIORS.get(path, {}))
        if path == "plan.virtual_stages":
            per_rank = max(_layers(found) // int(plan["pp"]), 1)
            others = {v: w for v, w in others.items() if per_rank % v == 0}
            plan["schedule"] = "auto"
        if path == "training.micro_batch_size":
            local = int(training["global_batch_size"]) // int(plan["dp"])
            others = {v: w for v, w in others.items() if v <= MOST_MICRO_BATCH and (BATCH in paths or local % v == 0)}
        if path == "cluster.hardware":
            others = {USUAL_BOARDS[found["cluster"]["hardware"]]: 1.0}
        if path in _OTHERWISE:
            others = {_OTHERWISE[path]: 1.0}
        if path == "training.routing":
            training["routing"] = {"any_of": [training["routing"], COLLAPSED], "weights": [EVEN, 1.0 - EVEN]}
            continue
        section, _, key = path.partition(".")
        found[section][key] = _set(found[section].get(key), others, USUAL) if others else {"unknown": True}
    return found


def filled(table: Mapping[str, Any], usual: Mapping[str, Any]) -> dict[str, Any]:
    """`hidden` undone: the usual values in place of what is unknown."""
    found = copy.deepcopy(dict(table))
    for path, value in usual.items():
        section, _, key = path.partition(".")
        if is_open(found[section].get(key)):
            found[section][key] = value
    return found


def keeping(sets: Mapping[str, Any], stored: Mapping[str, Any], paths: Iterable[str]) -> dict[str, Any]:
    """`sets`, with the values that a `stored` scenario lists itself (`{ any_of = [...] }`) at those of `paths` where it does."""
    found = copy.deepcopy(dict(sets))
    for path in paths:
        section, _, key = path.partition(".")
        own = stored[section].get(key)
        if isinstance(own, Mapping) and "any_of" in own:
            found[section][key] = copy.deepcopy(dict(own))
    return found


def _layers(table: Mapping[str, Any]) -> int:
    model = table["model"]
    shipped = load_model(model) if isinstance(model, str) else model_from_table(model)
    return shipped.num_layers if isinstance(shipped, ArchitectureSpec) else int(getattr(shipped, "num_hidden_layers", 1))


def _set(usual: Any, others: Mapping[Any, float], first: float) -> Any:
    """{ any_of, weights } of the usual value, of weight `first`, and the others; the usual value itself where there is no other."""
    rest = {value: weight for value, weight in others.items() if value != usual}
    if not rest:
        return usual
    total = sum(rest.values())
    values, weights = [usual, *rest], [first, *((1.0 - first) * weight / total for weight in rest.values())]
    return {"any_of": values, "weights": weights}
