"""What `simpar validate rank` does: plan ranks, have a worker process measure each, compare."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simpar.errors import InputError, Violation
from simpar.live.block_predict import compare_blocks, predictions
from simpar.live.rank import Classify, Predicted, Row, compare, plan_of, published_note, read_measured
from simpar.live.rank_frozen import freeze, read_frozen, read_frozen_blocks
from simpar.live.rank_layouts import read_layouts, write_bundle
from simpar.live.rank_plan import RankPlan, rank_plan
from simpar.live.store import CalibrationError, Store
from simpar.specs.scenario import read_scenario
from simpar.units import parse

TIMEOUT_S = 1800.0
"""Of one worker; one rank on fake tensors takes seconds to minutes."""


@dataclass(frozen=True, slots=True)
class RankOptions:
    """The command's options; see cli.py."""

    scenario: Path | None = None
    scenarios: tuple[Path, ...] = ()
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
    gpu_memory: str | None = None
    predict_only: Path | None = None
    predictions: Path | None = None


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


def run(options: RankOptions, classify: Classify) -> RankReport | str:
    """The comparison, or where a bundle or predictions were to be written what was.

    Raises:
        InputError: bad options, a rank that cannot be run, a worker that failed.
    """
    _check(options)
    if options.measured is not None and options.measured.suffix == ".jsonl":
        return _blocks(options, options.measured)
    if options.measured is not None:
        files = sorted(options.measured.glob("*.json")) if options.measured.is_dir() else [options.measured]
        if not files:
            raise InputError(f"{options.measured}: no measurements (*.json)")
        found = [read_measured(path) for path in files]
        frozen = read_frozen(options.predictions) if options.predictions is not None else None
        return _report([(plan_of(m, options.hardware), m) for m in found], classify, frozen)
    plans = _plans(options)
    if options.hardware is not None:
        plans = [plan_of({"plan": plan.table}, options.hardware) for plan in plans]
    if options.predict_only is not None:
        sha256 = freeze(plans, options.predict_only, predictions(plans[0].scenario.cluster.hardware))
        return f"froze the predictions of {len(plans)} plans in {options.predict_only}, SHA-256 {sha256}"
    if options.bundle is not None:
        return _bundle(options, plans, options.bundle)
    return _report([(plan, worker(plan, options.device)) for plan in plans], classify)


def _blocks(options: RankOptions, path: Path) -> RankReport:
    """Single blocks that the collector measured, beside what was frozen of them or is predicted on a profile."""
    if not path.is_file():
        raise InputError(f"{path}: no such file; the collector writes results/blocks.jsonl")
    try:
        records = Store(path).records
    except CalibrationError as error:
        raise InputError(str(error)) from None
    if options.predictions is not None:
        expected, sha256 = read_frozen_blocks(options.predictions)
        notes = (f"predicted before it was measured: SHA-256 {sha256}",)
    elif options.hardware is not None:
        expected, notes = predictions(options.hardware), (f"predicted on {options.hardware}",)
    else:
        raise InputError(
            [Violation("--measured", str(path), "blocks are compared with a prediction", "give --predictions or --hardware")]
        )
    rows = compare_blocks(records.values(), expected)
    if not rows:
        raise InputError(f"{path}: holds no measured block; python3 -m simpar.live.collect blocks measures them")
    devices = {"blocks": next((str(r["device"]) for r in records.values() if "device" in r), "?")}
    return RankReport(tuple(rows), notes, devices)


def _bundle(options: RankOptions, plans: list[RankPlan], folder: Path) -> str:
    try:
        memory = parse(options.gpu_memory, "bytes") if options.gpu_memory else math.inf
    except ValueError as error:
        raise InputError([Violation("--gpu-memory", str(options.gpu_memory), str(error), "such as 79 GiB")]) from None
    values = {entry.spec.name: entry.spec.value for entry in read_layouts()} if options.layouts else {}
    missing = write_bundle(plans, folder, values, memory)
    left = f", without {', '.join(missing)} (more than {options.gpu_memory})" if missing else ""
    text = f"wrote {len(plans) - len(missing)} plans to {folder}{left}; there, in that folder:"
    return f"{text} python3 -m simpar.live.collect calibrate, then plans"


def _check(options: RankOptions) -> None:
    sources = [options.scenario is not None, bool(options.scenarios), options.layouts, options.measured is not None]
    if sum(sources) != 1:
        text = "give exactly one of --scenario, --scenarios, --layouts, --measured"
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
    if options.scenarios:
        found = [read_scenario(path, list(options.overrides)) for path in options.scenarios]
        names = [s.name for s in found]
        if len(set(names)) < len(names):
            raise InputError([Violation("--scenarios", ", ".join(names), "names must differ: results go by them", "rename one")])
        return [rank_plan(s, options.rank, options.layers, options.microbatches) for s in found]
    return [entry.plan(options.layers, options.microbatches) for entry in read_layouts(only=list(options.only))]


def worker(plan: RankPlan, device: str) -> dict[str, Any]:
    """Measure a plan in a process of its own.

    Raises:
        InputError: the worker could not, with its reason.
    """
    with tempfile.TemporaryDirectory(prefix="simpar-rank-") as folder:
        source, target = Path(folder) / "plan.json", Path(folder) / "measured.json"
        source.write_text(json.dumps(plan.table))
        words = [sys.executable, "-m", "simpar.live.rank_worker", "--device", device]
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


def _report(
    pairs: list[tuple[RankPlan, dict[str, Any]]], classify: Classify, frozen: tuple[dict[str, Predicted], str] | None = None
) -> RankReport:
    rows: list[Row] = []
    notes: list[str] = []
    devices: dict[str, str] = {}
    for plan, measured in pairs:
        name = plan.scenario.name
        if frozen is not None and name not in frozen[0]:
            raise InputError(f"{name}: nothing was predicted of it before; --predictions holds {', '.join(sorted(frozen[0]))}")
        own = compare(plan, measured, classify, frozen[0][name] if frozen else None)
        rows += own
        devices[name] = f"{measured['device']}, torch {measured['torch']}, {measured['wall_s']:.1f} s"
        notes += [f"{name}: {note}" for note in (*plan.notes, *published_note(own))]
    notes += [f"predicted before it was measured: SHA-256 {frozen[1]}"] if frozen else []
    return RankReport(tuple(rows), tuple(notes), devices)
