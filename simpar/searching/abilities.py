"""What each framework can run of the space."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from simpar.registry import unknown
from simpar.searching import axes
from simpar.searching.choice import Group, State
from simpar.specs.framework_releases import ALIASES


@dataclass(frozen=True, slots=True)
class Ability:
    """What a framework can run: axis -> values; an axis left out is not restricted.

    `source` says where that stands.
    """

    values: dict[str, tuple[Any, ...]]
    source: str
    with_experts: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    """The values of some axes where the model has experts."""
    with_hybrids: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    """The values of some axes where layers are of several kinds."""
    experts_need_sequence_parallel: bool = False
    """With tensor parallelism."""
    merges_chunks: bool = False
    """Expert exchanges are hidden beside another model chunk: with a pipeline only where ranks have several, and not where whole
    layers are recomputed."""
    gathers_beside_reductions: bool = False
    """Parameters are gathered beside the forward only where gradients are reduced beside the backward."""
    uncompiled: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    """The values of some axes where graphs are not compiled."""
    can_shard: Callable[[Group, State], bool] | None = None
    """Whether states can be spread so over a mesh; none = any way that the cost model knows."""


def _fully_sharded(group: Group, state: State) -> bool:
    """torchtitan: a shard holds whole context-parallel groups, an expert group whole tensor x context groups of a shard."""
    size = state.shard_size or group.dp * group.cp
    if size % group.cp or (size == 1 and group.dp * group.cp > 1):
        return False
    if group.ep == 1:
        return True
    inner = group.cp * (group.tp if group.etp == 1 else 1)
    return group.etp in (1, group.tp) and group.ep % inner == 0 and size // group.cp * inner % group.ep == 0


def _zero(group: Group, state: State) -> bool:
    """DeepSpeed: shards over all ranks, and tensor parallelism up to stage 2."""
    return state.shard_size in (None, group.dp * group.cp) and (group.tp == 1 or state.zero_stage < 3)


ABILITIES: Final[dict[str, Ability]] = {
    "megatron-core": Ability(
        {
            "schedule": ("1f1b", "interleaved"), "zero_stage": (0, 1), "reshard_after_forward": (True,),
            "placement": axes.PLACEMENTS, "offload_activations": (0.0,), "offload_parameters": (False,),
            "recompute": ("none", "full", "full:*", "core_attn", "layernorm", "mlp", "moe", "moe_act", "mla_up_proj",
                          "shared_experts"),
        },
        "Megatron-LM arguments.py: 1F1B and interleaved schedules, distributed optimizer with num_distributed_optimizer_instances, "
        "recompute granularity and modules, optimizer_cpu_offload; MoE with tensor parallelism requires sequence parallelism; "
        "overlap_moe_expert_parallel_comm requires virtual stages with a pipeline and no full recomputation; overlap_param_gather "
        "requires overlap_grad_reduce; hybrid models have one stage a rank, of equal patterns",
        with_hybrids={"schedule": ("1f1b",), "virtual_stages": (1,), "split": ("even",)},
        experts_need_sequence_parallel=True, merges_chunks=True, gathers_beside_reductions=True,
    ),
    "torchtitan": Ability(
        {
            "schedule": ("1f1b", "gpipe", "interleaved", "interleaved_zb", "zb-v", "dualpipe-v"), "zero_stage": (3,),
            "sequence_parallel": (True,), "cp_style": ("ring", "all_gather"), "overlap_ep": (False,),
            "recompute": ("none", "full", "op"), "offload_activations": (0.0,), "offload_optimizer": (False,),
            "overlap_grad_reduce": (True,), "overlap_param_gather": (True,), "overlap_p2p": (False,),
            "split": ("even", "0-1", "1-0", "1-1"), "placement": ("tp-cp-ep-dp-pp",),
        },
        "torchtitan v0.2 job_config.py and pipeline_parallel.py: FSDP2 only, torch schedules, stages less by layers per end; "
        "asynchronous tensor parallelism is compiled; parallel_dims.py: shards of whole context-parallel groups, experts over "
        "whole tensor x context groups of them",
        uncompiled={"overlap_tp": (False,)}, can_shard=_fully_sharded,
    ),
    "deepspeed": Ability(
        {
            "schedule": ("1f1b",), "cp_style": ("ulysses",), "recompute": ("none", "full"), "split": ("even",),
            "overlap_tp": (False,), "overlap_ep": (False,), "ep_dispatcher": ("alltoall",), "overlap_p2p": (False,),
            "sequence_parallel": (False,), "placement": ("tp-cp-ep-dp-pp",), "offload_activations": (0.0,),
            "overlap_param_gather": (False,), "shard_size": (None,), "offload_parameters": (False, True),
        },
        "DeepSpeed docs: ZeRO 0-3 over all ranks (MiCS is gone since 0.19), Ulysses, tensor parallelism with ZeRO up to 2, "
        "PipelineModule with ZeRO up to 1",
        can_shard=_zero,
    ),
    "nanotron": Ability(
        {
            "schedule": ("1f1b", "gpipe"), "zero_stage": (0, 1), "cp": (1,), "pp": (1,), "recompute": ("none", "full"), "etp": (1,),
            "split": ("even",), "overlap_ep": (False,), "ep_dispatcher": ("alltoall",), "overlap_p2p": (False,),
            "overlap_param_gather": (False,), "placement": ("tp-cp-ep-dp-pp",), "shard_size": (None,),
            "overlap_tp": (False,), "offload_activations": (0.0,), "offload_optimizer": (False,), "offload_parameters": (False,),
        },
        "pipelines are left out: nanotron cuts stages by the cost of their blocks, which no value of split says; "
        "nanotron config ParallelismArgs: dp, pp, tp, expert_parallel_size, pp_engine afab or 1f1b, tp_mode, zero_stage 0 or 1; "
        "parallel/context.py: pipeline ranks outermost, with experts data-parallel ranks outermost",
        with_experts={"placement": ("tp-cp-ep-pp-dp",)},
    ),
    "transformers": Ability(
        {
            "tp": (1,), "cp": (1,), "pp": (1,), "ep": (1,), "zero_stage": (0, 3), "recompute": ("none", "full"),
            "reshard_after_forward": (True,), "shard_size": (None,), "split": ("even",), "placement": ("tp-cp-ep-dp-pp",),
            "overlap_grad_reduce": (True,), "overlap_param_gather": (True,), "offload_activations": (0.0, 1.0),
            "offload_optimizer": (False,), "offload_parameters": (False, True),
        },
        "transformers training_args.py and accelerate FullyShardedDataParallelPlugin: DDP or FSDP of all ranks, "
        "gradient_checkpointing, CPU offload of parameters with their states; TRL and torchtune: activation_offloading",
    ),
    "plain": Ability({}, "no restriction"),
}  # fmt: skip
"""Framework -> what it can run."""


ANY: Final = "any"
"""No framework's limits."""
LAUNCHED_AS: Final = {
    "nemo": "megatron-core", "megatron-bridge": "megatron-core", "megatron-bridge-tuning": "megatron-core",
    "megatron-bridge-defaults": "megatron-core", "trl": "transformers", "swift": "transformers", "torchtune": "transformers",
}  # fmt: skip
"""Frameworks that run what another one does, through its options."""


def launched_as(framework: str) -> str:
    """The row of ABILITIES for `framework`, "" where there is none."""
    name = ALIASES.get(framework, framework)
    name = LAUNCHED_AS.get(name, name)
    return name if name in ABILITIES else ""


def ability(framework: str) -> Ability:
    """What `framework` can run.

    Raises:
        UnknownNameError: no such row.
    """
    name = launched_as(framework)
    if not name:
        raise unknown("framework", framework, sorted({*ABILITIES, *LAUNCHED_AS, ANY}))
    return ABILITIES[name]


def limit_of(asked: str | None, framework: str) -> str | None:
    """The framework that bounds a space; none = nothing does.

    Args:
        asked: what the user wants: a framework, "any", or none = the scenario's own `framework`, where its limits are known.

    Raises:
        UnknownNameError: `asked` is no framework whose limits are known.
    """
    if asked == ANY:
        return None
    if asked is not None:
        ability(asked)
        return asked
    return framework if launched_as(framework) else None


__all__ = ["ABILITIES", "ANY", "Ability", "ability", "launched_as", "limit_of"]
