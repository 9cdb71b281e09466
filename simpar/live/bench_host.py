"""Shapes and gloo collectives timed under the conditions of a run on one host: as many ranks at once as in the run.

Shapes run on all ranks at once, so that caches, memory bandwidth and clocks are shared as in a step; the mean of the ranks
counts, in processor time. Collectives run in as many groups at once as the ranks make up, as the groups of a layout do, so that
what they cost each other on shared cores is in their time; the processor time of all their threads over the wall time says how
many cores a rank keeps busy meanwhile. Where ranks outnumber cores, how the kernel shares them is measured too.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from simpar.host import busy_s, usable_cores
from simpar.live.bench_collectives import Group
from simpar.live.device import Device, torch_module
from simpar.live.measure import MOST, NARROW, Clock, timing_of, today
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
        group.total(tensor)
    return [float(v) / among for v in tensor.tolist()]


def _means_of_longest(group: Group, values: Sequence[float], ranks: int) -> list[float]:
    """Each of `values`, its largest within each full group of `ranks`, the mean over these groups."""
    torch = group.torch
    table = torch.zeros(group.size, len(values), dtype=torch.float64, device=group.device)
    table[group.rank] = torch.tensor(values, dtype=torch.float64)
    group.total(table)
    whole = group.size // ranks
    return [float(v) for v in table[: whole * ranks].view(whole, ranks, -1).amax(dim=1).mean(dim=0).tolist()]


def measure_shape(build: Callable[[], Callable[[], object]], group: Group, clock: Clock, budget_s: float) -> list[float]:
    """Samples of a shape on all ranks at once, means over them."""
    barrier = group.barrier if group.size > 1 else (lambda: None)
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
    found: dict[int, Any] = {}
    for n in sizes:
        found[n] = None
        for first in range(0, group.size - n + 1, n) if n < group.size else ():
            handle = group.new_group(range(first, first + n))
            found[n] = handle if first <= group.rank < first + n else found[n]
    return found


def _call(group: Group, wanted: Mapping[str, Any], handle: Any) -> Callable[[], object] | None:
    """A call of the collective on buffers of its own; none for a rank that is left over."""
    name, bytes_, ranks = wanted["collective"], int(wanted["bytes"]), wanted["ranks"]
    if group.rank >= group.size - group.size % ranks:
        return None
    torch, d = group.torch, group.torch.distributed
    count = max(1, bytes_ // 4 // ranks) * ranks if name not in ("all_reduce", "broadcast", "send_recv") else max(1, bytes_ // 4)
    whole = torch.ones(count, device=group.device)
    other = torch.ones_like(whole) if name == "send_recv" else whole
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

    def into(like: Any) -> Any:
        # Steps allocate what a collective writes, and the pages of a large buffer cost as much as its copy.
        return torch.empty_like(like)

    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: d.all_reduce(whole, group=handle), "all_gather": lambda: gather(into(whole), part, group=handle),
        "reduce_scatter": lambda: scatter(into(part), whole, group=handle), "send_recv": send,
        "all_to_all": lambda: d.all_to_all_single(into(whole), whole, group=handle),
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
    left = [_Samples(w) for w in todo if collective_key(w) not in done]
    end = time.monotonic() + budget_s
    compute, going, over = _compute(group), list(left), 0.0
    while going and not over:
        # In turn, as what a call costs has phases of seconds (where the kernel puts the threads): each meets all of them.
        for each in going:
            handle = handles[each.wanted["ranks"]]
            each.more(_call(group, each.wanted, handle), compute, group)
        (over,) = group.largest([float(time.monotonic() >= end)])
        going = [each for each in going if not each.enough]
    return [each.record() for each in left] if group.rank == 0 else []


ROWS, WEIGHTS, BETWEEN_S = 128, 16, 2e-3
"""Of the compute before a collective: rows, weights in turn, and how long it takes on a CPU, as between two calls of a layer."""
REPEATS = ((2**20, 16), (2**24, 4), (float("inf"), 1))
"""Calls of a sample up to so many bytes: ranks that set out together drift apart over several calls."""
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
    barrier = group.barrier
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


HOST_KEY = "host/linear"
TRAIN, TRAINS = 200, 15
"""Calls of a train of launches, and trains: the median of these counts."""


def measure_host(device: Device) -> Record:
    """What a linear layer's forward takes the host of a GPU: calls on an input so small that the device keeps up.

    The host's other costs are told by it: `specs.hardware.HOST_LINEAR_S` is what it takes where they were measured.
    """
    torch = torch_module()
    layer = torch.nn.Linear(64, 64, bias=False, device=device.tensors, dtype=torch.bfloat16)
    x = torch.randn(64, 64, device=device.tensors, dtype=torch.bfloat16)
    layer(x)
    found = []
    for _ in range(TRAINS):
        device.wait()
        begin = time.perf_counter()
        for _ in range(TRAIN):
            layer(x)
        found.append((time.perf_counter() - begin) / TRAIN)
    t = timing_of(found)
    return {
        "key": HOST_KEY, "kind": "host", "seconds": t.median_s, "low_s": t.low_s, "high_s": t.high_s, "spread": t.half_width,
        "narrow": True, "samples_s": found, "date": today(),
    }  # fmt: skip


def collective_key(wanted: Mapping[str, Any]) -> str:
    """The name of a collective's record."""
    return f"host/{wanted['collective']}/{wanted['ranks']}/{wanted['bytes']}"


@dataclass
class _Samples:
    """Of a collective as a step meets it: each call after some compute.

    A sample is a run of compute and calls less the same run without the calls. What a call costs after compute, with cold
    buffers and sleeping threads, is up to several times what it costs in a tight loop, and grows with the compute until that
    lasts a few milliseconds, as it does between the calls of a layer. It has two values, by whether a sleeping thread finds a
    core at once, so that its mean counts, and not its median.
    """

    wanted: Mapping[str, Any]
    seconds: list[tuple[float, float]] = field(default_factory=list)
    """Of a group's slowest rank, and cores that other processes kept busy meanwhile."""
    used_s: float = 0.0
    """Of processors in all calls, a rank's mean."""
    wall_s: float = 0.0

    @property
    def clean(self) -> list[float]:
        """Samples beside nothing else; all of them on a machine that is never left alone."""
        clean = [s for s, foreign in self.seconds if foreign <= FOREIGN]
        return clean if len(clean) >= 2 * CHUNK else [s for s, _ in self.seconds]

    @property
    def half_width(self) -> float:
        """Of the 80 % interval of the mean, over the mean."""
        mean = statistics.fmean(self.clean)
        return 1.28 * statistics.stdev(self.clean) / len(self.clean) ** 0.5 / mean

    @property
    def enough(self) -> bool:
        """Whether more are not worth their time."""
        return len(self.seconds) >= MOST or (len(self.seconds) >= LEAST_SAMPLES and self.half_width <= NARROW)

    def more(self, call: Callable[[], object] | None, compute: Callable[[], object], group: Group) -> None:
        """A few more, of all groups at once; a rank in none (`call` is None) only takes part."""
        ranks, bytes_ = self.wanted["ranks"], self.wanted["bytes"]
        repeats = next(r for most, r in REPEATS if bytes_ <= most)
        each = 2.0 * repeats if self.wanted["collective"] == "send_recv" else float(repeats)
        barrier, clock = group.barrier, Clock(group.device)

        def run(calls: bool) -> tuple[float, float]:
            barrier()
            clock.wait()
            begin, used = time.perf_counter(), time.process_time()
            for _ in range(repeats if call is not None else 0):
                compute()
                if calls and call is not None:
                    call()
            clock.wait()
            return time.perf_counter() - begin, time.process_time() - used

        try:
            run(True)
            began, busy = time.perf_counter(), busy_s()
            pairs = [(run(False), run(True)) for _ in range(CHUNK)]
            elapsed, busy = time.perf_counter() - began, busy_s() - busy
            longest = _means_of_longest(group, [(both[0] - alone[0]) / each for alone, both in pairs], ranks)
            (used,) = _means(group, [sum(both[1] - alone[1] for alone, both in pairs)], group.size - group.size % ranks)
            (own,) = _means(group, [sum(alone[1] + both[1] for alone, both in pairs)], group.size)
            foreign = group.from_first(max(busy - own * group.size, 0.0) / elapsed)
        except RuntimeError as error:
            raise group.lost("a collective failed", error) from None
        self.seconds += [(max(v, 1e-6), foreign) for v in longest]
        self.used_s, self.wall_s = self.used_s + used, self.wall_s + sum(longest) * each

    def record(self) -> Record:
        """For the store."""
        seconds, width = statistics.fmean(self.clean), self.half_width
        return {
            "key": collective_key(self.wanted), "kind": "host_collective", "collective": self.wanted["collective"],
            "bytes": self.wanted["bytes"], "ranks": self.wanted["ranks"], "seconds": seconds, "low_s": seconds * (1.0 - width),
            "high_s": seconds * (1.0 + width), "spread": width, "narrow": True,
            "cores": min(max(self.used_s / max(self.wall_s, 1e-9), 0.0), 1.0), "samples_s": self.clean,
        }  # fmt: skip


def _compute(group: Group) -> Callable[[], object]:
    """The compute before a call: eager ops on operands that no cache holds. On a CPU they last BETWEEN_S, on all ranks the same
    number of ops; a GPU's host does not wait for them."""
    torch, width = group.torch, 4096 if group.device == "cuda" else 512
    weights = itertools.cycle([torch.randn(width, width, device=group.device) for _ in range(WEIGHTS)])
    x = torch.randn(ROWS, width, device=group.device)

    def layer() -> object:
        y = torch.nn.functional.layer_norm(x, (width,)) @ next(weights).t()
        return torch.nn.functional.silu(y).mul_(x).add_(x)

    if group.device == "cuda":
        return layer
    (slowest,) = group.largest([Clock(group.device).sample(layer, WEIGHTS)])
    layers = max(1, round(BETWEEN_S / slowest))
    return lambda: [layer() for _ in range(layers)]
