"""Fits: known constants come back, outliers do not move them, folders and files say what is wrong."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from simpar.costs.compute import GemmShapes, gemm_seconds
from simpar.costs.kernel_choice import fitted
from simpar.costs.kernels import KernelModel
from simpar.errors import InputError
from simpar.evidence.kernel_law import bands, halves
from simpar.evidence.kernel_tables import Source, attention_name, column_source, columns, gemm_name, profile_of
from simpar.evidence.robust import soft_l1
from simpar.parallel.work import Gemm
from simpar.specs.hardware import load_hardware
from validation.tools import fit, fit_gemm, fit_kernels


def test_soft_l1_ignores_outliers() -> None:
    rng = np.random.default_rng(0)
    x = rng.uniform(0, 3, 400)
    y = 0.7 + 1.3 * x + rng.normal(0, 0.01, 400)
    y[::10] += 2.0
    found = soft_l1(lambda p: p[0] + p[1] * x, y, np.zeros(2), np.zeros(2), np.full(2, 3.0))
    assert found == pytest.approx([0.7, 1.3], abs=0.02)


def test_known_constants_come_back() -> None:
    """Times made by a known set with 2 % noise are fitted to within the noise, also on unseen (n, k)."""
    truth = fitted("h200").gemm[0]
    rng = np.random.default_rng(3)
    n, k = (rng.choice([512, 1024, 2048, 3072, 4096, 7168, 10240, 16384], 700).astype(float) for _ in range(2))
    m = rng.choice([512, 768, 1024, 1536, 2048, 4096, 8192], 700).astype(float)
    seconds = gemm_seconds(truth, 132.0, GemmShapes(m, n, k)) * np.exp(rng.normal(0, 0.02, 700))
    table = {"m": m, "n": n, "k": k, "us_x_sustained": seconds * 1e6}
    source = Source("h200", "bf16", "x_sustained", "sustained", False)
    c = fit_gemm.fit_column(table, "us_x_sustained", source, load_hardware("dgx-h200"), "made.csv")
    assert c is not None
    assert c.fit.median < 0.02
    assert c.fit.held_out_median < 0.025
    clean = gemm_seconds(truth, 132.0, GemmShapes(m, n, k))
    assert np.median(np.abs(gemm_seconds(c, 132.0, GemmShapes(m, n, k)) / clean - 1)) < 0.012


def test_intervals_cover_four_fifths() -> None:
    rng = np.random.default_rng(5)
    flops = 10 ** rng.uniform(9, 14, 20000)
    logs = rng.normal(0.02, np.where(flops < 1e11, 0.1, 0.03))
    found = bands(flops, logs)
    inside = 0
    for size, log in zip(flops, logs, strict=True):
        own = [b for b in found if b.from_size <= size][-1]
        inside += own.low <= np.exp(-log) <= own.high
    assert inside / len(flops) == pytest.approx(0.8, abs=0.01)
    widths = [np.log(b.high / b.low) for b in found]
    assert widths[0] > 2 * widths[-1]


def test_halves_split_groups_whole() -> None:
    n, k = np.repeat(np.arange(40.0), 10), np.tile(np.repeat([1.0, 2.0], 5), 40)
    mask = halves(n, k)
    assert 0.3 < mask.mean() < 0.7
    for pair in set(zip(n, k, strict=True)):
        own = mask[(n == pair[0]) & (k == pair[1])]
        assert own.all() or not own.any()


def test_names_say_what_they_hold() -> None:
    assert gemm_name(Path("gemm_b300_bf16.csv")) == ("b300", "bf16")
    assert gemm_name(Path("gemm_h100_pcie_fp8.csv")) == ("h100_pcie", "fp8")
    assert attention_name(Path("attention_full_h100_fa3_vit_vllm0240.csv")) == ("h100", "fa3", "vit_vllm0240")
    assert column_source("h100", "fp8", "us_deepgemm_block_incl_quant").dtype == "fp8_block"
    assert column_source("h200", "bf16", "us_vllm0220_sustained").mode == "sustained"
    b300, nothing = profile_of("b300_sxm"), profile_of("abacus")
    assert b300 is not None
    assert b300.name == "dgx-b300"
    assert nothing is None


def test_missing_columns_are_named(tmp_path: Path) -> None:
    path = tmp_path / "gemm_h100_bf16.csv"
    path.write_text("m,us_x\n1,2\n")
    with pytest.raises(InputError) as error:
        columns(path, ("m", "n", "k"))
    assert {v.field for v in error.value.violations} == {"n", "k"}


def test_command_refuses_a_folder_without_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fit.main(["kernels", "--data", str(tmp_path), "--out", str(tmp_path / "o")]) == 2
    assert "gemm_" in capsys.readouterr().err
    assert fit.main(["kernels", "--data", str(tmp_path / "no")]) == 2


def test_fp8_that_nobody_held_takes_the_share_of_a_gpu_of_the_same_kernels() -> None:
    """B200: what the cap leaves of a GB200's fp8; beside it the ratio of each other power state. An own set is left alone."""
    sets, kin = (list(KernelModel(load_hardware(name)).resolved.constants.gemm) for name in ("dgx-b200", "gb200-nvl72"))
    measured = [c for c in sets if not c.derived]
    made = fit_kernels.narrow_sustained(measured, kin, 148.0)
    assert [(c.dtype, c.mode) for c in made] == [("fp8", "sustained")] * 2 + [("fp8_block", "sustained")] * 2
    burst, held = (next(c for c in kin if c.dtype == "fp8" and c.mode == mode) for mode in ("burst", "sustained"))
    share = fit_kernels._typical(burst, 148.0) / fit_kernels._typical(held, 148.0)
    fp8 = next(c for c in measured if c.dtype == "fp8" and c.mode == "burst")
    assert made[0].rate_flops_per_s == pytest.approx(share * fp8.rate_flops_per_s)
    assert made[1].library == "vllm0220_sustained"
    alone = fit_kernels.narrow_sustained(measured, [], 148.0)
    assert alone[0].rate_flops_per_s < 0.9 * made[0].rate_flops_per_s  # the bf16 ratio of the set that prices bf16
    assert not fit_kernels.narrow_sustained([*measured, *made], kin, 148.0)


def test_a_profile_names_the_library_that_prices_its_products() -> None:
    """MI355X: its own sets, of whose peaks fp8 reaches as much as bf16; what it has no set for is its base's, scaled."""
    amd, b200 = (KernelModel(load_hardware(name)) for name in ("mi355x", "dgx-b200"))
    sets = {dtype: amd.gemm_set(dtype)[0] for dtype in ("bf16", "fp8")}
    assert {c.library for c in sets.values()} == {"aiter"}
    assert sets["fp8"].rate_flops_per_s == pytest.approx(2.0 * sets["bf16"].rate_flops_per_s, rel=1e-4)
    block = amd.gemm_set("fp8_block")[0]
    assert block.rate_flops_per_s in [pytest.approx(1.08 * c.rate_flops_per_s) for c in b200.resolved.constants.gemm]


def test_less_power_makes_no_product_faster() -> None:
    """A B200 of 1,000 W beside a GB200 of 1,200 W, sustained, in every precision."""
    b200, gb200 = (KernelModel(load_hardware(name)) for name in ("dgx-b200", "gb200-nvl72"))
    for dtype in ("bf16", "fp8"):
        assert b200.gemm(Gemm(16384, 8192, 8192, dtype=dtype)).seconds > gb200.gemm(Gemm(16384, 8192, 8192, dtype=dtype)).seconds
