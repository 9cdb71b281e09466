"""What is best: metrics of a layout as functions of its step time and memory, constraints on them, and how they bound time."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Final

from simpar.errors import InputError, Violation
from simpar.registry import unknown
from simpar.specs.scenario import Scenario

OBJECTIVES: Final = {
    "step_time": "step_time_s",
    "tokens_per_s_per_gpu": "tokens_per_s_per_gpu",
    "cost_per_token": "cost_usd_per_token",
    "energy_per_token": "energy_j_per_token",
    "memory_headroom": "memory_headroom_bytes",
    "num_gpus": "num_gpus",
}
"""Name on the command line -> metric."""

LARGER_IS_BETTER: Final = frozenset({"tokens_per_s", "tokens_per_s_per_gpu", "mfu", "memory_headroom_bytes"})

SIMPLE: Final = (
    "step_time_s", "tokens_per_s", "tokens_per_s_per_gpu", "mfu", "cost_usd_per_token", "energy_j_per_token",
    "peak_memory_bytes", "memory_headroom_bytes", "num_gpus", "num_nodes",
)  # fmt: skip
"""Metrics that follow from step time, memory and the cluster; all others are read from the simulated result."""

FROM_RESULT: Final = ("bubble_fraction", "hfu", "model_flops_per_s_per_gpu", "exposed_communication_s")

_CONSTRAINT = re.compile(r"^\s*([a-z_]+)\s*(<=|>=|<|>)\s*([-+.\deE]+)\s*$")


@dataclass(frozen=True, slots=True)
class Constraint:
    """A limit on one metric."""

    metric: str
    upper: bool
    value: float

    def holds(self, metrics: Mapping[str, float]) -> bool:
        """Whether a layout with these metrics keeps it."""
        found = metrics[self.metric]
        return found <= self.value if self.upper else found >= self.value

    def __str__(self) -> str:
        return f"{self.metric} {'<=' if self.upper else '>='} {self.value:g}"


def parse_constraints(texts: Sequence[str]) -> tuple[Constraint, ...]:
    """Constraints written as "step_time_s<=5".

    Raises:
        InputError: all that cannot be read, together.
    """
    found, wrong = [], []
    for text in texts:
        match = _CONSTRAINT.match(text)
        known = (*SIMPLE, *FROM_RESULT)
        if match is None:
            wrong.append(Violation("--where", text, "cannot be read", "write it as metric<=number or metric>=number"))
        elif match[1] not in known:
            wrong += [Violation("--where", text, str(unknown("metric", match[1], list(known))))]
        else:
            found.append(Constraint(match[1], match[2].startswith("<"), float(match[3])))
    if wrong:
        raise InputError(wrong)
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Measure:
    """The metrics of one cluster size.

    Attributes:
        num_gpus, num_nodes: of the cluster.
        tokens: per step.
        flops: model FLOPs per step; peak_flops_per_s: of one GPU.
        usd_per_gpu_hour: rent.
        idle_w, busy_w: of one GPU with its share of the host, doing nothing and at full rate.
        memory_bytes: of one device.
    """

    num_gpus: int
    num_nodes: int
    tokens: float
    flops: float
    peak_flops_per_s: float
    usd_per_gpu_hour: float
    idle_w: float
    busy_w: float
    memory_bytes: float

    @classmethod
    def of(cls, scenario: Scenario, flops: float, usd_per_gpu_hour: float = 1.0, pue: float = 1.0) -> Measure:
        """The measure of a scenario's cluster and training step; `flops` of its model, forward and backward."""
        hardware = scenario.hardware
        gpu, node = hardware.gpu, hardware.node
        host = node.host_power.value / hardware.gpus_per_node if node.host_power else 0.0
        # Idle boards draw about a tenth of their limit where the profile does not say.
        idle = gpu.idle_power.value if gpu.idle_power else 0.1 * gpu.power.value
        training = scenario.training
        dtype = training.precision if training.precision in ("fp16", "fp32", "tf32") else "bf16"
        return cls(
            scenario.world_size, scenario.cluster.num_nodes, float(training.global_batch_size * training.sequence_length), flops,
            hardware.peak_flops_per_s(dtype), usd_per_gpu_hour, (idle + host) * pue, (gpu.power.value + host) * pue,
            gpu.memory.value,
        )  # fmt: skip

    def metrics(self, step_time_s: float, device_bytes: float) -> dict[str, float]:
        """Every simple metric of a layout."""
        t, n = step_time_s, self.num_gpus
        ideal = self.flops / (n * self.peak_flops_per_s) if self.peak_flops_per_s else 0.0
        joules = n * (self.idle_w * t + (self.busy_w - self.idle_w) * min(ideal, t))
        return {
            "step_time_s": t, "tokens_per_s": self.tokens / t, "tokens_per_s_per_gpu": self.tokens / t / n, "mfu": ideal / t,
            "cost_usd_per_token": n * t / 3600.0 * self.usd_per_gpu_hour / self.tokens, "energy_j_per_token": joules / self.tokens,
            "peak_memory_bytes": device_bytes, "memory_headroom_bytes": self.memory_bytes - device_bytes,
            "num_gpus": float(n), "num_nodes": float(self.num_nodes),
        }  # fmt: skip

    def value(self, metric: str, step_time_s: float, device_bytes: float) -> float:
        """A metric with its sign turned so that less is better."""
        found = self.metrics(step_time_s, device_bytes)[metric]
        return -found if metric in LARGER_IS_BETTER else found

    def longest(self, metric: str, limit: float) -> float:
        """The step time from which on a metric is worse than `limit`; infinite where it does not depend on time."""
        n, tokens = self.num_gpus, self.tokens
        ideal = self.flops / (n * self.peak_flops_per_s) if self.peak_flops_per_s else 0.0
        if metric == "step_time_s":
            return limit
        if metric in ("tokens_per_s", "tokens_per_s_per_gpu"):
            return tokens / limit / (n if metric.endswith("gpu") else 1) if limit > 0 else inf
        if metric == "mfu":
            return ideal / limit if limit > 0 else inf
        if metric == "cost_usd_per_token":
            return limit * tokens * 3600.0 / (n * self.usd_per_gpu_hour) if self.usd_per_gpu_hour else inf
        if metric == "energy_j_per_token":
            joules = limit * tokens / n - (self.busy_w - self.idle_w) * ideal
            return max(joules / self.idle_w, 0.0) if self.idle_w else inf
        return inf

    def limits(self, constraints: Sequence[Constraint]) -> tuple[float, float]:
        """(longest step time, least headroom in bytes) that constraints allow; others have to be checked afterwards."""
        longest, headroom = inf, 0.0
        for c in constraints:
            timed = c.upper != (c.metric in LARGER_IS_BETTER)
            if c.metric in SIMPLE and timed:
                longest = min(longest, self.longest(c.metric, c.value))
            if c.metric == "memory_headroom_bytes" and not c.upper:
                headroom = max(headroom, c.value)
            if c.metric == "peak_memory_bytes" and c.upper:
                headroom = max(headroom, self.memory_bytes - c.value)
        return longest, headroom


__all__ = ["FROM_RESULT", "LARGER_IS_BETTER", "OBJECTIVES", "SIMPLE", "Constraint", "Measure", "parse_constraints"]
