"""torchtitan's TOML (2024 to v0.2.2) read back into a scenario: [parallelism], and [training] and [experimental] before it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Unpack

from simpar.boundary import parse_toml, reader
from simpar.errors import InputError, Violation
from simpar.interop.carried import Imported, Outside, Reading, settled
from simpar.interop.stage_cuts import split_fields
from simpar.interop.torchtitan_dump import renamed
from simpar.interop.torchtitan_models import find_key, known_flavors, model_of, model_table
from simpar.schedules import SCHEDULES
from simpar.specs.architecture import TokenModel
from simpar.specs.counts import layer_count

CP_STYLES: Final = {"allgather": "all_gather", "alltoall": "ring"}
_STEP_FREE: Final = re.compile(
    r"^(job|profil\w+|metrics|checkpoint\w*|lr_scheduler|comm|memory_estimation|validat\w+|experimental|debug|dataloader|tokenizer)\.|"
    r"^(hf_assets_path|dump_folder|loss\.loss_fn\.global_vocab_size|parallelism\.spmd_backend)$|"
    r"^fault_tolerance\.(?!enable$)|^float8\.|^mx\.|^quantize\.|"
    r"^training\.(dataset|dataset_path|steps|max_norm|warmup_steps|gc_freq|gc_debug|seed|deterministic|data_parallel_type|"
    r"fsdp_reshard_after_forward|dataloader.*)$|"
    r"^optimizer\.(lr|eps|beta1|beta2|weight_decay|fused)$|^compile\.(components|backend)$|"
    r"^model\.(norm_type|tokenizer_path|hf_assets_path|print_after_conversion|tokenizer_backend)$|"
    r"^activation_checkpoint\.(per_op.*|early_stop|preserve_rng_state|determinism_check|debug|memory_budget|visualize.*|force.*)$|"
    r"^parallelism\.(context_parallel_load_balancer|enable_compiled_autograd|pipeline_parallel_schedule_csv)$"
)
"""Settings that leave the step's time and memory alone."""
_TAKEN_AS: Final[tuple[tuple[str, Any, str], ...]] = (
    ("training.mixed_precision_reduce", "float32", "gradients are taken to be reduced in fp32"),
)
"""Settings that change the step, torchtitan's default (config/job_config.py of v0.2.2), and what is taken for another value."""


def schedule_names() -> dict[str, str]:
    """torch's name of each schedule ("Interleaved1F1B") -> simpar's."""
    found: dict[str, str] = {}
    for name, family in SCHEDULES.items():
        if family.torch_class:
            found.setdefault(family.torch_class.removeprefix("Schedule"), name)
    return found


@reader("file", "a TOML file of torchtitan up to v0.2.2")
def load(text: str, *, file: str = "", **outside: Unpack[Outside]) -> Imported:
    """The scenario of a TOML configuration.

    Raises:
        InputError: no TOML, an unknown model, values that cannot be read, rules that the scenario breaks; all together.
    """
    return settled(read_config(text, file), text, file, outside)


def load_dumped(table: dict[str, Any], text: str, *, file: str = "", **outside: Unpack[Outside]) -> Imported:
    """The scenario of a dumped configuration: the JSON of job.save_config_file or, of 2026, debug.save_config_file.

    Raises:
        InputError: as `load`.
    """
    return settled(read_table(renamed(table), file), text, file, outside)


def read_config(text: str, file: str = "") -> Reading:
    """What a configuration says by itself."""
    right = "a TOML file of torchtitan up to v0.2.2 (later configurations are Python)"
    table = parse_toml(text, file or "the configuration", right)
    return read_table(table, file)


def read_table(table: dict[str, Any], file: str = "") -> Reading:
    """What the tables of a configuration say by themselves."""
    if "model" not in table or not {"training", "parallelism"} & set(table):
        raise InputError([Violation("file", file or "-", "is no configuration of torchtitan", "[model] and [training] tables")])
    values = _Values(dict(_flat(table)), file, "parallelism" in table)
    reading = Reading({"name": Path(file).stem if file else "imported", "framework": "torchtitan", "cluster": {}})
    key = find_key(str(values.get("model.name", "llama3")), str(values.get("model.flavor", "debugmodel")))
    if key is None:
        wrong = f"{values.get('model.name')} {values.get('model.flavor')}"
        reading.wrong.append(
            Violation("model.flavor", wrong, "is no model known here", f"one of {', '.join(known_flavors(False))}", file)
        )
    else:
        reading.table["model"] = model_table(key)
        _check_model(values, model_of(key))
    layers = layer_count(model_of(key)) if key else 0
    experts = key is not None and model_of(key).moe is not None
    reading.table["plan"] = plan = _plan(values, layers, experts)
    reading.table["training"] = training = _training(values, experts=experts)
    batch = _Batch(values, plan)
    reading.finish = lambda raw, world: batch.finish(raw, world)
    plan["recompute"] = _recompute(values)
    training["compile"] = _compiled(values)
    if values.get("debug.moe_force_load_balance") or values.get("training.debug_moe_force_load_balance"):
        training["routing"] = {"kind": "balanced"}
    if values.parallel("disable_loss_parallel", False) and plan["tp"] > 1:
        training["loss_parallel"] = False
    values.finish()
    reading.warnings, reading.wrong = values.warnings, [*reading.wrong, *values.wrong]
    return reading


def _check_model(v: _Values, model: TokenModel) -> None:
    """A dump also holds the model as it was built: another one by the same name is refused."""
    sizes = {
        "dim": getattr(model, "hidden_size", None),
        "vocab_size": getattr(model, "vocab_size", None),
        "layers": layer_count(model),
    }
    for name, own in sizes.items():
        if (built := v.get(f"model.{name}", own)) != own and own is not None:
            v.refuse(f"model_spec.model.{name}", built, "is not what the flavor has", f"{own}, or a scenario by hand")
    if v.get("model.adapters", False):
        v.refuse("model_spec.model", "LoRA", "trains adapters alone, which is not read", "training.trainable = lora, by hand")


def _flat(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


class _Values:
    """Settings by path; every one asked for counts as read."""

    def __init__(self, values: dict[str, Any], file: str, sections: bool) -> None:
        self.values, self.file = values, file
        self.sections = sections
        self.read: set[str] = set()
        self.warnings: list[str] = []
        self.wrong: list[Violation] = []

    def get(self, path: str, default: Any = None) -> Any:
        self.read.add(path)
        return self.values.get(path, default)

    def parallel(self, name: str, default: Any) -> Any:
        """A degree: [parallelism], or [experimental] or [training] of 2024."""
        for section in ("parallelism", "experimental", "training"):
            if f"{section}.{name}" in self.values:
                return self.get(f"{section}.{name}")
        return default

    def number(self, value: Any, path: str, least: int = 1) -> int:
        if isinstance(value, int) and not isinstance(value, bool) and (value >= least or value == -1):
            return value
        self.wrong.append(Violation(path, value, "is no whole number that fits", f"at least {least}, or -1", self.file))
        return least

    def refuse(self, path: str, value: Any, rule: str, right: str) -> None:
        self.wrong.append(Violation(path, value, rule, right, self.file))

    def finish(self) -> None:
        for path, value in self.values.items():
            name = path.rpartition(".")[2]
            off = (
                value in (None, [])
                or (value is False and name.startswith(("enable_", "disable_")))
                or (value == 1 and name.endswith("_degree"))
            )
            if path not in self.read and not off and not _STEP_FREE.match(path):
                self.warnings.append(f"{path} = {value!r}: not in the scenario; the step may differ")


def _plan(v: _Values, layers: int, experts: bool) -> dict[str, Any]:
    def degree(name: str) -> int:
        return v.number(v.parallel(name, 1), name)

    tp, cp, pp = degree("tensor_parallel_degree"), degree("context_parallel_degree"), degree("pipeline_parallel_degree")
    plan: dict[str, Any] = {"tp": tp, "cp": cp, "pp": pp, "sequence_parallel": bool(v.parallel("enable_sequence_parallel", True))}
    if cp > 1:
        plan["cp_style"] = CP_STYLES.get(str(v.parallel("context_parallel_rotate_method", "allgather")), "all_gather")
    if experts:
        ep = degree("expert_parallel_degree")
        etp = v.number(v.parallel("expert_tensor_parallel_degree", 1), "expert_tensor_parallel_degree")
        plan |= {"ep": ep, "etp": etp if ep > 1 else tp}
        plan["ep_dispatcher"] = "deepep" if v.parallel("expert_parallel_comm_backend", "standard") == "deepep" else "alltoall"
    plan["overlap_tp"] = bool(v.parallel("enable_async_tensor_parallel", False)) and tp > 1
    plan |= _stages(v, layers, pp)
    if plan.get("schedule") == "dualpipe-v" and plan.get("ep", 1) > 1:
        plan["overlap_ep"] = bool(v.parallel("pipeline_parallel_expert_parallel_overlap", True))
    reshard = v.parallel("fsdp_reshard_after_forward", "default")
    if reshard == "always" and pp > 1:
        v.warnings.append(
            "fsdp_reshard_after_forward = 'always' with a pipeline: taken as the default, which keeps weights gathered"
        )
    plan["reshard_after_forward"] = reshard != "never"
    if v.get("training.enable_cpu_offload"):
        plan["offload"] = {"optimizer": True, "parameters": True}
    return plan


def _stages(v: _Values, layers: int, pp: int) -> dict[str, Any]:
    """Virtual stages and their layers, as torchtitan finds them; none of a model that is not known, which has no layers."""
    name = str(v.parallel("pipeline_parallel_schedule", "1F1B"))
    names = {k.lower(): s for k, s in schedule_names().items()}
    schedule = names.get(name.replace("_", "").replace("Schedule", "").lower())
    parts = v.parallel("module_fqns_per_model_part", None)
    points = v.parallel("pipeline_parallel_split_points", None)
    per_stage = v.parallel("pipeline_parallel_layers_per_stage", None)
    less = [v.parallel(f"pipeline_parallel_{end}_stage_less_layers", None) for end in ("first", "last")]
    if pp == 1:
        return {"virtual_stages": 1, "schedule": "1f1b"}
    if schedule is None:
        right = f"one of {', '.join(schedule_names())}"
        v.wrong.append(Violation("pipeline_parallel_schedule", name, "is no schedule known here", right, v.file))
        return {}
    if not layers:
        return {}
    if parts or points:
        counts = _listed_counts(v, layers, parts, points)
    else:
        counts = _even_counts(v, layers, pp * (1 if SCHEDULES[schedule].virtual_stages == 1 else 2), per_stage, less)
    if counts is None and v.wrong:
        return {}
    if counts is None or len(counts) % pp or sum(counts) != layers:
        rule = f"does not cut {layers} layers into a multiple of {pp} stages"
        v.wrong.append(Violation("the pipeline's split", counts, rule, "such as pipeline_parallel_layers_per_stage", v.file))
        return {}
    chunks = len(counts) // pp
    fixed = SCHEDULES[schedule].virtual_stages == 2
    return {"schedule": schedule, "virtual_stages": 2 if fixed else chunks, **split_fields(counts, pp)}


def _listed_counts(v: _Values, layers: int, parts: Any, points: Any) -> list[int] | None:
    """Layers of each stage where the modules of stages, or the first layers of all but the first, are listed."""
    if parts:
        if not isinstance(parts, list) or not all(isinstance(p, list) and all(isinstance(n, str) for n in p) for p in parts):
            v.refuse(
                "module_fqns_per_model_part", parts, "must be a list of lists of names", '[["tok_embeddings", "layers.0"], ...]'
            )
            return None
        return [sum(name.startswith("layers.") for name in part) for part in parts]
    if not isinstance(points, str | list):
        v.refuse("pipeline_parallel_split_points", points, "must be a list of names", '["layers.8"]')
        return None
    words = points.split(",") if isinstance(points, str) else list(points)
    starts = [0, *(int(m[1]) for w in words if (m := re.match(r"\s*layers\.(\d+)", str(w)))), layers]
    return [b - a for a, b in pairwise(starts)]


def _even_counts(v: _Values, layers: int, usual: int, per_stage: Any, less: list[Any]) -> list[int] | None:
    """Layers of each stage where they are spread evenly, over the `usual` number of stages or by so many each."""
    # The embedding and the head count as layers since 2025; the splits of 2024 had them beside.
    first, last = (v.number(n, "stage_less_layers", 0) if n is not None else int(v.sections) for n in less)
    whole = layers + first + last
    stages = -(-whole // per_stage) if isinstance(per_stage, int) and per_stage > 0 else usual
    each, extra = divmod(whole, stages)
    counts = [each + (index < extra) for index in range(stages)]
    counts[0] -= first
    counts[-1] -= last
    return counts if min(counts) >= 0 else None


def _recompute(v: _Values) -> str | dict[str, Any]:
    mode = str(v.get("activation_checkpoint.mode", "selective"))
    option = str(v.get("activation_checkpoint.selective_ac_option", "2"))
    if mode in ("none", "full"):
        return mode
    if mode != "selective":
        v.warnings.append(f"activation_checkpoint.mode = {mode!r}: taken as selective by operation")
        return {"granularity": "selective", "modules": ["op"]}
    if option == "op":
        return {"granularity": "selective", "modules": ["op"]}
    every = int(option) if option.isdigit() and int(option) else 2
    if every == 1:
        return "full"
    return {"granularity": "full", "every": every}


def _training(v: _Values, *, experts: bool) -> dict[str, Any]:
    wide = "fp32" if v.get("training.mixed_precision_param", "bfloat16") == "float32" else "bf16"
    for name, usual, text in _TAKEN_AS:
        if (value := v.get(name, usual)) != usual:
            v.warnings.append(f"{name} = {value!r}: {text}")
    converters = v.get("model.converters", [])
    if not isinstance(converters, str | list):
        v.refuse("model.converters", converters, "must be a list of names", '["float8"]')
        converters = []
    converters = converters.split(",") if isinstance(converters, str) else [str(c) for c in converters]
    float8 = any("float8" in c for c in converters) or any(v.get(f"{s}.enable_float8_linear") for s in ("float8", "training"))
    rowwise = any(str(v.get(f"{s}.recipe_name", "")).startswith("rowwise") for s in ("float8", "quantize.linear.float8"))
    gathered = any(v.get(f"{s}.enable_fsdp_float8_all_gather", False) for s in ("float8", "quantize.linear.float8"))
    grouped = [c for c in converters if "grouped_mm" in c]
    only = bool(grouped) and grouped == converters  # grouped products have a scale for each row
    narrow = "fp8-rowwise" if rowwise or only else "fp8"
    precision = "mxfp8" if any("mx" in c for c in converters) else narrow if float8 else wide
    parts = "all" if precision == wide or not experts else "experts" if only else "all" if grouped else "linears"
    known = {"adamw": "adamw", "adam": "adam", "muon": "muon"}
    name = str(v.get("optimizer.name", "AdamW"))
    if name.lower() not in known:
        v.warnings.append(f"optimizer.name = {name!r}: taken as AdamW")
    if (own := str(v.get("optimizer.implementation", "fused"))) not in ("fused", "foreach"):
        v.warnings.append(f"optimizer.implementation = {own!r}: taken as foreach")
    kind = known.get(name.lower(), "adamw")
    chunks = v.get("loss.num_chunks", 1)
    return {
        **({"narrow_modules": parts} if parts != "all" else {}),
        **({} if precision != "fp8" or gathered else {"fp8_gather": False}),
        **({"cross_entropy": "chunked"} if isinstance(chunks, int) and chunks > 1 else {}),
        "sequence_length": v.number(v.get("training.seq_len", 2048), "training.seq_len"),
        "precision": precision,
        "optimizer": "adamw-foreach" if kind != "muon" and own != "fused" else kind,
        "gradient_dtype": "fp32",
        **({"pure_bf16": True} if v.get("training.dtype", "float32") == "bfloat16" else {}),
        **({"optimizer_in_backward": True} if v.get("optimizer.early_step_in_backward") else {}),
    }


def _compiled(v: _Values) -> bool | str:
    enabled = bool(v.get("compile.enable", v.get("training.compile", False)))
    components = v.get("compile.components", ["model", "loss"])
    parts = [part for part in ("model", "loss") if enabled and part in components]
    return parts[0] if len(parts) == 1 else bool(parts)


class _Batch:
    """Batch and data-parallel degrees: what needs the number of GPUs."""

    def __init__(self, v: _Values, plan: dict[str, Any]) -> None:
        self.local = v.number(v.get("training.local_batch_size", v.get("training.batch_size", 8)), "training.local_batch_size")
        self.whole = v.number(v.get("training.global_batch_size", -1), "training.global_batch_size")
        self.replicas = v.number(v.parallel("data_parallel_replicate_degree", 1), "data_parallel_replicate_degree")
        shards = v.parallel("data_parallel_shard_degree", v.parallel("data_parallel_degree", -1))
        self.shards = v.number(shards, "data_parallel_shard_degree")
        self.plain = v.parallel("data_parallel_type", "fsdp") == "ddp"
        size = v.parallel("pipeline_parallel_microbatch_size", None)
        number = v.parallel("pipeline_parallel_microbatches", None)
        self.micro = self.local
        if plan["pp"] > 1:
            parts = number or (plan["pp"] if size is None and not v.sections else None)
            self.micro = max(self.local // parts, 1) if parts else v.number(1 if size is None else size, "microbatch_size")
        self.warnings, self.pipeline = v.warnings, plan["pp"] > 1

    def finish(self, table: dict[str, Any], world: int) -> None:
        plan, training = table["plan"], table["training"]
        rest = max(world // (plan["tp"] * plan["cp"] * plan["pp"]), 1)
        shards = self.shards if self.shards > 0 else max(rest // self.replicas, 1)
        dp = shards * self.replicas
        plan["dp"] = dp
        sharded = shards * plan["cp"] > 1
        plan["zero_stage"] = 0 if self.plain or (dp > 1 and not sharded) else 3
        if plan["zero_stage"] == 0:
            plan.pop("offload", None)  # FSDP's policy; DDP has none
            training.pop("fp8_gather", None)
        if sharded and self.replicas > 1:
            plan["shard_size"] = shards * plan["cp"]
        training["micro_batch_size"] = self.micro
        training["global_batch_size"] = self.whole if self.whole > 0 else self.local * dp
        if self.pipeline and self.whole > self.local * dp:
            text = f"global_batch_size {self.whole} takes several pipeline flushes a step: taken as one"
            self.warnings += [] if text in self.warnings else [text]
