"""Shapes and gloo collectives timed under the conditions of a run on one host: as many ranks at once as in the run.

Shapes run on all ranks at once, so that caches, memory bandwidth and clocks are shared as in a step; the mean of the ranks
counts, in processor time. Collectives run in as many groups at once as the ranks make up, as the groups of a layout do, so that
what they cost each other on shared cores is in their time; the processor time of all their threads over the wall time says how
many cores a rank keeps busy meanwhile. Where ranks outnumber cores, how the kernel shares them is measured too.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from simpar.host import busy_s, usable_cores
from simpar.live.bench_collectives import Group
from simpar.live.measure import MOST, Clock, timing_of
from simpar.live.store import Record

CHUNK = 3
SHAPE_S = 2e-3
"""A sample of a shape lasts at least this long."""
LEAST_SAMPLES = 9
FOREIGN = 0.15
"""Cores that other processes keep busy: samples beside more of them are left out where there are others."""


def _means(group: Group, values: Sequence[float], among: int) -> list[float]:
    """Each of `values`, its mean over the first `among` ranks."""
    torch = group.torch
    tensor = torch.tensor([v if group.rank < among else 0.0 for v in values], dtype=torch.float64, device=group.device)
    if group.size > 1:
        torch.distributed.all_reduce(tensor)
    return [float(v) / among for v in tensor.tolist()]


def _means_of_longest(group: Group, values: Sequence[float], ranks: int) -> list[float]:
    """Each of `values`, its largest within each full group of `ranks`, the mean over these groups."""
    torch = group.torch
    table = torch.zeros(group.size, len(values), dtype=torch.float64, device=group.device)
    table[group.rank] = torch.tensor(values, dtype=torch.float64)
    torch.distributed.all_reduce(table)
    whole = group.size // ranks
    return [float(v) for v in table[: whole * ranks].view(whole, ranks, -1).amax(dim=1).mean(dim=0).tolist()]


def measure_shape(build: Callable[[], Callable[[], object]], group: Group, clock: Clock, budget_s: float) -> list[float]:
    """Samples of a shape on all ranks at once, means over them."""
    barrier = group.torch.distributed.barrier if group.size > 1 else (lambda: None)
    call = build()
    call()
    repeats = max(1, min(200, round(SHAPE_S / max(clock.sample(call, 2), 1e-9))))
    samples: list[float] = []
    end = time.monotonic() + budget_s
    while True:
        barrier()
        chunk = [max(clock.sample(call, repeats), 1e-9) for _ in range(CHUNK)]
        *means, over = _means(group, [*chunk, float(time.monotonic() >= end)], group.size)
        samples += means
        enough = len(samples) >= LEAST_SAMPLES and timing_of(samples).narrow
        if over > 0 or enough or len(samples) >= MOST:
            return samples


def _subgroups(group: Group, sizes: Sequence[int]) -> dict[int, Any]:
    """This rank's process group of n consecutive ranks for each n, none where it is left over; every rank makes all of them."""
    distributed = group.torch.distributed
    found: dict[int, Any] = {}
    for n in sizes:
        found[n] = None
        for first in range(0, group.size - n + 1, n) if n < group.size else ():
            handle = distributed.new_group(list(range(first, first + n)))
            found[n] = handle if first <= group.rank < first + n else found[n]
    return found


def _call(group: Group, name: str, bytes_: int, ranks: int, handle: Any) -> Callable[[], object]:
    torch, d = group.torch, group.torch.distributed
    count = max(1, bytes_ // 4 // ranks) * ranks if name not in ("all_reduce", "broadcast", "send_recv") else max(1, bytes_ // 4)
    whole, other = (torch.ones(count, device=group.device) for _ in range(2))
    part = torch.ones(max(1, count // ranks), device=group.device)
    gather = getattr(d, "all_gather_single", None) or d.all_gather_into_tensor
    scatter = getattr(d, "reduce_scatter_single", None) or d.reduce_scatter_tensor
    first = group.rank - group.rank % ranks

    def send() -> object:
        # There and back: a sample is two messages, halved by the caller.
        if group.rank == first:
            d.send(whole, first + 1)
            return d.recv(other, first + 1)
        d.recv(other, first)
        return d.send(whole, first)

    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: d.all_reduce(whole, group=handle), "all_gather": lambda: gather(whole, part, group=handle),
        "reduce_scatter": lambda: scatter(part, whole, group=handle), "send_recv": send,
        "all_to_all": lambda: d.all_to_all_single(other, whole, group=handle),
        "broadcast": lambda: d.broadcast(whole, first, group=handle),
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


SPIN_S, NAP_S, GAP_S = 0.4, 3e-3, 2e-4
"""A turn of measuring the scheduler, a sleep in it, and the shortest pause that is another process on the core."""


def measure_scheduler(group: Group) -> Record | None:
    """How long a rank keeps a core that others wait for, and how long one that wakes waits for a core, all being taken.

    None (on all ranks) where there is a core for every rank. Stretches of computing between pauses, all ranks computing at
    once: their median. Then ranks on all cores compute and one more sleeps and wakes: by how much it oversleeps, less the same
    with nobody computing, the mean.
    """
    cores = len(usable_cores())
    if group.device != "cpu" or group.size <= cores:
        return None
    barrier = group.torch.distributed.barrier
    barrier()
    stretches = _stretches(SPIN_S)
    late = []
    for others in (False, True):
        barrier()
        napping = group.rank == cores
        if others and group.rank < cores:
            _stretches(SPIN_S)
        late.append(_oversleep(SPIN_S - 0.1) if napping else 0.0)
    (mean,) = _means(group, [statistics.median(stretches) if stretches else SPIN_S], group.size)
    (wake,) = group.largest([max(late[1] - late[0], 0.0)])
    if group.rank:
        return None
    return {"key": f"scheduler/{group.size}", "kind": "scheduler", "ranks": group.size, "slice_s": mean, "wake_s": max(wake, 1e-5)}


def _stretches(seconds: float) -> list[float]:
    """Compute for so long; the lengths of stretches between pauses, without the first and last."""
    found, last = [], time.perf_counter()
    begin, end = last, last + seconds
    while last < end:
        now = time.perf_counter()
        if now - last > GAP_S:
            found.append(last - begin)
            begin = now
        last = now
    return found[1:]


def _oversleep(seconds: float) -> float:
    """Mean time past its end of a sleep, each after some compute as long as a small kernel."""
    late, end = [], time.perf_counter() + seconds
    while (begin := time.perf_counter()) < end:
        time.sleep(NAP_S)
        late.append(time.perf_counter() - begin - NAP_S)
        busy = time.process_time() + GAP_S
        while time.process_time() < busy:
            pass
    return statistics.fmean(late)


def collective_key(wanted: Mapping[str, Any]) -> str:
    """The name of a collective's record."""
    return f"host/{wanted['collective']}/{wanted['ranks']}/{wanted['bytes']}"


def _samples(wanted: Mapping[str, Any], group: Group, handle: Any, budget_s: float) -> tuple[list[float], float]:
    """(seconds of a group's slowest rank, cores busy per rank) of a collective as a step meets it: each call after some compute.

    A sample is a run of products and calls less the same run without the calls. What a call costs after compute, with cold
    buffers and sleeping threads, is up to several times what it costs in a tight loop.
    """
    torch, name, ranks = group.torch, wanted["collective"], wanted["ranks"]
    busy_ranks = group.size - group.size % ranks
    call = _call(group, name, int(wanted["bytes"]), ranks, handle) if group.rank < busy_ranks else None
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
            longest = _means_of_longest(group, wall, ranks)
            (over,) = group.largest([float(time.monotonic() >= end)])
            (total,) = _means(group, [used], busy_ranks)
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
