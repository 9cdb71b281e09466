"""How a time is taken: warm-up, repeats, the median with its 80 % interval, and what machine it was taken on."""

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

from simpar.calibration.store import CalibrationError, Record

NARROW = 0.03
"""Half width of the 80 % interval over the median from which a time is well known."""
LEAST, MOST = 5, 200
"""Repeats of one measurement."""
BATCH_S = 2e-4
"""A sample lasts at least this long, so that the clock and a launch do not matter."""
_TAIL = 0.1


def torch_module() -> Any:
    """torch.

    Raises:
        CalibrationError: it is not installed.
    """
    try:
        import torch
    except ImportError as error:
        raise CalibrationError(f"torch cannot be imported ({error}); install it with `pip install torch`") from None
    return torch


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
    """Seconds of a call on a device: CUDA events on a GPU, a clock of the host on a CPU.

    Args:
        device: cpu or cuda.
        alone: nothing outside this process takes part in what is timed. On a CPU with one thread its processor time counts
            then, which others that use the core do not lengthen; else wall time.
    """

    def __init__(self, device: str, *, alone: bool = False) -> None:
        self.torch, self.device = torch_module(), device
        self._now = time.process_time if alone and self.torch.get_num_threads() == 1 else time.perf_counter

    def wait(self) -> None:
        """Until the device has nothing left to do."""
        if self.device == "cuda":
            self.torch.cuda.synchronize()

    def sample(self, call: Callable[[], object], repeats: int) -> float:
        """Seconds of one call, over `repeats` in a row."""
        if self.device == "cuda":
            first, last = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            for _ in range(repeats):
                call()
            last.record()
            last.synchronize()
            return float(first.elapsed_time(last)) / 1e3 / repeats
        begin = self._now()
        for _ in range(repeats):
            call()
        return (self._now() - begin) / repeats


def measure(call: Callable[[], object], clock: Clock, deadline: float, known: Sequence[float] = ()) -> list[float]:
    """Samples of `call`, on top of `known` ones, until their interval is narrow, `MOST` are there or `deadline` has come.

    Args:
        deadline: of time.monotonic(); one sample is taken even past it, so that a started measurement is never empty.
    """
    samples = list(known)
    call()
    clock.wait()
    once = max(clock.sample(call, 1), 1e-9)
    repeats = max(1, math.ceil(BATCH_S / once))
    clock.sample(call, repeats)
    while len(samples) < MOST:
        samples.append(max(clock.sample(call, repeats), 1e-9))
        if time.monotonic() >= deadline or timing_of(samples).narrow:
            break
    return samples


def record_of(case: Case, samples: Sequence[float]) -> Record:
    """What the store keeps of a measured case."""
    t = timing_of(samples)
    return {
        "key": case.key, "kind": case.kind, **case.fields, "seconds": t.median_s, "low_s": t.low_s, "high_s": t.high_s,
        "spread": t.half_width, "narrow": t.narrow or t.samples >= MOST, "samples_s": list(samples), "date": today(),
    }  # fmt: skip


def today() -> str:
    """The date in UTC, ISO."""
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def _output(*command: str) -> str:
    """What a program prints; empty where there is no such program or it fails."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), platform.machine())
    except OSError:
        return platform.processor() or platform.machine()


def clocks() -> str:
    """Clocks and power of the GPUs now; empty without nvidia-smi."""
    query = "--query-gpu=clocks.sm,clocks.mem,power.draw,temperature.gpu"
    return _output("nvidia-smi", query, "--format=csv,noheader")


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
            "capability": [properties.major, properties.minor], "gpus": torch.cuda.device_count(), "cuda": torch.version.cuda,
            "nccl": ".".join(str(v) for v in torch.cuda.nccl.version()) if torch.distributed.is_nccl_available() else "",
            "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()[:1],
            "topology": _output("nvidia-smi", "topo", "-m"),
        }  # fmt: skip
    else:
        facts |= {"name": _cpu_name(), "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")}
    facts["clocks"] = clocks()
    return facts
