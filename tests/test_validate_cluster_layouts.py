"""Names of layouts, processes that share cores, compute inside a step, measured prices, and what a prediction says is sent."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_programs import prices, programs
from hypothesis import given, settings
from hypothesis import strategies as st

from simpar.costs.collectives import MeasuredTimes
from simpar.costs.kernels import KernelModel
from simpar.engine import discrete_event, host_ranks
from simpar.live.cluster_compare import Measured, compare, read_runs
from simpar.live.cluster_in_step import InStep, Reference, fit, in_step
from simpar.live.cluster_layouts import DEFAULT, LayoutError, RunLayout, parse_layout, parse_layouts
from simpar.live.cluster_predict import Setup, kernel_counts, predict, step_work
from simpar.live.cluster_setup import MLP, MLP_TRAINING, MOE, TRAINING, TRANSFORMER, references_of
from simpar.live.cluster_shapes import collectives_of, shapes_of
from simpar.program.builder import ProgramBuilder
from simpar.program.program import OpKind, Program, Stream, Transfer
from simpar.specs.collective_constants import MeasuredCollective
from simpar.specs.hardware import load_hardware
from simpar.specs.kernel_constants import MeasuredPoint

BATCHES = {"transformer": TRAINING, "moe": TRAINING, "mlp": MLP_TRAINING}
SETUP = Setup({"transformer": TRANSFORMER, "moe": MOE, "mlp": MLP}, BATCHES, "cpu-gloo")
D, F = TRANSFORMER["hidden_size"], TRANSFORMER["intermediate_size"]
L, V = TRANSFORMER["num_hidden_layers"], TRANSFORMER["vocab_size"]
TOKENS, BATCH = TRAINING["sequence_length"], TRAINING["global_batch_size"]
LAYER = 4 * D * D + 3 * D * F + 2 * D
WEIGHTS = L * LAYER + 2 * V * D + D


# -- names -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("dp2tp2", {"dp": 2, "tp": 2}),
        ("fsdp4", {"dp": 4, "fsdp": True}),
        ("tp2sp", {"tp": 2, "sequence_parallel": True}),
        ("pp2dp2-zbv", {"pp": 2, "dp": 2, "schedule": "zb-v", "virtual_stages": 2}),
        ("cp2-ulysses", {"cp": 2, "cp_style": "ulysses"}),
        ("ep2dp4", {"ep": 2, "dp": 4, "model": "moe"}),
        ("ep4dp2tp2sp", {"ep": 4, "dp": 2, "tp": 2, "model": "moe", "folds_experts": True}),
        ("pp2fsdp2", {"pp": 2, "dp": 2, "fsdp": True, "folds_experts": False}),
        ("mlp-pp2-gpipe", {"pp": 2, "schedule": "gpipe", "model": "mlp"}),
        ("single", {}),
    ],
)
def test_names_of_layouts(name: str, fields: dict[str, Any]) -> None:
    layout = parse_layout(name)
    assert {k: getattr(layout, k) for k in fields} == fields
    assert RunLayout(**layout.as_json()) == layout


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("dp2tp", "is no degree"), ("xp2", "is no degree"), ("dp2fsdp2", "the same dimension again"), ("dp0", "at least 1"),
        ("pp2-zigzag", "neither a schedule"), ("ep3dp4", "must divide tp"), ("dp2sp", "give tp > 1"),
        ("dp2-zbv", "needs pp > 1"), ("fsdp2pp2-zbv", "after whole backwards"), ("mlp-cp2", "no sequence"),
        ("ep2dp2tp2", "write tpNsp"), ("ep2fsdp2", "leave out fsdp or ep"),
    ],
)  # fmt: skip
def test_wrong_names_say_why(name: str, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        parse_layout(name)


def test_all_wrong_names_are_told_together_and_repeats_run_once() -> None:
    with pytest.raises(LayoutError, match=r"xp2.*\n.*pp2-no"):
        parse_layouts("dp2,xp2,pp2-no")
    assert [layout.name for layout in parse_layouts("dp2, tp2,dp2")] == ["dp2", "tp2"]
    for ranks, names in DEFAULT.items():
        assert {parse_layout(name).world_size for name in names} == {ranks}


@given(st.integers(1, 3), st.integers(1, 2), st.integers(1, 4), st.integers(1, 3))
def test_groups_partition_the_ranks(tp: int, cp: int, dp: int, pp: int) -> None:
    layout = parse_layout(f"tp{tp}cp{cp}dp{dp}pp{pp}")
    everyone = set(range(layout.world_size))
    for dimensions, size in ((("tp",), tp), (("cp",), cp), (("dp",), dp), (("pp",), pp), (("cp", "dp"), cp * dp)):
        groups = list(layout.groups(*dimensions))
        assert all(len(g) == size for g in groups)
        assert set().union(*groups) == everyone
        assert sum(map(len, groups)) == layout.world_size
    assert all(layout.rank(**layout.coordinates(r)) == r for r in everyone)


@given(
    st.sampled_from((1, 2, 4)),
    st.sampled_from((1, 2)),
    st.sampled_from((1, 2)),
    st.sampled_from((1, 2)),
    st.sampled_from((1, 2, 4)),
)
def test_experts_and_their_replicas_partition_the_ranks_of_a_pipeline_rank(tp: int, cp: int, dp: int, pp: int, ep: int) -> None:
    if (tp * cp * dp) % ep:
        return
    layout = parse_layout(f"tp{tp}cp{cp}dp{dp}pp{pp}ep{ep}{'sp' if tp > 1 else ''}")
    spread, replicas = list(layout.expert_groups(replicas=False)), list(layout.expert_groups(replicas=True))
    assert sorted(r for g in spread for r in g) == sorted(r for g in replicas for r in g) == list(range(layout.world_size))
    assert all(len(g) == ep and len({layout.coordinates(r)["pp"] for r in g}) == 1 for g in spread)
    assert all(len(g) == tp * cp * dp // ep for g in replicas)
    # A rank meets each other one in one of the two at most.
    assert all(len(set(a) & set(b)) <= 1 for a in spread for b in replicas)


# -- shared cores ------------------------------------------------------------------------------------------------------


def program_of(chains: list[list[str]]) -> Program:
    """One role a chain, its ops one after the other."""
    builder = ProgramBuilder("chains")
    for role, names in enumerate(chains):
        for name in names:
            builder.add((role, name), kind=OpKind.FORWARD, role=role, streams=(Stream(role, "compute"),), price=name)
    return builder.build(rank_count=(1,) * len(chains))


def seconds_of(program: Program, prices: dict[str, float]) -> np.ndarray:
    return np.array([prices[program.price_keys[p]] for p in program.price])  # type: ignore[index]


HOST = host_ranks.Scheduler(1, 0.5, 10.0)


def ranks_on(program: Program, seconds: np.ndarray, host: host_ranks.Scheduler) -> host_ranks.RankTimeline:
    """A rank for each role; its thread runs what is on its compute stream."""
    ranks = [[role] for role in range(max((stream.role for stream in program.streams), default=0) + 1)]
    return host_ranks.replay(program, seconds, np.zeros(program.num_ops), computing(program), ranks, host)


def computing(program: Program) -> list[bool]:
    ptr, streams = program.op_streams
    own = [Stream(int(role), "compute") for role in program.role]
    return [any(program.streams[s] == own[op] for s in streams[a:b]) for op, (a, b) in enumerate(pairwise(ptr))]


def test_enough_cores_change_nothing_and_one_core_gives_the_sum_of_all_work() -> None:
    program = program_of([["a", "b"], ["b", "a"], ["a"]])
    seconds = seconds_of(program, {"a": 1.0, "b": 2.5})
    assert ranks_on(program, seconds, host_ranks.Scheduler(3, 0.5, 10.0)).timeline.makespan == pytest.approx(3.5)
    assert ranks_on(program, seconds, HOST).timeline.makespan == pytest.approx(float(seconds.sum()))


def test_time_slices_of_two_ranks_on_one_core() -> None:
    program = program_of([["a"], ["b"]])
    found = ranks_on(program, seconds_of(program, {"a": 1.0, "b": 3.0}), HOST)
    # Half a second each in turn: a runs 0-0.5 and 1-1.5, b the rest.
    assert found.timeline.finish.tolist() == [1.5, 4.0]
    assert found.timeline.start.tolist() == [0.0, 0.5]
    assert found.held_s.tolist() == [1.5, 3.5]


def test_a_rank_that_wakes_takes_the_core_after_the_delay_and_not_before() -> None:
    builder = ProgramBuilder("wake")
    builder.add("long", kind=OpKind.FORWARD, role=0, streams=(Stream(0, "compute"),), price="long")
    builder.add("wait", kind=OpKind.SEND_FORWARD, role=1, streams=(Stream(1, "wire"),), price="wait")
    builder.add("short", kind=OpKind.FORWARD, role=1, streams=(Stream(1, "compute"),), price="short", deps=("wait",))
    program = builder.build(rank_count=(1, 1))
    seconds = seconds_of(program, {"long": 5.0, "wait": 2.0, "short": 1.0})
    computes = [True, False, True]
    host = host_ranks.Scheduler(1, 100.0, 0.25)
    finish = host_ranks.replay(program, seconds, np.zeros(3), computes, [[0], [1]], host).timeline.finish
    assert finish.tolist() == [6.0, 2.0, 3.25]
    # Without preemption it waits for the end of the slice.
    late = host_ranks.replay(program, seconds, np.zeros(3), computes, [[0], [1]], host_ranks.Scheduler(1, 100.0, 50.0))
    assert late.timeline.finish.tolist() == [5.0, 2.0, 6.0]


def test_a_collective_starts_with_its_last_rank_and_ranks_of_a_role_drift() -> None:
    builder = ProgramBuilder("drift")
    builder.add("f", kind=OpKind.FORWARD, role=0, streams=(Stream(0, "compute"),), price="f")
    builder.add("c", kind=OpKind.COLLECTIVE, role=0, streams=(Stream(0, "wire"),), price="c", deps=("f",))
    builder.transfers[1] = Transfer("all_reduce", 1.0, ((0, 1), (2, 3)))
    program = builder.build(rank_count=(4,))
    seconds, talks = seconds_of(program, {"f": 1.0, "c": 0.5}), np.array([0.0, 0.0])
    found = host_ranks.replay(program, seconds, talks, [True, False], [[0, 1, 2, 3]], host_ranks.Scheduler(2, 100.0, 50.0))
    # Ranks 0 and 1 compute first, then 2 and 3 while the first group talks.
    assert found.timeline.finish.tolist() == [2.0, 2.5]
    assert found.timeline.start.tolist() == [0.0, 1.0]
    assert found.held_s.tolist() == [1.0, 0.5]


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_ranks_on_cores_do_all_the_work_and_never_faster_than_without_sharing(data: st.DataObject) -> None:
    program = data.draw(programs(acyclic=True))
    table = data.draw(prices(program))
    seconds = table.seconds[program.price]
    expected = discrete_event.run(program, table)
    wide = ranks_on(program, seconds, host_ranks.Scheduler(99, 1.0, 1.0))
    assert np.allclose(wide.timeline.finish, expected.finish, rtol=1e-9, atol=1e-12)
    tight = ranks_on(program, seconds, host_ranks.Scheduler(1, float(seconds.max(initial=1.0)) / 3 + 1e-3, 1e-3))
    assert tight.timeline.makespan >= max(expected.makespan, float(seconds[computing(program)].sum())) * (1 - 1e-9)


# -- inside a step -----------------------------------------------------------------------------------------------------


def test_factor_and_launch_time_are_found_again() -> None:
    references = [Reference(1.2 * k + 2e-5 * n + u, k, n, u) for k, n, u in ((0.5, 2000, 0.03), (0.01, 300, 0.002))]
    assert fit(references) == pytest.approx((1.2, 2e-5))
    assert fit(references[:1])[1] == 0.0
    assert fit([]) == (1.0, 0.0)


def test_each_model_gets_its_own_factor_and_experts_do_not_vote_on_the_launch_time() -> None:
    dense = {
        m: Reference(1.2 * k + 2e-5 * n + u, k, n, u) for m, k, n, u in (("transformer", 0.5, 2000, 0.03), ("mlp", 0.01, 300, 0.0))
    }
    found = in_step(dense | {"moe": Reference(1.7 * 0.6 + 2e-5 * 3000, 0.6, 3000, 0.0)})
    assert found.launch_s == pytest.approx(2e-5)
    assert [found.factor(m) for m in ("transformer", "mlp", "moe", "other")] == pytest.approx([1.2, 1.2, 1.7, 1.0])
    # A step that is all launches says what one takes; the factors are what is left.
    told = in_step(dense | {"tiny": Reference(1e-3 + 1e-5 * 3000, 1e-3, 3000, 0.0)})
    assert told.launch_s == pytest.approx(1e-5)
    assert "tiny" not in told.factors
    assert told.factor("transformer") == pytest.approx(1.2 + 1e-5 * 2000 / 0.5)


@given(st.floats(0.2, 3.0), st.floats(0.2, 3.0))
def test_compute_is_never_faster_inside_a_step(first: float, second: float) -> None:
    factor, launch_s = fit([Reference(first, 1.0, 1000, 0.0), Reference(second * 0.02, 0.01, 300, 0.0)])
    assert factor >= 1.0
    assert launch_s >= 0.0


# -- measured prices ---------------------------------------------------------------------------------------------------


def test_collectives_between_measured_sizes() -> None:
    points = [MeasuredCollective(collective="all_reduce", ranks=2, bytes=b, seconds=s, cores=c) for b, s, c in
              ((1e4, 1e-3, 0.5), (1e6, 4e-3, 0.7), (1e8, 1e-1, 0.9))]  # fmt: skip
    times = MeasuredTimes.of(points[::-1])
    assert not times.has("all_reduce", 4)
    assert times.price("all_reduce", 2, 1e6).seconds == 4e-3
    assert times.price("all_reduce", 2, 1e5).seconds == pytest.approx(2e-3)
    assert times.price("all_reduce", 2, 10.0).seconds == 1e-3
    assert times.price("all_reduce", 2, 2e8).seconds == pytest.approx(2e-1)
    assert times.cores("all_reduce", 2, 1e5) == pytest.approx(0.6)


def test_memory_bound_points_override_the_class() -> None:
    profile = load_hardware("cpu-gloo")
    points = tuple(MeasuredPoint(op="memory", kernel="norm", shape=(b,), seconds=s) for b, s in ((1000, 1e-5), (100000, 4e-4)))
    more = profile.kernels.model_copy(update={"points": (*profile.kernels.points, *points)})
    model = KernelModel(profile.model_copy(update={"kernels": more}))
    assert model.memory_bound("norm", 1000.0).seconds == 1e-5
    assert model.memory_bound("norm", 10000.0).seconds == pytest.approx((1e-5 * 4e-4) ** 0.5)
    assert model.memory_bound("norm", 200000.0).seconds == pytest.approx(8e-4)
    assert model.memory_bound("residual", 1000.0) == KernelModel(profile).memory_bound("residual", 1000.0)


# -- what is sent ------------------------------------------------------------------------------------------------------


def test_bytes_on_the_wire_are_the_closed_forms() -> None:
    act = 4.0 * TOKENS * D
    assert predict(parse_layout("dp2"), SETUP).collectives(0)["all_reduce/2"][1] == 4.0 * WEIGHTS + 4
    tp = predict(parse_layout("tp2"), SETUP).collectives(0)["all_reduce/2"]
    # Two a layer each way, embedding forward, logits backward, three values a token in the loss.
    assert tp == (BATCH * (4 * L + 2 + 3) + 1, BATCH * ((4 * L + 2) * act + 3 * 4 * TOKENS) + 4)
    pp = predict(parse_layout("pp2"), SETUP)
    assert pp.collectives(0)["send_recv/2"] == (BATCH, BATCH * act)
    fsdp = predict(parse_layout("fsdp2"), SETUP).collectives(0)
    assert fsdp["reduce_scatter/2"][1] == (BATCH / 2) * 4.0 * WEIGHTS
    ring = predict(parse_layout("cp2-ring"), SETUP).collectives(0)["send_recv/2"]
    assert ring[1] == BATCH * L * 3 * act
    # In a pipeline the parameters stay gathered: once each way a step.
    piped = predict(parse_layout("pp2fsdp2"), SETUP)
    gathered = [piped.collectives(r)["all_gather/2"][1] for r in range(2)]
    assert sum(gathered) == sum(piped.collectives(r)["reduce_scatter/2"][1] for r in range(2)) == 4.0 * WEIGHTS
    ep = predict(parse_layout("ep2dp2"), SETUP).collectives(0)
    assert ep["all_to_all/2"] == (BATCH / 2 * L * 4, BATCH / 2 * L * 4 * MOE["moe"]["num_experts_per_tok"] * act)


def test_idle_shares_of_equal_stages_are_the_closed_form() -> None:
    setup = Setup({**SETUP.models, "mlp": {**MLP, "depth": 64}}, SETUP.training, "cpu-gloo")
    p, m = 2, MLP_TRAINING["global_batch_size"] // MLP_TRAINING["micro_batch_size"]
    predicted = predict(parse_layout("mlp-pp2-gpipe"), setup)
    # Both ranks of a host with a core for each: sends and the loss are what the form leaves out.
    assert np.mean(predicted.idle) == pytest.approx((p - 1) / (m + p - 1), abs=0.03)


def test_shapes_cover_every_price_of_compute() -> None:
    predictions = [predict(layout, SETUP) for layout in parse_layouts("single,dp2,fsdp2,tp2sp,pp2-zbv,cp2-ring,ep2dp2,mlp-tp2")]
    shapes, collectives = shapes_of(predictions), collectives_of(predictions)
    assert {s["op"] for s in shapes} == {"gemm", "grouped_gemm", "attention", "memory"}
    assert {(c["collective"], c["ranks"]) for c in collectives} >= {("all_reduce", 2), ("all_gather", 2), ("send_recv", 2)}
    assert len({repr(s) for s in shapes}) == len(shapes)
    seconds, launches = kernel_counts(predictions[0].priced)
    assert seconds > 0
    assert launches > 8 * BATCH * L


# -- comparison --------------------------------------------------------------------------------------------------------


def measured(name: str, seconds: float, **first: Any) -> Measured:
    return Measured(parse_layout(name), (seconds,) * 3, (seconds,), first, 3)


def test_other_processes_lengthen_a_step_only_by_what_it_needs_of_the_cores() -> None:
    p = predict(parse_layout("dp2"), SETUP)
    assert p.beside(1.0) == p.step_time_s  # a profile without cores does not say
    host = replace(p, processor_s=1.5 * p.step_time_s, cores=2.0)
    # Ranks that leave half a core idle lose nothing to half a core of others, and a third of their speed to a whole one.
    assert host.beside(0.0) == host.beside(0.5) == p.step_time_s
    assert host.beside(1.0) == pytest.approx(1.5 * p.step_time_s)


def test_report_counts_errors_order_and_bytes() -> None:
    names = ("dp2", "tp2", "pp2")
    times = {name: predict(parse_layout(name), SETUP).step_time_s for name in names}
    sent = {name: [{k: list(v) for k, v in predict(parse_layout(name), SETUP).collectives(r if name == "pp2" else 0).items()}
                   for r in range(2)] for name in names}  # fmt: skip
    sent["tp2"][0]["all_reduce/2"][1] += 4
    idle = ((0.1, 0.1, 0.4), (0.2, 0.3, 0.3))  # medians 0.1 and 0.3
    runs = {n: replace(measured(n, t / 1.1, collectives=sent[n]), idle=idle) for n, t in times.items()}
    report = compare([(runs, {}, SETUP)], 0.15)
    assert report.summary("step_time_s").mape == pytest.approx(0.1)
    assert report.tau == pytest.approx(1.0)
    assert report.volumes_exact == (2, 3)
    assert report.passed
    assert not compare([(runs, {}, SETUP)], 0.05).passed
    bubble = next(row for row in report.rows if row.metric == "bubble_fraction")
    assert bubble.measured == pytest.approx(0.2)
    found = report.as_json()
    assert {row["metric"] for row in found["rows"]} == {"step_time_s", "bubble_fraction", "communication_bytes"}


def test_a_backward_in_two_parts_costs_each_layer_but_those_of_the_first_stage() -> None:
    """Four stages of one layer, eight micro-batches; the first stage's backward stays whole (torch's PipelineStage)."""
    split = InStep(split_s={"transformer": 1e-3})
    for name, times in (("pp2-zbv", 8 * 3), ("pp2-interleaved", 0)):
        priced = predict(parse_layout(name), SETUP).priced
        with_split, without = (step_work(priced, given, "transformer").seconds[priced.program.price] for given in (split, InStep()))
        assert (with_split - without).sum() == pytest.approx(times * 1e-3)
    assert [x.name for x in references_of(parse_layouts("pp2-zbv,pp2"), "cuda")] == ["single", "transformer-split"]
    assert not any(x.split for x in references_of(parse_layouts("pp2"), "cpu"))


def test_idle_shares_are_those_of_the_steps_that_count(tmp_path: Path) -> None:
    """All rounds, without the steps beside other work: medians over 0.10, 0.12, 0.20 and 0.22, not of the first round alone."""
    layout = parse_layout("pp2").as_json()
    rounds = [
        {"seconds": [1.0, 1.0, 9.0], "foreign": [0.0, 0.0, 1.0], "idle": [[0.10, 0.12, 0.9], [0.3, 0.3, 0.9]], "collectives": []},
        {"seconds": [1.0, 1.0], "foreign": [0.0, 0.0], "idle": [[0.20, 0.22], [0.3, 0.3]]},
    ]  # fmt: skip
    lines = [{"kind": "config"}, *({"kind": "run", "layout": layout, **found} for found in rounds)]
    (tmp_path / "runs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    _, runs, _ = read_runs(tmp_path / "runs.jsonl")
    assert runs["pp2"].seconds == (1.0,) * 4
    assert [float(np.median(shares)) for shares in runs["pp2"].idle] == pytest.approx([0.16, 0.3])
