"""A scenario as Megatron-LM command line: model, layout, training, with the torchrun line. Flags of Megatron-LM core 0.20.

What Megatron-LM cannot run (schedules it lacks, sharding it lacks) is an error that says so, never left out silently.
"""

from __future__ import annotations

from simpar.errors import InputError, Violation
from simpar.specs.model import TransformerSpec
from simpar.specs.plan import PlanSpec, RecomputeSpec
from simpar.specs.scenario import Scenario

SCHEDULES = frozenset({"auto", "1f1b", "interleaved", "interleaved_1f1b"})
PLACEMENTS = {"tp-cp-ep-dp-pp": "", "tp-cp-ep-pp-dp": "--use-tp-pp-dp-mapping"}
CP_COMM = {"ring": "p2p", "all_gather": "all_gather", "ulysses": "a2a"}
_MODULES = frozenset({"core_attn", "layernorm", "mlp", "moe", "moe_act", "mla_up_proj", "shared_experts"})


def _problems(scenario: Scenario) -> list[Violation]:
    plan, found = scenario.plan, []
    if not isinstance(scenario.model, TransformerSpec):
        found.append(Violation("model", scenario.model.kind, "Megatron-LM trains transformers"))
    elif scenario.model.num_decoder_layers:
        count = scenario.model.num_decoder_layers
        found.append(Violation("model.num_decoder_layers", count, "the export knows decoder-only models"))
    if plan.schedule not in SCHEDULES:
        right = f"one of {', '.join(sorted(SCHEDULES))}"
        found.append(Violation("plan.schedule", plan.schedule, "Megatron-LM has no such schedule", right))
    if plan.zero_stage > 1:
        rule, right = "Megatron-LM's distributed optimizer is ZeRO-1", "0 or 1 (FSDP is another launch)"
        found.append(Violation("plan.zero_stage", plan.zero_stage, rule, right))
    if plan.placement not in PLACEMENTS:
        right = f"one of {', '.join(PLACEMENTS)}"
        found.append(Violation("plan.placement", plan.placement, "Megatron-LM has no such rank order", right))
    if plan.layers_per_stage and len(set(plan.layers_per_stage[1:-1])) > 1:
        found.append(Violation("plan.layers_per_stage", plan.layers_per_stage, "only the first and last stage may differ"))
    return found


def _model(model: TransformerSpec) -> list[str]:
    flags = [
        f"--num-layers {model.num_hidden_layers}", f"--hidden-size {model.hidden_size}",
        f"--ffn-hidden-size {model.intermediate_size}", f"--num-attention-heads {model.num_attention_heads}",
        f"--max-position-embeddings {model.max_position_embeddings}", f"--vocab-size {model.vocab_size}",
        f"--normalization {'RMSNorm' if model.norm == 'rmsnorm' else 'LayerNorm'}",
    ]  # fmt: skip
    if model.num_key_value_heads != model.num_attention_heads and model.mla is None:
        flags += ["--group-query-attention", f"--num-query-groups {model.num_key_value_heads}"]
    if model.head_dim * model.num_attention_heads != model.hidden_size and model.mla is None:
        flags.append(f"--kv-channels {model.head_dim}")
    flags.append({"rope": "--position-embedding-type rope", "learned": "--position-embedding-type learned_absolute"}.get(
        model.position, "--position-embedding-type none"))  # fmt: skip
    if model.gated_mlp:
        flags.append("--swiglu")
    elif model.activation == "squared_relu":
        flags.append("--squared-relu")
    if not (model.mlp_bias or model.attention_bias or model.attention_out_bias):
        flags.append("--disable-bias-linear")
    elif model.attention_bias and not model.mlp_bias:
        flags += ["--disable-bias-linear", "--add-qkv-bias"]
    if model.qk_norm:
        flags.append("--qk-layernorm")
    if not model.tie_word_embeddings:
        flags.append("--untie-embeddings-and-output-weights")
    if model.mla:
        a = model.mla
        flags += ["--multi-latent-attention", f"--kv-lora-rank {a.kv_lora_rank}", f"--qk-head-dim {a.qk_nope_head_dim}",
                  f"--qk-pos-emb-head-dim {a.qk_rope_head_dim}", f"--v-head-dim {a.v_head_dim}"]  # fmt: skip
        if a.q_lora_rank:
            flags.append(f"--q-lora-rank {a.q_lora_rank}")
    if model.num_nextn_predict_layers:
        flags.append(f"--mtp-num-layers {model.num_nextn_predict_layers}")
    return flags + _experts(model)


def _experts(model: TransformerSpec) -> list[str]:
    moe = model.moe
    if moe is None:
        return []
    flags = [f"--num-experts {moe.num_experts}", f"--moe-router-topk {moe.num_experts_per_tok}",
             f"--moe-ffn-hidden-size {moe.moe_intermediate_size}", "--moe-grouped-gemm"]  # fmt: skip
    if moe.shared_expert_intermediate_size:
        flags.append(f"--moe-shared-expert-intermediate-size {moe.shared_expert_intermediate_size}")
    pattern = [int(model.is_moe_layer(i)) for i in range(model.num_hidden_layers)]
    if not all(pattern):
        flags.append(f'--moe-layer-freq "{pattern}"')
    if moe.router_bias:
        flags.append("--moe-router-enable-expert-bias")
    if moe.n_group and moe.topk_group:
        flags += [f"--moe-router-num-groups {moe.n_group}", f"--moe-router-group-topk {moe.topk_group}"]
    return flags


def _recompute(plan: PlanSpec) -> list[str]:
    spec = plan.recompute if isinstance(plan.recompute, RecomputeSpec) else RecomputeSpec(granularity=plan.recompute)
    if spec.granularity == "none":
        return []
    if spec.granularity == "full":
        count = spec.num_layers if spec.num_layers is not None else spec.uniform_layers
        method = "block" if spec.num_layers is not None else spec.method
        return [f"--recompute-granularity full --recompute-method {method} --recompute-num-layers {count}"]
    modules = [m for m in (spec.modules or ("core_attn",)) if m in _MODULES]
    return ["--recompute-granularity selective", f"--recompute-modules {' '.join(modules)}"]


def _layout(scenario: Scenario) -> list[str]:
    plan = scenario.plan
    flags = [f"--tensor-model-parallel-size {plan.tp}", f"--pipeline-model-parallel-size {plan.pp}"]
    if plan.tp > 1 and plan.sequence_parallel:
        flags.append("--sequence-parallel")
    if plan.cp > 1:
        flags += [f"--context-parallel-size {plan.cp}", f"--cp-comm-type {CP_COMM[plan.cp_style]}"]
    if plan.virtual_stages > 1:
        flags.append(f"--num-virtual-stages-per-pipeline-rank {plan.virtual_stages}")
        if plan.microbatch_group_size:
            flags.append(f"--microbatch-group-size-per-virtual-pipeline-stage {plan.microbatch_group_size}")
    if plan.ep > 1:
        flags.append(f"--expert-model-parallel-size {plan.ep}")
        flags.append(f"--moe-token-dispatcher-type {'flex' if plan.ep_dispatcher == 'deepep' else 'alltoall'}")
        if plan.ep_dispatcher == "deepep":
            flags.append("--moe-enable-deepep")
    if plan.etp is not None and plan.etp != plan.tp:
        flags.append(f"--expert-tensor-parallel-size {plan.etp}")
    flags += _stages(plan)
    if PLACEMENTS[plan.placement]:
        flags.append(PLACEMENTS[plan.placement])
    if plan.zero_stage == 1:
        flags.append("--use-distributed-optimizer")
    for chosen, flag in (
        (plan.overlap_grad_reduce is not False, "--overlap-grad-reduce"),
        (plan.zero_stage == 1 and plan.overlap_param_gather is not False, "--overlap-param-gather"),
        (plan.overlap_tp, "--tp-comm-overlap"), (plan.overlap_ep, "--overlap-moe-expert-parallel-comm"),
        (plan.delay_wgrad, "--delay-wgrad-compute"),
    ):  # fmt: skip
        if chosen:
            flags.append(flag)
    return flags + _recompute(plan)


def _stages(plan: PlanSpec) -> list[str]:
    counts = plan.layers_per_stage
    if counts and len(set(counts)) > 1:
        return [f"--decoder-first-pipeline-num-layers {counts[0]}", f"--decoder-last-pipeline-num-layers {counts[-1]}"]
    flags = []
    if plan.first_stage_less_layers:
        flags.append("--account-for-embedding-in-pipeline-split")
    if plan.last_stage_less_layers:
        flags.append("--account-for-loss-in-pipeline-split")
    return flags


def _training(scenario: Scenario) -> list[str]:
    training = scenario.training
    flags = [
        f"--seq-length {training.sequence_length}", f"--micro-batch-size {training.micro_batch_size}",
        f"--global-batch-size {training.global_batch_size}", f"--attention-dropout {training.dropout:g}",
        f"--hidden-dropout {training.dropout:g}",
    ]  # fmt: skip
    if training.precision == "fp16":
        flags.append("--fp16")
    elif training.precision not in ("fp32", "tf32"):
        flags.append("--bf16")
    recipes = {"fp8": "tensorwise", "fp8-block": "blockwise", "mxfp8": "mxfp8"}
    if training.precision in recipes:
        flags.append(f"--fp8-format hybrid --fp8-recipe {recipes[training.precision]}")
    if training.precision == "nvfp4":
        flags.append("--fp4-format e2m1 --fp4-recipe nvfp4")
    if training.gradient_dtype == "bf16":
        flags.append("--grad-reduce-in-bf16")
    flags.append({"sgd": "--optimizer sgd", "sgd-momentum": "--optimizer sgd"}.get(training.optimizer, "--optimizer adam"))
    if training.cuda_graphs:
        flags.append("--enable-cuda-graph")
    return flags


def flags(scenario: Scenario) -> list[str]:
    """Megatron-LM flags of a scenario.

    Raises:
        InputError: what Megatron-LM cannot run, all together.
    """
    found = _problems(scenario)
    if found:
        raise InputError(found)
    assert isinstance(scenario.model, TransformerSpec)
    return [*_layout(scenario), *_model(scenario.model), *_training(scenario)]


def launch_script(scenario: Scenario) -> str:
    """A shell script: torchrun on every node, then the flags. Data, tokenizer and learning rate are the user's ("$@").

    Raises:
        InputError: what Megatron-LM cannot run.
    """
    gpus = scenario.hardware.gpus_per_node
    nodes = max(-(-scenario.world_size // gpus), 1)
    lines = [
        "#!/usr/bin/env bash",
        f"# {scenario.name}: {scenario.world_size} GPUs, written by simpar. Add data, tokenizer and learning rate as arguments.",
        f"# Rank order, fastest first: {scenario.plan.placement}",
        "set -euo pipefail",
        "export CUDA_DEVICE_MAX_CONNECTIONS=1",
        f"torchrun --nnodes {nodes} --nproc-per-node {min(gpus, scenario.world_size)} \\",
        '  --rdzv-backend c10d --rdzv-endpoint "${MASTER_ADDR:?}:${MASTER_PORT:-29500}" pretrain_gpt.py \\',
        *(f"  {flag} \\" for flag in flags(scenario)),
        '  "$@"',
    ]
    return "\n".join(lines) + "\n"
