"""Collectives over sizes on the group of all processes and on every smaller group and tier, and a product beside one of them."""

from __future__ import annotations

import datetime
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from simpar.live.device import torch_module
from simpar.live.measure import BATCH_S, LEAST, MOST, Case, Clock, timing_of
from simpar.live.store import CalibrationError

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "send_recv")
GLOO_BYTES = (4 * 2**10, 64 * 2**10, 2**20, 16 * 2**20)
NCCL_BYTES = tuple(8**i * 2**10 for i in range(1, 8))
"""8 KiB to 2 GiB."""
TINY_BYTES = (4 * 2**10, 256 * 2**10)
OVERLAP_GEMMS = 4
CHUNK = LEAST


class Group:
    """All processes of the launch (torchrun's environment), joined.

    Args:
        device: cpu (gloo) or cuda (NCCL).
        timeout_s: longest wait for the other ranks, at the start and in every collective.

    Raises:
        CalibrationError: no NCCL, a bad environment, or ranks that do not come.
    """

    def __init__(self, device: str, timeout_s: float) -> None:
        torch = torch_module()
        self.torch, self.device, self.timeout_s = torch, device, timeout_s
        self.rank, self.size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self.local_size = int(os.environ.get("LOCAL_WORLD_SIZE", str(self.size)))
        self.tiers: list[Tier] = []
        self._handles: dict[tuple[int, ...], Any] = {}
        if self.size < 2:
            return
        if not torch.distributed.is_available():
            raise CalibrationError("this torch has no torch.distributed; install one that has, or start a single process")
        backend = "nccl" if device == "cuda" else "gloo"
        if backend == "nccl" and not torch.distributed.is_nccl_available():
            raise CalibrationError("this torch has no NCCL; install one that has, or start a single process")
        if device == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        try:
            torch.distributed.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout_s))
        except (RuntimeError, ValueError) as error:
            raise self.lost("the processes did not meet", error) from None
        # Every rank makes all groups, in the same order.
        self.tiers = tiers(self.size, self.local_size)
        for ranks in (ranks for tier in self.tiers[1:] if not tier.together for ranks in tier.groups):
            self._handles[ranks] = self.new_group(ranks)

    def lost(self, what: str, error: Exception) -> CalibrationError:
        """The error of a rank that hangs or died."""
        first = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        advice = f"rank {self.rank} of {self.size} waited at most {self.timeout_s:g} s; see that all ranks run (or raise --timeout)"
        return CalibrationError(f"{what}: {first}; {advice}")

    def handle(self, ranks: tuple[int, ...]) -> Any:
        """The process group of `ranks`; none = all."""
        return self._handles.get(ranks)

    @contextmanager
    def together(self) -> Iterator[None]:
        """What all ranks do in here fails as a `CalibrationError` where one of them hangs or died."""
        try:
            yield
        except RuntimeError as error:
            raise self.lost("a collective failed", error) from None

    def new_group(self, ranks: Sequence[int]) -> Any:
        """A process group of `ranks`, made by every rank.

        Raises:
            CalibrationError: a rank that hangs or died; likewise of the methods below.
        """
        with self.together():
            return self.torch.distributed.new_group(list(ranks))

    def barrier(self) -> None:
        """Wait for all ranks."""
        with self.together():
            self.torch.distributed.barrier()

    def largest(self, values: Sequence[float]) -> list[float]:
        """Each of `values`, the largest over the ranks."""
        with self.together():
            tensor = self.torch.tensor(values, dtype=self.torch.float64, device=self.device)
            self.torch.distributed.all_reduce(tensor, op=self.torch.distributed.ReduceOp.MAX)
            return [float(v) for v in tensor.tolist()]

    def total(self, tensor: Any) -> Any:
        """`tensor`, summed over the ranks in place."""
        with self.together():
            self.torch.distributed.all_reduce(tensor)
        return tensor

    def from_first(self, value: Any) -> Any:
        """Rank 0's `value` on every rank."""
        box = [value]
        with self.together():
            self.torch.distributed.broadcast_object_list(box, src=0)
        return box[0]

    def close(self) -> None:
        """Leave the group."""
        if self.size > 1 and self.torch.distributed.is_initialized():
            self.torch.distributed.destroy_process_group()


@dataclass(frozen=True, slots=True)
class Tier:
    """Groups of one size on one part of the network.

    Attributes:
        groups: of ranks, all alike; nodes: that each spans.
        together: all of them at once, as the groups of a layout talk; else the first alone.
    """

    groups: tuple[tuple[int, ...], ...]
    nodes: int
    together: bool

    @property
    def ranks(self) -> int:
        """Of one group."""
        return len(self.groups[0])

    def mine(self, rank: int) -> tuple[int, ...] | None:
        """The group that `rank` measures in; none where it waits."""
        return next((g for g in (self.groups if self.together else self.groups[:1]) if rank in g), None)

    @property
    def name(self) -> str:
        """In the store: the size, the nodes it spans where it is not what consecutive ranks do, and how many talk at once."""
        apart = f"over{self.nodes}" if self.nodes > 1 and len(self.groups) > 1 else ""
        return "/".join(filter(None, (str(self.ranks), apart, f"{len(self.groups)}together" if self.together else "")))


def tiers(size: int, local: int) -> list[Tier]:
    """All ranks; then groups of 2, 4, ... neighbours of a node, and of one rank of each node, alone and all at once.

    Args:
        local: ranks of a node.
    """
    nodes = max(1, size // local)
    found = [Tier((tuple(range(size)),), nodes, together=False)]
    inside = [n for n in (2**i for i in range(1, 10)) if n <= local and local % n == 0 and n < size]
    splits = [(tuple(tuple(range(a, a + n)) for a in range(0, size, n)), 1) for n in inside]
    if nodes > 1 and local > 1:
        splits.append((tuple(tuple(range(a, size, local)) for a in range(local)), nodes))
    return found + [Tier(groups, spans, together) for groups, spans in splits for together in (False, True)]


def collective_call(group: Group, name: str, bytes_: int, ranks: tuple[int, ...] | None = None) -> Callable[[], Any]:
    """The call of one collective over `ranks` (none: all), sizes as nccl-tests count them; a handle where it is asynchronous."""
    torch, d = group.torch, group.torch.distributed
    ranks = ranks or tuple(range(group.size))
    n, handle = len(ranks), group.handle(ranks)
    count = max(1, bytes_ // 4 // n) * n
    whole = torch.ones(count, device=group.device)
    part = torch.ones(count // n, device=group.device)
    other = torch.ones(count, device=group.device)

    # Renamed in torch 2.13.
    gather = getattr(d, "all_gather_single", None) or d.all_gather_into_tensor
    scatter = getattr(d, "reduce_scatter_single", None) or d.reduce_scatter_tensor

    def pair() -> None:
        if group.rank == ranks[0]:
            d.send(whole, ranks[1], group=handle)
        elif group.rank == ranks[1]:
            d.recv(whole, ranks[0], group=handle)

    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: d.all_reduce(whole, group=handle), "all_gather": lambda: gather(whole, part, group=handle),
        "reduce_scatter": lambda: scatter(part, whole, group=handle),
        "all_to_all": lambda: d.all_to_all_single(other, whole, group=handle),
        "broadcast": lambda: d.broadcast(whole, ranks[0], group=handle),
        "reduce": lambda: d.reduce(whole, ranks[0], group=handle), "send_recv": pair,
        "async_all_reduce": lambda: d.all_reduce(whole, async_op=True, group=handle),
    }  # fmt: skip
    return calls[name]


def _overlap_call(group: Group, clock: Clock, tiny: bool) -> Callable[[], tuple[float, float]]:
    """A call that times the same products alone and beside an all-reduce that outlasts them."""
    torch, width = group.torch, 128 if tiny else 8192 if group.device == "cuda" else 512
    kind = torch.bfloat16 if group.device == "cuda" else torch.float32
    x, w, y = (torch.randn(width, width, device=group.device, dtype=kind) for _ in range(3))
    start = collective_call(group, "async_all_reduce", 2**20 if tiny else 2**31 if group.device == "cuda" else 2**26)

    def product() -> None:
        torch.mm(x, w, out=y)

    def both() -> tuple[float, float]:
        group.barrier()
        alone = clock.sample(product, OVERLAP_GEMMS)
        group.barrier()
        handle = start()
        beside = clock.sample(product, OVERLAP_GEMMS)
        handle.wait()
        clock.wait()
        return alone, beside

    return both


def cases(group: Group, tiny: bool) -> list[Case]:
    """The collectives to time: of all ranks, then of every smaller group and tier."""
    sizes = TINY_BYTES if tiny else NCCL_BYTES if group.device == "cuda" else GLOO_BYTES
    backend = "nccl" if group.device == "cuda" else "gloo"

    def case(tier: Tier, name: str, size: int) -> Case:
        n, mine = tier.ranks, tier.mine(group.rank)
        key = f"collective/{backend}/{tier.name}/{name}/{size}"
        fields = {
            "collective": name, "bytes": max(1, size // 4 // n) * n * 4, "ranks": n, "nodes": tier.nodes, "backend": backend,
            "concurrent": len(tier.groups) if tier.together else 1,
        }  # fmt: skip

        def build() -> Callable[[], object]:
            return collective_call(group, name, size, mine) if mine else (lambda: None)

        return Case(key, "collective", fields, build)

    return [case(t, name, size) for t in group.tiers for size in sizes for name in COLLECTIVES]


def measure_collective(call: Callable[[], object], group: Group, clock: Clock, deadline: float) -> list[float]:
    """Samples of `call`, each that of the slowest rank; all ranks stop together, when rank 0's interval or time says so.

    Raises:
        CalibrationError: a rank that hangs or died.
    """
    try:
        call()
        clock.wait()
        group.barrier()
        once = group.largest([clock.sample(call, 1)])[0]
        repeats = min(max(1, math.ceil(10 * BATCH_S / max(once, 1e-9))), 50)
        samples: list[float] = []
        while True:
            chunk = []
            for _ in range(CHUNK):
                group.barrier()
                chunk.append(clock.sample(call, repeats))
            over = float(group.rank == 0 and time.monotonic() >= deadline)
            *longest, stop = group.largest([*chunk, over])
            samples += longest
            if stop or len(samples) >= MOST or timing_of(samples).narrow:
                return samples
    except RuntimeError as error:
        raise group.lost("a collective failed", error) from None


def measure_overlap(group: Group, clock: Clock, deadline: float, tiny: bool) -> tuple[list[float], list[float]]:
    """Seconds of one product [samples], alone and beside an all-reduce.

    Raises:
        CalibrationError: a rank that hangs or died.
    """
    try:
        both = _overlap_call(group, clock, tiny)
        both()
        alone: list[float] = []
        beside: list[float] = []
        while True:
            pairs = [both() for _ in range(CHUNK)]
            over = float(group.rank == 0 and time.monotonic() >= deadline)
            *longest, stop = group.largest([*(p[0] for p in pairs), *(p[1] for p in pairs), over])
            alone += longest[:CHUNK]
            beside += longest[CHUNK:]
            if stop or len(alone) >= MOST // 4 or (timing_of(alone).narrow and timing_of(beside).narrow):
                return alone, beside
    except RuntimeError as error:
        raise group.lost("a collective failed", error) from None


def open_cases(group: Group, all_cases: Sequence[Case], finished: Mapping[str, bool]) -> list[Case]:
    """The cases that rank 0's store does not have yet, the same on every rank."""
    known = set(group.from_first([key for key, done in finished.items() if done]))
    return [case for case in all_cases if case.key not in known]
