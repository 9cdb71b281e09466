"""GEMM prices: closed forms, bounds and metamorphic relations."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simpar.costs.compute import GemmShapes, cast_seconds, gemm_seconds, waves_cost
from simpar.costs.gemm_tiles import geometry, tile_set
from simpar.costs.kernels import KernelModel
from simpar.costs.price import Provenance
from simpar.errors import UnknownNameError
from simpar.parallel.work import Gemm, GroupedGemm
from simpar.specs.hardware import load_hardware, profile_names
from simpar.specs.kernel_constants import GemmConstants

PLAIN = GemmConstants(
    library="x",
    mode="burst",
    dtype="bf16",
    rate_flops_per_s=1e15,
    bandwidth_bytes_per_s=1e30,
    latency_s=0.0,
    k_overhead=0.0,
    wave_beta=1.0,
    overlap_power=20.0,
    split_k_cost=1e9,
    tile_efficiency=(1e-6, 1e-6, 1e-6, 1e-6, 1e-6),
)
"""Only 256 x 128 tiles matter, waves are whole, memory is free."""
SIZES = st.sampled_from([64, 256, 512, 1024, 1536, 3072, 4096, 5120, 8192, 14336, 28672])


@pytest.fixture(scope="module")
def h100() -> KernelModel:
    return KernelModel(load_hardware("dgx-h100"))


def one(c: GemmConstants, sms: float, m: int, n: int, k: int, **kw: object) -> float:
    sizes = [np.array([float(v)]) for v in (m, n, k)]
    return float(gemm_seconds(c, sms, GemmShapes(*sizes, **kw))[0])  # type: ignore[arg-type]


@pytest.mark.parametrize(("m", "waves"), [(256, 1), (2560, 1), (2816, 2), (5120, 2), (5376, 3)])
def test_whole_waves_are_a_staircase(m: int, waves: int) -> None:
    """Ten SMs, tiles of 256 x 128, one column of tiles, too shallow to split: every started ten row tiles cost a full wave."""
    each = 2.0 * 256 * 128 * 500 * 10 / 1e15
    assert one(PLAIN, 10, m, 128, 500) == pytest.approx(waves * each, rel=1e-6)


def test_partial_waves_cost_their_share() -> None:
    x = np.array([0.3, 1.0, 1.25, 2.0])
    assert waves_cost(x, 0.0, 0.0).tolist() == [1.0, 1.0, 1.25, 2.0]
    assert waves_cost(x, 1.0, 0.0).tolist() == [1.0, 1.0, 2.0, 2.0]
    assert waves_cost(x, 0.5, 0.0).tolist() == pytest.approx([1.0, 1.0, 1.625, 2.0])


def test_thin_product_takes_the_time_of_its_traffic() -> None:
    c = PLAIN.model_copy(update={"bandwidth_bytes_per_s": 2e12, "rate_flops_per_s": 1e18, "tile_efficiency": (1, 1, 1, 1, 1)})
    traffic = 2.0 * (16 * 8192 + 8192 * 8192 + 16 * 8192)
    assert one(c, 132, 16, 8192, 8192) == pytest.approx(traffic / 2e12, rel=0.01)


def test_split_k_fills_idle_sms() -> None:
    free = PLAIN.model_copy(update={"split_k_cost": 0.0})
    whole = 2.0 * 256 * 128 * 65536 * 132 / 1e15
    assert one(free, 132, 256, 128, 65536) == pytest.approx(whole / 16, rel=1e-6)


def test_deepgemm_rule_prefers_one_wave() -> None:
    """768 x 4096 on 132 SMs: 6 x 22 tiles of 128 x 192 fill one wave exactly."""
    g = geometry("min_waves_sm90", 132.0, np.array([768.0]), np.array([4096.0]), np.array([7168.0]))
    assert g.waves[0, 0] == pytest.approx(1.0)
    assert g.area[0, 0] == 128 * 192
    assert g.single[0, 0] == 1.0


def test_every_schedule_covers_the_output() -> None:
    for schedule in ("heuristic", "cluster", "min_waves_sm90", "min_waves_sm100"):
        tiles = tile_set(schedule)
        g = geometry(schedule, 132.0, np.array([1000.0]), np.array([3000.0]), np.array([512.0]))
        assert (tiles.area > 0).all()
        assert ((g.waves * g.area * 132.0 / np.maximum(g.merges, 1.0)) >= 1000.0 * 3000.0 - 1e-6)[g.allowed].all()


def test_odd_rows_slow_the_block_cast() -> None:
    c = PLAIN.model_copy(update={"cast_bytes_per_s": 1e12, "cast_granularity": 8.0})
    even, odd = cast_seconds(c, np.array([1024.0, 1025.0]), np.array([2560.0, 2560.0]))
    assert odd / even == pytest.approx(1025 / 1024 * 8 / 4, rel=1e-6)


@settings(max_examples=60, deadline=None)
@given(m=SIZES, n=SIZES, k=SIZES, name=st.sampled_from(["dgx-h100", "dgx-a100-80gb", "dgx-b200", "gb200-nvl72", "dgx-h200"]))
def test_never_faster_than_the_data_sheet(m: int, n: int, k: int, name: str) -> None:
    hardware = load_hardware(name)
    price = KernelModel(hardware).gemm(Gemm(m, n, k))
    assert price.seconds >= 2.0 * m * n * k / hardware.peak_flops_per_s("bf16")
    assert price.low <= price.seconds <= price.high


@settings(max_examples=40, deadline=None)
@given(m=SIZES, n=SIZES, k=SIZES)
def test_array_form_is_the_scalar_form(m: int, n: int, k: int) -> None:
    model = KernelModel(load_hardware("dgx-h100"))
    sizes = [np.array([float(v), 4096.0]) for v in (m, n, k)]
    seconds, low, high = model.gemm_array(GemmShapes(*sizes))
    price = model.gemm(Gemm(m, n, k))
    assert seconds[0] == pytest.approx(price.seconds, rel=1e-12)
    assert low[0] == pytest.approx(price.low, rel=1e-9)
    assert high[0] == pytest.approx(price.high, rel=1e-9)


def test_gradients_are_products_of_the_same_size(h100: KernelModel) -> None:
    forward, dgrad = h100.gemm(Gemm(4096, 8192, 2048)), h100.gemm(Gemm(4096, 2048, 8192, direction="dgrad"))
    factor = h100.resolved.constants.directions
    assert factor is not None
    assert dgrad.seconds == pytest.approx(forward.seconds * factor.dgrad)
    plain = h100.gemm(Gemm(4096, 8192, 2048, direction="wgrad"))
    accumulated = h100.gemm(Gemm(4096, 8192, 2048, direction="wgrad", accumulate_fp32=True))
    assert plain.seconds < accumulated.seconds < 1.3 * plain.seconds


def test_fp8_gains_and_casts_cost(h100: KernelModel) -> None:
    bf16, fp8 = h100.gemm(Gemm(8192, 8192, 8192)), h100.gemm(Gemm(8192, 8192, 8192, dtype="fp8"))
    size = np.array([8192.0])
    cast_s = h100.gemm_array(GemmShapes(size, size, size, quantize=True), "fp8")[0][0]
    assert 1.5 < bf16.seconds / fp8.seconds < 2.1
    assert fp8.seconds < cast_s < 1.4 * fp8.seconds


def test_sustained_is_slower_than_a_burst_where_power_limits() -> None:
    hardware = load_hardware("dgx-h200")
    held, burst = KernelModel(hardware), KernelModel(hardware, sustained=False)
    big = held.gemm(Gemm(8192, 8192, 8192)).seconds / burst.gemm(Gemm(8192, 8192, 8192)).seconds
    thin = held.gemm(Gemm(16, 8192, 8192)).seconds / burst.gemm(Gemm(16, 8192, 8192)).seconds
    assert 1.08 < big < 1.25
    assert thin < 1.08


def test_grouped_gemm_against_its_parts(h100: KernelModel) -> None:
    single = h100.grouped_gemm(GroupedGemm(1, 8192, 4096, 7168))
    assert single.seconds == pytest.approx(h100.gemm(Gemm(8192, 4096, 7168)).seconds)
    grouped = h100.grouped_gemm(GroupedGemm(8, 8 * 8192, 4096, 7168))
    assert 7.5 * single.seconds < grouped.seconds < 13 * single.seconds
    beside = h100.resolved.constants.grouped
    assert beside is not None
    part = h100.gemm(Gemm(8192, 4096, 7168), beside.streams)
    assert grouped.seconds == pytest.approx(8 / beside.streams * part.seconds * beside.forward)
    small = h100.grouped_gemm(GroupedGemm(256, 8 * 8192, 4096, 7168))
    assert small.seconds > grouped.seconds
    assert h100.grouped_gemm(GroupedGemm(8, 16 * 8192, 4096, 7168)).seconds > 1.7 * grouped.seconds


@pytest.mark.parametrize("sizes", [(0, 8, 8), (8, 0, 8), (8, 8, 0)])
def test_nothing_costs_nothing(h100: KernelModel, sizes: tuple[int, int, int]) -> None:
    assert h100.gemm(Gemm(*sizes)).seconds == 0.0
    assert h100.grouped_gemm(GroupedGemm(0, 10, 8, 8)).seconds == 0.0


def test_unknown_dtype_names_the_known(h100: KernelModel) -> None:
    with pytest.raises(UnknownNameError, match="bf16"):
        h100.gemm(Gemm(8, 8, 8, dtype="int3"))


def test_every_shipped_profile_prices_a_gemm() -> None:
    for name in profile_names():
        price = KernelModel(load_hardware(name)).gemm(Gemm(4096, 4096, 4096))
        assert math.isfinite(price.seconds)
        assert price.low < price.seconds < price.high
        assert price.provenance in (Provenance.MODEL, Provenance.SCALED)


def calls(function: Callable[[], object]) -> int:
    """Functions that a call runs, Python's and built-in ones: work that does not depend on the machine."""
    count = 0

    def seen(_: object, event: str, __: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(seen)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def test_fast_enough_for_search(h100: KernelModel) -> None:
    """A new shape takes 131 calls, one that was priced before 7 (November 2026)."""
    h100.gemm(Gemm(4096, 4096, 4096))
    assert calls(lambda: h100.gemm(Gemm(4096, 4096, 4096))) < 15
    assert calls(lambda: h100.gemm(Gemm(4104, 4104, 4096))) < 250
