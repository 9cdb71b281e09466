"""The whole of docs/gpu_day.md on a machine without a GPU: bundle, frozen predictions, every command there, comparison at home."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("the torch extra is not installed", allow_module_level=True)

from typer.testing import CliRunner

from simpar.cli import app
from simpar.errors import InputError
from simpar.live import gpu_probes, measure
from simpar.live.collect import _limited
from simpar.live.device import Device, now_s, telemetry
from simpar.live.rank_frozen import read_frozen
from simpar.live.store import Store

pytestmark = [pytest.mark.torch, pytest.mark.gpu_path]
SCENARIO = """
name = "{name}"
framework = "torchtitan"
framework_version = "2026-02"
[model]
hidden_size = 256
intermediate_size = 768
num_hidden_layers = 4
num_attention_heads = 8
num_key_value_heads = 4
head_dim = 32
vocab_size = 2048
{more}
[cluster]
hardware = "dgx-h100"
num_nodes = 1
[plan]
dp = 8
zero_stage = 3
[training]
sequence_length = 256
global_batch_size = 8
"""
MOE = "[model.moe]\nnum_experts = 8\nnum_experts_per_tok = 2\nmoe_intermediate_size = 128"
NEEDS_SIMPAR = ("pydantic", "typer", "rich", "plotly", "simpy", "yaml")


def simpar(*words: object, code: int = 0) -> str:
    """The command at home."""
    found = CliRunner().invoke(app, [str(w) for w in words])
    assert found.exit_code == code, found.output
    return found.stdout


def there(bundle: Path, *words: object, blocked: Path) -> subprocess.CompletedProcess[str]:
    """The collector in its folder, where nothing of simpar's dependencies can be imported."""
    environment = {**os.environ, "PYTHONPATH": str(blocked), "OUT": str(bundle / "out"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "simpar.live.collect", *map(str, words), "--device", "fake"]
    return subprocess.run(command, cwd=bundle, env=environment, capture_output=True, text=True, timeout=240, check=False)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of two scenarios."""
    folder = tmp_path_factory.mktemp("gpu")
    for name, more in (("dense", ""), ("experts", MOE)):
        (folder / f"{name}.toml").write_text(SCENARIO.format(name=name, more=more))
    said = simpar("validate", "rank", "--scenarios", folder / "dense.toml", "--scenarios", folder / "experts.toml",
                  "--layers", 1, "--bundle", folder / "b", "--gpu-memory", "79 GiB")  # fmt: skip
    assert "wrote 2 plans" in said
    return folder / "b"


@pytest.fixture(scope="module")
def blocked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Modules that a GPU machine does not have."""
    folder = tmp_path_factory.mktemp("blocked")
    for name in NEEDS_SIMPAR:
        (folder / f"{name}.py").write_text(f"raise ImportError('no {name} here')\n")
    return folder


def packed(bundle: Path) -> set[str]:
    """Names in what comes home."""
    with tarfile.open(bundle / "out" / "results.tgz") as archive:
        return {name.removeprefix("results/") for name in archive.getnames()}


def test_the_day_from_end_to_end(bundle: Path, blocked: Path, tmp_path: Path) -> None:
    for step in ("smoke", "calibrate", "plans", "physics", "repeat"):
        done = there(bundle, step, "--limit", 150, blocked=blocked)
        assert done.returncode == 0, (step, done.stdout[-2000:], done.stderr[-2000:])
    ranks = {f"ranks/{n}{again}.json" for n in ("dense", "experts") for again in ("", ".again")}
    assert packed(bundle) >= {"smoke.json", "smoke.trace.json.gz", "calibration.jsonl", "physics.jsonl", "log.jsonl", *ranks}
    store = [json.loads(line) for line in (bundle / "results" / "calibration.jsonl").read_text().splitlines()]
    wanted = json.loads((bundle / "shapes.json").read_text())["shapes"]
    assert {r["point"] for r in store if r["kind"] == "shape"} == {"gemm", "grouped_gemm", "attention", "memory"}
    assert sum(r["kind"] == "shape" for r in store) == len(wanted)
    assert all(r["precision"] > 0 and r["burst_s"] > 0 for r in store if r["kind"] == "shape")
    probes = [json.loads(line) for line in (bundle / "results" / "physics.jsonl").read_text().splitlines()]
    assert not [p for p in probes if "failed" in p]

    # Home: a profile, and the comparison with what was frozen.
    profile = tmp_path / "there.toml"
    simpar("calibrate", "--resume", bundle / "results" / "calibration.jsonl", "--budget", "0s", "--out", profile)
    frozen = bundle / "predictions.json"
    said = json.loads(
        simpar("validate", "rank", "--measured", bundle / "results" / "ranks" / "dense.json", "--predictions", frozen, "--json")
    )
    assert {row["metric"] for row in said["rows"]} >= {"parameters", "flops", "wire_bytes", "allocated_bytes"}
    assert read_frozen(frozen)[1] in said["notes"][-1]
    simpar("validate", "rank", "--measured", bundle / "results" / "ranks" / "dense.json", "--hardware", profile)
    smallest = json.loads((bundle / "results" / "smoke.json").read_text())["plan"]["name"]
    trace = bundle / "results" / "smoke.trace.json.gz"
    step = json.loads(simpar("diff", bundle.parent / f"{smallest}.toml", trace, "--json", "--html", tmp_path / "smoke.html"))
    causes = sum(row["measured_s"] for row in step["causes"])
    assert causes == pytest.approx(step["measured_step_time_s"])
    assert any("without kernels" in note for note in step["notes"])


def test_a_command_whose_time_is_up_leaves_the_rest_for_the_next(bundle: Path, blocked: Path) -> None:
    done = there(bundle, "blocks", "--limit", 63, blocked=blocked)
    assert done.returncode == 1, done.stderr[-1000:]
    first = (bundle / "results" / "blocks.jsonl").read_text().splitlines()
    assert "time is up" in done.stdout
    assert "blocks.jsonl" in packed(bundle)
    there(bundle, "blocks", "--limit", 63, blocked=blocked)
    second = (bundle / "results" / "blocks.jsonl").read_text().splitlines()
    assert second[: len(first)] == first
    assert len(second) > len(first)
    rows = [json.loads(line) for line in second if '"probe"' in line]
    assert len({r["key"] for r in rows}) == len(rows)
    assert not [r for r in rows if "failed" in r]
    assert all(r["products"] for r in rows)
    # Small sizes of a stand-in are not what was predicted: compared, and outside.
    words = ("--measured", bundle / "results" / "blocks.jsonl", "--predictions", bundle / "predictions.json", "--json")
    said = json.loads(simpar("validate", "rank", *words, code=1))
    assert {row["id"] for row in said["rows"]} == {r["key"].replace("block/", "blocks:block_time_s:") for r in rows}
    assert all(row["predicted"] for row in said["rows"])


@pytest.mark.slow
def test_a_killed_command_loses_only_the_piece_it_was_in(tmp_path: Path, bundle: Path, blocked: Path) -> None:
    for name in ("simpar", "plans", "shapes.json"):
        (tmp_path / name).symlink_to(bundle / name)
    environment = {**os.environ, "PYTHONPATH": str(blocked), "OUT": str(tmp_path / "out"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "simpar.live.collect", "plans", "--device", "fake", "--limit", "200"]
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL, start_new_session=True)
    ranks, end = tmp_path / "results" / "ranks", time.monotonic() + 90
    while time.monotonic() < end and not list(ranks.glob("*.json")):
        time.sleep(0.05)
    os.killpg(process.pid, 9)
    process.wait()
    kept = [p for p in ranks.glob("*.json") if not p.name.endswith(".partial.json")]
    for path in kept:
        assert json.loads(path.read_text())["plan"]
    assert there(tmp_path, "plans", "--limit", 200, blocked=blocked).returncode == 0
    assert {p.name for p in ranks.glob("*.json")} >= {"dense.json", "experts.json"}


def test_what_was_frozen_cannot_be_changed_or_written_over(bundle: Path, tmp_path: Path) -> None:
    copy = tmp_path / "p.json"
    table: dict[str, Any] = json.loads((bundle / "predictions.json").read_text())
    table["predictions"]["dense"]["allocated_bytes"] *= 0.99
    copy.write_text(json.dumps(table))
    with pytest.raises(InputError, match="changed after they were frozen"):
        read_frozen(copy)
    words = ["validate", "rank", "--scenarios", bundle.parent / "dense.toml", "--layers", 1, "--predict-only", tmp_path / "q.json"]
    assert read_frozen(tmp_path / "q.json")[1] in simpar(*words) if simpar(*words) else False
    again = CliRunner().invoke(app, [str(w) for w in [*words, "--microbatches", 2]])
    assert again.exit_code != 0
    assert "not written over" in str(again.exception or again.output)


def test_plans_that_do_not_fit_are_left_out(bundle: Path, tmp_path: Path) -> None:
    words = ["--scenarios", bundle.parent / "dense.toml", "--scenarios", bundle.parent / "experts.toml", "--layers", 4]
    sizes = {n: p.reserved_bytes for n, p in read_frozen(bundle / "predictions.json")[0].items()}
    assert set(sizes) == {"dense", "experts"}
    with pytest.raises(InputError, match="no plan fits"):
        raise (
            CliRunner()
            .invoke(app, ["validate", "rank", *map(str, words), "--bundle", str(tmp_path / "n"), "--gpu-memory", "1 MiB"])
            .exception
        )


def test_clocks_are_read_five_times_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text(
        "#!/bin/sh\necho 'clocks'\nfor i in 1 2 3 4; do echo \"198$i, 2619, 70$i.5, 6$i, 0x0000000000000004\"; sleep 0.05; done\n"
    )
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    begin = time.monotonic()
    with telemetry(Device("fake")) as beside:
        end = time.monotonic() + 5
        while len(beside.rows) < 4 and time.monotonic() < end:
            time.sleep(0.05)
    found = beside.during(begin)
    assert found["readings"] == 4
    assert found["sm_mhz"] == [1981.0, 1983.0, 1984.0]
    assert found["watts"][2] == 704.5
    assert found["throttle_reasons"] == "0x4"
    assert [row[1] for row in beside.series(begin)] == [1981.0, 1982.0, 1983.0, 1984.0]


def test_limits_of_a_trial_count_processor_seconds(tmp_path: Path) -> None:
    """Other work on the machine takes wall time of a trial, none of its limit; on a lent GPU machine the wall's clock counts."""
    fake, wall = now_s("fake"), now_s("cuda")
    time.sleep(0.3)
    assert now_s("fake") - fake < 0.1
    assert now_s("cuda") - wall >= 0.3
    environment = dict(os.environ)
    assert _limited([sys.executable, "-c", "import time; time.sleep(1.5)"], tmp_path, environment, 1.0) == 0
    assert _limited([sys.executable, "-c", "while True: pass"], tmp_path, environment, 1.0) == 124


def test_a_calibration_says_that_shapes_are_left(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "store.jsonl").touch()
    command = [sys.executable, "-m", "simpar.live.calibrate", "--shapes", str(bundle / "shapes.json"), "--resume",
               str(tmp_path / "store.jsonl"), "--device", "fake", "--budget", "0s"]  # fmt: skip
    done = subprocess.run(command, cwd=bundle, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1, done.stderr
    assert "time is up" in done.stdout


def test_long_calls_are_timed_on_a_hot_chip(monkeypatch: pytest.MonkeyPatch) -> None:
    heated: list[float] = []
    monkeypatch.setattr(measure, "heat", lambda device, seconds: heated.append(seconds))
    for pause_s, times in ((2 * measure.LARGE_S, 1), (0.0, 0)):
        heated.clear()
        measure.measure_sustained(lambda s=pause_s: time.sleep(s), measure.Clock("fake"), 0.02)  # type: ignore[misc]
        assert len(heated) == times


def test_products_beside_others_are_compared_at_one_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a chip that grows slower with every sample, what runs beside makes no difference of its own."""
    clock = iter(range(20, 100))
    monkeypatch.setattr(measure.Clock, "sample", lambda *_: float(next(clock)))
    found = gpu_probes._beside(Device("fake"), True, lambda: None)
    assert found["slowdown"] == pytest.approx(1.0, abs=0.04)


def test_the_allocator_s_tensors_fit_any_device() -> None:
    found = gpu_probes._fragments(Device("fake"), True)
    assert 2**26 < found["alive_bytes"] < 2**28


def test_a_probe_that_cannot_end_does_not_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []

    def probes(device: Device, small: bool) -> Iterator[tuple[str, Callable[[], dict[str, float]]]]:
        for key in (gpu_probes.SUSTAINED, "physics/launches"):
            yield key, lambda k=key: begun.append(k) or {"seconds": 1.0}  # type: ignore[misc]

    monkeypatch.setitem(gpu_probes.WHAT, "physics", probes)
    device = Device("fake")
    device.cuda = True
    monkeypatch.setattr(gpu_probes, "_free", lambda device: None)
    assert gpu_probes.run("physics", Store(tmp_path / "s.jsonl"), device, 60.0, lambda text: None) == 1
    assert begun == ["physics/launches"]
