"""Megatron-LM's flags and resolved arguments read into a scenario: core 0.4 to 0.19, and older flags still in scripts."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final, Unpack

from simpar.boundary import reader
from simpar.errors import InputError, Violation
from simpar.interop.argv import RUN_HINT, literal_words, options
from simpar.interop.carried import Imported, Outside, Reading, settled_on_gpus
from simpar.interop.megatron_flags import Flags
from simpar.interop.megatron_layout import counts_of_ends, layers_from_layout
from simpar.interop.megatron_model import read_model
from simpar.interop.megatron_table import arguments_in, flags_of, printed_value

CP_STYLES: Final = {"ring": "p2p", "all_gather": "all_gather", "ulysses": "a2a"}
_STYLES: Final = {**{v: k for k, v in CP_STYLES.items()}, "allgather": "all_gather"}
_OTHER_MODELS: Final = re.compile(r"pretrain_(bert|t5|ict|retro|vlm|vision_\w+)\.py")
"""Scripts of Megatron-LM (at d98e8a64dd and before) whose models take a GPT's flags."""
_KERNELS: Final = {"fused": "cudnn", "flash": "fa2", "unfused": "unfused", "local": "unfused"}


@reader("file", "a log of Megatron-LM with its arguments, or its command line")
def load(text: str, *, file: str = "", accept: Collection[str] = (), **outside: Unpack[Outside]) -> Imported:
    """The scenario of a log that prints its arguments, of a script of `simpar export`, or of a command line.

    Args:
        accept: structural flags that may be left out though they change the model; "all" for every one.

    Raises:
        InputError: neither, values that cannot be read, flags that are not read and change the model, rules that the scenario
            breaks; all together.
    """
    table = arguments_in(text)
    if table:
        found = flags_of({name: printed_value(value) for name, value in table.items()})
        return of_flags(found, text=text, file=file, accept=accept, resolved=True, **outside)
    return of_words(literal_words(text, file), text=text, file=file, accept=accept, **outside)


def of_words(
    words: list[str], *, text: str = "", file: str = "", accept: Collection[str] = (), **outside: Unpack[Outside]
) -> Imported:
    """The scenario of a command line's words.

    Raises:
        InputError: as `load`.
    """
    found = options(words)
    if not {"tensor-model-parallel-size", "num-layers", "hidden-size"} & set(found):
        rule = "has neither a table of Megatron-LM's arguments nor a command with its flags"
        raise InputError([Violation("file", file or "-", rule, f"flags such as --num-layers 32; {RUN_HINT}")])
    other = next((name for word in words if _OTHER_MODELS.fullmatch(name := word.rpartition("/")[2])), None)
    if other is not None and not {other, "all"} & set(accept):
        rule = "trains another model than a GPT, whatever the flags say"
        raise InputError([Violation("script", other, rule, f"a scenario by hand, or --accept {other} to read a GPT", file)])
    return of_flags(found, text=text, file=file, accept=accept, **outside)


def of_flags(
    found: dict[str, list[str]],
    *,
    text: str = "",
    file: str = "",
    accept: Collection[str] = (),
    resolved: bool = False,
    **outside: Unpack[Outside],
) -> Imported:
    """The scenario of flags.

    Args:
        text: what they were read from, with Slurm's lines and the comment lines of an export.
        resolved: every argument is there, defaults too; unknown ones are told together.

    Raises:
        InputError: as `load`.
    """
    reading = read_options(found, file, accept, resolved=resolved)
    return of_reading(reading, found, text, file, outside)


def of_reading(reading: Reading, found: dict[str, list[str]], text: str, file: str, outside: Outside) -> Imported:
    """The scenario of what flags say (`read_options`), and of what a format says beside them.

    Raises:
        InputError: as `load`.
    """
    reading.table["name"] = Path(file).stem if file else "imported"
    _cluster(reading, found, _sbatch(text))
    if outside.get("num_nodes") is not None:
        reading.table["cluster"].pop("num_gpus", None)
    return settled_on_gpus(reading, text, file, outside)


def read_options(found: dict[str, list[str]], file: str = "", accept: Collection[str] = (), *, resolved: bool = False) -> Reading:
    """What flags say by themselves: model, plan and training step."""
    flags = Flags(found, file, accept)
    plan = _plan(flags)
    model = read_model(flags)
    training = _training(flags)
    framework = "megatron-deepspeed" if any([flags.on("deepspeed"), flags.has("zero-stage")]) else "megatron-core"
    reading = Reading({"model": model, "framework": framework, "plan": plan, "training": training, "cluster": {}}, finish=_finish)
    flags.finish(resolved=resolved)
    reading.warnings, reading.wrong = flags.warnings, flags.wrong
    return reading


def _finish(table: dict[str, Any], world: int) -> None:
    """What flags leave to the number of GPUs: dp, the default batch, the size of a copy's shards."""
    plan, training = table["plan"], table["training"]
    group = plan["tp"] * plan["cp"] * plan["pp"]
    if world % group == 0:
        plan.setdefault("dp", world // group)
    shards = plan.get("dp", 1) * plan["cp"]
    if plan.get("shard_size", 1) < 0:
        plan["shard_size"] = max(shards // -plan["shard_size"], 1)
    if training["global_batch_size"] < 0:
        training["global_batch_size"] *= -plan.get("dp", 1)


def _sbatch(text: str) -> dict[str, str]:
    """What the Slurm lines of a script ask for."""
    found = {}
    patterns = {"nodes": r"(?:-N\s*|--nodes[= ])(\d+)", "gpus": r"--(?:gpus-per-node|gres)[= ](?:gpu:)?(?:\w+:)?(\d+)"}
    for name, pattern in patterns.items():
        if match := re.search(rf"^#SBATCH\s+(?:.*\s)?{pattern}", text, re.M):
            found[name] = match[1]
    return found


def _cluster(reading: Reading, found: dict[str, list[str]], sbatch: dict[str, str]) -> None:
    """Nodes and processes a node, from the launcher's options or Slurm's lines."""

    def count(*names: str) -> int | None:
        values = [found[n][0] for n in names if found.get(n)]
        return next((int(v) for v in values if v.isdigit()), None)

    nodes = count("nnodes", "num-nodes") or (int(sbatch["nodes"]) if "nodes" in sbatch else None)
    processes = count("nproc-per-node", "num-gpus", "ntasks-per-node") or (int(sbatch["gpus"]) if "gpus" in sbatch else None)
    if (world := count("world-size")) is not None and nodes is None:
        reading.table["cluster"]["num_gpus"] = world
        return
    if nodes is not None:
        reading.table["cluster"]["num_nodes"] = nodes
    if processes is not None:
        reading.table["cluster"]["num_gpus"] = processes * (nodes or 1)


def _plan(f: Flags) -> dict[str, Any]:
    tp, pp = f.number("tensor-model-parallel-size", 1), f.number("pipeline-model-parallel-size", 1)
    plan: dict[str, Any] = {"tp": tp, "cp": f.number("context-parallel-size", 1), "pp": pp}
    sequence = f.on("sequence-parallel")
    plan["sequence_parallel"] = sequence or tp == 1
    if f.has("cp-comm-type"):
        styles = set(f.values("cp-comm-type"))
        if len(styles) > 1 or not styles <= set(_STYLES):
            f.warnings.append(f"--cp-comm-type {' '.join(sorted(styles))}: taken as the ring (p2p)")
        plan["cp_style"] = _STYLES.get(next(iter(styles)), "ring") if len(styles) == 1 else "ring"
    plan |= _stages(f, pp)
    ep = f.number("expert-model-parallel-size", 1)
    etp = f.number("expert-tensor-parallel-size", tp)
    if f.number("num-experts", 0) > 1:
        plan |= {"ep": ep, "etp": etp, **_exchange(f, ep)}
    plan["overlap_tp"] = f.on("tp-comm-overlap") and tp > 1
    plan |= _states(f, plan)
    plan["recompute"] = _recompute(f)
    return plan


def _dispatcher(kind: str, backend: str) -> str:
    if kind == "flex":
        return backend if backend in ("deepep", "hybridep") else "alltoall"
    return "allgather" if kind == "allgather" else "alltoall"


def _exchange(f: Flags, ep: int) -> dict[str, Any]:
    kind = f.text("moe-token-dispatcher-type", "allgather")
    backend = f.text("moe-flex-dispatcher-backend", "deepep" if f.on("moe-enable-deepep") else "")
    if ep > 1 and kind == "flex" and backend not in ("deepep", "hybridep"):
        f.warnings.append(f"--moe-token-dispatcher-type {kind} {backend}".rstrip() + ": taken as alltoall")
    return {
        "ep_dispatcher": _dispatcher(kind, backend) if ep > 1 else "alltoall",
        "overlap_ep": f.on("overlap-moe-expert-parallel-comm"),
        "delay_wgrad": f.on("delay-wgrad-compute"),
    }


def _stages(f: Flags, pp: int) -> dict[str, Any]:
    layers = f.number("num-layers", 0)
    first, last = int(f.on("account-for-embedding-in-pipeline-split")), int(f.on("account-for-loss-in-pipeline-split"))
    v = f.number("num-virtual-stages-per-pipeline-rank", 1)
    if f.has("num-layers-per-virtual-pipeline-stage"):
        v = max((layers + first + last) // (pp * max(f.number("num-layers-per-virtual-pipeline-stage", 1), 1)), 1)
    found: dict[str, Any] = {"virtual_stages": v, "schedule": "interleaved" if v > 1 else "1f1b"}
    if f.has("pipeline-model-parallel-layout"):
        try:
            found = layers_from_layout(f.text("pipeline-model-parallel-layout"), layers, pp)
        except InputError as error:
            f.wrong += error.violations
    elif f.has("decoder-first-pipeline-num-layers") or f.has("decoder-last-pipeline-num-layers"):
        a, b = (f.number(f"decoder-{end}-pipeline-num-layers", -1) for end in ("first", "last"))
        found["layers_per_stage"] = counts_of_ends(layers, pp, v, a, b)
    else:
        found |= {"first_stage_less_layers": first, "last_stage_less_layers": last} if first or last else {}
    if found["virtual_stages"] > 1:
        found["overlap_p2p"] = not f.on("no-overlap-p2p-communication")
        if f.has("microbatch-group-size-per-virtual-pipeline-stage"):
            found["microbatch_group_size"] = f.number("microbatch-group-size-per-virtual-pipeline-stage", pp)
    elif pp > 1:
        found["overlap_p2p"] = False
    return found


def _states(f: Flags, plan: dict[str, Any]) -> dict[str, Any]:
    strategy = f.text("data-parallel-sharding-strategy", "no_shard")
    fsdp = any([f.on("use-megatron-fsdp"), f.on("use-custom-fsdp")])
    distributed = f.on("use-distributed-optimizer")
    zero = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}.get(strategy, 3) if fsdp else int(distributed)
    zero = max(zero, f.number("zero-stage", 0))
    found: dict[str, Any] = {"zero_stage": zero}
    if f.on("use-torch-fsdp2"):
        found = {"zero_stage": 3, "reshard_after_forward": not f.on("torch-fsdp2-no-reshard-after-forward")}
    found["overlap_grad_reduce"] = f.on("overlap-grad-reduce")
    found["overlap_param_gather"] = f.on("overlap-param-gather")
    instances = f.number("num-distributed-optimizer-instances", 1)
    if instances > 1:
        found["shard_size"] = -instances
    fraction = f.text("optimizer-offload-fraction", "1.0")
    if f.on("optimizer-cpu-offload"):
        found["offload"] = {"optimizer": True}
        if fraction not in ("1", "1.0"):
            f.warnings.append(f"--optimizer-offload-fraction {fraction}: all of the optimizer is taken to be on the host")
    if f.on("use-tp-pp-dp-mapping"):
        found["placement"] = "tp-cp-ep-pp-dp"
    return found


def _recompute(f: Flags) -> str | dict[str, Any]:
    short, granularity = f.on("recompute-activations"), f.text("recompute-granularity")
    method, count = f.text("recompute-method"), f.number("recompute-num-layers", 1)
    modules = f.values("recompute-modules")
    old = f.text("activations-checkpoint-method") or ("uniform" if f.on("checkpoint-activations") else "")
    if old and not granularity:
        granularity, method, count = "full", old, f.number("activations-checkpoint-num-layers", 1)
    if f.on("moe-layer-recompute") and granularity != "full":
        granularity, modules = "selective", [*modules, "moe"]
    if granularity == "selective" or (short and not granularity):
        return {"granularity": "selective", "modules": sorted(modules)} if modules and modules != ["core_attn"] else "selective"
    if granularity != "full":
        return "none"
    if method == "block":
        return {"granularity": "full", "method": "block", "num_layers": count}
    return "full" if count == 1 else {"granularity": "full", "method": "uniform", "uniform_layers": count}


def _training(f: Flags) -> dict[str, Any]:
    micro = f.number("micro-batch-size", 0) or f.number("batch-size", 1)
    found: dict[str, Any] = {
        "sequence_length": f.number("seq-length", 0) or f.number("encoder-seq-length", 0) or 1,
        "micro_batch_size": micro,
        "global_batch_size": f.number("global-batch-size", -micro * f.number("gradient-accumulation-steps", 1)),
    }
    bf16, fp16 = f.on("bf16"), f.on("fp16")
    recipe = {"blockwise": "fp8-block", "mxfp8": "mxfp8"}.get(f.text("fp8-recipe"), "fp8")
    fp8 = any([f.has("fp8-format"), f.has("fp8"), f.on("fp8-hybrid"), f.on("fp8-e4m3")])
    fp4 = f.has("fp4-format")
    f.use("fp8-format", "fp8", "fp4-format", "fp4-recipe")
    wide = "bf16" if bf16 else "fp16" if fp16 else "fp32"
    found["precision"] = "nvfp4" if fp4 else recipe if fp8 else wide
    found |= _optimizer(f)
    reduced, accumulated = f.on("grad-reduce-in-bf16"), f.on("accumulate-allreduce-grads-in-fp32")
    found["gradient_dtype"] = "bf16" if reduced and bf16 else "fp16" if fp16 and not accumulated else "fp32"
    found["dropout"] = f.fraction("hidden-dropout", 0.1)
    if (attention := f.fraction("attention-dropout", 0.1)) != found["dropout"]:
        f.warnings.append(f"--attention-dropout {attention} differs from --hidden-dropout, which is taken for both")
    graphs = f.text("cuda-graph-impl", "none") != "none"
    found["cuda_graphs"] = any([graphs, f.on("enable-cuda-graph"), f.on("external-cuda-graph")])
    if f.text("transformer-impl", "transformer_engine") == "local":
        f.warnings.append("--transformer-impl local: kernels are taken to be TransformerEngine's")
    scope = f.text("cuda-graph-scope", "full")
    found["cuda_graph_scope"] = "attention" if scope == "attn" else "layer"
    if found["cuda_graphs"] and scope not in ("full", "attn"):
        f.warnings.append(f"--cuda-graph-scope {scope}: graphs are taken to hold whole layers")
    found["cross_entropy"] = "fused" if f.on("cross-entropy-loss-fusion") else "auto"
    backend, flash = f.text("attention-backend", "auto"), f.on("use-flash-attn")
    found["attention_kernel"] = _KERNELS.get(backend, "fa2" if flash else "auto")
    if f.on("moe-router-force-load-balancing"):
        found["routing"] = {"kind": "balanced"}
    if f.has("moe-expert-capacity-factor"):
        found["routing"] = {**found.get("routing", {}), "capacity_factor": f.fraction("moe-expert-capacity-factor", 1.0)}
    return found


def _optimizer(f: Flags) -> dict[str, Any]:
    name = f.text("optimizer", "adam")
    momentum, moments = f.fraction("sgd-momentum", 0.9), (f.text("exp-avg-dtype", "fp32"), f.text("exp-avg-sq-dtype", "fp32"))
    if moments not in (("fp32", "fp32"), ("bf16", "bf16")):
        f.warnings.append(f"--exp-avg-dtype {moments[0]} --exp-avg-sq-dtype {moments[1]}: taken as fp32")
    known = {"adam": "adamw", "sgd": "sgd-momentum" if momentum else "sgd", "muon": "muon", "dist_muon": "muon", "soap": "soap"}
    if name not in known:
        f.warnings.append(f"--optimizer {name}: taken as adam")
    found = known.get(name, "adamw")
    return {"optimizer": "adamw-bf16-moments" if found == "adamw" and moments == ("bf16", "bf16") else found}
