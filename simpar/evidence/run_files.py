"""Stored runs: one JSON object a line, the run as a scenario with its figures. The files of `validation/runs` are such files.

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
from dataclasses import asdict, fields
from typing import Any, Final, Literal

from simpar.evidence.row_open import filled, hidden, keeping, with_sets
from simpar.evidence.run_type import Measured, Run
from simpar.specs.scenario import make_scenario

Use = Literal["fit", "test"]
KEYS: Final = ("scenario", "measured")
"""What tells a stored run from a flat row."""


def is_stored(raw: Mapping[str, Any]) -> bool:
    """Whether `raw` is a stored run."""
    return all(key in raw for key in KEYS)


def as_stored(run: Run, use: Use) -> dict[str, Any]:
    """`run`, read from a flat row, as the object that a file holds."""
    row = run.row
    found: dict[str, Any] = {"id": run.id, "where": row.get("source_ref"), "url": row.get("source_url"), "use": use}
    found |= {"version": row.get("source_version"), "exclude": run.excluded or None, "skipped": run.skipped or None}
    found |= {"group": run.group, "measured": _given(asdict(run.measured)), "scenario": None}
    found["measured"] |= {"kind": row.get("mem_kind")} if run.measured.peak_memory_bytes else {}
    if run.usual is not None:
        scenario, usual = hidden(run.usual, run.open_facts)
        found |= {"scenario": _given(scenario), "usual": usual or None}
        found |= {"assumed": list(run.assumptions) or None, "inferred": list(row.get("assumed") or ()) or None}
    return {key: value for key, value in found.items() if value is not None or key == "scenario"}


def _given(table: dict[str, Any]) -> dict[str, Any]:
    """`table` without what says nothing."""
    return {key: value for key, value in table.items() if value not in (None, "")}


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
