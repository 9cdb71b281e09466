"""The shipped list of layouts for `simpar validate rank`, and the folder that measures them on another machine."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import Field

from simpar.errors import InputError, Violation
from simpar.live.block_predict import block_shapes, predictions
from simpar.live.rank import predict
from simpar.live.rank_frozen import freeze
from simpar.live.rank_plan import RankPlan, rank_plan
from simpar.live.rank_shapes import shapes_of
from simpar.specs.base import Spec, data_dir, read_toml, validate
from simpar.specs.hardware import load_hardware
from simpar.specs.scenario import Scenario, make_scenario
from simpar.step import prepare

WORKER_FILES: Final = (
    "__init__.py", "host.py", "toml.py", *(f"live/{name}.py" for name in (
        "__init__", "alive", "autograd_collectives", "bench_collectives", "bench_gemm", "bench_host", "bench_ops", "bench_shapes",
        "block_sizes", "calibrate", "collect", "device", "gpu_blocks", "gpu_probes", "intervals", "kernels", "measure",
        "profile_cpu", "profile_out", "rank_context", "rank_fake", "rank_gpu", "rank_kernels", "rank_meter", "rank_model",
        "rank_parallel", "rank_steps", "rank_worker", "store", "torch_parts",
    )),
)  # fmt: skip
"""What runs without simpar's dependencies."""


class LayoutSpec(Spec):
    """One layout of the list."""

    name: str
    what: str = ""
    model: str
    gpus: Annotated[int, Field(gt=0)]
    rank: Annotated[int, Field(ge=0)] = 0
    value: Annotated[int, Field(ge=0)] = 1
    """How much a measurement is wanted: the largest are measured first."""
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


def read_layouts(only: list[str] | None = None) -> list[Entry]:
    """The layouts of the shipped list, or those called `only`.

    Raises:
        InputError: the list or one of its layouts is wrong, or a name is not in it.
    """
    path = data_dir("validation") / "rank_layouts.toml"
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


def write_bundle(plans: list[RankPlan], folder: Path, values: dict[str, int], gpu_memory_bytes: float = math.inf) -> list[str]:
    """A folder that can be copied to a machine with torch alone: plans/, shapes.json, predictions.json and the worker's modules.

    Args:
        values: of plans, by name, where they are of the shipped list; 1 for others.
        gpu_memory_bytes: plans that are predicted to reserve more are left out.

    Returns:
        Names of the plans left out.

    Raises:
        InputError: the folder cannot be written, or no plan fits.
    """
    package = Path(__file__).resolve().parent.parent
    expected = {plan.scenario.name: predict(plan) for plan in plans}
    taken = [plan for plan in plans if expected[plan.scenario.name].reserved_bytes <= gpu_memory_bytes]
    if not taken:
        least = min(p.reserved_bytes for p in expected.values())
        rule = f"no plan fits; the smallest needs {least / 2**30:.1f} GiB"
        raise InputError([Violation("--gpu-memory", f"{gpu_memory_bytes / 2**30:.1f} GiB", rule, "give more, or cut --layers")])
    roles = [(prepare(plan.scenario, detail="op"), plan.pipeline_rank) for plan in taken]
    try:
        (folder / "plans").mkdir(parents=True, exist_ok=True)
        for plan in taken:
            name, said = plan.scenario.name, expected[plan.scenario.name]
            about = {"value": values.get(name, 1), "reserved_bytes": said.reserved_bytes, "step_s": sum(said.seconds.values())}
            (folder / "plans" / f"{name}.json").write_text(json.dumps({**plan.table, "expected": about}, indent=1))
        hardware = taken[0].scenario.cluster.hardware
        # Own scenarios are measured without what only the blocks run.
        every = {repr(shape): shape for shape in (*shapes_of(roles), *(block_shapes(hardware) if values else ()))}
        (folder / "shapes.json").write_text(json.dumps({"shapes": list(every.values()), "collectives": []}, indent=1))
        freeze(taken, folder / "predictions.json", predictions(hardware))
        for name in WORKER_FILES:
            target = folder / "simpar" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(package / name, target)
    except OSError as error:
        rule = f"cannot be written: {error.strerror or error}"
        raise InputError([Violation("--bundle", str(folder), rule, "choose another folder")]) from None
    return [plan.scenario.name for plan in plans if plan not in taken]
