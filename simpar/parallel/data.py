"""Data parallelism: plain all-reduce, ZeRO 1-3, FSDP, HSDP. Bytes per parameter, buckets, and who gathers what when.

State bytes for bf16 parameters with fp32 gradients and Adam (Rajbhandari et al. 2020; Megatron-LM docs/dist_optimizer): 18 per
parameter plain, 6 + 12/D with sharded optimizer states, 2 + 16/D with gradients too, 16/D or (2+4+12)/D fully sharded.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes per parameter of each kind of state, unsharded.

    Attributes:
        parameter: the copy that computes (2 for bf16; 4 where fp32 parameters are kept and cast, as FSDP does).
        gradient: accumulated gradient.
        master: fp32 copy kept by the optimizer, 0 where the parameters are fp32 themselves.
        moments: first and second moment together, of a matrix; what other weights keep more is in `optimizers.moment_bytes`.
        reduce: bytes per element on the wire in gradient reduction.
        gather: bytes per element on the wire in parameter gathering.
        bucket: buckets of DistributedDataParallel beside the gradient, as wide as weights that train; 0 where it wraps no model.
        gradients_persist: gradients rest in memory; False: they exist from the first backward to the update.
    """

    parameter: float = 2.0
    gradient: float = 4.0
    master: float = 4.0
    moments: float = 8.0
    reduce: float = 4.0
    gather: float = 2.0
    bucket: float = 0.0
    gradients_persist: bool = True

    @property
    def optimizer(self) -> float:
        """Master copy and moments."""
        return self.master + self.moments


@dataclass(frozen=True, slots=True)
class StateMemory:
    """Resting bytes of one rank; `passing_gradients` are those that exist from the first backward to the update only."""

    parameters: float
    gradients: float
    optimizer: float
    passing_gradients: float = 0.0


def state_memory(parameters: float, state: StateBytes, zero_stage: int, shards: int) -> StateMemory:
    """Resting state of one rank that holds `parameters` before data-parallel sharding over `shards` ranks."""
    p_split = shards if zero_stage >= 3 else 1
    g_split = shards if zero_stage >= 2 else 1
    o_split = shards if zero_stage >= 1 else 1
    gradients = parameters * state.gradient / g_split
    rest = gradients if state.gradients_persist else 0.0
    return StateMemory(parameters * state.parameter / p_split, rest, parameters * state.optimizer / o_split, gradients - rest)
