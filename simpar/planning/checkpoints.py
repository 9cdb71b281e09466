"""How long a checkpoint takes and how often one is worth it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from simpar.planning.closed_forms import daly_interval_s, exact_interval_s, young_interval_s
from simpar.specs.planfile import CheckpointPlan

DEFAULT_BANDWIDTH_PER_NODE = 1e9
"""Bytes/s of storage per node, where the plan says nothing (assumed: Llama 3's 2 TB/s serve 2,048 training nodes)."""

SHORTEST_INTERVAL_S = 1.0
"""Saves that cost nothing are still not made more often than this: about a step."""


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

    It is never so short that saves overtake each other.
    """
    if spec.interval == "young":
        wanted = young_interval_s(times.stall_s, mtti_s)
    elif spec.interval == "daly":
        wanted = daly_interval_s(times.stall_s, mtti_s)
    elif spec.interval == "optimal":
        wanted = exact_interval_s(times.stall_s, mtti_s)
    else:
        wanted = float(spec.interval)
    wanted = max(wanted, times.save_s - times.stall_s, SHORTEST_INTERVAL_S)
    if step_s <= 0 or math.isinf(wanted):
        return wanted
    steps = max(1, round(wanted / step_s))
    return step_s * (steps if steps * step_s >= times.save_s - times.stall_s else steps + 1)
