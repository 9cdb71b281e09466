"""Kineto (torch.profiler) traces: kernels by class, collectives, streams, overlap, launch gaps, and measured GEMMs.

Fields: libkineto's Chrome trace and torch/csrc/profiler/util.h (collective metadata on the kernels of NCCL). Overlap is the share
of communication time during which compute kernels run too, |comm and comp| / |comm|.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Final

from simpar.boundary import reader
from simpar.errors import InputError, Violation
from simpar.interop.kineto_stream import EXPECTED, Head, stream
from simpar.interop.profile_parts import Part
from simpar.live.intervals import Interval, common, inside, length, union

US: Final = 1e-6
CLASSES: Final = ("gemm", "attention", "memory-bound", "nccl", "copy")
_ATTENTION: Final = re.compile(r"flash|fmha|attention|attn|sdpa|compute_dot_do_o|convert_dq_to_16bits", re.IGNORECASE)
_GEMM: Final = re.compile(
    r"gemm|cutlass|nvjet|wgmma|xmma|matmul|Cijk_|cublas(?!.*(?:splitKreduce))|triton_(?:tem_\w*?|\w*_)?(?:add|b)?mm(?:_|\d|$)|grouped_mm",
    re.IGNORECASE,
)
_COMMUNICATION: Final = (
    (re.compile(r"deep_ep::|deepep|hybrid_ep", re.IGNORECASE), "all_to_all", "ep"),
    (re.compile(r"(?:one_shot|two_shot|multimem)\w*all_?reduce|symm_mem\w*all_?reduce", re.IGNORECASE), "all_reduce", ""),
    (re.compile(r"(?:multimem|symm_mem)\w*all_?gather", re.IGNORECASE), "all_gather", ""),
    (re.compile(r"(?:multimem|symm_mem|one_shot|two_shot)\w*reduce_?scatter", re.IGNORECASE), "reduce_scatter", ""),
    (re.compile(r"userbuffers\w*(?:_rs|reduce_?scatter)", re.IGNORECASE), "reduce_scatter", "tp"),
    (re.compile(r"userbuffers\w*(?:_ag|all_?gather)", re.IGNORECASE), "all_gather", "tp"),
    (re.compile(r"userbuffers\w*(?:push|pull|send|recv)", re.IGNORECASE), "send_recv", "tp"),
    (re.compile(r"userbuffers", re.IGNORECASE), "all_reduce", "tp"),
    (re.compile(r"nvshmem", re.IGNORECASE), "send_recv", ""),
)
"""Kernels that move data between GPUs without NCCL -> the collective, and the dimension that such a kernel serves where known."""
_DTYPE_BYTES: Final = {
    "double": 8, "long": 8, "float": 4, "int": 4, "bfloat16": 2, "half": 2, "short": 2, "byte": 1, "char": 1, "bool": 1,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "uint8": 1, "int8": 1,
}  # fmt: skip
_INPUT_DTYPES: Final = {"c10::BFloat16": "bf16", "c10::Half": "fp16", "float": "fp32"}
_PLAIN_ARGS: Final = ("correlation", "External id", "stream", "Collective name", "dtype", "Group size")
"""Of an event's arguments those that are compared with others'."""
_LONE_SPREAD: Final = 0.05
"""Half width of the interval of a shape that ran once (assumed)."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel or copy on the device; times in seconds of the trace."""

    name: str
    kind: str
    stream: int
    start_s: float
    end_s: float
    args: Mapping[str, Any]

    @property
    def seconds(self) -> float:
        """Duration."""
        return self.end_s - self.start_s


def kernel_class(name: str, category: str, args: Mapping[str, Any]) -> str:
    """The class of a device event by its category, collective metadata and name."""
    if category != "kernel":
        return "copy"
    if "Collective name" in args or name.lower().startswith(("nccl", "rccl")) or communication(name) is not None:
        return "nccl"
    if _ATTENTION.search(name):
        return "attention"
    return "gemm" if _GEMM.search(name) and "splitkreduce" not in name.lower() else "memory-bound"


def communication(name: str) -> tuple[str, str] | None:
    """(collective, dimension or "") of a kernel that talks to other GPUs without NCCL; none for all others."""
    return next(((kind, dimension) for pattern, kind, dimension in _COMMUNICATION if pattern.search(name)), None)


def collective_name(name: str) -> str:
    """simpar's name of a collective as c10d writes it; others as they are."""
    plain = name.lower().strip("_").replace("_base", "").replace("_coalesced", "").replace("_into_tensor", "").replace("_", "")
    known = {"allreduce": "all_reduce", "allgather": "all_gather", "reducescatter": "reduce_scatter", "alltoall": "all_to_all",
             "alltoallv": "all_to_all", "send": "send_recv", "recv": "send_recv",
             "reducescattertensor": "reduce_scatter"}  # fmt: skip
    return known.get(plain, plain or "unknown")


def collective_of(kernel: str, args: Mapping[str, Any]) -> str:
    """simpar's name of the collective that a kernel of NCCL or RCCL runs: what c10d noted beside it, else by the kernel's name."""
    noted = args.get("Collective name")
    return collective_name(str(noted or re.sub(r"^(?:nccl|rccl)(?:Dev)?Kernel_([A-Za-z]+).*", r"\1", kernel)))


def collective_bytes(collective: str, args: Mapping[str, Any]) -> float | None:
    """Message size as nccl-tests count: the total output of an all-gather, else the input; None where the trace is silent."""
    width = _DTYPE_BYTES.get(str(args.get("dtype", "")).lower().removeprefix("c10::"))
    count = args.get("Out msg nelems" if collective == "all_gather" else "In msg nelems")
    return float(count) * width if width and isinstance(count, int | float) else None


def trace_events(path: str | Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """(events with a duration, the rest of the file's object) of a trace.

    Raises:
        InputError: not such a file.
    """
    file, head = str(path), Head()
    events = [
        e for i, e in enumerate(stream(Path(path), head))
        if e.get("ph") == "X" and e.get("cat") != "python_function" and _checked(e, i, file)
    ]  # fmt: skip
    if head.cut:
        raise InputError(f"{file}: ends inside its events; expected {EXPECTED}, whole")
    if not isinstance(info := head.table.get("distributedInfo") or {}, dict):
        raise InputError([Violation("distributedInfo", info, "must be an object", "as torch.profiler writes it", file)])
    return events, head.table


def _checked(event: dict[str, Any], index: int, file: str) -> bool:
    """That what is read of an event has the type it is read with.

    Raises:
        InputError: it has not.
    """
    args = event.get("args")
    if args is None:
        event["args"] = {}
        return True
    if not isinstance(args, dict):
        raise InputError([Violation(f"traceEvents[{index}].args", args, "must be an object", "", file)])
    for place, name, value in (*((".args", n, args.get(n)) for n in _PLAIN_ARGS), ("", "tid", event.get("tid"))):
        if not isinstance(value, int | float | str | None):
            raise InputError([Violation(f"traceEvents[{index}]{place}.{name}", value, "must be a number or a text", "", file)])
    return True


def span(event: Mapping[str, Any], file: str) -> Interval:
    """(start, end) of an event in seconds."""
    try:
        start, duration = float(event["ts"]) * US, float(event["dur"]) * US
    except (KeyError, TypeError, ValueError):
        raise InputError(f"{file}: event {str(event.get('name'))[:60]!r}: ts and dur must be numbers (microseconds)") from None
    if not (isfinite(start) and isfinite(duration) and duration >= 0):
        raise InputError(f"{file}: event {str(event.get('name'))[:60]!r}: ts and dur must be finite, dur not negative")
    return start, start + duration


def device_kernels(events: Sequence[Mapping[str, Any]], file: str) -> list[Kernel]:
    """Device events by start.

    Raises:
        InputError: there are none.
    """
    found = []
    for event in events:
        category = str(event.get("cat", "")).lower()
        if category in ("kernel", "gpu_memcpy", "gpu_memset"):
            args, (start, end) = event.get("args") or {}, span(event, file)
            stream = args.get("stream", event.get("tid", 0))
            name, number = str(event.get("name", "")), stream if isinstance(stream, int) else -1
            found.append(Kernel(name, kernel_class(name, category, args), number, start, end, args))
    if not any(k.kind != "copy" for k in found):
        raise InputError(f"{file}: no event with cat = kernel; expected a trace with ProfilerActivity.CUDA from a run on a GPU")
    found.sort(key=lambda k: (k.start_s, k.end_s))
    return found


def launches(events: Sequence[Mapping[str, Any]], file: str) -> dict[Any, float]:
    """Correlation of a kernel -> when the host called for it, seconds."""
    return {
        event["args"]["correlation"]: span(event, file)[0]
        for event in events
        if str(event.get("cat")) in ("cuda_runtime", "cuda_driver") and "correlation" in (event.get("args") or {})
    }  # fmt: skip


def _launch(events: Sequence[Mapping[str, Any]], kernels: Sequence[Kernel], file: str) -> dict[str, float | None]:
    """Seconds from the host's call to the kernel's start, and idle time between kernels."""
    called = launches(events, file)
    waits = [k.start_s - called[c] for k in kernels if (c := k.args.get("correlation")) in called]
    compute = union((k.start_s, k.end_s) for k in kernels if k.kind not in ("nccl", "copy"))
    busy = union((k.start_s, k.end_s) for k in kernels)
    gaps = [b[0] - a[1] for a, b in pairwise(compute)]
    window = busy[-1][1] - busy[0][0]
    return {
        "launch_to_start_median_s": median(waits) if waits else None,
        "compute_gap_median_s": median(gaps) if gaps else None,
        "compute_gaps_s": sum(gaps),
        "idle_s": window - length(busy),
        "window_s": window,
    }


def _by_class(kernels: Sequence[Kernel]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for kind in CLASSES:
        mine = [k for k in kernels if k.kind == kind]
        if mine:
            names: dict[str, list[float]] = defaultdict(list)
            for k in mine:
                names[k.name].append(k.seconds)
            top = sorted(names.items(), key=lambda item: -sum(item[1]))[:10]
            table[kind] = {
                "count": len(mine), "seconds": sum(k.seconds for k in mine),
                "kernels": [{"name": n, "count": len(t), "seconds": sum(t), "median_s": median(t)} for n, t in top],
            }  # fmt: skip
    return table


def _collectives(kernels: Sequence[Kernel]) -> list[dict[str, Any]]:
    """Collectives by name, bytes and group size; the shortest time of each waits least for other ranks."""
    groups: dict[tuple[str, float, int], list[float]] = defaultdict(list)
    for k in kernels:
        if k.kind == "nccl":
            name, size = collective_of(k.name, k.args), k.args.get("Group size")
            groups[name, collective_bytes(name, k.args) or 0.0, size if isinstance(size, int) else 0].append(k.seconds)
    return [
        {"collective": name, "bytes": size or None, "group_size": ranks or None, "count": len(t), "least_s": min(t),
         "median_s": median(t), "seconds": sum(t)}
        for (name, size, ranks), t in sorted(groups.items())
    ]  # fmt: skip


def _gemm_shape(event: Mapping[str, Any]) -> tuple[tuple[int, int, int], str] | None:
    """(m, n, k) and dtype of an aten::mm or aten::addmm that recorded its shapes."""
    args = event.get("args") or {}
    skip = {"aten::mm": 0, "aten::addmm": 1}.get(str(event.get("name")))
    dims, types = args.get("Input Dims"), args.get("Input type")
    if skip is None or not isinstance(dims, list) or not isinstance(types, list) or len(dims) < skip + 2 or len(types) < skip + 1:
        return None
    a, b, dtype = dims[skip], dims[skip + 1], _INPUT_DTYPES.get(str(types[skip]))
    if (
        dtype is None
        or not _is_matrix(a)
        or not _is_matrix(b)
        or a[1] != b[0]
        or not all(isinstance(d, int) and d > 0 for d in (*a, *b))
    ):
        return None
    return (a[0], b[1], a[1]), dtype


def _is_matrix(dims: object) -> bool:
    return isinstance(dims, list) and len(dims) == 2 and all(isinstance(d, int) and d > 0 for d in dims)


def _gemm_points(events: Sequence[Mapping[str, Any]], kernels: Sequence[Kernel], file: str) -> list[dict[str, Any]]:
    """Forward GEMMs with recorded shapes that no collective slowed, as measured points of a profile.

    Backward ones are left out: mm inside autograd may be either gradient.
    """
    backward: dict[Any, list[Interval]] = defaultdict(list)
    for event in events:
        if str(event.get("name", "")).startswith("autograd::engine::evaluate_function"):
            backward[event.get("tid")].append(span(event, file))
    covered = {tid: union(spans) for tid, spans in backward.items()}
    comm = union((k.start_s, k.end_s) for k in kernels if k.kind == "nccl")
    by_op: dict[Any, list[Kernel]] = defaultdict(list)
    for k in kernels:
        if "External id" in k.args:
            by_op[k.args["External id"]].append(k)
    times: dict[tuple[tuple[int, int, int], str], list[float]] = defaultdict(list)
    for event in events:
        found = _gemm_shape(event) if event.get("cat") == "cpu_op" else None
        if found is None or inside(covered.get(event.get("tid"), []), span(event, file)[0]):
            continue
        mine = by_op.get((event.get("args") or {}).get("External id"), [])
        beside = common(union((k.start_s, k.end_s) for k in mine), comm)
        if any(k.kind == "gemm" for k in mine) and not beside:
            times[found].append(sum(k.seconds for k in mine))
    return [
        {"op": "gemm", "shape": list(shape), "dtype": dtype, "seconds": median(t), "spread": _spread(t)}
        for (shape, dtype), t in sorted(times.items())
    ]  # fmt: skip


def _spread(times: Sequence[float]) -> float:
    if len(times) < 3:
        return _LONE_SPREAD
    deciles = quantiles(times, n=10, method="inclusive")
    return max(0.02, (deciles[8] - deciles[0]) / 2 / median(times))


@reader("path", EXPECTED)
def read(path: str | Path) -> Part:
    """What the trace at `path` (.json or .json.gz) shows.

    Raises:
        InputError: not such a trace, or one without kernels.
    """
    file = str(path)
    events, trace = trace_events(path)
    kernels = device_kernels(events, file)
    comm = union((k.start_s, k.end_s) for k in kernels if k.kind == "nccl")
    comp = union((k.start_s, k.end_s) for k in kernels if k.kind not in ("nccl", "copy"))
    streams: dict[int, dict[str, Any]] = {}
    for number in sorted({k.stream for k in kernels}):
        mine = [k for k in kernels if k.stream == number]
        streams[number] = {"kernels": len(mine), "busy_s": length(union((k.start_s, k.end_s) for k in mine)),
                           "classes": sorted({k.kind for k in mine})}  # fmt: skip
    points = _gemm_points(events, kernels, file)
    info = trace.get("distributedInfo") or {}
    facts: dict[str, Any] = {
        "rank": info.get("rank"), "world_size": info.get("world_size"), "backend": info.get("backend"),
        "classes": _by_class(kernels),
        "collectives": _collectives(kernels), "streams": {str(s): row for s, row in streams.items()},
        "communication_s": length(comm), "compute_s": length(comp),
        "overlap": length(common(comm, comp)) / length(comm) if comm else None,
        "exposed_communication_s": length(comm) - length(common(comm, comp)), **_launch(events, kernels, file),
    }  # fmt: skip
    notes = []
    if comm:
        notes.append(f"{file}: times of collectives contain the wait for the slowest rank and set no constants; use nccl-tests")
    if not points:
        notes.append(f"{file}: no forward aten::mm with shapes; profile with record_shapes=True to take measured GEMMs")
    return Part("kineto", file, {"kernels": {"points": points}} if points else {}, (), "", facts, tuple(notes))
