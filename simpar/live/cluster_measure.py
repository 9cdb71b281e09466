"""What is measured inside a rank besides wall time: collectives and their bytes, memory, busy pipeline seconds, gloo seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from simpar.live.alive import Alive, collective_kind
from simpar.live.device import Device


def _group_of(arguments: Any) -> tuple[int, ...]:
    """Ranks of the process group among an operator's arguments."""
    for leaf in tree_leaves(arguments):
        if isinstance(leaf, torch.ScriptObject) and "ProcessGroup" in str(leaf._type()):
            return tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(leaf)))
        if isinstance(leaf, dist.ProcessGroup):
            return tuple(dist.get_process_group_ranks(leaf))
    return tuple(range(dist.get_world_size()))


class Recorder(Alive):
    """Collectives issued and bytes of tensors alive while it is entered.

    Attributes:
        collectives: (name, bytes as nccl-tests counts them, ranks) of each, in order; a receive is the other end of a send.
    """

    def __init__(self) -> None:
        super().__init__()
        self.collectives: list[tuple[str, int, tuple[int, ...]]] = []

    def called(self, kind: str, largest: Any, arguments: Any) -> None:
        """As the base."""
        if kind != "receive":
            amount = 0 if largest is None else largest.numel() * largest.element_size()
            self.collectives.append((kind, amount, _group_of(arguments)))


PROBE, PROBES = 512, 8
"""Width and number of the products that say how fast the machine is beside a layout."""


def probe_s(device: Any) -> float:
    """Seconds of a fixed product; on a CPU the processor's time of this rank."""
    x = torch.ones(PROBE, PROBE, device=device)
    x @ x
    if device.type == "cuda":
        torch.cuda.synchronize()
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    begin = clock()
    for _ in range(PROBES):
        x @ x
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (clock() - begin) / PROBES


class Busy:
    """Seconds inside some calls of a rank. On a GPU marks are put into its stream and read when `take` asks: no call waits."""

    def __init__(self, device: Any) -> None:
        self.on = Device(device.type)
        self._marks: list[tuple[Any, Any]] = []

    def wrap(self, owner: Any, *names: str) -> None:
        """Time these methods of `owner`; none of them may call another."""
        for name in names:
            if hasattr(owner, name):
                setattr(owner, name, self._timed(getattr(owner, name)))

    @contextmanager
    def running(self) -> Iterator[None]:
        """Time what is inside."""
        begin = self.on.mark()
        try:
            yield
        finally:
            self._marks.append((begin, self.on.mark()))

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.running():
                return call(*args, **kwargs)

        return timed

    def take(self) -> float:
        """Seconds since it was last asked."""
        found = sum(self.on.between(begin, end) for begin, end in self._marks)
        self._marks.clear()
        return found


@contextmanager
def profiled() -> Iterator[dict[str, float]]:
    """Seconds of each collective inside: gloo's operations, or NCCL's kernels on the device."""
    from torch.profiler import ProfilerActivity, profile

    found: dict[str, float] = {}
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])
    with profile(activities=activities) as profiler:
        yield found
    for event in profiler.events():
        name = event.name.lower()
        on_gpu = str(event.device_type).endswith("CUDA")
        raw = name.split(":")[1] if name.startswith("gloo:") else ""
        if on_gpu and name.startswith("nccldevkernel_"):
            raw = name.split("_")[1]
        if (plain := collective_kind(raw.replace("sendrecv", "send"))) not in ("", "receive"):
            found[plain] = found.get(plain, 0.0) + event.time_range.elapsed_us() * 1e-6
