"""Speed of the layout search, as JSON: sizes of spaces, layouts per second and core through each tier, two large searches.

python benchmarks/bench_search.py [--quick] [--limit SECONDS] [--workers N] [--framework NAME] [--case 405b] [--wish front]

Rates count CPU seconds of this process; searches are timed by the clock and by the CPU seconds of all their processes (--workers 1
counts against the limit in CPU seconds). A search that its limit ends states its gap.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import time
from typing import Any

import numpy as np

from simpar.engine.slowed_paths import makespans
from simpar.program.program import PriceTable, Program
from simpar.searching.branch import Branch
from simpar.searching.choice import Choice
from simpar.searching.find import Watch, find
from simpar.searching.incumbents import Incumbents
from simpar.searching.open_layouts import Design
from simpar.searching.parts import Wish
from simpar.searching.request import make_space
from simpar.searching.space import Space
from simpar.specs.options import RunOptions

CASES = {
    "llama3.1-405b on 16,384 H100": ("llama3.1-405b", "dgx-h100", 2048, 8192, 2048),
    "deepseek-v3 on 2,048 H800": ("deepseek-v3", "hgx-h800", 256, 4096, 15360),
}
"""Model, hardware, nodes, sequence length, global batch."""


def space_of(case: str, framework: str | None) -> Space:
    """The space of a case."""
    return make_space(RunOptions(*CASES[case], None).table(None)[0], framework=framework)


def designs(branch: Branch, count: int) -> list[Design]:
    """Random pipelines of a space."""
    draw = random.Random(0)
    found: list[Design] = []
    nodes = branch.space.nodes()
    while len(found) < count:
        group, batch, m = draw.choice(nodes)
        pipelines = branch.space.pipelines(group.pp, m)
        if pipelines and branch.set_bounds.least_bytes(group) < branch.capacity:
            found.append(Design(group, batch, m, draw.choice(branch.space.variants(group)), draw.choice(pipelines)))
    return found


def bound_rate(branch: Branch, sample: list[Design]) -> float:
    """Layouts per CPU second through the vectorised bounds on time and memory, prices of blocks known."""
    everything = Incumbents(front=True)
    for design in sample:
        branch.design_bounds.open_layouts(design, everything)
    began, count = time.process_time(), 0
    for design in sample:
        branch.design_bounds.open_layouts(design, everything)
        texts = branch.design_bounds.recomputations(design.pipeline, design.group.pp).texts
        count += len(texts) * len(branch.space.states(design.group)) * len(branch.space.offloads)
    return count / (time.process_time() - began)


def path_rates(branch: Branch, layouts: list[Choice]) -> dict[str, float]:
    """Layouts per CPU second through the longest path at stage detail, graphs built and prices known.

    `each`: every layout gets its own longest path; as a search does it, `swept`: those whose own graph was swept, `decided`: with
    those that a swept one undercuts in every price, which bounds them.
    """
    for every in (False, True):
        began = time.process_time()
        sweep_each(branch, layouts)
        each = len(layouts) / (time.process_time() - began) if every else 0.0
    branch.evaluation.longest_paths(layouts)
    branch.evaluation._swept.clear()
    before, began = branch.evaluation.swept, time.process_time()
    branch.evaluation.longest_paths(layouts)
    seconds = time.process_time() - began
    return {"each": each, "swept": (branch.evaluation.swept - before) / seconds, "decided": len(layouts) / seconds}


def sweep_each(branch: Branch, layouts: list[Choice]) -> None:
    """The longest path of every layout, by program."""
    found: dict[int, tuple[Program, list[PriceTable]]] = {}
    for choice in layouts:
        step, table = branch.evaluation.prices(choice)
        found.setdefault(id(step.program), (step.program, []))[1].append(table)
    for program, tables in found.values():
        makespans(program, np.array([t.seconds for t in tables]), np.array([t.interference for t in tables]))


def path_layouts(large: bool, schedule: str, chunks: int, count: int) -> tuple[Branch, list[Choice]]:
    """Layouts of one pipeline that differ in prices: 70B on 64 GPUs, or 405B on 16,384 in stages of two layers."""
    sizes = ("llama3.1-405b", "dgx-h100", 2048, 8192, 2048) if large else ("llama3.1-70b", "dgx-h100", 8, 8192, 64)
    degrees = ["tp=8", "pp=16"] if large else ["tp=4", "pp=4", "micro_batch_size=1"]
    space = make_space(
        RunOptions(*sizes, "megatron-core").table(None)[0],
        fix=[*degrees, f"schedule={schedule}", "offload_activations=0", f"virtual_stages={chunks}", "zero_stage=1", "cp=1"],
    )
    return Branch(space), [choice for choice, _ in zip(space.choices(), range(count), strict=False)]


def cpu_seconds() -> float:
    """Of this process and of its children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


WISHES = {"time": Wish(), "front": Wish(front=("step_time_s", "peak_memory_bytes")), "robust": Wish(robust=True)}


def search(space: Space, limit_s: float, workers: int, wish: Wish = WISHES["time"]) -> dict[str, Any]:
    """One search from cold, stopped at the limit."""
    began, began_cpu, first, last = time.monotonic(), cpu_seconds(), [0.0], [0.0]

    def listen(watch: Watch) -> None:
        last[0] = watch.bound
        if watch.best is not None and not first[0]:
            first[0] = time.monotonic() - began
        if (cpu_seconds() - began_cpu if workers == 1 else time.monotonic() - began) > limit_s:
            raise KeyboardInterrupt

    found = find(space, wish, workers=workers, listener=listen)
    peaks = [resource.getrusage(who).ru_maxrss / 2**20 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return {
        "seconds": time.monotonic() - began, "cpu_s": cpu_seconds() - began_cpu, "layouts": space.size,
        "first_incumbent_s": first[0], "found": len(found.best), "finished": found.finished, "gap": found.gap,
        "best": str(found.best[0].choice) if found.best else None, "step_time_s": found.best[0].step_time_s if found.best else None,
        "evaluated": dict(found.account.evaluated), "rejected": {k: v for k, v in found.account.rejected.items() if v},
        "peak_gib_parent": peaks[0], "peak_gib_largest_child": peaks[1], "workers": workers,
    }  # fmt: skip


def main() -> None:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--limit", type=float, default=300.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--framework", default=None)
    parser.add_argument("--wish", default="time", choices=sorted(WISHES))
    parser.add_argument("--case", default="", help="only the cases whose names have this")
    options = parser.parse_args()
    found: dict[str, Any] = {"spaces": {}, "searches": {}}
    for case in CASES:
        began = time.process_time()
        whole, limited = space_of(case, None), space_of(case, "megatron-core")
        found["spaces"][case] = {
            "layouts": whole.size, "megatron_core": limited.size, "ratio": whole.size / limited.size,
            "counting_s": time.process_time() - began,
        }  # fmt: skip
    branch = Branch(space_of(next(iter(CASES)), None))
    found["bounds_per_core_s"] = bound_rate(branch, designs(branch, 10 if options.quick else 100))
    count = 64 if options.quick else 256
    pipelines = {"pp4 1f1b": (False, "1f1b", 1), "pp4 interleaved v2": (False, "interleaved", 2), "pp16 1f1b": (True, "1f1b", 1),
                 "pp16 interleaved v4": (True, "interleaved", 4)}  # fmt: skip
    found["longest_path_per_core_s"] = {name: path_rates(*path_layouts(*what, count)) for name, what in pipelines.items()}
    if not options.quick:
        for case in (name for name in CASES if options.case in name):
            space = space_of(case, options.framework)
            found["searches"][case] = search(space, options.limit, options.workers, WISHES[options.wish])
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
