"""Speed of contention, as JSON: every rank of a job on the links of a real cluster.

    python benchmarks/bench_contention.py [--quick] [--profile] [--stragglers]

Three fabrics, from never hot to always hot, and noise, so that nothing happens at the same instant on two ranks. To be met: 60 s
of CPU each. `--stragglers`: the flagship scenario instead, 16,384 ranks with slow ones at stage detail; 120 s and 8 GiB.
"""

from __future__ import annotations

import cProfile
import json
import resource
import sys
import time
from pathlib import Path

from bench_engines import count_events
from synthetic_programs import Job

from simpar.engine.cluster_network import ClusterNetwork
from simpar.engine.contention import Contention
from simpar.engine.discrete_event import Effects, run
from simpar.engine.jitter import Noise
from simpar.engine.longest_path import longest_path
from simpar.program.program import PriceTable, Program
from simpar.specs.hardware import load_hardware
from simpar.specs.scenario import read_scenario
from simpar.step import simulate
from simpar.topology.cluster import Cluster

QUICK = Job(tp=8, dp=4, pp=4, microbatches=8, segments=2, buckets=2)
FULL = Job(tp=8, dp=8, pp=16, microbatches=24, segments=7, buckets=7)
"""1,024 ranks of 510 ops each."""
FLAGSHIP = Path(__file__).parent.parent / "scenarios" / "llama3.1-405b_h100x16384_tp8pp16.toml"
SLOW = {rank: 1.0 + 0.02 * (rank % 7) for rank in range(0, 16384, 997)}
"""Ranks 2-12 % slower than the rest, spread over every stage."""
NOISE = Noise(compute_sigma=0.02, communication_sigma=0.02, rank_sigma=0.01)


def clusters(nodes: int) -> dict[str, Cluster]:
    """One machine, three networks: full bisection by rail; 1:7 uplinks; these, hashed, and a NIC for two GPUs."""
    base = load_hardware("dgx-h100")
    small = {"nodes_per_leaf_group": 8, "leaf_groups_per_pod": 4}
    flat = base.model_copy(update={"fabric": base.fabric.model_copy(update=small)})
    tight = {**small, "kind": "fat-tree", "oversubscription": 7.0, "pod_oversubscription": 7.0}
    oversubscribed = base.model_copy(update={"fabric": base.fabric.model_copy(update=tight)})
    half = oversubscribed.model_copy(update={"nic": base.nic.model_copy(update={"count": 4})})
    return {
        "rail-optimised": Cluster(flat, nodes),
        "1:7 oversubscribed": Cluster(oversubscribed, nodes),
        "1:7, hashed, 4 NICs": Cluster(half, nodes, path_choice="hash"),
    }


def measure(program: Program, prices: PriceTable, cluster: Cluster, noise: Noise | None) -> dict[str, object]:
    """One run with contention and interference."""
    network = ClusterNetwork(cluster)
    begin = time.process_time()
    timeline = run(program, prices, Effects(contention=Contention(network), interference=True, noise=noise, seed=1))
    seconds = time.process_time() - begin
    alone = longest_path(program, prices, noise=noise, seed=1).makespan
    events = count_events(program, prices, contention=Contention(network), interference=True, noise=noise, seed=1)
    return {
        "step_s": timeline.makespan,
        "without_contention_s": alone,
        "cpu_s": seconds,
        "ops_per_s": round(program.num_ops / seconds),
        "events_per_op": events / program.num_ops,
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def stragglers() -> dict[str, object]:
    """One step of every rank of the flagship scenario with slow ranks and a spread between the others, and without them."""
    scenario = read_scenario(FLAGSHIP)
    wanted = scenario.effects.model_copy(update={"expand": True, "slow_ranks": SLOW, "rank_sigma": 0.02, "compute_sigma": 0.01})
    even = simulate(scenario, detail="stage").step_time_s
    begin = time.process_time()
    result = simulate(scenario.model_copy(update={"effects": wanted}), detail="stage")
    return {
        "ranks": result.world_size,
        "ops": result.program.num_ops,
        "step_s": result.step_time_s,
        "even_step_s": even,
        "cpu_s": time.process_time() - begin,
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def main() -> None:
    """Print one JSON object."""
    if "--stragglers" in sys.argv:
        print(json.dumps(stragglers(), indent=1))
        return
    job = QUICK if "--quick" in sys.argv else FULL
    begin = time.process_time()
    program, prices = job.program()
    found: dict[str, object] = {
        "ranks": job.ranks,
        "ops": program.num_ops,
        "transfers": len(program.transfers),
        "build_cpu_s": time.process_time() - begin,
    }
    profile = cProfile.Profile()
    if "--profile" in sys.argv:
        profile.enable()
    for name, cluster in clusters(job.ranks // 8).items():
        for noise in (None, NOISE):
            found[name + (", noise" if noise else "")] = measure(program, prices, cluster, noise)
    profile.disable()
    if "--profile" in sys.argv:
        profile.print_stats("cumulative")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
