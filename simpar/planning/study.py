"""What a question comes to: points that were tried, the one that answers it, and what it rests on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from simpar.planning.answer import Answer, Simulation, answer
from simpar.planning.steps import StepEstimate, StepModel
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
    def step(self) -> StepEstimate | None:
        """The simulated step that most tokens take; None where the speed is given or nothing runs."""
        run, plan = self.answer.resolved.run, self.answer.resolved.plan
        if run is None:
            return None
        # Steps are written down in the order of the pieces that were simulated, the first stage's first.
        simulated = [piece.tokens for piece in run.stages[0].pieces if plan.phases[piece.phase].scenario is not None]
        pairs = zip(simulated, self.answer.steps, strict=False)
        return max(((tokens, estimate) for tokens, (_, estimate) in pairs), key=lambda p: p[0], default=(0, None))[1]

    @property
    def mfu(self) -> float | None:
        """Of `step`."""
        return self.step.mfu if self.step else None

    @property
    def layout(self) -> str:
        """Of `step`."""
        return self.step.layout if self.step else ""


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
