"""Rules that span several parts: each broken one is found, its right values are right, and all are listed together."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simpar.errors import InputError, Violation
from simpar.schedules import SCHEDULES
from simpar.specs.base import validate
from simpar.specs.checks import check_scenario
from simpar.specs.counts import ONE_CHUNK_SCHEDULES, TWO_CHUNK_SCHEDULES, model_stages, resolved_dp, resolved_etp
from simpar.specs.models_io import load_model
from simpar.specs.notes import scenario_notes
from simpar.specs.plan import PlanSpec
from simpar.specs.scenario import Scenario, make_scenario


def scenario(
    model: str = "llama3.1-8b",
    *,
    nodes: int = 1,
    hardware: str = "dgx-h100",
    plan: dict[str, Any] | None = None,
    training: dict[str, Any] | None = None,
    **rest: Any,
) -> Scenario:
    """A scenario that has not been checked yet."""
    table = {
        "name": "test", "file": "test.toml", "model": load_model(model).model_dump(),
        "cluster": {"hardware": hardware, "num_nodes": nodes, **rest.pop("cluster", {})}, "plan": plan or {},
        "training": {"sequence_length": 4096, "global_batch_size": 64, **(training or {})}, **rest,
    }  # fmt: skip
    return validate(Scenario, table)


def violations(model: str = "llama3.1-8b", **parts: Any) -> dict[str, Violation]:
    """Field -> violation."""
    return {v.field: v for v in check_scenario(scenario(model, **parts))}


def only(found: dict[str, Violation]) -> Violation:
    assert len(found) == 1, found
    return next(iter(found.values()))


def test_a_sound_scenario_has_none() -> None:
    assert violations(plan={"tp": 4, "pp": 2}) == {}


def test_violations_name_the_file() -> None:
    assert only(violations(plan={"dp": 3})).file == "test.toml"


def test_tp_must_divide_the_heads() -> None:
    sequence = {"sequence_length": 4092}
    heads, width = check_scenario(scenario(nodes=3, plan={"tp": 12}, training=sequence))
    assert (heads.field, heads.rule) == ("plan.tp", "must divide num_attention_heads (32)")
    assert (width.field, width.rule) == ("plan.tp", "must divide intermediate_size (14336)")
    assert heads.right == width.right == "one of 1, 2, 4, 8, 16, 32"


def test_tp_above_the_key_value_heads_replicates_them() -> None:
    assert violations(nodes=2, plan={"tp": 16}) == {}  # 8 key-value heads, each on two ranks
    found = violations("qwen3-30b-a3b", nodes=1, plan={"tp": 8})
    assert "plan.tp" not in found  # 4 key-value heads on 8 ranks


def test_tp_against_key_value_heads_that_do_not_fit() -> None:
    model = load_model("llama3.1-8b").model_copy(update={"num_attention_heads": 48, "num_key_value_heads": 12})
    base = scenario(nodes=1, plan={"tp": 8}).model_copy(update={"model": model})
    (found,) = check_scenario(base)
    assert "num_key_value_heads (12)" in found.rule
    assert found.right == "one of 1, 2, 4"


def test_tp_must_divide_the_feed_forward() -> None:
    model = load_model("llama3.1-8b").model_copy(update={"intermediate_size": 14337})
    (found,) = check_scenario(scenario(plan={"tp": 2}).model_copy(update={"model": model}))
    assert "intermediate_size (14337)" in found.rule


@pytest.mark.parametrize(
    ("plan", "field", "right"),
    [
        ({"tp": 2, "dp": 3}, "plan.dp", "4, or leave it out"),
        ({"tp": 16}, "plan", "at most 8"),
        ({"shard_size": 3}, "plan.shard_size", "one of 1, 2, 4, 8"),
        ({"zero_stage": 3, "shard_experts": False}, "plan.shard_experts", "zero_stage = 3, or leave it out"),
        ({"placement": "tp-cp-dp-pp"}, "plan.placement", 'such as "tp-cp-ep-dp-pp"'),
        ({"ep": 2}, "plan.ep", "1"),
        ({"recompute": {"modules": ["attn"]}}, "plan.recompute.modules", "one of core_attn"),
        ({"pp": 2, "virtual_stages": 2, "schedule": "1f1b"}, "plan.virtual_stages", "virtual_stages = 1"),
        ({"virtual_stages": 2}, "plan.virtual_stages", "1, or plan.pp of at least 2"),
        ({"pp": 2, "layers_per_stage": [16, 15]}, "plan.layers_per_stage", "2 numbers"),
        ({"pp": 2, "layers_per_stage": [16, 8, 8]}, "plan.layers_per_stage", "2 numbers"),
        ({"pp": 4, "last_stage_less_layers": 1}, "plan.first_stage_less_layers", "= 0"),
        ({"pp": 2, "embedding_alone": True}, "plan.pp", "at least 2"),
    ],
)
def test_layout_rules(plan: dict[str, Any], field: str, right: str) -> None:
    found = only(violations(plan=plan))
    assert (found.field, found.right.startswith(right) or right in found.right) == (field, True)


def test_more_stages_than_layers() -> None:
    assert "at most 32" in only(violations(nodes=8, plan={"pp": 64})).right


def test_a_world_that_does_not_divide() -> None:
    found = violations(nodes=1, plan={"tp": 1, "pp": 3}, training={"global_batch_size": 6})
    assert found["plan"].rule == "must divide the 8 GPUs of the cluster"
    assert "6 or 9 GPUs" in found["plan"].right


def test_global_batch_must_divide() -> None:
    found = only(violations(plan={"tp": 2}, training={"global_batch_size": 63, "micro_batch_size": 2}))
    assert found.field == "training.global_batch_size"
    assert found.right == "such as 56 or 64"
    assert only(violations(training={"global_batch_size": 5})).right == "such as 8"


def test_context_parallelism_divides_the_sequence() -> None:
    ring = only(violations(plan={"cp": 8}, training={"sequence_length": 1032}))
    assert "2 x cp must divide training.sequence_length (1032)" in ring.rule
    assert ring.right == "one of 1, 2, 3, 4, 6, 12, 43, 86, 129, 172, 258, 516"
    assert violations(plan={"cp": 8, "cp_style": "ulysses"}, training={"sequence_length": 1032}) == {}
    assert violations(plan={"cp": 4}, training={"sequence_length": 1032}) == {}
    assert violations(nodes=2, plan={"tp": 8, "cp": 2, "cp_style": "ulysses"}) == {}  # 4 heads on a rank
    too_many = violations(nodes=8, plan={"tp": 8, "cp": 8, "cp_style": "ulysses"})
    assert too_many["plan.cp"].right == "one of 1, 2, 4"


def test_sequence_parallelism_divides_the_sequence() -> None:
    found = only(violations(plan={"tp": 8}, training={"sequence_length": 4100}))
    assert "sequence_parallel splits the 4100 tokens" in found.rule
    assert found.right == "plan.tp one of 1, 2, 4, or sequence_parallel = false"
    assert violations(plan={"tp": 8, "sequence_parallel": False}, training={"sequence_length": 4100}) == {}


def test_experts() -> None:
    assert only(violations("mixtral-8x7b", nodes=2, plan={"ep": 16})).right == "one of 1, 2, 4, 8"
    world = only(violations("deepseek-v3", nodes=1, plan={"ep": 64}))
    assert world.rule == "etp 1 x ep 64 x pp 1 = 64 must divide the 8 GPUs"
    assert world.right == "etp x ep must divide 8: 1, 2, 4, 8"
    assert "plan.etp" in violations("qwen3-30b-a3b", nodes=5, plan={"etp": 5})
    assert violations("mixtral-8x7b", plan={"tp": 2, "ep": 8, "etp": 1}) == {}
    counts = {"kind": "counts", "counts": [1.0, 2.0]}
    assert "8" in only(violations("mixtral-8x7b", training={"routing": counts})).rule
    dealt = {"kind": "lognormal", "in_turn": True}
    assert only(violations("mixtral-8x7b", training={"routing": dealt})).right == 'kind = "balanced"'


@pytest.mark.parametrize(
    ("hardware", "precision", "fine"),
    [
        ("dgx-a100-80gb", "fp8", False), ("dgx-a100-80gb", "bf16", True), ("dgx-h100", "fp8", True),
        ("dgx-h100", "nvfp4", False), ("dgx-b200", "nvfp4", True), ("gtx-580-pair", "bf16", False),
        ("gtx-580-pair", "fp32", True), ("tpu-v4", "fp16", False), ("tpu-v4", "bf16", True),
    ],
)  # fmt: skip
def test_precision_must_exist_on_the_gpu(hardware: str, precision: str, fine: bool) -> None:
    found = violations(hardware=hardware, training={"precision": precision})
    assert (found == {}) is fine
    if not fine:
        assert precision not in found["training.precision"].right.split(", ")


def test_num_gpus_must_be_there() -> None:
    assert only(violations(cluster={"num_gpus": 9}, training={"global_batch_size": 9})).right == "at most 8"
    assert violations(cluster={"num_gpus": 4}) == {}


def test_unknown_names() -> None:
    assert "did you mean 'torchtitan'?" in only(violations(framework="torchtian")).right
    assert "did you mean 'dgx-h100'" in violations(hardware="dgx-h1000")["cluster.hardware"].rule
    base = scenario(plan={"pp": 2, "schedule": "1f1bb"})
    assert check_scenario(base) == []  # the lowering knows the schedules


def test_zero_above_one_under_a_pipeline_depends_on_the_framework() -> None:
    plan = {"pp": 2, "zero_stage": 3}
    assert only(violations(framework="deepspeed", plan=plan)).field == "plan.zero_stage"
    assert violations(framework="torchtitan", plan=plan) == {}


def test_models_without_attention_take_data_tensor_and_pipeline_only() -> None:
    found = violations("mlp-4096x24", nodes=1, plan={"tp": 3, "cp": 2, "ep": 2}, cluster={"num_gpus": 6})
    assert set(found) == {"plan.tp", "plan.cp", "plan.ep"}
    assert found["plan.tp"].right.startswith("one of 1, 2, 4")
    assert violations("alexnet", plan={"tp": 8}, training={"precision": "fp32"}) == {}
    assert "plan.tp" in violations("alexnet", nodes=2, plan={"tp": 16}, training={"precision": "fp32"})


def test_all_violations_come_together() -> None:
    table = {
        "model": "llama3.1-8b", "cluster": {"hardware": "dgx-a100-80gb", "num_nodes": 1},
        "plan": {"tp": 3, "ep": 2, "dp": 5, "placement": "tp"},
        "training": {"sequence_length": 4096, "global_batch_size": 7, "precision": "fp8"},
    }  # fmt: skip
    with pytest.raises(InputError) as caught:
        make_scenario(table, file="bad.toml")
    fields = {v.field for v in caught.value.violations}
    assert {"plan.tp", "plan.ep", "plan.dp", "plan.placement", "training.global_batch_size"} <= fields
    assert "training.precision" in fields
    assert str(caught.value).count("bad.toml: ") == len(caught.value.violations)


def test_notes_are_not_errors() -> None:
    long = scenario(plan={"tp": 8}, training={"sequence_length": 262144})
    assert check_scenario(long) == []
    assert "max_position_embeddings 131072" in scenario_notes(long)[0]
    uneven = scenario("llama3.1-405b", nodes=2, plan={"pp": 16})
    assert "126 layers do not divide evenly over 16" in scenario_notes(uneven)[0]
    assert "scale-up domain of 8" in scenario_notes(scenario(nodes=2, plan={"tp": 16}))[0]


def test_resolved_degrees() -> None:
    moe = scenario("deepseek-v3", nodes=32, plan={"tp": 2, "pp": 4, "ep": 16})
    assert (resolved_dp(moe), resolved_etp(moe.plan)) == (32, 1)
    dense = PlanSpec(tp=4)
    assert resolved_etp(dense) == 4
    assert [model_stages(PlanSpec(pp=4, schedule=s)) for s in ("zb-v", "dualpipe", "1f1b")] == [8, 4, 4]


@settings(max_examples=60, deadline=None)
@given(tp=st.integers(1, 40), pp=st.integers(1, 12), dp=st.integers(1, 6), per_rank=st.integers(1, 30))
def test_exactly_the_sound_layouts_pass(tp: int, pp: int, dp: int, per_rank: int) -> None:
    """Llama 3.1 8B (32 heads, 8 key-value heads, width 14336, 32 layers) against the rules written out again."""
    gpus = tp * pp * dp
    base = scenario(
        nodes=-(-gpus // 8), cluster={"num_gpus": gpus}, plan={"tp": tp, "pp": pp},
        training={"global_batch_size": per_rank * 6},
    )  # fmt: skip
    sound = tp in (1, 2, 4, 8, 16, 32) and (per_rank * 6) % dp == 0
    assert (check_scenario(base) == []) is sound


@settings(max_examples=60, deadline=None)
@given(tp=st.integers(1, 64), heads=st.integers(1, 64), length=st.integers(1, 64))
def test_the_right_values_are_right(tp: int, heads: int, length: int) -> None:
    """Every tp that a message offers passes the very rule that broke."""
    model = load_model("gpt3-175b").model_copy(
        update={"num_attention_heads": heads, "num_key_value_heads": heads, "intermediate_size": 4 * heads}
    )

    def about_tp(degree: int) -> list[Violation]:
        base = scenario(
            nodes=8, cluster={"num_gpus": degree}, plan={"tp": degree}, training={"sequence_length": 16 * length}
        ).model_copy(update={"model": model})
        return [v for v in check_scenario(base) if v.field == "plan.tp"]

    for violation in about_tp(tp):
        offered = re.sub(r", (\.\.\.|or).*", "", violation.right.split("one of ")[1])
        for degree in map(int, offered.split(", ")):
            broken = {v.rule.split("(")[0] for v in about_tp(degree)}
            assert all("sequence_parallel" in rule for rule in broken)
            assert violation.rule.split("(")[0] not in broken


def messages(**parts: Any) -> list[str]:
    table = {"cluster": {"hardware": "dgx-h100", "num_nodes": 1}, "training": {"global_batch_size": 8}, **parts}
    with pytest.raises(InputError) as caught:
        make_scenario(table, file="f.toml")
    return str(caught.value).splitlines()


def test_a_wrong_model_comes_with_the_rest() -> None:
    name, field = messages(model="llama3.1-8", plan={"tpp": 3})
    assert name.startswith("f.toml: model = 'llama3.1-8': unknown model 'llama3.1-8'; did you mean 'llama3.1-8b'?")
    assert field == "f.toml: plan.tpp = 3: unknown field; did you mean 'tp'?"
    table = messages(model={"hidden_sise": 3, "num_hidden_layers": -1})
    assert "f.toml: model.hidden_sise = 3: unknown field; did you mean 'hidden_size'?" in table
    assert any("model.num_hidden_layers = -1" in line for line in table)
    assert messages(model={"kind": "rnn"}) == [
        "f.toml: model.kind = 'rnn': unknown kind of model; one of transformer, mlp, cnn, layers"
    ]
    assert "must be a preset's name" in messages(model=3)[0]
    assert messages() == ["f.toml: model: is required"]


def test_a_transformer_needs_a_sequence_length() -> None:
    (line,) = messages(model="llama3.1-8b")
    assert line == ("f.toml: training.sequence_length: is required for a transformer; at most 131072 for this model")


def test_schedules_of_a_fixed_number_of_chunks_are_those_of_the_registry() -> None:
    """The specs cannot import the schedules, so their two lists are held against them here."""
    chunks = {name: family.virtual_stages for name, family in SCHEDULES.items()}
    assert set(TWO_CHUNK_SCHEDULES) == {name for name, count in chunks.items() if count == 2}
    assert set(ONE_CHUNK_SCHEDULES) == {name for name, count in chunks.items() if count == 1}


@pytest.mark.parametrize("schedule", TWO_CHUNK_SCHEDULES)
def test_layers_of_a_v_are_given_for_both_chunks(schedule: str) -> None:
    plan = {"pp": 2, "schedule": schedule, "layers_per_stage": [10, 6, 6, 10]}
    table = {"model": "llama3.1-8b", "cluster": {"hardware": "dgx-h100", "num_nodes": 1}, "plan": plan,
             "training": {"sequence_length": 1024, "global_batch_size": 32}}  # fmt: skip
    assert make_scenario(table).plan.layers_per_stage == (10, 6, 6, 10)
