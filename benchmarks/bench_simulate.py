"""The main path's speed: one JSON object with counts and ratios.

    python benchmarks/bench_simulate.py

Each scenario runs in a fresh process, so that its memory is its own; seconds are the best of three in that process.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from pathlib import Path

SCENARIOS = Path(__file__).parent.parent / "scenarios"
FLAGSHIP = "llama3.1-405b_h100x16384_tp8pp16.toml"
HUGE = "llama3.1-405b_h100x200000_tp8pp8.toml"


def one(name: str) -> dict[str, float]:
    """Best time and peak memory of simulating `name` at layer detail, in this process."""
    from simpar.specs.scenario import read_scenario
    from simpar.step import simulate

    times = []
    for _ in range(3):
        begin = time.perf_counter()
        result = simulate(read_scenario(SCENARIOS / name))
        times.append(time.perf_counter() - begin)
    return {
        "seconds": min(times), "first_seconds": times[0], "ops": result.program.num_ops, "world_size": result.world_size,
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }  # fmt: skip


def main() -> None:
    """Run each scenario in a process of its own."""
    if len(sys.argv) > 1:
        print(json.dumps(one(sys.argv[1])))
        return
    found = {}
    for name in (FLAGSHIP, HUGE):
        out = subprocess.run([sys.executable, __file__, name], check=True, capture_output=True, text=True).stdout
        found[name] = json.loads(out)
    found["ratio_200k_to_16k"] = found[HUGE]["seconds"] / found[FLAGSHIP]["seconds"]
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
