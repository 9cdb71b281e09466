"""What is timed: a GPU, or a CPU that stands in for one so that every command of a GPU day can be tried without it."""

from __future__ import annotations

import importlib.metadata
import os
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from subprocess import DEVNULL, PIPE, Popen
from typing import Any, Final

from simpar.live.store import CalibrationError, Record

SPIN_HZ: Final = 2.0e9
"""Cycles per second that a spin kernel is asked for; a slower clock only makes it spin longer."""
LONGEST_SPIN_S: Final = 0.05
CPU_CACHE_BYTES: Final = 24 * 2**20
"""Cache next to a CPU core; operands are taken from twice as much."""
GPU_CACHE_BYTES: Final = 64 * 2**20
"""L2 of a GPU whose driver does not say."""
SMI_FIELDS: Final = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu", "clocks_throttle_reasons.active")
SMI_PERIOD_S: Final = 0.2


def now_s(name: str) -> float:
    """The clock that time limits are counted on: the wall's, as a GPU machine is lent by the minute.

    Of "fake" it counts the processor seconds of this process and its ended children: a trial takes nobody's machine, and what
    else runs beside it must not use up its time.
    """
    return sum(os.times()[:4]) if name == "fake" else time.monotonic()


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


class Device:
    """A GPU, or a CPU with the same interface.

    Args:
        name: "cuda", "cpu", or "fake": a CPU that stands in for a GPU.
    """

    def __init__(self, name: str) -> None:
        self.name, self.torch = name, torch_module()
        self.cuda = name == "cuda"
        self.tensors = "cuda" if self.cuda else "cpu"

    def now_s(self) -> float:
        """The clock that time limits are counted on."""
        return now_s(self.name)

    def wait(self) -> None:
        """Until the device has nothing left to do."""
        if self.cuda:
            self.torch.cuda.synchronize()

    def mark(self) -> Any:
        """A moment of the current stream; on a CPU of the host."""
        if not self.cuda:
            return time.perf_counter()
        event = self.torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, first: Any, last: Any) -> float:
        """Seconds from one mark to another that has passed."""
        if not self.cuda:
            return float(last - first)
        last.synchronize()
        return float(first.elapsed_time(last)) * 1e-3

    def spin(self, seconds: float) -> None:
        """Keep the stream busy so long that the host can enqueue what follows before any of it begins."""
        if self.cuda:
            self.torch.cuda._sleep(int(min(seconds, LONGEST_SPIN_S) * SPIN_HZ))

    def side_stream(self) -> AbstractContextManager[Any]:
        """Work inside runs beside the current stream."""
        return self.torch.cuda.stream(self.torch.cuda.Stream()) if self.cuda else nullcontext()

    @property
    def cold_bytes(self) -> int:
        """Operands taken in turn from so many bytes are in no cache when their turn comes: twice the largest."""
        if not self.cuda:
            return 2 * CPU_CACHE_BYTES
        properties = self.torch.cuda.get_device_properties(0)
        return 2 * max(int(getattr(properties, "L2_cache_size", 0)), GPU_CACHE_BYTES)

    def reset_peaks(self) -> None:
        """Give back what earlier work left in the allocator, and begin new peaks."""
        if self.cuda:
            self.torch.cuda.synchronize()
            self.torch.cuda.empty_cache()
            self.torch.cuda.reset_peak_memory_stats()

    def memory(self) -> Record:
        """Peaks since `reset_peaks`, retries of the allocator and its segments, in bytes and counts; empty on a CPU."""
        if not self.cuda:
            return {}
        stats = self.torch.cuda.memory_stats()
        return {
            "allocated_bytes": stats.get("allocated_bytes.all.peak", 0), "reserved_bytes": stats.get("reserved_bytes.all.peak", 0),
            "allocator_retries": stats.get("num_alloc_retries", 0), "segments": stats.get("segment.all.peak", 0),
            "inactive_split_bytes": stats.get("inactive_split_bytes.all.peak", 0),
        }  # fmt: skip

    def versions(self) -> Record:
        """What the kernels come from."""
        found: Record = {"torch": self.torch.__version__}
        if self.cuda:
            distributed = self.torch.distributed
            found |= {
                "cuda": self.torch.version.cuda, "cudnn": self.torch.backends.cudnn.version(), "cublas": _cublas(),
                "nccl": ".".join(map(str, self.torch.cuda.nccl.version())) if distributed.is_nccl_available() else "",
            }  # fmt: skip
        return found


def _cublas() -> str:
    for name in ("nvidia-cublas", "nvidia-cublas-cu13", "nvidia-cublas-cu12"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


@dataclass
class Telemetry:
    """Clocks, power, temperature and throttle reasons of the first GPU, five times a second, while work goes on.

    Attributes:
        rows: (seconds of time.monotonic(), SM MHz, memory MHz, watts, degrees Celsius, throttle reasons as a bit mask).
    """

    rows: list[tuple[float, float, float, float, float, int]] = field(default_factory=list)

    def during(self, begin: float, end: float | None = None) -> Record:
        """Median, least and most of each figure between two moments of time.monotonic(); empty where nothing was read."""
        last = time.monotonic() if end is None else end
        rows = [r for r in self.rows if begin <= r[0] <= last] or self.rows[-1:]
        if not rows:
            return {}
        names = ("sm_mhz", "memory_mhz", "watts", "celsius")
        found: Record = {"readings": len(rows)}
        for index, name in enumerate(names, 1):
            column = sorted(r[index] for r in rows)
            found[name] = [column[0], column[len(column) // 2], column[-1]]
        reasons = 0
        for row in rows:
            reasons |= row[5]
        return {**found, "throttle_reasons": f"0x{reasons:x}"}

    def series(self, begin: float) -> list[list[float]]:
        """Seconds since `begin`, SM MHz, watts and degrees of every reading."""
        return [[round(r[0] - begin, 2), r[1], r[3], r[4]] for r in self.rows if r[0] >= begin]


def _read(process: Popen[str], found: Telemetry) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        parts = [part.strip() for part in line.split(",")]
        try:
            numbers = [float(part) for part in parts[:4]]
            reasons = int(parts[4], 16) if len(parts) > 4 else 0
        except ValueError:
            continue  # "[N/A]", or the message of a driver that knows no such field
        found.rows.append((time.monotonic(), numbers[0], numbers[1], numbers[2], numbers[3], reasons))


@contextmanager
def telemetry(device: Device) -> Iterator[Telemetry]:
    """nvidia-smi beside what runs inside; without it, or without a GPU, nothing is read."""
    found = Telemetry()
    command = ["nvidia-smi", "-i", "0", f"--query-gpu={','.join(SMI_FIELDS)}", "--format=csv,noheader,nounits",
               f"--loop-ms={1000 * SMI_PERIOD_S:.0f}"]  # fmt: skip
    try:
        process = Popen(command, stdout=PIPE, stderr=DEVNULL, text=True) if device.name != "cpu" else None
    except OSError:
        process = None
    if process is None:
        yield found
        return
    reader = threading.Thread(target=_read, args=(process, found), daemon=True)
    reader.start()
    try:
        yield found
    finally:
        process.terminate()
        process.wait()
        reader.join(1.0)
