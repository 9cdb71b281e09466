"""The Perfetto trace against the timeline it was written from."""

from __future__ import annotations

import gzip
import json
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from report_results import EVERY, SMALL_70B, expanded, scenario, step

from simpar.errors import InputError
from simpar.program.program import OpKind
from simpar.report.ledger import price_terms
from simpar.report.perfetto import memory_changes, trace, write_trace
from simpar.report.shown import is_expanded, shown_roles
from simpar.report.streams import ordered_streams
from simpar.result.interpret import interpret
from simpar.result.memory import CATEGORIES, RankMemory
from simpar.result.result import Result
from simpar.step import prepare, run

Event = dict[str, Any]
NS = 1e-9


def events(result: Result) -> list[Event]:
    found: list[Event] = json.loads(trace(result))["traceEvents"]
    return found


def slices(found: list[Event]) -> dict[tuple[int, int], list[Event]]:
    threads: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in found:
        if event["ph"] == "X":
            threads[event["pid"], event["tid"]].append(event)
    return threads


def check(result: Result) -> None:
    """Everything a trace of a folded program must satisfy."""
    found, program, timeline = events(result), result.program, result.timeline
    timed = [e for e in found if e["ph"] != "M"]
    stamps = [e["ts"] for e in timed]
    assert stamps == sorted(stamps)
    assert found[: len(found) - len(timed)] == [e for e in found if e["ph"] == "M"]
    threads = slices(found)
    assert sum(len(s) for s in threads.values()) == len(program.stream_ops)
    busy = timeline.busy_s()
    for shown in shown_roles(result):
        for tid, stream in enumerate(ordered_streams(program, shown.role), start=1):
            mine = threads.get((shown.pipeline_rank, tid), [])
            total = sum(e["dur"] for e in mine) * 1e-6
            assert total == pytest.approx(busy[stream], abs=NS * (len(mine) + 1))
            ends = np.array([round((e["ts"] + e["dur"]) * 1e3) for e in mine])
            begins = np.array([round(e["ts"] * 1e3) for e in mine])
            assert (begins[1:] >= ends[:-1]).all(), "slices of a stream must not overlap"
    last = max(e["ts"] + e["dur"] for s in threads.values() for e in s) * 1e-6
    assert last == pytest.approx(timeline.makespan, abs=NS)
    check_flows(result, found)
    check_counters(result, found)


def check_flows(result: Result, found: list[Event]) -> None:
    """Every send is one flow: out of a slice of its micro-batch, through itself, into a slice of it on another rank."""
    program = result.program
    threads = slices(found)
    flows: dict[int, dict[str, Event]] = defaultdict(dict)
    for event in found:
        if event["ph"] in "stf" and event["ph"] != "M":
            assert event["ph"] not in flows[event["id"]], "one event of each kind per flow"
            flows[event["id"]][event["ph"]] = event
    sends = np.isin(program.kind, [int(OpKind.SEND_FORWARD), int(OpKind.SEND_BACKWARD)])
    assert len(flows) == sends.sum()

    def at(event: Event) -> Event:
        """The slice that a viewer binds the event to."""
        mine = threads[event["pid"], event["tid"]]
        covering = [s for s in mine if s["ts"] <= event["ts"] < s["ts"] + s["dur"] or s["ts"] == event["ts"]]
        assert covering, f"{event} lies in no slice"
        return covering[-1]

    for flow in list(flows.values())[:: max(len(flows) // 200, 1)]:
        assert set(flow) == {"s", "t", "f"}
        start, through, end = flow["s"], flow["t"], flow["f"]
        assert start["pid"] == through["pid"] != end["pid"]
        assert start["ts"] <= through["ts"] <= end["ts"]
        send = at(through)
        assert send["cat"].startswith("send_")
        microbatches = {send["args"]["microbatch"]}
        for bound in (at(start), at(end)):
            pair = program.pairs.get(bound["args"]["op"])
            held = {bound["args"]["microbatch"]} | ({pair[1]} if pair else set())
            assert microbatches <= held


def check_counters(result: Result, found: list[Event]) -> None:
    """The highest sum of the memory counters of each rank is its peak; the last one is what rests."""
    sums: dict[int, list[float]] = defaultdict(list)
    for event in found:
        if event["ph"] == "C":
            sums[event["pid"]].append(sum(event["args"].values()))
    assert sorted(sums) == [m.rank for m in result.memory]
    for memory in result.memory:
        rounding = 12.0
        assert max(sums[memory.rank]) <= memory.allocated_bytes + rounding
        assert max(sums[memory.rank]) == pytest.approx(memory.allocated_bytes, rel=2e-3)
        assert sums[memory.rank][-1] == pytest.approx(float(memory.total[-1]), abs=rounding)


@pytest.mark.parametrize(("stem", "detail", "overrides"), EVERY, ids=[f"{s}-{d}" for s, d, _ in EVERY])
def test_trace_equals_the_timeline(stem: str, detail: str, overrides: tuple[str, ...]) -> None:
    check(step(stem, detail, overrides=overrides))


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    schedule=st.sampled_from(["gpipe", "1f1b", "zb-h1", "interleaved", "dualpipe-v"]),
    groups=st.integers(1, 3),
    detail=st.sampled_from(["stage", "layer", "op"]),
)
def test_trace_equals_the_timeline_for_any_schedule(schedule: str, groups: int, detail: str) -> None:
    stages = {"interleaved": 3, "dualpipe-v": 2}.get(schedule, 1)
    wanted = scenario(
        "mlp-4096x24_a100x8_pp8", f"plan.schedule={schedule}", f"plan.virtual_stages={stages}",
        f"training.global_batch_size={512 * 16 * groups}", "training.micro_batch_size=512",
    )  # fmt: skip
    priced = prepare(wanted, detail=detail)  # type: ignore[arg-type]
    check(interpret(priced, run(priced)))


@pytest.mark.parametrize(("stem", "detail", "overrides"), EVERY, ids=[f"{s}-{d}" for s, d, _ in EVERY])
def test_terms_add_up_to_what_an_op_takes(stem: str, detail: str, overrides: tuple[str, ...]) -> None:
    """Without effects an op takes its price; where collectives slow compute it never takes less."""
    result = step(stem, detail, "longest_path", overrides)
    sums = np.array([sum(seconds for _, seconds in terms) for terms in price_terms(result)])
    priced = np.array([bool(terms) for terms in price_terms(result)])
    kept = priced[result.program.price]
    assert kept.any()
    np.testing.assert_allclose(sums[result.program.price][kept], result.timeline.seconds[kept], rtol=1e-6, atol=1e-9)
    slowed = step(stem, detail, overrides=overrides).timeline.seconds
    assert (slowed[kept] >= sums[result.program.price][kept] * (1 - 1e-6) - 1e-9).all()


def test_counters_add_what_rests_to_what_moves_and_take_the_last_of_a_moment() -> None:
    names = len(CATEGORIES)
    dynamic = np.zeros((4, names))
    dynamic[1:, CATEGORIES.index("activations")] = [5.0, 9.0, 1.0]
    dynamic[2, CATEGORIES.index("parameters")] = 7.0
    times = np.array([0.0, 1e-6, 1e-6, 3e-6])
    static = (("parameters", 10.0), ("optimizer", 20.0), ("parameters", 1.0))
    memory = RankMemory(0, static, times, dynamic, (), 1.0)
    assert list(memory_changes(memory)) == [
        (0, {"parameters": 11, "optimizer": 20, "activations": 0}),
        (1000, {"parameters": 18, "optimizer": 20, "activations": 9}),
        (3000, {"parameters": 11, "optimizer": 20, "activations": 1}),
    ]


def test_names_of_processes_and_threads() -> None:
    result = step("llama3.1-70b_h100x64_tp4cp2pp4", "op", overrides=SMALL_70B)
    names = [(e["name"], e["pid"], e["tid"], e["args"]) for e in events(result) if e["ph"] == "M"]
    processes = [args["name"] for name, _, _, args in names if name == "process_name"]
    assert processes == [f"pipeline rank {r} (16 GPUs)" for r in range(4)]
    threads = {args["name"] for name, pid, _, args in names if name == "thread_name" and pid == 1}
    assert threads == {s.kind for s in result.program.streams if s.role == 1}
    first = next(args["name"] for name, pid, tid, args in names if name == "thread_name" and (pid, tid) == (0, 1))
    assert first == "compute"


def test_an_expanded_program_shows_one_pipeline_and_the_slowest() -> None:
    same, slow = expanded(), expanded(60)
    assert is_expanded(same)
    mesh = same.layout.mesh
    assert [s.role for s in shown_roles(same)] == [mesh.rank(pp=p) for p in range(mesh.pp)]
    shown = shown_roles(slow)
    assert len(shown) == 2 * mesh.pp
    assert mesh.coordinates(60)["dp"] == 1
    assert [mesh.coordinates(s.role)["dp"] for s in shown] == [0] * mesh.pp + [1] * mesh.pp
    assert len(shown_roles(expanded(50))) == mesh.pp, "a rank in lockstep with the first pipeline is shown by it"
    found = events(slow)
    threads = slices(found)
    assert {pid for pid, _ in threads} == set(range(mesh.pp)) | {256 + p for p in range(mesh.pp)}
    kinds = Counter(e["ph"] for e in found)
    assert kinds["s"] == kinds["t"] == kinds["f"] > 0
    busy = slow.timeline.busy_s()
    for shown_role in shown:
        pid = 256 * shown_role.pipeline + shown_role.pipeline_rank
        for tid, stream in enumerate(ordered_streams(slow.program, shown_role.role), start=1):
            mine = threads.get((pid, tid), [])
            assert sum(e["dur"] for e in mine) * 1e-6 == pytest.approx(busy[stream], abs=NS * (len(mine) + 1))


def test_flows_of_an_expanded_program_stay_in_their_pipeline() -> None:
    found = events(expanded(60))
    pids: dict[int, set[bool]] = defaultdict(set)
    for event in found:
        if event["ph"] in ("s", "t", "f"):
            pids[event["id"]].add(event["pid"] < 256)
    assert pids
    assert all(len(sides) == 1 for sides in pids.values())


def test_the_file_is_gzip_and_always_the_same(tmp_path: Path) -> None:
    result = step("mlp-4096x24_a100x8_pp8", "stage")
    first, second = tmp_path / "new" / "folder" / "a.json.gz", tmp_path / "b.json.gz"
    write_trace(result, first)
    time.sleep(0.01)
    write_trace(result, second)
    assert first.read_bytes() == second.read_bytes()
    content = json.loads(gzip.decompress(first.read_bytes()))
    assert content["displayTimeUnit"] == "ms"
    assert content["otherData"]["step_time_s"] == result.step_time_s


def test_a_path_that_cannot_be_written_is_one_clear_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = step("mlp-4096x24_a100x8_tp8", "stage")
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InputError, match=r"--trace = '.*file/x/t.json.gz': .*file is a file, not a folder"):
        write_trace(result, tmp_path / "file" / "x" / "t.json.gz")
    with pytest.raises(InputError, match="is a folder; name a file in it"):
        write_trace(result, tmp_path)

    def refuse(self: Path, data: bytes) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "write_bytes", refuse)
    with pytest.raises(InputError, match="writing there is not permitted"):
        write_trace(result, tmp_path / "t.json.gz")
    assert (tmp_path / "file").read_text() == "in the way"


@pytest.mark.slow
def test_two_hundred_thousand_ops_in_five_seconds(tmp_path: Path) -> None:
    result = step("llama3.1-70b_h100x64_tp4cp2pp4", "op")
    assert result.program.num_ops > 200_000
    begin = time.process_time()
    write_trace(result, tmp_path / "t.json.gz")
    assert time.process_time() - begin < 5.0
