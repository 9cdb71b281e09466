"""Attention and memory-bound prices: closed forms and metamorphic relations."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simpar.costs.attention import AttentionShapes, attention_flops, attention_seconds
from simpar.costs.kernels import KernelModel
from simpar.costs.memory_bound import DEFAULT_CLASSES
from simpar.errors import UnknownNameError
from simpar.parallel.work import AttentionWork
from simpar.specs.hardware import load_hardware
from simpar.specs.kernel_constants import AttentionConstants, HeadConstants


@pytest.fixture(scope="module")
def h100() -> KernelModel:
    return KernelModel(load_hardware("dgx-h100"))


def shapes(b: float, s: float, h: float, d: float = 128) -> AttentionShapes:
    v = [np.array([float(x)]) for x in (b, s, s, h, h, d, d)]
    return AttentionShapes(*v)  # type: ignore[arg-type]


def plain(causal: bool, s0: float) -> AttentionConstants:
    head = HeadConstants(head_dim=128, rate_flops_per_s=5e14, sequence_overhead=s0)
    return AttentionConstants(kernel="fa3", library="x", mode="burst", causal=causal, heads=(head,), latency_s=0.0,
                              critical_share=0.0,
                              wave_beta=0.0)  # fmt: skip


@pytest.mark.parametrize("s", [2048, 8192, 65536])
@pytest.mark.parametrize("s0", [0.0, 600.0])
def test_rate_is_limited_by_length(s: int, s0: float) -> None:
    """FLOP rate = R s / (s + s0), causal over the triangle and full over the square."""
    a = shapes(4, s, 32)
    for causal in (True, False):
        seconds = attention_seconds(plain(causal, s0), 128.0, a)[0]
        flops = attention_flops(a, causal=causal)[0]
        # Full tiles are 128 rows here, so the square is exact.
        assert flops / seconds == pytest.approx(5e14 * s / (s + s0), rel=1e-6)


def test_longest_tile_bounds_a_small_batch() -> None:
    c = plain(True, 0.0).model_copy(update={"critical_share": 1.0, "overlap_power": 20.0})
    alone = attention_seconds(c, 132.0, shapes(1, 4096, 1))[0]
    assert alone == pytest.approx(4.0 * 128 * 128 * 4096 * 132 / 5e14, rel=0.01)


@settings(max_examples=40, deadline=None)
@given(
    b=st.integers(1, 16), s=st.sampled_from([1024, 4096, 16384]), h=st.sampled_from([8, 32, 64]), d=st.sampled_from([64, 128, 256]),
    name=st.sampled_from(["dgx-h100", "dgx-a100-80gb", "dgx-b200"]),
)  # fmt: skip
def test_never_faster_than_the_data_sheet(b: int, s: int, h: int, d: int, name: str) -> None:
    hardware = load_hardware(name)
    price = KernelModel(hardware).attention(AttentionWork(b, s, s, h, h, d, d))
    assert price.seconds > 2.0 * b * h * s * s * d / hardware.peak_flops_per_s("bf16")
    assert price.low <= price.seconds <= price.high


def test_published_h100_rates(h100: KernelModel) -> None:
    """FlashAttention-3 chart, head size 128, 16k tokens, causal at 8k: 602 TFLOP/s; backward over forward 2.9."""
    forward, backward = (
        h100.attention(AttentionWork(2, 8192, 8192, 16, 16, 128, 128, backward=d == "backward")) for d in ("forward", "backward")
    )
    rate = 2.0 * 2 * 16 * 8192**2 * 128 / forward.seconds
    assert rate == pytest.approx(602e12, rel=0.12)
    assert 2.6 < backward.seconds / forward.seconds < 3.2


def test_a_head_runs_as_wide_as_flash_attention_s_kernel_for_it(h100: KernelModel) -> None:
    """FlashAttention has kernels of 64, 96, 128, 192 and 256; cuDNN's are not known."""

    def seconds(kernel: str, size: int, *, backward: bool = False) -> float:
        return h100.attention(AttentionWork(1, 4096, 4096, 32, 32, size, size, backward=backward, kernel=kernel)).seconds

    for backward in (False, True):
        assert seconds("fa2", 80, backward=backward) == seconds("fa2", 96, backward=backward)
        assert seconds("fa3", 112, backward=backward) == seconds("fa3", 128, backward=backward)
    assert seconds("fa2", 64) < seconds("fa2", 96) < 0.95 * seconds("fa2", 128)
    assert seconds("cudnn", 80) < 0.99 * seconds("cudnn", 96)


def test_mask_and_window(h100: KernelModel) -> None:
    causal = h100.attention(AttentionWork(1, 16384, 16384, 32, 8, 128, 128)).seconds
    full = h100.attention(AttentionWork(1, 16384, 16384, 32, 8, 128, 128, causal=False)).seconds
    assert 1.7 < full / causal < 2.2
    assert h100.attention(AttentionWork(1, 16384, 16384, 32, 8, 128, 128, window=16384)).seconds == pytest.approx(causal)
    narrow = h100.attention(AttentionWork(1, 16384, 16384, 32, 8, 128, 128, window=1024)).seconds
    assert 0.1 < narrow / causal < 0.2


@pytest.mark.parametrize(
    ("heads", "head_dim", "window", "length", "backward", "attended"),
    [
        (128, 64, 128, 4096, False, 161e12),
        (128, 64, 128, 4096, True, 182e12),
        (128, 64, 128, 16384, False, 167e12),
        (128, 64, 128, 16384, True, 188e12),
    ],
)
def test_a_narrow_window_pays_for_its_rows(
    heads: int, head_dim: int, window: int, length: int, backward: bool, attended: float
) -> None:
    """cuDNN 9.22 on a GB200, GPT-OSS's windows (cudnn-frontend's benchmarks, 2026-04-24); by pairs alone 3.5 to 5 times faster."""
    gb200 = KernelModel(load_hardware("gb200-nvl72"))
    work = AttentionWork(2, length, length, heads, heads, head_dim, head_dim, backward=backward, kernel="cudnn9.19", window=window)
    pairs = length * window - window**2 / 2
    measured = 4.0 * 2 * heads * head_dim * pairs * (2.5 if backward else 1.0) / attended
    assert gb200.attention(work).seconds == pytest.approx(measured, rel=0.3)


def test_kernels_by_age(h100: KernelModel) -> None:
    by = {
        k: h100.attention(AttentionWork(2, 8192, 8192, 16, 16, 128, 128, kernel=k)).seconds
        for k in ("fa1", "fa2", "fa3", "unfused")
    }
    assert by["fa3"] < by["fa2"] < by["fa1"] < by["unfused"]
    with pytest.raises(UnknownNameError, match="fa3"):
        h100.attention(AttentionWork(1, 1024, 1024, 8, 8, 128, 128, kernel="fa9"))


def test_latent_attention_counts_both_widths(h100: KernelModel) -> None:
    latent = h100.attention(AttentionWork(1, 8192, 8192, 128, 128, 192, 128)).seconds
    assert (
        h100.attention(AttentionWork(1, 8192, 8192, 128, 128, 128, 128)).seconds
        < latent
        < h100.attention(AttentionWork(1, 8192, 8192, 128, 128, 192, 192)).seconds * 1.05
    )


def test_context_parallel_chunk(h100: KernelModel) -> None:
    """The last quarter of the queries sees 7/16 of the triangle's pairs."""
    whole = h100.attention(AttentionWork(1, 32768, 32768, 32, 8, 128, 128)).seconds
    last = h100.attention(AttentionWork(1, 8192, 32768, 32, 8, 128, 128)).seconds
    assert last / whole == pytest.approx(7 / 16, rel=0.05)


@pytest.mark.parametrize("kernel", sorted(DEFAULT_CLASSES))
def test_memory_bound_never_beats_the_peak(h100: KernelModel, kernel: str) -> None:
    bandwidth = h100.hardware.gpu.memory_bandwidth.value
    tuned, framework, eager = (h100.memory_bound(kernel, 1e9, implementation=i).seconds for i in ("tuned", "framework", "eager"))
    assert 1e9 / bandwidth < tuned <= framework * 1.0001
    assert framework <= eager * 1.0001
    assert h100.memory_bound(kernel, 1e9, launches=10).seconds > tuned


@pytest.mark.parametrize(
    ("hardware", "kernel", "values", "seconds"),
    [("dgx-h100", "row_add", 4_194_304 * 128, 4.72e-3), ("dgx-h100", "row_add", 65_536 * 4096, 2.30e-3),
     ("dgx-b200", "row_sort_add", 196_608 * 2048, 1.70e-3), ("dgx-h100", "row_take", 65_536 * 4096 * 4 // 6, 0.439e-3)],
)  # fmt: skip
def test_torch_adds_and_takes_rows_as_published(hardware: str, kernel: str, values: int, seconds: float) -> None:
    """pytorch PR 175760, DLBlas PR 66, torchao PR 4623: six bytes a value that is added, four of one that is taken."""
    assert KernelModel(load_hardware(hardware)).memory_bound(kernel, 6.0 * values).seconds == pytest.approx(seconds, rel=0.06)


def test_memory_bound_unknown(h100: KernelModel) -> None:
    with pytest.raises(UnknownNameError, match="norm"):
        h100.memory_bound("nrom", 1e9)
    with pytest.raises(UnknownNameError, match="fused"):
        h100.adam(1e9, bytes_per_parameter=28, implementation="fsued")


def test_adam_published() -> None:
    """539M all-bf16 parameters (14 bytes each) take 3.578 ms on an H100 with 2.4 TB/s (torch fused)."""
    model = KernelModel(load_hardware("dgx-h100-96gb-500w"))
    assert model.adam(539e6, bytes_per_parameter=14).seconds == pytest.approx(3.578e-3, rel=0.05)
