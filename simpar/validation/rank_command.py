"""What `simpar validate rank` does: plan ranks, have a worker process measure each, compare."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simpar.errors import InputError, Violation
from simpar.specs.scenario import read_scenario
from simpar.validation.rank import Classify, Row, compare, plan_of, read_measured
from simpar.validation.rank_layouts import read_layouts, write_bundle
from simpar.validation.rank_plan import RankPlan, rank_plan

TIMEOUT_S = 1800.0
"""Of one worker; one rank on fake tensors takes seconds to minutes."""


@dataclass(frozen=True, slots=True)
class RankOptions:
    """The command's options; see cli.py."""

    scenario: Path | None = None
    rank: int = 0
    layers: int | None = None
    microbatches: int | None = None
    overrides: tuple[str, ...] = ()
    layouts: bool = False
    only: tuple[str, ...] = ()
    device: str = "auto"
    measured: Path | None = None
    hardware: str | None = None
    bundle: Path | None = None


@dataclass(frozen=True, slots=True)
class RankReport:
    """What was compared.

    Attributes:
        rows: of all ranks.
        notes: what was changed or assumed, by layout.
        devices: layout -> what it ran on.
    """

    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    devices: dict[str, str]

    @property
    def exit_code(self) -> int:
        """1 where a figure is outside its tolerance."""
        return 0 if all(row.within for row in self.rows) else 1


def run(options: RankOptions, classify: Classify) -> RankReport | None:
    """The comparison, or nothing where a bundle was to be written.

    Raises:
        InputError: bad options, a rank that cannot be run, a worker that failed.
    """
    _check(options)
    if options.measured is not None:
        files = sorted(options.measured.glob("*.json")) if options.measured.is_dir() else [options.measured]
        if not files:
            raise InputError(f"{options.measured}: no measurements (*.json)")
        found = [read_measured(path) for path in files]
        return _report([(plan_of(m, options.hardware), m) for m in found], classify)
    plans = _plans(options)
    if options.bundle is not None:
        write_bundle(plans, options.bundle)
        return None
    return _report([(plan, worker(plan, options.device)) for plan in plans], classify)


def _check(options: RankOptions) -> None:
    sources = [options.scenario is not None, options.layouts, options.measured is not None]
    if sum(sources) != 1:
        text = "give exactly one of --scenario, --layouts, --measured"
        raise InputError([Violation("validate rank", "nothing" if not any(sources) else "several", text)])
    if options.device not in ("auto", "cuda", "fake"):
        raise InputError([Violation("--device", options.device, "no such device", "choose auto, cuda or fake")])
    for name, value in (("--layers", options.layers), ("--microbatches", options.microbatches)):
        if value is not None and value < 1:
            raise InputError([Violation(name, value, "must be at least 1")])


def _plans(options: RankOptions) -> list[RankPlan]:
    if options.scenario is not None:
        scenario = read_scenario(options.scenario, list(options.overrides))
        return [rank_plan(scenario, options.rank, options.layers, options.microbatches)]
    return [entry.plan(options.layers, options.microbatches) for entry in read_layouts(only=list(options.only))]


def worker(plan: RankPlan, device: str) -> dict[str, Any]:
    """Measure a plan in a process of its own.

    Raises:
        InputError: the worker could not, with its reason.
    """
    with tempfile.TemporaryDirectory(prefix="simpar-rank-") as folder:
        source, target = Path(folder) / "plan.json", Path(folder) / "measured.json"
        source.write_text(json.dumps(plan.table))
        words = [sys.executable, "-m", "simpar.validation.rank_worker", "--device", device]
        words += ["--plan", str(source), "--out", str(target)]
        try:
            found = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            raise InputError(f"{plan.scenario.name}: the rank took longer than {TIMEOUT_S:.0f} s; try --layers 2") from None
        if found.returncode or not target.is_file():
            lines = [line for line in found.stderr.splitlines() if line.strip()]
            reason = lines[-1].removeprefix("rank_worker: ") if lines else f"exit code {found.returncode}"
            raise InputError(f"{plan.scenario.name}: the rank could not be run: {reason}")
        return read_measured(target)


def _report(pairs: list[tuple[RankPlan, dict[str, Any]]], classify: Classify) -> RankReport:
    rows: list[Row] = []
    notes: list[str] = []
    devices: dict[str, str] = {}
    for plan, measured in pairs:
        rows += compare(plan, measured, classify)
        name = plan.scenario.name
        devices[name] = f"{measured['device']}, torch {measured['torch']}, {measured['wall_s']:.1f} s"
        notes += [f"{name}: {note}" for note in plan.notes]
    return RankReport(tuple(rows), tuple(notes), devices)
