"""One run as a row of the evidence's schema: what a scenario says in the columns, what a log measured in the figures.

The columns are read back by `evidence.run_rows`; what they cannot say of the scenario travels as a table beside them, so that the
row is predicted with the very scenario it was read for.
"""

from __future__ import annotations

from typing import Any, Final

from simpar.errors import SimparError
from simpar.evidence.row_complete import model_columns
from simpar.evidence.row_machine import MACHINES, CannotExpress, chip_name, machine_of
from simpar.evidence.run_rows import run_of
from simpar.graph.types import GELUS
from simpar.interop.meaning import meaning, schedule_name, stage_counts
from simpar.interop.scenario_text import scenario_table
from simpar.specs.counts import microbatches, resolved_dp, resolved_etp
from simpar.specs.model import TransformerSpec
from simpar.specs.scenario import Scenario

_FSDP: Final = {True: "full shard", False: "full shard, not reshard after forward"}
_OPTIMIZERS: Final = {
    "adamw-bf16-moments": "AdamW, bf16 moments", "adamw-8bit": "AdamW 8-bit", "adamw-8bit-paged": "paged AdamW 8-bit",
    "adamw-fused": "fused AdamW", "adamw-foreach": "AdamW (foreach)", "adamw-4bit": "AdamW 4-bit", "sgd-momentum": "SGD momentum",
}  # fmt: skip
_PRECISIONS: Final = {"fp8-block": "fp8 block scaling", "fp8-rowwise": "fp8 rowwise"}
_LOSSES: Final = {"linear": "fused linear cross-entropy", "fused": "cross-entropy fusion on", "chunked": "chunked cross-entropy"}


def columns_of(scenario: Scenario) -> dict[str, Any]:
    """The columns that say `scenario`, as far as the schema has words for it."""
    found = {**_machine(scenario), **_plan(scenario), **_training(scenario)}
    if isinstance(scenario.model, TransformerSpec):
        found |= _model(scenario.model)
    found["framework"] = scenario.framework
    if scenario.framework_version:
        found["framework_version"] = scenario.framework_version
    return {name: value for name, value in found.items() if value is not None}


def with_scenario(columns: dict[str, Any], scenario: Scenario) -> dict[str, Any]:
    """`columns`, with the scenario's table under `scenario` where reading them back would give another one."""
    again = run_of({**columns, "step_time_s": 1.0}).scenario
    try:
        same = again is not None and again.hardware == scenario.hardware and meaning(again) == meaning(scenario)
    except SimparError:
        same = False
    return columns if same else {**columns, "scenario": scenario_table(scenario)}


def _machine(scenario: Scenario) -> dict[str, Any]:
    hardware, gpus = scenario.hardware, scenario.world_size
    found: dict[str, Any] = {
        "gpu": chip_name(hardware.gpu.name), "n_gpus": gpus, "gpus_per_node": min(hardware.gpus_per_node, gpus),
    }  # fmt: skip
    for rule in MACHINES:
        if rule.profile != scenario.cluster.hardware:
            continue
        memory = round(hardware.gpu.memory.value / 2**30)
        row = {**found, "gpu": rule.gpu.split(".*")[0].replace("[- ]?", "-"), "gpu_mem_gb": memory}
        try:
            if machine_of(row)[0]["hardware"] == rule.profile:
                return row
        except CannotExpress:
            continue
    return found


def _model(model: TransformerSpec) -> dict[str, Any]:
    plain = "gelu" if model.activation in GELUS else model.activation
    mlp = "swiglu" if model.gated_mlp and model.activation == "silu" else "geglu" if model.gated_mlp else plain
    arch = "moe-mla" if model.moe and model.mla else "moe" if model.moe else "dense"
    return {
        **model_columns(model), "model_name": model.name, "arch": arch, "mlp_type": mlp, "attn_window": model.sliding_window,
        "mtp_layers": model.num_nextn_predict_layers or None,
    }  # fmt: skip


def _plan(scenario: Scenario) -> dict[str, Any]:
    plan, means = scenario.plan, meaning(scenario)
    recompute, detail = plan.recompute, None
    if not isinstance(recompute, str):
        detail = ", ".join(recompute.modules) or None
        recompute = recompute.granularity
    counts = stage_counts(scenario)
    off = [w for w, on in (("optimizer", plan.offload.optimizer), ("parameters", plan.offload.parameters),
                           ("activations", plan.offload.activations > 0)) if on]  # fmt: skip
    shards = means["plan.shard_size"]
    return {
        "tp": plan.tp, "sp": plan.sequence_parallel and plan.tp > 1, "pp": plan.pp, "vpp": plan.virtual_stages, "cp": plan.cp,
        "cp_type": {"ring": "p2p", "ulysses": "a2a", "all_gather": "all_gather"}[plan.cp_style] if plan.cp > 1 else None,
        "ep": plan.ep, "etp": resolved_etp(plan) if plan.ep > 1 else None, "dp": resolved_dp(scenario),
        "zero_stage": plan.zero_stage, "dist_opt": plan.zero_stage == 1,
        "fsdp": _FSDP[plan.reshard_after_forward] if plan.zero_stage == 3 else None,
        "hsdp_replicas": resolved_dp(scenario) * plan.cp // shards if shards and shards < resolved_dp(scenario) * plan.cp else None,
        "pp_schedule": schedule_name(scenario) if plan.pp > 1 else None,
        "pp_layout": "|".join("t" * n for n in counts) if len(set(counts)) > 1 else None,
        "recompute": recompute, "recompute_detail": detail, "offload": ", ".join(off) or "none",
        "overlap_grad_reduce": plan.overlap_grad_reduce, "overlap_param_gather": plan.overlap_param_gather,
        "overlap_tp": plan.overlap_tp, "overlap_p2p": plan.overlap_p2p, "overlap_ep": plan.overlap_ep,
    }  # fmt: skip


def _training(scenario: Scenario) -> dict[str, Any]:
    t = scenario.training
    lora = f"lora rank {t.lora_rank}" + {"all": ", all linear", "qv": ", q and v", "mlp": ", MLP alone"}.get(t.lora_modules, "")
    routing = t.routing
    words = {"balanced": "force-balanced", "lognormal": "natural"}.get(routing.kind, routing.kind)
    if routing.in_turn:
        words += ", in turn"
    if routing.capacity_factor:
        words += f", capacity factor {routing.capacity_factor:g}"
    if scenario.plan.ep > 1 and scenario.plan.ep_dispatcher != "alltoall":
        words += f", {scenario.plan.ep_dispatcher}"
    moe = isinstance(scenario.model, TransformerSpec) and scenario.model.moe is not None
    return {
        "task": lora if t.trainable == "lora" else "pretrain",
        "seq_len": t.sequence_length, "micro_batch": t.micro_batch_size, "global_batch": t.global_batch_size,
        "document_tokens": t.document_lengths[0] if len(set(t.document_lengths)) == 1 else list(t.document_lengths) or None,
        "grad_accum": microbatches(scenario),
        "precision": "pure bf16" if t.pure_bf16 else _PRECISIONS.get(t.precision, t.precision),
        "grad_dtype": t.gradient_dtype, "optimizer": _OPTIMIZERS.get(t.optimizer, t.optimizer),
        "compile": t.compile, "cuda_graphs": "full" if t.cuda_graphs else "none",
        "flash_attention": None if t.attention_kernel == "auto" else t.attention_kernel != "unfused",
        "moe_routing": words if moe else None,
        "notes": "; ".join(w for w in (_LOSSES.get(t.cross_entropy, ""), "Liger kernels" if t.fused_kernels else "") if w) or None,
    }  # fmt: skip
