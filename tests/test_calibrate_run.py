"""`simpar calibrate` on the CPU of the tests: a profile that simulates, resuming, two processes, interruption, errors."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.torch
ROOT = Path(__file__).resolve().parent.parent
TINY = ["--tiny", "--device", "cpu"]


def _run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *arguments], cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip


def _port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("calibrate") / "mine.toml"
    done = _run("simpar.cli", "calibrate", "--out", str(out), "--budget", "40s", *TINY)
    assert done.returncode == 0, done.stderr
    return out


def test_the_profile_loads_with_every_measured_number(profile: Path) -> None:
    from simpar.specs.hardware import load_hardware

    hardware = load_hardware(str(profile))
    assert hardware.gpu.peak_flops["fp32"].kind == "measured"
    assert {(p.op, p.direction) for p in hardware.kernels.points} == {
        ("gemm", "forward"), ("gemm", "dgrad"), ("gemm", "wgrad"), ("gemm", "wgrad_accumulate"), ("attention", "forward"),
        ("attention", "backward"),
    }  # fmt: skip
    wanted = {"copy", "norm", "activation", "gate", "gate_backward", "softmax", "cross_entropy", "adam"}
    assert wanted <= set(hardware.kernels.memory)


def test_a_store_with_a_terminal_s_escapes_gives_a_profile_that_can_be_read(profile: Path, tmp_path: Path) -> None:
    """`nvidia-smi topo -m` underlines its header even in a pipe."""
    from simpar.live.measure import _output
    from simpar.specs.hardware import load_hardware

    kept = [json.loads(line) for line in profile.with_suffix(".jsonl").read_text().splitlines()]
    kept[0]["topology"] = "\x1b[4mGPU0\tCPU Affinity\x1b[0m\r\nGPU0\t X"
    store, out = tmp_path / "old.jsonl", tmp_path / "old.toml"
    store.write_text("".join(json.dumps(record) + "\n" for record in kept))
    assert _run("simpar.cli", "calibrate", "--resume", str(store), "--budget", "0s", "--out", str(out)).returncode == 0
    assert load_hardware(str(out)).name == "old"
    assert "\n# GPU0\tCPU Affinity\n# GPU0\t X\n" in out.read_text()
    assert _output("printf", r"\033[4mGPU0\033[0m\tX\007\n") == "GPU0\tX"


def test_a_scenario_runs_on_the_profile(profile: Path) -> None:
    scenario = ROOT / "scenarios" / "mlp-4096x24_a100x8_dp8.toml"
    # One process on one node of this machine.
    changes = [f"cluster.hardware={profile}", "plan.dp=1", "cluster.num_gpus=1"]
    done = _run("simpar.cli", "simulate", str(scenario), "--json", *(a for c in changes for a in ("--set", c)))
    assert done.returncode in (0, 1), done.stderr
    assert json.loads(done.stdout)["step_time_s"] > 0


def test_an_interrupted_run_keeps_its_store_and_resumes(tmp_path: Path) -> None:
    out = tmp_path / "mine.toml"
    store = out.with_suffix(".jsonl")
    command = [sys.executable, "-m", "simpar.live.calibrate", "--out", str(out), "--budget", "60s", "--device", "cpu"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    end = time.monotonic() + 60
    while time.monotonic() < end and (not store.exists() or store.read_text().count("\n") < 3):
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = [json.loads(line) for line in store.read_text().splitlines() if line.endswith("}")]
    assert len(kept) >= 3
    assert not out.exists()

    refused = _run("simpar.live.calibrate", "--out", str(out), "--budget", "0s", "--device", "cpu")
    assert refused.returncode == 2
    assert "--resume" in refused.stderr

    done = _run("simpar.live.calibrate", "--out", str(out), "--budget", "0s", "--resume", str(store), "--device", "cpu")
    assert done.returncode == 0, done.stderr
    assert " us " not in done.stdout  # nothing is measured: the profile of what there is
    assert out.exists()
    after = {r["key"]: r for r in map(json.loads, store.read_text().splitlines())}
    for record in kept[1:]:
        assert after[record["key"]] == record


def test_a_resumed_run_measures_what_is_missing_and_not_what_is_known(profile: Path, tmp_path: Path) -> None:
    lines = profile.with_suffix(".jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    gone = next(r for r in records if r["kind"] == "gemm")
    store = tmp_path / "part.jsonl"
    # Everything else counts as well known, whatever the noise of the machine said.
    store.write_text("".join(json.dumps({**r, "narrow": True}) + "\n" for r in records if r["key"] != gone["key"]))
    done = _run("simpar.live.calibrate", "--out", str(tmp_path / "p.toml"), "--budget", "30s", "--resume", str(store), *TINY)
    assert done.returncode == 0, done.stderr
    measured = [line.split()[0] for line in done.stdout.splitlines() if " us " in line]
    assert measured == [gone["key"]]


def test_two_processes_measure_every_collective(tmp_path: Path) -> None:
    from simpar.live.bench_collectives import COLLECTIVES
    from simpar.specs.hardware import load_hardware

    out = tmp_path / "two.toml"
    torchrun = ["torch.distributed.run", "--nproc-per-node", "2", "--master-port", _port(), "-m", "simpar.live.calibrate"]
    done = _run(*torchrun, "--out", str(out), "--budget", "12s", *TINY, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in out.with_suffix(".jsonl").read_text().splitlines()]
    assert {r["collective"] for r in records if r["kind"] == "collective"} == set(COLLECTIVES)
    assert all(r["ranks"] == 2 for r in records if r["kind"] == "collective")
    assert [r["slowdown"] > 0 for r in records if r["kind"] == "overlap"] == [True]
    hardware = load_hardware(str(out))
    assert hardware.scale_up.bandwidth.kind == "measured"
    assert "gloo collectives of 2 processes" in hardware.scale_up.bandwidth.source


def test_a_rank_that_does_not_come_is_one_message(tmp_path: Path) -> None:
    out = tmp_path / "one.toml"
    alone = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _port()}
    done = _run("simpar.live.calibrate", "--out", str(out), "--timeout", "2s", *TINY, **alone)
    assert done.returncode == 2
    message = [line for line in done.stderr.splitlines() if line.startswith("simpar calibrate:")]
    assert len(message) == 1
    assert "did not meet" in message[0]
    assert "kept" in message[0]
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_rank_that_hangs_is_one_message_and_measurements_stay(tmp_path: Path) -> None:
    out, port = tmp_path / "two.toml", _port()
    store = out.with_suffix(".jsonl")
    options = ["--out", str(out), "--timeout", "5s", "--budget", "60s", "--device", "cpu"]
    command = [sys.executable, "-m", "simpar.live.calibrate", *options]
    ranks = [
        subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "RANK": r, "LOCAL_RANK": r, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
        )
        for r in ("0", "1")
    ]  # fmt: skip
    try:
        end = time.monotonic() + 60
        while time.monotonic() < end and (not store.exists() or store.read_text().count("\n") < 3):
            time.sleep(0.05)
        ranks[1].send_signal(signal.SIGSTOP)
        _, message = ranks[0].communicate(timeout=60)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert ranks[0].returncode == 2, message
    assert "see that all ranks run" in message
    assert "Traceback" not in message
    assert any(json.loads(line)["kind"] == "collective" for line in store.read_text().splitlines())


@pytest.mark.parametrize(
    "call",
    [
        lambda group: group.from_first(1),
        lambda group: group.largest([1.0]),
        lambda group: group.total(group.torch.ones(1)),
        lambda group: group.barrier(),
        lambda group: group.new_group([0, 1]),
    ],
    ids=["from_first", "largest", "total", "barrier", "new_group"],
)
def test_every_collective_of_the_group_names_a_lost_rank(call: Callable[[Any], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the other rank was stopped, it is the one message of a run that cannot go on."""
    import torch

    from simpar.live.bench_collectives import Group
    from simpar.live.store import CalibrationError

    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("Connection closed by peer [127.0.0.1]:4711\nmore of it")

    for name in ("broadcast_object_list", "all_reduce", "barrier", "new_group"):
        monkeypatch.setattr(torch.distributed, name, fails)
    monkeypatch.setenv("WORLD_SIZE", "1")
    group = Group("cpu", 5.0)
    with pytest.raises(CalibrationError, match=r"Connection closed by peer .*see that all ranks run") as caught:
        call(group)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--out", "x.toml", "--budget", "soon"], "not a time"),
        (["--out", "x.yaml"], "ends in .toml"),
        ([], "--out is missing"),
        (["--out", "x.toml", "--device", "tpu"], "choose auto, cpu, cuda or fake"),
        (["--out", "x.toml", "--resume", "nowhere.jsonl"], "no such file"),
    ],
)
def test_wrong_options_are_one_message(arguments: list[str], expected: str) -> None:
    done = _run("simpar.cli", "calibrate", *arguments)
    assert done.returncode == 2
    assert expected in done.stderr
    assert "Traceback" not in done.stderr


def test_it_needs_nothing_but_torch(tmp_path: Path) -> None:
    """Imports of the command with everything else hidden."""
    code = (
        "import sys\n"
        "for name in ('pydantic', 'simpy', 'networkx', 'typer', 'rich', 'plotly'): sys.modules[name] = None\n"
        "import simpar.live.calibrate as m\n"
        f"sys.exit(m.main(['--out', {str(tmp_path / 'x.toml')!r}, '--budget', '1s', '--tiny', '--device', 'cpu']))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_without_torch_it_says_so(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import simpar.live.calibrate as m\n"
        f"sys.exit(m.main(['--out', {str(tmp_path / 'x.toml')!r}]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "pip install torch" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_one_rank_of_several_leaves_before_its_communicators_can_abort_it(ranks: str) -> None:
    """What was printed is out, the exit code stays, and only a process of its own runs what Python does at its end."""
    program = "import atexit\nfrom simpar.host import leave\natexit.register(print, 'end')\nprint('done')\nleave(3)"
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, env={**os.environ, "WORLD_SIZE": ranks}
    )
    assert (found.returncode, found.stdout.split()) == (3, ["done", "end"] if ranks == "1" else ["done"])
