"""What torchtitan dumps of 2026's configurations, in the sections and names of v0.2.2 (config/configurable.py, to_dict)."""

from __future__ import annotations

from typing import Any

from simpar.interop.resolved import inner


def renamed(table: dict[str, Any]) -> dict[str, Any]:
    """A configuration of 2026, which counts tokens, in the names of v0.2.2, which counts sequences."""
    found = {name: dict(value) if isinstance(value, dict) else value for name, value in table.items()}
    training, parallel = found.get("training", {}), found.get("parallelism", {})
    if isinstance(spec := found.pop("model_spec", None), dict):
        _as_built(found, spec)
    tokens, context = training.pop("num_tokens_per_microbatch_per_dp_rank", None), training.pop("max_context_length", None)
    if not isinstance(tokens, int) or not isinstance(context, int) or context < 1:
        return found
    micro, parts = max(tokens // context, 1), parallel.pop("num_pp_microbatches", None) or 1
    training |= {"seq_len": context, "local_batch_size": micro * parts}
    if (step := training.pop("num_tokens_per_train_step", -1)) > 0:
        training["global_batch_size"] = step // context
    parallel["pipeline_parallel_microbatch_size"] = micro
    return found


def _as_built(found: dict[str, Any], spec: dict[str, Any]) -> None:
    """What the classes of 2026 call otherwise, put in the sections of v0.2.2."""
    built = inner(spec, "model")
    sizes: dict[str, Any] = {name: built[name] for name in ("dim", "vocab_size") if name in built}
    if isinstance(layers := built.get("layers"), list):
        sizes["layers"] = len(layers)
    found["model"] = {"name": spec.get("name"), "flavor": spec.get("flavor"), **sizes, "adapters": _adapted(built)}
    found["activation_checkpoint"] = _checkpointing(found.get("activation_checkpoint"))
    compiled, optimizer = inner(found, "compile"), inner(found, "optimizer")
    if "enable_async_tensor_parallel" in compiled:
        inner(found, "parallelism")["enable_async_tensor_parallel"] = compiled.pop("enable_async_tensor_parallel")
    groups = optimizer.pop("param_groups", None)
    if names := {str(g.get("optimizer_name")) for g in groups if isinstance(g, dict)} if isinstance(groups, list) else set():
        optimizer["name"] = ", ".join(sorted(names))


def _adapted(part: Any) -> bool:
    """Whether a model's parts hold low-rank adapters: they train instead of it."""
    if isinstance(part, dict):
        return {"rank", "alpha"} <= set(part) or any(map(_adapted, part.values()))
    return isinstance(part, list) and any(map(_adapted, part))


def _checkpointing(section: Any) -> dict[str, Any]:
    """The mode of 2026's classes, whose names no dump holds: their settings tell them apart (activation_checkpoint.py)."""
    if not isinstance(section, dict):
        return {"mode": "none"}
    if "mode" in section:
        return section
    if "memory_budget" in section:
        return {"mode": "memory_budget"}
    by_operation = {"mode": "selective", "selective_ac_option": "op"}
    return by_operation if "force_recompute_mm_shapes_by_fqns" in section else {"mode": "full"}
