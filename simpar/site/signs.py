"""What a run showed beside its prediction: the signs that tell causes of a slow step apart.

A sign is a number near 0 for a run that went as predicted. Which of them a row has depends on what was read: a step time alone is
one sign, a log's distribution of steps adds its tail, traces add compute, waits and launches of each rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

from simpar.evidence.row_values import read_values
from simpar.evidence.run_rows import measured_of
from simpar.result.result import Result

COMPUTE: Final = ("matmul", "attention", "expert_matmul", "memory_bound", "recompute", "cast")
COMMUNICATION: Final = ("tp", "cp", "ep", "pp", "dp", "skew")
IDLE: Final = ("bubble", "launch", "host")
FULL: Final = 0.93
"""Share of the device's memory from which an allocator is near its limit."""
STARVED_S: Final = 12e-6
"""A kernel that starts so soon after its launch has a device that waited for the host (a healthy queue holds milliseconds)."""


@dataclass(frozen=True, slots=True)
class Expected:
    """A predicted step as a tracer would see it, seconds of the median rank.

    Attributes:
        step_s: with `spread`, the standard deviation of the logarithm of measured over it.
        hidden_s: communication beside compute.
        reserved_bytes: of the fullest rank; capacity_bytes: of a device.
    """

    step_s: float
    spread: float
    compute_s: float
    exposed_s: float
    hidden_s: float
    idle_s: float
    reserved_bytes: float
    capacity_bytes: float

    @classmethod
    def of(cls, result: Result) -> Expected:
        """What `result` predicts."""
        parts = result.breakdown
        compute, exposed, idle = (sum(max(parts.get(name, 0.0), 0.0) for name in names) for names in (COMPUTE, COMMUNICATION, IDLE))
        whole = sum(result.communication_s.values())
        interval = result.step_interval
        spread = math.log(interval.high / interval.low) / (2 * 1.2816) if interval.low > 0 else 0.1
        return cls(
            result.step_time_s, max(spread, 0.01), compute + parts.get("optimizer", 0.0), exposed, max(whole - exposed, 0.0), idle,
            result.worst_rank.reserved_bytes, result.device_memory_bytes,
        )  # fmt: skip


Signs = dict[str, float]
"""Name -> value (docs/site.md); names that a run does not show are left out."""


def signs_of(row: Mapping[str, Any], expected: Expected, peak: tuple[float, float] | None = None) -> Signs:
    """The signs that a row shows, none for what it does not say.

    Args:
        row: in the evidence's schema; `extra` as `simpar run read` writes it.
        peak: (measured, predicted) memory of the same kind.
    """
    extra = _table(row, "extra")
    measured = measured_of(read_values(dict(row)).row).step_time_s
    found: Signs = {}
    steps = _table(extra, "step_time")
    middle = _number(steps, "median_s") or measured
    if middle:
        found["step"] = math.log(middle / expected.step_s)
        if measured and steps:
            found["mean"] = math.log(measured / middle)
    if (high := _number(steps, "p90_s")) and middle and _number(steps, "count", 0) >= 5:
        found["tail"] = math.log(high / middle)
    if steps or "apart" in extra:
        found["paused"] = float(bool({"checkpoint", "evaluation"} & set(_table(extra, "apart"))) and found.get("mean", 0.0) > 0.02)
    found |= _of_traces(_table(extra, "traces"), expected)
    retries = _number(extra, "allocator_retries")
    snapshots = _table(extra, "snapshots").get("ranks") or ()
    if retries is not None or snapshots or steps:
        counts = [retries or 0.0, *(_number(each, "allocator_retries") or 0.0 for each in snapshots)]
        found["retries"] = float(max(counts) > 0)
    reserved = _reserved(extra)
    if reserved is not None:
        found["full"] = float(reserved > FULL * expected.capacity_bytes)
    if peak is not None:
        found["memory"] = math.log(peak[0] / peak[1])
    if (load := _number(_table(extra, "moe"), "load_max_over_mean")) is not None and load >= 1.0:
        found["load"] = math.log(load)
    if (data := _data_seconds(extra)) is not None and middle:
        found["data"] = data / middle
    return found


def _of_traces(traces: Mapping[str, Any], expected: Expected) -> Signs:
    ranks = [rank for rank in traces.get("ranks") or () if isinstance(rank, Mapping) and rank.get("counted", True)]
    compute = [c for rank in ranks if (c := _number(rank, "compute_s"))]
    if not compute:
        return {}
    middle, found = median(compute), {}
    found["compute"] = math.log(middle / expected.compute_s) if expected.compute_s else 0.0
    if len(compute) > 2:
        found["uneven"] = math.log(max(compute) / middle)
    exposed = [_number(rank, "exposed_communication_s") or 0.0 for rank in ranks]
    whole = [_number(rank, "communication_s") or 0.0 for rank in ranks]
    found["exposed"] = (median(exposed) - expected.exposed_s) / expected.step_s
    predicted = expected.hidden_s + expected.exposed_s
    if median(whole) > 0.0 and predicted > 0.0:
        found["traffic"] = math.log(median(whole) / predicted)
        found["hidden"] = (1.0 - median(exposed) / median(whole)) - expected.hidden_s / predicted
    found["idle"] = (median([_number(rank, "idle_s") or 0.0 for rank in ranks]) - expected.idle_s) / expected.step_s
    queues = [q for rank in ranks if (q := _number(rank, "launch_to_start_median_s")) is not None]
    if queues:
        found["starved"] = float(median(queues) < STARVED_S)
    return found


def _reserved(extra: Mapping[str, Any]) -> float | None:
    table = _table(_table(extra, "memory_gib"), "reserved")
    values = [float(v) * 2.0**30 for v in table.values() if isinstance(v, int | float)]
    return max(values, default=None)


def _data_seconds(extra: Mapping[str, Any]) -> float | None:
    timers = _table(extra, "timers")
    found = [
        float(v) * (1e-3 if name.endswith("(ms)") else 1.0)
        for name, v in timers.items()
        if "batch-generator" in name or "data" in name.lower()
    ]
    return max(found) if found else None


def _table(table: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = table.get(name)
    return found if isinstance(found, Mapping) else {}


def _number(table: Mapping[str, Any], name: str, otherwise: float | None = None) -> Any:
    found = table.get(name)
    return float(found) if isinstance(found, int | float) and not isinstance(found, bool) and math.isfinite(found) else otherwise
