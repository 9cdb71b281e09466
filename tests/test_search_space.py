"""The space of layouts: counted as it is listed, without doubles, every layout valid, every axis reachable, frameworks' limits."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from math import isclose

import pytest
from search_random import TINY, random_choice, space_of

from simpar.errors import InputError, Violation
from simpar.evidence.runs import _styles
from simpar.interop import deepspeed, megatron, nanotron, torchtitan
from simpar.interop.export import not_launched
from simpar.searching import axes
from simpar.searching.abilities import ABILITIES, ability
from simpar.searching.choice import EVEN, Choice, Pipeline
from simpar.searching.choice import Offload as Kept
from simpar.searching.designs import design_key
from simpar.searching.request import choice_of, make_space
from simpar.searching.space import Space
from simpar.specs.checks import check_scenario
from simpar.specs.counts import divisors
from simpar.specs.plan import OffloadSpec as Offload
from simpar.specs.scenario import Scenario
from simpar.step import prepare

Rules = Callable[[Scenario], list[Violation]]

MOE = {
    **TINY, "num_hidden_layers": 4,
    "moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512},
}  # fmt: skip

WANTED = {
    "tp": "2", "cp": "2", "pp": "2", "dp": "2", "ep": "4", "etp": "2", "virtual_stages": "2", "micro_batch_size": "2",
    "zero_stage": "2", "shard_size": "2", "sequence_parallel": "false", "overlap_tp": "true", "overlap_ep": "true",
    "overlap_p2p": "false", "overlap_grad_reduce": "false", "overlap_param_gather": "false", "reshard_after_forward": "false",
    "offload_optimizer": "true", "offload_parameters": "true", "offload_activations": "0.5", "schedule": "zb-v",
    "cp_style": "ulysses",
    "ep_dispatcher": "deepep", "precision": "fp8", "placement": "tp-cp-ep-pp-dp", "recompute": "full:1", "split": "1-1",
}  # fmt: skip
"""Axis -> a value that a usual layout does not have."""

REACHED_WITH = {"reshard_after_forward": ("pp=1", "zero_stage=3"), "shard_size": ("zero_stage=3", "pp=1", "dp=8"),
                "offload_parameters": ("zero_stage=3", "pp=1")}  # fmt: skip
"""What must be fixed beside an axis so that its value means something."""


SPREADS = ("overlap_grad_reduce", "overlap_param_gather", "shard_size", "reshard_after_forward")


def moe_space(**options: object) -> Space:
    """Four layers of eight experts on one node."""
    return space_of(MOE, nodes=1, sequence=1024, batch=16, **options)  # type: ignore[arg-type]


def small(model: dict[str, object], *fix: str, **options: object) -> Space:
    """A space small enough to list."""
    fixed = ("micro_batch_size=1", "offload_activations=0", "offload_optimizer=false", "overlap_p2p=true",
             "placement=tp-cp-ep-dp-pp")  # fmt: skip
    kept = tuple(f for f in fixed if f.split("=")[0] not in {g.split("=")[0] for g in fix})
    return space_of(model, nodes=1, sequence=1024, batch=16, fix=(*kept, *fix), **options)  # type: ignore[arg-type]


def test_the_exchange_of_the_scenario_is_one_of_the_choices() -> None:
    given = moe_space().template
    stated = given.model_copy(update={"plan": given.plan.model_copy(update={"ep_dispatcher": "hybridep"})})
    for template, more in ((given, set()), (stated, {"hybridep"})):
        space = Space(template, {}, None)
        met = {v.ep_dispatcher for group in space.groups if group.ep > 1 for v in space.variants(group)}
        assert met == {"alltoall", "deepep"} | more


def test_designs_and_measured_sweeps_tell_styles_apart_alike() -> None:
    """`searching` and `evidence` do not know each other: what differs in kind beside the degrees is the same for both."""
    space = moe_space()
    group = next(g for g in space.groups if g.ep > 1 and g.cp > 1)
    v = next(v for v in space.variants(group) if (v.cp_style, v.ep_dispatcher, v.overlap_ep) == ("ring", "alltoall", False))
    state = next(s for s in space.states(group) if s.zero_stage == 3 and not s.offload_parameters)
    usual = Choice(group, 1, v, Pipeline(1, "1f1b", EVEN, None), "none", state, Kept(0.0, False))
    others = {
        True: (
            replace(usual, variant=replace(v, cp_style="ulysses")), replace(usual, variant=replace(v, ep_dispatcher="deepep")),
            replace(usual, offload=Kept(0.5, False)), replace(usual, offload=Kept(0.0, True)),
            replace(usual, state=replace(state, offload_parameters=True)),
        ),
        False: (
            replace(usual, variant=replace(v, overlap_ep=True)), replace(usual, state=replace(state, overlap_grad_reduce=False)),
        ),
    }  # fmt: skip
    for differs, choices in others.items():
        for other in choices:
            plans = usual.plan(space.template.plan), other.plan(space.template.plan)
            assert (design_key(usual) != design_key(other)) is differs
            assert (_styles(plans[0]) != _styles(plans[1])) is differs


def test_divisors() -> None:
    for whole in range(1, 400):
        assert divisors(whole) == [d for d in range(1, whole + 1) if whole % d == 0]


@pytest.mark.parametrize(
    "space",
    [
        small(TINY, "tp=2", "zero_stage=1"), small(TINY, "pp=4", "recompute=none"), small(TINY, "pp=1", "cp=1"),
        small(MOE, "pp=2", "recompute=none", "zero_stage=1"), small(MOE, "tp=2", "pp=1", "recompute=full", "cp=1"),
    ],
    ids=["tp2", "pp4", "pp1", "moe-pp2", "moe-tp2"],
)  # fmt: skip
def test_the_size_is_the_number_of_listed_layouts_without_doubles(space: Space) -> None:
    listed = list(space.choices())
    assert 0 < len(listed) == space.size < 60_000
    assert len(set(listed)) == len(listed)
    plans = {choice.scenario(space.template).model_dump_json() for choice in listed}
    assert len(plans) == len(listed)


def test_layouts_pass_the_checks_of_a_scenario() -> None:
    draw = random.Random(3)
    for space in (moe_space(), space_of("llama3.1-8b", nodes=2), space_of("deepseek-v3", nodes=32, batch=256)):
        found = 0
        while found < 40:
            choice = random_choice(space, draw)
            if choice is None:
                continue
            found += 1
            assert check_scenario(choice.scenario(space.template)) == [], str(choice)


def test_a_layout_survives_the_way_through_its_flat_form() -> None:
    draw, space = random.Random(5), moe_space()
    for _ in range(50):
        choice = random_choice(space, draw)
        if choice is not None:
            assert Choice.from_flat(choice.flat()) == choice


@pytest.mark.parametrize("axis", axes.AXES)
def test_every_axis_can_be_fixed(axis: str) -> None:
    fixed = (f"{axis}={WANTED[axis]}", *REACHED_WITH.get(axis, ()))
    model = TINY if axis == "dp" else MOE
    semantics = "torchtitan" if axis == "offload_parameters" else "megatron-core"
    space = space_of(model, nodes=1, sequence=1024, batch=16, fix=fixed, semantics=semantics)
    assert space.size > 0
    wanted = axes.parse_values(axis, [WANTED[axis]])[0]
    draw, found = random.Random(1), 0
    for _ in range(400):
        choice = random_choice(space, draw)
        if choice is None:
            continue
        flat = choice.flat()
        if axis in ("ep_dispatcher", "overlap_ep", "etp") and choice.group.ep == 1:
            continue  # means nothing there
        if axis in ("cp_style",) and choice.group.cp == 1:
            continue
        if axis in ("sequence_parallel", "overlap_tp") and choice.group.tp == 1:
            continue
        if axis in ("overlap_p2p", "schedule", "split", "virtual_stages") and choice.group.pp == 1:
            continue
        always = choice.state.zero_stage == 3 or (choice.state.zero_stage == 2 and choice.group.pp == 1)
        if axis == "overlap_grad_reduce" and always:
            continue
        if axis == "overlap_param_gather" and choice.state.zero_stage not in (1, 2):
            continue
        if axis in SPREADS and choice.group.dp * choice.group.cp == 1:
            continue
        if axis == "shard_size" and choice.state.zero_stage == 0:
            continue
        if axis == "recompute" and flat[axis] == "full":
            continue  # a stage of one layer: all of them
        assert flat[axis] == wanted, str(choice)
        found += 1
    assert found


@pytest.mark.parametrize("axis", ["tp", "pp", "schedule", "recompute", "precision", "zero_stage", "cp_style"])
def test_allowing_more_only_adds(axis: str) -> None:
    values = {"tp": "1,2", "pp": "1,2,4", "schedule": "1f1b,zb-h1", "recompute": "none,full,full:*", "precision": "bf16,fp8",
              "zero_stage": "0,1,3", "cp_style": "ring,ulysses"}[axis]  # fmt: skip
    whole = moe_space(allow=(f"{axis}={values}",)).size
    parts = [moe_space(allow=(f"{axis}={value}",)).size for value in values.split(",")]
    assert max(parts) < whole
    if axis in ("tp", "pp", "precision", "recompute"):
        assert sum(parts) == whole


@pytest.mark.parametrize("name", sorted(ABILITIES))
def test_a_framework_limits_the_space_to_what_it_can_run(name: str) -> None:
    model, draw = MOE, random.Random(2)
    own = ability(name)
    able = {**own.values, **own.with_experts}
    limited = space_of(model, nodes=1, sequence=1024, batch=16, framework=name)
    free = space_of(model, nodes=1, sequence=1024, batch=16, semantics=name)
    assert 0 < limited.size <= free.size
    assert (limited.size < free.size) == bool(able)
    for _ in range(150):
        choice = random_choice(limited, draw)
        if choice is None:
            continue
        flat = choice.flat()
        assert axes.matches("recompute", flat["recompute"], able.get("recompute", (flat["recompute"],))), str(choice)
        if choice.group.pp > 1:
            assert flat["schedule"] in able.get("schedule", (flat["schedule"],))
        if choice.group.dp * choice.group.cp > 1:
            assert flat["zero_stage"] in able.get("zero_stage", (flat["zero_stage"],))
        assert flat["placement"] in able.get("placement", (flat["placement"],))
        assert check_scenario(choice.scenario(limited.template)) == []


@pytest.mark.parametrize("model", ["llama3.1-8b", "mixtral-8x7b"])
def test_megatron_lm_refuses_no_layout_that_is_offered(model: str) -> None:
    space, draw = space_of(model, nodes=4, batch=64, framework="megatron-core", semantics="megatron-core"), random.Random(7)
    drawn = [choice for _ in range(150) if (choice := random_choice(space, draw))]
    merged = [choice for choice in drawn if choice.variant.overlap_ep and choice.group.ep > 1]
    assert bool(merged) is (model == "mixtral-8x7b")
    for choice in drawn:
        assert megatron.violations(choice.scenario(space.template)) == [], str(choice)


def test_megatron_lm_refuses_no_layout_of_a_hybrid_model_that_is_offered() -> None:
    """Chunks used to be offered, found best, and refused when nothing else was left."""
    space, draw = (
        space_of("jamba-1.5-mini", nodes=4, batch=64, framework="megatron-core", semantics="megatron-core"),
        random.Random(7),
    )
    drawn = [choice for _ in range(150) if (choice := random_choice(space, draw))]
    assert any(choice.group.pp > 1 for choice in drawn)
    for choice in drawn:
        assert not not_launched(choice.scenario(space.template)), str(choice)


@pytest.mark.parametrize(
    ("name", "rules", "model", "compiled"),
    [("torchtitan", torchtitan.violations, "llama3.1-8b", True), ("torchtitan", torchtitan.violations, "deepseek-v2", False),
     ("deepspeed", deepspeed.violations, "mixtral-8x7b", False), ("nanotron", nanotron.violations, "mixtral-8x7b", False)],
)  # fmt: skip
def test_no_framework_refuses_a_layout_that_is_offered(name: str, rules: Rules, model: str, compiled: bool) -> None:
    space, draw = space_of(model, nodes=4, batch=64, framework=name, training={"compile": compiled}), random.Random(7)
    drawn = [choice for _ in range(150) if (choice := random_choice(space, draw))]
    assert len({choice.group for choice in drawn}) > 5
    assert any(choice.variant.overlap_tp for choice in drawn) is compiled
    for choice in drawn:
        if choice.offload.optimizer and not choice.state.zero_stage:
            continue  # DeepSpeed offloads what ZeRO shards; the same with stage 1 is faster and smaller, so it is never chosen
        found = [v for v in rules(choice.scenario(space.template)) if v.field.startswith(("plan.", "training."))]
        assert found == [], str(choice)


def test_sizes_of_the_two_large_spaces() -> None:
    dense = space_of("llama3.1-405b", nodes=2048, sequence=8192, batch=2048, framework="megatron-core")
    assert dense.size >= 1e7
    moe = space_of("deepseek-v3", "hgx-h800", nodes=256, batch=15360, framework="megatron-core")
    assert moe.size >= 1e8


def test_values_that_no_axis_has_are_named() -> None:
    for text in ("tp=x", "zero_stage=-1", "split=a-b", "overlap_tp=maybe", "tpp=1", "offload_activations=much"):
        with pytest.raises(InputError):
            space_of(TINY, nodes=1, sequence=1024, batch=16, fix=(text,))


def test_simpler_layouts_have_less_complexity() -> None:
    space = moe_space()
    plain = next(c for c in space.choices() if c.group.tp == c.group.cp == c.group.pp == c.group.ep == 1)
    draw = random.Random(0)
    for _ in range(100):
        choice = random_choice(space, draw)
        if choice is not None and choice.group.pp > 1 and choice.group.tp > 1:
            assert choice.complexity > plain.complexity or isclose(choice.complexity, plain.complexity)


@pytest.mark.parametrize("name", ["transformers", "torchtitan"])
def test_a_plan_with_ranges_leaves_open_what_the_framework_does(name: str) -> None:
    """The flags of overlap are left open, and the framework has one value of each."""
    table = {
        "model": TINY, "framework": name, "cluster": {"hardware": "dgx-h100", "num_nodes": 1},
        "training": {"sequence_length": 1024, "global_batch_size": 16, "micro_batch_size": [1, 2]},
        "plan": {"zero_stage": 3, "dp": 8},
    }  # fmt: skip
    space = make_space(table, framework=name)
    assert {c.micro_batch_size for c in space.choices()} == {1, 2}


def test_parameters_on_the_host_take_the_optimizer_of_fsdp_there() -> None:
    """With both asked for, FSDP has one layout and DeepSpeed one; each reads its own plan back."""
    for name, optimizer in (("trl", False), ("deepspeed", True)):
        table = {
            "model": TINY, "framework": name, "cluster": {"hardware": "dgx-h100", "num_nodes": 1},
            "training": {"sequence_length": 1024, "global_batch_size": 8, "micro_batch_size": [1]},
            "plan": {"zero_stage": 3, "dp": 8, "offload": {"parameters": True, "optimizer": True}},
        }  # fmt: skip
        space = make_space(table, framework=name)
        (choice,) = space.choices()
        assert (choice.offload.optimizer, choice.state.offload_parameters) == (optimizer, True)
        scenario = choice.scenario(space.template)
        assert prepare(scenario).layout.plan.offload.optimizer
        both = Offload(optimizer=True, parameters=True)
        said = scenario.model_copy(update={"plan": scenario.plan.model_copy(update={"offload": both})})
        assert choice_of(scenario) == choice_of(said) == choice
