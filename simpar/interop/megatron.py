"""Megatron-LM: a scenario as command-line flags, and a launch script read back into a scenario.

Flags as in megatron/training/arguments.py (core 0.12 to 0.15). Some facts are not among a run's flags (hardware, optional
framework settings); they travel in comment lines that start with "# simpar:", and options take their place for foreign scripts.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from simpar.errors import InputError, Violation
from simpar.interop.launch import rank_map, sbatch, torchrun
from simpar.interop.megatron_layout import layers_from_layout, layout_text
from simpar.interop.megatron_model import model_flags, model_from_flags
from simpar.interop.shell import options, read_script
from simpar.specs.model import TransformerSpec
from simpar.specs.plan import RecomputeSpec
from simpar.specs.scenario import Scenario

CP_STYLES = {"ring": "p2p", "all_gather": "all_gather", "ulysses": "a2a"}
MODULES = {"core_attn", "layernorm", "mlp", "moe", "moe_act", "mla_up_proj", "shared_experts"}
_PRECISION = {
    "bf16": ["--bf16"],
    "fp16": ["--fp16"],
    "fp8": ["--bf16", "--fp8-format hybrid"],
    "fp8-block": ["--bf16", "--fp8-format e4m3", "--fp8-recipe blockwise"],
    "mxfp8": ["--bf16", "--fp8-format e4m3", "--fp8-recipe mxfp8"],
    "fp32": [],
}
_OPTIMIZERS = {"adamw": "adam", "adamw-bf16-moments": "adam", "adam": "adam", "sgd": "sgd", "muon": "muon"}
_SCHEDULES = ("1f1b", "interleaved", "auto")
_HINT = re.compile(r"^#\s*simpar:\s*(\S+)\s*=\s*(.*?)\s*$", re.M)


def violations(scenario: Scenario) -> list[Violation]:
    """What of a scenario Megatron-LM cannot run."""
    plan, training, found = scenario.plan, scenario.training, []
    if scenario.model.kind != "transformer":
        found.append(Violation("model", scenario.model.kind, "Megatron-LM trains transformers", "a transformer"))
    if plan.schedule not in _SCHEDULES:
        found.append(Violation("plan.schedule", plan.schedule, "Megatron-LM has no such schedule", "1f1b or interleaved"))
    if training.precision not in _PRECISION:
        right = f"one of {', '.join(_PRECISION)}"
        found.append(Violation("training.precision", training.precision, "no flags of Megatron-LM say this", right))
    if training.optimizer not in _OPTIMIZERS:
        found.append(Violation("training.optimizer", training.optimizer, "no flags say this", f"one of {', '.join(_OPTIMIZERS)}"))
    if plan.placement not in ("tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"):
        right = "tp-cp-ep-dp-pp or tp-cp-ep-pp-dp"
        found.append(Violation("plan.placement", plan.placement, "Megatron-LM places ranks in two orders", right))
    if isinstance(plan.recompute, RecomputeSpec) and (wrong := set(plan.recompute.modules) - MODULES):
        found.append(Violation("plan.recompute.modules", sorted(wrong), "no such module", f"of {', '.join(sorted(MODULES))}"))
    if plan.offload.activations:
        found.append(Violation("plan.offload.activations", plan.offload.activations, "no flag says this fraction", "0"))
    return found


def parallel_flags(scenario: Scenario) -> list[str]:
    """Flags of the layout."""
    plan = scenario.plan
    flags = [f"--tensor-model-parallel-size {plan.tp}"]
    if plan.sequence_parallel and plan.tp > 1:
        flags.append("--sequence-parallel")
    flags.append(f"--context-parallel-size {plan.cp}")
    if plan.cp > 1:
        flags.append(f"--cp-comm-type {CP_STYLES[plan.cp_style]}")
    flags.append(f"--pipeline-model-parallel-size {plan.pp}")
    flags += _stage_flags(scenario)
    if plan.microbatch_group_size:
        flags.append(f"--microbatch-group-size-per-virtual-pipeline-stage {plan.microbatch_group_size}")
    if plan.overlap_p2p is False:
        flags.append("--no-overlap-p2p-communication")
    if plan.ep > 1:
        flags += [f"--expert-model-parallel-size {plan.ep}", f"--expert-tensor-parallel-size {plan.etp or 1}"]
        deepep = plan.ep_dispatcher == "deepep"
        flags += ["--moe-token-dispatcher-type flex", "--moe-enable-deepep"] if deepep else ["--moe-token-dispatcher-type alltoall"]
        flags += ["--overlap-moe-expert-parallel-comm"] if plan.overlap_ep else []
        flags += ["--delay-wgrad-compute"] if plan.delay_wgrad else []
    if plan.overlap_tp:
        flags.append("--tp-comm-overlap")
    return [*flags, *_state_flags(scenario), *_recompute_flags(plan.recompute)]


def _stage_flags(scenario: Scenario) -> list[str]:
    text = layout_text(scenario)
    if text is not None:
        return [f'--pipeline-model-parallel-layout "{text}"']
    v = scenario.plan.virtual_stages
    return [f"--num-virtual-stages-per-pipeline-rank {v}"] if v > 1 else []


def _state_flags(scenario: Scenario) -> list[str]:
    plan = scenario.plan
    flags: list[str] = []
    if plan.zero_stage == 1:
        flags.append("--use-distributed-optimizer")
    elif plan.zero_stage >= 2:
        strategy = "optim_grads" if plan.zero_stage == 2 else "optim_grads_params"
        flags += ["--use-distributed-optimizer", "--use-megatron-fsdp", f"--data-parallel-sharding-strategy {strategy}"]
    if plan.shard_size:
        ranks = (plan.dp or scenario.world_size // (plan.tp * plan.cp * plan.pp)) * plan.cp
        flags.append(f"--num-distributed-optimizer-instances {ranks // plan.shard_size}")
    if plan.overlap_grad_reduce is not False:
        flags.append("--overlap-grad-reduce")
    if plan.overlap_param_gather is not False and plan.zero_stage:
        flags.append("--overlap-param-gather")
    if plan.offload.optimizer:
        flags += ["--optimizer-cpu-offload", "--optimizer-offload-fraction 1.0"]
    if plan.placement == "tp-cp-ep-pp-dp":
        flags.append("--use-tp-pp-dp-mapping")
    return flags


def _recompute_flags(value: str | RecomputeSpec) -> list[str]:
    spec = RecomputeSpec(granularity=value) if isinstance(value, str) else value
    if spec.granularity == "none":
        return []
    if spec.granularity == "selective":
        modules = spec.modules or ("core_attn",)
        return ["--recompute-granularity selective", "--recompute-modules " + " ".join(modules)]
    if spec.num_layers is not None:
        return ["--recompute-granularity full", "--recompute-method block", f"--recompute-num-layers {spec.num_layers}"]
    return ["--recompute-granularity full", "--recompute-method uniform", f"--recompute-num-layers {spec.uniform_layers}"]


def training_flags(scenario: Scenario) -> list[str]:
    """Flags of the training step."""
    t = scenario.training
    flags = [
        f"--seq-length {t.sequence_length}",
        f"--micro-batch-size {t.micro_batch_size}",
        f"--global-batch-size {t.global_batch_size}",
        *_PRECISION[t.precision],
        f"--optimizer {_OPTIMIZERS[t.optimizer]}",
    ]
    if t.optimizer == "adamw-bf16-moments":
        flags += ["--use-precision-aware-optimizer", "--exp-avg-dtype bf16", "--exp-avg-sq-dtype bf16"]
    if t.gradient_dtype in ("bf16", "fp16"):
        flags.append("--grad-reduce-in-bf16")
    elif t.gradient_dtype == "fp32":
        flags.append("--accumulate-allreduce-grads-in-fp32")
    flags += [f"--attention-dropout {t.dropout}", f"--hidden-dropout {t.dropout}"]
    if t.cuda_graphs:
        flags.append("--enable-cuda-graph")
    if t.cross_entropy == "fused":
        flags.append("--cross-entropy-loss-fusion")
    if t.attention_kernel in ("cudnn", "fa2", "fa3"):
        flags.append(f"--attention-backend {'fused' if t.attention_kernel == 'cudnn' else 'flash'}")
    return flags


def flags(scenario: Scenario) -> list[str]:
    """All flags of a scenario, one "--name value" a line.

    Raises:
        InputError: everything that Megatron-LM cannot run.
    """
    if found := violations(scenario):
        raise InputError(found)
    assert isinstance(scenario.model, TransformerSpec)
    return [*parallel_flags(scenario), *training_flags(scenario), *model_flags(scenario.model)]


def launch_script(scenario: Scenario) -> str:
    """The launch script, sh.

    Raises:
        InputError: everything that Megatron-LM cannot run.
    """
    lines = flags(scenario)
    hints = {
        "name": scenario.name,
        "hardware": scenario.cluster.hardware,
        "num_nodes": scenario.cluster.num_nodes,
        "num_gpus": scenario.cluster.num_gpus,
        "framework": scenario.framework,
        "framework_version": scenario.framework_version,
        "optimizer": scenario.training.optimizer,
        "attention_kernel": scenario.training.attention_kernel,
        "overlap_grad_reduce": scenario.plan.overlap_grad_reduce,
        "overlap_param_gather": scenario.plan.overlap_param_gather,
        "overlap_p2p": scenario.plan.overlap_p2p,
    }
    comments = "\n".join(f"# simpar: {k} = {v}" for k, v in hints.items() if v is not None)
    arguments = "ARGS=(\n" + "\n".join(f"    {line}" for line in lines) + "\n)\n"
    line = torchrun(scenario, "pretrain_gpt.py", '"${ARGS[@]}" "$@"')
    return f"#!/bin/bash\n{comments}\nset -e\n\n{arguments}\n{line}\n"


def export(scenario: Scenario) -> dict[str, str]:
    """File name -> text: a launch script, the Slurm script and the rank map.

    Raises:
        InputError: everything that Megatron-LM cannot run.
    """
    return {
        "megatron.sh": launch_script(scenario),
        "megatron.sbatch": sbatch(scenario, "bash megatron.sh", "megatron"),
        "rank_map.csv": rank_map(scenario),
    }


# -- import --------------------------------------------------------------------------------------------------------------


def load(text: str, *, file: str = "", hardware: str | None = None, num_nodes: int | None = None) -> dict[str, Any]:
    """The raw scenario table of a launch script.

    Args:
        text: of the script.
        hardware, num_nodes: where the script does not say.

    Raises:
        InputError: no command with Megatron flags, a value that is no number, or no hardware; all together.
    """
    script = read_script(text, file)
    words = script.flags()
    flags = options(words)
    hints = dict(_HINT.findall(text))
    if "tensor-model-parallel-size" not in flags and "num-layers" not in flags:
        raise InputError([Violation("script", file or "-", "has no command with Megatron-LM flags", "such as --num-layers 32")])
    reader = _Flags(flags, file)
    hardware = hardware or hints.get("hardware")
    nodes = num_nodes or _count(hints.get("num_nodes")) or _nodes(words, text)
    if hardware is None:
        reader.wrong.append(Violation("--hardware", None, "the script does not say what it runs on", "give a hardware profile"))
    if nodes is None:
        reader.wrong.append(
            Violation("--num-nodes", None, "the script does not say on how many nodes it runs", "give their number")
        )
    plan = _plan(reader, hints)
    model = model_from_flags(flags, reader.wrong, file)
    training = _training(reader, hints)
    if reader.wrong:
        raise InputError(reader.wrong)
    cluster: dict[str, Any] = {"hardware": hardware, "num_nodes": nodes}
    if gpus := _count(hints.get("num_gpus")):
        cluster["num_gpus"] = gpus
    layers = int(flags.get("num-layers", ["0"])[0] or 0)
    if "pipeline-model-parallel-layout" in flags:
        plan |= layers_from_layout(flags["pipeline-model-parallel-layout"][0], layers, plan["pp"])
    table: dict[str, Any] = {
        "name": hints.get("name", Path(file).stem if file else "imported"),
        "model": model,
        "framework": hints.get("framework", "megatron-core"),
    }
    if "framework_version" in hints:
        table["framework_version"] = hints["framework_version"]
    return {**table, "cluster": cluster, "plan": plan, "training": training}


class _Flags:
    def __init__(self, flags: dict[str, list[str]], file: str) -> None:
        self.flags, self.file = flags, file
        self.wrong: list[Violation] = []

    def on(self, name: str) -> bool:
        return name in self.flags

    def text(self, name: str, default: str = "") -> str:
        return self.flags[name][0] if self.flags.get(name) else default

    def number(self, name: str, default: int) -> int:
        value = self.text(name)
        if not value:
            return default
        try:
            return int(value)
        except ValueError:
            self.wrong.append(Violation(f"--{name}", value, "is no whole number", file=self.file))
            return default


def _count(text: str | None) -> int | None:
    return int(text) if text and text.isdigit() else None


def _nodes(words: list[str], text: str) -> int | None:
    found = options(words)
    for name in ("nnodes", "num-nodes"):
        if name in found and found[name] and found[name][0].isdigit():
            return int(found[name][0])
    match = re.search(r"^#SBATCH\s+(?:-N\s*|--nodes[= ])(\d+)", text, re.M)
    return int(match[1]) if match else None


def _hinted(hints: dict[str, str], name: str) -> bool | None:
    return {"True": True, "False": False}.get(hints.get(name, ""))


def _plan(r: _Flags, hints: dict[str, str]) -> dict[str, Any]:
    tp, pp = r.number("tensor-model-parallel-size", 1), r.number("pipeline-model-parallel-size", 1)
    plan: dict[str, Any] = {
        "tp": tp,
        "sequence_parallel": r.on("sequence-parallel") or tp == 1,
        "cp": r.number("context-parallel-size", 1),
        "pp": pp,
    }
    if r.on("cp-comm-type"):
        styles = {v: k for k, v in CP_STYLES.items()}
        plan["cp_style"] = styles.get(r.text("cp-comm-type"), "ring")
    layers = r.number("num-layers", 0)
    v = r.number("num-virtual-stages-per-pipeline-rank", 1)
    if r.on("num-layers-per-virtual-pipeline-stage"):
        v = max(layers // (pp * r.number("num-layers-per-virtual-pipeline-stage", layers // pp or 1)), 1)
    plan |= {"virtual_stages": v, "schedule": "interleaved" if v > 1 else "1f1b"}
    if r.on("microbatch-group-size-per-virtual-pipeline-stage"):
        plan["microbatch_group_size"] = r.number("microbatch-group-size-per-virtual-pipeline-stage", pp)
    if r.on("account-for-embedding-in-pipeline-split"):
        plan["first_stage_less_layers"] = 1
    if r.on("account-for-loss-in-pipeline-split"):
        plan["last_stage_less_layers"] = 1
    if r.on("no-overlap-p2p-communication"):
        plan["overlap_p2p"] = False
    elif (p2p := _hinted(hints, "overlap_p2p")) is not None:
        plan["overlap_p2p"] = p2p
    ep = r.number("expert-model-parallel-size", 1)
    if ep > 1:
        plan |= {"ep": ep, "etp": r.number("expert-tensor-parallel-size", tp)}
        deepep = r.on("moe-enable-deepep") or r.text("moe-flex-dispatcher-backend") == "deepep"
        plan |= {
            "ep_dispatcher": "deepep" if deepep else "alltoall",
            "overlap_ep": r.on("overlap-moe-expert-parallel-comm"),
            "delay_wgrad": r.on("delay-wgrad-compute"),
        }
    plan["overlap_tp"] = r.on("tp-comm-overlap")
    plan |= _states(r, hints, plan)
    plan["recompute"] = _recompute(r)
    return plan


def _states(r: _Flags, hints: dict[str, str], plan: dict[str, Any]) -> dict[str, Any]:
    strategy = r.text("data-parallel-sharding-strategy")
    sharded = {"optim": 1, "optim_grads": 2, "optim_grads_params": 3}.get(strategy, 1)
    fsdp = r.on("use-megatron-fsdp") or r.on("use-custom-fsdp")
    zero = (sharded if fsdp and strategy else 3) if fsdp else int(r.on("use-distributed-optimizer"))
    found: dict[str, Any] = {"zero_stage": zero}
    for name, flag in (("overlap_grad_reduce", "overlap-grad-reduce"), ("overlap_param_gather", "overlap-param-gather")):
        hinted = hints and name not in hints
        # A flag that stands for the framework's default was written without being asked for.
        if not (hinted and (r.on(flag) or (name == "overlap_param_gather" and not zero))):
            found[name] = r.on(flag)
    instances = r.number("num-distributed-optimizer-instances", 1)
    if instances > 1:
        found["_instances"] = instances
    if r.on("optimizer-cpu-offload"):
        found["offload"] = {"optimizer": True}
    if r.on("use-tp-pp-dp-mapping"):
        found["placement"] = "tp-cp-ep-pp-dp"
    return found


def _recompute(r: _Flags) -> str | dict[str, Any]:
    if r.on("recompute-activations") and not r.on("recompute-granularity"):
        return "selective"
    granularity = r.text("recompute-granularity")
    if granularity == "selective":
        modules = r.flags.get("recompute-modules", ["core_attn"]) or ["core_attn"]
        return {"granularity": "selective", "modules": modules}
    if granularity == "full":
        count = r.number("recompute-num-layers", 1)
        if r.text("recompute-method") == "block":
            return {"granularity": "full", "method": "block", "num_layers": count}
        return "full" if count == 1 else {"granularity": "full", "method": "uniform", "uniform_layers": count}
    return "none"


def _training(r: _Flags, hints: dict[str, str]) -> dict[str, Any]:
    micro = r.number("micro-batch-size", 1)
    found: dict[str, Any] = {
        "sequence_length": r.number("seq-length", 0) or 1,
        "global_batch_size": r.number("global-batch-size", micro),
        "micro_batch_size": micro,
    }
    fp8 = r.on("fp8-format") or r.on("fp8")
    recipe = {"blockwise": "fp8-block", "mxfp8": "mxfp8"}.get(r.text("fp8-recipe"), "fp8")
    found["precision"] = recipe if fp8 else "bf16" if r.on("bf16") else "fp16" if r.on("fp16") else "fp32"
    found["optimizer"] = hints.get("optimizer") or {"adam": "adamw", "sgd": "sgd", "muon": "muon"}.get(
        r.text("optimizer", "adam"), "adamw"
    )
    if r.on("grad-reduce-in-bf16"):
        found["gradient_dtype"] = "bf16"
    elif r.on("accumulate-allreduce-grads-in-fp32"):
        found["gradient_dtype"] = "fp32"
    dropout = r.text("hidden-dropout", "0.1")
    try:
        found["dropout"] = float(dropout)
    except ValueError:
        r.wrong.append(Violation("--hidden-dropout", dropout, "is no number", file=r.file))
    if r.on("enable-cuda-graph") or r.on("cuda-graph-impl"):
        found["cuda_graphs"] = True
    if r.on("cross-entropy-loss-fusion"):
        found["cross_entropy"] = "fused"
    kernel = hints.get("attention_kernel")
    if kernel is None and r.on("attention-backend"):
        kernel = {"fused": "cudnn", "flash": "auto", "unfused": "unfused"}.get(r.text("attention-backend"), "auto")
    if kernel and kernel != "auto":
        found["attention_kernel"] = kernel
    return found


__all__ = ["export", "flags", "launch_script", "load", "violations"]
