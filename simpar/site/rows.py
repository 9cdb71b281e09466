"""Rows of a cluster's own runs: published-style rows, or a scenario and what it measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from simpar.errors import InputError
from simpar.evidence.row_values import read_values
from simpar.evidence.run_files import is_stored
from simpar.evidence.run_rows import measured_of, read_rows, run_of
from simpar.evidence.run_type import Run
from simpar.specs.catalog import scenario_path
from simpar.specs.open_values import choices, open_fields
from simpar.specs.scenario import make_scenario, read_table


def runs_in(paths: Iterable[Path], hardware: str | None = None) -> list[Run]:
    """Every run of the JSON-lines files.

    Args:
        hardware: a profile (one that `simpar calibrate` wrote) to take for the machines of all runs.

    Raises:
        InputError: a file that is missing or unreadable.
    """
    found = [run_at(row, name, path) for path in paths for name, row in read_rows(path)]
    return found if hardware is None else [_on(run, hardware) for run in found]


def run_at(row: Mapping[str, Any], name: str, beside: Path | None = None) -> Run:
    """A row as a run: one with `scenario` (a file, relative to `beside`, a shipped name or a raw table) is that scenario."""
    if "scenario" not in row or is_stored(row):
        return run_of(row, name)
    values = read_values({key: value for key, value in row.items() if key != "scenario"})
    measured, name = measured_of(values.row), str(row.get("id") or name)
    empty = Run(name, {}, measured, None, "", str(row.get("exclude") or ""), (), dict(row))
    try:
        table, file = _table(row["scenario"], beside)
        fields = open_fields(table, file)
        scenario = make_scenario(choices(table, fields, file)[0].table, file=file)
    except InputError as error:
        return replace(empty, skipped=f"not a valid scenario: {str(error).splitlines()[0]}")
    group = {"source": str(row.get("source") or ""), "model_name": scenario.name, "n_gpus": scenario.world_size}
    skipped = "" if measured.anything else "nothing measured"
    return replace(empty, group=group, scenario=scenario, skipped=skipped, table=table)


def _table(given: object, beside: Path | None) -> tuple[dict[str, Any], str]:
    if isinstance(given, Mapping):
        return {k: v for k, v in given.items() if k != "file"}, str(given.get("file", ""))
    if not isinstance(given, str):
        raise InputError(f"scenario {given!r}: a file, a name or a table")
    near = beside.parent / given if beside is not None else Path(given)
    path = near if near.is_file() else scenario_path(given)
    return read_table(path), str(path)


def _on(run: Run, hardware: str) -> Run:
    """`run` on another profile of its machine."""
    if run.scenario is None or run.table is None:
        return run
    table = {**run.table, "cluster": {**run.table["cluster"], "hardware": hardware}}
    try:
        usual = choices(table, open_fields(table))[0].table
        return replace(run, table=table, scenario=make_scenario(usual, file=run.scenario.file))
    except InputError as error:
        return replace(run, skipped=f"not a valid scenario on {hardware}: {str(error).splitlines()[0]}", scenario=None)


__all__ = ["run_at", "runs_in"]
