"""From a run's parallelism columns to a plan and a training table."""

from __future__ import annotations

import re
from typing import Any, Final

from simpar.evidence.row_adapters import adapted, adapters_of
from simpar.evidence.row_complete import MOST_MICRO_BATCHES, RATE_ALONE
from simpar.evidence.row_experts import chosen_freely, exchange_of, routing_of
from simpar.evidence.row_framework import attention_of, dropout_of, narrow_modules, stated_precision
from simpar.evidence.row_layers import recompute_of, stage_layers
from simpar.evidence.row_machine import CannotExpress
from simpar.evidence.row_values import SAID, Row, denied, first_match
from simpar.specs.framework import FrameworkSpec, Month
from simpar.specs.losses import losses_of

SCHEDULE_PATTERNS: Final = (
    (r"\bv[- ]?half", "v-half"),
    (r"\bv[- ]?min", "v-min"),
    (r"zb[- ]?v|zbv", "zb-v"),
    (r"zb[- ]?2p", "zb-2p"),
    (r"zb[- ]?h2", "zb-h2"),
    (r"zb[- ]?1p.*automatic", "zb-1p"),
    (r"zb[- ]?1p|zb[- ]?h1|zero[- ]?bubble", "zb-h1"),
    (r"dualpipe[- ]?v", "dualpipe-v"),
    (r"dualpipe", "dualpipe"),
    (r"interleaved.*(zb|zero)", "interleaved_zb"),
    (r"breadth|bfs", "interleaved_bfs"),
    (r"interleaved", "interleaved"),
    (r"1f1b", "1f1b"),
    (r"gpipe|afab|all.forward", "gpipe"),
)
"""First match in pp_schedule -> name of a schedule."""

_CHUNKS: Final = {"zb-v": 2, "v-half": 2, "v-min": 2, "dualpipe-v": 2, "dualpipe": 1}
"""Schedules whose number of model chunks per rank is fixed."""

OPTIMIZERS: Final = (
    (r"paged.*8-?bit|8-?bit.*paged", "adamw-8bit-paged"),
    (r"8-?bit", "adamw-8bit"),
    (r"4-?bit", "adamw-4bit"),
    (r"\blion\b", "lion"),
    (r"bf16 (moments|states)|(moments|states) (in|of) bf16|precision-aware(?!.*fp32 moments)", "adamw-bf16-moments"),
    (r"muon", "muon"),
    (r"\bsoap\b", "soap"),
    (r"shampoo", "shampoo"),
    (r"adafactor", "adafactor"),
    (r"sgd(?!.*momentum)|sgd.*\b(?:no|without|zero) momentum|sgd.*momentum[ =:]*0(?:\.0)?(?![.\d])", "sgd"),
    (r"sgd", "sgd-momentum"),
    (
        r"^\W*(?:none|no(?:t| optimizer)?)\b|\b(?:no|without(?: an?)?) optimizer\b|forward (?:and|\+) backward (?:only|alone)",
        "none",
    ),
    (r"adamw", "adamw"),
    (r"adam", "adam"),
)

_KERNEL: Final = (
    r"(?:rms-?norm|layer-?norm|norm|rotary(?: (?:position )?embeddings?)?|rope|swi-?glu|activations?|"
    r"(?:linear )?cross.entropy|adamw)s?"
)
_FUSED: Final = re.compile(rf"{SAID}fused ({_KERNEL}(?:(?:,? and |,\s*|\s*[/+]\s*){_KERNEL})*)", re.IGNORECASE)
"""A list of what a run's single kernels are; xformers' SwiGLU is one whether or not that is said."""
_KERNELS: Final = ((r"norm", "norm"), (r"rotary|rope", "rope"), (r"glu|activation", "activation"))

_NARROW: Final = re.compile(
    r"\bweights(?:, gradients)?,? and (?:\w+ )?states (?:in )?bf16|\bbf16 weights(?:, gradients)?,? and (?:\w+ )?states\b"
)
"""Weights that are updated in 16 bits, whatever shards them."""
_WIDE: Final = re.compile(r"\b(?:fp|float)32 (?:(?:master|sharded|model) )?(?:weights|parameters)\b", re.IGNORECASE)
"""A precision that says that trained weights rest in fp32, where the framework would have them in 16 bits."""

LOSSES: Final = (
    (r"fused linear cross.entropy|\blinear cross.entropy", "linear"),
    (rf"cross.entropy fusion on|\bfoak\b|unsloth|{SAID}fused cross.entropy|\bxentropy\b", "fused"),
    (r"chunked cross.entropy", "chunked"),
    (r"cross.entropy (?:of|on|over) (?:the )?(?:16-bit|bf16|fp16) logits", "half"),
    (r"(?:un|non)-?fused cross.entropy|logits (?:are )?(?:cast|turned|converted)? ?(?:in)?to (?:fp32|float)", "unfused"),
)
"""Pattern in the notes -> the loss that a run names."""

CP_STYLES: Final = (
    (r"^a2a|ulysses", "ulysses"),
    (r"^all.?gather|^ag\b", "all_gather"),
    (r"torch context_parallel", "all_gather"),  # torch's ring gathers keys and values by default
    (r"ring|p2p", "ring"),
)


def plan_of(row: Row, framework: FrameworkSpec) -> tuple[dict[str, Any], list[str]]:
    """The table of a PlanSpec and what was assumed.

    Raises:
        CannotExpress: the layout is not stated or contradicts the number of GPUs.
    """
    missing = [k for k in ("tp", "pp", "dp", "n_gpus") if not row.get(k)]
    if missing:
        raise CannotExpress(f"layout not stated: {', '.join(missing)}")
    notes: list[str] = []
    tp, pp, cp, dp = int(row["tp"]), int(row["pp"]), int(row.get("cp") or 1), int(row["dp"])
    if tp * pp * cp * dp != int(row["n_gpus"]):
        raise CannotExpress(f"tp*pp*cp*dp = {tp * pp * cp * dp} is not n_gpus = {row['n_gpus']}")
    ep = int(row.get("ep") or 1)
    plan: dict[str, Any] = {
        "tp": tp, "pp": pp, "cp": cp, "dp": dp, "ep": ep,
        "sequence_parallel": bool(row.get("sp", framework.conventions.sequence_parallel_default)) and tp > 1,
        "virtual_stages": _virtual_stages(row, framework, notes),
        "recompute": recompute_of(row, framework, notes),
        "overlap_tp": bool(row.get("overlap_tp")),
    }  # fmt: skip
    plan |= exchange_of(row, plan, framework, notes)
    if framework.conventions.rank_order:
        plan["placement"] = framework.conventions.rank_order
    if row.get("etp"):
        plan["etp"] = int(row["etp"])
    for key in ("overlap_grad_reduce", "overlap_param_gather", "overlap_p2p"):
        if row.get(key) is not None:
            plan[key] = bool(row[key])
    if cp > 1:
        plan["cp_style"] = _cp_style(row, framework)
    plan |= _sharding(row, framework, dp * cp, notes)
    plan |= _schedule(row, plan, framework)
    if re.search(r"synchroni[sz]ed optimi[sz]er", str(row.get("notes") or "")):
        plan["synchronous_optimizer"] = True
    plan |= stage_layers(row, framework.pipeline.layer_rounding, pp * plan["virtual_stages"])
    plan |= _offload(row, pp, notes)
    return plan, notes


def _cp_style(row: Row, framework: FrameworkSpec) -> str:
    if framework.conventions.only_cp_style:
        return framework.conventions.only_cp_style
    stated = str(row.get("cp_type") or "")
    if adapted(row) and (not stated or " or " in stated):
        return framework.conventions.adapter_cp_style
    return first_match(CP_STYLES, stated) or "ring"


def _virtual_stages(row: Row, framework: FrameworkSpec, notes: list[str]) -> int:
    pp, layers = int(row["pp"]), int(row["layers"])
    if row.get("vpp"):
        return int(row["vpp"])
    if pp == 1:
        return 1
    if "interleaved" in str(row.get("pp_schedule") or "") or "interleaved" in " ".join(row.get("assumed") or ()):
        notes.append("virtual stages not stated: one layer per chunk")
        return max(1, -(-layers // pp))
    if row.get("moe_experts") and framework.conventions.expert_virtual_stages == "middle" and layers % pp == 0:
        parts = [v for v in range(1, layers // pp + 1) if layers // pp % v == 0]
        notes.append(f"virtual stages not stated: {parts[len(parts) // 2]} (the framework's advice)")
        return parts[len(parts) // 2]
    notes.append("virtual stages not stated: 1")
    return 1


def _schedule(row: Row, plan: dict[str, Any], framework: FrameworkSpec) -> dict[str, Any]:
    if plan["pp"] == 1:
        return {}
    name = first_match(SCHEDULE_PATTERNS, row.get("pp_schedule"))
    if name is None:
        chunks = plan["virtual_stages"]
        name = framework.pipeline.named("auto", plan["pp"], chunks) if chunks > 1 else framework.pipeline.schedule
    if name == "1f1b" and plan["virtual_stages"] > 1:
        name = "interleaved"
    if name == "interleaved" and plan["virtual_stages"] == 1:
        name = "1f1b"
    fixed = _CHUNKS.get(name)
    return {"schedule": name, "virtual_stages": fixed} if fixed else {"schedule": name}


_STAY_GATHERED: Final = r"not reshard|shard_grad_op|reshard_after_forward\W+(never|false|off|no)\b"
"""In fsdp: weights stay gathered from the forward to the backward."""


def _sharding(row: Row, framework: FrameworkSpec, domain: int, notes: list[str]) -> dict[str, Any]:
    stage = row.get("zero_stage")
    fsdp = str(row.get("fsdp") or "")
    if re.search(r"ZeRO\+\+", f"{fsdp} {row.get('notes') or ''}", re.IGNORECASE):
        raise CannotExpress("ZeRO++: gathers and reductions of quantised values, a second partition in each node")
    if stage is None:
        stage = 3 if fsdp else 1 if row.get("dist_opt") else framework.data.zero_stage_default
        notes.append(f"optimizer sharding not stated: ZeRO stage {stage}")
    elif stage == 0 and framework.conventions.bf16_shards_states and stated_precision(row) == "bf16":
        stage = 1
        notes.append("bf16 without ZeRO shards the optimizer's states here, as stage 1 does")
    gathered = fsdp and re.search(_STAY_GATHERED, fsdp, re.IGNORECASE)
    if stage == 2 and gathered:
        stage = 3  # named after ZeRO-2, but weights rest in shards too and are gathered for the first forward (torch FSDP)
    table: dict[str, Any] = {"zero_stage": int(stage)}
    if row.get("reduce_bucket_size") and stage in framework.data.gradient_buffers:
        table["reduce_bucket_size"] = int(row["reduce_bucket_size"])
    if fsdp == "" or gathered:
        table["reshard_after_forward"] = fsdp == ""
    group = (row.get("extra") or {}).get("zero1_group")
    replicas, node = row.get("hsdp_replicas"), int(row.get("gpus_per_node") or 0) // int(row["tp"])
    if replicas is None and re.search(r"hybrid|hsdp", fsdp, re.IGNORECASE) and 1 < node < domain and domain % node == 0:
        replicas = domain // node  # torch.distributed.fsdp.ShardingStrategy: within a node, replicas across nodes
        notes.append(f"replicas of the shards not stated: {replicas}, one a node")
    if isinstance(replicas, int | float) and replicas > 1 and domain % int(replicas) == 0:
        table["shard_size"] = domain // int(replicas)
    elif isinstance(group, int) and domain % group == 0:
        table["shard_size"] = group
    return table


_OFFLOADED_MODULES: Final = r"\b(?:expert_fc1|moe_act|core_attn|attn_(?:norm|proj)|mlp_norm|qkv_linear|dense_mlp)\b"
"""Activations of some modules, as Megatron-LM's --offload-modules names them."""


def _offload(row: Row, pp: int, notes: list[str]) -> dict[str, Any]:
    stated = str(row.get("offload") or "none")
    clauses = [] if denied(stated) else re.split(r"[;,()]", stated)
    text = ", ".join(clause for clause in clauses if not denied(clause))
    table: dict[str, Any] = {}
    if layers := re.search(r"activation.* (\d+) layers", text):
        table["activations"] = min(1.0, int(layers[1]) / max(1.0, int(row["layers"]) / pp))
    elif re.search(_OFFLOADED_MODULES, text):
        notes.append("activations of some modules alone go to the host: their copies are not priced, nor is memory less")
    elif "activation" in text:
        table["activations"] = 1.0
    if "optimizer" in text:
        table["optimizer"] = True
    if re.search(r"\bparam|weights", text):
        table["parameters"] = True
    if not table and re.search(r"\bcpu\b|\bon\b|yes|true|zero[- ]?(offload|infinity)|nvme", text, re.IGNORECASE):
        # DeepSpeed's ZeRO-Offload has the optimizer there, ZeRO-Infinity and FSDP's CPUOffload the parameters too.
        table["optimizer"] = True
        if re.search("infinity", text, re.IGNORECASE) or (row.get("zero_stage") == 3 and not _deepspeed(row)):
            table["parameters"] = True
    return {"offload": table} if table else {}


def _deepspeed(row: Row) -> bool:
    return re.search("deepspeed", f"{row.get('framework')} {row.get('fsdp')}", re.IGNORECASE) is not None


def training_of(row: Row, framework: FrameworkSpec, precision: str, month: Month) -> tuple[dict[str, Any], list[str]]:
    """The table of a TrainingSpec and what was assumed.

    Raises:
        CannotExpress: no global batch, or one that does not divide.
    """
    if not row.get("global_batch"):
        raise CannotExpress("global batch not stated")
    notes: list[str] = []
    batch, dp = int(row["global_batch"]), int(row["dp"])
    micro = _micro_batch(row, framework, batch // dp if dp else batch, notes)
    if batch % (micro * dp):
        raise CannotExpress(f"global batch {batch} is not a multiple of micro batch {micro} x dp {dp}")
    if batch // (micro * dp) > MOST_MICRO_BATCHES:
        raise CannotExpress(f"{batch // (micro * dp)} micro batches a step: is the global batch of {batch} in tokens?")
    task = str(row.get("task") or ("lora" if adapted(row) else "pretrain"))
    experts = row.get("moe_experts") or re.search(
        r"\bmoe\b", str(row.get("arch")), re.IGNORECASE
    )  # of shipped layers, no column says
    named = row.get("optimizer")
    optimizer = first_match(OPTIMIZERS, named)
    if named and optimizer is None:
        notes.append(f"optimizer {named}: as adamw")
    table: dict[str, Any] = {
        "sequence_length": int(row["seq_len"]),
        "global_batch_size": batch,
        "micro_batch_size": micro,
        "precision": precision,
        "optimizer": optimizer or "adamw",
        "dropout": dropout_of(row, framework.conventions),
        "attention_kernel": attention_of(row, dict(framework.kernels.attention)[""], month),
        "cuda_graphs": _graphs(str(row.get("cuda_graphs") or "none")),
        "cuda_graph_scope": "attention" if re.search(r"moe[_ ]router", str(row.get("cuda_graphs"))) else "layer",
        "routing": routing_of(str(row.get("moe_routing") or ""), task if experts else "", free=chosen_freely(row, framework)),
    }
    table |= _loss(row, framework) | _states(row, framework, table["optimizer"])
    kernel = re.search(r"(?<![a-z])fused(?![a-z])|foreach", str(named), re.IGNORECASE)
    torch = "narrow_optimizers" in framework.conventions.abilities
    if kernel and torch and table["optimizer"] in ("adamw", "adam") and kernel[0].lower() != framework.optimizer.optimizer_kernel:
        table["optimizer"] = f"adamw-{kernel[0].lower()}"
    if table["optimizer"] == "adamw-8bit" and _overflows(row):
        table["optimizer"] = "adamw-8bit-paged"
        notes.append("8-bit states do not fit beside the weights: paged (torchtune's full_finetune_single_device configs)")
    if framework.kernels.separate_casts and (parts := narrow_modules(row)) != "all":
        table["narrow_modules"] = parts
    if row.get("compile") is not None:
        table["compile"] = row["compile"] if row["compile"] in ("model", "loss") else bool(row["compile"])
    if row.get("document_tokens"):
        table["document_lengths"] = row["document_tokens"]
    gradients = str(row.get("grad_dtype") or "").lower().replace("bfloat", "bf").replace("float", "fp")
    if dtype := re.search(r"fp32|bf16|fp16", gradients):
        table["gradient_dtype"] = dtype[0]
    if adapted(row):
        # 16-bit weights that are frozen say nothing of the adapters; whether these are multiplied under autocast may stand there.
        table.pop("pure_bf16", None)
        denied = re.search(r"no autocast|without autocast", f"{row.get('precision')} {row.get('notes')}", re.IGNORECASE)
        if denied and precision == "bf16" and framework.optimizer.autocast:
            table["pure_bf16"] = True
        table |= adapters_of(row, framework)
    return table, notes


def _overflows(row: Row) -> bool:
    """Whether 16-bit weights and 8-bit moments alone exceed the GPUs' memory, so that a run that ran had them elsewhere."""
    held, weights = row.get("gpu_mem_gb"), row.get("n_params_b")
    if not held or not weights or row.get("oom"):
        return False
    return 4.03 * float(weights) / (int(row.get("dp") or 1) if row.get("zero_stage") == 3 else 1) > float(held)


def _loss(row: Row, framework: FrameworkSpec) -> dict[str, Any]:
    """The loss that a run names, where its framework has it; the step of an RL trainer takes log-probabilities by tiles."""
    notes, has = str(row.get("notes") or ""), losses_of(framework)
    found = first_match(LOSSES, notes) or first_match(LOSSES, " ".join(f"fused {name}" for name in _fused(notes)))
    if re.match(r"rl\b", str(row.get("task") or "")) or "buffers for several adapters" in notes:
        found = "tiled"
    return {"cross_entropy": found} if found in has else {}


def _fused(text: str) -> list[str]:
    """What `text` says are single kernels.

    >>> _fused("FlashAttention's fused RMSNorm, cross entropy and rotary; fused AdamW")
    ['RMSNorm', 'cross entropy', 'rotary', 'AdamW']
    """
    return [name for found in _FUSED.finditer(text) for name in re.findall(_KERNEL, found[1], re.IGNORECASE)]


def _states(row: Row, framework: FrameworkSpec, optimizer: str) -> dict[str, Any]:
    """Widths of the trained states, and when they are updated."""
    texts = " ".join(str(row.get(key) or "") for key in ("precision", "optimizer", "notes"))
    table: dict[str, Any] = {}
    library = re.search(r"(?<!no )(?<!without )\b(?:liger|unsloth)\b", re.sub(r"\([^)]*\)", "", texts), re.IGNORECASE)
    layers = re.search(r"transformer ?engine('s)? layers", str(row.get("framework") or ""), re.IGNORECASE)
    words = " ".join([*_fused(texts), "swiglu" if re.search(r"xformers\W{0,3}s? swi-?glu", texts, re.IGNORECASE) else ""])
    named = [kernel for pattern, kernel in _KERNELS if re.search(pattern, words, re.IGNORECASE)]
    plugin = re.search(r"\bfoak\b", texts, re.IGNORECASE)  # fms-acceleration's kernels leave the activation to torch
    if (library or layers or plugin or named) and "fused_kernels" in framework.conventions.abilities:
        table["fused_kernels"] = ["norm", "rope"] if plugin else True if library or layers else named
    whole = _NARROW.search(str(row.get("precision") or "")) is not None
    sharded = framework.optimizer.sharded_weights_fp32 and row.get("zero_stage") == 3 and not whole
    if (whole or re.search("pure", str(row.get("precision") or ""))) and "pure_bf16" in framework.conventions.abilities:
        table |= {
            "optimizer": "adamw" if optimizer == "adamw-bf16-moments" else optimizer,
            **({} if sharded else {"pure_bf16": True}),
        }
    elif framework.optimizer.pure_bf16 and _WIDE.search(str(row.get("precision") or "")):
        table["pure_bf16"] = False
    if "optimizer in backward" in texts and "optimizer_in_backward" in framework.conventions.abilities:
        table["optimizer_in_backward"] = True
    return table


def _micro_batch(row: Row, framework: FrameworkSpec, local: int, notes: list[str]) -> int:
    if row.get("micro_batch"):
        return int(row["micro_batch"])
    if row.get("grad_accum") and local % int(row["grad_accum"]) == 0:
        return max(1, local // int(row["grad_accum"]))
    pp = 0 if row.get(RATE_ALONE) else int(row["pp"])
    if framework.conventions.microbatch_per_stage and pp > 1 and local % pp == 0:
        notes.append("micro batch not stated: local batch / pp (framework's default)")
        return local // pp
    notes.append("micro batch not stated: 1")
    return 1


def _graphs(text: str) -> bool:
    """Whether the attention and feed-forward of a layer run from CUDA graphs."""
    implementation = text.split("/")[0]
    if re.match(r"\s*(?:none|no|off|false|disabled|not)\b", implementation, re.IGNORECASE):
        return False
    if re.search(r"transformer_engine|moe[_ ](?:router|preprocess)", text):
        return re.search(r"attn|attention|mlp|iteration|layer", text) is not None
    return True
