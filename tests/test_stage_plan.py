"""Pipelines and replicas over machines of several kinds: stages priced, held and weighed on their own machines."""

from __future__ import annotations

import io
import json
import shutil
import tomllib
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from simpar.cli import app
from simpar.costs.pricer import LayoutPricer
from simpar.errors import InputError
from simpar.interop.export import export_files
from simpar.interop.scenario_text import scenario_text
from simpar.output import write_page
from simpar.parallel.keys import Compute, OptimizerStep, Reduce, Send
from simpar.parallel.shares import shared_layers, shared_microbatches
from simpar.report.explain import neighbours
from simpar.report.gantt import gantt
from simpar.report.step_html import step_page
from simpar.report.step_table import parts_table, step_report
from simpar.result.interpret import Priced
from simpar.result.result import Result
from simpar.specs.base import data_dir, read_toml
from simpar.specs.scenario import Scenario, make_scenario
from simpar.specs.stage_plan import hosts
from simpar.step import cost_models, decided, prepare, run, simulate

Table = dict[str, Any]
DENSE: Final[Table] = {
    "kind": "transformer", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 8, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 32000,
}  # fmt: skip
EXPERTS: Final[Table] = {**DENSE, "moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 4096}}
STEP: Final[Table] = {"sequence_length": 2048, "global_batch_size": 32}
A100: Final = "dgx-a100-80gb"
H100: Final = "dgx-h100"


def part(hardware: str, nodes: int = 1, **more: object) -> Table:
    return {"hardware": hardware, "num_nodes": nodes, **more}


def scenario(cluster: Table, plan: Table, training: Table | None = None, **more: Any) -> Scenario:
    return make_scenario({"name": "mixed", "model": DENSE, "cluster": cluster, "plan": plan,
                          **more, "training": {**STEP, **(training or {})}})  # fmt: skip


def parts(*found: Table, **cluster: Any) -> Table:
    return {"parts": list(found), **cluster}


TWO: Final = parts(part(A100), part(H100))
REPLICAS: Final = {**TWO, "parts_hold": "replicas"}


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The H100 machine under another path: a part of its own, priced by itself."""
    folder = tmp_path_factory.mktemp("twin")
    return str(shutil.copy(str(data_dir("hardware_profiles") / f"{H100}.toml"), str(folder / "twin.toml")))


def said(one: Scenario, **options: Any) -> Table:
    found = simulate(one, **options).to_json()
    found.pop("notes")
    found.pop("parts", None)
    return found


PLANS: Final[tuple[tuple[Table, Table], ...]] = (
    ({"tp": 2, "pp": 2}, {}),
    ({"tp": 2, "pp": 4, "virtual_stages": 2, "layers_per_stage": [1] * 8}, {}),
    ({"tp": 4, "pp": 2, "schedule": "zb-h1", "zero_stage": 0, "recompute": "full"}, {}),
    ({"pp": 4, "schedule": "zb-v"}, {"model": {**DENSE, "tie_word_embeddings": True}}),
    ({"tp": 2, "pp": 2, "ep": 4}, {"model": EXPERTS}),
    ({"pp": 2, "zero_stage": 3, "dp": 16}, {"framework": "torchtitan"}),
    ({"pp": 2, "cp": 2, "tp": 2}, {"effects": {"slow_ranks": {1: 1.2}}}),
)


@settings(max_examples=14, deadline=None)
@given(chosen=st.sampled_from(PLANS), nodes=st.tuples(st.integers(1, 2), st.sampled_from((1, 3))),
       detail=st.sampled_from(("stage", "layer", "op")))  # fmt: skip
def test_equal_parts_are_one_cluster(twin: str, chosen: tuple[Table, Table], nodes: tuple[int, int], detail: Any) -> None:
    plan, more = chosen
    count = nodes[0] * (1 if nodes[1] == 1 else 2)
    shape = {k: v for k, v in plan.items() if k != "dp"}
    training = {"global_batch_size": 8 * 4 * count}
    mixed = scenario(parts(part(H100, count), part(twin, count)), shape, training, **more)
    alike = scenario(part(H100, 2 * count), shape, training, **more)
    assert said(mixed, detail=detail) == said(alike, detail=detail)


def test_equal_replicas_are_one_cluster(twin: str) -> None:
    mixed = scenario(parts(part(H100), part(twin), parts_hold="replicas"), {"tp": 2, "pp": 2})
    assert said(mixed) == said(scenario(part(H100, 2), {"tp": 2, "pp": 2}))


def alone(hardware: str, plan: Table, training: Table | None = None) -> LayoutPricer:
    """The pricer of the job on machines of one kind."""
    priced = prepare(scenario(part(hardware, 2), plan, training), detail="stage")
    layout = priced.layout
    return LayoutPricer(layout, *cost_models(layout.scenario, layout.hardware)).bind(
        priced.schedule.stage_to_rank, priced.schedule.stage_to_rank
    )


def test_two_stages_by_hand() -> None:
    """One micro-batch: forward and backward of both stages and two sends, one after the other, then the update."""
    plan, training = {"tp": 8, "pp": 2}, {"global_batch_size": 1}
    mixed = prepare(scenario(parts(part(A100), part(H100)), plan, training), detail="stage")
    slow, fast = alone(A100, plan, training), alone(H100, plan, training)

    def whole(pricer: LayoutPricer, phase: Any, stage: int) -> float:
        return pricer.price(Compute(phase, stage, 0, len(pricer.layout.stage_blocks[stage]))).seconds

    computed = sum(whole(pricer, phase, stage) for stage, pricer in enumerate((slow, fast)) for phase in ("F", "B"))
    keys = (Send(0, 1, backward=False, pair=0), Send(1, 0, backward=True, pair=0))
    sends = [max(p.price(key).seconds for p in (slow, fast)) for key in keys]
    assert sends[0] == slow.price(keys[0]).seconds > fast.price(keys[0]).seconds
    # The second rank updates while the first computes; nothing is reduced.
    update = slow.price(OptimizerStep(0)).seconds
    assert run(mixed, "longest_path").makespan == pytest.approx(computed + sum(sends) + update, rel=1e-12)


def test_a_slower_part_is_slower_and_lies_between() -> None:
    plan = {"tp": 4, "pp": 2}
    both = simulate(scenario(parts(part(A100), part(H100)), plan))
    slow, fast = (simulate(scenario(part(name, 2), plan)) for name in (A100, H100))
    assert fast.step_time_s < both.step_time_s < slow.step_time_s
    assert both.world_size == 16
    assert both.peak_flops_per_s == pytest.approx((slow.peak_flops_per_s + fast.peak_flops_per_s) / 2)
    assert [memory.capacity_bytes for memory in both.memory] == [slow.device_memory_bytes, fast.device_memory_bytes]
    assert all(seconds >= 0 for _, seconds in both.waterfall())


def test_links_between_parts() -> None:
    """What is stated counts; else the slower of the two."""
    plan = {"tp": 8, "pp": 2}
    steps = {}
    for rate in ("400 GB/s", "20 GB/s", "2 GB/s"):
        network = {"bandwidth": rate}
        steps[rate] = prepare(scenario(parts(part(A100), part(H100), parts_network=network), plan)).table.seconds.sum()
    assert steps["400 GB/s"] < steps["20 GB/s"] < steps["2 GB/s"]
    unstated = prepare(scenario(parts(part(A100), part(H100)), plan)).table.seconds.sum()
    # 8 adapters of 25 GB/s on the slower machine.
    same = prepare(scenario(parts(part(A100), part(H100), parts_network={"bandwidth": "200 GB/s"}), plan)).table.seconds.sum()
    assert unstated == pytest.approx(same, rel=1e-3)
    far = prepare(scenario({**TWO, "parts_network": {"bandwidth": "20 GB/s", "latency": "1 ms"}}, plan))
    near = prepare(scenario({**TWO, "parts_network": {"bandwidth": "20 GB/s"}}, plan))
    more = far.table.seconds - near.table.seconds
    assert [isinstance(key, Send) for key in far.program.price_keys] == [bool(m) for m in more]
    assert more[more > 0] == pytest.approx(1e-3)


def test_memory_is_each_stages_own() -> None:
    """Half the memory on the second part: the first rank, which needs more, has room, and the second has not."""
    plan = {"tp": 2, "pp": 2}
    roomy = simulate(scenario(parts(part(A100), part(H100)), plan))
    first, second = (memory.device_bytes for memory in roomy.memory)
    assert roomy.fits
    assert first > second
    scale = 0.9 * second / roomy.memory[1].capacity_bytes
    tight = simulate(scenario(parts(part(A100), part(H100, memory_scale=scale)), plan))
    assert not tight.fits
    assert tight.worst_rank.rank == 1
    assert tight.device_memory_bytes == pytest.approx(0.9 * second)


# -- layers --------------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(1, 9), st.data())
def test_layers_are_shared_as_well_as_any_way_does(speeds: list[int], layers: int, data: st.DataObject) -> None:
    most = data.draw(st.lists(st.integers(0, 9), min_size=len(speeds), max_size=len(speeds)))
    found = shared_layers([[float(s)] * layers for s in speeds], [0.0] * len(speeds), most)

    def ways(left: int, limits: list[int]) -> list[tuple[int, ...]]:
        if not limits:
            return [()] if left == 0 else []
        return [(n, *rest) for n in range(min(left, limits[0]) + 1) for rest in ways(left - n, limits[1:])]

    def slowest(counts: tuple[int, ...]) -> float:
        return max(n * s for n, s in zip(counts, speeds, strict=True))

    every = ways(layers, most)
    assert (found is None) == (not every)
    if found is not None:
        assert found in every
        assert slowest(found) == min(map(slowest, every))


def test_stages_that_are_not_the_slowest_are_even() -> None:
    assert sorted(shared_layers([[1.0] * 7] * 3, [0.0] * 3, [7] * 3) or ()) == [2, 2, 3]
    # What embedding and head take counts.
    assert shared_layers([[1.0] * 8] * 3, [0.0, 0.0, 2.5], [8] * 3) in ((3, 4, 1), (4, 3, 1))


def test_layers_by_cost() -> None:
    plan = {"tp": 4, "pp": 2, "layers_per_stage": "auto"}
    cluster, long = parts(part(A100), part(H100)), {"sequence_length": 8192}  # long enough that no host is waited for
    found = simulate(scenario(cluster, plan, long))
    counts = [stage.count for stage in found.layout.stages]
    assert sum(counts) == 8
    assert counts[0] < counts[1]
    others = [
        simulate(scenario(cluster, {**plan, "layers_per_stage": [n, 8 - n]}, long), detail="stage").step_time_s for n in range(1, 8)
    ]
    assert found.step_time_s <= min(others) * 1.02
    assert decided(found.layout.scenario) == found.layout.scenario


def test_layers_within_memory() -> None:
    plan = {"tp": 4, "pp": 2}
    even = simulate(scenario(parts(part(H100), part(H100)), plan)).memory[1]
    scale = 0.95 * even.device_bytes / even.capacity_bytes
    cluster = parts(part(H100), part(H100, memory_scale=scale))
    assert not simulate(scenario(cluster, plan)).fits
    found = simulate(scenario(cluster, {**plan, "layers_per_stage": "auto"}))
    assert found.fits
    assert found.layout.stages[1].count < 4


def test_layers_within_the_memory_of_every_kind_of_replica() -> None:
    """The first rank holds two micro-batches: with less memory on one part, both parts move a layer to the second."""
    plan, training = {"tp": 4, "pp": 2, "replica_microbatches": [16, 16]}, {"micro_batch_size": 4, "global_batch_size": 128}

    def step(scale: float, **more: Any) -> Result:
        cluster = {**parts(part(H100), part(H100, memory_scale=scale)), "parts_hold": "replicas"}
        return simulate(scenario(cluster, {**plan, **more}, training, model={**DENSE, "vocab_size": 1024}), detail="stage")

    even = step(1.0)
    scale = 0.975 * even.worst_rank.device_bytes / even.worst_rank.capacity_bytes
    assert not step(scale).fits
    found = step(scale, layers_per_stage="auto")
    assert found.fits
    assert [stage.count for stage in found.layout.stages] == [3, 5]


# -- replicas ------------------------------------------------------------------------------------------------------------


@given(st.tuples(st.integers(1, 4), st.integers(1, 4)), st.integers(2, 60), st.tuples(st.integers(1, 6), st.integers(1, 6)))
def test_microbatches_are_shared_as_well_as_any_way_does(
    replicas: tuple[int, int], total: int, each: tuple[int, int]
) -> None:  # fmt: skip
    lines = [(0.5, float(e)) for e in each]
    found = shared_microbatches(replicas, total, lines, lambda kind, count: True)
    ways = [(m, (total - replicas[0] * m) // replicas[1]) for m in range(1, total)
            if total > replicas[0] * m and (total - replicas[0] * m) % replicas[1] == 0]  # fmt: skip

    def slowest(counts: tuple[int, ...]) -> float:
        return max(base + e * m for (base, e), m in zip(lines, counts, strict=True))

    assert (found is None) == (not ways)
    if found is not None:
        assert found in ways
        assert slowest(found) == min(map(slowest, ways))


def test_replicas_of_unequal_speed() -> None:
    plan, cluster = {"tp": 2, "pp": 2}, parts(part(A100), part(H100), parts_hold="replicas")
    found = simulate(scenario(cluster, plan, {"global_batch_size": 64}))
    counts = decided(scenario(cluster, plan, {"global_batch_size": 64})).plan.replica_microbatches
    assert isinstance(counts, tuple)
    assert 2 * counts[0] + 2 * counts[1] == 64
    assert counts[0] < counts[1]
    each = (found, *found.others)
    assert {one.layout.num_microbatches for one in each} == set(counts)
    assert found.step_time_s == max(one.step_time_s for one in each)
    even = simulate(scenario(cluster, {**plan, "replica_microbatches": [16, 16]}, {"global_batch_size": 64}))
    assert found.step_time_s < even.step_time_s
    assert found.tokens_per_step == even.tokens_per_step == 64 * 2048
    # The slowest pipeline takes as long as on a cluster of its own, but for gradients that the slower network reduces.
    own = simulate(scenario(part(A100, 2), plan, {"global_batch_size": 4 * counts[0]}))
    slow = next(one for one in each if one.layout.replica == 0)
    assert own.step_time_s == pytest.approx(slow.step_time_s, rel=0.02)


def test_replicas_that_wait_must_fit_as_well() -> None:
    cluster = parts(part(A100), part(H100, memory_scale=0.05), parts_hold="replicas")
    found = simulate(scenario(cluster, {"tp": 4, "replica_microbatches": [12, 4]}))
    assert found.layout.replica == 0
    assert [one.fits for one in (found, *found.others)] == [False, False]
    assert found.worst_rank.device_bytes < found.device_memory_bytes
    assert any("do not fit in its memory" in note for note in found.notes)


def test_gradients_are_reduced_at_the_slower_network() -> None:
    plan = {"tp": 8, "zero_stage": 0}
    cluster = parts(part(A100), part(H100), parts_hold="replicas")
    for replica in (0, 1):
        mixed = prepare(scenario(cluster, plan), detail="stage", replica=replica)
        key = next(k for k in mixed.program.price_keys if isinstance(k, Reduce))
        apart = [alone(name, plan).price(key).seconds for name in (A100, H100)]
        assert mixed.table.seconds[mixed.program.price_keys.index(key)] == max(apart) > min(apart)


# -- tensor parallelism of each stage ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tp", "pp", "more"), [(4, 2, {}), (2, 4, {"ep": 2}), (8, 2, {"zero_stage": 0, "sequence_parallel": False})]
)
def test_stages_of_one_tensor_parallelism_are_one_plan(tp: int, pp: int, more: Table) -> None:
    cluster, model = part(H100, 2), {"model": EXPERTS} if "ep" in more else {}
    dp = 16 // (tp * pp)
    own = scenario(cluster, {"stage_tp": [tp] * pp, "pp": pp, "dp": dp, **more}, **model)
    alike = scenario(cluster, {"tp": tp, "pp": pp, "dp": dp, **more}, **model)
    mine, theirs = said(own), said(alike)
    assert (mine["layout"].pop("tp"), theirs["layout"].pop("tp")) == ((tp,) * pp, tp)
    assert mine == theirs


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_stages_of_unequal_tensor_parallelism(sequence_parallel: bool) -> None:
    """Each stage costs what it costs in a plan of its own degree; a send takes as long as on the side with fewer ranks."""
    more = {"pp": 3, "dp": 2, "sequence_parallel": sequence_parallel, "layers_per_stage": [4, 2, 2]}
    mixed = prepare(scenario(part(H100, 4), {"stage_tp": [8, 4, 4], **more}), detail="stage")
    wide, narrow = (prepare(scenario(part(H100, nodes), {"tp": tp, **more}), detail="stage") for tp, nodes in ((8, 6), (4, 3)))

    def seconds(priced: Priced, key: object) -> float:
        return float(priced.table.seconds[priced.program.price_keys.index(key)])

    last = len(mixed.layout.stages) - 1
    keys = [
        k for k in mixed.program.price_keys if isinstance(k, Send) or (isinstance(k, Compute) and not k.first and k.stage < last)
    ]
    for key in (key for key in keys if key in wide.program.price_keys and key in narrow.program.price_keys):
        own = [seconds(wide, key), seconds(narrow, key)]
        between = isinstance(key, Send) and {key.from_stage, key.to_stage} == {0, 1}
        stage = key.to_stage if isinstance(key, Send) else key.stage
        assert seconds(mixed, key) == (max(own) if between else own[stage > 0])
    # A slice of the sequence is twice as long on half the ranks; whole activations are the same everywhere.
    first = [seconds(p, Send(0, 1, backward=False, pair=0)) for p in (wide, narrow)]
    assert (first[1] > 1.5 * first[0]) == sequence_parallel
    found = simulate(mixed.layout.scenario)
    assert found.world_size == 32
    assert found.program.rank_count == (16, 8, 8)
    assert all(amount >= 0 for _, amount in found.waterfall())
    assert [(p["tp"], p["num_gpus"]) for p in found.to_json()["parts"]] == [(8, 16), (4, 16)]
    # The vocabulary is padded once, for the widest.
    flops = simulate(scenario(part(H100, 6), {"tp": 8, **more})).layout.model_flops
    assert found.layout.model_flops == pytest.approx(flops)


def test_the_ideal_is_the_mean_over_pipeline_ranks() -> None:
    found = simulate(scenario(part(H100, 2), {"stage_tp": [8, 4, 4], "pp": 3, "dp": 1}), detail="stage")
    layout, peak = found.layout, found.peak_flops_per_s
    flops = [3.0 * sum(b.model_flops for b in blocks) * layout.microbatches_in_all for blocks in layout.stage_blocks]
    each = [amount / gpus / peak for amount, gpus in zip(flops, (8, 4, 4), strict=True)]
    assert found.ideal_s == pytest.approx(sum(each) / 3)


def test_ranks_of_one_part_do_not_use_the_network_between_parts() -> None:
    def sends(rate: str) -> list[float]:
        cluster = parts(part(A100, 2), part(H100, 1), parts_network={"bandwidth": rate})
        priced = prepare(scenario(cluster, {"stage_tp": [8, 4, 4, 8], "pp": 4, "dp": 1}), detail="stage")
        keys = [Send(stage, stage + 1, backward=False, pair=stage) for stage in range(3)]
        return [float(priced.table.seconds[priced.program.price_keys.index(key)]) for key in keys]

    slow, fast = sends("1 GB/s"), sends("100 GB/s")
    assert slow[:2] == fast[:2]
    assert slow[2] > fast[2]


def test_a_scale_up_domain_stays_inside_its_part() -> None:
    found = hosts(scenario(parts(part("gb200-nvl72", 8), part(H100, 4)), {"pp": 2, "tp": 4}))
    assert [host.hardware.domain_size for host in found] == [32, 8]


def test_tensor_parallelism_of_parts() -> None:
    """Narrow groups on the machine with the larger memory, wide ones on the other."""
    cluster = parts(part(A100, 2), part(H100, 1))
    found = simulate(scenario(cluster, {"stage_tp": [8, 8, 4, 4], "pp": 4, "dp": 1}))
    assert [(p["gpu"][:4], p["tp"], p["pipeline_ranks"]) for p in found.to_json()["parts"]] == [
        ("A100", 8, [0, 1]),
        ("H100", 4, [2, 3]),
    ]
    assert "tp 8/8/4/4" in part_text(found)


def part_text(result: Result) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(step_report(result))
    return console.export_text()


# -- what is refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cluster", "plan", "more", "told"),
    [
        (TWO, {"pp": 1}, {}, "plan.pp = 1: 2 parts hold at least a pipeline rank each; at least 2, or cluster.parts_hold"),
        (parts(part(A100), part(H100, 2)), {"pp": 2}, {}, "cluster.parts.0.num_nodes = 1: GPUs 0 to 7 hold no whole number of"),
        ({**TWO, "hardware": A100}, {"pp": 2}, {}, "cluster.hardware = 'dgx-a100-80gb': stands in each of cluster.parts"),
        ({**TWO, "num_nodes": 3}, {"pp": 2}, {}, "cluster.num_nodes = 3: stands in each of cluster.parts"),
        ({**TWO, "memory_scale": 2.0}, {"pp": 2}, {}, "cluster.memory_scale = 2.0: belongs to one kind of machine"),
        (parts(part(A100, 2)), {"pp": 2}, {}, "cluster.parts = '1 part': machines of one kind are no parts"),
        (parts(part(A100), part("no such")), {"pp": 2}, {}, "unknown hardware profile 'no such'"),
        (part(A100, parts_hold="replicas"), {}, {}, "cluster.parts_hold = 'replicas': belongs to cluster.parts"),
        (part(A100), {"replica_microbatches": [1, 2]}, {}, "plan.replica_microbatches = (1, 2): belongs to replicas on machines"),
        (TWO, {"pp": 2, "placement": "tp-cp-ep-pp-dp"}, {}, "stages lie on parts one after the other; pp as the last"),
        (TWO, {"pp": 2}, {"effects": {"contention": True}}, "shared and broken links are not simulated over stages"),
        (TWO, {"pp": 2}, {"training": {**STEP, "precision": "fp8"}}, "A100 SXM 80GB has no fp8 arithmetic"),
        (parts(part(A100), part("gtx-580-pair", 4)), {"pp": 2}, {}, "has no network to reach the other parts; state cluster.parts"),
        (REPLICAS, {"tp": 8, "replica_microbatches": [1, 2]}, {}, "1 x 1 + 1 x 2 = 3 micro-batches, and training"),
        (REPLICAS, {"tp": 8, "replica_microbatches": [1]}, {}, "one number for each of 2 parts"),
        (REPLICAS, {"tp": 8}, {"training": {**STEP, "global_batch_size": 1}}, "for each of 2 replicas; such as 2"),
        (REPLICAS, {"tp": 8}, {"effects": {"expand": True}}, "cluster.parts_hold"),
        (part(H100, 2), {"stage_tp": [8, 4], "pp": 3, "dp": 1}, {}, "one degree for each of 3 pipeline ranks"),
        (part(H100, 2), {"stage_tp": [8, 8], "pp": 2, "tp": 8, "dp": 1}, {}, "plan.tp = 8: plan.stage_tp says it"),
        (part(H100, 2), {"stage_tp": [4, 4], "pp": 2}, {}, "world size / (cp x sum of stage_tp) = 2"),
        (part(H100, 2), {"stage_tp": [8, 4], "pp": 2, "dp": 1}, {}, "(8 + 4) x cp 1 x dp 1 = 12 GPUs, of 16"),
        (part(H100, 1), {"stage_tp": [4, 2, 2], "pp": 3, "dp": 1}, {}, "inside one node are not simulated"),
        (REPLICAS, {"stage_tp": [4, 4], "pp": 2, "dp": 2}, {}, "a replica has one tensor parallelism"),
        (part(H100, 2), {"stage_tp": [13, 3], "pp": 2, "dp": 1}, {}, "plan.tp = 13: must divide num_attention_heads (32)"),
    ],
)  # fmt: skip
def test_what_is_refused(cluster: Table, plan: Table, more: Table, told: str) -> None:
    more = dict(more)
    training = more.pop("training", None)
    with pytest.raises(InputError) as stop:
        scenario(cluster, plan, training, **more)
    assert told in str(stop.value)


def test_a_schedule_that_holds_stages_twice_is_refused() -> None:
    with pytest.raises(InputError, match="holds every stage on two pipeline ranks"):
        simulate(scenario(parts(part(A100), part(H100)), {"pp": 2, "schedule": "dualpipe"}))


def test_hardware_beside_the_scenario(tmp_path: Path, twin: str) -> None:
    shutil.copy(twin, tmp_path / "ours.toml")
    table = {"name": "m", "model": DENSE, "cluster": parts(part("ours.toml"), part(A100)), "plan": {"pp": 2}, "training": STEP}
    found = make_scenario(table, file=str(tmp_path / "scenario.toml"))
    assert [len(host.ranks) for host in hosts(found)] == [1, 1]


# -- commands ------------------------------------------------------------------------------------------------------------


def test_parts_in_commands(tmp_path: Path) -> None:
    one = scenario(TWO, {"tp": 4, "pp": 2})
    file = tmp_path / "mixed.toml"
    file.write_text(scenario_text(one))
    assert make_scenario(read_toml(file)).cluster == one.cluster
    shown = CliRunner().invoke(app, ["topology", str(file), "--json"])
    assert [p["gpu"] for p in json.loads(shown.stdout)["parts"]] == ["A100 SXM 80GB", "H100 SXM"]
    for command, told in (
        (["topology", str(file), "--num-nodes", "2"], "has parts, each with its own"),
        (["topology", str(file), "--html", str(tmp_path / "x.html")], "draws machines of one kind"),
        (["export", "megatron", str(file)], "a launch script starts the same command"),
        (["export", "simai", str(file)], "one kind of rank"),
        (["export", "chakra", str(file), "--out", str(tmp_path)], "one kind of rank"),
        (["improve", str(file)], "cluster.parts = '2 parts': only simpar simulate"),
    ):
        with pytest.raises(InputError, match=told):
            CliRunner().invoke(app, command, catch_exceptions=False, standalone_mode=False)


def test_reports_say_what_runs_where(tmp_path: Path) -> None:
    stages = simulate(scenario(TWO, {"tp": 4, "pp": 2, "layers_per_stage": [3, 5]}))
    told = stages.to_json()["parts"]
    assert [(p["gpu"], p["pipeline_ranks"], p["layers_per_stage"]) for p in told] == [
        ("A100 SXM 80GB", [0], [3]), ("H100 SXM", [1], [5]),
    ]  # fmt: skip
    assert [p["busy_s"] for p in told] == stages.accounting.busy.tolist()
    assert parts_table(stages).rows[0][:2] == ("8 x A100 SXM 80GB", "pipeline rank 0: 3 layers")
    assert gantt(stages)["ticks"] == ["rank 0, A100 SXM 80GB", "rank 1, H100 SXM"]
    replicas = simulate(scenario(REPLICAS, {"tp": 4, "replica_microbatches": [4, 12]}))
    told = replicas.to_json()["parts"]
    assert [(p["replicas"], p["num_microbatches"]) for p in told] == [(2, 4), (2, 12)]
    assert max(p["step_time_s"] for p in told) == replicas.step_time_s
    write_page(tmp_path / "replicas.html", step_page(replicas))
    assert "2 replicas of 12 micro-batches" in (tmp_path / "replicas.html").read_text()


def test_a_stated_network_is_written_with_its_units() -> None:
    network = {"bandwidth": "20 GB/s", "latency": "3 us"}
    one = scenario({**TWO, "parts_network": network}, {"pp": 2})
    assert make_scenario(tomllib.loads(scenario_text(one))).cluster == one.cluster


def test_explain_finds_neighbours_of_a_mixed_cluster() -> None:
    found = neighbours(simulate(scenario(TWO, {"tp": 4, "pp": 2})))
    assert any(n.step_time_s for n in found)


def test_a_launch_file_states_the_layers_that_cost_decides() -> None:
    left = scenario(part(H100, 2), {"pp": 2, "tp": 4, "layers_per_stage": "auto"}, {"sequence_length": 512})
    stated = decided(left)
    assert isinstance(stated.plan.layers_per_stage, tuple)
    assert export_files("megatron", left) == export_files("megatron", stated)
