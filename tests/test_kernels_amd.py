"""Attention on AMD's GPUs: which library a framework runs it with, and what published measurements say of each."""

from __future__ import annotations

import csv
import gzip
import io
from pathlib import Path

import numpy as np
import pytest

from simpar.costs.kernels import KernelModel
from simpar.evidence.kernel_blocks import Block
from simpar.evidence.kernel_priced import published_blocks
from simpar.evidence.kernels import validate_kernels
from simpar.parallel.work import AttentionWork, Gemm
from simpar.specs.base import data_dir
from simpar.specs.framework import framework
from simpar.specs.hardware import load_hardware

TABLE = data_dir("validation") / "kernels" / "published_attention.csv.gz"
BLOCKS = {(b.gpu, b.op, b.constants): b for b in published_blocks(TABLE)}


@pytest.mark.parametrize(
    ("name", "month", "kernel"),
    [
        ("torchtitan", "2025-08", "aotriton"), ("torchtitan", "2025-10", "aotriton0.11"), ("torchtitan", "2026-08", "flex"),
        ("plain", "2024-02", "unfused"), ("plain", "2024-04", "aotriton"), ("torchtune", "2026-01", "aotriton0.11"),
        ("nanotron", "2025-10", "fa2"), ("transformers", "2025-07", "fa2"), ("transformers", "2025-09", "aotriton"),
        ("torch-te", "2024-10", "fa2"), ("torch-te", "2025-05", "aiter"), ("megatron-core", "2025-04", "fa2"),
        ("megatron-core", "2026-02", "aiter"), ("megatron-core", "2021-01", "unfused"),
    ],
)  # fmt: skip
def test_what_attends_on_amd_gpus(name: str, month: str, kernel: str) -> None:
    kernels = framework(name, month).kernels
    assert kernels.attention_kernel("cdna3") == kernel
    assert kernels.attention_kernel("hopper") not in ("aiter", "aotriton", "aotriton0.11")


@pytest.mark.parametrize("key", sorted(BLOCKS), ids="-".join)
def test_prices_agree_with_published_kernels(key: tuple[str, str, str]) -> None:
    block: Block = BLOCKS[key]
    errors = np.abs(block.predicted / block.measured - 1.0)
    assert np.median(errors) < 0.08
    assert np.mean((block.low <= block.measured) & (block.measured <= block.high)) > 0.8


def test_products_agree_with_published_ones() -> None:
    """AITER's shapes on an MI355X; the MI350X reaches four fifths of it (hipBLASLt, HipKittens; torch.matmul on another board)."""
    blocks = {(b.gpu, b.dtype): b for b in published_blocks(TABLE.with_name("published_gemm.csv.gz"))}
    for key, most in ((("mi355x", "bf16"), 0.08), (("mi350x", "bf16"), 0.13), (("mi355x", "fp8"), 0.16), (("mi350x", "fp8"), 0.16)):
        block = blocks[key]
        assert np.median(np.abs(block.predicted / block.measured - 1.0)) < most
    large = {gpu: np.median((b.predicted / b.measured)[b.flops > 1e11]) for (gpu, _), b in blocks.items() if gpu != "mi300x"}
    assert all(0.85 < value < 1.15 for value in large.values()), large


def test_published_kernels_are_shown_and_not_judged(tmp_path: Path) -> None:
    for name in ("published_attention.csv.gz", "published_gemm.csv.gz"):
        (tmp_path / name).symlink_to(TABLE.with_name(name))
    report = validate_kernels(tmp_path)
    assert not report.failures
    assert len({b.table for b in report.blocks}) == 2


def test_the_table_holds_what_its_readers_take() -> None:
    rows = list(csv.DictReader(io.StringIO(gzip.decompress(Path(TABLE).read_bytes()).decode())))
    assert {row["kernel"] for row in rows} == {"aiter", "aotriton", "fa2"}
    assert all(row["source"] and float(row["us"]) > 0 for row in rows)
    assert sum(len(block.measured) for block in BLOCKS.values()) == len(rows)


def _seconds(hardware: str, kernel: str, *, backward: bool, causal: bool = True) -> float:
    work = AttentionWork(1, 8192, 8192, 32, 32, 128, 128, causal, backward, kernel)
    return KernelModel(load_hardware(hardware)).attention(work).seconds


def test_aotritons_backward_is_aiters_from_version_0_11_on() -> None:
    """Before, it is five times slower on an MI300X; the forward stays its own."""
    for backward, other in ((True, "aiter"), (False, "aotriton")):
        new = _seconds("mi300x", "aotriton0.11", backward=backward)
        assert new == _seconds("mi300x", other, backward=backward)
    assert 4.0 < _seconds("mi300x", "aotriton", backward=True) / _seconds("mi300x", "aotriton0.11", backward=True) < 7.0


@pytest.mark.parametrize(("kernel", "other"), [("aiter", "fa2"), ("aotriton0.11", "aotriton")])
def test_aiter_takes_no_window(kernel: str, other: str) -> None:
    model = KernelModel(load_hardware("mi355x"))
    work = AttentionWork(1, 8192, 8192, 64, 8, 64, 64, backward=True, kernel=kernel)
    for window in (128, 8191):
        assert model.attention(work._replace(window=window)) == model.attention(work._replace(window=window, kernel=other))
    assert model.attention(work._replace(window=8192)) == model.attention(work)


def test_flex_and_masked_attention_are_tritons_on_amd_gpus_alone() -> None:
    for kernel in ("flex", "efficient-causal"):
        assert _seconds("mi355x", kernel, backward=True) == _seconds("mi355x", "aotriton", backward=True)
    masked, whole = (_seconds("mi355x", k, backward=True, causal=k != "aotriton") for k in ("efficient", "aotriton"))
    assert masked == whole
    assert _seconds("dgx-a100-80gb", "flex", backward=True) == _seconds("dgx-a100-80gb", "fa2", backward=True)


def test_an_mi300x_runs_slower_in_a_step_than_in_a_short_run() -> None:
    """Llama-2 70B with LoRA at 750 W (Lumen's profile): a call of attention; fp8 products of 101 forwards and 80 backwards."""
    held, short = (KernelModel(load_hardware("mi300x"), sustained=mode) for mode in (True, False))
    for backward, measured_ms, short_ms in ((False, 2.403, 2.123), (True, 7.433, 6.353)):
        work = AttentionWork(1, 8192, 8192, 64, 8, 128, 128, True, backward, "aiter")
        assert held.attention(work).seconds * 1e3 == pytest.approx(measured_ms, rel=0.01)
        assert short.attention(work).seconds * 1e3 == pytest.approx(short_ms, rel=0.04)
    shapes = ((10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672))
    layer = {d: sum(held.gemm(Gemm(8192, n, k, "fp8", d)).seconds for n, k in shapes) for d in ("forward", "dgrad")}
    assert 101 * layer["forward"] + 80 * layer["dgrad"] == pytest.approx(2.483, rel=0.01)


def test_fp8_products_scale_apart_from_the_others() -> None:
    """0.782 of the base's rate where bf16 has 0.84: 4096^3 takes 0.84 / 0.782 times as long, but for launch and memory."""
    mi300x = load_hardware("mi300x")
    alike = mi300x.model_copy(update={"kernels": mi300x.kernels.model_copy(update={"fp8_scale": None})})
    apart, other = KernelModel(mi300x), KernelModel(alike)
    assert apart.gemm(Gemm(4096, 4096, 4096)) == other.gemm(Gemm(4096, 4096, 4096))
    large = Gemm(16384, 16384, 16384, "fp8")
    assert apart.gemm(large).seconds / other.gemm(large).seconds == pytest.approx(0.84 / 0.782, rel=0.01)


def test_memory_bound_kernels_of_amd_gpus() -> None:
    """A norm of 8,192 rows of 8,192 as measured inside a step: 268.4 MB at 0.6428 of 5.3 TB/s, 78.8 us, and a start of 2 us.

    What only the base measured stays in proportion to a copy: 0.8648 of an H100's peak, where a copy reaches 0.9042, are 0.7412 of
    the peak here, where it reaches 0.775. On an MI355X a rotary embedding moves 4.295 GB at 0.2919 of 8 TB/s."""
    model = KernelModel(load_hardware("mi300x"))
    assert model.memory_bound("norm", 4 * 8192**2).seconds == pytest.approx(80.8e-6, rel=1e-3)
    assert model.memory_bound("activation", 1e9).seconds == pytest.approx(2e-6 + 1e9 / (0.7412 * 5.3e12), rel=1e-4)
    assert KernelModel(load_hardware("mi355x")).memory_bound("rope", 4.295e9).seconds == pytest.approx(1.841e-3, rel=1e-3)
