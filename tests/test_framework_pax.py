"""PAX: MaxText's compiled step with policies of its own; XLA's pipelines; what is refused, and with what there is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import simpar
from simpar.errors import InputError
from simpar.evidence.row_framework import framework_of, month_of_row
from simpar.evidence.row_layers import recompute_of
from simpar.searching.request import make_space
from simpar.specs.framework import POLICIES, FrameworkSpec, family_of, framework
from simpar.specs.scenario import Scenario
from simpar.step import prepare

XLA = ("maxtext", "maxtext-unpipelined", "pax", "pax-unrolled")
GPT_5B: dict[str, Any] = {
    "kind": "transformer", "hidden_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 32, "intermediate_size": 16384,
    "num_key_value_heads": 32, "head_dim": 128,
    "vocab_size": 50304, "max_position_embeddings": 2048, "tie_word_embeddings": True, "gated_mlp": False, "activation": "gelu",
    "norm": "layernorm", "position": "learned",
}  # fmt: skip
"""GPT5B of paxml/contrib/gpu/scripts_gpu/configs.py."""


def scenario(**changes: Any) -> Scenario:
    usual: dict[str, Any] = {
        "model": "llama2-7b", "hardware": "dgx-h100", "num_nodes": 2, "framework": "pax", "framework_version": "2024-06",
        "global_batch_size": 32, "micro_batch_size": 1, "sequence_length": 4096, "zero_stage": 3,
    }  # fmt: skip
    return simpar.load(**{**usual, **changes})


def parts(spec: FrameworkSpec) -> dict[str, Any]:
    """Its policies without their names and sources."""
    return {part: replace(getattr(spec, part), policy="", source="") for part in POLICIES}


def test_pax_is_maxtext_but_for_what_its_rows_say() -> None:
    own, base = parts(framework("pax", "2024-06")), parts(framework("maxtext-unpipelined", "2024-06"))
    assert {part for part in POLICIES if own[part] != base[part]} == {"kernels", "optimizer", "data", "pipeline", "conventions"}
    assert {family_of(name) for name in XLA} == {"maxtext"}
    assert all(getattr(framework("pax"), part).source for part in ("kernels", "optimizer", "data", "pipeline", "conventions"))


@pytest.mark.parametrize(
    ("version", "attention", "scaling"),
    [("2023-07", "unfused", ""), ("2023-11", "unfused", "delayed"), ("2024-06", "cudnn", "delayed")],
)
def test_its_kernels_by_date(version: str, attention: str, scaling: str) -> None:
    """TransformerEngine's layers from 2023-10 on, its flash attention from 2024-04 on."""
    kernels = framework("pax", version).kernels
    assert (kernels.attention_kernel("hopper"), kernels.te_scaling) == (attention, scaling)


def test_all_weights_are_cast_before_the_step() -> None:
    """A 16-bit copy of the shard beside fp32 weights and moments: 2 bytes a weight that MaxText, casting in a layer, has not."""
    pax, maxtext = (simpar.simulate(scenario(framework=name)).memory[0] for name in ("pax", "maxtext-unpipelined"))
    weights = pax["optimizer"] / 12
    assert maxtext["parameters"] == 0
    assert pax["parameters"] == pytest.approx(2 * weights)
    assert weights == pytest.approx(6.74e9 / 16, rel=0.01)


def test_gathers_run_ahead_where_layers_are_no_loop() -> None:
    """Inside one iteration of a loop a layer's weights come before it; unrolled, or pipelined, beside the layer before."""
    exposed = {name: simpar.simulate(scenario(framework=name)).step_time_s for name in ("pax", "pax-unrolled")}
    assert exposed["pax-unrolled"] < 0.95 * exposed["pax"]
    assert framework("pax-unrolled").conventions.recompute_default == "none"


@pytest.mark.parametrize(
    "changes",
    [{"model": GPT_5B, "num_nodes": 32, "global_batch_size": 2048, "micro_batch_size": 8, "sequence_length": 2048,
      "recompute": {"granularity": "selective", "modules": ["core_attn", "layernorm"]}},
     {"global_batch_size": 64, "micro_batch_size": 2, "precision": "fp8"},
     {"model": "llama2-70b", "num_nodes": 8, "global_batch_size": 64, "recompute": "full", "tp": 2, "sequence_parallel": True},
     {"zero_stage": 0, "tp": 4, "pp": 4},
     {"zero_stage": 3, "tp": 2, "pp": 4, "virtual_stages": 2},
     {"model": "mixtral-8x7b", "num_nodes": 8, "global_batch_size": 64, "ep": 8, "capacity_factor": 2.0, "recompute": "full"}],
)  # fmt: skip
def test_plans_of_pax(changes: dict[str, Any]) -> None:
    given = dict(changes)
    if "capacity_factor" in given:
        given["routing"] = {"capacity_factor": given.pop("capacity_factor")}
    result = simpar.simulate(scenario(**given))
    assert 0.1 < result.step_time_s < 20.0
    assert 0.1 < result.mfu < 0.7


@pytest.mark.parametrize("name", XLA)
@pytest.mark.parametrize(("chunks", "schedule"), [(1, "gpipe"), (2, "interleaved_bfs")])
def test_a_loop_that_is_differentiated_runs_all_forwards_first(name: str, chunks: int, schedule: str) -> None:
    given = scenario(framework=name, zero_stage=0, tp=4, pp=4, virtual_stages=chunks)
    found = prepare(given).schedule
    assert found.name == schedule
    phases = [action.phase.name for action in found.rows[0]]
    assert phases == sorted(phases, reverse=True)  # every F before any B
    assert simpar.simulate(given).step_time_s == simpar.simulate(scenario(
        framework=name, zero_stage=0, tp=4, pp=4, virtual_stages=chunks, schedule=schedule)).step_time_s  # fmt: skip


@pytest.mark.parametrize("name", XLA)
def test_without_a_pipeline_a_backward_follows_its_forward(name: str) -> None:
    """Accumulation holds what one micro-batch keeps, however many there are."""
    few, many = (simpar.simulate(scenario(framework=name, global_batch_size=16 * count)).memory[0] for count in (2, 8))
    assert many["activations"] == few["activations"]
    assert prepare(scenario(framework=name)).schedule.name == "1f1b"


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"pp": 4, "schedule": "1f1b"}, r"plan.schedule = '1f1b': pax has no such schedule; gpipe or interleaved_bfs"),
     ({"framework": "maxtext", "pp": 4, "schedule": "zb-h1"}, r"maxtext has no such schedule; gpipe or interleaved_bfs"),
     ({"zero_stage": 1}, r"plan.zero_stage = 1: .*; 0 or 3"), ({"cp": 2}, r"plan.cp = 2: pax splits no sequence; 1, or plan.tp"),
     ({"model": "mixtral-8x7b"}, r"capacity_factor = 'none': .*a number, such as 2.0"),
     ({"pp": 4, "virtual_stages": 3}, r"12 stages as many of 32 layers; pp x virtual_stages that divides them: 1, 2, 4, 8, 16, 32"),
     ({"pp": 2, "first_stage_less_layers": 2}, r"plan.layers_per_stage.*leave it out: 16 each"),
     ({"optimizer": "adamw-8bit"}, r"pax does not have it; a framework that does: ")],
)  # fmt: skip
def test_what_there_is_not_is_refused_with_what_there_is(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        scenario(**changes)


def test_one_rank_needs_no_pipeline_and_others_have_all_schedules() -> None:
    assert scenario(schedule="1f1b").plan.pp == 1
    assert scenario(framework="megatron-core", zero_stage=1, pp=4, schedule="zb-h1").plan.schedule == "zb-h1"
    assert scenario(framework="maxtext", zero_stage=1, cp=2).plan.cp == 2


@pytest.mark.parametrize("asked", ["any", "auto"])
def test_a_search_keeps_to_what_pax_runs(asked: str) -> None:
    """All of its layouts pass the checks; "auto" beside a range means PAX's own two schedules."""
    table: dict[str, Any] = {
        "model": "llama2-7b", "framework": "pax", "cluster": {"hardware": "dgx-h100", "num_nodes": 1},
        "plan": {"tp": [1, 2], "pp": [1, 2], "cp": [1, 2], "zero_stage": "any", "virtual_stages": [1, 2, 3], "schedule": asked},
        "training": {"sequence_length": 4096, "global_batch_size": 16},
    }  # fmt: skip
    space = make_space(table)
    groups = [group for group in space.groups if group.pp == 2]
    assert {pipeline.schedule for pipeline in space.pipelines(1, 8)} == {"1f1b"}
    assert {group.cp for group in space.groups} == {1}
    assert {state.zero_stage for group in space.groups for state in space.states(group)} == {0, 3}
    found = {(pipeline.schedule, pipeline.virtual_stages) for group in groups for pipeline in space.pipelines(2, 8)}
    assert found == {("gpipe", 1), ("interleaved_bfs", 2)}  # three chunks do not divide 32 layers


@pytest.mark.parametrize("stated", ["PAX", "paxml (JAX-Toolbox 24.04)", "Paxml/Praxis", "praxis on GPUs"])
def test_rows_that_name_pax(stated: str) -> None:
    row = {"framework": stated, "gpu": "H100", "source": "JAX-Toolbox Pax README"}
    assert framework_of(row) == ("pax", [])
    assert framework_of({"framework": "JAX"})[0] == "maxtext"
    assert month_of_row({**row, "framework_version": "24.04"}, "pax") == (2024, 4)


@pytest.mark.parametrize(
    ("policy", "modules"),
    [("save_dot_with_no_batch_dims", {"core_attn", "layernorm"}), ("save_dot_only", {"layernorm"}),
     ("save_qkv_out_proj", {"core_attn", "layernorm", "mlp"}), ("save_dot_for_mlperf_200b", {"layernorm", "mlp"}),
     ("save_dot_except_logits", {"layernorm"}), ("save_dot_except_logits_ffn1", {"layernorm", "mlp"})],
)  # fmt: skip
def test_checkpoint_policies_of_praxis(policy: str, modules: set[str]) -> None:
    found = recompute_of({"recompute": "selective", "recompute_detail": policy, "layers": 24}, framework("pax"), [])
    assert set(found["modules"]) == modules  # type: ignore[index]


def test_rows_that_do_not_say_recompute_all() -> None:
    assert recompute_of({"layers": 24}, framework("pax"), notes := []) == "full"
    assert notes == ["recomputation not stated: full (framework's default)"]
