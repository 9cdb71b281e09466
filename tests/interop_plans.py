"""Random scenarios for the tests of launch files, of what a framework has settings for and beyond it."""

from __future__ import annotations

from typing import Any

from hypothesis import assume
from hypothesis import strategies as st

from simpar.errors import InputError
from simpar.specs.scenario import Scenario, make_scenario

MODELS = ("llama3.1-8b", "llama3.1-70b", "gpt3-175b", "mixtral-8x7b", "deepseek-v3", "qwen3-30b-a3b", "nemotron4-15b")
TITAN_MODELS = ("llama3.1-8b", "llama3.1-70b", "llama3.1-405b", "qwen3-32b", "qwen3-30b-a3b", "deepseek-v2")
MEGATRON_MODULES = ("core_attn", "layernorm", "mlp", "moe", "moe_act", "mla_up_proj", "shared_experts")


def _maybe(draw: st.DrawFn, table: dict[str, Any], name: str, values: st.SearchStrategy[Any]) -> None:
    """A field that is often left out."""
    if draw(st.booleans()):
        table[name] = draw(values)


def _degrees(draw: st.DrawFn) -> dict[str, int]:
    names = ("tp", "cp", "pp", "dp")
    return {n: 2 ** draw(st.integers(0, 3)) for n in names}


def _cluster(world: int) -> dict[str, Any]:
    if world < 8:
        return {"hardware": "dgx-h100", "num_nodes": 1, "num_gpus": world}
    return {"hardware": "dgx-h100", "num_nodes": world // 8}


def _scenario(table: dict[str, Any]) -> Scenario:
    try:
        return make_scenario(table).model_copy(update={"file": ""})
    except InputError:
        assume(False)
        raise


@st.composite
def megatron_scenarios(draw: st.DrawFn) -> Scenario:
    """Scenarios whose every field is a setting of Megatron-LM, as far as one field alone decides that."""
    degrees = _degrees(draw)
    model = draw(st.sampled_from(MODELS))
    v = draw(st.sampled_from((1, 1, 2, 3, 4))) if degrees["pp"] > 1 else 1
    plan: dict[str, Any] = {**degrees, "virtual_stages": v}
    if draw(st.booleans()):
        del plan["dp"]
    _maybe(draw, plan, "schedule", st.just("interleaved" if v > 1 else "1f1b"))
    _maybe(draw, plan, "sequence_parallel", st.booleans())
    _maybe(draw, plan, "cp_style", st.sampled_from(("ring", "all_gather", "ulysses")))
    _maybe(draw, plan, "zero_stage", st.integers(0, 3))
    _maybe(draw, plan, "placement", st.sampled_from(("tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp")))
    _maybe(draw, plan, "overlap_grad_reduce", st.booleans())
    _maybe(draw, plan, "overlap_param_gather", st.booleans())
    _maybe(draw, plan, "overlap_tp", st.booleans())
    if v > 1:
        _maybe(draw, plan, "overlap_p2p", st.booleans())
        _maybe(draw, plan, "microbatch_group_size", st.sampled_from((degrees["pp"], 2 * degrees["pp"])))
    if draw(st.booleans()):
        plan["shard_size"] = degrees["dp"] * degrees["cp"] // draw(st.sampled_from((1, 2))) or 1
    if degrees["pp"] > 1 and draw(st.booleans()):
        plan |= {"first_stage_less_layers": draw(st.integers(0, 2)), "last_stage_less_layers": draw(st.integers(0, 2))}
    kind = draw(st.sampled_from(("none", "selective", "full", "modules", "block")))
    modules = draw(st.lists(st.sampled_from(MEGATRON_MODULES), unique=True, min_size=1))
    plan["recompute"] = {
        "modules": {"granularity": "selective", "modules": modules},
        "block": {"granularity": "full", "method": "block", "num_layers": draw(st.integers(1, 4))},
    }.get(kind, kind)
    _maybe(draw, plan, "offload", st.just({"optimizer": True}))
    _maybe(draw, plan, "ep", st.sampled_from((1, 2, 4, 8)))
    _maybe(draw, plan, "etp", st.sampled_from((1, 2)))
    _maybe(draw, plan, "ep_dispatcher", st.sampled_from(("alltoall", "deepep")))
    training = _training(draw, degrees["dp"])
    _maybe(draw, training, "precision", st.sampled_from(("bf16", "fp16", "fp8", "fp8-block")))
    _maybe(draw, training, "optimizer", st.sampled_from(("adamw", "adam", "sgd", "sgd-momentum", "adamw-bf16-moments")))
    _maybe(draw, training, "dropout", st.sampled_from((0.0, 0.1)))
    _maybe(draw, training, "attention_kernel", st.sampled_from(("auto", "unfused", "fa2", "cudnn")))
    _maybe(draw, training, "cross_entropy", st.sampled_from(("auto", "fused")))
    world = degrees["tp"] * degrees["cp"] * degrees["pp"] * degrees["dp"]
    framework = draw(st.sampled_from(("megatron-core", "nemo", "megatron-lm")))
    version = draw(st.sampled_from((None, "2021-06", "0.12", "25.04")))
    table = {"name": draw(st.text(max_size=12)) or "x", "model": model, "framework": framework, "cluster": _cluster(world)}
    if version:
        table["framework_version"] = version
    return _scenario({**table, "plan": plan, "training": training})


@st.composite
def torchtitan_scenarios(draw: st.DrawFn) -> Scenario:
    """Scenarios whose every field is a setting of torchtitan, as far as one field alone decides that."""
    degrees = _degrees(draw)
    schedule = draw(st.sampled_from(("auto", "1f1b", "gpipe", "interleaved", "interleaved_bfs", "interleaved_zb", "zb-v")))
    chunks = draw(st.integers(2, 4)) if schedule.startswith("interleaved") else 1
    plan: dict[str, Any] = {**degrees, "zero_stage": draw(st.sampled_from((3, 3, 3, 0)))}
    if degrees["pp"] > 1:
        plan |= {"schedule": schedule, "virtual_stages": chunks}
        if draw(st.booleans()):
            plan |= {"first_stage_less_layers": draw(st.integers(0, 2)), "last_stage_less_layers": draw(st.integers(0, 2))}
    _maybe(draw, plan, "cp_style", st.sampled_from(("ring", "all_gather")))
    _maybe(draw, plan, "reshard_after_forward", st.booleans())
    _maybe(draw, plan, "overlap_p2p", st.booleans())
    _maybe(draw, plan, "overlap_tp", st.booleans())
    if draw(st.booleans()) and degrees["dp"] > 1:
        plan["shard_size"] = degrees["dp"] * degrees["cp"] // 2
    _maybe(draw, plan, "ep", st.sampled_from((1, 2, 4, 8)))
    _maybe(draw, plan, "ep_dispatcher", st.sampled_from(("alltoall", "deepep")))
    plan["recompute"] = draw(
        st.sampled_from(("none", "full", {"granularity": "selective", "modules": ["op"]}, {"granularity": "full", "every": 3}))
    )
    training = _training(draw, degrees["dp"])
    _maybe(draw, training, "precision", st.sampled_from(("bf16", "fp8")))
    _maybe(draw, training, "optimizer", st.sampled_from(("adamw", "adam")))
    _maybe(draw, training, "compile", st.booleans())
    world = degrees["tp"] * degrees["cp"] * degrees["pp"] * degrees["dp"]
    model = draw(st.sampled_from(TITAN_MODELS))
    table = {"name": "titan", "model": model, "framework": "torchtitan", "cluster": _cluster(world)}
    _maybe(draw, table, "framework_version", st.sampled_from(("v0.2", "2024-09")))
    return _scenario({**table, "plan": plan, "training": training})


def _training(draw: st.DrawFn, dp: int) -> dict[str, Any]:
    micro = draw(st.sampled_from((1, 2, 4)))
    table: dict[str, Any] = {
        "sequence_length": draw(st.sampled_from((2048, 4096))),
        "micro_batch_size": micro,
        "global_batch_size": micro * dp * draw(st.sampled_from((1, 8, 16))),
    }
    _maybe(draw, table, "gradient_dtype", st.just("fp32"))
    return table
