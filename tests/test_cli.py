"""The command line as a user meets it: output, JSON keys, overrides, exit codes, one clear message per mistake."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from simpar.cli import main

ROOT = Path(__file__).parent.parent
FLAGSHIP = ROOT / "scenarios" / "llama3.1-405b_h100x16384_tp8pp16.toml"
SMALL = ROOT / "scenarios" / "llama3.1-70b_h100x64_tp4cp2pp4.toml"
RECOMPUTED = ROOT / "scenarios" / "korthikanti-22b_a100x8_tp8pp1.toml"


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """(exit code, stdout, stderr)."""
    with pytest.raises(SystemExit) as stop:
        main([str(a) for a in arguments])
    out, err = capsys.readouterr()
    return int(stop.value.code or 0), out, err


def test_simulate_prints_one_screen(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "simulate", FLAGSHIP)
    assert code == 0
    for word in ("step time", "MFU", "bubble", "allocated / reserved", "would help most", "published"):
        assert word in out
    assert len(out.splitlines()) <= 60


def test_json_has_the_public_keys(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "simulate", SMALL, "--json")
    found = json.loads(out)
    assert code == (0 if found["fits"] else 1)
    wanted = {
        "step_time_s", "tokens_per_s", "tokens_per_s_per_gpu", "model_flops_per_s_per_gpu", "mfu", "hfu", "bubble_fraction",
        "exposed_communication_s", "peak_memory_bytes", "fits", "world_size", "layout", "provenance", "uncertainty",
    }  # fmt: skip
    assert wanted <= set(found)
    assert {"allocated", "reserved", "per_pipeline_rank"} <= set(found["peak_memory_bytes"])
    assert sum(found["waterfall_s"].values()) == pytest.approx(found["step_time_s"])
    assert found["uncertainty"]["step_time_s"]["low"] < found["step_time_s"] < found["uncertainty"]["step_time_s"]["high"]
    assert found["tokens_per_s"] == pytest.approx(found["tokens_per_s_per_gpu"] * found["world_size"])


def test_set_overrides_a_field(capsys: pytest.CaptureFixture[str]) -> None:
    changes = ("--set", "training.global_batch_size=256", "--set", "plan.virtual_stages=1")
    _, out, _ = run(capsys, "simulate", SMALL, "--json", *changes)
    found = json.loads(out)
    assert found["layout"]["virtual_stages"] == 1
    assert found["layout"]["num_microbatches"] == 256 // found["layout"]["dp"]


def test_compare_two_scenarios(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "compare", SMALL, SMALL, "--set", "plan.virtual_stages=1")
    assert code == 0
    assert "step time" in out


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("plan.tp=3", ["plan.tp", "3", "divide"]),
        ("plan.tpp=3", ["plan.tpp", "unknown field", "did you mean 'tp'"]),
        ("training.global_batch_size=1001", ["global_batch_size", "1001"]),
        ("cluster.hardware=dgx-h101", ["dgx-h101", "dgx-h100"]),
        ("model=llama3.1-406b", ["llama3.1-406b", "llama3.1-405b"]),
        ("cluster.num_nodes=0", ["cluster.num_nodes", "0", "greater than 0"]),
        ("training.sequence_length=-1", ["training.sequence_length", "-1"]),
        ("plan.schedule=1f2b", ["1f2b", "1f1b"]),
        ("framework=megatron-cor", ["megatron-cor", "megatron-core"]),
        ("training.precision=fp9", ["training.precision", "fp9", "fp8"]),
    ],
)
def test_a_mistake_gives_one_message_and_exit_2(capsys: pytest.CaptureFixture[str], override: str, words: list[str]) -> None:
    code, out, err = run(capsys, "simulate", SMALL, "--set", override)
    assert code == 2
    assert out == ""
    assert "Traceback" not in err
    for word in words:
        assert word in err


def test_several_mistakes_are_listed_together(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "simulate", SMALL, "--set", "cluster.num_nodes=-1", "--set", "training.micro_batch_size=0")
    assert code == 2
    assert "num_nodes" in err
    assert "micro_batch_size" in err


def test_broken_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    broken = tmp_path / "broken.toml"
    broken.write_text("name = \n[cluster")
    code, _, err = run(capsys, "simulate", broken)
    assert code == 2
    assert "line 1" in err
    assert run(capsys, "simulate", tmp_path / "missing.toml")[0] == 2


def test_a_quantity_without_unit_is_an_error(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    profile = (ROOT / "hardware_profiles" / "dgx-h100.toml").read_text().replace('"3.35 TB/s"', "3.35", 1)
    assert "= 3.35" in profile
    (tmp_path / "mine.toml").write_text(profile.replace('"fitted/', f'"{ROOT}/hardware_profiles/fitted/'))
    code, _, err = run(capsys, "simulate", SMALL, "--set", f"cluster.hardware={tmp_path / 'mine.toml'}")
    assert code == 2
    assert "memory_bandwidth" in err
    assert "TB/s" in err


def test_not_fitting_is_a_result(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "simulate", ROOT / "scenarios" / "llama3.1-70b_h100x1_fp8.toml")
    assert code == 1
    assert err == ""
    assert "DOES NOT FIT" in out
    assert "largest are" in out


def test_explain_finds_neighbours_and_shares_a_gap(capsys: pytest.CaptureFixture[str]) -> None:
    base = json.loads(run(capsys, "simulate", SMALL, "--json")[1])["step_time_s"]
    code, out, _ = run(capsys, "explain", SMALL, "--json", "--measured", f"step_time={base * 1.1}s", "--measured", "mem=60GiB")
    found = json.loads(out)
    assert code == 0
    shares = [part["seconds"] for part in found["measured"]["explanation"]]
    assert sum(shares) == pytest.approx(0.1 * base, rel=1e-3)
    parts = [part["part"] for part in found["measured"]["explanation"]]
    assert "calibration" not in parts, "it is no part of a step"
    assert parts[0] == "matmul"
    assert any(n["step_time_s"] for n in found["neighbours"])
    assert all(n["reason"] for n in found["neighbours"] if not n["fits"])
    assert sum(found["waterfall_s"].values()) == pytest.approx(found["step_time_s"], rel=1e-6)
    assert sum(found["memory"]["parts"].values()) == pytest.approx(found["memory"]["device"], rel=1e-6)


def test_explain_says_why_a_neighbour_is_slower(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(run(capsys, "explain", RECOMPUTED, "--json")[1])
    by_change = {n["change"]: n for n in found["neighbours"]}
    full = by_change["recompute full"]
    assert full["step_time_s"] > found["step_time_s"]
    assert full["causes"][0]["part"] == "recomputation"
    assert full["causes"][0]["seconds"] > 0
    assert not full["close"]
    assert by_change["zero_stage 0 -> 1"]["close"]
    assert "needs" in by_change["recompute none"]["reason"]
    assert "ranks than the 8 GPUs" in by_change["pp 1 -> 2"]["reason"]


def test_explain_measured_reports(capsys: pytest.CaptureFixture[str]) -> None:
    """What no part of the step can hold is said, and what one change away would meet the measurement."""
    by_change = {n["change"]: n for n in json.loads(run(capsys, "explain", RECOMPUTED, "--json")[1])["neighbours"]}
    full_s = 1.15 * by_change["recompute full"]["step_time_s"]
    code, out, _ = run(capsys, "explain", RECOMPUTED, "--measured", f"step_time={full_s:.3f} s allocated = 60 GiB")
    assert code == 0
    assert "One change away comes closer: recompute full" in out
    assert "outside the interval" in out
    assert "most probably lies in" in out
    assert "(allocated)" in out
    found = json.loads(run(capsys, "explain", RECOMPUTED, "--json", "--measured", "step_time=0.1s")[1])["measured"]
    assert found["below_ideal"]
    assert all(part["predicted_s"] + part["seconds"] > -1e-9 for part in found["explanation"] if part["part"] != "unexplained")
    assert sum(part["seconds"] for part in found["explanation"]) == pytest.approx(0.1 - found["predicted_s"])


def test_explain_a_gap_of_memory(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(run(capsys, "explain", RECOMPUTED, "--json", "--measured", "reserved=50GiB")[1])["measured_memory"]
    assert found["closest"] == "reserved"
    assert found["gap"] == pytest.approx(50 * 2**30 - found["reserved"])
    assert sum(part["bytes"] for part in found["explanation"]) == pytest.approx(found["gap"])
    assert {"activations", "fragmentation"} <= {part["part"] for part in found["explanation"]}


def test_explain_says_that_a_plan_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "explain", RECOMPUTED, "--set", "plan.recompute=none")
    assert code == 0
    assert "DOES NOT FIT" in out
    assert "largest are" in out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("speed=3", "known: step_time, mem"), ("step_time=1.4", "unit is missing"), ("step_time", "not a quantity"),
        ("step_time=-1s", "must not be negative"), ("step_time=0s", "must be more than 0"), ("step_time=1e400s", "too large"),
        ("mem=5 parsec", "unknown unit"), ("step_time=1s step_time=2s", "given twice"), ("", "is not known"),
        ("mem=nan", "not a quantity"),
    ],
)  # fmt: skip
def test_a_bad_measurement_is_one_message(capsys: pytest.CaptureFixture[str], text: str, message: str) -> None:
    code, out, err = run(capsys, "explain", SMALL, "--measured", text)
    assert code == 2
    assert out == ""
    assert message in err
    assert err.count("\n") == 1


def test_lists(capsys: pytest.CaptureFixture[str]) -> None:
    assert "llama3.1-405b" in run(capsys, "models")[1]
    assert "dgx-h100" in run(capsys, "profiles")[1]


def test_effects_change_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    def step(*overrides: str) -> float:
        flags = [flag for o in overrides for flag in ("--set", o)]
        return float(json.loads(run(capsys, "simulate", SMALL, "--json", *flags)[1])["step_time_s"])

    base = step()
    assert step("effects.slow_ranks={2=1.2}") > base
    assert step("effects.contention=true", "effects.dead_rails=[0]") > base
    assert step("effects.interference=false") < base


def test_repetitions_have_percentiles(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("simulate", SMALL, "--json", "--set", "effects.rank_sigma=0.02", "--set", "effects.repetitions=30")
    first = json.loads(run(capsys, *arguments)[1])["repetitions"]
    assert first == json.loads(run(capsys, *arguments)[1])["repetitions"]
    assert first["step_time_s"]["p50"] <= first["step_time_s"]["p90"] <= first["step_time_s"]["p99"]


def test_help_starts_quickly() -> None:
    """The best of three fresh processes; the commands' heavy imports must stay inside them."""
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        subprocess.run([sys.executable, "-m", "simpar.cli", "--help"], check=True, capture_output=True)
        times.append(time.perf_counter() - begin)
    imported = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "simpar.cli", "--help"], check=True, capture_output=True, text=True
    ).stderr
    for heavy in ("numpy", "pydantic", "simpy", "plotly", "torch", "networkx"):
        assert f" {heavy}\n" not in imported
    print(f"--help: {min(times):.3f} s")


def test_python_dash_m_is_the_command_line() -> None:
    found = subprocess.run([sys.executable, "-m", "simpar", "profiles"], capture_output=True, text=True, cwd=ROOT, check=True)
    assert "dgx-h100" in found.stdout.split()
