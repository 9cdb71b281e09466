"""Megatron-LM: a scenario as command-line flags and the scripts that start it.

Flags as in megatron/training/arguments.py, core 0.12 to 0.19. `megatron_import.py` reads them back; what it would not read back
with the same meaning is refused here.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from simpar.errors import InputError, Violation
from simpar.interop import megatron_hybrid
from simpar.interop.argv import options
from simpar.interop.carried import carried
from simpar.interop.launch import beside, gpu_violations, torchrun, work_violations
from simpar.interop.meaning import data_ranks, meaning, recompute_of, schedule_name
from simpar.interop.megatron_hybrid import chunk_differs, hybrid_flags
from simpar.interop.megatron_import import CP_STYLES, read_options
from simpar.interop.megatron_layout import layout_text
from simpar.interop.megatron_model import model_flags, vocabulary_flags
from simpar.specs.architecture import ArchitectureSpec, TokenModel
from simpar.specs.framework_releases import month_of
from simpar.specs.model import TransformerSpec
from simpar.specs.optimizers import KINDS
from simpar.specs.scenario import Scenario

PRECISION = {
    "bf16": ["--bf16"],
    "fp16": ["--fp16"],
    "fp8": ["--bf16", "--fp8-format hybrid"],
    "fp8-block": ["--bf16", "--fp8-format e4m3", "--fp8-recipe blockwise"],
    "mxfp8": ["--bf16", "--fp8-format e4m3", "--fp8-recipe mxfp8"],
    "nvfp4": ["--bf16", "--fp4-format e2m1", "--fp4-recipe nvfp4"],
    "fp32": [],
}
_OPTIMIZERS = {
    "adamw": ["--optimizer adam"],
    "adam": ["--optimizer adam"],
    "adamw-bf16-moments": [
        "--optimizer adam",
        "--use-precision-aware-optimizer",
        "--exp-avg-dtype bf16",
        "--exp-avg-sq-dtype bf16",
    ],
    "sgd": ["--optimizer sgd", "--sgd-momentum 0.0"],
    "sgd-momentum": ["--optimizer sgd", "--sgd-momentum 0.9"],
    "muon": ["--optimizer muon"],
    "soap": ["--optimizer soap"],
}
_BACKENDS = {"fa1": "flash", "fa2": "flash", "fa3": "flash", "cudnn": "fused", "unfused": "unfused"}
_DISPATCHERS = {
    "alltoall": ["--moe-token-dispatcher-type alltoall"],
    "allgather": ["--moe-token-dispatcher-type allgather"],
    "deepep": ["--moe-token-dispatcher-type flex", "--moe-enable-deepep"],
    "hybridep": ["--moe-token-dispatcher-type flex", "--moe-flex-dispatcher-backend hybridep"],
}
_SCHEDULES = ("1f1b", "interleaved")
_NO_TE_LOSS = (2026, 6)
"""Since then arguments.py refuses TransformerEngine's cross-entropy (core 0.19)."""
_RUN = ("--mock-data", "--train-iters 50", "--lr 1e-4", "--log-interval 1", "--log-throughput", "--eval-iters 0")


def violations(scenario: Scenario) -> list[Violation]:
    """What of a scenario Megatron-LM refuses to run, as far as its flags could say it."""
    if not isinstance(scenario.model, TokenModel):
        return [Violation("model", scenario.model.kind, "Megatron-LM trains transformers", "a model of kind transformer or layers")]
    found = [*gpu_violations(scenario, "Megatron-LM"), *work_violations(scenario, "Megatron-LM"), *_plan_rules(scenario)]
    found += [*_expert_rules(scenario), *_training_rules(scenario)]
    if isinstance(scenario.model, ArchitectureSpec):
        return [*found, *megatron_hybrid.violations(scenario, scenario.model)]
    reach = scenario.model.max_position_embeddings
    if scenario.model.position == "learned" and reach < scenario.training.sequence_length:
        rule = "longer than the positions that the model learns (max_position_embeddings)"
        found.append(Violation("training.sequence_length", scenario.training.sequence_length, rule, f"at most {reach}"))
    if scenario.model.num_nextn_predict_layers and scenario.model.position not in ("rope", "none"):
        rule = "multi-token prediction of Megatron-LM needs rotary positions"
        found.append(Violation("model.position", scenario.model.position, rule, "rope or none"))
    return found


def _plan_rules(scenario: Scenario) -> Iterator[Violation]:
    plan, means = scenario.plan, meaning(scenario)
    if schedule_name(scenario) not in _SCHEDULES:
        right = "1f1b, or interleaved with virtual_stages of at least 2"
        yield Violation("plan.schedule", plan.schedule, "Megatron-LM has no such schedule", right)
    elif schedule_name(scenario) == "interleaved" and plan.virtual_stages == 1:
        yield Violation("plan.virtual_stages", 1, "Megatron-LM interleaves model chunks", "at least 2, or 1f1b")
    if plan.overlap_tp and plan.tp > 1 and not plan.sequence_parallel:
        yield Violation("plan.overlap_tp", True, "overlaps the collectives of sequence parallelism", "sequence_parallel = true")
    if plan.cp > 1 and scenario.training.sequence_length % (2 * plan.cp):
        rule = f"Megatron-LM cuts the {scenario.training.sequence_length} tokens into 2 x cp pieces"
        yield Violation("plan.cp", plan.cp, rule, "a degree that divides half the sequence")
    if plan.zero_stage >= 2 and means["plan.overlap_grad_reduce"] is False:
        rule = "Megatron-FSDP reduces gradients while the backward runs (megatron_fsdp.py)"
        yield Violation("plan.overlap_grad_reduce", False, rule, "true, or zero_stage of at most 1")
    if means["plan.overlap_param_gather"] and not means["plan.overlap_grad_reduce"]:
        rule = "Megatron-LM overlaps the gather only where it overlaps the reduction"
        yield Violation("plan.overlap_param_gather", True, rule, "overlap_grad_reduce = true, or false")
    if plan.virtual_stages > 1 and means["plan.overlap_p2p"] is False and plan.pp == 2:
        rule = "without overlapped sends the interleaved schedule of Megatron-LM needs more than two stages"
        yield Violation("plan.overlap_p2p", plan.overlap_p2p, rule, "true, or plan.pp above 2")


def _expert_rules(scenario: Scenario) -> Iterator[Violation]:
    plan, precision = scenario.plan, scenario.training.precision
    if plan.ep > 1 and precision in ("fp16", "fp32"):
        right = "bf16 or an fp8 kind"
        yield Violation("training.precision", precision, "Megatron-LM runs expert parallelism in bf16 and fp8", right)
    if plan.overlap_ep and plan.ep > 1:
        if plan.pp > 1 and plan.virtual_stages == 1:
            rule = "with a pipeline Megatron-LM overlaps the expert exchange of two model chunks"
            yield Violation("plan.overlap_ep", True, rule, "virtual_stages of at least 2, or false")
        if recompute_of(scenario).granularity == "full":
            yield Violation(
                "plan.overlap_ep", True, "does not go with full recomputation in Megatron-LM", "recompute selective or none"
            )
    if plan.delay_wgrad and not (plan.overlap_ep and plan.ep > 1):
        rule = "Megatron-LM delays weight gradients only to overlap the expert exchange"
        yield Violation("plan.delay_wgrad", True, rule, "false, or overlap_ep = true with ep above 1")


def _training_rules(scenario: Scenario) -> Iterator[Violation]:
    plan, training = scenario.plan, scenario.training
    if training.precision not in PRECISION:
        right = f"one of {', '.join(PRECISION)}"
        yield Violation("training.precision", training.precision, "no flags of Megatron-LM say this", right)
    if training.optimizer not in _OPTIMIZERS:
        right = f"one of {', '.join(_OPTIMIZERS)}"
        yield Violation("training.optimizer", training.optimizer, "no flags of Megatron-LM say this", right)
    if (kernel := training.attention_kernel) in ("fa4", "flex", "efficient"):
        yield Violation("training.attention_kernel", kernel, "Megatron-LM has no such kernel", "auto, fa2, fa3, cudnn or unfused")
    if KINDS[training.optimizer].whole and plan.zero_stage > 1:
        rule = f"Megatron-LM's {training.optimizer} shards optimizer states at most (layer_wise_optimizer.py)"
        yield Violation("plan.zero_stage", plan.zero_stage, rule, "0 or 1, or optimizer = adamw")
    again = recompute_of(scenario)
    if again.every > 1:
        yield Violation("plan.recompute.every", again.every, "Megatron-LM recomputes the first layers of a stage or all", "1")
    if training.cuda_graphs and again.granularity == "full":
        yield Violation(
            "training.cuda_graphs", True, "does not go with full recomputation in Megatron-LM", "recompute selective or none"
        )


def parallel_flags(scenario: Scenario) -> list[str]:
    """Flags of the layout."""
    plan, means = scenario.plan, meaning(scenario)
    flags = [f"--tensor-model-parallel-size {plan.tp}"]
    if plan.sequence_parallel and plan.tp > 1:
        flags.append("--sequence-parallel")
    flags.append(f"--context-parallel-size {plan.cp}")
    if plan.cp > 1:
        flags.append(f"--cp-comm-type {CP_STYLES[plan.cp_style]}")
    flags.append(f"--pipeline-model-parallel-size {plan.pp}")
    flags += _stage_flags(scenario)
    group = means["plan.microbatch_group_size"]
    if group not in (None, plan.pp):
        flags.append(f"--microbatch-group-size-per-virtual-pipeline-stage {group}")
    if means["plan.overlap_p2p"] is False and plan.virtual_stages > 1:
        flags.append("--no-overlap-p2p-communication")
    if means["plan.etp"] is not None:
        flags += [f"--expert-model-parallel-size {plan.ep}", f"--expert-tensor-parallel-size {means['plan.etp']}"]
    if plan.ep > 1:
        flags += _DISPATCHERS[plan.ep_dispatcher]
        flags += ["--overlap-moe-expert-parallel-comm"] if plan.overlap_ep else []
        flags += ["--delay-wgrad-compute"] if plan.delay_wgrad else []
    if plan.overlap_tp and plan.tp > 1:
        flags.append("--tp-comm-overlap")
    return [*flags, *_state_flags(scenario), *_recompute_flags(scenario)]


def _stage_flags(scenario: Scenario) -> list[str]:
    if scenario.plan.pp == 1 or isinstance(scenario.model, ArchitectureSpec):
        return []
    text = layout_text(scenario)
    if text is not None:
        return [f'--pipeline-model-parallel-layout "{text}"']
    v = scenario.plan.virtual_stages
    return [f"--num-virtual-stages-per-pipeline-rank {v}"] if v > 1 else []


def _state_flags(scenario: Scenario) -> list[str]:
    plan, means = scenario.plan, meaning(scenario)
    flags: list[str] = []
    if plan.zero_stage == 1:
        flags.append("--use-distributed-optimizer")
    elif plan.zero_stage >= 2:
        strategy = "optim_grads" if plan.zero_stage == 2 else "optim_grads_params"
        flags += ["--use-distributed-optimizer", "--use-megatron-fsdp", f"--data-parallel-sharding-strategy {strategy}"]
        flags.append("--ckpt-format fsdp_dtensor")
    instances = data_ranks(scenario) // (means["plan.shard_size"] or data_ranks(scenario))
    if instances > 1:
        flags.append(f"--num-distributed-optimizer-instances {instances}")
    if means["plan.overlap_grad_reduce"]:
        flags.append("--overlap-grad-reduce")
    # Megatron-FSDP gathers parameters ahead only where it is told to (megatron_fsdp.py; forced since 2026).
    if means["plan.overlap_param_gather"] or (plan.zero_stage == 3 and means["plan.overlap_grad_reduce"]):
        flags.append("--overlap-param-gather")
    if plan.offload.optimizer:
        flags += ["--optimizer-cpu-offload", "--optimizer-offload-fraction 1.0"]
        # The hybrid device optimizer reuses the code of the precision-aware one.
        flags += [] if scenario.training.optimizer == "adamw-bf16-moments" else ["--use-precision-aware-optimizer"]
    order = means["plan.placement"]
    if {"pp", "dp"} <= {*order} and order.index("pp") < order.index("dp"):
        flags.append("--use-tp-pp-dp-mapping")
    return flags


def _recompute_flags(scenario: Scenario) -> list[str]:
    spec = recompute_of(scenario)
    if spec.granularity == "none":
        return []
    if spec.granularity == "selective":
        return ["--recompute-granularity selective", "--recompute-modules " + " ".join(spec.modules)]
    if spec.num_layers is not None:
        return ["--recompute-granularity full", "--recompute-method block", f"--recompute-num-layers {spec.num_layers}"]
    return ["--recompute-granularity full", "--recompute-method uniform", f"--recompute-num-layers {spec.uniform_layers}"]


def training_flags(scenario: Scenario) -> list[str]:
    """Flags of the training step."""
    t, gradient = scenario.training, meaning(scenario)["training.gradient_dtype"]
    flags = [
        f"--seq-length {t.sequence_length}",
        f"--micro-batch-size {t.micro_batch_size}",
        f"--global-batch-size {t.global_batch_size}",
        *PRECISION.get(t.precision, []),
        *_OPTIMIZERS.get(t.optimizer, []),
    ]
    if gradient == "bf16":
        flags.append("--grad-reduce-in-bf16")
    elif gradient == "fp32" and t.precision != "fp32":
        flags.append("--accumulate-allreduce-grads-in-fp32")
    flags += [f"--{where}-dropout {t.dropout or 0.0}" for where in ("attention", "hidden")]
    if t.cuda_graphs and t.cuda_graph_scope == "attention":
        flags += ["--cuda-graph-impl transformer_engine", "--cuda-graph-scope attn"]
    elif t.cuda_graphs:
        flags.append("--enable-cuda-graph")
    if t.cross_entropy == "fused":
        te = month_of(scenario.framework, scenario.framework_version) < _NO_TE_LOSS
        flags += ["--cross-entropy-loss-fusion", f"--cross-entropy-fusion-impl {'te' if te else 'native'}"]
    if t.attention_kernel in _BACKENDS:
        flags.append(f"--attention-backend {_BACKENDS[t.attention_kernel]}")
    if t.routing.kind == "balanced" and getattr(scenario.model, "moe", None) is not None:
        flags.append("--moe-router-force-load-balancing")
    if t.routing.capacity_factor is not None:
        flags += [f"--moe-expert-capacity-factor {t.routing.capacity_factor}", "--moe-pad-expert-input-to-capacity"]
    return flags


def _flags_and_comments(scenario: Scenario) -> tuple[list[str], list[str]]:
    """The flags, and the comment lines that go with them.

    Raises:
        InputError: everything that Megatron-LM cannot run or its flags cannot say.
    """
    found, model, tp = violations(scenario), scenario.model, scenario.plan.tp
    unsaid: set[str] = set()
    if isinstance(model, TransformerSpec):
        sizes = model_flags(model, scenario.training.sequence_length, tp)
    elif isinstance(model, ArchitectureSpec) and not any(v.field.startswith("model") for v in found):
        sizes = [*hybrid_flags(model, scenario.training.sequence_length), *vocabulary_flags(model.vocab_size, tp)]
        unsaid = {"model.stacks"} if chunk_differs(model) else set()
    else:
        raise InputError(found)
    lines = [*parallel_flags(scenario), *training_flags(scenario), *sizes]
    reading = read_options(options(shlex.split(" ".join(lines))))
    return lines, carried(scenario, reading, "Megatron-LM", found, unsaid)


def flags(scenario: Scenario) -> list[str]:
    """All flags of a scenario, one "--name value" a line.

    Raises:
        InputError: everything that Megatron-LM cannot run or its flags cannot say.
    """
    return _flags_and_comments(scenario)[0]


def launch_script(scenario: Scenario) -> str:
    """The launch script, sh.

    Raises:
        InputError: everything that Megatron-LM cannot run or its flags cannot say.
    """
    lines, comments = _flags_and_comments(scenario)
    environment = ""
    if (scenario.plan.tp > 1 or scenario.plan.cp > 1) and scenario.plan.zero_stage < 2:
        # The order of kernels on the device is the order of launch, which the overlap of collectives relies on.
        environment = "export CUDA_DEVICE_MAX_CONNECTIONS=1\n"
    arguments = "ARGS=(\n" + "\n".join(f"    {line}" for line in lines) + "\n)\n"
    run = "# Data, length and learning rate of the run: yours.\nRUN=(" + " ".join(_RUN) + ")\n"
    program = "pretrain_mamba.py" if isinstance(scenario.model, ArchitectureSpec) else "pretrain_gpt.py"
    line = torchrun(scenario, program, '"${ARGS[@]}" "${RUN[@]}" "$@"')
    return "#!/bin/bash\n" + "\n".join(comments) + f"\nset -e\n{environment}\n{arguments}\n{run}\n{line}\n"


def export(scenario: Scenario) -> dict[str, str]:
    """File name -> text: a launch script, the Slurm script and the rank map.

    Raises:
        InputError: everything that Megatron-LM cannot run or its flags cannot say.
    """
    return {
        "megatron.sh": launch_script(scenario),
        **beside(scenario, "megatron"),
    }
