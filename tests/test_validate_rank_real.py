"""The steps of a GPU run on small real CPU tensors: built without storage, filled, stepped with fused updates and clipping."""

from __future__ import annotations

import gzip
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("the torch extra is not installed", allow_module_level=True)

import torch
from test_validate_rank_grid import scenario as of_the_grid

from simpar.live.device import Device
from simpar.live.rank_fake import OWN, written
from simpar.live.rank_gpu import TRACED, kernel_table, on_gpu
from simpar.live.rank_parallel import start, stop
from simpar.live.rank_plan import rank_plan
from simpar.live.rank_steps import Job
from simpar.live.rank_worker import build_stages, states_of
from simpar.specs.scenario import Scenario

pytestmark = pytest.mark.torch
CASES = {
    "tp, full": ("grouped", {"tp": 2, "dp": 4, "recompute": "full"}, 1),
    "pp, last": ("grouped", {"pp": 2, "dp": 4}, 4),
    "experts": ("experts", {"dp": 8, "ep": 4}, 0),
}  # fmt: skip


def scenario(model: str, degrees: dict[str, Any]) -> Scenario:
    """The grid's on sequences of 16: a CPU without bf16 units multiplies 512 tokens for minutes."""
    found = of_the_grid(model, degrees)
    return found.model_copy(update={"training": found.training.model_copy(update={"sequence_length": 16})})


@pytest.mark.parametrize("name", CASES)
def test_real_steps(name: str) -> None:
    model, degrees, rank = CASES[name]
    table: dict[str, Any] = json.loads(json.dumps(rank_plan(scenario(model, degrees), rank, layers=1).table))
    mesh = start(table, "cpu")
    try:
        stages = build_stages(table, mesh, "cpu", whole=True)
        parameters = [p for s in stages for p in s.parameters()]
        assert not any(p.is_meta for p in parameters)
        job = Job(table, mesh, stages, "cpu", fused=True)
        for _ in range(2):
            job.step()
        assert all(p.grad is None for p in parameters)
        assert sum(len(o.state) for o in job.optimizers) == len(parameters)
        own = sum((p.to_local() if hasattr(p, "to_local") else p).numel() for p in parameters)
        assert states_of(stages, job.optimizers)["own_parameters"] == own
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
    rows, copies = kernel_table(tmp_path / "t")
    assert copies == {"copies": 0.0, "copies_s": 0.0, "copies_exposed_s": 0.0}
    assert [(r["name"], r["calls"]) for r in rows] == [("b", 1 / TRACED), ("a", 4 / TRACED)]
    assert rows[1]["seconds"] == pytest.approx(12e-6 / TRACED)


def test_copies_of_the_fake_group_are_taken_out(tmp_path: Path) -> None:
    """Two copies launched inside a gather, one of them beside a product; a third op of another thread is none of the group's."""
    events = [
        {"ph": "X", "cat": "cpu_op", "name": "c10d::_allgather_base_", "tid": 1, "ts": 100.0, "dur": 10.0},
        *({"ph": "X", "cat": "cuda_runtime", "name": "launch", "tid": tid, "ts": ts, "dur": 1.0, "args": {"correlation": c}}
          for c, tid, ts in ((1, 1, 102.0), (2, 1, 105.0), (3, 2, 103.0), (4, 1, 120.0))),
        *({"ph": "X", "cat": "kernel", "name": name, "ts": ts, "dur": 10.0, "args": {"correlation": c}}
          for c, name, ts in ((1, "copy", 200.0), (2, "copy", 215.0), (3, "gemm", 210.0), (4, "gemm", 300.0))),
    ]  # fmt: skip
    (tmp_path / "t").write_text(json.dumps({"traceEvents": events}))
    rows, copies = kernel_table(tmp_path / "t")
    assert [(r["name"], r["calls"]) for r in rows] == [("gemm", 2 / TRACED)]
    assert copies["copies"] == 2 / TRACED
    assert copies["copies_s"] == pytest.approx(20e-6 / TRACED)
    assert copies["copies_exposed_s"] == pytest.approx(15e-6 / TRACED)


@pytest.mark.gpu_path
@pytest.mark.parametrize("name", ["pp, last", "experts"])
def test_the_path_of_a_gpu_on_small_tensors(name: str, tmp_path: Path) -> None:
    """Everything of a GPU run but CUDA itself; the record is kept before the profiler starts."""
    model, degrees, rank = CASES[name]
    table: dict[str, Any] = json.loads(json.dumps(rank_plan(scenario(model, degrees), rank, layers=1).table))
    mesh, kept = start(table, "cpu"), []
    try:
        found = on_gpu(table, mesh, Device("fake"), steps=2, trace=str(tmp_path / "t.json"), keep=kept.append)
    finally:
        stop()
    assert len(kept) == 1
    assert kept[0]["step_s"] == found["step_s"]
    assert len(found["step_s"]) == len(found["host_s"]) == 2
    assert found["sdpa_backend"] in ("flash", "math")
    assert (tmp_path / "t.json").is_file()
    json.dumps(found)


@pytest.fixture
def unwritten_is_nan() -> Iterator[None]:
    """Memory that nobody wrote holds NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.gpu_path
@pytest.mark.usefixtures("unwritten_is_nan")
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n != "tp, full")) for n in CASES])
def test_data_is_random_everywhere(name: str) -> None:
    """Of tokens, targets, what neighbours would send and gradients, rows of a linear layer's input differ, nothing is NaN."""
    model, degrees, rank = CASES[name]
    table: dict[str, Any] = json.loads(json.dumps(rank_plan(of_the_grid(model, degrees), rank, layers=1, microbatches=2).table))
    mesh = start(table, "cpu")
    seen: dict[str, Any] = {}
    gradients: list[Any] = []

    def watch(name: str) -> Any:
        def look(_: Any, inputs: Any) -> None:
            given = inputs[0].to_local() if hasattr(inputs[0], "to_local") else inputs[0]
            seen.setdefault(name, given.detach().flatten(0, -2).float())

        return look

    def collect(optimizer: Any, *_: Any) -> None:
        every = (p.grad for group in optimizer.param_groups for p in group["params"])
        gradients.extend((g.to_local() if hasattr(g, "to_local") else g).clone() for g in every)

    try:
        with written("cpu"):
            stages = build_stages(table, mesh, "cpu", whole=True)
            job = Job(table, mesh, stages, "cpu", fused=True)
            job.step()
            for n, module in stages[0].named_modules():
                if isinstance(module, torch.nn.Linear):
                    module.register_forward_pre_hook(watch(n))
            for optimizer in job.optimizers:
                optimizer.register_step_pre_hook(collect)
            job.step()
        assert len(seen) >= 5
        for n, rows in seen.items():
            assert torch.isfinite(rows).all(), n
            assert (rows != 0).any(dim=-1).all(), n
            # Gathers repeat this rank's rows, of weights and activations.
            assert len(torch.unique(rows, dim=0)) > 100, n
        assert len(gradients) == len([p for s in stages for p in s.parameters()])
        assert all(torch.isfinite(g).all() and (g != 0).any() for g in gradients)
        assert job.target is None or len(torch.unique(job.target)) > 100
    finally:
        stop()


@pytest.mark.gpu_path
def test_a_rank_keeps_its_own_part() -> None:
    """Of a reduce-scatter the rank's part, of an exchange what there is; the kernels are called where torch's own write as well."""
    table: dict[str, Any] = json.loads(json.dumps(rank_plan(scenario("grouped", {"tp": 2, "dp": 4}), 3, layers=1).table))
    start(table, "cpu")
    try:
        source, out = torch.arange(16.0).view(8, 2), torch.full((1, 2), -1.0)
        group = torch.distributed.group.WORLD
        assert group is not None
        OWN["_reduce_scatter_base_"](out, source, group.boxed(), None, False)
        assert out.tolist() == [[6.0, 7.0]]
        OWN["alltoall_base_"](more := torch.zeros(9, 2), source, group.boxed(), [], [])
        assert more.tolist() == [*source.tolist(), [0.0, 0.0]]
        received = torch.zeros(64)
        torch.distributed.recv(received, 1)
        assert not received.any()
        with written("cpu"):
            torch.distributed.recv(received, 1)
            torch.distributed.reduce_scatter_tensor(out.fill_(-1.0), source)
        assert len(torch.unique(received)) == 64
        assert out.tolist() == [[6.0, 7.0]]
        torch.distributed.recv(received.zero_(), 1)
        assert not received.any()
    finally:
        stop()
