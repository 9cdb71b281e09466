"""The nearest layout that fits: as few settings changed as possible, and of those the fastest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, Final

from simpar.errors import SimparError
from simpar.report.serve.answer import check_size, run_numbers
from simpar.report.serve.fields import AS_WRITTEN, BY_KEY, Value
from simpar.report.serve.preview import preview
from simpar.report.serve.programs import Programs, step_of
from simpar.report.serve.state import Bases, State
from simpar.searching.abilities import ABILITIES, launched_as
from simpar.specs.scenario import Scenario

TRIES: Final = 40
"""Layouts simulated at most, each as a short step."""


@dataclass(frozen=True, slots=True)
class Nearest:
    """A layout that fits, as far from the present one as it must be.

    Attributes:
        changes: label of a control -> its value.
        state: of the page with these changes.
    """

    changes: Mapping[str, Value]
    state: State
    step_time_s: float
    device_bytes: float


def nearest(state: State, bases: Bases) -> Nearest | None:
    """The nearest layout that fits, whole steps simulated; None where none of those tried does.

    Raises:
        InputError: the state itself is wrong.
    """
    scenario = state.scenario(bases)
    numbers, lowering, tried = run_numbers(state), Programs(), 0
    for count in (1, 2, 3):
        fitting: list[tuple[float, State]] = []
        for changes in _changes(scenario, count):
            if tried >= TRIES:
                break
            changed = replace(state, values={**state.values, **changes})
            try:
                made = changed.scenario(bases)
                check_size(made)
                short = preview(made, *numbers, lowering=lowering)
            except SimparError:
                continue
            tried += 1
            if short is not None and short.short.fits:
                fitting.append((short.step_time_s, changed))
        for _, changed in sorted(fitting, key=lambda found: found[0]):
            whole = step_of(changed.scenario(bases), lowering)
            if whole.fits:
                differs = {BY_KEY[k].label: v for k, v in changed.values.items() if v != state.values.get(k)}
                return Nearest(differs, changed, whole.step_time_s, whole.worst_rank.device_bytes)
    return None


def _changes(scenario: Scenario, count: int) -> Iterator[dict[str, Any]]:
    """`count` settings changed at a time; only to what the framework can run."""
    options = _options(scenario)
    for keys in combinations(options, count):
        # The strongest value of each where several are changed; one by one every value.
        if count == 1:
            yield from ({keys[0]: value} for value in options[keys[0]])
        else:
            yield {key: options[key][-1] for key in keys}


def _options(scenario: Scenario) -> dict[str, list[Any]]:
    """Control -> values that need less memory than the present one, mildest first."""
    plan, training = scenario.plan, scenario.training
    ability = ABILITIES.get(launched_as(scenario.framework) or scenario.framework)
    can = ability.values if ability else {}
    found: dict[str, list[Any]] = {}

    def offer(key: str, axis: str, values: list[Any]) -> None:
        allowed = can.get(axis)
        kept = [value for value in values if allowed is None or value in allowed or f"{value}:core_attn" in allowed]
        if kept:
            found[key] = kept

    recompute = plan.recompute if isinstance(plan.recompute, str) else AS_WRITTEN
    modes = ["none", "selective", "full"]
    offer("recompute", "recompute", modes[modes.index(recompute) + 1 :] if recompute in modes else ["full"])
    offer("mbs", "micro_batch_size", [n for n in (training.micro_batch_size // 2, 1) if 0 < n < training.micro_batch_size])
    offer("zero", "zero_stage", [stage for stage in (1, 2, 3) if stage > plan.zero_stage])
    node = scenario.hardware.gpus_per_node
    offer("tp", "tp", [n for n in (2 * plan.tp, 4 * plan.tp, 8 * plan.tp) if n <= node])
    offer("pp", "pp", [n for n in (2 * plan.pp, 4 * plan.pp) if n <= scenario.world_size])
    offer("cp", "cp", [2 * plan.cp])
    offer("ep", "ep", [2 * plan.ep] if getattr(scenario.model, "moe", None) else [])
    nodes = scenario.cluster.num_nodes
    found["nodes"] = [2 * nodes, 4 * nodes]
    return found
