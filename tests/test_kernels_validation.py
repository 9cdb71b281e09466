"""`simpar validate kernels`: the errors reached on measured tables, and how unknown ones are told."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path

import numpy as np
import pytest

from simpar.costs.kernels import KernelModel
from simpar.errors import InputError
from simpar.evidence.kernel_blocks import Block
from simpar.evidence.kernels import read_blocks, run, validate_kernels
from simpar.evidence.memory_tables import memory_rows
from simpar.parallel.work import Gemm
from simpar.specs.hardware import load_hardware

DATA = Path(os.environ.get("SIMPAR_SHARED_DATA", Path(__file__).parent / "data" / "measured")) / "kernels"


SLACK = 1.0 if "SIMPAR_SHARED_DATA" in os.environ else 1.4
"""What quantiles of a few hundred sampled rows may be off from those of the whole table that the bounds are for."""
COVERAGE = (0.75, 0.86) if SLACK == 1.0 else (0.68, 0.93)


def errors(block: Block) -> np.ndarray:
    ok = block.core & np.isfinite(block.predicted)
    return np.abs(block.predicted[ok] / block.measured[ok] - 1)


def thinned(name: str, folder: Path, step: int) -> Path:
    """Every `step`-th row of a measured table, for speed."""
    with (DATA / name).open() as handle:
        header, *rows = list(csv.reader(handle))
    path = folder / name
    with path.open("w", newline="") as handle:
        csv.writer(handle).writerows([header, *rows[::step]])
    return path


GEMM = [
    ("gemm_h200_bf16.csv", "us_vllm0220_sustained", 0.035, 0.10), ("gemm_h100_bf16.csv", "us_trtllm130rc10", 0.035, 0.10),
    ("gemm_a100_bf16.csv", "us_sglang0510", 0.03, 0.10), ("gemm_b200_bf16.csv", "us_vllm0220_sustained", 0.05, 0.14),
    ("gemm_gb200_bf16.csv", "us_trtllm130rc17_sustained", 0.05, 0.14),
    ("gemm_h100_fp8.csv", "us_trtllm_fp8_incl_quant", 0.03, 0.08),
    ("gemm_h100_fp8.csv", "us_sgl_cutlass_rowwise_incl_quant", 0.04, 0.12),
    ("gemm_h100_fp8.csv", "us_deepgemm_block_incl_quant", 0.04, 0.14),
    ("gemm_gb200_fp8.csv", "us_trtllm_rc17_sustained", 0.03, 0.08),
]  # fmt: skip


@pytest.mark.parametrize(("name", "column", "median", "p90"), GEMM)
def test_gemm_tables(name: str, column: str, median: float, p90: float, tmp_path: Path) -> None:
    block = next(b for b in read_blocks(thinned(name, tmp_path, 5 if SLACK == 1.0 else 1)) if b.table.endswith(":" + column))
    error = errors(block)
    assert np.median(error) <= SLACK * median
    assert np.quantile(error, 0.9) <= SLACK * p90
    inside = (block.measured >= block.low) & (block.measured <= block.high)
    assert COVERAGE[0] <= inside.mean() <= COVERAGE[1]


@pytest.mark.parametrize(("name", "median", "p90"), [
    ("attention_a100_fa2_sglang0510.csv", 0.02, 0.07), ("attention_h100_fa3_vllm0240.csv", 0.04, 0.12),
    ("attention_b200_trtllmgen_vllm0240.csv", 0.03, 0.10),
    ("attention_gb200_trtllmgen_vllm0240.csv", 0.03, 0.11), ("attention_full_h100_fa3_vit_vllm0240.csv", 0.04, 0.12),
])  # fmt: skip
def test_attention_tables(name: str, median: float, p90: float, tmp_path: Path) -> None:
    (block,) = read_blocks(thinned(name, tmp_path, 3 if SLACK == 1.0 else 1))
    error = errors(block)
    assert np.median(error) <= SLACK * median
    assert np.quantile(error, 0.9) <= SLACK * p90
    inside = (block.measured >= block.low) & (block.measured <= block.high)
    assert COVERAGE[0] - 0.01 <= inside.mean() <= COVERAGE[1] + 0.01


def test_training_layouts_and_memory_bound() -> None:
    blocks = read_blocks(DATA / "simumax_ops.csv")
    a100 = np.concatenate([errors(b) for b in blocks if b.op == "gemm_training" and b.gpu == "a100_pcie"])
    assert np.median(a100) <= 0.02
    (membound,) = read_blocks(DATA / "membound.csv")
    assert np.median(errors(membound)) <= 0.05


def test_a_backward_is_what_both_passes_leave_of_the_forward() -> None:
    """Liger-Kernel's megatron_swiglu, 8192 x 32768: 0.858 of 5.083 ms are the forward, 10 of 16 bytes the backward's."""
    rows = {(r.kernel, r.tier): r for r in memory_rows(DATA / "membound.csv") if r.gpu == "h100"}
    elements = 8192 * 32768
    for tier, both, forward in (("framework", 5.083e-3, 0.858e-3), ("tuned", 1.912e-3, 0.528e-3)):
        assert rows["gate_backward", tier].bytes_per_s == pytest.approx(10 * elements / (both - forward), rel=0.01)


def made_table(folder: Path, gpu: str, factor: float, rows: int = 60) -> Path:
    """A table like the measured ones, from the model's own prices of another GPU."""
    model = KernelModel(load_hardware("dgx-b300"), sustained=False)
    path = folder / f"gemm_{gpu}_bf16.csv"
    lines = ["m,n,k,us_trtllm200"]
    for i in range(rows):
        m, n, k = 512 + 64 * i, 4096, 2048 + 128 * (i % 7)
        lines.append(f"{m},{n},{k},{model.gemm(Gemm(m, n, k)).seconds * 1e6 * factor:.4f}")
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_table_of_an_unfitted_gpu_is_predicted(tmp_path: Path) -> None:
    made_table(tmp_path, "b300", 1.0)
    report = validate_kernels(tmp_path)
    (block,) = report.blocks
    assert block.constants == "default"
    assert np.isfinite(block.predicted).all()
    assert np.median(errors(block)) < 0.15
    assert not report.failures


def test_an_unknown_gpu_is_skipped_with_the_reason(tmp_path: Path) -> None:
    made_table(tmp_path, "abacus", 1.0)
    report = validate_kernels(tmp_path)
    row = next(report.rows())
    assert row["predicted"] is None
    assert "abacus" in row["skipped"]
    assert report.groups[0].summary.skipped == 60


def test_rows_and_groups_as_promised(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made_table(tmp_path, "h100", 1.0)
    assert run(tmp_path, True) in (0, 1)
    told = json.loads(capsys.readouterr().out)
    row = told["rows"][0]
    assert {"id", "metric", "measured", "predicted", "low", "high", "group", "skipped"} <= set(row)
    assert row["metric"] == "time_s"
    assert {"table", "op", "gpu", "dtype", "m", "n", "k"} <= set(row["group"])
    assert row["low"] <= row["predicted"] <= row["high"]
    assert {"rows", "mape", "median", "p90", "bias", "coverage"} <= set(told["groups"][0])


def test_past_tolerance_exits_one(tmp_path: Path) -> None:
    """A column of a fitted library, spoiled by half, is past its tolerance; as predicted, it is not."""
    model = KernelModel(load_hardware("dgx-h100"), library="trtllm130rc10", sustained=False)
    for factor, code in ((1.0, 0), (1.5, 1)):
        lines = ["m,n,k,us_trtllm130rc10"]
        lines += [f"{m},4096,4096,{model.gemm(Gemm(m, 4096, 4096)).seconds * 1e6 * factor}" for m in range(512, 4096, 64)]
        (tmp_path / "gemm_h100_bf16.csv").write_text("\n".join(lines) + "\n")
        assert run(tmp_path, False) == code


def test_nothing_to_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="gemm_"):
        validate_kernels(tmp_path)
    with pytest.raises(InputError, match="no such"):
        validate_kernels(tmp_path / "no")
