"""Rows of a cluster's own runs: published-style rows, or a scenario and what it measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from simpar.errors import InputError
from simpar.evidence.row_values import read_values
from simpar.evidence.run_files import is_stored
from simpar.evidence.run_rows import GROUP_KEYS, measured_of, read_rows, run_of
from simpar.evidence.run_type import Run
from simpar.specs.catalog import scenario_path
from simpar.specs.open_values import choices, open_fields
from simpar.specs.scenario import make_scenario, read_table


def runs_in(paths: Iterable[Path], hardware: str | None = None) -> list[Run]:
    """Every run of the JSON-lines files.

    Args:
        hardware: a profile (one that `simpar calibrate` wrote) to take for the machines of all runs.

    Raises:
        InputError: a file that is missing, unreadable or without a row.
    """
    found: list[Run] = []
    for path in paths:
        rows = [run_at(located(row, path), name) for name, row in read_rows(path)]
        if not rows:
            raise InputError(f"{path}: no run in it; expected lines of `simpar run read`, or rows of scenario and step_time_s")
        found += rows
    return found if hardware is None else [_on(run, hardware) for run in found]


def run_at(row: Mapping[str, Any], name: str) -> Run:
    """A row as a run: one with `scenario` (a file, a shipped name or a raw table) is that scenario; nothing it holds raises."""
    if "scenario" not in row or is_stored(row):
        return run_of(row, name)
    values = read_values({key: value for key, value in row.items() if key != "scenario"})
    measured, name = measured_of(values.row), str(row.get("id") or name)
    empty = Run(name, {}, measured, None, "", str(row.get("exclude") or ""), (), dict(row))
    try:
        table, file = _table(row["scenario"])
        fields = open_fields(table, file)
        scenario = make_scenario(choices(table, fields, file)[0].table, file=file)
    except InputError as error:
        return replace(empty, skipped=f"not a valid scenario: {str(error).splitlines()[0]}")
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        return replace(empty, skipped=f"a field has an unexpected value: {error}")
    group = {"source": "", "model_name": scenario.name, "n_gpus": scenario.world_size}
    group |= {key: value for key in GROUP_KEYS if isinstance(value := values.row.get(key), str | int | float)}
    skipped = "" if measured.anything else "nothing measured"
    return replace(empty, group=group, scenario=scenario, skipped=skipped, table=table)


def located(row: dict[str, Any], runs: Path) -> dict[str, Any]:
    """`row` of the file or folder `runs`, with its scenario's file in full where that lies beside it."""
    given = row.get("scenario")
    near = (runs if runs.is_dir() else runs.parent) / given if isinstance(given, str) else None
    return {**row, "scenario": str(near.resolve())} if near is not None and near.is_file() else row


def _table(given: object) -> tuple[dict[str, Any], str]:
    if isinstance(given, Mapping):
        return {k: v for k, v in given.items() if k != "file"}, str(given.get("file", ""))
    if not isinstance(given, str):
        raise InputError(f"scenario {given!r}: a file, a name or a table")
    path = Path(given) if Path(given).is_file() else scenario_path(given)
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


__all__ = ["located", "run_at", "runs_in"]
