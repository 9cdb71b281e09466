"""What is measured inside a rank besides wall time: collectives and their bytes, memory, busy pipeline seconds, gloo seconds."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from simpar.live.device import Device

NAMES = (
    ("reduce_scatter", ("reduce_scatter",)), ("all_to_all", ("alltoall", "all_to_all")),
    ("all_reduce", ("allreduce", "all_reduce")), ("all_gather", ("allgather", "all_gather")), ("broadcast", ("broadcast",)),
    ("send_recv", ("send",)),
)  # fmt: skip
"""simpar's collective -> parts of torch's operator names; a receive is the other end of a send and not counted again."""
_WAITING = ("wait", "barrier", "recv", "monitored")


def collective_name(operator: str) -> str:
    """simpar's name of a c10d operator; "" for what moves nothing of its own."""
    if any(part in operator for part in _WAITING):
        return ""
    return next((name for name, parts in NAMES if any(part in operator for part in parts)), operator)


def _group_of(arguments: Any) -> tuple[int, ...]:
    """Ranks of the process group among an operator's arguments."""
    for leaf in tree_leaves(arguments):
        if isinstance(leaf, torch.ScriptObject) and "ProcessGroup" in str(leaf._type()):
            return tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(leaf)))
        if isinstance(leaf, dist.ProcessGroup):
            return tuple(dist.get_process_group_ranks(leaf))
    return tuple(range(dist.get_world_size()))


class Recorder(TorchDispatchMode):
    """Collectives issued and bytes of tensors alive while it is entered.

    Attributes:
        collectives: (name, bytes as nccl-tests counts them, ranks) of each, in order.
        peak_bytes: most bytes of all storages that ops made or `hold` named, alive at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.collectives: list[tuple[str, int, tuple[int, ...]]] = []
        self._sizes: dict[int, int] = {}
        self.alive_bytes = self.peak_bytes = 0
        self._resize = torch.UntypedStorage.resize_

    def hold(self, tensors: Iterable[Any]) -> None:
        """Count these, which exist already."""
        for tensor in tensors:
            for storage in _storages(tensor):
                self._see(storage)

    def _see(self, storage: Any) -> None:
        key = storage._cdata
        known, size = self._sizes.get(key), storage.nbytes()
        if known is None:
            weakref.finalize(storage, self._gone, key)
        if known != size:
            self._sizes[key] = size
            self.alive_bytes += size - (known or 0)
            self.peak_bytes = max(self.peak_bytes, self.alive_bytes)

    def _gone(self, key: int) -> None:
        self.alive_bytes -= self._sizes.pop(key, 0)

    def __enter__(self) -> Any:
        def resize(storage: Any, size: int) -> Any:
            done = self._resize(storage, size)
            if storage._cdata in self._sizes:
                self._see(storage)
            return done

        torch.UntypedStorage.resize_ = resize
        return super().__enter__()

    def __exit__(self, *error: Any) -> Any:
        torch.UntypedStorage.resize_ = self._resize
        return super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any("DTensor" in t.__name__ for t in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        operator = func._overloadpacket._qualified_op_name
        if operator.startswith(("_c10d_functional::", "c10d::")):
            self._collective(operator.split("::")[1], args, kwargs, result)
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                for storage in _storages(leaf):
                    self._see(storage)
        return result

    def _collective(self, operator: str, args: Any, kwargs: Any, result: Any) -> None:
        name = collective_name(operator)
        if name:
            tensors = [t for t in tree_leaves((args, kwargs, result)) if isinstance(t, torch.Tensor)]
            amount = max((t.numel() * t.element_size() for t in tensors), default=0)
            self.collectives.append((name, amount, _group_of((args, kwargs))))


def _storages(tensor: Any) -> list[Any]:
    local = getattr(tensor, "_local_tensor", tensor)
    return [local.untyped_storage()] if isinstance(local, torch.Tensor) and not local.is_meta else []


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
        if plain := collective_name(raw.replace("_base", "").replace("sendrecv", "send")):
            found[plain] = found.get(plain, 0.0) + event.time_range.elapsed_us() * 1e-6
