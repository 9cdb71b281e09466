"""`simpar validate rank`: plans, the shipped list, the bundle for another machine, measurements read back, clear refusals."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from simpar.cli import app
from simpar.errors import InputError
from simpar.interop.kineto_step import kernel_kind
from simpar.live.rank import CLASSES, TOLERANCE, Row, compare, plan_of, predict, to_json
from simpar.live.rank_command import RankOptions, RankReport, run
from simpar.live.rank_layouts import WORKER_FILES, read_layouts, write_bundle
from simpar.live.rank_plan import rank_plan
from simpar.specs.calibration import Constant, calibrated_by
from simpar.specs.scenario import Scenario, make_scenario

NEEDS_TORCH = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="the torch extra is not installed")
MODEL = {
    "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 32, "vocab_size": 2048,
}  # fmt: skip


def scenario(model: dict[str, Any] | str = MODEL, training: dict[str, Any] | None = None, **plan: Any) -> Scenario:
    """Eight ranks."""
    return make_scenario({
        "name": "small", "model": model, "framework": "torchtitan", "framework_version": "2026-02",
        "cluster": {"hardware": "dgx-h200", "num_nodes": 1}, "plan": {"zero_stage": 3, **plan},
        "training": {"sequence_length": 256, "global_batch_size": 8, **(training or {})},
    })  # fmt: skip


def measured_like(plan: Any, factor: float = 1.0) -> dict[str, Any]:
    """What a GPU would write if it agreed with the prediction but for `factor` in time and memory."""
    said = predict(plan)
    names = {"gemm": "nvjet_tst", "attention": "flash_fwd", "memory_bound": "vectorized", "optimizer": "multi_tensor_apply",
             "norm": "vectorized_layer_norm_kernel", "loss": "nll_loss_forward_reduce_cuda_kernel_2d"}  # fmt: skip
    return {
        "format": 1, "plan": plan.table, "mode": "cuda", "torch": "2.13", "wall_s": 9.0, "device": "NVIDIA H200",
        "states": {"parameters": said.parameters, "state_bytes": said.state_bytes, "padding": 0.0}, "blocks": [],
        "allocated_bytes": said.allocated_bytes * factor, "reserved_bytes": said.reserved_bytes * factor, "flops": {}, "wire": [],
        "step_s": [1.0], "step_median_s": sum(said.seconds.values()) * factor,
        "kernels": [{"name": names[k], "calls": 1.0, "seconds": v * factor} for k, v in said.seconds.items() if k in names],
    }  # fmt: skip


def test_the_shipped_list_has_what_is_asked_for() -> None:
    entries = read_layouts()
    assert len({e.spec.name for e in entries}) == len(entries) >= 10
    models = {e.spec.model for e in entries}
    assert {"llama3.1-8b", "llama3.1-70b", "llama3.1-405b", "deepseek-v3"} <= models
    for model in ("llama3.1-70b", "llama3.1-405b"):
        plans = [e.scenario.plan for e in entries if e.spec.model == model]
        assert any(p.tp == 8 for p in plans)
        assert any(p.pp > 1 for p in plans)
        assert any(p.tp == 1 and p.pp == 1 for p in plans)
    assert {str(e.scenario.plan.recompute) for e in entries} >= {"none", "selective", "full"}
    for entry in entries:
        plan = entry.plan(layers=1)
        assert plan.table["stages"]
        assert json.loads(json.dumps(plan.table))["rank"] == entry.spec.rank


@pytest.mark.parametrize("entry", [e for e in read_layouts() if e.spec.rank], ids=lambda e: str(e.spec.name))
def test_later_stages_are_planned_where_they_stand(entry: Any) -> None:
    plan = entry.plan()
    stage = int(entry.spec.name.rpartition("stage")[2])
    assert plan.pipeline_rank == stage
    assert [s["embedding"] for s in plan.table["stages"]] == [stage == 0]


def test_what_is_not_run_is_named_all_together() -> None:
    odd = {**MODEL, "norm": "layernorm", "tie_word_embeddings": True, "qk_norm": True}
    with pytest.raises(InputError) as caught:
        rank_plan(scenario(odd, tp=2, dp=4, recompute={"granularity": "selective", "modules": ["layernorm"]}), 0)
    said = str(caught.value)
    assert len(caught.value.violations) == 4
    for field in ("model.norm", "model.tie_word_embeddings", "model.qk_norm", "plan.recompute.modules"):
        assert field in said


def test_changes_are_noted() -> None:
    base = scenario(training={"precision": "fp8"}, dp=8)
    changed = make_scenario({**base.model_dump(exclude={"file"}), "framework": "megatron-core", "framework_version": None,
                             "plan": {**base.plan.model_dump(), "zero_stage": 1}})  # fmt: skip
    notes = " ".join(rank_plan(changed, 0, layers=2, microbatches=3).notes)
    for text in ("not megatron-core", "zero_stage = 3 instead of 1", "'bf16' instead of 'fp8'", "2 layers per stage", "3 micro-"):
        assert text in notes


def test_experts_of_a_rank_get_even_loads_and_other_ones_are_noted() -> None:
    experts = {**MODEL, "moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}}
    for stated, noted in (({}, False), ({"routing": {"kind": "zipf", "alpha": 0.5}}, True)):
        plan = rank_plan(scenario(experts, dp=8, ep=4, training=stated), 0, layers=1)
        assert plan.scenario.training.routing.kind == "balanced"
        assert any("even loads instead of training.routing 'zipf'" in note for note in plan.notes) == noted


def test_a_pipeline_has_as_many_microbatches_as_stages() -> None:
    base = scenario(pp=4, dp=2, virtual_stages=1, training={"global_batch_size": 32})
    assert rank_plan(base, 0, microbatches=2).table["num_microbatches"] == 4
    assert rank_plan(base, 0, microbatches=6).table["num_microbatches"] == 6


def test_a_rank_outside_the_world_is_refused() -> None:
    with pytest.raises(InputError, match="--rank = 8: the scenario has 8 ranks"):
        rank_plan(scenario(dp=8), 8)


def test_a_gpu_measurement_is_read_back(tmp_path: Path) -> None:
    # Layers at which the device decides, beside an x86 host of which nothing is known: a constant on its kernels shows in the step.
    wide = {**MODEL, "hidden_size": 2048, "head_dim": 256, "intermediate_size": 8192}
    plan = rank_plan(scenario(wide, {"sequence_length": 8192}, dp=8), 3, layers=2)
    (tmp_path / "a.json").write_text(json.dumps(measured_like(plan, 1.01)))
    with calibrated_by((Constant(name="memory", architecture="hopper", value=1.5),)):
        found = run(RankOptions(measured=tmp_path / "a.json"), kernel_kind)
    assert isinstance(found, RankReport)
    errors = {(r.metric, r.part): r.error for r in found.rows}
    for metric in ("allocated_bytes", "reserved_bytes", "step_time_s"):
        assert errors[metric, ""] == pytest.approx(1 / 1.01 - 1)
    # What published clusters add is a line of its own.
    own, published = errors["step_time_s", ""], errors["published_time_s", ""]
    assert own is not None
    assert published is not None
    assert published > own + 0.01
    for kind in set(CLASSES) - {"permute"}:  # of experts only
        assert errors["class_time_s", kind] == pytest.approx(1 / 1.01 - 1), kind
    assert found.exit_code == 0
    (tmp_path / "b.json").write_text(json.dumps(measured_like(plan, 1.2)))
    whole = run(RankOptions(measured=tmp_path), kernel_kind)
    assert isinstance(whole, RankReport)
    assert whole.exit_code == 1
    groups = {g["metric"]: g for g in to_json(whole.rows, ())["groups"]}
    assert groups["step_time_s"]["rows"] == 2
    assert groups["step_time_s"]["within"] == 1


def test_another_profile_predicts_for_the_machine_that_measured() -> None:
    plan = rank_plan(scenario(dp=8), 0)
    measured = json.loads(json.dumps(measured_like(plan)))
    slower = plan_of(measured, "dgx-a100-80gb")
    assert predict(slower).seconds["gemm"] > predict(plan).seconds["gemm"]
    rows = compare(slower, measured, kernel_kind)
    assert next(r.error or 0.0 for r in rows if r.metric == "class_time_s" and r.part == "gemm") > 0.05


def test_attention_is_priced_as_it_ran() -> None:
    """torch's own flash kernel is an older one than cuDNN's, and slower on a Hopper GPU."""
    plan = rank_plan(scenario("llama3.1-8b", {"sequence_length": 8192}, dp=8), 0, layers=1)
    measured = json.loads(json.dumps(measured_like(plan)))
    flash, cudnn = (plan_of({**measured, "sdpa_backend": name}, "dgx-h100") for name in ("flash", "cudnn"))
    assert predict(flash).seconds["attention"] > predict(cudnn).seconds["attention"]
    assert "ran flash, priced as fa2" in flash.notes[-1]
    assert plan_of({**measured, "sdpa_backend": "efficient"}).scenario.training.attention_kernel == "auto"


@pytest.mark.parametrize(
    ("content", "said"),
    [("", "not a measurement"), ("{}", "format 1"), ('{"format": 2, "plan": {}}', "format 1"), ("[1", "not a measurement")],
)
def test_damaged_measurements_are_named(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "m.json").write_text(content)
    with pytest.raises(InputError, match=said):
        run(RankOptions(measured=tmp_path / "m.json"), kernel_kind)


def test_options_that_exclude_each_other(tmp_path: Path) -> None:
    for options in (RankOptions(), RankOptions(scenario=tmp_path, layouts=True)):
        with pytest.raises(InputError, match="exactly one of --scenario, --scenarios, --layouts, --measured"):
            run(options, kernel_kind)
    with pytest.raises(InputError, match="choose auto, cuda or fake"):
        run(RankOptions(layouts=True, device="tpu"), kernel_kind)
    with pytest.raises(InputError, match="--only = 'nothing': is not in the list"):
        run(RankOptions(layouts=True, only=("nothing",)), kernel_kind)
    with pytest.raises(InputError, match="no measurements"):
        run(RankOptions(measured=tmp_path), kernel_kind)


def test_every_metric_has_a_tolerance_and_infinities_stay_out_of_json() -> None:
    row = Row("x", "wire_bytes", "all_reduce over 4", 5.0, 0.0)
    assert not row.within
    said = to_json([row], ["note"])
    assert said["rows"][0]["error"] is None
    json.dumps(said, allow_nan=False)
    assert all(limit > 0 for limit in TOLERANCE.values())


BLOCKED = """
import sys
for name in ("pydantic", "simpy", "typer", "rich", "plotly"):
    sys.modules[name] = None
from simpar.live import rank_worker
assert rank_worker.__file__.startswith({folder!r}), rank_worker.__file__
sys.exit(rank_worker.main({words!r}))
"""


@NEEDS_TORCH
@pytest.mark.torch
def test_the_bundle_runs_without_what_simpar_needs(tmp_path: Path) -> None:
    folder = tmp_path / "bundle"
    plan = rank_plan(scenario(dp=8), 0, layers=1)
    assert write_bundle([plan], folder, {}) == []
    assert {str(p.relative_to(folder / "simpar")) for p in folder.glob("simpar/**/*.py")} == set(WORKER_FILES)
    words = ["--plan", "plans/small.json", "--out", "measured/small.json", "--device", "fake"]
    script = BLOCKED.format(folder=str(folder), words=words)
    found = subprocess.run([sys.executable, "-c", script], cwd=folder, capture_output=True, text=True, timeout=240, check=False)
    assert found.returncode == 0, found.stderr
    report = run(RankOptions(measured=folder / "measured"), kernel_kind)
    assert isinstance(report, RankReport)
    assert report.exit_code == 0
    assert {row.metric for row in report.rows} >= {"parameters", "saved_bytes", "flops", "wire_bytes", "allocated_bytes"}


@NEEDS_TORCH
@pytest.mark.torch
def test_the_command_on_a_scenario(tmp_path: Path) -> None:
    lines = [f"{k} = {v}" for k, v in MODEL.items()]
    text = ["name = 'small'", "framework = 'torchtitan'", "framework_version = '2026-02'", "[model]", *lines, "[cluster]",
            "hardware = 'dgx-h200'", "num_nodes = 1", "[plan]", "dp = 8", "zero_stage = 3", "[training]",
            "sequence_length = 256", "global_batch_size = 8"]  # fmt: skip
    (tmp_path / "s.toml").write_text("\n".join(text))
    words = ["validate", "rank", "--scenario", str(tmp_path / "s.toml"), "--rank", "7", "--layers", "1", "--device", "fake"]
    found = CliRunner().invoke(app, [*words, "--json", "--html", str(tmp_path / "r.html")])
    assert found.exit_code == 0, found.output
    said = json.loads(found.output)
    assert {row["metric"] for row in said["rows"]} >= {"saved_bytes", "allocated_bytes"}
    assert all(row["within"] for row in said["rows"])
    assert "peak allocated" in (tmp_path / "r.html").read_text()


def test_a_worker_that_cannot_run_says_why(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    from simpar.live.rank_worker import main

    (tmp_path / "p.json").write_text(json.dumps(rank_plan(scenario(dp=8), 0).table))
    with pytest.raises(InputError, match="no GPU is visible to torch; use --device fake"):
        run(RankOptions(layouts=True, only=("8b-fsdp8",), layers=1, device="cuda"), kernel_kind)
    assert main(["--plan", str(tmp_path / "nowhere.json"), "--out", str(tmp_path / "o.json")]) == 2
    (tmp_path / "p.json").write_text("{}")
    assert main(["--plan", str(tmp_path / "p.json"), "--out", str(tmp_path / "o.json")]) == 2
