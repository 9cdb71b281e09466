"""Speed of the engines, as JSON: ops per second, SimPy events per op, and how much cheaper a batched candidate is.

python benchmarks/bench_engines.py [--quick]
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import simpy
from synthetic_programs import Job, pipeline

from simpar.engine import discrete_event
from simpar.engine.discrete_event import Effects
from simpar.engine.jitter import Noise
from simpar.engine.longest_path import longest_path, longest_path_batch
from simpar.program.program import PriceTable, Program

T = TypeVar("T")
BATCH = 256


class CountingEnvironment(simpy.Environment):  # type: ignore[misc]
    """Counts what is scheduled."""

    events = 0

    def schedule(self, *args: object, **kwargs: object) -> None:
        CountingEnvironment.events += 1
        super().schedule(*args, **kwargs)


def count_events(program: Program, prices: PriceTable, **options: object) -> int:
    """SimPy events that one run schedules."""
    CountingEnvironment.events = 0
    original, discrete_event.Environment = discrete_event.Environment, CountingEnvironment
    try:
        discrete_event.run(program, prices, Effects(**options))
    finally:
        discrete_event.Environment = original
    return CountingEnvironment.events


def timed(function: Callable[[], T], repeats: int = 3) -> tuple[T, float]:
    """Result and the fewest CPU seconds of several calls (other processes do not count)."""
    best, result = float("inf"), function()
    for _ in range(repeats):
        start = time.process_time()
        result = function()
        best = min(best, time.process_time() - start)
    return result, best


def engines(ranks: int, microbatches: int, virtual_stages: int) -> dict[str, object]:
    """Every engine on one pipeline."""
    program, prices = pipeline(ranks, microbatches, virtual_stages)
    program.check()
    run, simpy_s = timed(lambda: discrete_event.run(program, prices))
    path, path_s = timed(lambda: longest_path(program, prices))
    table = prices.seconds * np.random.default_rng(0).uniform(0.9, 1.1, (BATCH, len(prices.seconds)))
    _, batch_s = timed(lambda: longest_path_batch(program, table))
    return {
        "program": program.name,
        "ops": program.num_ops,
        "levels": len(program.topological_levels),
        "identical": run.finish.tobytes() == path.finish.tobytes(),
        "simpy_ops_per_s": round(program.num_ops / simpy_s),
        "events_per_op": count_events(program, prices) / program.num_ops,
        "longest_path_ops_per_s": round(program.num_ops / path_s),
        "batch_ms_per_candidate": 1e3 * batch_s / BATCH,
        "batch_times_faster_per_candidate": simpy_s / (batch_s / BATCH),
    }


def stragglers(dp: int) -> dict[str, object]:
    """Every rank of a tp 8, pp 16 job at stage detail, some of them slow, with noise."""
    begin = time.process_time()
    program, prices = Job(tp=8, dp=dp, pp=16, microbatches=16, rendezvous=False).program()
    built = time.process_time()
    slow = dict.fromkeys(range(0, 128 * dp, 1001), 1.2)
    noise = Noise(compute_sigma=0.02, rank_sigma=0.01)
    timeline = discrete_event.run(program, prices, Effects(slow_factors=slow, noise=noise, interference=True))
    done = time.process_time()
    return {"ranks": 128 * dp, "ops": program.num_ops, "step_s": timeline.makespan, "build_cpu_s": built - begin,
            "run_cpu_s": done - built, "ops_per_s": round(program.num_ops / (done - built)),
            "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}  # fmt: skip


def main() -> None:
    """Print one JSON object."""
    quick = "--quick" in sys.argv
    shapes = [(8, 64, 2), (16, 128, 4), (16, 256, 8)][: 2 if quick else 3]
    found: dict[str, object] = {"engines": [engines(*shape) for shape in shapes]}
    found["stragglers"] = stragglers(8 if quick else 128)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
