"""`simpar diff`: real torch.profiler traces, damaged ones, the command's output and its page."""

from __future__ import annotations

import gzip
import importlib.util
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from kineto_of_step import later_gaps, slower_gemms, write_kineto
from serve_browser import CHROMIUM, Browser
from test_trace_diff_attribution import MODEL, PLANS, compared, priced, scenario
from typer.testing import CliRunner

from simpar.cli import app
from simpar.errors import InputError
from simpar.interop.kineto_step import read_steps
from simpar.live.trace_diff import GROUPS
from simpar.report.diff_html import diff_page

TEXT = """
name = "small"
framework = "torchtitan"
framework_version = "2025-06"
[model]
{model}
[cluster]
hardware = "dgx-h100"
num_nodes = 1
num_gpus = 8
[plan]
tp = 4
dp = 2
[training]
sequence_length = 16384
micro_batch_size = 1
global_batch_size = 8
"""


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """A scenario and a distorted trace of it."""
    model = "\n".join(f"{k} = {v}" for k, v in MODEL.items())
    (tmp_path / "s.toml").write_text(TEXT.format(model=model))
    write_kineto(later_gaps(slower_gemms(priced("tensor"), 1.1), 1e-4), tmp_path / "t.json.gz", steps=3)
    return tmp_path / "s.toml", tmp_path / "t.json.gz"


def test_the_command_prints_one_object(files: tuple[Path, Path]) -> None:
    found = CliRunner().invoke(app, ["diff", *map(str, files), "--json"])
    assert found.exit_code == 0, found.output
    said: dict[str, Any] = json.loads(found.output)
    assert said["steps"] == 2
    assert said["difference_s"] == pytest.approx(sum(said["difference_by_group_s"].values()))
    assert set(said["difference_by_group_s"]) == set(GROUPS)
    assert said["difference_by_group_s"]["compute"] > 0.005
    assert said["difference_by_group_s"]["launch gaps"] > 0.005
    text = CliRunner().invoke(app, ["diff", *map(str, files)]).output
    assert "matrix products" in text
    assert "launch gaps: the host is late" in text


@pytest.mark.skipif(CHROMIUM is None, reason="needs headless Chromium")
@pytest.mark.browser
def test_the_page_draws_both_timelines(files: tuple[Path, Path], tmp_path: Path) -> None:
    found = CliRunner().invoke(app, ["diff", *map(str, files), "--html", str(tmp_path / "d.html"), "--offline"])
    assert found.exit_code == 0, found.output
    with Browser(1400, 1200) as browser:
        browser.open((tmp_path / "d.html").as_uri())
        browser.wait("document.body.dataset.ready === '1'", 60)
        assert browser.js("document.body.dataset.errors || ''") == ""
        assert browser.js("document.querySelectorAll('#timelines .ytick').length") == 4
        # Choosing the detailed view redraws the same place.
        browser.js("(() => { const s = document.querySelector('select[data-for=timelines]'); s.value = '2';"
                      " s.dispatchEvent(new Event('change')); return 1; })()")  # fmt: skip
        browser.wait("document.getElementById('timelines').layout.xaxis.range[0] > 0", 20)
        assert not browser.console


def test_the_page_holds_what_was_found(tmp_path: Path) -> None:
    write_kineto(slower_gemms(priced("pipeline"), 1.1), tmp_path / "t.json")
    found = compared("pipeline", tmp_path / "t.json")
    page = diff_page(found)
    for text in ("Both timelines", "bubble: waits for other stages", "mlp/fc1.wgrad", "From the predicted to the measured step"):
        assert text in page
    assert len(page) < 12e6


TORCH_STEP = """
import torch
from torch.profiler import ProfilerActivity, profile, schedule
torch.set_num_threads(1)
model = torch.nn.Sequential(*[torch.nn.Linear(256, 256, bias=False) for _ in range(3)])
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
plan = schedule(wait=0, warmup=1, active=3, repeat=1)
with profile(activities=[ProfilerActivity.CPU], record_shapes=True, schedule=plan) as profiler:
    for _ in range(4):
        model(torch.zeros(512, 256)).sum().backward()
        q = torch.zeros(1, 4, 256, 64)
        torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        optimizer.step()
        optimizer.zero_grad()
        profiler.step()
profiler.export_chrome_trace({path!r})
"""


@pytest.mark.torch
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="the torch extra is not installed")
def test_a_real_trace_of_a_cpu(tmp_path: Path) -> None:
    import sys

    path = tmp_path / "real.json.gz"
    script = tmp_path / "step.py"
    script.write_text(TORCH_STEP.format(path=str(path)))
    subprocess.run([sys.executable, str(script)], check=True, capture_output=True, timeout=240)
    found = compared("alone", path)
    assert (found.device, found.steps) == ("cpu", 2)
    measured = {c.name: c.measured_s for c in found.causes}
    assert min(measured[k] for k in ("gemm", "attention", "optimizer", "memory_bound", "launch")) > 0
    assert sum(measured.values()) == pytest.approx(found.measured_step_s)
    products = {name: count for name, count, _ in found.kernels["gemm"]}
    # Three products forward, three weight gradients and, but for the first layer, two input gradients.
    assert products == {"aten::mm": pytest.approx(8)}
    assert any("CPU" in note for note in found.notes)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "the file is empty"), (b"{]", "not JSON"), (b'{"traceEvents": 3}', "traceEvents is missing"),
        (b'{"traceEvents": []}', "no kernels .* and no ops"),
        (gzip.compress(b'{"traceEvents": []}', mtime=0)[:20], "damaged gzip"),
        (b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "gemm", "ts": 1, "dur": -5}]}', "dur not negative"),
        (b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "gemm", "dur": 5}]}', "ts and dur must be numbers"),
        (b'{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": "x", "dur": 5}]}', "ts and dur must be numbers"),
        (b'\xff\xfe\x00', "not a text file"),
        (b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "gemm", "ts": 1, "dur": 5},'
         b' {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#1", "ts": 90, "dur": 5}]}', "nothing ran inside"),
    ],
)  # fmt: skip
def test_damaged_traces_are_named(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "t.json").write_bytes(content)
    with pytest.raises(InputError, match=said):
        compared("alone", tmp_path / "t.json")


def test_a_missing_trace_ends_with_one_message(files: tuple[Path, Path]) -> None:
    found = CliRunner().invoke(app, ["diff", str(files[0]), "nowhere.json"])
    assert isinstance(found.exception, InputError)
    assert "nowhere.json: no such file" in str(found.exception)


@pytest.mark.parametrize(
    ("args", "dimension"),
    [
        ({"Process Group Ranks": "[0, 1]"}, "tp"), ({"Process Group Ranks": "[0, 4]"}, "pp"),
        ({"Process Group Ranks": "[0, 2]"}, "dp"),
        ({"Process Group Ranks": "[0, 1, ...]", "Process Group Description": "mesh_tp"}, "tp"),
        ({"Process Group Description": "TENSOR_MODEL_PARALLEL_GROUP"}, "tp"), ({"Group size": 3}, "other"),
        ({"Process Group Name": "7"}, "dp"),
    ],
)  # fmt: skip
def test_groups_become_dimensions(tmp_path: Path, args: dict[str, Any], dimension: str) -> None:
    kernel = {"ph": "X", "cat": "kernel", "name": "ncclDevKernel_AllReduce()", "ts": 1, "dur": 5, "args": {
        "stream": 7, "Collective name": "allreduce", **args}}  # fmt: skip
    info = {"rank": 0, "pg_config": [{"pg_name": "7", "pg_desc": "x", "pg_size": 2, "ranks": [0, 2]}]}
    other = {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 10, "dur": 5, "args": {"stream": 3}}
    (tmp_path / "t.json").write_text(json.dumps({"traceEvents": [kernel, other], "distributedInfo": info}))
    trace = read_steps(tmp_path / "t.json", priced("pipeline").layout)
    assert {s.kind for s in trace.steps[0] if s.collective} == {dimension}


def test_plans_of_the_tests_are_what_they_say() -> None:
    assert {name: scenario(name).world_size for name in PLANS} == {"alone": 1, "sharded": 8, "tensor": 8, "pipeline": 8, "full": 8}
