"""What is best: metrics of a layout as functions of its step time and memory, limits on its outputs, and how they bound time."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Final

from simpar.errors import InputError, Violation
from simpar.registry import unknown
from simpar.specs.hardware import HardwareProfile
from simpar.specs.scenario import Scenario
from simpar.units import parse

OBJECTIVES: Final = {
    "step_time": "step_time_s",
    "tokens_per_s_per_gpu": "tokens_per_s_per_gpu",
    "cost_per_token": "cost_usd_per_token",
    "energy_per_token": "energy_j_per_token",
    "memory_headroom": "memory_headroom_bytes",
    "num_gpus": "num_gpus",
}
"""Name on the command line -> metric."""

LARGER_IS_BETTER: Final = frozenset({"tokens_per_s", "tokens_per_s_per_gpu", "memory_headroom_bytes"})

SIMPLE: Final = (
    "step_time_s", "tokens_per_s", "tokens_per_s_per_gpu", "cost_usd_per_token", "energy_j_per_token",
    "peak_memory_bytes", "memory_headroom_bytes", "num_gpus", "num_nodes",
)  # fmt: skip
"""Metrics that follow from step time, memory and the cluster; all others are read from the simulated result (the MFU too: a
vocabulary padded for tensor parallelism counts a little)."""

MEMORY: Final = frozenset({"peak_memory_bytes", "memory_headroom_bytes"})
"""Simple metrics that do not depend on time."""

_DIMENSIONS: Final = ("tp", "cp", "ep", "pp", "dp")

FROM_RESULT: Final = (
    "mfu", "mfu_non_causal", "hfu", "model_flops_per_s_per_gpu", "bubble_fraction",
    "exposed_communication_s", *(f"exposed_communication_s.{d}" for d in _DIMENSIONS),
    "communication_s", *(f"communication_s.{d}" for d in _DIMENSIONS),
    *(f"peak_memory_bytes.{kind}" for kind in ("allocated", "reserved", "device")),
    *(f"uncertainty.{name}.{end}" for name in ("step_time_s", "tokens_per_s_per_gpu", "mfu") for end in ("low", "high")),
    *(f"layout.{name}" for name in (*_DIMENSIONS, "etp", "virtual_stages", "zero_stage", "micro_batch_size", "num_microbatches")),
)  # fmt: skip
"""Outputs of `simulate` that a limit may name, by their path in its JSON; a table of seconds stands for its sum."""

ALIASES: Final = {
    **OBJECTIVES, "memory": "peak_memory_bytes", "headroom": "memory_headroom_bytes", "gpus": "num_gpus",
}  # fmt: skip
"""Shorter names of metrics."""

_LIMIT = re.compile(r"^\s*([a-z_][a-z_0-9.]*)\s*(<=|>=|<|>)\s*(.+?)\s*$")


@dataclass(frozen=True, slots=True)
class Constraint:
    """A limit on one metric.

    Attributes:
        metric: a name of SIMPLE or FROM_RESULT.
        upper: at most `value`, else at least.
        value: SI.
        strict: the limit itself is out.
    """

    metric: str
    upper: bool
    value: float
    strict: bool = False

    def holds(self, metrics: Mapping[str, Any]) -> bool:
        """Whether a layout with these metrics (or this result, as JSON) keeps it."""
        found = look_up(metrics, self.metric)
        if found == self.value:
            return not self.strict
        return (found < self.value) == self.upper

    def __str__(self) -> str:
        return f"{self.metric} {'<' if self.upper else '>'}{'' if self.strict else '='} {self.value:g}"


def look_up(metrics: Mapping[str, Any], path: str) -> float:
    """The number at a dotted path; a table of seconds stands for its sum, what a layout does not have is 0."""
    found: Any = metrics
    for name in path.split("."):
        found = found.get(name, 0.0) if isinstance(found, Mapping) else 0.0
    return float(sum(found.values()) if isinstance(found, Mapping) else found)


def parse_constraints(texts: Sequence[str]) -> tuple[Constraint, ...]:
    """Limits written as "step_time_s<=5", "memory<70GiB", "bubble_fraction<=10%"; several in one text are split at commas.

    Raises:
        InputError: all that cannot be read, together.
    """
    found: list[Constraint] = []
    wrong: list[Violation] = []
    for text in [part for each in texts for part in each.split(",")]:
        match = _LIMIT.match(text)
        if match is None:
            wrong.append(Violation("--where", text, "cannot be read", "write it as metric<=number or metric>=number"))
            continue
        metric = ALIASES.get(match[1], match[1])
        if metric not in (*SIMPLE, *FROM_RESULT):
            known = [*ALIASES, *SIMPLE, *FROM_RESULT]
            wrong.append(Violation("--where", text, str(unknown("metric", match[1], list(dict.fromkeys(known))))))
            continue
        try:
            value = _number(metric, match[3])
        except ValueError as error:
            wrong.append(Violation("--where", text, str(error)))
            continue
        found.append(Constraint(metric, match[2].startswith("<"), value, len(match[2]) == 1))
    if wrong:
        raise InputError(wrong)
    return tuple(found)


def _number(metric: str, text: str) -> float:
    """A plain SI number, a percentage, or a quantity with the unit of the metric.

    Raises:
        ValueError: none of these.
    """
    try:
        value = float(text[:-1]) / 100.0 if text.endswith("%") else float(text)
    except ValueError:
        if "bytes" in metric:
            return parse(text, "bytes", allow_negative=True)
        if metric.split(".")[0].endswith(("time_s", "communication_s")) or "step_time_s" in metric:
            return parse(text, "seconds")
        raise ValueError("is compared with what is not a number") from None
    if value != value or value in (inf, -inf):
        raise ValueError("is compared with what is not a finite number")
    return value


def pace(tokens: str, deadline: str) -> Constraint:
    """The limit that a deadline is: so many tokens within so much time.

    Raises:
        InputError: one without the other, or not a number of tokens or a duration.
    """
    wrong: list[Violation] = []
    match = re.fullmatch(r"\s*([\d.]+(?:[eE]\d+)?)\s*([kMGBT]?)\s*", tokens)
    scale = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}
    amount = 0.0
    if not tokens or not deadline:
        missing, given = ("--tokens", "--deadline") if not tokens else ("--deadline", "--tokens")
        raise InputError([Violation(missing, None, f"is needed beside {given}", 'such as --tokens 15.6T --deadline "60d"')])
    try:
        amount = float(match[1]) * scale[match[2]] if match else 0.0
    except ValueError:
        amount = 0.0
    if amount <= 0.0:
        wrong.append(Violation("--tokens", tokens, "is not a number of tokens", "such as 15.6T or 2e12"))
    try:
        seconds = parse(deadline, "seconds")
        if seconds <= 0.0:
            raise ValueError("must be above 0")
    except ValueError as error:
        wrong.append(Violation("--deadline", deadline, str(error), "such as 60d or 36h"))
    if wrong:
        raise InputError(wrong)
    return Constraint("tokens_per_s", upper=False, value=amount / seconds)


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
    def of(
        cls, scenario: Scenario, hardware: HardwareProfile, flops: float, usd_per_gpu_hour: float = 1.0, pue: float = 1.0
    ) -> Measure:
        """The measure of a scenario's cluster and training step; `flops` of its model, forward and backward."""
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

    @property
    def ideal_s(self) -> float:
        """Seconds of a step at peak."""
        return self.flops / (self.num_gpus * self.peak_flops_per_s) if self.peak_flops_per_s else 0.0

    def metrics(self, step_time_s: float, device_bytes: float) -> dict[str, float]:
        """Every simple metric of a layout. Energy: idle power all the time, and the rest of the board's power while at peak."""
        t, n = step_time_s, self.num_gpus
        joules = n * (self.idle_w * t + (self.busy_w - self.idle_w) * min(self.ideal_s, t))
        return {
            "step_time_s": t, "tokens_per_s": self.tokens / t, "tokens_per_s_per_gpu": self.tokens / t / n,
            "cost_usd_per_token": n * t / 3600.0 * self.usd_per_gpu_hour / self.tokens, "energy_j_per_token": joules / self.tokens,
            "peak_memory_bytes": device_bytes, "memory_headroom_bytes": self.memory_bytes - device_bytes,
            "num_gpus": float(n), "num_nodes": float(self.num_nodes),
        }  # fmt: skip

    def longest(self, metric: str, limit: float) -> float:
        """The step time from which on a metric is worse than `limit`; infinite where it does not depend on time."""
        n, tokens = self.num_gpus, self.tokens
        if metric == "step_time_s":
            return limit
        if metric in ("tokens_per_s", "tokens_per_s_per_gpu"):
            return tokens / limit / (n if metric.endswith("gpu") else 1) if limit > 0 else inf
        if metric == "cost_usd_per_token":
            return limit * tokens * 3600.0 / (n * self.usd_per_gpu_hour) if self.usd_per_gpu_hour else inf
        if metric == "energy_j_per_token":
            joules = limit * tokens / n - (self.busy_w - self.idle_w) * self.ideal_s
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


def oriented(metrics: Mapping[str, float], metric: str) -> float:
    """A metric with its sign turned so that less is better."""
    return -metrics[metric] if metric in LARGER_IS_BETTER else metrics[metric]


def dominates(a: Mapping[str, float], b: Mapping[str, float], names: Sequence[str]) -> bool:
    """Whether `a` is not worse than `b` in any of these metrics and better in one."""
    pairs = [(oriented(a, n), oriented(b, n)) for n in names]
    return all(x <= y for x, y in pairs) and any(x < y for x, y in pairs)


def parse_front(text: str) -> tuple[str, ...]:
    """The two or three metrics of a front, "step_time,memory".

    Raises:
        InputError: fewer, more, or a metric that does not follow from time, memory and the cluster.
    """
    if not text:
        return ()
    names = tuple(dict.fromkeys(ALIASES.get(n.strip(), n.strip()) for n in text.split(",")))
    wrong = [Violation("--pareto", n, str(unknown("metric of a front", n, [*ALIASES, *SIMPLE]))) for n in names if n not in SIMPLE]
    if not wrong and not 2 <= len(names) <= 3:
        wrong = [Violation("--pareto", text, "a front has two or three metrics", "such as step_time,memory")]
    if wrong:
        raise InputError(wrong)
    return names


__all__ = [
    "ALIASES", "FROM_RESULT", "LARGER_IS_BETTER", "MEMORY", "OBJECTIVES", "SIMPLE", "Constraint", "Measure", "dominates", "look_up",
    "oriented", "pace", "parse_constraints", "parse_front",
]  # fmt: skip
