"""What a question comes to: points that were tried, the one that answers it, and what it rests on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from simpar.planning.answer import Answer, Simulation, answer
from simpar.planning.steps import StepModel
from simpar.specs.planfile import make_plan


@dataclass(frozen=True, slots=True)
class Point:
    """One variant of the plan.

    Attributes:
        label: what is different, in words.
        values: the same as field -> value.
        answer: what it comes to.
        note: what was assumed for this point.
    """

    label: str
    values: dict[str, object]
    answer: Answer
    note: str = ""

    @property
    def mfu(self) -> float | None:
        """Of the first simulated step, None where the speed is given."""
        return next((estimate.mfu for _, estimate in self.answer.steps if estimate.fits), None)

    @property
    def layout(self) -> str:
        """Of the first simulated step."""
        return next((estimate.layout for _, estimate in self.answer.steps if estimate.fits), "")


@dataclass(frozen=True, slots=True)
class Study:
    """A question and its answer.

    Attributes:
        kind: solve nodes, solve checkpoint-interval, solve spares, compare, sweep, marginal.
        question, conclusion: in words.
        points: all that was tried, in order.
        chosen: index of the answering point; None when no point answers.
        numbers: the answer as name -> value.
    """

    kind: str
    question: str
    points: tuple[Point, ...]
    conclusion: str
    chosen: int | None = None
    numbers: dict[str, float] = field(default_factory=dict)


def try_point(
    table: dict[str, Any],
    steps: StepModel,
    simulation: Simulation,
    label: str,
    values: dict[str, object],
    note: str = "",
) -> Point:
    """The point of a changed raw `table`."""
    return Point(label, values, answer(make_plan(table), steps, simulation, record=False), note)
