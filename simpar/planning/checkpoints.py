"""How long a checkpoint takes and how often one is worth it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from simpar.planning.closed_forms import daly_interval_s, exact_interval_s, young_interval_s
from simpar.specs.planfile import CheckpointPlan
from simpar.units import format_seconds

DEFAULT_BANDWIDTH_PER_NODE = 1e9
"""Bytes/s of storage per node, where the plan says nothing (assumed: Llama 3's 2 TB/s serve 2,048 training nodes)."""

SHORTEST_INTERVAL_S = 1.0
"""A given interval is not followed below this: about a step."""
ABSURD_S, ABSURD_STEPS = 60.0, 10
"""Saves at shorter distances, in seconds and in steps, are worth a warning."""
ABSURD_BUSY, ABSURD_STALL = 0.8, 0.05
"""So are a storage that is written to, and a training that stands still, for more of the time."""


@dataclass(frozen=True, slots=True)
class CheckpointTimes:
    """One checkpoint.

    Attributes:
        bytes: its size, None where only times are given.
        stall_s: how long training stands still.
        save_s: until it is stored and can be loaded.
        load_s: until all ranks have it back.
        assumed: what was assumed on the way.
    """

    bytes: float | None
    stall_s: float
    save_s: float
    load_s: float
    assumed: tuple[str, ...]


def checkpoint_times(spec: CheckpointPlan, nodes: int, gpus: int, parameters: float | None) -> CheckpointTimes:
    """Size and times of one checkpoint of a model of `parameters` on `nodes` nodes."""
    assumed: list[str] = []
    count = spec.parameters or parameters
    size = spec.bytes
    if size is None and count is not None:
        size = count * spec.bytes_per_parameter
        assumed.append(f"{spec.bytes_per_parameter:g} bytes per parameter: {size / 1e12:.4g} TB")
    write = spec.write_bandwidth
    if write is None and (spec.save_time is None or spec.load_time is None):
        write = nodes * DEFAULT_BANDWIDTH_PER_NODE
        assumed.append(f"storage of {DEFAULT_BANDWIDTH_PER_NODE / 1e9:g} GB/s per node")
    known = size or 0.0
    save = spec.save_time if spec.save_time is not None else known / (write or 1.0)
    read = spec.read_bandwidth or write or 1.0
    load = spec.load_time if spec.load_time is not None else known / read
    if spec.mode == "blocking":
        return CheckpointTimes(size, save, save, load, tuple(assumed))
    stall = spec.stall if spec.stall is not None else known / gpus / spec.snapshot_bandwidth
    if spec.stall is None and "snapshot_bandwidth" not in spec.model_fields_set:
        assumed.append(f"snapshot to host memory at {spec.snapshot_bandwidth / 1e9:g} GB/s per GPU")
    return CheckpointTimes(size, stall, max(save, stall), load, tuple(assumed))


def choose_interval(spec: CheckpointPlan, times: CheckpointTimes, mtti_s: float, step_s: float = 0.0) -> float:
    """Training time between checkpoints: as given or by the rule, in whole steps of `step_s` where that is known.

    It is never so short that saves overtake each other; a rule never goes below the plan's least interval.
    """
    if spec.interval == "young":
        wanted = young_interval_s(times.stall_s, mtti_s)
    elif spec.interval == "daly":
        wanted = daly_interval_s(times.stall_s, mtti_s)
    elif spec.interval == "optimal":
        wanted = exact_interval_s(times.stall_s, mtti_s)
    else:
        wanted = float(spec.interval)
    least = spec.least_interval if isinstance(spec.interval, str) else SHORTEST_INTERVAL_S
    least = max(times.save_s - times.stall_s, least)
    wanted = max(wanted, least)
    if step_s <= 0 or math.isinf(wanted):
        return wanted
    steps = max(1, round(wanted / step_s))
    return step_s * (steps if steps * step_s >= least else steps + 1)


def storage_load(spec: CheckpointPlan, times: CheckpointTimes, interval_s: float) -> dict[str, float]:
    """What checkpoints ask of the storage: bytes of one and of those kept, bandwidth while one is written and on average, the share
    of the time in which one is; empty where their size is not known."""
    if times.bytes is None or math.isinf(interval_s):
        return {}
    period = interval_s + times.stall_s
    return {
        "checkpoint_bytes": times.bytes,
        "kept_bytes": times.bytes * spec.keep,
        "write_bandwidth_bytes_per_s": times.bytes / times.save_s if times.save_s else 0.0,
        "mean_write_bandwidth_bytes_per_s": times.bytes / period,
        "busy_fraction": min(times.save_s / period, 1.0),
    }


def doubts(times: CheckpointTimes, interval_s: float, mtti_s: float, step_s: float = 0.0) -> tuple[str, ...]:
    """What an operator would not do, in words: saves every few seconds or steps, a storage that never rests, long stalls, failures
    more often than saves."""
    found = []
    every = f"a checkpoint every {format_seconds(interval_s)}"
    if interval_s < ABSURD_S:
        found.append(f"{every}: operators leave minutes to hours between two; set checkpoints.interval")
    elif step_s > 0.0 and interval_s < ABSURD_STEPS * step_s:
        found.append(f"{every} is one every {interval_s / step_s:.0f} steps")
    period = interval_s + times.stall_s
    if times.save_s > ABSURD_BUSY * period:
        share = min(times.save_s / period, 1.0)
        found.append(f"{every}, each {format_seconds(times.save_s)} long: the storage writes {share:.0%} of the time")
    if times.stall_s > ABSURD_STALL * period:
        found.append(f"{every}: training stands still {times.stall_s / period:.0%} of the time for them")
    if interval_s > mtti_s:
        found.append(f"{every}, but a failure every {format_seconds(mtti_s)}: most of them lose more than they keep")
    return tuple(found)
