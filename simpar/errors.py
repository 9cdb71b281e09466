"""The errors simpar raises.

    SimparError
    +-- InputError      something the user wrote is wrong: one message, exit code 2
    |   +-- UnknownNameError   a name that no registry holds
    +-- DeadlockError   a program whose ops wait for each other: names the cycle
    +-- InternalError   simpar contradicts itself: a bug, exit code 3

A layout that does not fit or cannot run well is a *result*, never an exception.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_MOST_SHOWN = 400
"""Characters of a wrong value in a message."""


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken rule: where it stands, the value found, the rule, and what would be right."""

    field: str
    value: object
    rule: str
    right: str = ""
    file: str = ""

    def __str__(self) -> str:
        where = f"{self.file}: {self.field}" if self.file else self.field
        value = repr(self.value)
        shown = value if len(value) <= _MOST_SHOWN else f"{value[: _MOST_SHOWN - 20]}... ({len(value)} characters)"
        absent = self.value is None and self.rule.startswith("is required")
        text = f"{where}: {self.rule}" if absent else f"{where} = {shown}: {self.rule}"
        return f"{text}; {self.right}" if self.right else text


class SimparError(Exception):
    """Base of every error simpar raises on purpose."""

    exit_code = 3


class InputError(SimparError):
    """The input breaks one or more rules; all of them are listed together."""

    exit_code = 2

    def __init__(self, violations: Sequence[Violation] | str) -> None:
        # Two readers of one field say the same once.
        found = {} if isinstance(violations, str) else {str(v): v for v in violations}
        self.violations: tuple[Violation, ...] = tuple(found.values())
        super().__init__(violations if isinstance(violations, str) else "\n".join(found))


class UnknownNameError(InputError):
    """A name that the registry asked does not hold; lists the known ones and the closest."""


class DeadlockError(SimparError):
    """Ops that wait for each other in a cycle."""

    exit_code = 2

    def __init__(self, cycle: Sequence[str]) -> None:
        self.cycle = tuple(cycle)
        super().__init__("the program deadlocks: " + " -> ".join([*self.cycle, self.cycle[0]]))


class InternalError(SimparError):
    """simpar contradicts itself; please report it."""
