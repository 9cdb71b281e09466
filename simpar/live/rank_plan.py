"""What one rank of a layout runs, as plain data that a machine without simpar's dependencies can read (rank_worker.py).

The rank runs torch's own parallelism (FSDP2, DTensor, torch.distributed.pipelining), so the scenario is taken as torchtitan would
run it: what differs is changed and noted, what cannot be run is an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from simpar.errors import InputError, Violation
from simpar.parallel.layout import Layout
from simpar.specs.framework import framework
from simpar.specs.model import TransformerSpec
from simpar.specs.plan import RecomputeSpec
from simpar.specs.scenario import Scenario, make_scenario
from simpar.specs.training import RoutingSpec
from simpar.step import schedule_of

FORMAT: Final = 1
FRAMEWORK, VERSION = "torchtitan", "2026-02"
"""Semantics of the prediction: whole unfused loss, FSDP2, nothing compiled."""
SCHEDULES: Final = ("1f1b", "gpipe", "interleaved", "interleaved_1f1b", "interleaved_bfs", "interleaved_zb", "zb-v", "dualpipe-v")
"""Of torch.distributed.pipelining."""


@dataclass(frozen=True)
class RankPlan:
    """A rank to run.

    Attributes:
        scenario: as it is run.
        rank: global.
        table: what the worker reads.
        notes: what was changed.
    """

    scenario: Scenario
    rank: int
    table: dict[str, Any]
    notes: tuple[str, ...]

    @property
    def pipeline_rank(self) -> int:
        """Of this rank."""
        return int(self.table["coordinates"]["pp"])


def runnable(scenario: Scenario, layers: int | None = None, microbatches: int | None = None) -> tuple[Scenario, tuple[str, ...]]:
    """The scenario as torchtitan runs it, and what was changed.

    Args:
        layers: transformer layers per pipeline stage instead of the model's.
        microbatches: per step instead of the scenario's; in a pipeline at least as many as it has stages.

    Raises:
        InputError: something that the rank's torch model does not have.
    """
    found = _violations(scenario)
    if found:
        raise InputError(found)
    table = scenario.model_dump(exclude={"file", "published"})
    notes: list[str] = []
    if (scenario.framework, scenario.framework_version) != (FRAMEWORK, VERSION):
        notes.append(f"run and predicted as {FRAMEWORK} {VERSION}, not {scenario.framework}")
        table |= {"framework": FRAMEWORK, "framework_version": VERSION}
    model, plan, training = table["model"], table["plan"], table["training"]
    wanted = {"zero_stage": 3, "overlap_tp": False, "overlap_ep": False, "ep_dispatcher": "alltoall", "delay_wgrad": False}
    _change(plan, wanted, "plan", notes)
    precise = {"precision": "bf16", "compile": False, "cross_entropy": "auto", "attention_kernel": "auto", "cuda_graphs": False}
    _change(training, precise, "training", notes)
    if training["optimizer"] not in ("adamw", "none"):
        _change(training, {"optimizer": "adamw"}, "training", notes)
    if model.get("moe"):
        if scenario.training.routing not in (RoutingSpec(), RoutingSpec(kind="balanced")):
            notes.append(f"experts get even loads instead of training.routing {scenario.training.routing.kind!r}")
        training["routing"] = {"kind": "balanced"}  # a rank's worker deals tokens out evenly
    _change(model, {"num_nextn_predict_layers": 0}, "model", notes)
    stages = _stage_count(scenario)
    if layers is not None:
        notes.append(f"{layers} layers per stage instead of {model['num_hidden_layers']} in all")
        model["num_hidden_layers"] = layers * stages
        plan |= {"layers_per_stage": None, "first_stage_less_layers": 0, "last_stage_less_layers": 0}
    dp = Layout.of(scenario, stages).mesh.dp
    if microbatches is not None:
        # torch's schedules want as many micro-batches as there are stages.
        microbatches = max(microbatches, stages) if scenario.plan.pp > 1 else microbatches
        notes.append(f"{microbatches} micro-batches per step")
        training["global_batch_size"] = microbatches * training["micro_batch_size"] * dp
    model |= {"published_parameters": None, "published_as": ""}
    return make_scenario(table, file=scenario.file), tuple(notes)


def _change(table: dict[str, Any], wanted: dict[str, Any], prefix: str, notes: list[str]) -> None:
    for name, value in wanted.items():
        if table.get(name) != value:
            if table.get(name) is not None:
                notes.append(f"{prefix}.{name} = {value!r} instead of {table[name]!r}")
            table[name] = value


def _stage_count(scenario: Scenario) -> int:
    probe = Layout.of(scenario, 1)
    return schedule_of(scenario, probe.num_microbatches).stages_per_model


def _violations(scenario: Scenario) -> list[Violation]:
    """What the torch model of a rank does not have."""
    model, plan, file = scenario.model, scenario.plan, scenario.file
    if not isinstance(model, TransformerSpec):
        return [Violation("model.kind", model.kind, "only transformers are run", "choose a transformer", file)]
    split = plan.tp > 1
    recompute = plan.recompute if isinstance(plan.recompute, RecomputeSpec) else RecomputeSpec(granularity=plan.recompute)
    modules = set(recompute.modules or ("core_attn",)) if recompute.granularity == "selective" else set()
    rules = [
        ("model.num_decoder_layers", model.num_decoder_layers, model.num_decoder_layers > 0, "0"),
        ("model.norm", model.norm, model.norm != "rmsnorm", "rmsnorm"),
        ("model.position", model.position, model.position != "rope", "rope"),
        ("model.tie_word_embeddings", True, model.tie_word_embeddings, "false"),
        ("model.parallel_block", True, model.parallel_block, "false"),
        ("model.block_norms", model.block_norms, model.block_norms != 2, "2"),
        ("model.mlp_bias", True, model.mlp_bias, "false"),
        ("model.attention_out_bias", True, model.attention_out_bias, "false"),
        ("model.mla", "set", split and model.mla is not None, "tp = 1 with latent attention"),
        ("model.moe", "set", split and model.moe is not None, "tp = 1 with experts"),
        ("model.qk_norm", True, split and model.qk_norm, "tp = 1 with normalised queries"),
        ("model.moe.shared_expert_gate", True, bool(model.moe and model.moe.shared_expert_gate), "false"),
        ("plan.embedding_alone", True, plan.embedding_alone, "false"),
        ("plan.offload", "set", plan.offload.activations > 0 or plan.offload.optimizer, "none"),
        ("plan.etp", plan.etp, bool(model.moe) and (plan.etp or 1) > 1, "1"),
        ("plan.recompute.every", recompute.every, recompute.every > 1, "1"),
        ("plan.recompute.uniform_layers", recompute.uniform_layers, recompute.uniform_layers > 1, "1"),
        ("plan.recompute.modules", sorted(modules), bool(modules) and modules not in ({"op"}, {"core_attn"}), "op or core_attn"),
        ("training.trainable", scenario.training.trainable, scenario.training.trainable != "all", "all"),
        ("plan.schedule", plan.schedule, plan.pp > 1 and _schedule_name(scenario) not in SCHEDULES, ", ".join(SCHEDULES)),
    ]  # fmt: skip
    return [Violation(f, value, "is not run by validate rank", f"use {right}", file) for f, value, wrong, right in rules if wrong]


def _schedule_name(scenario: Scenario) -> str:
    own = framework(scenario.framework, scenario.framework_version).pipeline
    return own.named(scenario.plan.schedule, scenario.plan.pp, scenario.plan.virtual_stages)


def rank_plan(scenario: Scenario, rank: int, layers: int | None = None, microbatches: int | None = None) -> RankPlan:
    """The plan of one rank.

    Raises:
        InputError: no such rank, or something that is not run.
    """
    chosen, notes = runnable(scenario, layers, microbatches)
    probe = Layout.of(chosen, 1)
    schedule = schedule_of(chosen, probe.num_microbatches)
    layout = Layout.of(chosen, schedule.stages_per_model, schedule.replicas, ends_meet=schedule.ends_meet)
    mesh, plan, training, model = layout.mesh, layout.plan, layout.training, chosen.model
    if not 0 <= rank < mesh.world_size:
        right = f"choose 0 to {mesh.world_size - 1}"
        raise InputError([Violation("--rank", rank, f"the scenario has {mesh.world_size} ranks", right, chosen.file)])
    assert isinstance(model, TransformerSpec)
    at, shards = mesh.coordinates(rank), layout.shard_ranks
    held = [s for s, owner in enumerate(schedule.stage_to_rank) if owner == at["pp"]]
    recompute = plan.recompute if isinstance(plan.recompute, RecomputeSpec) else RecomputeSpec(granularity=plan.recompute)
    table = {
        "format": FORMAT, "name": chosen.name, "rank": rank, "scenario": chosen.model_dump(exclude={"file", "published"}),
        "notes": list(notes),
        "world": {"pp": plan.pp, "replicas": layout.data_ranks // shards, "shard": shards, "tp": plan.tp, "cp": plan.cp,
                  "ep": plan.ep if model.moe else 1},
        "coordinates": {"pp": at["pp"], "replica": mesh.index_in_group(rank, "replica", shards),
                        "shard": mesh.index_in_group(rank, "shard", shards), "tp": at["tp"]},
        "model": model.model_dump(exclude={"source"}),
        "vocab": layout.network.embedding.size("vocab") if layout.network.embedding else model.vocab_size,
        "stages": [_stage(layout, model, schedule.model_stage(s)) for s in held], "stage_indices": held,
        "num_stages": schedule.num_stages, "schedule": _schedule_name(chosen), "num_microbatches": layout.num_microbatches,
        "sequence_parallel": layout.degrees.sequence_parallel, "cp_style": plan.cp_style,
        "recompute": {"granularity": recompute.granularity, "num_layers": recompute.num_layers,
                      "modules": list(recompute.modules or (("core_attn",) if recompute.granularity == "selective" else ()))},
        "micro_batch_size": training.micro_batch_size, "sequence_length": training.sequence_length,
        "reduce_dtype": "fp32" if layout.state_bytes.reduce > 2 else "bf16", "optimizer": training.optimizer,
        "reshard_after_forward": plan.reshard_after_forward, "expandable_segments": layout.framework.allocator.expandable_segments,
    }  # fmt: skip
    return RankPlan(chosen, rank, table, notes)


def _stage(layout: Layout, model: TransformerSpec, index: int) -> dict[str, Any]:
    stage = layout.stages[index]
    moe = [model.is_moe_layer(stage.first + i) for i in range(stage.count)]
    return {"embedding": stage.embedding, "head": stage.head, "moe": moe}
