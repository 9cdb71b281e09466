"""Traces, recorders and snapshots, of real gloo runs and by hand: who waits for whom, what was alive, nothing executed."""

from __future__ import annotations

import gzip
import json
import pickle
import sqlite3
import tracemalloc
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import simpar
from simpar.errors import InputError
from simpar.interop.inert_pickle import load_inert, load_plain
from simpar.interop.kineto_stream import Head, stream
from simpar.live.intervals import length, union
from simpar.runlogs.flight_recorder import read_recorders
from simpar.runlogs.kineto_rank import read_rank
from simpar.runlogs.nsys import read_nsys
from simpar.runlogs.rank_trace import between_updates, covered
from simpar.runlogs.read import read_run
from simpar.runlogs.snapshots import read_snapshots
from simpar.runlogs.traces import read_traces
from simpar.site.signs import Expected, signs_of

DATA = Path(__file__).parent / "data" / "runs"
SMALL = simpar.load(
    model="llama3.1-8b", hardware="dgx-h100", num_nodes=1, framework="plain", global_batch_size=2, sequence_length=512,
    dp=2, zero_stage=0, **{"cluster.num_gpus": 2},
)  # fmt: skip
GEMM = "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64"


def device_trace(rank: int, late_us: float, steps: tuple[int, ...] = (1, 2), world: int = 2) -> dict[str, Any]:
    """Steps of 1000 us: 400 us of GEMM that starts `late_us` late, and an all-reduce that ends with the slowest rank's at 900."""
    events: list[dict[str, Any]] = []
    for index, number in enumerate(steps):
        zero = 1000.0 * index
        events.append(
            {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{number}", "ts": zero, "dur": 1000.0, "args": {}}
        )
        for i, (name, start, end, args) in enumerate((
            (GEMM, zero + late_us, zero + 400.0 + late_us, {}),
            ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", zero + 400.0 + late_us, zero + 900.0, {"Collective name": "allreduce"}),
        )):  # fmt: skip
            launch = 10 * index + i + 1
            events.append({"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": max(start - 50.0, zero), "dur": 5.0,
                           "args": {"correlation": launch}})  # fmt: skip
            events.append({"ph": "X", "cat": "kernel", "name": name, "ts": start, "dur": end - start,
                           "args": {"correlation": launch, "stream": 7, **args}})  # fmt: skip
    info = {"rank": rank, "world_size": world, "backend": "nccl", "pg_config": [{"pg_name": "0", "ranks": list(range(world))}]}
    return {"schemaVersion": 1, "distributedInfo": info, "traceEvents": events, "traceName": "x"}


def saved(folder: Path, name: str, value: Any) -> Path:
    path = folder / name
    path.write_text(json.dumps(value))
    return path


# -- traces ----------------------------------------------------------------------------------------------------------------


def test_the_late_rank_of_a_real_run() -> None:
    """Two gloo ranks, of which rank 1 sleeps 20 ms before each step: rank 0 waits for it in the gradients' all-reduce."""
    report = read_traces(sorted(DATA.glob("rank*_trace.json.gz")), SMALL)
    assert report.waits is not None
    assert report.waits.first_late == {1: 3}
    assert report.waits.pairs[0, 1] == pytest.approx(0.014, abs=0.008)
    assert [r.device for r in report.ranks] == ["cpu", "cpu"]
    assert [s.number for s in report.ranks[0].steps] == [2, 3, 4]
    idle = [r.mean("idle_s") for r in report.ranks]
    assert idle[1] > 0.015 > idle[0]
    assert report.against is not None
    assert report.against["rank"] == 0


def test_a_device_by_hand(tmp_path: Path) -> None:
    paths = [saved(tmp_path, f"rank{r}.json", device_trace(r, 200.0 * r)) for r in (0, 1)]
    report = read_traces(paths, SMALL)
    first, second = report.ranks
    assert first.steps[0].length_s == pytest.approx(1000e-6)
    assert first.steps[0].compute_s == pytest.approx(400e-6)
    assert first.steps[0].exposed_s == pytest.approx(500e-6)
    assert first.steps[0].idle_s == pytest.approx(100e-6)
    assert second.steps[1].queue_s == pytest.approx(50e-6)
    assert report.waits is not None
    assert report.waits.pairs == {(0, 1): pytest.approx(200e-6)}
    assert report.waits.first_late == {1: 2}
    row = read_run(SMALL, traces=paths).row
    assert row["step_time_s"] == pytest.approx(950e-6, rel=0.1)
    assert row["extra"]["traces"]["late_first"] == {"1": 2}


def test_work_belongs_to_the_step_that_launched_it(tmp_path: Path) -> None:
    """The host runs ahead: it launches all of step 1 at once, and the device is at it when step 2 begins on the host."""
    value = device_trace(0, 0.0)
    for event in value["traceEvents"]:
        if event["cat"] == "cuda_runtime" and event["args"]["correlation"] < 10:
            event["ts"] = 1.0
        if event["cat"] == "kernel":
            event["ts"] += 700.0
    first = read_rank(saved(tmp_path, "rank0.json", value)).steps[0]
    assert (first.kernels, first.compute_s) == (1, pytest.approx(400e-6))
    assert first.communication_s == pytest.approx(500e-6)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda r: device_trace(r, 0.0, steps=(1, 2) if r == 0 else (7, 8)), "traces of different steps"),
        (lambda r: device_trace(0, 0.0), "both are of rank 0"),
        (lambda r: device_trace(r, 0.0, world=8), "job of 8 ranks, the scenario has 2"),
        (lambda r: {"traceEvents": []}, "no events of work"),
        (lambda r: {"schemaVersion": 1}, "traceEvents is missing"),
        (lambda r: {"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k", "ts": "soon", "dur": 1}]}, "finite numbers"),
    ],
)
def test_bad_traces_get_one_message(make: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=said):
        read_traces([saved(tmp_path, f"rank{r}.json", make(r)) for r in (0, 1)], SMALL)


def test_a_trace_that_was_cut(tmp_path: Path) -> None:
    text = json.dumps(device_trace(0, 0.0))
    path = tmp_path / "rank0.json"
    path.write_text(text[: text.rindex('"ph"') + 30])
    found = read_rank(path)
    assert "ends inside its events" in found.notes[0]
    assert found.rank == 0
    assert [s.number for s in found.steps] == [1]  # the second lacks its collective


def test_traces_are_streamed(tmp_path: Path) -> None:
    """A trace of 18 MB is read in a small part of that."""
    one = json.dumps({"ph": "X", "cat": "python_function", "name": "f" * 500, "ts": 1.0, "dur": 1.0, "args": {}})
    whole = json.dumps(device_trace(0, 0.0))
    path = tmp_path / "rank0.json.gz"
    with gzip.open(path, "wt", compresslevel=1) as file:
        head, tail = whole.split('"traceEvents": [', 1)
        file.write(head + '"traceEvents": [')
        for _ in range(30):
            file.write((one + ",\n") * 1000)
        file.write(tail)
    tracemalloc.start()
    found = read_rank(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found.steps[0].compute_s == pytest.approx(400e-6)
    assert peak < 14e6


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), max_size=20))
def test_covered_against_the_union(spans: list[tuple[int, int]]) -> None:
    pairs = [(float(a), float(a + d)) for a, d in spans]
    found = covered(np.array([a for a, _ in pairs]), np.array([b for _, b in pairs]))
    assert found == pytest.approx(length(union(pairs)))


@pytest.mark.parametrize("chunk", [7, 64, 1 << 21])
def test_events_come_whole_whatever_the_pieces(chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("simpar.interop.kineto_stream._CHUNK", chunk)
    value = device_trace(3, 10.0)
    head = Head()
    assert list(stream(saved(tmp_path, "t.json", value), head)) == value["traceEvents"]
    assert head.table["distributedInfo"]["rank"] == 3
    assert head.table["traceName"] == "x"


def test_nsys_exports(tmp_path: Path) -> None:
    path = tmp_path / "rank1.sqlite"
    base = sqlite3.connect(path)
    base.executescript("""
        CREATE TABLE StringIds(id INTEGER, value TEXT);
        CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL(start INTEGER, end INTEGER, shortName INTEGER, demangledName INTEGER,
            correlationId INTEGER);
        CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME(start INTEGER, end INTEGER, correlationId INTEGER);
        CREATE TABLE NVTX_EVENTS(start INTEGER, end INTEGER, text TEXT, textId INTEGER);""")
    base.executemany("INSERT INTO StringIds VALUES (?, ?)", [(1, GEMM), (2, "ncclDevKernel_AllGather_RING_LL"), (3, "iteration 4")])
    for step in range(2):
        zero = 1_000_000 * step + 5_000_000_000
        base.execute("INSERT INTO NVTX_EVENTS VALUES (?, ?, ?, ?)", (zero, zero + 10, None if step == 0 else "iteration 5", 3))
        for i, (start, end, name) in enumerate(((50_000, 450_000, 1), (400_000, 900_000, 2))):
            base.execute("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, ?)", (zero + i, zero + i + 5, 10 * step + i))
            base.execute(
                "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, ?, ?, ?)",
                (zero + start, zero + end, name, name, 10 * step + i),
            )
    base.commit()
    base.close()
    (found,) = read_nsys(path)
    assert found.rank == 1
    assert [s.number for s in found.steps] == [4, 5]
    assert found.steps[0].exposed_s == pytest.approx(450e-6)
    assert found.steps[0].compute_s == pytest.approx(400e-6)
    assert {c.name for c in found.calls} == {"all_gather"}
    empty = tmp_path / "x.sqlite"
    sqlite3.connect(empty).execute("CREATE TABLE a(b)").connection.close()
    with pytest.raises(InputError, match="no table CUPTI"):
        read_nsys(empty)
    (tmp_path / "y.sqlite").write_bytes(b"SQLite format 3\x00 and more that is none")
    with pytest.raises(InputError, match="expected a file of"):
        read_nsys(tmp_path / "y.sqlite")


def nsys_of_a_node(path: Path, gpus: int = 2, *, ranges: str = "Optimizer.step#FusedAdam.step") -> Path:
    """What `nsys profile torchrun` records of Megatron-LM: every process in one file, four updates and no range of a step.

    Times in us: a step of 1000 has a GEMM of 300 and 100 more per GPU, the all-reduce behind it ends for all at 900; the second
    half of the update, an optimizer of its own, follows at once. Correlations are the same numbers in every process.
    """
    base = sqlite3.connect(path)
    base.executescript("""
        CREATE TABLE StringIds(id INTEGER, value TEXT);
        CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL(start INTEGER, end INTEGER, deviceId INTEGER, streamId INTEGER,
            correlationId INTEGER, globalPid INTEGER, demangledName INTEGER, shortName INTEGER);
        CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME(start INTEGER, end INTEGER, globalTid INTEGER, correlationId INTEGER);
        CREATE TABLE NVTX_EVENTS(start INTEGER, end INTEGER, eventType INTEGER, text TEXT, globalTid INTEGER);""")
    base.executemany("INSERT INTO StringIds VALUES (?, ?)", [(1, GEMM), (2, "ncclDevKernel_AllReduce_Sum_bf16_RING_LL")])
    for gpu in range(gpus):
        pid = (7 << 56) + ((4000 - gpu) << 24)  # the first GPU's process has the highest number
        for step in range(4):
            zero = 1_000_000 * step
            for i, (start, end, name) in enumerate(((0, 300_000 + 100_000 * gpu, 1), (300_000 + 100_000 * gpu, 900_000, 2))):
                # The host is half a step ahead of the device.
                at = zero + 5_000_000 * (gpu + 1) - 500_000 + 10_000 * i
                base.execute("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, ?, ?)", (at, at + 5, pid + 99, 2 * step + i))
                kernel = [zero + 5_000_000 * (gpu + 1) + x for x in (start, end)]
                row = (*kernel, gpu, 7 + i, 2 * step + i, pid, name, name)
                base.execute("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
            for half in range(2):
                end = zero + 5_000_000 * (gpu + 1) - 400_000 + 20_000 * half
                base.execute("INSERT INTO NVTX_EVENTS VALUES (?, ?, 59, ?, ?)", (end - 15_000, end, f"{ranges}, seq = 3", pid + 99))
    base.commit()
    base.close()
    return path


def test_an_nsys_export_of_a_whole_node(tmp_path: Path) -> None:
    first, second = read_nsys(nsys_of_a_node(tmp_path / "node.sqlite"))
    for gpu, trace in enumerate((first, second)):
        assert trace.counted
        assert [s.number for s in trace.steps] == [0, 1, 2]  # three lie between four updates
        assert trace.steps[0].length_s == pytest.approx(1e-3)
        assert trace.mean("compute_s") == pytest.approx((300 + 100 * gpu) * 1e-6)
        assert trace.mean("communication_s") == pytest.approx((600 - 100 * gpu) * 1e-6)
        assert trace.steps[0].queue_s == pytest.approx(0.5 * (500e-6 + (790 + 100 * gpu) * 1e-6))
    report = read_traces([tmp_path / "node.sqlite"], SMALL)
    assert [r.rank for r in report.ranks] == [0, 1]
    assert report.step_s == pytest.approx(1e-3)
    assert report.waits is not None  # one group
    assert report.waits.pairs == {(0, 1): pytest.approx(100e-6)}


def test_traces_that_name_no_group_tell_no_waits(tmp_path: Path) -> None:
    """Two tensor-parallel groups: nsys does not say which of them an all-reduce is of."""
    scenario = simpar.load(
        model="llama3.1-8b", hardware="dgx-h100", num_nodes=1, framework="plain", global_batch_size=2, sequence_length=512,
        tp=2, dp=2, **{"cluster.num_gpus": 4},
    )  # fmt: skip
    report = read_traces([nsys_of_a_node(tmp_path / "node.sqlite", 4)], scenario)
    assert report.waits is None
    assert any("who waits for whom is not told" in note for note in report.notes)


def test_a_trace_without_marks_gives_no_step_time(tmp_path: Path) -> None:
    """Four steps in it and nothing that says so: neither a step's time nor a step's compute."""
    report = read_traces([nsys_of_a_node(tmp_path / "node.sqlite", ranges="forward")], SMALL)
    assert report.step_s is None
    assert [rank["counted"] for rank in report.as_json()["ranks"]] == [False, False]
    assert any("how many steps it holds is not known" in note for note in report.notes)
    trace = device_trace(0, 10.0)
    trace["traceEvents"] = [e for e in trace["traceEvents"] if e["cat"] != "user_annotation"]
    assert not read_rank(saved(tmp_path, "rank0.json", trace)).counted
    row = read_run(SMALL, traces=[tmp_path / "rank0.json"]).row
    assert "step_time_s" not in row
    expected = Expected(1e-3, 0.1, 5e-4, 1e-4, 1e-4, 1e-4, 1e9, 8e10)
    assert signs_of(row, expected) == {}


def test_steps_between_updates_of_a_real_run(tmp_path: Path) -> None:
    """The same trace without its marks: the steps between its three updates are as long."""
    with gzip.open(DATA / "rank0_trace.json.gz") as file:
        table = json.load(file)
    marked = read_rank(DATA / "rank0_trace.json.gz")
    table["traceEvents"] = [e for e in table["traceEvents"] if not str(e.get("name")).startswith("ProfilerStep")]
    found = read_rank(saved(tmp_path, "rank0.json", table))
    assert found.counted
    assert len(found.steps) == 2
    assert [s.length_s for s in found.steps] == pytest.approx([s.length_s for s in marked.steps[1:]], rel=0.05)


@given(st.lists(st.floats(0.1, 1.0), max_size=6), st.integers(1, 4))
def test_updates_end_steps(steps: list[float], chain: int) -> None:
    """However many optimizers follow each other in an update."""
    updates, at = [], 0.0
    for seconds in steps:
        at += seconds
        for _ in range(chain):
            updates.append((at, at + 1e-4))
            at += 2e-4
    marks = between_updates(updates, 0.0)
    assert len(marks) == (len(steps) if len(steps) > 1 else 0)
    assert all(b == after for (_, _, b), (_, after, _) in pairwise(marks))


# -- recorders and pickles -------------------------------------------------------------------------------------------------


def test_flight_recorders_of_a_real_run(tmp_path: Path) -> None:
    found = read_recorders([DATA / "flight_0", DATA / "flight_1.json"])
    first, second = found.ranks
    assert first.counts == second.counts
    assert first.last == second.last
    assert found.behind == {}
    assert ("default_pg", "all_reduce", 262912 * 4) in first.counts
    table = pickle.loads((DATA / "flight_0").read_bytes())
    table["entries"] = table["entries"][:-2]
    (tmp_path / "flight_1").write_bytes(pickle.dumps(table, protocol=2))
    assert read_recorders([DATA / "flight_0", tmp_path / "flight_1"]).behind == {"default_pg": [1]}


class _Hostile:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


def hostile_pickles(mark: Path) -> Iterator[bytes]:
    for protocol in (0, 2, 4, 5):
        yield pickle.dumps({"segments": _Hostile(mark), "device_traces": []}, protocol=protocol)
    yield b"cos\nsystem\n(S'touch " + str(mark).encode() + b"'\ntR."
    yield b"\x80\x02]r\xff\xff\xff\x0f."  # asks for room for a quarter of a billion values
    yield b"\x80\x04\x95"
    yield b""


def test_nothing_of_a_pickle_is_run(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    for index, data in enumerate(hostile_pickles(mark)):
        path = tmp_path / f"{index}.pickle"
        path.write_bytes(data)
        with pytest.raises(InputError, match="expected"):
            read_snapshots([path], SMALL)
        with pytest.raises(InputError):
            read_recorders([path]) if data[:1] == b"\x80" else load_plain(path, "a dump")
        archive = tmp_path / f"{index}.pt"
        with zipfile.ZipFile(archive, "w") as file:
            file.writestr("archive/data.pkl", data)
        with suppress(InputError):
            load_inert(archive, "a checkpoint")
        assert not mark.exists()


def test_a_pickle_that_asks_for_room_is_not_loaded(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(b"\x80\x02]r\xff\xff\xff\x0f.")
    with pytest.raises(InputError, match="numbers a value"):
        load_plain(path, "a dump")


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=60))
def test_no_bytes_make_the_unpickler_fail(data: bytes) -> None:
    path = Path("/dev/shm") / "simpar_fuzz.pickle" if Path("/dev/shm").is_dir() else DATA.parent / "fuzz.pickle"
    path.write_bytes(data)
    try:
        for load in (load_plain, load_inert):
            with suppress(InputError):
                load(path, "a dump")
    finally:
        path.unlink()


# -- snapshots -------------------------------------------------------------------------------------------------------------


def snapshot(events: list[tuple[str, int, int]], alive: dict[int, int]) -> dict[str, Any]:
    frames = [
        {"name": "backward", "filename": "/x/torch/autograd.py", "line": 1},
        {"name": "step", "filename": "/me/train.py", "line": 7},
    ]
    blocks = [{"address": a, "size": s, "state": "active_allocated", "frames": frames} for a, s in alive.items()]
    whole = sum(alive.values()) or 512
    segment = {"device": 0, "address": min(alive, default=0), "total_size": whole, "blocks": blocks}
    trace = [{"action": a, "addr": x, "size": s, "stream": 0, "frames": frames, "time_us": i} for i, (a, x, s) in enumerate(events)]
    return {"segments": [segment], "device_traces": [trace]}


def test_the_peak_is_rebuilt_backwards(tmp_path: Path) -> None:
    """Two live at the end; a third came and went between, and stood at the peak."""
    mib = 2**20
    events = [("alloc", 1, 4 * mib), ("alloc", 2, 8 * mib), ("alloc", 3, 16 * mib), ("free_requested", 3, 16 * mib),
              ("free_completed", 3, 16 * mib), ("free_completed", 2, 8 * mib), ("alloc", 4, 2 * mib)]  # fmt: skip
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(snapshot(events, {1: 4 * mib, 4: 2 * mib})))
    found = read_snapshots([path], SMALL)
    assert found.peak_bytes == 28 * mib
    assert sorted(size for (size, _), n in found.ranks[0].alive.items() for _ in range(n)) == [4 * mib, 8 * mib, 16 * mib]
    assert found.ranks[0].complete
    assert {where for _, where in found.ranks[0].alive} == {"step (train.py:7)"}
    assert found.tensors
    assert found.tensors[0]["measured_count"] >= 0
    row = read_run(SMALL, memory=[path]).row
    assert row["mem_gib"] == pytest.approx(28 / 1024, abs=1e-3)
    assert row["mem_kind"].startswith("max allocated")


def test_predicted_tensors_are_found_by_size(tmp_path: Path) -> None:
    predicted = max(simpar.simulate(SMALL).details.tensors_at_peak(), key=lambda t: t["bytes"])
    each = int(predicted["bytes"] / predicted["count"])
    alive = {1000 + i * 2 * each: each for i in range(predicted["count"])}
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(snapshot([("alloc", a, s) for a, s in alive.items()], alive)))
    found = read_snapshots([path], SMALL)
    row = next(t for t in found.tensors if t["tensor"] == predicted["tensor"])
    assert row["measured_count"] >= row["count"]


@pytest.mark.parametrize("value", [{}, [], {"segments": [{}]}, {"segments": [], "device_traces": [[{"no": 1}]]}, 3])
def test_snapshots_that_are_none(value: Any, tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(value))
    with pytest.raises(InputError, match="expected a file of torch"):
        read_snapshots([path], SMALL)
