"""The shipped list of layouts for `simpar validate rank`, and the folder that measures them on another machine."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import Field

from simpar.errors import InputError, Violation
from simpar.specs.base import Spec, data_dir, read_toml, validate
from simpar.specs.hardware import load_hardware
from simpar.specs.scenario import Scenario, make_scenario
from simpar.validation.rank_plan import RankPlan, rank_plan

WORKER_FILES: Final = (
    "__init__.py", "host.py", "validation/__init__.py", "validation/rank_context.py", "validation/rank_kernels.py",
    "validation/rank_meter.py", "validation/rank_model.py", "validation/rank_parallel.py", "validation/rank_steps.py",
    "validation/rank_worker.py", "calibration/__init__.py", "calibration/__main__.py", "calibration/bench_collectives.py",
    "calibration/bench_gemm.py", "calibration/bench_host.py", "calibration/bench_ops.py", "calibration/bench_shapes.py",
    "calibration/measure.py", "calibration/profile_cpu.py", "calibration/profile_out.py", "calibration/store.py",
)  # fmt: skip
"""What runs without simpar's dependencies."""
MEASURE: Final = """#!/bin/sh
# Calibrates this machine's GPU and measures every plan beside this file; needs python3 with torch and numpy, nothing else.
# Go on where it stopped: start it again. Everything to take home is results.tar.gz.
#   sh measure.sh [seconds for the calibration] [seconds after which no further plan starts] [device]
cd "$(dirname "$0")" || exit 2
[ "${3:-cuda}" = fake ] && on=cpu || on=cuda
touch calibration.jsonl
python3 -m simpar.calibration --resume calibration.jsonl --budget "${1:-120}s" --device $on
first=$?
python3 -m simpar.validation.rank_worker --plan plans --out measured --device "${3:-cuda}" --within "${2:-420}"
second=$?
tar czf results.tar.gz calibration.jsonl measured/*.json
exit $((first > second ? first : second))
"""


class LayoutSpec(Spec):
    """One layout of the list."""

    name: str
    what: str = ""
    model: str
    gpus: Annotated[int, Field(gt=0)]
    rank: Annotated[int, Field(ge=0)] = 0
    layers: Annotated[int, Field(gt=0)] | None = None
    """Per pipeline stage; none = the model's."""
    plan: dict[str, Any] = Field(default_factory=dict)
    training: dict[str, Any]


class DefaultsSpec(Spec):
    """Of all layouts of a list."""

    hardware: str
    framework: str
    framework_version: str


class ListSpec(Spec):
    """A list of layouts."""

    defaults: DefaultsSpec
    layout: tuple[LayoutSpec, ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """A layout of the list, ready to plan."""

    spec: LayoutSpec
    scenario: Scenario

    def plan(self, layers: int | None = None, microbatches: int | None = None) -> RankPlan:
        """Its rank; `layers` overrides the list's."""
        return rank_plan(self.scenario, self.spec.rank, layers or self.spec.layers, microbatches)


def read_layouts(path: Path | None = None, only: list[str] | None = None) -> list[Entry]:
    """The layouts of the list at `path` (none: the shipped one), or those called `only`.

    Raises:
        InputError: the list or one of its layouts is wrong, or a name is not in it.
    """
    path = path or data_dir("validation") / "rank_layouts.toml"
    found = validate(ListSpec, read_toml(path), file=str(path))
    names = [spec.name for spec in found.layout]
    right = f"choose of {', '.join(names)}"
    missing = [Violation("--only", n, "is not in the list", right, str(path)) for n in only or [] if n not in names]
    if missing:
        raise InputError(missing)
    return [_entry(spec, found.defaults, path) for spec in found.layout if not only or spec.name in only]


def _entry(spec: LayoutSpec, defaults: DefaultsSpec, path: Path) -> Entry:
    per_node = load_hardware(defaults.hardware).gpus_per_node
    cluster = {"hardware": defaults.hardware, "num_nodes": -(-spec.gpus // per_node), "num_gpus": spec.gpus}
    table = {
        "name": spec.name, "description": spec.what, "model": spec.model, "framework": defaults.framework,
        "framework_version": defaults.framework_version, "cluster": cluster, "plan": {"zero_stage": 3, **spec.plan},
        "training": spec.training,
    }  # fmt: skip
    return Entry(spec, make_scenario(table, file=str(path)))


def write_bundle(plans: list[RankPlan], folder: Path) -> None:
    """A folder that can be copied to a machine with torch alone: plans/, the worker's modules and measure.sh, which runs all.

    Raises:
        InputError: the folder cannot be written.
    """
    package = Path(__file__).resolve().parent.parent
    try:
        (folder / "plans").mkdir(parents=True, exist_ok=True)
        for plan in plans:
            (folder / "plans" / f"{plan.scenario.name}.json").write_text(json.dumps(plan.table, indent=1))
        for name in WORKER_FILES:
            target = folder / "simpar" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(package / name, target)
        (folder / "measure.sh").write_text(MEASURE)
    except OSError as error:
        rule = f"cannot be written: {error.strerror or error}"
        raise InputError([Violation("--bundle", str(folder), rule, "choose another folder")]) from None
