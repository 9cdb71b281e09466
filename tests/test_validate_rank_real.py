"""The steps of a GPU run on small real CPU tensors: built without storage, filled, stepped with fused updates and clipping."""

from __future__ import annotations

import gzip
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("the torch extra is not installed", allow_module_level=True)

import torch
from test_validate_rank_grid import scenario

from simpar.validation.rank_parallel import start, stop
from simpar.validation.rank_plan import rank_plan
from simpar.validation.rank_steps import Job
from simpar.validation.rank_worker import TRACED, _stages, _states, kernel_table

pytestmark = pytest.mark.torch
CASES = {
    "tp, full": ("grouped", {"tp": 2, "dp": 4, "recompute": "full"}, 0),
    "pp, last": ("grouped", {"pp": 2, "dp": 4}, 4),
    "experts": ("experts", {"dp": 8, "ep": 4}, 0),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_real_steps(name: str) -> None:
    model, degrees, rank = CASES[name]
    table: dict[str, Any] = json.loads(json.dumps(rank_plan(scenario(model, degrees), rank, layers=1).table))
    mesh = start(table, "cpu")
    try:
        stages = _stages(table, mesh, "cpu", whole=True)
        parameters = [p for s in stages for p in s.parameters()]
        assert not any(p.is_meta for p in parameters)
        job = Job(table, mesh, stages, "cpu", fused=True)
        for _ in range(2):
            job.step()
        assert all(p.grad is None for p in parameters)
        assert sum(len(o.state) for o in job.optimizers) == len(parameters)
        own = sum((p.to_local() if hasattr(p, "to_local") else p).numel() for p in parameters)
        assert _states(stages, job.optimizers)["own_parameters"] == own
        assert all(torch.isfinite(s.turns.real).all() for s in stages)
    finally:
        stop()


@pytest.mark.parametrize("packed", [False, True])
def test_kernels_of_a_trace_are_summed_by_name(tmp_path: Path, packed: bool) -> None:
    events = [{"ph": "X", "cat": "kernel", "name": "a", "ts": 0, "dur": 3.0}] * 4
    events += [{"ph": "X", "cat": "gpu_memcpy", "name": "b", "ts": 0, "dur": 100.0}]
    events += [{"ph": "X", "cat": "cpu_op", "name": "c", "dur": 9}]
    text = json.dumps({"traceEvents": [*events, {"ph": "M", "name": "x"}]}).encode()
    (tmp_path / "t").write_bytes(gzip.compress(text) if packed else text)
    rows = kernel_table(tmp_path / "t")
    assert [(r["name"], r["calls"]) for r in rows] == [("b", 1 / TRACED), ("a", 4 / TRACED)]
    assert rows[1]["seconds"] == pytest.approx(12e-6 / TRACED)
