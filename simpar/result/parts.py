"""What each host of a mixed layout does in a step: its stages or replicas, their time and memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from simpar.result.result import Result


def parts_of(result: Result) -> list[dict[str, Any]]:
    """One object per host, as `--json` has them; empty where all machines are of one kind."""
    layout, found = result.layout, []
    kinds = {one.layout.replica: one for one in (result, *result.others)}
    for index, host in enumerate(layout.hosts):
        one = kinds[index] if layout.replicas_differ else result
        memory = max((m for m in one.memory if m.rank in host.ranks), key=lambda m: m.device_bytes)
        row: dict[str, Any] = {
            "hardware": host.hardware.name, "gpu": host.hardware.gpu.name, "num_gpus": host.gpus,
            "device_bytes": memory.device_bytes, "device_memory_bytes": memory.capacity_bytes,
            "fits": memory.device_bytes <= memory.capacity_bytes, "busy_s": _busy(one, host.ranks),
        }  # fmt: skip
        if layout.replicas_differ:
            row |= {"replicas": len(host.replicas), "num_microbatches": one.layout.num_microbatches, "step_time_s": one.step_time_s}
        else:
            held = [s.count for s, rank in zip(layout.stages, layout.ranks, strict=True) if rank in host.ranks]
            row |= {"pipeline_ranks": list(host.ranks), "layers_per_stage": held, "tp": host.scenario.plan.tp}
        found.append(row)
    return found


def _busy(result: Result, ranks: range) -> float:
    """Mean seconds of compute of these pipeline ranks."""
    busy, layout = result.accounting.busy, result.layout
    roles = list(ranks) if len(busy) == layout.plan.pp else [layout.mesh.rank(pp=rank) for rank in ranks]
    return float(sum(busy[role] for role in roles) / len(roles))


__all__ = ["parts_of"]
