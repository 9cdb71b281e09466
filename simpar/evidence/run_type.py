"""A measured run: what was run, as a scenario, and what was measured."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from simpar.evidence.predicted import BubbleOf, Prediction, memory_of
from simpar.specs.scenario import Scenario

MemoryKind = Literal["allocated", "reserved", "device", "first_step", "band"]
"""What a memory figure counts: live bytes, reserved bytes, all that the process holds, or one of the first two."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What a run measured.

    Attributes:
        step_time_s: seconds per step.
        step_time_from: how it follows from what is printed.
        peak_memory_bytes, memory_kind: peak of the worst rank (or the logging rank) and what it counts.
        memory_first_rank: the figure is the first pipeline rank's, not the worst's.
        bubble_fraction: idle share of the pipeline.
        bubble_of: whose idling it counts.
        out_of_memory: whether the run is labelled as out of memory (None: not labelled).
    """

    step_time_s: float | None = None
    step_time_from: str = ""
    peak_memory_bytes: float | None = None
    memory_kind: MemoryKind = "band"
    memory_first_rank: bool = False
    bubble_fraction: float | None = None
    bubble_of: BubbleOf = "all"
    out_of_memory: bool | None = None

    @property
    def anything(self) -> bool:
        """Whether the row measured anything at all."""
        values = (self.step_time_s, self.peak_memory_bytes, self.bubble_fraction, self.out_of_memory)
        return any(value is not None for value in values)

    def peaks(self, found: Prediction) -> tuple[float, float] | None:
        """(The measured peak, what is predicted for it) in bytes; None where none was measured.

        A figure that counts allocated or reserved bytes, without saying which, is as predicted anywhere between the two.
        """
        measured = self.peak_memory_bytes
        if measured is None:
            return None
        peak, _, _, band = memory_of(found, self.memory_kind, first_rank=self.memory_first_rank)
        return measured, peak if band is None else min(max(measured, band[0]), band[1])


@dataclass(frozen=True, slots=True)
class Run:
    """A row read: its scenario or the reason there is none.

    Attributes:
        id: the row's, or file:line.
        group: the row's own identifying keys.
        measured: what the row measured.
        scenario: None when it cannot be expressed.
        skipped: the reason, "" when there is a scenario.
        excluded: the data's own reason to leave the row out, "" when there is none.
        assumptions: everything filled in by rules.
        row: the row as read, its values in their types, completed.
        usual: the scenario's table, what the row leaves open as its framework did then.
        open_facts: fields of it that the row leaves open.
        table: the scenario's table with what the row leaves open as sets of values.
    """

    id: str
    group: dict[str, Any]
    measured: Measured
    scenario: Scenario | None
    skipped: str
    excluded: str
    assumptions: tuple[str, ...]
    row: dict[str, Any]
    usual: dict[str, Any] | None = field(default=None, repr=False)
    open_facts: tuple[str, ...] = ()
    table: dict[str, Any] | None = field(default=None, repr=False)

    def expressed(self, scenario: Scenario, usual: dict[str, Any], open_facts: tuple[str, ...], table: dict[str, Any]) -> Run:
        """The run with its scenario."""
        return replace(self, scenario=scenario, usual=usual, open_facts=open_facts, table=table)
