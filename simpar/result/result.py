"""What a simulated step means: throughput, MFU, waits, memory, whether it fits, how sure that is. Pure functions of a run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from simpar.engine.repeat import Repetitions
from simpar.engine.timeline import Timeline
from simpar.parallel.layout import Layout
from simpar.program.program import COMPUTE_KINDS, Program
from simpar.result.accounting import Accounting, compute_counts
from simpar.result.categories import PRODUCTS, title_of
from simpar.result.ideal import ideal_seconds, mfu_peak_flops_per_s, uncounted_pairs_flops
from simpar.result.interval import Interval, Moved
from simpar.result.memory import RankMemory
from simpar.result.published import METRICS, Comparison, compare_published
from simpar.result.tensors import Tensor, alive_at_peak, tensors_of
from simpar.specs.site import TENTH

MFU_DEFINITION = (
    "model FLOPs of all matmuls and of causal attention (lower triangle only), forward + 2x backward (1x for frozen weights), "
    "over the bf16 peak"
)
_LOSSES = {
    "memory_bound": "", "cast": "", "recompute": "", "launch": "", "tp": ", exposed", "cp": ", exposed", "ep": ", exposed",
    "pp": ", exposed", "bubble": " and imbalance", "dp": ", exposed", "optimizer": "", "skew": "", "interference": "",
    "host": ", exposed",
}  # fmt: skip
"""What the waterfall shows between the products and the step, in its order -> what it adds to the category's title."""


@dataclass(frozen=True)
class Result:
    """One simulated step.

    Attributes:
        layout, program, timeline: what ran and when.
        accounting: seconds per role by cause.
        memory: per pipeline rank.
        breakdown: mean seconds over roles by category of everything on the compute stream.
        bubble_fraction: idle share of the pipeline phase.
        step_interval: of step_time_s; `moved` has the steps that it follows from.
        provenance: category -> how its prices are known.
        hidden_communication_s: busy seconds by dimension, mean over roles.
        others: steps of the other parts' replicas, by themselves, where parts hold replicas: this is that of the slowest.
    """

    layout: Layout
    program: Program
    timeline: Timeline
    accounting: Accounting
    memory: tuple[RankMemory, ...]
    breakdown: dict[str, float]
    bubble_fraction: float
    step_interval: Interval
    provenance: dict[str, str]
    communication_s: dict[str, float]
    schedule_name: str
    hardware_flops: float
    moved: Moved
    notes: tuple[str, ...] = ()
    repetitions: Repetitions | None = None
    others: tuple[Result, ...] = ()

    @property
    def step_time_s(self) -> float:
        """Seconds per step."""
        return self.accounting.makespan

    @property
    def world_size(self) -> int:
        """GPUs."""
        return self.layout.scenario.world_size

    @cached_property
    def tokens_per_step(self) -> int:
        """Tokens (samples, for models without a sequence) per step."""
        training = self.layout.training
        return training.global_batch_size * training.sequence_length

    @property
    def tokens_per_s(self) -> float:
        """Whole job."""
        return self.tokens_per_step / self.step_time_s if self.step_time_s else 0.0

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """Per GPU."""
        return self.tokens_per_s / self.world_size

    @property
    def peak_flops_per_s(self) -> float:
        """Dense peak that MFU divides by: the training dtype's bf16-class peak."""
        return mfu_peak_flops_per_s(self.layout)

    @cached_property
    def ideal_s(self) -> float:
        """Seconds of the model FLOPs alone, every product at the peak of the dtype that it runs in."""
        return ideal_seconds(self.layout)

    @property
    def model_flops_per_s_per_gpu(self) -> float:
        """Model FLOPs (causal attention) per second and GPU."""
        return self.layout.model_flops / self.step_time_s / self.world_size if self.step_time_s else 0.0

    @property
    def mfu(self) -> float:
        """Fraction, see MFU_DEFINITION."""
        return self.model_flops_per_s_per_gpu / self.peak_flops_per_s

    @property
    def mfu_non_causal(self) -> float:
        """MFU counting the whole score matrix, as PaLM and Megatron's formula do."""
        flops = self.layout.model_flops + uncounted_pairs_flops(self.layout)
        return flops / self.step_time_s / self.world_size / self.peak_flops_per_s if self.step_time_s else 0.0

    @property
    def hfu(self) -> float:
        """Like mfu, with recomputed FLOPs counted."""
        return self.hardware_flops / self.step_time_s / self.world_size / self.peak_flops_per_s if self.step_time_s else 0.0

    @property
    def exposed_communication_s(self) -> dict[str, float]:
        """Seconds of the step, mean over ranks, in which compute waits for a collective of each dimension."""
        found = {d: self.breakdown.get(d, 0.0) for d in ("tp", "cp", "ep")}
        found["pp"] = self.breakdown.get("pp", 0.0)
        found["dp"] = self.breakdown.get("dp", 0.0)
        return found

    @property
    def worst_rank(self) -> RankMemory:
        """The pipeline rank that comes closest to what its device has, or goes furthest past it."""
        return max(self.memory, key=lambda m: m.device_bytes - m.capacity_bytes)

    @property
    def device_memory_bytes(self) -> float:
        """Memory of one GPU: of several kinds, that of the worst rank's."""
        return self.worst_rank.capacity_bytes

    @property
    def fits(self) -> bool:
        """Whether every rank's reserved memory, context and NCCL fit the device."""
        return self.worst_rank.device_bytes <= self.device_memory_bytes and all(other.fits for other in self.others)

    @property
    def published(self) -> tuple[Comparison, ...]:
        """What is published about the scenario, beside what is predicted."""
        predicted = {name: float(getattr(self, name)) for name in METRICS}
        return compare_published(self.layout.scenario.published, predicted)

    def parts(self) -> list[dict[str, Any]]:
        """What each host of a mixed layout does: its stages or replicas, their time and memory; empty where all are alike."""
        layout, found = self.layout, []
        kinds = {one.layout.replica: one for one in (self, *self.others)}
        for index, host in enumerate(layout.hosts):
            one = kinds[index] if layout.replicas_differ else self
            memory = max((m for m in one.memory if m.rank in host.ranks), key=lambda m: m.device_bytes)
            row: dict[str, Any] = {
                "hardware": host.hardware.name, "gpu": host.hardware.gpu.name, "num_gpus": host.gpus,
                "device_bytes": memory.device_bytes, "device_memory_bytes": memory.capacity_bytes,
                "fits": memory.device_bytes <= memory.capacity_bytes, "busy_s": one.mean_busy_s(host.ranks),
            }  # fmt: skip
            if layout.replicas_differ:
                replicas = {"replicas": len(host.replicas), "num_microbatches": one.layout.num_microbatches}
                row |= {**replicas, "step_time_s": one.step_time_s}
            else:
                held = [s.count for s, rank in zip(layout.stages, layout.ranks, strict=True) if rank in host.ranks]
                row |= {"pipeline_ranks": list(host.ranks), "layers_per_stage": held, "tp": host.scenario.plan.tp}
            found.append(row)
        return found

    def mean_busy_s(self, ranks: range) -> float:
        """Mean seconds of compute of these pipeline ranks."""
        busy, layout = self.accounting.busy, self.layout
        roles = list(ranks) if len(busy) == layout.plan.pp else [layout.mesh.rank(pp=rank) for rank in ranks]
        return float(sum(busy[role] for role in roles) / len(roles))

    def tensors(self, memory: RankMemory) -> list[Tensor]:
        """Every tensor that comes and goes on a rank, by name and lifetime."""
        return (
            []
            if memory.timed_passes is None
            else tensors_of(self.layout.of_rank(memory.rank), memory.timed_passes(), self.step_time_s)
        )

    def tensors_at_peak(self) -> list[dict[str, Any]]:
        """Of the fullest rank by name: how many are alive, their bytes, how long one lives on average; the largest first."""
        return [
            {"tensor": a.name, "count": a.count, "bytes": a.size, "mean_life_s": a.mean_life_s}
            for a in alive_at_peak(self.tensors(self.worst_rank))
        ]

    def waterfall(self) -> list[tuple[str, float]]:
        """Step time from the ideal (model FLOPs at peak) to the predicted, in seconds; the entries add up to the step."""
        ideal = self.ideal_s
        b = self.breakdown
        kernels = sum(b.get(name, 0.0) for name in PRODUCTS)
        steps = [("ideal: model FLOPs at peak", ideal), ("matmul and attention below peak", kernels - ideal)]
        steps += [(title_of(name) + more, b[name]) for name, more in _LOSSES.items() if abs(b.get(name, 0.0)) > 1e-9]
        return steps

    def to_json(self) -> dict[str, Any]:
        """The public JSON object; names carry SI units."""
        plan, mesh = self.layout.plan, self.layout.mesh
        interval = self.step_interval
        scale = self.tokens_per_s_per_gpu * self.step_time_s
        return {
            "name": self.layout.scenario.name,
            "step_time_s": self.step_time_s,
            "tokens_per_s": self.tokens_per_s,
            "tokens_per_s_per_gpu": self.tokens_per_s_per_gpu,
            "model_flops_per_s_per_gpu": self.model_flops_per_s_per_gpu,
            "mfu": self.mfu,
            "mfu_non_causal": self.mfu_non_causal,
            "mfu_definition": MFU_DEFINITION,
            "hfu": self.hfu,
            "bubble_fraction": self.bubble_fraction,
            "exposed_communication_s": self.exposed_communication_s,
            "communication_s": self.communication_s,
            "waterfall_s": dict(self.waterfall()),
            "peak_memory_bytes": {
                "allocated": self.worst_rank.allocated_bytes,
                "reserved": self.worst_rank.reserved_bytes,
                "device": self.worst_rank.device_bytes,
                "per_pipeline_rank": [
                    {
                        "rank": m.rank, "allocated": m.allocated_bytes, "reserved": m.reserved_bytes, "device": m.device_bytes,
                        "peak_time_s": m.peak_time_s, "by_category": {**m.at_peak, **dict(m.outside)},
                    }
                    for m in self.memory
                ],
            },
            "device_memory_bytes": self.device_memory_bytes,
            "fits": self.fits,
            "world_size": self.world_size,
            "layout": {
                "tp": plan.stage_tp or plan.tp, "cp": plan.cp, "pp": plan.pp, "virtual_stages": plan.virtual_stages, "ep": plan.ep,
                "etp": mesh.expert_tp, "dp": mesh.dp, "zero_stage": plan.zero_stage, "shard_size": plan.shard_size,
                "micro_batch_size": self.layout.training.micro_batch_size, "num_microbatches": self.layout.num_microbatches,
                "schedule": self.schedule_name, "sequence_parallel": self.layout.of_rank(0).degrees.sequence_parallel,
                "recompute": plan.recompute if isinstance(plan.recompute, str) else plan.recompute.model_dump(),
                "layers_per_stage": [s.count for s in self.layout.stages],
            },
            "framework": {"name": self.layout.framework.name, "since": list(self.layout.framework.since)},
            "hardware": self.layout.hardware.name,
            "provenance": self.provenance,
            "uncertainty": {
                "step_time_s": {"low": interval.low, "high": interval.high, "dominated_by": dict(interval.dominated_by)},
                "tokens_per_s_per_gpu": {
                    "low": scale / interval.high if interval.high else 0.0, "high": scale / interval.low if interval.low else 0.0,
                },
                "mfu": {"low": self.mfu * self.step_time_s / interval.high if interval.high else 0.0,
                        "high": self.mfu * self.step_time_s / interval.low if interval.low else 0.0},
            },
            "repetitions": None if self.repetitions is None else {
                "count": len(self.repetitions.makespans_s), "mean_step_time_s": self.repetitions.mean,
                "step_time_s": {"p50": self.repetitions.p50, "p90": self.repetitions.p90, "p99": self.repetitions.p99},
                "peak_memory_bytes": None if self.repetitions.peak_memory_bytes is None else {
                    f"p{q}": float(np.quantile(self.repetitions.peak_memory_bytes, q / 100)) for q in (50, 90, 99)
                },
            },
            **({"parts": self.parts()} if self.layout.alone else {}),
            "published": [row.to_json() for row in self.published],
            "notes": list(self.notes),
            **self._site(),
        }  # fmt: skip

    def _site(self) -> dict[str, Any]:
        """What was learned from the cluster's own runs; nothing where no site is given."""
        site, peak = self.layout.site, self.worst_rank.device_bytes
        if site is None:
            return {}
        factor = math.exp(TENTH * site.peak_memory_spread)
        return {
            "site": {
                "name": site.name, "runs": len(site.runs), "factors": site.factors, "residual": site.residual,
                "peak_memory_bytes": {"more": site.peak_memory_bytes, "low": peak / factor, "high": peak * factor},
            }
        }  # fmt: skip


def mean_breakdown(terms: np.ndarray, names: list[str], program: Program, accounting: Accounting, seconds: np.ndarray,
                   lengths: np.ndarray) -> dict[str, float]:  # fmt: skip
    """Mean seconds over roles by category: compute-op ledgers, then waits.

    Args:
        terms: float array [prices, names]; each compute price's ledger.
        seconds: float array [ops], priced; lengths: float array [ops], as they ran (interference stretches them).
    """
    totals = compute_counts(program) @ terms
    found = {n: float(v) for n, v in zip(names, totals, strict=True) if v}
    compute = np.isin(program.kind, [int(kind) for kind in COMPUTE_KINDS])
    ptr, _ = program.op_streams
    stretch = float(((lengths - seconds) * np.diff(ptr))[compute].sum()) / max(len(accounting.busy), 1)
    if abs(stretch) > 1e-12:
        found["interference"] = found.get("interference", 0.0) + stretch
    for name, waited in accounting.waits.items():
        found[name] = found.get(name, 0.0) + float(waited.mean())
    return found
