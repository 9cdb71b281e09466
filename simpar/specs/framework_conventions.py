"""What the published runs of a framework do that do not say, and which options it has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from simpar.specs.framework_policies import Policy
from simpar.specs.framework_words import Ability, Recompute


@dataclass(frozen=True, slots=True)
class Conventions(Policy):
    """What its runs do that do not say, and which options it has.

    Attributes:
        abilities: options of specs/framework_options.py that the framework has.
        dropout: default dropout of the framework's era (GPT-3 style pre-training: 0.1).
        model_dropout: runs that do not say have the dropout that the model's file states, as the model's own code runs.
        no_mtp: the model's code is without its modules for multi-token prediction.
        recompute_default: recomputation used where a run does not say (Megatron's 2021-2022 scripts checkpoint every layer).
        selective_recompute: modules that are recomputed where a run says "selective" and no more.
        vocabulary_multiple: words on a tensor rank are rounded up to a multiple of this (Megatron-LM
            --make-vocab-size-divisible-by); 0: what does not divide over the ranks is left out.
        rank_order: dimensions of the ranks, the fastest first, where a published run does not say; "" = the plan's default.
        ep_dispatcher: how tokens reach their experts where a published run does not say.
        graphed_exchange: the same where graphs hold whole iterations, then beside computation; "" = as elsewhere.
        recipes_route_freely: its pre-training recipes leave an untrained router to itself.
        balances_in_turn: a forced balance deals experts in turn, so that a token's are consecutive; False: at random.
        only_cp_style: the one style of context parallelism there is, whatever a run calls it; "" = as the run says.
        adapter_cp_style: context parallelism of fine-tuning with low-rank adapters, of runs that do not say theirs.
        expert_virtual_stages: of pipelined runs with experts that do not say theirs: one, or the middle one of the divisors of a
            stage's layers.
        microbatch_per_stage: a local batch is split into one micro-batch per pipeline rank where a run does not say.
        sequence_parallel_default: tensor parallelism splits the sequence too where a run does not say.
        graphed_machines: profiles on which layers run from CUDA graphs where a run does not say.
        bf16_shards_states: what runs in bf16 call stage 0 shards the optimizer's states, as stage 1 does.
    """

    abilities: tuple[Ability, ...] = ()
    dropout: float = 0.0
    model_dropout: bool = False
    no_mtp: bool = False
    recompute_default: Recompute = "none"
    selective_recompute: tuple[str, ...] = ("core_attn",)
    vocabulary_multiple: int = 1
    rank_order: str = ""
    ep_dispatcher: Literal["alltoall", "deepep", "hybridep"] = "alltoall"
    graphed_exchange: Literal["", "deepep", "hybridep"] = ""
    recipes_route_freely: bool = False
    balances_in_turn: bool = False
    only_cp_style: Literal["", "ring", "all_gather", "ulysses"] = ""
    adapter_cp_style: Literal["ring", "ulysses"] = "ring"
    expert_virtual_stages: Literal["one", "middle"] = "one"
    microbatch_per_stage: bool = False
    sequence_parallel_default: bool = False
    graphed_machines: tuple[str, ...] = ()
    bf16_shards_states: bool = False
