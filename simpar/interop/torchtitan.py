"""torchtitan: a scenario as TOML for v0.2.0 to v0.2.2, and as a Python recipe for the main branch after it.

`torchtitan_import.py` reads the TOML back; what it would not read back with the same meaning is refused here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from simpar.errors import InputError, Violation
from simpar.interop.carried import carried
from simpar.interop.launch import beside, gpu_violations, torchrun, work_violations
from simpar.interop.meaning import (
    ADAM,
    adam_kernel,
    data_ranks,
    meaning,
    recompute_of,
    replicas_and_shards,
    schedule_name,
    semantics,
    stage_counts,
)
from simpar.interop.torchtitan_import import CP_STYLES, read_config, schedule_names
from simpar.interop.torchtitan_models import MAIN_ONLY, PLAIN_ONLY, Key, key_of, known_flavors
from simpar.interop.torchtitan_recipe import compiled_parts, recipe
from simpar.specs.architecture import TokenModel, has_experts
from simpar.specs.counts import microbatches, resolved_dp, resolved_etp
from simpar.specs.scenario import Scenario
from simpar.toml import toml_value

Sections = dict[str, dict[str, Any]]
_MAIN = (
    "data_parallel_replicate_degree", "data_parallel_shard_degree", "fsdp_reshard_after_forward", "tensor_parallel_degree",
    "context_parallel_degree", "expert_parallel_degree", "pipeline_parallel_degree", "pipeline_parallel_schedule",
    "num_pp_microbatches", "module_fqns_per_model_part",
)  # fmt: skip
"""Settings of a layout on the main branch."""
_CONVERTERS = {"fp8": "float8", "fp8-rowwise": "float8", "mxfp8": "mx"}
_ASSETS = {"llama3": "Llama-3.1", "qwen3": "Qwen3", "deepseek_v3": "DeepSeek-V3.1-Base", "gpt_oss": "gpt-oss", "qwen3_5": "Qwen3.5"}


def violations(scenario: Scenario) -> list[Violation]:
    """What of a scenario torchtitan refuses to run, as far as its settings could say it."""
    if not isinstance(scenario.model, TokenModel):
        return [Violation("model", scenario.model.kind, "torchtitan has no flavor of such layers", "a model of kind transformer")]
    found = [*gpu_violations(scenario, "torchtitan"), *work_violations(scenario, "torchtitan")]
    found += [*_data_rules(scenario), *_other_rules(scenario)]
    key = key_of(scenario.model)
    if key is None:
        name = scenario.model.name or "this model"
        found.append(Violation("model", name, "torchtitan has no flavor of this shape", f"one of {', '.join(known_flavors())}"))
    elif key[0] in PLAIN_ONLY and max(scenario.plan.pp, scenario.plan.cp) > 1:
        given = ((name, getattr(scenario.plan, name)) for name in ("pp", "cp"))
        rule = f"torchtitan v0.2.2 has neither a pipeline nor context parallelism for {key[0]}"
        found += [Violation(f"plan.{name}", degree, rule, "1") for name, degree in given if degree > 1]
    elif key[0] in MAIN_ONLY and scenario.plan.cp > 1:
        found.append(Violation("plan.cp", scenario.plan.cp, f"torchtitan has no context parallelism for {key[0]}", "1"))
    elif scenario.model.num_nextn_predict_layers:
        rule = "torchtitan up to v0.2.2 has no multi-token prediction"
        found.append(Violation("model.num_nextn_predict_layers", scenario.model.num_nextn_predict_layers, rule, "0"))
    return found


def _data_rules(scenario: Scenario) -> Iterator[Violation]:
    plan, dp = scenario.plan, resolved_dp(scenario)
    if plan.zero_stage in (1, 2):
        yield Violation("plan.zero_stage", plan.zero_stage, "torchtitan shards fully (FSDP2) or not at all (DDP)", "3 or 0")
    if plan.zero_stage == 0 and (dp == 1 or plan.cp > 1 or plan.tp > 1 or plan.pp > 1):
        rule = "torchtitan leaves parameters whole only under plain data parallelism"
        yield Violation("plan.zero_stage", 0, rule, "3, or tp = cp = pp = 1 with dp above 1")
    size = plan.shard_size or data_ranks(scenario)
    if plan.zero_stage == 3 and size % plan.cp:
        yield Violation(
            "plan.shard_size", plan.shard_size, "torchtitan shards over whole context-parallel groups", "a multiple of cp"
        )
    elif plan.zero_stage == 3 and size == 1 and data_ranks(scenario) > 1:
        yield Violation("plan.shard_size", 1, "one rank shards nothing", "at least 2, or zero_stage = 0")
    if plan.ep > 1:
        yield from _expert_rules(scenario, size // plan.cp if plan.zero_stage == 3 else dp)


def _expert_rules(scenario: Scenario, shards: int) -> Iterator[Violation]:
    plan, etp = scenario.plan, resolved_etp(scenario.plan)
    if etp not in (1, plan.tp):
        yield Violation("plan.etp", etp, "torchtitan splits an expert over all tensor ranks or none", f"1 or {plan.tp}")
        return
    inner = plan.cp * (plan.tp if etp == 1 else 1)
    if plan.ep % inner or shards * inner % plan.ep:
        rule = f"torchtitan's expert group holds whole {'tp x cp' if etp == 1 else 'cp'} groups ({inner}) of the {shards} shards"
        yield Violation("plan.ep", plan.ep, rule, f"a multiple of {inner} that divides {shards * inner}")


def _other_rules(scenario: Scenario) -> Iterator[Violation]:
    plan, training = scenario.plan, scenario.training
    family = schedule_name(scenario)
    if plan.pp > 1 and family not in schedule_names().values():
        right = f"one of {', '.join(sorted(schedule_names().values()))}"
        yield Violation("plan.schedule", plan.schedule, "torch has no such schedule", right)
    if plan.pp > 1 and family in ("interleaved", "interleaved_bfs", "interleaved_zb") and plan.virtual_stages == 1:
        yield Violation("plan.virtual_stages", 1, f"torch's {family} schedule needs stages in turn", "at least 2")
    if plan.overlap_tp and plan.tp > 1 and meaning(scenario)["training.compile"] not in (True, "model"):
        yield Violation(
            "plan.overlap_tp", True, "torchtitan's asynchronous tensor parallelism is compiled", "training.compile = true"
        )
    if (length := recompute_of(scenario).uniform_layers) > 1:
        yield Violation("plan.recompute.uniform_layers", length, "torchtitan checkpoints layers one by one", "1")
    if training.precision not in ("bf16", "fp32", *_CONVERTERS):
        right = f"one of bf16, fp32, {', '.join(_CONVERTERS)}"
        yield Violation("training.precision", training.precision, "torchtitan does not train in this", right)
    if training.narrow_modules == "experts" and training.precision == "fp8":
        yield Violation("training.precision", "fp8", "torchtitan's grouped products have a scale for each row", "fp8-rowwise")
    if training.optimizer not in ADAM:
        yield Violation("training.optimizer", training.optimizer, "torchtitan v0.2 has AdamW and Adam", f"one of {', '.join(ADAM)}")
    if (kernel := training.attention_kernel) in ("unfused", "efficient"):
        yield Violation("training.attention_kernel", kernel, "torchtitan attends by fused kernels without a mask of pairs", "auto")
    loss = semantics(scenario).head.loss
    if training.cross_entropy not in ("auto", loss):
        yield Violation("training.cross_entropy", training.cross_entropy, "no setting of torchtitan v0.2", f"auto or {loss}")


def sections(scenario: Scenario, key: Key) -> Sections:
    """Tables of the TOML file."""
    training = scenario.training
    quantized = _quantized(scenario)
    model: dict[str, Any] = {"name": key[0], "flavor": key[1], "hf_assets_path": _assets(key)}
    found: Sections = {
        "job": {"dump_folder": "./outputs", "description": scenario.name},
        "model": {**model, "converters": list(quantized)},
        "optimizer": {"name": "Adam" if training.optimizer == "adam" else "AdamW", "implementation": adam_kernel(scenario)},
        "training": _training(scenario),
        "parallelism": _parallelism(scenario),
        "activation_checkpoint": _checkpoint(scenario),
        "compile": {"enable": bool(meaning(scenario)["training.compile"]), "components": compiled_parts(scenario)},
    }
    if training.routing.kind == "balanced" and getattr(scenario.model, "moe", None) is not None:
        found["debug"] = {"moe_force_load_balance": True}
    return found | {name: table for name, table in quantized.items() if table}


def _quantized(scenario: Scenario) -> Sections:
    """Converters with their tables: of linears, and of the grouped products of experts."""
    training, found = scenario.training, {}  # type: Any, Sections
    if (kind := _CONVERTERS.get(training.precision)) is None:
        return found
    if training.narrow_modules != "experts":
        gathered = training.gathers_fp8 and scenario.plan.zero_stage == 3
        own = {"recipe_name": "rowwise"} if training.precision == "fp8-rowwise" else {"enable_fsdp_float8_all_gather": gathered}
        found[f"quantize.linear.{kind}"] = {**own, "filter_fqns": ["output"]} if kind == "float8" else {}
    if training.narrow_modules != "linears" and has_experts(scenario.model):
        found[f"quantize.grouped_mm.{kind}"] = {**({"recipe_name": "mxfp8"} if kind == "mx" else {}), "fqns": ["experts"]}
    return found


def _assets(key: Key) -> str:
    if key[0] == "kimi_k2_5":
        return f"./assets/hf/{key[1]}"
    return f"./assets/hf/{_ASSETS[key[0]]}" + ("" if key[0] == "deepseek_v3" else f"-{key[1]}")


def _training(scenario: Scenario) -> dict[str, Any]:
    training, dp = scenario.training, resolved_dp(scenario)
    pipeline = scenario.plan.pp > 1
    return {
        "local_batch_size": training.global_batch_size // dp if pipeline else training.micro_batch_size,
        "global_batch_size": training.global_batch_size,
        "seq_len": training.sequence_length,
        "mixed_precision_param": "float32" if training.precision == "fp32" else "bfloat16",
        "mixed_precision_reduce": "float32",
        "steps": 50,
        "dataset": "c4",
    }


def _parallelism(scenario: Scenario) -> dict[str, Any]:
    plan = scenario.plan
    replicas, shards = replicas_and_shards(scenario)
    found: dict[str, Any] = {
        "data_parallel_replicate_degree": replicas,
        "data_parallel_shard_degree": shards,
        "fsdp_reshard_after_forward": "default" if plan.reshard_after_forward else "never",
        "tensor_parallel_degree": plan.tp,
        "enable_async_tensor_parallel": plan.overlap_tp and plan.tp > 1,
        "disable_loss_parallel": plan.tp > 1 and scenario.training.loss_parallel is False,
        "context_parallel_degree": plan.cp,
        "pipeline_parallel_degree": plan.pp,
    }
    if plan.cp > 1:
        styles = {style: method for method, style in CP_STYLES.items()}
        found["context_parallel_rotate_method"] = styles.get(plan.cp_style, "allgather")
    if plan.pp > 1:
        names = {name: torch for torch, name in schedule_names().items()}
        found["pipeline_parallel_schedule"] = names.get(schedule_name(scenario), "1F1B")
        found["pipeline_parallel_microbatch_size"] = scenario.training.micro_batch_size
        found["module_fqns_per_model_part"] = module_names(scenario, "output")
    if plan.ep > 1:
        found["expert_parallel_degree"] = plan.ep
        found["expert_tensor_parallel_degree"] = resolved_etp(plan)
        found["expert_parallel_comm_backend"] = "deepep" if plan.ep_dispatcher == "deepep" else "standard"
        if schedule_name(scenario) == "dualpipe-v":
            found["pipeline_parallel_expert_parallel_overlap"] = plan.overlap_ep
    return found


def _main_parallelism(scenario: Scenario) -> dict[str, Any]:
    """The same in the names of the main branch."""
    found = {**_parallelism(scenario), "expert_parallel_degree": scenario.plan.ep}
    if scenario.plan.pp > 1:
        found |= {"num_pp_microbatches": microbatches(scenario), "module_fqns_per_model_part": module_names(scenario, "lm_head")}
    return {name: found[name] for name in _MAIN if name in found}


def module_names(scenario: Scenario, head: str) -> list[list[str]]:
    """Modules of each virtual stage; `head` is the output layer's name."""
    parts, first = [], 0
    for count in stage_counts(scenario):
        parts.append([f"layers.{i}" for i in range(first, first + count)])
        first += count
    parts[0].insert(0, "tok_embeddings")
    if any(stack.tower for stack in getattr(scenario.model, "stacks", ())):
        parts[0].insert(0, "vision_encoder")
    parts[-1] += ["norm", head]
    return parts


def _checkpoint(scenario: Scenario) -> dict[str, Any]:
    spec = recompute_of(scenario)
    if spec.granularity == "selective":
        return {"mode": "selective", "selective_ac_option": "op"}
    if spec.every > 1:
        return {"mode": "selective", "selective_ac_option": str(spec.every)}
    if spec.granularity == "full" and spec.num_layers:
        return {"mode": "selective", "selective_ac_option": str(max(max(stage_counts(scenario)) // spec.num_layers, 2))}
    return {"mode": spec.granularity}


def _unsaid(scenario: Scenario) -> set[str]:
    """Facts about torch's runtime rather than settings: how it sends, which kernel attends, when ranks wait."""
    found = {"plan.overlap_p2p", "plan.synchronous_optimizer", "training.attention_kernel", "training.cross_entropy"}
    return found | ({"plan.etp"} if scenario.plan.ep == 1 else set())


def configuration(scenario: Scenario) -> str:
    """The TOML file, with the comment lines that bring the scenario back.

    Raises:
        InputError: everything that torchtitan cannot run or its settings cannot say.
    """
    found = violations(scenario)
    model = scenario.model
    key = key_of(model) if isinstance(model, TokenModel) else None
    if key is None:
        raise InputError(found)
    text = _toml(sections(scenario, key))
    comments = carried(scenario, read_config(text), "torchtitan", found, _unsaid(scenario))
    since = "v0.2.2" if key[0] in PLAIN_ONLY else "v0.2.0 to v0.2.2"
    return "\n".join([*comments, f"# torchtitan {since}; data, steps and learning rate are yours.", "", text])


def _toml(found: Sections) -> str:
    blocks = []
    for name, values in found.items():
        lines = [f"[{name}]"]
        for key, value in values.items():
            if isinstance(value, list) and value and isinstance(value[0], list):
                lines += [f"{key} = [", *(f"    {toml_value(part)}," for part in value), "]"]
            else:
                lines.append(f"{key} = {toml_value(value)}")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"


def export(scenario: Scenario) -> dict[str, str]:
    """File name -> text: the TOML file (of models that a release has) and the script that starts it, the recipe for main, the Slurm
    script, the rank map.

    Raises:
        InputError: everything that torchtitan cannot run or its settings cannot say.
    """
    text = configuration(scenario)
    assert isinstance(scenario.model, TokenModel)
    key = key_of(scenario.model)
    assert key is not None
    released = key[0] not in MAIN_ONLY
    line = torchrun(scenario, "-m torchtitan.train", '--job.config_file torchtitan.toml "$@"')
    main = torchrun(scenario, "-m torchtitan.train", '--module torchtitan_recipe --config layout "$@"')
    script = (
        "#!/bin/bash\nset -e\nexport PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True\n\n"
        + (f"# v0.2.0 to v0.2.2\n{line}\n\n" if released else "")
        + f"# main: torchtitan_recipe.py stands on PYTHONPATH\n{'# ' if released else ''}{main}\n"
    )
    return {
        **({"torchtitan.toml": text} if released else {}),
        "torchtitan_recipe.py": recipe(scenario, key, _main_parallelism(scenario), _assets(key)),
        "torchtitan.sh": script,
        **beside(scenario, "torchtitan"),
    }
