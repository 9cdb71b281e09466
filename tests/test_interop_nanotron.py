"""nanotron's YAML: what it says, the way back, and what nanotron does otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from simpar.boundary import parse_yaml
from simpar.errors import InputError
from simpar.interop.nanotron import export, violations
from simpar.interop.nanotron_import import cost_split, load
from simpar.specs.model import TransformerSpec
from simpar.specs.scenario import Scenario, make_scenario, read_scenario

SCENARIOS = Path(__file__).parent.parent / "scenarios"


def scenario(plan: dict[str, Any], training: dict[str, Any] | None = None, model: str = "llama3.1-8b", nodes: int = 2) -> Scenario:
    table = {
        "name": "nano: a layout",
        "model": model,
        "framework": "nanotron",
        "cluster": {"hardware": "dgx-h100", "num_nodes": nodes},
        "plan": {"zero_stage": 1, "sequence_parallel": True, **plan},
        "training": {"sequence_length": 4096, "global_batch_size": 64, "micro_batch_size": 2, **(training or {})},
    }
    return make_scenario(table).model_copy(update={"file": ""})


def test_the_file_says_the_layout() -> None:
    given_plan = {"tp": 2, "pp": 2, "dp": 4, "layers_per_stage": [18, 14], "recompute": "full"}
    text = export(scenario(given_plan))["nanotron.yaml"]
    table = parse_yaml(text, "nanotron.yaml")
    parallel = table["parallelism"]
    assert (parallel["tp"], parallel["pp"], parallel["dp"], parallel["tp_mode"]) == (2, 2, 4, "REDUCE_SCATTER")
    assert (parallel["pp_engine"], parallel["recompute_layer"]) == ("1f1b", True)
    assert table["tokens"] == {**table["tokens"], "batch_accumulation_per_replica": 8, "micro_batch_size": 2}
    assert table["model"]["model_config"]["num_key_value_heads"] == 8
    assert table["optimizer"]["zero_stage"] == 1
    assert isinstance(table["optimizer"]["optimizer_factory"]["adam_eps"], float)


def test_stages_are_cut_by_cost() -> None:
    """Blocks of 218 M matmul weights and a head of 525 M: 16 blocks and the head on two stages."""
    with pytest.raises(InputError) as caught:
        export(scenario({"tp": 2, "pp": 2, "dp": 4}))
    (violation,) = caught.value.violations
    assert violation.field == "plan.layers_per_stage"
    model = scenario({"tp": 2, "dp": 8}).model
    assert isinstance(model, TransformerSpec)
    cut = cost_split(model, 2)
    assert violation.right == str(list(cut))
    assert sum(cut) == 32
    assert cut[0] > cut[1]


def test_ranks_are_numbered_as_nanotron_does() -> None:
    """Pipeline ranks outermost; with experts data-parallel ranks."""
    for model, own, other in (
        ("llama2-7b", "tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"), ("mixtral-8x7b", "tp-cp-ep-pp-dp", "tp-cp-ep-dp-pp"),
    ):  # fmt: skip
        whole = scenario({"tp": 2}, model=model).model
        assert isinstance(whole, TransformerSpec)
        cut = {"tp": 2, "pp": 2, "dp": 4, "layers_per_stage": list(cost_split(whole, 2))}
        assert [v.right for v in violations(scenario({**cut, "placement": other}, model=model))] == [own]
        assert not violations(scenario({**cut, "placement": own}, model=model))
        # One pipeline rank: both orders are the same.
        assert not violations(scenario({"tp": 2, "dp": 8, "placement": other}, model=model))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(
    st.sampled_from((1, 2, 4)), st.sampled_from((1, 2)), st.booleans(), st.integers(0, 1),
    st.sampled_from(("1f1b", "gpipe", "auto")), st.sampled_from(("none", "full")), st.sampled_from(("bf16", "fp32")),
    st.sampled_from(("llama3.1-8b", "llama2-7b", "mixtral-8x7b")), st.booleans(),
)  # fmt: skip
def test_random_plans_come_back(
    tp: int, pp: int, sequence: bool, zero: int, schedule: str, recompute: str, precision: str, model: str, explicit: bool
) -> None:
    plan: dict[str, Any] = {"tp": tp, "pp": pp, "sequence_parallel": sequence, "zero_stage": zero, "schedule": schedule,
                            "recompute": recompute}  # fmt: skip
    try:
        whole = scenario({"tp": tp}, model=model).model
    except InputError:
        assume(False)
        return
    assert isinstance(whole, TransformerSpec)
    if pp > 1:
        plan["layers_per_stage"] = list(cost_split(whole, pp))
    if whole.moe is not None:
        plan["placement"] = "tp-cp-ep-pp-dp"
    if explicit:
        plan["dp"] = 16 // (tp * pp)
    made = scenario(plan, {"precision": precision}, model)
    if violations(made):
        with pytest.raises(InputError):
            export(made)
        return
    text = export(made)["nanotron.yaml"]
    assert load(text).scenario == made
    assert export(load(text).scenario)["nanotron.yaml"] == text


def test_what_it_cannot_run_is_named_together() -> None:
    with pytest.raises(InputError) as caught:
        export(read_scenario(SCENARIOS / "deepseek-v3_h800x2048_pp16ep64.toml"))
    fields = {v.field for v in caught.value.violations}
    assert fields >= {"plan.schedule", "training.precision", "model.moe", "model.mla", "plan.recompute", "training.optimizer"}
    with pytest.raises(InputError) as caught:
        export(scenario({"tp": 2, "cp": 2, "zero_stage": 3}, {"dropout": 0.1}))
    assert {v.field for v in caught.value.violations} >= {"plan.cp", "plan.zero_stage", "training.dropout"}


PUBLIC = """
model:
  dtype: bfloat16
  model_config:
    hidden_act: silu
    hidden_size: 4096
    intermediate_size: 14336
    is_llama_config: true
    max_position_embeddings: 8192
    num_attention_heads: 32
    num_hidden_layers: 32
    num_key_value_heads: 8
    vocab_size: 128256
optimizer:
  accumulate_grad_in_fp32: true
  optimizer_factory:
    name: adamW
  zero_stage: 0
parallelism:
  dp: 2
  pp: 2
  pp_engine: afab
  tp: 4
  tp_mode: ALL_REDUCE
tokens:
  batch_accumulation_per_replica: 4
  micro_batch_size: 1
  sequence_length: 4096
"""


def test_a_public_layout_is_read() -> None:
    found = load(PUBLIC, hardware="dgx-h100").scenario
    assert found.model.name == "Llama 3.1 8B"
    assert (found.plan.schedule, found.plan.sequence_parallel, found.training.global_batch_size) == ("gpipe", False, 8)
    assert (found.world_size, found.cluster.num_nodes) == (16, 2)  # dp x pp x tp
    one = load(PUBLIC.replace("dp: 2", "dp: 1").replace("pp: 2", "pp: 1"), hardware="dgx-h100").scenario
    assert (one.world_size, one.cluster.num_gpus) == (4, 4)


def changed(**sections: dict[str, Any]) -> str:
    """The file with keys of `model_config`, `model`, `parallelism` or at its top."""
    table = yaml.safe_load(PUBLIC)
    for name, more in sections.items():
        part = {"model_config": table["model"]["model_config"], "top": table}.get(name) or table[name]
        part.update(more)
    return yaml.safe_dump(table)


@pytest.mark.parametrize(
    ("sections", "name"),
    [
        ({"model_config": {"is_llama_config": False, "is_starcoder2_config": True}}, "model.model_config.is_starcoder2_config"),
        ({"model_config": {"moe_config": {"num_experts": 4, "layers": [1, 3]}}}, "model.model_config.moe_config.layers"),
        ({"top": {"doremi": {"ref_model_checkpoint_path": "x"}}}, "doremi"),
    ],
)
def test_what_makes_another_model_is_refused(sections: dict[str, Any], name: str) -> None:
    text = changed(**sections)
    with pytest.raises(InputError) as caught:
        load(text, hardware="dgx-h100")
    assert [v.field for v in caught.value.violations] == [name]
    for accepted in (name, "all"):
        (warning,) = load(text, hardware="dgx-h100", accept=[accepted]).warnings
        assert warning.startswith(name)


def test_experts_are_as_nanotrons_class_has_them() -> None:
    """What a file leaves out of them does not follow the model's width (config/models_config.py, MoEConfig)."""
    moe = {"enable_shared_expert": True, "layers": [-1]}
    found = load(changed(model_config={"is_llama_config": False, "is_qwen2_config": True, "moe_config": moe},
                         model={"make_vocab_size_divisible_by": 96}), hardware="dgx-h100").scenario  # fmt: skip
    experts = found.model.moe
    assert (experts.num_experts, experts.num_experts_per_tok, experts.moe_intermediate_size) == (8, 2, 1408)
    assert (experts.shared_expert_intermediate_size, experts.shared_expert_gate) == (5632, True)
    assert found.model.vocab_size == 334 * 96 * 4  # of 128256


def test_what_may_change_a_step_is_told() -> None:
    config = {"_use_doc_masking": True, "_attn_implementation": "flash_attention_2", "z_loss_enabled": False}
    assert load(changed(model_config=config, parallelism={"tp_mode": None, "pp_engine": None}), hardware="dgx-h100").warnings == (
        "model.model_config._use_doc_masking = True is not read; taken as False",
    )
