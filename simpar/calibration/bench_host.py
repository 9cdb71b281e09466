"""Shapes and gloo collectives timed under the conditions of a run on one host: as many ranks at once as in the run.

Shapes run on all ranks at once, so that caches, memory bandwidth and clocks are shared as in a step; the mean of the ranks
counts, in processor time. Collectives run on the first ranks of the group, and the processor time of all their threads
over the wall time says how many cores a rank keeps busy meanwhile.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from simpar.calibration.bench_collectives import Group
from simpar.calibration.measure import MOST, Clock, timing_of
from simpar.calibration.store import Record

CHUNK = 3
SHAPE_S = 2e-3
"""A sample of a shape lasts at least this long."""
LEAST_SAMPLES = 9
FOREIGN = 0.15
"""Cores that other processes keep busy: samples beside more of them are left out where there are others."""


def pin() -> None:
    """Each rank on a core of its own where there are enough of them, as the runs do; else the kernel shares all among all."""
    own = int(os.environ.get("LOCAL_RANK", "0"))
    if hasattr(os, "sched_setaffinity"):
        allowed = sorted(os.sched_getaffinity(0))
        if 1 < int(os.environ.get("LOCAL_WORLD_SIZE", "1")) <= len(allowed):
            os.sched_setaffinity(0, {allowed[own]})


def busy_s() -> float:
    """Seconds that all cores of this host were not idle since it started (Linux; elsewhere 0)."""
    try:
        with open("/proc/stat", encoding="ascii") as file:
            fields = [int(v) for v in file.readline().split()[1:9]]  # user nice system idle iowait irq softirq steal
    except (OSError, ValueError):
        return 0.0
    # Interrupts are nobody's: most are those of the ranks' own messages.
    return (sum(fields) - sum(fields[3:7])) / os.sysconf("SC_CLK_TCK")


def _means(group: Group, values: Sequence[float], among: int) -> list[float]:
    """Each of `values`, its mean over the first `among` ranks."""
    torch = group.torch
    tensor = torch.tensor([v if group.rank < among else 0.0 for v in values], dtype=torch.float64, device=group.device)
    if group.size > 1:
        torch.distributed.all_reduce(tensor)
    return [float(v) / among for v in tensor.tolist()]


def measure_shape(build: Callable[[], Callable[[], object]], group: Group, clock: Clock, budget_s: float) -> list[float]:
    """Samples of a shape on all ranks at once, means over them."""
    barrier = group.torch.distributed.barrier if group.size > 1 else (lambda: None)
    call = build()
    call()
    repeats = max(1, min(200, round(SHAPE_S / _processor_s(call, 2, clock))))
    samples: list[float] = []
    end = time.monotonic() + budget_s
    while True:
        barrier()
        chunk = [_processor_s(call, repeats, clock) for _ in range(CHUNK)]
        *means, over = _means(group, [*chunk, float(time.monotonic() >= end)], group.size)
        samples += means
        enough = len(samples) >= LEAST_SAMPLES and timing_of(samples).narrow
        if over > 0 or enough or len(samples) >= MOST:
            return samples


def _processor_s(call: Callable[[], object], repeats: int, clock: Clock) -> float:
    """Seconds of one call: on a CPU the processor's time of this process, which others that use the core do not lengthen."""
    if clock.device == "cuda":
        return clock.sample(call, repeats)
    begin = time.process_time()
    for _ in range(repeats):
        call()
    return max((time.process_time() - begin) / repeats, 1e-9)


def _subgroups(group: Group, sizes: Sequence[int]) -> dict[int, Any]:
    """A process group of the first n ranks for each n; every rank makes all of them."""
    distributed = group.torch.distributed
    return {n: None if n == group.size else distributed.new_group(list(range(n))) for n in sizes}


def _call(group: Group, name: str, bytes_: int, ranks: int, handle: Any) -> Callable[[], object]:
    torch, d = group.torch, group.torch.distributed
    count = max(1, bytes_ // 4 // ranks) * ranks if name not in ("all_reduce", "broadcast", "send_recv") else max(1, bytes_ // 4)
    whole, other = (torch.ones(count, device=group.device) for _ in range(2))
    part = torch.ones(max(1, count // ranks), device=group.device)
    gather = getattr(d, "all_gather_single", None) or d.all_gather_into_tensor
    scatter = getattr(d, "reduce_scatter_single", None) or d.reduce_scatter_tensor

    def send() -> object:
        # There and back: a sample is two messages, halved by the caller.
        if group.rank == 0:
            d.send(whole, 1)
            return d.recv(other, 1)
        d.recv(other, 0)
        return d.send(whole, 0)

    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: d.all_reduce(whole, group=handle), "all_gather": lambda: gather(whole, part, group=handle),
        "reduce_scatter": lambda: scatter(part, whole, group=handle), "send_recv": send,
        "all_to_all": lambda: d.all_to_all_single(other, whole, group=handle),
        "broadcast": lambda: d.broadcast(whole, 0, group=handle),
    }  # fmt: skip
    return calls[name]


def measure_collectives(
    wanted: Sequence[Mapping[str, Any]], group: Group, known: Callable[[str], bool], budget_s: float
) -> list[Record]:
    """Records (on rank 0; elsewhere none) of the collectives that `known` does not have yet.

    Raises:
        CalibrationError: a rank that hangs or died.
    """
    todo = [w for w in wanted if 1 < w["ranks"] <= group.size]
    done = group.from_first([collective_key(w) for w in todo if known(collective_key(w))])
    handles = _subgroups(group, sorted({w["ranks"] for w in todo}))
    found = []
    left = [w for w in todo if collective_key(w) not in done]
    for index, w in enumerate(left):
        share = max(budget_s, 0.0) / max(len(left) - index, 1)
        begin = time.monotonic()
        samples, busy = _samples(w, group, handles[w["ranks"]], share)
        budget_s -= time.monotonic() - begin
        if group.rank == 0:
            t = timing_of(samples)
            found.append(
                {
                    "key": collective_key(w), "kind": "host_collective", "collective": w["collective"], "bytes": w["bytes"],
                    "ranks": w["ranks"], "seconds": t.median_s, "low_s": t.low_s, "high_s": t.high_s, "spread": t.half_width,
                    "narrow": True, "cores": busy, "samples_s": samples,
                }
            )  # fmt: skip
    return found


def collective_key(wanted: Mapping[str, Any]) -> str:
    """The name of a collective's record."""
    return f"host/{wanted['collective']}/{wanted['ranks']}/{wanted['bytes']}"


def _samples(wanted: Mapping[str, Any], group: Group, handle: Any, budget_s: float) -> tuple[list[float], float]:
    """(seconds of the slowest rank, cores busy per rank) of a collective as a step meets it: each call after some compute.

    A sample is a run of products and calls less the same run without the calls. What a call costs after compute, with cold
    buffers and sleeping threads, is up to several times what it costs in a tight loop.
    """
    torch, name, ranks = group.torch, wanted["collective"], wanted["ranks"]
    call = _call(group, name, int(wanted["bytes"]), ranks, handle) if group.rank < ranks else None
    width = 4096 if group.device == "cuda" else 512
    x, w = torch.randn(128, width, device=group.device), torch.randn(width, width, device=group.device)
    clock = Clock(group.device)
    each = 2.0 if name == "send_recv" else 1.0
    repeats = 4 if wanted["bytes"] <= 2**20 else 1
    samples: list[tuple[float, float]] = []
    shares: list[float] = []
    end = time.monotonic() + budget_s

    def round_(calls: bool) -> tuple[float, float]:
        torch.distributed.barrier()
        clock.wait()
        begin, used = time.perf_counter(), time.process_time()
        for _ in range(repeats):
            if call is not None:
                x @ w.t()
                if calls:
                    call()
        clock.wait()
        return time.perf_counter() - begin, time.process_time() - used

    try:
        round_(True)
        while True:
            began, busy = time.perf_counter(), busy_s()
            pairs = [(round_(False), round_(True)) for _ in range(CHUNK)]
            elapsed, busy = time.perf_counter() - began, busy_s() - busy
            wall = [(both[0] - alone[0]) / repeats / each for alone, both in pairs]
            used = sum(both[1] - alone[1] for alone, both in pairs)
            *longest, over = group.largest([*wall, float(time.monotonic() >= end)])
            (total,) = _means(group, [used], ranks)
            (own,) = _means(group, [sum(alone[1] + both[1] for alone, both in pairs)], group.size)
            foreign = group.from_first(max(busy - own * group.size, 0.0) / elapsed)
            samples += [(max(v, 1e-6), foreign) for v in longest]
            shares.append(total / max(sum(longest) * repeats * each, 1e-9))
            clean = [v for v, foreign in samples if foreign <= FOREIGN]
            enough = len(clean) >= LEAST_SAMPLES and timing_of(clean).narrow
            if over or len(samples) >= MOST or enough:
                # On a machine that is never left alone all samples count.
                return clean if len(clean) >= 2 * CHUNK else [v for v, _ in samples], min(max(statistics.median(shares), 0.0), 1.0)
    except RuntimeError as error:
        raise group.lost("a collective failed", error) from None
