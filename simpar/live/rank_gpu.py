"""A rank's real steps on a GPU (or, to try the code, on small CPU tensors): memory, time, host time, kernels by name."""

from __future__ import annotations

import gzip
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

from simpar.live.device import Device, telemetry
from simpar.live.intervals import Interval, inside, length, union

WARM_UP: Final = 3
TRACED: Final = 2
_GROUP_OPS: Final = ("c10d::", "_c10d_functional::", "fake:")
"""Ops of the host inside which the fake group launches its copies."""


def on_gpu(
    plan: dict[str, Any], mesh: Any, device: Device, *, steps: int, trace: str = "",
    keep: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The record of a rank: memory of the last warm-up step, times of `steps` later ones, then kernels of TRACED profiled ones.

    Args:
        keep: given the record before the profiler starts.
    """
    from simpar.live.rank_fake import written

    with written(device.tensors):
        return _measured(plan, mesh, device, steps, trace, keep)


def _measured(
    plan: dict[str, Any], mesh: Any, device: Device, steps: int, trace: str, keep: Callable[[dict[str, Any]], None] | None
) -> dict[str, Any]:
    from simpar.live.rank_steps import Job
    from simpar.live.rank_worker import build_stages, states_of

    torch = device.torch
    torch.manual_seed(0)
    if device.cuda:
        torch.cuda.set_device(0)
    device.reset_peaks()
    stages = build_stages(plan, mesh, device.tensors, whole=True)
    job = Job(plan, mesh, stages, device.tensors, fused=True)
    for index in range(WARM_UP):
        if index == WARM_UP - 1:
            device.wait()
            if device.cuda:
                torch.cuda.reset_peak_memory_stats()
        job.step()
    device.wait()
    memory = device.memory()
    with telemetry(device) as beside:
        begin = time.monotonic()
        times, host = _timed(job, device, steps)
        gpu = beside.during(begin)
    found = {
        "device": torch.cuda.get_device_name() if device.cuda else "cpu",
        "device_bytes": torch.cuda.mem_get_info()[1] if device.cuda else 0, "states": states_of(stages, job.optimizers),
        "blocks": [], "allocated_bytes": memory.get("allocated_bytes", 0), "reserved_bytes": memory.get("reserved_bytes"),
        "allocator": memory, "step_s": times, "step_median_s": median(times), "host_s": host, "gpu": gpu,
        "versions": device.versions(), "sdpa_backend": backend(plan, device), "flops": {}, "wire": [], "kernels": [],
    }  # fmt: skip
    if keep is not None:
        keep(found)
    kernels, copies = _profiled(job, device, trace)
    return found | {"kernels": kernels, **copies}


def _timed(job: Any, device: Device, steps: int) -> tuple[list[float], list[float]]:
    """Seconds of each step between two marks, and of the host to enqueue it; nothing is waited for inside a step."""
    times, host = [], []
    for _ in range(steps):
        device.wait()
        device.spin(1e-3)
        first, begin = device.mark(), time.perf_counter()
        job.step()
        host.append(time.perf_counter() - begin)
        last = device.mark()
        times.append(device.between(first, last))
    return times, host


def backend(plan: dict[str, Any], device: Device) -> str:
    """What scaled_dot_product_attention runs for the plan's heads."""
    from simpar.live.bench_shapes import sdpa_backend

    model, tp = plan["model"], plan["world"]["tp"]
    mla = model["mla"]
    width = mla["qk_nope_head_dim"] + mla["qk_rope_head_dim"] if mla else model["head_dim"]
    heads = (model["num_attention_heads"] // tp, max(1, model["num_key_value_heads"] // tp))
    q, k = (device.torch.zeros(1, n, 128, width, dtype=device.torch.bfloat16, device=device.tensors) for n in heads)
    return sdpa_backend(q, k, k, causal=True)


def _profiled(job: Any, device: Device, trace: str) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Device time by kernel name of one step, longest first, and the fake group's copies; the trace is kept where asked for."""
    with tempfile.TemporaryDirectory(prefix="simpar-rank-") as folder:
        path = trace or str(Path(folder) / "trace.json")
        traced(job, device, path, warmup=1)
        return kernel_table(Path(path))


def traced(job: Any, device: Device, path: str, *, warmup: int = 0) -> None:
    """Write the profiler's trace of TRACED steps."""
    from torch.profiler import ProfilerActivity, profile, schedule

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.cuda else [])]
    with profile(
        activities=activities, record_shapes=True, schedule=schedule(wait=0, warmup=warmup, active=TRACED, repeat=1),
        on_trace_ready=lambda p: p.export_chrome_trace(path),
    ) as profiler:  # fmt: skip
        for _ in range(warmup + TRACED):
            job.step()
            device.wait()
            profiler.step()


def kernel_table(path: Path) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Kernels of a trace of TRACED steps, and what the fake process group copied.

    A fake gather or reduction sends nothing but copies on the device, up to once for each rank of the job. Those kernels are no
    part of the table.

    Returns:
        Rows of name, calls and seconds per step, longest first; and per step `copies` (kernels of the group), `copies_s` (their
        seconds) and `copies_exposed_s` (seconds in which nothing else ran).
    """
    data = path.read_bytes()
    events = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)["traceEvents"]
    calls = _launched_by_group(events)
    rows: dict[str, list[float]] = {}
    copies: list[Interval] = []
    others: list[Interval] = []
    for event in events:
        if event.get("ph") != "X" or str(event.get("cat")) not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        begin, seconds = float(event["ts"]) * 1e-6, float(event["dur"]) * 1e-6
        copied = (event.get("args") or {}).get("correlation") in calls
        (copies if copied else others).append((begin, begin + seconds))
        if not copied:
            row = rows.setdefault(str(event["name"]), [0.0, 0.0])
            row[0] += 1.0 / TRACED
            row[1] += seconds / TRACED
    ordered = sorted(rows.items(), key=lambda item: -item[1][1])
    table = [{"name": name, "calls": count, "seconds": seconds} for name, (count, seconds) in ordered]
    total = sum(end - begin for begin, end in copies)
    exposed = length(union([*copies, *others])) - length(union(others))
    return table, {"copies": len(copies) / TRACED, "copies_s": total / TRACED, "copies_exposed_s": max(exposed, 0.0) / TRACED}


def _launched_by_group(events: Sequence[dict[str, Any]]) -> set[Any]:
    """Correlation ids of launches inside an op of the process group, on its thread."""
    spans: dict[Any, list[Interval]] = {}
    for event in events:
        if event.get("cat") == "cpu_op" and str(event.get("name", "")).startswith(_GROUP_OPS):
            begin = float(event["ts"])
            spans.setdefault(event.get("tid"), []).append((begin, begin + float(event["dur"])))
    merged = {tid: union(found) for tid, found in spans.items()}
    found = set()
    for event in events:
        if str(event.get("cat")) not in ("cuda_runtime", "cuda_driver") or "correlation" not in (event.get("args") or {}):
            continue
        if inside(merged.get(event.get("tid"), ()), float(event["ts"])):
            found.add(event["args"]["correlation"])
    return found
