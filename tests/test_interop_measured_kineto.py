"""The Kineto reader on traces with known answers, and its measured GEMMs in a profile."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simpar.errors import InputError
from simpar.interop import kineto
from simpar.interop.profile_parts import merge, read_part, write_part
from simpar.live.intervals import common, length, union

GEMM = "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT"
REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def kernel(name: str, ts: float, dur: float, stream: int = 7, **args: Any) -> dict[str, Any]:
    """A device event; microseconds."""
    more = {"stream": stream, **args}
    return {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": stream, "ts": ts, "dur": dur, "args": more}


def call(name: str, ts: float, external: int, dims: list[list[int]], tid: int = 1) -> dict[str, Any]:
    """A recorded aten op."""
    return {"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": 5,
            "args": {"External id": external, "Input Dims": dims, "Input type": ["c10::BFloat16"] * len(dims)}}  # fmt: skip


NCCL = {"Collective name": "allreduce", "In msg nelems": 1000, "Out msg nelems": 1000, "dtype": "BFloat16", "Group size": 8}
EVENTS = [
    {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 90, "dur": 3, "tid": 1, "args": {"correlation": 5}},
    {"ph": "M", "name": "process_name", "args": {}},
    call("aten::mm", 80, 1, [[128, 64], [64, 256]]),
    kernel(GEMM, 100, 50, correlation=5, **{"External id": 1}),
    kernel("void at::native::vectorized_elementwise_kernel<4>", 160, 20),
    kernel(REDUCE, 170, 40, stream=20, **NCCL),
    kernel("flash_fwd_kernel", 190, 30),
    {**kernel("Memcpy HtoD", 230, 10), "cat": "gpu_memcpy"},
]


def write(path: Path, events: list[dict[str, Any]]) -> Path:
    """A trace, packed where the name says so."""
    text = json.dumps({"traceEvents": events, "distributedInfo": {"backend": "nccl", "rank": 3, "world_size": 8}})
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_trace_with_known_answers(tmp_path: Path, name: str) -> None:
    facts = kineto.read(write(tmp_path / name, EVENTS)).facts
    assert {kind: row["count"] for kind, row in facts["classes"].items()} == {
        "gemm": 1, "attention": 1, "memory-bound": 1, "nccl": 1, "copy": 1}  # fmt: skip
    # The all-reduce runs 170..210; compute runs 160..180 and 190..220: 10 + 20 of 40 overlap.
    assert facts["overlap"] == pytest.approx(0.75)
    assert facts["exposed_communication_s"] == pytest.approx(10e-6)
    assert facts["compute_s"] == pytest.approx(100e-6)
    # Idle: 150..160 and 220..230 of 100..240; gaps between compute kernels 10 and 10.
    assert facts["idle_s"] == pytest.approx(20e-6)
    assert facts["compute_gaps_s"] == pytest.approx(20e-6)
    assert facts["launch_to_start_median_s"] == pytest.approx(10e-6)
    assert facts["collectives"][0]["collective"] == "all_reduce"
    assert (facts["collectives"][0]["bytes"], facts["collectives"][0]["group_size"]) == (2000, 8)
    assert set(facts["streams"]) == {"7", "20"}
    assert (facts["rank"], facts["world_size"]) == (3, 8)


def test_order_of_events_does_not_matter(tmp_path: Path) -> None:
    first = kineto.read(write(tmp_path / "a.json", EVENTS)).facts
    assert kineto.read(write(tmp_path / "b.json", EVENTS[::-1])).facts == first


def test_forward_gemms_become_points(tmp_path: Path) -> None:
    name = "autograd::engine::evaluate_function: MmBackward0"
    backward = {"ph": "X", "cat": "cpu_op", "name": name, "ts": 290, "dur": 50, "tid": 2}
    more = [
        backward,
        call("aten::mm", 300, 2, [[64, 128], [128, 256]], tid=2), kernel(GEMM, 400, 70, **{"External id": 2}),
        call("aten::mm", 500, 3, [[128, 64], [64, 256]]), kernel(GEMM, 600, 54, **{"External id": 3}),
        # Beside a collective: slowed, so not taken.
        call("aten::mm", 700, 4, [[128, 64], [64, 256]]), kernel(GEMM, 800, 90, **{"External id": 4}),
        kernel(REDUCE, 810, 40, stream=20, **NCCL),
    ]  # fmt: skip
    part = kineto.read(write(tmp_path / "t.json", EVENTS + more))
    (point,) = part.profile["kernels"]["points"]
    assert (point["op"], point["shape"], point["dtype"]) == ("gemm", [128, 256, 64], "bf16")
    assert point["seconds"] == pytest.approx(52e-6)
    profile = merge("dgx-h100", [part]).profile
    assert [p.shape for p in profile.kernels.points] == [(128, 256, 64)]
    write_part(part, tmp_path / "part.toml")
    assert merge("dgx-h100", [read_part(tmp_path / "part.toml")]).profile == profile


@pytest.mark.parametrize(
    ("name", "collective", "args", "size"),
    [
        ("_allgather_base", "all_gather", {"In msg nelems": 10, "Out msg nelems": 80, "dtype": "Float"}, 320),
        ("_reduce_scatter_base", "reduce_scatter", {"In msg nelems": 80, "Out msg nelems": 10, "dtype": "BFloat16"}, 160),
        ("all_to_allv", "all_to_all", {"In msg nelems": 7, "dtype": "Float8_e4m3fn"}, 7),
        ("broadcast", "broadcast", {"In msg nelems": 7, "dtype": "Mystery"}, None),
    ],
)
def test_names_and_sizes_of_collectives(name: str, collective: str, args: dict[str, Any], size: float | None) -> None:
    assert kineto.collective_name(name) == collective
    assert kineto.collective_bytes(collective, args) == size


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "gemm"),
        ("ampere_bf16_s16816gemm_bf16_128x128_ldg8", "gemm"),
        ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80", "attention"), ("void cutlass::Kernel2<cutlass_80_tensorop>", "gemm"),
        ("triton_poi_fused_add_mul_0", "memory-bound"), ("void at::native::multi_tensor_apply_kernel", "memory-bound"),
        ("ncclKernel_AllGather_RING_LL", "nccl"), ("void cublasLt::splitKreduce_kernel", "memory-bound"),
    ],
)  # fmt: skip
def test_classes_of_kernels(name: str, kind: str) -> None:
    assert kineto.kernel_class(name, "kernel", {}) == kind


SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)).map(lambda p: (float(min(p)), float(max(p)))), max_size=12)


@given(SPANS, SPANS)
def test_intervals_against_counting(first: list[tuple[float, float]], second: list[tuple[float, float]]) -> None:
    cells = [{i for i in range(60) if any(a <= i < b for a, b in spans)} for spans in (first, second)]
    assert length(union(first)) == len(cells[0])
    assert length(common(union(first), union(second))) == len(cells[0] & cells[1])


def test_bad_traces_are_named(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    for text, said in (
        ('{"traceEvents": [\n{]}', r"t\.json:2: not JSON"),
        ('{"schemaVersion": 1}', "traceEvents is missing"),
        (json.dumps({"traceEvents": [call("aten::mm", 1, 1, [[1, 1], [1, 1]])]}), "no event with cat = kernel"),
        (json.dumps({"traceEvents": [{**kernel(GEMM, 1, 1), "dur": "long"}]}), "ts and dur must be numbers"),
    ):
        path.write_text(text)
        with pytest.raises(InputError, match=said):
            kineto.read(path)
