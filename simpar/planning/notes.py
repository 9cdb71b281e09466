"""What is found out while a plan is resolved: assumptions, and reasons why it is held back."""

from __future__ import annotations

from dataclasses import dataclass, field

from simpar.planning.steps import StepEstimate


@dataclass(frozen=True, slots=True)
class Assumption:
    """A number the answer rests on, and how it is known: given, published, derived, measured, simulated or assumed."""

    name: str
    value: str
    kind: str
    source: str


def kind_of(source: str) -> str:
    """How a number of the plan file is known, by the first word of its source; "given" without one."""
    first = source.split(":")[0].strip().lower()
    if first in ("assumed", "recalled"):
        return "assumed"
    return "derived" if first == "derived" else "published" if source else "given"


@dataclass(slots=True)
class Notes:
    """Collected on the way; `feasible` turns False with the first impossibility."""

    assumptions: list[Assumption] = field(default_factory=list)
    binding: list[str] = field(default_factory=list)
    steps: list[tuple[str, StepEstimate]] = field(default_factory=list)
    feasible: bool = True
    parameters: float | None = None

    def assume(self, name: str, value: object, source: str, kind: str = "assumed") -> None:
        """Write an assumption down."""
        self.assumptions.append(Assumption(name, str(value), kind, source))

    def impossible(self, reason: str) -> None:
        """The plan cannot run, because of `reason`."""
        self.feasible = False
        self.binding.append(reason)
