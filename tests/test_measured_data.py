"""validation/measured: the committed comparison is recomputed, its bounds hold, and README.md says what it gives."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from measured_machines import NAME, machines, measured_dir, read_machine, readme_line
from test_validate_rank_command import measured_like, scenario

from simpar.errors import InputError
from simpar.interop.kineto_step import kernel_kind
from simpar.live.profile_out import write
from simpar.live.rank_frozen import digest, freeze
from simpar.live.rank_plan import rank_plan
from simpar.live.store import Store

ROOT = Path(__file__).resolve().parents[1]
ABOUT = """
machine = "one made up H200"
date = "2026-11-22"
source = "a test"
[[bounds]]
metric = "step_time_s"
median = 0.08
worst = 0.11
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two ranks, 4 and 10 % slower than predicted."""
    own = tmp_path / "h200-2026-11"
    (own / "ranks").mkdir(parents=True)
    (own / "about.toml").write_text(ABOUT)
    plans = []
    for name, factor in (("first", 1 / 0.96), ("second", 1 / 0.9)):
        base = scenario(dp=8)
        plan = rank_plan(base.model_copy(update={"name": name}), 0, layers=1)
        plans.append(plan)
        (own / "ranks" / f"{name}.json").write_text(json.dumps(measured_like(plan, factor)))
    freeze(plans, own / "predictions.json")
    return own


def test_committed_machines_keep_their_bounds_and_the_readme_says_so() -> None:
    found = machines(kernel_kind)
    assert [m.broken for m in found if m.broken] == []
    assert all(re.match(NAME, m.name) for m in found)
    assert readme_line(found) in " ".join((ROOT / "README.md").read_text().split())


def test_a_folder_is_compared_with_what_was_frozen(folder: Path) -> None:
    found = read_machine(folder, kernel_kind)
    assert found.errors("step_time_s") == pytest.approx([0.04, 0.10])
    assert found.broken == []
    line = readme_line([found])
    assert line == (
        "single-rank step on one made up H200: median 7.0 %, worst 10.0 % over 2 layouts, predictions committed before"
    )  # fmt: skip


def test_a_bound_that_is_not_kept_is_named(folder: Path) -> None:
    text = (folder / "about.toml").read_text()
    (folder / "about.toml").write_text(text.replace("worst = 0.11", "worst = 0.09"))
    assert "worst 10.0 % (9.0)" in read_machine(folder, kernel_kind).broken[0]
    (folder / "about.toml").write_text('compared = ["first"]\n' + text)
    assert read_machine(folder, kernel_kind).errors("step_time_s") == pytest.approx([0.04])


def test_bounds_of_parts_leave_no_layout_out(folder: Path) -> None:
    """A layout that no part names would be in no sentence."""
    part = '[[bounds]]\nmetric = "step_time_s"\nwhat = "the {0}"\nlayouts = ["{0}"]\nmedian = 0.2\nworst = 0.2\n'
    text = ABOUT + part.format("first")
    (folder / "about.toml").write_text(text)
    assert "leave layouts out" in read_machine(folder, kernel_kind).broken[0]
    (folder / "about.toml").write_text(text + part.format("second"))
    found = read_machine(folder, kernel_kind)
    assert found.broken == []
    assert "the first: median 4.0 %, worst 4.0 % over 1 layouts; the second: median 10.0 %" in readme_line([found])


def test_a_repeat_is_held_to_its_bound(folder: Path) -> None:
    table = json.loads((folder / "ranks" / "first.json").read_text())
    table["step_median_s"] /= 1.25
    (folder / "ranks" / "first.again.json").write_text(json.dumps(table))
    assert read_machine(folder, kernel_kind).errors("repeat_s") == pytest.approx([0.25])


def test_runs_of_the_trainer_are_compared_with_what_was_frozen(folder: Path) -> None:
    own = folder / "trainer"
    (own / "measured").mkdir(parents=True)
    said = {"a-run": {"step_time_s": 0.9, "peak_memory_bytes": {"allocated": 98.0}}}
    (own / "predictions.json").write_text(json.dumps({"sha256": digest(said), "predictions": said}))
    measured = {"name": "a-run", "median_s": 1.0, "allocated_bytes": 100}
    (own / "measured" / "a-run.json").write_text(json.dumps(measured))
    found = read_machine(folder, kernel_kind)
    assert found.errors("trainer_step_time_s") == pytest.approx([0.1])
    assert found.errors("trainer_allocated_bytes") == pytest.approx([0.02])
    assert "Step of Hugging Face's Trainer on one made up H200: median 10.0 %, worst 10.0 % over 1 runs" in readme_line([found])
    (own / "predictions.json").write_text((own / "predictions.json").read_text().replace("0.9", "1.0"))
    with pytest.raises(InputError, match="changed after they were frozen"):
        read_machine(folder, kernel_kind)


NAMES = (
    ("FusedAdamMathFunctor<float", "optimizer"), ("LpNormFunctor<float", "optimizer"), ("lpnorm_cleanup<float", "optimizer"),
    ("BinaryOpScalarTensorFunctor<float", "optimizer"), ("at::native::Copy<c10::BFloat16, float>", "memory_bound"),
    ("at::native::Copy<c10::BFloat16, c10::BFloat16>", "memory_bound"), ("split_with_sizes_copy_out", "memory_bound"),
    ("chunk_cat_cuda_kernel", "memory_bound"), ("GammaBetaBackwardCUDAKernelTemplate", "norm"),
    ("vectorized_layer_norm_kernel", "norm"), ("layer_norm_grad_input_kernel", "norm"), ("indexing_backward_kernel", "permute"),
    ("scatter_gather_elementwise_kernel", "permute"), ("cunn_SoftMaxBackward", "loss"), ("compute_dot_do_o", "attention"),
    ("convert_dq_to_16bits", "attention"), ("fmha_reduce_head", "attention"), ("sdpa_sm90_flash_bprop", "attention"),
    ("nvjet_sm90_tst", "gemm"), ("GroupProblemShape", "gemm"), ("Memset (Device)", "copy"),
)  # fmt: skip
"""Part of a kernel's name on an H100 under torch 2.11, and what it is."""


@pytest.mark.parametrize(("part", "kind"), NAMES)
def test_kernels_of_a_real_rank_have_the_class_they_are_predicted_in(part: str, kind: str) -> None:
    ranks = measured_dir() / "h100-2026-11" / "ranks"
    tables = [json.loads((ranks / f"{name}.json").read_text()) for name in ("8b-fsdp8", "deepseek-v3-ep64-pp16-stage14")]
    names = {kernel["name"] for table in tables for kernel in table["kernels"] if part in kernel["name"]}
    assert names
    assert {kernel_kind(name) for name in names} == {kind}


@pytest.mark.parametrize("folder", [p for p in measured_dir().iterdir() if (p / "profile.toml").is_file()], ids=lambda p: p.name)
def test_a_committed_profile_is_the_one_of_its_calibration(folder: Path, tmp_path: Path) -> None:
    shutil.copy(folder / "calibration.jsonl", tmp_path)
    write(Store(tmp_path / "calibration.jsonl"), tmp_path / "profile.toml")
    assert (tmp_path / "profile.toml").read_text() == (folder / "profile.toml").read_text()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("strange", "does not belong there"), ("no predictions", "not predictions"), ("unpredicted", "nothing was predicted of"),
        ("edited", "changed after they were frozen"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_folder_is_said(folder: Path, change: str, said: str) -> None:
    frozen = folder / "predictions.json"
    if change == "strange":
        (folder / "notes.txt").write_text("x")
    elif change == "no predictions":
        frozen.unlink()
    elif change == "edited":
        frozen.write_text(frozen.read_text().replace('"gemm": ', '"gemm": 1', 1))
    else:
        shutil.copy(folder / "ranks" / "first.json", folder / "ranks" / "third.json")
        table = json.loads((folder / "ranks" / "third.json").read_text())
        table["plan"]["scenario"]["name"] = "third"
        (folder / "ranks" / "third.json").write_text(json.dumps(table))
    with pytest.raises(InputError, match=said):
        read_machine(folder, kernel_kind)
