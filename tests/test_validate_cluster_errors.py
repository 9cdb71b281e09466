"""What goes wrong in real runs: one message, exit code 2, no process left, measurements kept. `pytest -m slow` runs them all."""

from __future__ import annotations

import importlib.util
import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("the torch extra is not installed", allow_module_level=True)

from cluster_runs import left_over, options

from simpar.errors import InputError
from simpar.live.cluster import WORKER, device_of, run
from simpar.live.cluster_launch import ClusterError, Rendezvous, launch

pytestmark = pytest.mark.torch


def fails(folder: Path, layouts: str, fault: dict[str, Any], **more: Any) -> str:
    """The message of a run in which something goes wrong."""
    with pytest.raises(ClusterError) as caught:
        run(options(folder, layouts, fault=fault, **more))
    assert caught.value.exit_code == 2
    assert left_over(folder) == []
    return str(caught.value)


@pytest.mark.slow
def test_rank_that_raises_is_named_and_the_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    fault = {"rank": 1, "at": "build", "how": "raise", "layout": "tp2"}
    message = fails(tmp_path, "dp2,tp2", fault)
    assert "rank 1 failed at layout tp2: RuntimeError: a fault that a test asked for" in message
    assert f"go on with --store {tmp_path / 'kept.jsonl'}" in message
    kept = tmp_path / "kept.2.runs.jsonl"
    before = kept.read_text()
    assert [json.loads(line)["layout"]["name"] for line in before.splitlines()[1:]] == ["single", "tiny", "dp2"]
    assert run(options(tmp_path, "dp2,tp2")) is not None
    assert kept.read_text().startswith(before)
    assert json.loads(kept.read_text().splitlines()[-1])["layout"]["name"] == "tp2"


@pytest.mark.slow
def test_rank_that_exits(tmp_path: Path) -> None:
    message = fails(tmp_path, "dp2", {"rank": 1, "at": "step 0", "how": "exit"})
    assert "rank 1 ended with exit code 3 at layout dp2" in message


@pytest.mark.slow
def test_rank_that_hangs(tmp_path: Path) -> None:
    message = fails(tmp_path, "dp2", {"rank": 1, "at": "build", "how": "hang", "layout": "dp2"}, timeout_s=6.0)
    assert "rank 1 hangs at layout dp2" in message
    assert "--timeout" in message


@pytest.mark.slow
def test_rank_that_runs_out_of_memory(tmp_path: Path) -> None:
    message = fails(tmp_path, "dp2", {"rank": 0, "at": "build", "how": "oom", "layout": "dp2"})
    assert "rank 0 ran out of memory at layout dp2" in message


@pytest.mark.slow
def test_master_that_cannot_be_reached(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    message = fails(tmp_path, "dp2", {}, nproc=1, meet=Rendezvous(2, 1, f"127.0.0.1:{port}"), timeout_s=5.0)
    assert f"the master 127.0.0.1:{port} was not reached" in message


@pytest.mark.slow
def test_ranks_without_nccl(tmp_path: Path) -> None:
    import torch

    if torch.distributed.is_nccl_available():
        pytest.skip("this torch has NCCL")
    run(options(tmp_path, "dp2", write_config=tmp_path / "c.json"))
    config = json.loads((tmp_path / "c.json").read_text())
    (tmp_path / "c.json").write_text(json.dumps({**config, "device": "cuda"}))
    arguments = ["--config", str(tmp_path / "c.json"), "--out", str(tmp_path / "r.jsonl"), "--reports", str(tmp_path / "at")]
    with pytest.raises(ClusterError, match=r"this torch has no NCCL.*--device cpu"):
        launch(WORKER, arguments, 2, reports=tmp_path / "at", timeout_s=60.0)
    assert left_over(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_launcher_that_is_killed_takes_its_ranks_along(tmp_path: Path, how: signal.Signals) -> None:
    given = options(tmp_path, "dp2")
    command = [sys.executable, "-m", "simpar.cli", "validate", "cluster", "--nproc", "2", "--layouts", "dp2", "--steps", "100000",
               "--scenario", str(given.scenario), "--profile", "cpu-gloo", "--store", str(given.store)]  # fmt: skip
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60.0
    while not (tmp_path / "kept.2.ranks" / "rank1.json").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert len(left_over(tmp_path)) >= 3
    process.send_signal(how)
    process.wait(30.0)
    while left_over(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left_over(tmp_path) == []


def test_missing_nccl_is_told_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    with pytest.raises(InputError, match="no NCCL"):
        device_of(options(tmp_path, "dp2", device="cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(InputError, match="torch sees 1 GPUs, 2 processes need one each"):
        device_of(options(tmp_path, "dp2", device="cuda"))


def test_layouts_that_need_more_processes(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"fewer processes than the layouts need: tp4 needs 4, dp2pp4 needs 8; give --nproc 8"):
        run(options(tmp_path, "dp2,tp4,dp2pp4"))


def test_store_of_another_model_is_refused(tmp_path: Path) -> None:
    first = options(tmp_path, "dp2", write_config=tmp_path / "c.json")
    run(first)
    config = json.loads((tmp_path / "c.json").read_text())
    config["training"]["transformer"]["sequence_length"] = 8
    (tmp_path / "kept.2.runs.jsonl").write_text(json.dumps(config) + "\n")
    with pytest.raises(InputError, match="measured with another model"):
        run(options(tmp_path, "dp2"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nproc": 0}, "--nproc"),
        ({"tolerance": 0.0}, "--tolerance"),
        ({"device": "tpu"}, "choose auto, cpu or cuda"),
        ({"layouts": "dp2tp"}, "is no degree"),
        ({"layouts": "single"}, "more than one rank"),
    ],
)
def test_wrong_options(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        run(options(tmp_path, **{"layouts": "dp2", **changes}))
