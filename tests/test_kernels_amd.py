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
from simpar.parallel.work import AttentionWork
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
        ("torch-te", "2024-10", "fa2"), ("torch-te", "2025-06", "aiter"), ("megatron-core", "2025-05", "fa2"),
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


def test_flex_and_masked_attention_are_tritons_on_amd_gpus_alone() -> None:
    for kernel in ("flex", "efficient-causal"):
        assert _seconds("mi355x", kernel, backward=True) == _seconds("mi355x", "aotriton", backward=True)
    masked, whole = (_seconds("mi355x", k, backward=True, causal=k != "aotriton") for k in ("efficient", "aotriton"))
    assert masked == whole
    assert _seconds("dgx-a100-80gb", "flex", backward=True) == _seconds("dgx-a100-80gb", "fa2", backward=True)
