"""A Kineto (torch.profiler) trace as the slices of one rank's steps, for a comparison with the predicted timeline.

Steps are the profiler's own (`ProfilerStep#N`, from `profiler.step()`); a trace without them is one step. A trace of a GPU gives
its kernels; one of a CPU what its ops do themselves and gloo's collectives, for which the time between ops is the host's.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, Final

from simpar.boundary import reader
from simpar.errors import InputError
from simpar.interop.kineto import (
    Kernel,
    collective_bytes,
    collective_name,
    collective_of,
    communication,
    device_kernels,
    kernel_class,
    launches,
    span,
    trace_events,
)  # fmt: skip
from simpar.live.intervals import Interval, inside
from simpar.live.trace_diff import MeasuredTrace
from simpar.live.trace_slices import Slice
from simpar.parallel.layout import Layout

_STEP: Final = re.compile(r"^ProfilerStep#(\d+)")
_OPTIMIZER: Final = re.compile(r"multi_tensor_apply(?!.*native::Copy<)|lpnorm_cleanup|fused_?adam|adamw?_kernel", re.IGNORECASE)
"""Updates and clipping. Copies of lists of tensors (torch._foreach_copy_) are FSDP2's, of what it gathers and has gathered."""
_NORM: Final = re.compile(r"(?:rms|layer)_?norm|GammaBetaBackward", re.IGNORECASE)
_LOSS: Final = re.compile(r"nll_loss|cross_entropy|(?:cunn_|log_?)softmax", re.IGNORECASE)
_PERMUTE: Final = re.compile(
    r"permut|scatter_gather_elementwise|radixsort|index_elementwise|indexing_backward|moe_align|sort_chunks", re.IGNORECASE
)
_CPU_GEMM: Final = re.compile(r"^aten::(mm|addmm|bmm|baddbmm|_grouped_mm|mkldnn_linear|mv|dot)$|^mkldnn::")
_CPU_ATTENTION: Final = re.compile(r"^aten::_(scaled_dot_product|flash_attention|efficient_attention)")
_COMPUTES: Final = re.compile(r"^(?!autograd::|c10d::|fsdp::|profiler::)\w+::")
_CPU_COLLECTIVE: Final = re.compile(r"^(?:gloo|mpi|ucc|fake):(\w+)$")
_KIND: Final = {"gemm": "gemm", "attention": "attention", "memory-bound": "memory_bound", "copy": "copy"}
_WIDTH: Final = {"float": 4, "double": 8, "c10::BFloat16": 2, "c10::Half": 2, "long int": 8, "int": 4}
_DESCRIBED: Final = (
    ("pp", "pipe"), ("tp", "tensor"), ("cp", "context"), ("ep", "expert"), ("dp", "data"), ("dp", "shard"), ("dp", "replic"),
)  # fmt: skip
"""Dimension and a word in the description of its groups."""
_GROUPS: Final = (
    ("tp", "tp"), ("cp", "cp"), ("pp", "pp"), ("dp_cp", "dp"), ("dp", "dp"), ("ep", "ep"), ("edp", "dp"), ("etp", "ep"),
)  # fmt: skip
"""Groups of the mesh and the dimension they count for."""
_TOP: Final = 12


@reader("path", "torch.profiler's export_chrome_trace")
def read_steps(path: str | Path, layout: Layout, rank: int | None = None) -> MeasuredTrace:
    """Steps of the trace at `path`.

    Args:
        layout: names the dimension of each group of ranks.
        rank: global rank that the trace is of; none = what it says, else 0.

    Raises:
        InputError: not such a trace, nothing ran in it, or no whole step.
    """
    file = str(path)
    events, trace = trace_events(path)
    info = trace.get("distributedInfo")
    info = info if isinstance(info, dict) else {}
    own, world = _whole(info.get("rank")), _whole(info.get("world_size"))
    chosen = rank if rank is not None else own if own is not None else 0
    groups = _Groups(layout, chosen % layout.mesh.world_size, info)
    on_gpu = any(str(e.get("cat", "")).lower() == "kernel" for e in events)
    work, notes = _gpu(events, file, groups) if on_gpu else _cpu(events, file, groups)
    steps, whole = _steps(work, events, file, notes)
    slices, lengths, count = [], [], len(steps)
    for begin, end, mine in steps:
        slices.append(tuple(s.moved(-begin) for s in mine))
        lengths.append(end - begin)
    return MeasuredTrace(
        tuple(slices), tuple(lengths), file, "cuda" if on_gpu else "cpu", own, world, _longest(slices, count), tuple(notes), whole
    )


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


@dataclass
class _Groups:
    """Which dimension a collective belongs to."""

    layout: Layout
    rank: int
    info: Mapping[str, Any]
    unknown: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        mesh = self.layout.mesh
        self.members: dict[tuple[int, ...], str] = {}
        self.sizes: dict[int, set[str]] = defaultdict(set)
        for dim, name in _GROUPS:
            if mesh.size(dim) > 1:
                self.members.setdefault(mesh.group_of(self.rank, dim), name)
                self.sizes[mesh.size(dim)].add(name)
        for dim in ("shard", "replica"):
            if mesh.size(dim, self.layout.shard_ranks) > 1:
                self.members.setdefault(mesh.group_of(self.rank, dim, self.layout.shard_ranks), "dp")
                self.sizes[mesh.size(dim, self.layout.shard_ranks)].add("dp")
        self.config: dict[str, Mapping[str, Any]] = {}
        configs = self.info.get("pg_config")
        for item in configs if isinstance(configs, list) else []:
            if isinstance(item, dict):
                self.config[str(item.get("pg_name"))] = item

    @property
    def used(self) -> set[str]:
        """Dimensions that the layout has groups of."""
        return {name for names in self.sizes.values() for name in names}

    def dimension(self, collective: str, args: Mapping[str, Any]) -> str:
        """By its ranks, its description, its size, or what only one dimension of the layout does."""
        config = self.config.get(str(args.get("Process Group Name")), {})
        ranks = _ranks(args.get("Process Group Ranks")) or _ranks(config.get("ranks"))
        if ranks in self.members:
            return self.members[ranks]
        text = f"{args.get('Process Group Description', '')} {config.get('pg_desc', '')}".lower()
        used = self.used
        for name, word in _DESCRIBED:
            if name in used and (word in text or re.search(rf"(?<![a-z]){name}(?![a-z])", text)):
                return name
        if collective == "send_recv" and "pp" in used:
            return "pp"
        size = args.get("Group size", config.get("pg_size"))
        candidates = self.sizes.get(size, set()) if isinstance(size, int) else used
        if len(candidates) == 1:
            return next(iter(candidates))
        self.unknown.add(f"{collective} of {size} ranks" if size else collective)
        return "other"


def _ranks(value: object) -> tuple[int, ...]:
    """Members where all of them are listed, ascending."""
    if isinstance(value, list) and all(isinstance(v, int) for v in value):
        return tuple(sorted(value))
    text = str(value or "")
    return tuple(sorted(map(int, re.findall(r"\d+", text)))) if text and "..." not in text else ()


def _updates(events: Iterable[Mapping[str, Any]], file: str) -> list[Interval]:
    """Spans of the host's annotations around updates, by start."""
    named = (e for e in events if e.get("cat") == "user_annotation" and str(e.get("name", "")).startswith("Optimizer.step"))
    return sorted(span(e, file) for e in named)


def _gpu(events: Sequence[Mapping[str, Any]], file: str, groups: _Groups) -> tuple[list[Slice], list[str]]:
    called, optimizer = launches(events, file), _updates(events, file)
    found = []
    for kernel in device_kernels(events, file):
        ready = called.get(kernel.args.get("correlation"))
        found.append(_gpu_slice(kernel, ready, groups, inside(optimizer, ready if ready is not None else -1.0)))
    return found, [f"collectives of no group of the layout: {', '.join(sorted(groups.unknown))}"] if groups.unknown else []


def kernel_kind(name: str) -> str:
    """Kind of a kernel by its name alone: a compute class, of memory-bound ones norm, loss and permutes apart, copy, or nccl."""
    for kind, pattern in (("optimizer", _OPTIMIZER), ("norm", _NORM), ("loss", _LOSS), ("permute", _PERMUTE)):
        if pattern.search(name):
            return kind
    lower = name.lower()
    return "copy" if lower.startswith(("memcpy", "memset")) else _KIND.get(found := kernel_class(name, "kernel", {}), found)


def _gpu_slice(kernel: Kernel, ready: float | None, groups: _Groups, in_optimizer: bool) -> Slice:
    lane = f"stream {kernel.stream}"
    if kernel.kind == "nccl":
        if (own := communication(kernel.name)) is not None and "Collective name" not in kernel.args:
            dimension = own[1] if own[1] in groups.used else groups.dimension(own[0], kernel.args)
            return Slice(kernel.start_s, kernel.end_s, dimension, own[0], lane, collective=own[0], ready_s=ready)
        name = collective_of(kernel.name, kernel.args)
        # An all-to-all runs as sends and receives too; a batch of them calls itself "coalesced".
        name = "send_recv" if "sendrecv" in kernel.name.lower() and name != "all_to_all" else name
        return Slice(kernel.start_s, kernel.end_s, groups.dimension(name, kernel.args), name, lane, collective=name,
                     bytes=collective_bytes(name, kernel.args) or 0.0, ready_s=ready)  # fmt: skip
    kind = _KIND[kernel.kind]
    if kind == "memory_bound" and (in_optimizer or _OPTIMIZER.search(kernel.name)):
        kind = "optimizer"
    return Slice(kernel.start_s, kernel.end_s, kind, kernel.name, lane, ready_s=ready)


def _cpu(events: Sequence[Mapping[str, Any]], file: str, groups: _Groups) -> tuple[list[Slice], list[str]]:
    """What the ops of every thread do themselves; ready when they start, as the host is the device."""
    optimizer = _updates(events, file)
    threads: dict[Any, list[tuple[float, float, str]]] = defaultdict(list)
    found: list[Slice] = []
    for event in events:
        name = str(event.get("name", ""))
        wire = _CPU_COLLECTIVE.match(name)
        if wire is not None:
            found.append(_cpu_collective(event, wire[1], span(event, file), groups))
        elif event.get("cat") == "cpu_op":
            start, end = span(event, file)
            threads[event.get("tid")].append((start, end, name))
    for tid, spans in threads.items():
        for start, end, name in _own_time(spans):
            if name.startswith("c10d::") or end <= start:
                continue  # issues a collective; the time on the wire is an event of its own
            kind = "optimizer" if inside(optimizer, start) else "memory_bound"
            kind = "gemm" if _CPU_GEMM.match(name) else "attention" if _CPU_ATTENTION.match(name) else kind
            found.append(Slice(start, end, kind, name, f"thread {tid}", ready_s=start))
    if not found:
        raise InputError(f"{file}: no kernels (cat = kernel) and no ops (cat = cpu_op); expected a trace of torch.profiler")
    notes = ["a trace without kernels: what the CPU's ops do themselves is compared, the time between them is the host's"]
    if groups.unknown:
        notes.append(f"collectives of no group of the layout: {', '.join(sorted(groups.unknown))}")
    return sorted(found, key=lambda s: (s.start_s, s.end_s)), notes


def _cpu_collective(event: Mapping[str, Any], raw: str, when: Interval, groups: _Groups) -> Slice:
    args = event.get("args") or {}
    name = collective_name(raw)
    size = 0.0
    dims, types = args.get("Input Dims"), args.get("Input type")
    if isinstance(dims, list) and isinstance(types, list):
        for shape, dtype in zip(dims, types, strict=False):
            if isinstance(shape, list) and all(isinstance(d, int) for d in shape):
                size += prod(shape) * _WIDTH.get(str(dtype), 0)
    return Slice(*when, groups.dimension(name, args), name, "gloo", collective=name, bytes=size, ready_s=when[0])


def _own_time(spans: list[tuple[float, float, str]]) -> list[tuple[float, float, str]]:
    """What each of one thread's nested ops does itself: its span without those of the ops that it calls.

    Products and attention count whole, with what they call. Of autograd's nodes and other annotations, which compute nothing,
    only what they call counts: the rest is the host's.
    """
    found: list[tuple[float, float, str]] = []
    open_: list[tuple[float, str]] = []
    at = whole = float("-inf")

    def until(moment: float) -> None:
        """The time from `at` to `moment` belongs to the ops that are open, the innermost first."""
        nonlocal at
        while open_:
            end, name = open_[-1]
            last = min(end, moment)
            if last > at + 1e-12 and _COMPUTES.match(name):
                found.append((at, last, name))
            at = max(at, last)
            if end > moment:
                return
            open_.pop()
        at = max(at, moment)

    for begin, end, name in sorted(spans, key=lambda s: (s[0], -s[1])):
        if begin < whole:
            continue
        until(begin)
        if _CPU_GEMM.match(name) or _CPU_ATTENTION.match(name):
            whole = end
        open_.append((end, name))
    until(float("inf"))
    return found


def _steps(
    work: Sequence[Slice], events: Sequence[Mapping[str, Any]], file: str, notes: list[str]
) -> tuple[list[tuple[float, float, list[Slice]]], bool]:
    """(begin, end, slices) of each step, from its first op to the next one's; and whether the steps are whole.

    The last step has no end in the trace: it is left out, unless it is the only one.
    """
    marks = sorted(span(e, file) for e in events if e.get("cat") == "user_annotation" and _STEP.match(str(e.get("name", ""))))
    if not marks:
        notes.append("no ProfilerStep in the trace: all of it is taken for one step")
        return [(work[0].start_s, max(s.end_s for s in work), list(work))], False
    starts = [begin for begin, _ in marks]
    groups: dict[int, list[Slice]] = defaultdict(list)
    for item in work:
        issued = item.start_s if item.ready_s is None else item.ready_s
        at = bisect_right(starts, issued) - 1
        if at >= 0:
            groups[at].append(item)
    whole = [sorted(groups[i], key=lambda s: s.start_s) for i in sorted(groups)]
    if not whole:
        raise InputError(f"{file}: nothing ran inside its ProfilerStep marks; expected profiler.step() once per training step")
    if len(whole) == 1:
        return [(whole[0][0].start_s, max(s.end_s for s in whole[0]), whole[0])], False
    # A collective that runs on into the next step is cut there, and so counts there no second time.
    bounds = pairwise(mine[0].start_s for mine in whole)
    return [(a, b, [s for s in mine if s.start_s < b]) for (a, b), mine in zip(bounds, whole, strict=False)], True


def _longest(steps: Sequence[Sequence[Slice]], count: int) -> dict[str, list[tuple[str, float, float]]]:
    """Per kind the kernels that take longest: (name, launches, seconds) per step."""
    sums: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(lambda: [0.0, 0.0]))
    for slices in steps:
        for item in slices:
            row = sums[item.kind][item.name]
            row[0] += 1.0 / count
            row[1] += item.seconds / count
    return {
        kind: [(name, n, t) for name, (n, t) in sorted(names.items(), key=lambda x: -x[1][1])[:_TOP]]
        for kind, names in sums.items()
    }  # fmt: skip
