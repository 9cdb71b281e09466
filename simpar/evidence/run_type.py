"""A measured run: what was run, as a scenario, and what was measured; and stored runs, one JSON object a line, as the files of
`validation/runs` hold them.

    {"id": ..., "where": ..., "url": ..., "use": "fit", "group": {"source": ..., "gpu": ..., ...}, "scenario": {...},
     "usual": {"plan.recompute": "full"}, "assumed": [...], "measured": {"step_time_s": 1.2, ...}}

A fact that the source does not state is `{"unknown": true}` in the scenario, or `{"any_of": [...]}` where it can be these alone;
`usual` holds what its framework did then. A run that simpar cannot express has `skipped`, the reason, in place of its scenario;
`exclude` is the reason why a run does not count. What is not printed but follows from the source's other files is named in
`inferred`, what rules filled in, in `assumed`.
`python validation/tools/store_runs.py` writes them from flat rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, Literal

from simpar.evidence.predicted import BubbleOf, Prediction, memory_of
from simpar.evidence.row_open import filled, keeping, with_sets
from simpar.specs.scenario import Scenario, make_scenario

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


KEYS: Final = ("scenario", "measured")
"""What tells a stored run from a flat row."""


def is_stored(raw: Mapping[str, Any]) -> bool:
    """Whether `raw` is a stored run."""
    return all(key in raw for key in KEYS)


def stored_run(raw: Mapping[str, Any], fallback_id: str) -> Run:
    """`raw`, a stored run, read.

    Raises:
        InputError: its scenario breaks a rule.
        TypeError, ValueError, KeyError, AttributeError: a value of another kind.
    """
    known = {field.name for field in fields(Measured)}
    measured = Measured(**{key: value for key, value in dict(raw["measured"]).items() if key in known})
    group, usual = dict(raw.get("group") or {}), dict(raw.get("usual") or {})
    run = Run(
        id=str(raw.get("id") or fallback_id), group=group, measured=measured, scenario=None, skipped=str(raw.get("skipped") or ""),
        excluded=str(raw.get("exclude") or ""), assumptions=tuple(raw.get("assumed") or ()), row={**raw, **group},
    )  # fmt: skip
    if raw["scenario"] is None:
        return run
    table = filled(raw["scenario"], usual)
    sets = keeping(with_sets(table, usual), raw["scenario"], usual)
    return run.expressed(make_scenario(table), table, tuple(usual), sets)
