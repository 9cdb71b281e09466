"""Where step times come from: a small protocol that the planner asks, and the simulator behind it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from simpar.specs.scenario import Scenario


@dataclass(frozen=True, slots=True)
class StepEstimate:
    """One training step of a scenario, as the planner needs it.

    Attributes:
        step_time_s, low_s, high_s: the point estimate and its 80 % interval.
        fits: it runs at all; otherwise `reasons` says why not and the times are infinite.
        parameters: of the model, for the size of a checkpoint.
        mfu: model FLOPs utilisation.
        utilisation: share of the step in which a stream is busy, by stream kind ("compute", "communication").
        layout: the layout in words.
        provenance: the worst evidence behind the time.
        found: where the layout was searched, how good it is known to be, and `scenario` the scenario with it.
    """

    step_time_s: float
    low_s: float
    high_s: float
    parameters: float
    fits: bool = True
    reasons: tuple[str, ...] = ()
    mfu: float | None = None
    utilisation: Mapping[str, float] = field(default_factory=dict)
    layout: str = ""
    provenance: str = "assumed"
    found: str = ""
    scenario: Scenario | None = None

    def tokens_per_s(self, scenario: Scenario) -> float:
        """Throughput of the whole cluster."""
        return scenario.training.global_batch_size * scenario.training.sequence_length / self.step_time_s


class StepModel(Protocol):
    """Answers for scenarios; infeasible ones get an estimate with fits = False, never an exception."""

    def estimate(self, scenario: Scenario) -> StepEstimate:
        """The step of this scenario as it is laid out."""
        ...

    def best_layout(self, scenario: Scenario) -> StepEstimate:
        """The step under the fastest layout that fits this scenario's model, cluster and batch."""
        ...


@dataclass(frozen=True, slots=True)
class Searched:
    """What a layout search found for a scenario.

    Attributes:
        scenario: with its best layout; None where none runs, and `reasons` says why.
        layout: in words.
        note: how good it is known to be.
    """

    scenario: Scenario | None
    layout: str = ""
    reasons: tuple[str, ...] = ()
    note: str = ""


Search = Callable[[Scenario], Searched]
"""Finds the best layout for a scenario's model, cluster and batch; the layout as written does not matter."""


def infeasible(*reasons: str) -> StepEstimate:
    """The estimate of a scenario that cannot run."""
    return StepEstimate(float("inf"), float("inf"), float("inf"), 0.0, fits=False, reasons=reasons)
