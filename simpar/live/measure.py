"""How a time is taken: warm-up, repeats, the median with its 80 % interval, and what machine it was taken on.

On a GPU a sample begins behind a spin kernel, so that the host's launches are not in it, and a case is timed in two regimes:
burst (the device idle before every sample) and sustained (the same work without a pause for `SUSTAINED_S`). Training is sustained.
"""

from __future__ import annotations

import datetime
import math
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from simpar.live.device import Device, Telemetry, torch_module
from simpar.live.store import Record, plain

NARROW = 0.03
"""Half width of the 80 % interval over the median from which a time is well known."""
LEAST, MOST = 5, 200
SUSTAINED_S = 0.5
"""Work without a pause before and while the samples of the sustained regime are taken, on a GPU."""
STAND_IN_S = 0.02
"""The same on a CPU that stands in for one: it has no clocks that settle, and a trial is to be short."""
BURSTS, PAUSE_S = 9, 2e-3
"""Samples of the burst regime, and how long the device is idle before each."""
HEAT_S, HEAT_AGAIN_S, LARGE_S = 5.0, 0.3, 5e-4
"""Products without a pause before the first case of a GPU, and before the samples of calls of at least LARGE_S: in training a chip
is warm and at its power limit."""
IN_FLIGHT = 256
"""Most calls of one sample on a GPU: the queue of launches must hold them."""
"""Repeats of one measurement."""
BATCH_S = 2e-4
"""A sample lasts at least this long, so that the clock and a launch do not matter."""
_TAIL = 0.1


@dataclass(frozen=True, slots=True)
class Case:
    """One thing to time.

    Attributes:
        key: its name in the store. kind: gemm, attention, memory, launch, copy, collective, overlap.
        fields: what it is, as the record keeps it.
        build: makes the operands and returns the call to time.
    """

    key: str
    kind: str
    fields: Record
    build: Callable[[], Callable[[], object]]


@dataclass(frozen=True, slots=True)
class Timing:
    """The median of samples and its 80 % interval, in seconds."""

    median_s: float
    low_s: float
    high_s: float
    samples: int

    @property
    def half_width(self) -> float:
        """Half of the interval over the median."""
        return (self.high_s - self.low_s) / (2 * self.median_s)

    @property
    def narrow(self) -> bool:
        """Whether more repeats are not worth their time."""
        return self.samples >= LEAST and self.half_width <= NARROW


def timing_of(samples: Sequence[float]) -> Timing:
    """Median and its distribution-free 80 % interval.

    Order statistics j and n + 1 - j enclose the median with probability 1 - 2 P(Binomial(n, 1/2) < j): the largest j
    whose tail is at most 10 % on each side (David and Nagaraja, Order Statistics, section 7.1).
    """
    ordered, n = sorted(samples), len(samples)
    tail, j = 0.5**n, 0
    while j < n // 2 and tail <= _TAIL:
        j += 1
        tail += math.comb(n, j) * 0.5**n
    middle = (ordered[(n - 1) // 2] + ordered[n // 2]) / 2
    index = max(j - 1, 0)
    return Timing(middle, ordered[index], ordered[n - 1 - index], n)


class Clock:
    """Seconds of a call on a device: events on a GPU, a clock of the host on a CPU.

    Args:
        device: cpu, cuda or fake.
        alone: nothing outside this process takes part in what is timed. On a CPU with one thread its processor time counts
            then, which others that use the core do not lengthen; else wall time.

    Attributes:
        host_s: of the last sample on a GPU, the host's time to enqueue one call.
    """

    def __init__(self, device: str, *, alone: bool = False) -> None:
        self.on = Device(device)
        self.torch, self.device = self.on.torch, device
        self._now = time.process_time if alone and self.torch.get_num_threads() == 1 else time.perf_counter
        self.host_s = 0.0

    def wait(self) -> None:
        """Until the device has nothing left to do."""
        self.on.wait()

    def sample(self, call: Callable[[], object], repeats: int) -> float:
        """Seconds of one call, over `repeats` in a row."""
        if self.on.cuda:
            return self.on.between(*self.queued(call, repeats)) / repeats
        begin = self._now()
        for _ in range(repeats):
            call()
        return (self._now() - begin) / repeats

    def queued(self, call: Callable[[], object], repeats: int) -> tuple[Any, Any]:
        """Marks before and after `repeats` calls that the device begins only when all are enqueued; nothing is waited for."""
        self.on.spin(20e-6 + 1.5 * self.host_s * repeats)
        first, begin = self.on.mark(), time.perf_counter()
        for _ in range(repeats):
            call()
        self.host_s = (time.perf_counter() - begin) / repeats
        return first, self.on.mark()


def measure(call: Callable[[], object], clock: Clock, deadline: float, known: Sequence[float] = ()) -> list[float]:
    """Samples of `call`, on top of `known` ones, until their interval is narrow, `MOST` are there or `deadline` has come.

    Args:
        deadline: of time.monotonic(); one sample is taken even past it, so that a started measurement is never empty.
    """
    samples, repeats = list(known), _repeats(call, clock)
    while len(samples) < MOST:
        samples.append(max(clock.sample(call, repeats), 1e-9))
        if time.monotonic() >= deadline or timing_of(samples).narrow:
            break
    return samples


def heat(device: Device, seconds: float) -> None:
    """Large products without a pause on a GPU; on a CPU that stands in for one, small ones for a moment."""
    size = 8192 if device.cuda else 64
    a, b = (device.torch.randn(size, size, device=device.tensors).bfloat16() for _ in range(2))
    end = time.monotonic() + (seconds if device.cuda else 1e-3)
    while time.monotonic() < end:
        for _ in range(32):
            a @ b
        device.wait()


def _repeats(call: Callable[[], object], clock: Clock) -> int:
    """Calls that fill a sample; the call is warm afterwards."""
    call()
    clock.wait()
    once = max(clock.sample(call, 1), 1e-9)
    repeats = max(1, math.ceil(BATCH_S / once))
    if clock.on.cuda:
        repeats = min(repeats, IN_FLIGHT)
    clock.sample(call, repeats)
    return repeats


def measure_sustained(call: Callable[[], object], clock: Clock, budget_s: float) -> tuple[list[float], Record]:
    """Samples of the sustained regime, and the burst regime's median, the host's time and the regime's length beside them.

    Args:
        budget_s: for both regimes and the products between them; at least `LEAST` samples of each are taken whatever it is.
    """
    now = clock.on.now_s
    repeats, begin = _repeats(call, clock), now()
    bursts: list[float] = []
    while len(bursts) < LEAST or (len(bursts) < BURSTS and now() - begin < 0.3 * budget_s):
        clock.wait()
        time.sleep(PAUSE_S)
        bursts.append(max(clock.sample(call, repeats), 1e-9))
    host_s = clock.host_s
    if timing_of(bursts).median_s >= LARGE_S:
        heat(clock.on, min(HEAT_AGAIN_S, 0.3 * budget_s))
    heated = now()
    samples: list[float] = []
    most = min(SUSTAINED_S if clock.on.cuda else STAND_IN_S, 0.7 * budget_s)
    while True:
        # No wait between the samples of a chunk: the next is enqueued while the last one runs.
        marks = [clock.queued(call, repeats) for _ in range(LEAST)] if clock.on.cuda else []
        chunk = [clock.on.between(a, b) / repeats for a, b in marks] or [clock.sample(call, repeats) for _ in range(LEAST)]
        samples = [*samples, *(max(s, 1e-9) for s in chunk)][-MOST:]
        passed = now() - heated
        long = 2.0 * most if clock.device == "fake" else max(2.0 * most, 0.7 * budget_s)
        if passed >= most and (timing_of(samples).narrow or len(samples) >= MOST or passed >= long):
            break
    return samples, {"burst_s": timing_of(bursts).median_s, "host_s": host_s, "sustained_s": now() - heated,
                     "precision": NARROW}  # fmt: skip


def record_of(case: Case, samples: Sequence[float], beside: Telemetry | None = None, begin: float = 0.0) -> Record:
    """What the store keeps of a measured case.

    Args:
        beside: clocks and power, of which those since `begin` (time.monotonic()) are the case's.
    """
    t = timing_of(samples)
    gpu = {"gpu": found} if beside is not None and (found := beside.during(begin)) else {}
    return {
        **gpu,
        "key": case.key, "kind": case.kind, **case.fields, "seconds": t.median_s, "low_s": t.low_s, "high_s": t.high_s,
        "spread": t.half_width, "narrow": t.narrow or t.samples >= MOST, "samples_s": list(samples), "date": today(),
    }  # fmt: skip


def today() -> str:
    """The date in UTC, ISO."""
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def _output(*command: str) -> str:
    """What a program prints, in plain text; empty where there is no such program or it fails."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return plain(done.stdout).strip() if done.returncode == 0 else ""


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), platform.machine())
    except OSError:
        return platform.processor() or platform.machine()


def machine(device: str) -> Record:
    """What and where is measured: device, driver, versions, clocks, topology."""
    torch = torch_module()
    facts: Record = {
        "key": "machine", "kind": "machine", "device": device, "date": today(), "torch": torch.__version__,
        "python": platform.python_version(), "cores": os.cpu_count() or 1, "threads": torch.get_num_threads(),
    }  # fmt: skip
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        facts |= {
            "name": properties.name, "memory_bytes": properties.total_memory, "sm_count": properties.multi_processor_count,
            "capability": [properties.major, properties.minor], "gpus": torch.cuda.device_count(), **Device(device).versions(),
            "l2_bytes": getattr(properties, "L2_cache_size", 0),
            "power_limit": _output("nvidia-smi", "--query-gpu=power.limit", "--format=csv,noheader").splitlines()[:1],
            "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()[:1],
            "topology": _output("nvidia-smi", "topo", "-m"),
        }  # fmt: skip
    else:
        facts |= {"name": _cpu_name(), "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")}
    return facts
