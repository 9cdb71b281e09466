"""A whole job, every rank of it, on a real cluster: event counts, both engines, and folding."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
from test_contention_cluster import profile
from test_engine_equal import counted

from simpar import step
from simpar.engine.cluster_network import ClusterNetwork
from simpar.engine.contention import Contention
from simpar.engine.discrete_event import Effects, run
from simpar.engine.effects import engine_effects, expected_load_factor
from simpar.engine.jitter import Noise
from simpar.engine.longest_path import longest_path
from simpar.program.builder import ProgramBuilder
from simpar.program.program import OpKind, PriceTable, Stream, Transfer
from simpar.specs.scenario import read_scenario
from simpar.step import prepare
from simpar.topology.cluster import Cluster

NOISE = Noise(0.02, 0.02, 0.01)


def benchmark_module(name: str):
    """A module of benchmarks/, which is not a package."""
    path = Path(__file__).parent.parent / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def job():
    """64 ranks with tensor-parallel rendezvous, sends and gradient buckets."""
    job_type = benchmark_module("synthetic_programs").Job
    return job_type(tp=8, dp=4, pp=2, microbatches=6, segments=2, buckets=2).program()


@pytest.mark.parametrize("noise", [None, NOISE])
@pytest.mark.parametrize("fabric", [{}, {"nic_count": 2, "oversubscription": 7.0, "pod_oversubscription": 7.0}])
def test_at_most_three_events_per_op(job, fabric, noise):
    program, prices = job
    contention = Contention(ClusterNetwork(Cluster(profile(**fabric), 8)))
    timeline, events = counted(program, prices, contention=contention, interference=True, noise=noise)
    assert program.num_ops <= events <= 3 * program.num_ops
    alone = longest_path(program, prices, noise=noise)
    assert (timeline.finish >= alone.finish * (1 - 1e-12)).all()
    assert (timeline.makespan > 1.05 * alone.makespan) == bool(fabric)


def test_engines_agree_on_a_whole_job(job):
    program, prices = job
    slow = {3: 1.5, 17: 1.1}
    one = run(program, prices, Effects(slow_factors=slow, noise=NOISE))
    other = longest_path(program, prices, slow_factors=slow, noise=NOISE)
    assert one.finish.tobytes() == other.finish.tobytes()
    assert one.start.tobytes() == other.start.tobytes()


TP, DP, PP, MICROBATCHES = 8, 4, 2, 4
SECONDS = {"F": 0.02, "send": 0.01, "reduce": 0.03}
BYTES = {"send": 0.4e9, "reduce": 1.9e9}


def forward_job(folded: bool):
    """Forwards through two stages, activations sent, gradients of each microbatch reduced: by role or by rank."""
    builder = ProgramBuilder("folded" if folded else "expanded")
    ranks = [[TP * DP * stage + i for i in range(TP * DP)] for stage in range(PP)]
    everyone = range(TP * DP)
    units = [list(everyone)] if folded else [[i] for i in everyone]

    def role(stage: int, unit: list[int]) -> int:
        return stage if folded else ranks[stage][unit[0]]

    def transfer(key, name, stage, unit, kind, deps, groups, members):
        index = builder.add(
            key,
            kind=OpKind.SEND_FORWARD if name == "send" else OpKind.REDUCE_GRADIENTS,
            role=role(stage, unit),
            streams=[Stream(role(stage, [m]) if not folded else stage, kind) for m in members],
            price=name,
            deps=deps,
        )
        collective = "send_recv" if name == "send" else "reduce_scatter"
        builder.transfers[index] = Transfer(collective, BYTES[name], groups)

    for microbatch in range(MICROBATCHES):
        for stage in range(PP):
            for unit in units:
                deps = [("send", microbatch, tuple(unit))] if stage else []
                streams = (Stream(role(stage, unit), "compute"),)
                key = ("F", stage, microbatch, tuple(unit))
                builder.add(key, kind=OpKind.FORWARD, role=role(stage, unit), streams=streams, price="F", deps=deps)
                if not stage:
                    pairs = tuple((ranks[0][i], ranks[1][i]) for i in unit)
                    transfer(("send", microbatch, tuple(unit)), "send", 0, unit, "pp", [key], pairs, unit[:1])
            local = [list(range(t, TP * DP, TP)) for t in range(TP)]
            for members in [[0]] if folded else local:
                groups = [tuple(ranks[stage][i] for i in group) for group in (local if folded else [members])]
                done = [("F", stage, microbatch, tuple(u)) for u in units if folded or u[0] in members]
                key = ("reduce", stage, microbatch, tuple(members))
                transfer(key, "reduce", stage, members, "dp", done, tuple(groups), members)
    program = builder.build()
    seconds = np.array([SECONDS[str(k)] for k in program.price_keys])
    return program, PriceTable(seconds, np.zeros(len(seconds)))


@pytest.mark.parametrize("fabric", [{}, {"nic_count": 4}, {"nic_count": 4, "kind": "fat-tree", "oversubscription": 2.0}])
def test_folded_job_equals_the_expanded_one(fabric):
    """Symmetric ranks: one role per pipeline rank gives every rank's times, contention between dimensions included."""
    contention = Contention(ClusterNetwork(Cluster(profile(**fabric), 8)))
    (program, prices), (expanded_program, expanded_prices) = forward_job(True), forward_job(False)
    folded_timeline = run(program, prices, Effects(contention=contention))
    expanded = run(expanded_program, expanded_prices, Effects(contention=contention))
    for stage in range(PP):
        for kind in (OpKind.FORWARD, OpKind.SEND_FORWARD, OpKind.REDUCE_GRADIENTS):
            mine = folded_timeline.finish[(program.role == stage) & (program.kind == kind)]
            of_stage = expanded_program.role // (TP * DP) == stage
            theirs = expanded.finish[of_stage & (expanded_program.kind == kind)]
            assert len(mine) == (MICROBATCHES if stage == 0 or kind != OpKind.SEND_FORWARD else 0)
            theirs = theirs.reshape(MICROBATCHES, -1) if len(mine) else theirs[:, None]
            assert theirs == pytest.approx(np.broadcast_to(mine[:, None], theirs.shape), rel=1e-9)
    alone = longest_path(program, prices).makespan
    assert folded_timeline.makespan > 1.01 * alone


@pytest.mark.parametrize("effects", [[], ["effects.contention=true"], ["effects.dead_rails=[2]"]])
def test_folded_scenario_equals_the_expanded_one(effects):
    """The shipped 64-GPU scenario through the main path."""
    path = Path(__file__).parent.parent / "scenarios" / "llama3.1-70b_h100x64_tp4cp2pp4.toml"
    spans = []
    for expand in ("false", "true"):
        scenario = read_scenario(path, [*effects, f"effects.expand={expand}"])
        wanted = scenario.effects
        priced = prepare(scenario, detail="stage", expand=wanted.expand, transfers=wanted.needs_network)
        latency = np.array([price.latency_s for price in priced.prices])
        spans.append(step.run(priced, **engine_effects(scenario, latency)).makespan)
    assert spans[1] == pytest.approx(spans[0], rel=1e-9)


def test_uniform_routing_is_zipf_without_slope():
    path = Path(__file__).parent.parent / "scenarios" / "mixtral-8x22b_h100x128_tp2pp8ep8.toml"
    kinds = ["training.routing.kind=uniform"], ["training.routing.kind=zipf", "training.routing.alpha=0"]
    found = [expected_load_factor(read_scenario(path, kind)) for kind in kinds]
    assert found[0] == found[1] > 1.0


@pytest.mark.parametrize("waits", ["true", "false"])
def test_the_first_repetition_is_the_step_itself(waits):
    """Also where ranks do not wait for each other at the step's end, and it takes less than until the last op."""
    path = Path(__file__).parent.parent / "scenarios" / "llama3.1-70b_h100x64_tp4cp2pp4.toml"
    noisy = ["effects.compute_sigma=0.02", "effects.repetitions=3", "effects.interference=false"]
    plan = ["schedule=zb-h2", "virtual_stages=1", "zero_stage=0", f"synchronous_optimizer={waits}"]
    result = step.simulate(read_scenario(path, [*noisy, *(f"plan.{field}" for field in plan)]), detail="stage")
    times = result.repetitions.makespans_s
    assert times[0] == result.step_time_s
    assert (result.step_time_s < result.timeline.makespan) == (waits == "false")
    assert times.min() > 0.98 * times.max()


def test_repetitions_under_uneven_routing_share_links_too():
    """Every repetition of a step whose experts are loaded unevenly pays for contention, as the step itself does."""
    path = Path(__file__).parent.parent / "scenarios" / "mixtral-8x22b_h100x128_tp2pp8ep8.toml"
    few = ["training.routing.kind=zipf", "training.routing.alpha=0.5", "effects.repetitions=2", "cluster.nics_per_node=2"]
    found = [step.simulate(read_scenario(path, [*few, f"effects.contention={on}"]), detail="stage") for on in ("false", "true")]
    alone, shared = (result.repetitions.makespans_s for result in found)
    assert (shared > alone).all()
    assert shared.mean() - alone.mean() == pytest.approx(found[1].step_time_s - found[0].step_time_s, rel=0.2)
