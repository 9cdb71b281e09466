"""Schedules that simpar exports run on torch.distributed.pipelining: two gloo processes lose what one process loses."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("the torch extra is not installed", allow_module_level=True)

from cluster_runs import left_over, options

from simpar.live.cluster import WORKER, config_for, layouts_of
from simpar.live.cluster_launch import launch
from simpar.live.cluster_layouts import RunLayout
from simpar.live.cluster_setup import setup_of

pytestmark = pytest.mark.torch
ROOT = Path(__file__).resolve().parent.parent
EXPORTED = "pp2-zbh1,pp2-zbh2,pp2-vhalf,pp2-vmin"
"""Schedules that torch has no class for: the ranks read simpar's CSV."""
OTHERS = "pp2,pp2-gpipe,pp2-interleaved,pp2-izb,pp2-bfs,pp2-zbv,dp2,fsdp2,tp2,tp2sp,cp2-ring,cp2-allgather,cp2-ulysses"


EXPERTS = "[model.moe]\nnum_experts = 4\nnum_experts_per_tok = 2\nmoe_intermediate_size = 32\n[cluster]"


def losses(folder: Path, layouts: str, ranks: int = 2, *, experts: bool = False) -> dict[str, list[float]]:
    """Losses of three steps by layout, one process's among them under ""."""
    chosen = options(folder, layouts, nproc=ranks, steps=2)
    if experts and chosen.scenario is not None:
        chosen.scenario.write_text(chosen.scenario.read_text().replace("[cluster]", EXPERTS))
    alone = RunLayout("moe", model="moe") if experts else RunLayout("single")
    found = layouts_of(chosen)
    setup = setup_of(chosen.scenario, found, "cpu-gloo", "fp32")
    result: dict[str, list[float]] = {}
    for names, n in ((found, ranks), ((), 1)):
        own = names or [alone]
        config = config_for(chosen, setup, own, "cpu")
        config |= {"layouts": [layout.as_json() for layout in own], "instrument": False}
        told, out = folder / f"{n}.json", folder / f"{n}.jsonl"
        told.write_text(json.dumps(config))
        if n == 1:
            # In this very process: no launch, no process group of several.
            result[""] = _alone(config, alone)
            continue
        reports = folder / "at"
        launch(WORKER, ["--config", str(told), "--out", str(out), "--reports", str(reports)], n, reports=reports, timeout_s=120.0)
        for line in out.read_text().splitlines():
            record = json.loads(line)
            if record["kind"] == "config":
                continue
            result[record["layout"]["name"]] = record["losses"]
            if record["layout"]["name"] in EXPORTED.split(","):
                assert config["schedules"][record["layout"]["name"]].startswith("0F0,")
    assert left_over(folder) == []
    return result


def _alone(config: dict[str, object], layout: RunLayout) -> list[float]:
    import torch
    import torch.distributed as dist

    from simpar.live.cluster_steps import Step
    from simpar.live.cluster_world import World

    world = World.__new__(World)
    world.config, world.rank, world.size, world.device, world._groups = config, 0, 1, torch.device("cpu"), {}  # type: ignore[assignment]
    assert not dist.is_initialized()
    step = Step(world, layout)
    return [float(step() or 0.0) for _ in range(3)]


def test_exported_schedules_train_as_one_process(tmp_path: Path) -> None:
    found = losses(tmp_path, EXPORTED)
    assert set(found) == {"", *EXPORTED.split(",")}
    for name, values in found.items():
        assert values == pytest.approx(found[""], rel=2e-5), name
    assert found[""][2] < found[""][0]


@pytest.mark.slow
def test_every_layout_trains_as_one_process(tmp_path: Path) -> None:
    found = losses(tmp_path, OTHERS)
    assert set(found) == {"", *OTHERS.split(",")}
    for name, values in found.items():
        assert values == pytest.approx(found[""], rel=1e-4), name


@pytest.mark.slow
def test_combined_layouts_train_as_one_process(tmp_path: Path) -> None:
    names = "dp2tp2,fsdp2tp2,pp2dp2,pp2tp2sp,pp2cp2-ring,dp2cp2-ulysses,pp4,pp2dp2-zbv,pp2fsdp2,pp2fsdp2-interleaved,cp2fsdp2"
    found = losses(tmp_path, names, 4)
    for name, values in found.items():
        assert values == pytest.approx(found[""], rel=1e-4), name


@pytest.mark.slow
def test_experts_beside_every_other_dimension_train_as_one_process(tmp_path: Path) -> None:
    names = "ep4dp2tp2sp,ep2dp2cp2,ep2pp2tp2sp,ep2dp2pp2,moe-dp4,moe-tp2spdp2,moe-fsdp4"
    found = losses(tmp_path, names, 4, experts=True)
    assert set(found) == {"", *names.split(",")}
    for name, values in found.items():
        assert values == pytest.approx(found[""], rel=1e-4), name


def test_ranks_need_torch_and_the_standard_library_only() -> None:
    blocked = ("typer", "pydantic", "simpy", "networkx", "plotly", "rich")
    names = "simpar.live.cluster_worker, simpar.live.cluster_world"
    code = f"import sys\nfor m in {blocked}: sys.modules[m] = None\nimport {names}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
