"""`simpar calibrate` without torch: the interval of a median, the store, the fit of gloo's constants, the TOML."""

from __future__ import annotations

import json
import math
import random
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simpar.live import profile_cpu, profile_out
from simpar.live.bench_host import HOST_KEY
from simpar.live.calibrate import Options, calibrate, seconds
from simpar.live.measure import timing_of
from simpar.live.store import CalibrationError, Store
from simpar.parallel.work import Gemm


def test_interval_of_the_median_covers_it_at_least_as_often_as_it_says() -> None:
    draw = random.Random(3)
    truth, runs = math.exp(0.0), 2000
    for n in (5, 11, 25):
        hit = 0
        for _ in range(runs):
            t = timing_of([draw.lognormvariate(0.0, 0.3) for _ in range(n)])
            hit += t.low_s <= truth <= t.high_s
        # Order statistics are discrete: the interval is at least 80 %, less than three standard errors of the count off.
        assert hit / runs >= 0.8 - 3 * math.sqrt(0.16 / runs)
        assert hit / runs < 0.97


@given(st.lists(st.floats(1e-6, 10.0), min_size=1, max_size=60))
def test_interval_encloses_the_median_and_lies_in_the_samples(samples: list[float]) -> None:
    t = timing_of(samples)
    assert min(samples) <= t.low_s <= t.median_s <= t.high_s <= max(samples)


def test_store_keeps_the_last_of_a_key_and_survives_a_cut_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    store = Store(path)
    store.append({"key": "x", "kind": "gemm", "seconds": 1.0})
    store.append({"key": "x", "kind": "gemm", "seconds": 2.0, "narrow": True})
    with path.open("a") as file:
        file.write('{"key": "y", "sec')
    again = Store(path)
    assert again.records["x"]["seconds"] == 2.0
    assert again.finished("x")
    assert "y" not in again.records
    again.append({"key": "z", "kind": "gemm", "seconds": 3.0})
    assert set(Store(path).records) == {"x", "z"}


def test_store_names_the_line_that_is_no_measurement(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"key": "x"}\nnonsense\n{"key": "y"}\n')
    with pytest.raises(CalibrationError, match="line 2"):
        Store(path)


@given(st.floats(5e-6, 5e-3), st.floats(1e8, 1e11), st.sampled_from([2, 3, 4, 8]))
def test_gloo_fit_returns_the_constants_that_made_the_times(hop: float, rate: float, n: int) -> None:
    rows = []
    for name, steps in (("all_reduce", 2 * math.ceil(math.log2(n))), ("all_gather", n - 1), ("send_recv", 1)):
        for size in (1, 2**30):
            wire = profile_out.traffic(name, n) * size / rate
            rows.append({"collective": name, "ranks": n, "bytes": size, "seconds": 120e-6 + steps * hop + wire})
    found_hop, found_rate = profile_out.gloo_fit(rows)
    # The byte of a small message crosses the wire too: at most 0.4 % of the smallest hop here.
    assert found_hop == pytest.approx(hop, rel=0.01)
    assert found_rate == pytest.approx(rate, rel=0.01)


def test_toml_reads_back() -> None:
    table = {
        "name": 'a "quoted" \\ name\t', "gpu": {"peak": {"value": "1.0 B", "kind": "measured", "source": "s"}, "list": [1, 2]},
        "kernels": {"points": [{"shape": [1, 2], "seconds": 1e-9}, {"shape": [3], "seconds": 2.0}]},
    }  # fmt: skip
    assert tomllib.loads(profile_out.toml_of(table)) == table


def test_nccl_measurements_become_a_part_that_merges(tmp_path: Path) -> None:
    from simpar.interop.profile_parts import merge

    store = Store(tmp_path / "a.jsonl")
    store.append({"key": "machine", "kind": "machine", "date": "2026-01-01", "name": "NVIDIA H100", "device": "cuda", "torch": "2"})
    for i, size in enumerate((2**20, 2**26, 2**30)):
        store.append({
            "key": str(i), "kind": "collective", "backend": "nccl", "collective": "all_reduce", "ranks": 8, "nodes": 1,
            "bytes": size, "seconds": 30e-6 + size / 2e11,
        })  # fmt: skip
    part = tmp_path / "part.toml"
    part.write_text(profile_out.toml_of(profile_out.nccl_part(store)))
    assert merge("dgx-h100", [part]).profile.collectives.scale_up is not None


@pytest.mark.parametrize(("text", "value"), [("120s", 120.0), ("5min", 300.0), ("1h", 3600.0), ("2m", 120.0), ("7", 7.0)])
def test_times(text: str, value: float) -> None:
    assert seconds(text) == value


@pytest.mark.parametrize("text", ["soon", "-3s", "", "nan s"])
def test_a_wrong_time_is_an_error(text: str) -> None:
    with pytest.raises(CalibrationError):
        seconds(text)


@pytest.mark.parametrize("name", ["NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA A100-SXM4-80GB", "NVIDIA L40S", "Unheard of"])
def test_nearest_profiles_are_shipped(name: str) -> None:
    from simpar.specs.hardware import profile_names

    assert profile_out.nearest({"device": "cuda", "name": name, "capability": [9, 0]}) in profile_names()
    assert json.dumps(profile_out.nearest({"device": "cpu"})) == '"cpu-gloo"'


@pytest.mark.parametrize("base", ["dgx-h200", "h200-nvl", "l40s", "dgx-a100-80gb"])
def test_a_gpu_profile_with_measured_products_loads_and_prices_them(tmp_path: Path, base: str) -> None:
    from simpar.costs.kernels import KernelModel
    from simpar.specs.hardware import load_hardware

    shipped = KernelModel(load_hardware(base))
    store = Store(tmp_path / "a.jsonl")
    store.append({
        "key": "machine", "kind": "machine", "date": "2026-01-01", "name": "GPU", "device": "cuda", "torch": "2", "cores": 8,
        "threads": 1, "memory_bytes": 80 * 2**30, "sm_count": load_hardware(base).gpu.sm_count.value, "topology": "GPU0\tX",
    })  # fmt: skip
    for size in (4096, 8192):
        store.append({
            "key": f"{size}", "kind": "gemm", "shape": [size] * 3, "dtype": "bf16", "direction": "forward", "spread": 0.01,
            "seconds": shipped.gemm(Gemm(size, size, size)).seconds,
        })  # fmt: skip
    store.append({"key": HOST_KEY, "kind": "host", "seconds": 27e-6, "spread": 0.01})
    out = tmp_path / "mine.toml"
    profile_out.write(store, out, base)
    mine = KernelModel(load_hardware(str(out)))
    assert mine.hardware.node.host_slowdown == pytest.approx(2.0)
    assert mine.gemm(Gemm(4096, 4096, 4096)).provenance == "measured"
    # Shapes beside the measured ones: the one scale must bring back the model that made the times.
    for dtype in ("bf16", "fp32"):
        wide = Gemm(8192, 4096, 4096, dtype)
        assert mine.gemm(wide).seconds == pytest.approx(shipped.gemm(wide).seconds, rel=0.15), dtype


@given(st.floats(1e-12, 1e-10), st.floats(0.0, 1e-9), st.floats(0.0, 1e-4))
def test_the_law_of_a_cpu_product_is_found_again(flop_s: float, output_s: float, call_s: float) -> None:
    sizes = ((512, 512, 512), (1024, 1024, 1024), (256, 1024, 512), (64, 1024, 1024), (128, 2048, 256))
    shapes = [(float(m), float(n), float(k)) for m, n, k in sizes]
    products = [(shape, profile_cpu.seconds((flop_s, output_s, call_s), shape)) for shape in shapes]
    found = profile_cpu.fit(products)
    assert [profile_cpu.seconds(found, shape) for shape in shapes] == pytest.approx([s for _, s in products], rel=1e-3)
    assert min(found) >= 0.0


def test_gradients_of_a_cpu_get_a_factor_each_and_few_products_no_constants() -> None:
    def record(shape: tuple[int, int, int], direction: str, factor: float) -> dict[str, Any]:
        fields = {"shape": list(shape), "direction": direction, "dtype": "fp32"}
        return {**fields, "seconds": factor * profile_cpu.seconds((1e-11, 1e-10, 1e-6), profile_cpu.product(fields))}

    shapes = [(512, 512, 512), (256, 1024, 512), (1024, 512, 2048), (64, 1024, 1024)]
    records = [record(s, d, f) for s in shapes for d, f in (("forward", 1.0), ("dgrad", 1.1), ("wgrad", 1.3))]
    (found,), factors = profile_cpu.gemms(records, 1e10, "here")
    assert factors == pytest.approx({"dgrad": 1.1, "wgrad": 1.3, "wgrad_accumulate": 1.3}, rel=1e-6)
    assert found["rate_flops_per_s"] == pytest.approx(1e11, rel=1e-6)
    assert found["fit"]["held_out_median"] < 1e-3
    assert profile_cpu.gemms(records[:3], 1e10, "here") == ([], {})


def test_the_store_of_another_machine_becomes_a_profile_here(tmp_path: Path) -> None:
    store = Store(tmp_path / "h200.jsonl")
    store.append({
        "key": "machine", "kind": "machine", "device": "cuda", "name": "NVIDIA H200", "date": "2026-01-01", "torch": "2.11",
        "cores": 16, "threads": 1, "memory_bytes": 150754820096, "sm_count": 132, "capability": [9, 0], "clocks": "1980 MHz",
    })  # fmt: skip
    fields = {"kind": "gemm", "dtype": "bf16", "direction": "forward", "spread": 0.01, "narrow": True}
    store.append({**fields, "key": "gemm", "shape": [8192, 8192, 8192], "seconds": 1.5e-3})
    out, lines = tmp_path / "h200.toml", []
    assert calibrate(Options(out, 0.0, store.path, resume=True), lines.append) == 0
    profile = tomllib.loads(out.read_text())
    assert profile["gpu"]["name"] == "NVIDIA H200"
    assert profile["kernels"]["points"][0]["seconds"] == 1.5e-3
    assert len(store.path.read_text().splitlines()) == 2
