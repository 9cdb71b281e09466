"""How the work is laid out over ranks, and which modules of a layer may be recomputed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final, Literal

from pydantic import Field

from simpar.specs.base import Spec

Degree = Annotated[int, Field(gt=0)]


class RecomputeSpec(Spec):
    """Activation recomputation in detail; the plain words none / selective / full are short for this."""

    granularity: Literal["none", "selective", "full"] = "selective"
    """Nothing, some modules, or whole layers."""
    modules: tuple[str, ...] = ()
    """selective: any of core_attn, layernorm, mlp, moe, moe_act, mla_up_proj, shared_experts, attention, op (torchtitan)."""
    num_layers: Annotated[int, Field(ge=0)] | None = None
    """full: only the first num_layers of each stage (block method); none = all."""
    method: Literal["uniform", "block"] = "uniform"
    """full: chunks of layers over the whole stage, or only the first layers."""
    uniform_layers: Degree = 1
    """full, uniform: layers of a chunk that keeps only what enters it and runs again as one; the last one may be shorter."""
    every: Degree = 1
    """full, uniform: only layers of the model whose number is a multiple of this (torch's checkpoint of every second layer)."""


class OffloadSpec(Spec):
    """Offload to host memory."""

    activations: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Fraction of the saved activations."""
    optimizer: bool = False
    """Optimizer states live and are updated on the host: gradients go down, parameters come back."""
    parameters: bool = False
    """Shards of the weights live on the host and come up before each gather (ZeRO-Infinity, FSDP's CPU offload); ZeRO stage 3.
    Torch's FSDP takes gradients and optimizer along."""


class PlanSpec(Spec):
    """A layout. Degrees multiply: tp * cp * pp * dp = ranks; experts live inside tp * cp * dp (parallel folding)."""

    tp: Degree = 1
    """Tensor parallel."""
    stage_tp: tuple[Degree, ...] | None = None
    """Tensor parallel of each pipeline rank, instead of tp; with it dp is stated. none = tp on all."""
    sequence_parallel: bool = True
    """Megatron's: activations outside the tensor-parallel region are split along the sequence; no effect at tp = 1."""
    cp: Degree = 1
    """Context parallel."""
    cp_style: Literal["ring", "all_gather", "ulysses"] = "ring"
    """How context-parallel ranks exchange: keys and values around a ring or gathered, or heads for positions (Ulysses)."""
    pp: Degree = 1
    """Pipeline parallel."""
    virtual_stages: Degree = 1
    """Model chunks per pipeline rank."""
    ep: Degree = 1
    """Expert parallel."""
    etp: Degree | None = None
    """Tensor parallel inside an expert; none = tp when ep = 1, else 1."""
    dp: Degree | None = None
    """Data parallel; none = what the cluster leaves."""
    zero_stage: Annotated[int, Field(ge=0, le=3)] = 1
    """0 plain, 1 optimizer states (Megatron's distributed optimizer), 2 and gradients, 3 and parameters (FSDP)."""
    shard_size: Degree | None = None
    """HSDP: ranks a model is sharded over; replicas are all-reduced. none = all of dp * cp."""
    shard_experts: bool = True
    """Full sharding takes in experts, over the ranks that hold the same ones; false: it leaves them out, each rank holds its own
    whole and their gradients are averaged between the backward and the update."""
    reshard_after_forward: bool = True
    """FSDP: free the gathered parameters after the forward (ZeRO-3) or keep them (ZeRO-2-like traffic)."""
    defer_reduction: bool | None = None
    """FSDP: micro-batches but the last of a step add whole gradients (no_sync), which the last alone reduces; none = as the
    framework does."""
    reduce_bucket_size: Annotated[int, Field(gt=0)] | None = None
    """Gradients that are reduced at once, where the framework has buffers of so many (DeepSpeed, whose name it is); none = its
    default."""
    schedule: str = "auto"
    """Name of a pipeline schedule, a path to a torch schedule CSV, or auto (1f1b, interleaved with virtual stages)."""
    microbatch_group_size: Degree | None = None
    """interleaved: micro-batches per group; none = pp."""
    replica_microbatches: tuple[Degree, ...] | Literal["auto"] = "auto"
    """Micro-batches of each replica of a part, one number per part, where cluster.parts_hold = "replicas"; auto = what makes their
    times most alike."""
    layers_per_stage: tuple[Annotated[int, Field(ge=0)], ...] | Literal["auto"] | None = None
    """Transformer layers of each virtual stage in stage order; none = as even as possible; auto = so that all take as long,
    on their own machines and within their memory."""
    first_stage_less_layers: Annotated[int, Field(ge=0)] = 0
    """Layers fewer on the first stage than the even share."""
    last_stage_less_layers: Annotated[int, Field(ge=0)] = 0
    """Layers fewer on the last stage."""
    embedding_alone: bool = False
    """The embedding (and the head) form stages of their own."""
    encoder_stages: Annotated[int, Field(ge=0)] = 0
    """Virtual stages, the first ones, that hold nothing but the vision and audio encoders; 0 = these run on the first stage, before
    its layers."""
    recompute: Literal["none", "selective", "full"] | RecomputeSpec = "none"
    """What the backward computes again instead of keeping: a word or a table."""
    offload: OffloadSpec = OffloadSpec()
    """What rests in host memory."""
    overlap_grad_reduce: bool | None = None
    """none = the framework's default."""
    overlap_param_gather: bool | None = None
    """Gathers of updated parameters run beside the forward; none = the default of the framework."""
    overlap_tp: bool = False
    """Chunked tensor-parallel overlap (TransformerEngine user buffers, async TP)."""
    synchronous_optimizer: bool | None = None
    """Every rank waits for the gradients of all before its update; none = the framework's way for the schedule."""
    overlap_p2p: bool | None = None
    """Pipeline sends hidden under compute; none = the framework's default for the schedule."""
    overlap_ep: bool = False
    """Expert all-to-all of one micro-batch hidden under compute of another."""
    delay_wgrad: bool = False
    """Weight gradients of a block are computed after its input gradients have left."""
    ep_dispatcher: Literal["alltoall", "allgather", "deepep", "hybridep"] = "alltoall"
    """How tokens reach their experts: NCCL's all-to-all, an all-gather of all tokens, or kernels of DeepEP or HybridEP."""
    placement: str = "tp-cp-ep-dp-pp"
    """Order of the dimensions over consecutive ranks, fastest first."""


@dataclass(frozen=True, slots=True)
class Module:
    """A unit that is checkpointed: modules of nodes, and whether it `discards` what it puts out."""

    nodes: frozenset[str]
    discards: bool = False


def _module(*nodes: str, discards: bool = False) -> Module:
    return Module(frozenset(nodes), discards)


MODULES: Final[dict[str, Module]] = {
    "core_attn": _module("core_attn"),
    "layernorm": _module("layernorm", discards=True),
    "mlp": _module("mlp"),
    "moe": _module("moe", "moe_act"),
    "moe_act": _module("moe_act", discards=True),
    "mla_up_proj": _module("mla_up_proj", discards=True),
    "shared_experts": _module("shared_experts"),
    "attention": _module("attention", "core_attn", "mla_up_proj"),
}
"""Name in a plan -> what it checkpoints; "op", "op_compiled", "op_unlisted", "op_attention" and "op_exchanged" are torchtitan's
per-op policy (graph/rematerialise.py)."""
