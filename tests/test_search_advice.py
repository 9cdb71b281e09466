"""What search and improve recommend can be launched, changes something, and is ranked with the scenario's effects."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from search_layouts import SMALL
from search_random import random_choice, space_of

from simpar.errors import InputError
from simpar.interop.export import export_files, not_launched
from simpar.readings import outcome_of
from simpar.registry import UnknownNameError
from simpar.result.result import Result
from simpar.searching.abilities import ABILITIES, limit_of
from simpar.searching.answer import Answer, answer
from simpar.searching.command import Outputs, SearchOptions, run
from simpar.searching.effects import check_slow_ranks, gap_with_effects, has_effects, only_slows
from simpar.searching.find import find
from simpar.searching.improve import improve
from simpar.searching.parts import Wish
from simpar.searching.request import make_space
from simpar.searching.space import Space
from simpar.specs.scenario import make_scenario
from simpar.step import simulate

EXPORTS = {"megatron-core": "megatron", "torchtitan": "torchtitan", "deepspeed": "deepspeed", "nanotron": "nanotron"}
MODELS = (("llama3.1-8b", 2, 32), ("mixtral-8x7b", 4, 64))


@pytest.mark.parametrize("framework", EXPORTS)
@pytest.mark.parametrize("seed", range(3))
def test_what_a_framework_is_said_to_run_its_exporter_writes(framework: str, seed: int) -> None:
    draw, tried = random.Random(seed), 0
    for model, nodes, batch in MODELS:
        space = space_of(model, nodes=nodes, batch=batch, framework=framework)
        for _ in range(15):
            choice = random_choice(space, draw)
            if choice is None:
                continue
            if framework == "deepspeed" and choice.offload.optimizer and choice.state.zero_stage == 0:
                # Two axes of which the space knows no joint rule: the answer leaves such layouts out.
                assert not_launched(choice.scenario(space.template))
                continue
            tried += 1
            assert not not_launched(choice.scenario(space.template)), choice
    assert tried > 10


def test_frameworks_with_pipelines_are_searched_with_pipelines() -> None:
    for framework in ("megatron-core", "torchtitan", "deepspeed"):
        space = space_of("llama3.1-8b", nodes=2, batch=32, framework=framework)
        assert space.pipelines(2, 16), framework


def test_the_scenario_names_the_limit() -> None:
    assert limit_of(None, "nemo") == "nemo"
    assert limit_of("nemo", "megatron-core") == "nemo"
    assert limit_of("any", "nemo") is None
    assert limit_of(None, "hai-llm") is None
    with pytest.raises(UnknownNameError, match="any"):
        limit_of("fastest", "nemo")
    space = space_of("llama3.1-8b", framework="nemo")
    assert space.values("schedule", ["1f1b", "dualpipe-v"]) == ["1f1b"]
    assert space._ability is ABILITIES["megatron-core"]


def table(framework: str, **plan: object) -> dict[str, object]:
    return {
        "model": "llama3.1-8b", "framework": framework, "cluster": {"hardware": "dgx-h100", "num_nodes": 1},
        "plan": {"tp": 2, "pp": 4, "sequence_parallel": True, **plan},
        "training": {"sequence_length": 8192, "global_batch_size": 16},
    }  # fmt: skip


AXES = ("tp", "pp", "virtual_stages", "schedule", "overlap_grad_reduce", "overlap_p2p", "zero_stage", "offload_activations")


@pytest.mark.parametrize("framework", ["nemo", "torchtitan"])
def test_improvements_can_be_launched_and_each_of_their_parts_counts(framework: str) -> None:
    plan = {"zero_stage": 3, "pp": 2} if framework == "torchtitan" else {}
    scenario = make_scenario(table(framework, **plan))
    found = improve(scenario, runs=not_launched, axes=AXES, keep=100)
    changes = [*found.singles, *found.doubles]
    assert changes
    exporter = EXPORTS.get(framework, "megatron")
    for change in changes:
        assert export_files(exporter, change.scored.choice.scenario(scenario))
        assert change.scored.choice.pipeline.schedule != "dualpipe-v" or framework == "torchtitan"
        assert all(before != after for before, after in change.axes.values())
        for other in changes:
            if set(other.axes.items()) < set(change.axes.items()):
                assert other.scored.step_time_s > change.scored.step_time_s * (1 + 1e-6) or (
                    other.scored.device_bytes > change.scored.device_bytes
                )


def test_no_limit_is_asked_for_by_name() -> None:
    scenario = make_scenario(table("nemo"))
    free = improve(scenario, framework="any", axes=("schedule", "offload_activations"), keep=100)
    bound = improve(scenario, axes=("schedule", "offload_activations"), keep=100)
    schedules = [{c.scored.choice.pipeline.schedule for c in found.singles} for found in (free, bound)]
    assert "dualpipe-v" in schedules[0] | {"dualpipe-v" for c in free.doubles if c.scored.choice.pipeline.schedule == "dualpipe-v"}
    assert schedules[1] <= {"1f1b", "interleaved"}


@pytest.mark.parametrize("stride", [1.0001, 2.0])
def test_improve_finds_the_same_best_whatever_it_keeps(stride: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The search ends where nothing left can be among the doubles that are kept; that must not cost any of them."""
    scenario = make_scenario(
        {"model": "llama3.1-8b", "framework": "megatron-core", "cluster": {"hardware": "dgx-h100", "num_nodes": 1},
         "plan": {"tp": 4, "dp": 2, "recompute": "full", "sequence_parallel": True},
         "training": {"global_batch_size": 16, "sequence_length": 4096}}
    )  # fmt: skip
    axes = ("tp", "recompute", "micro_batch_size", "overlap_tp", "zero_stage")
    many = improve(scenario, axes=axes, keep=50)
    assert len(many.doubles) > 8
    monkeypatch.setattr("simpar.searching.improve._STRIDE", stride)
    for keep in (1, 3, 8):
        few = improve(scenario, axes=axes, keep=keep)
        assert [c.scored for c in few.doubles] == [c.scored for c in many.doubles[:keep]]
        assert [c.scored for c in few.singles] == [c.scored for c in many.singles[:keep]]


def test_a_slow_pipeline_rank_that_layouts_lack_is_refused_before_the_search() -> None:
    def space(expand: bool = False, **more: list[str]) -> Space:
        effects = {"slow_ranks": {1: 1.5}, "expand": expand}
        wanted = {
            "model": "llama3.1-8b", "cluster": {"hardware": "dgx-h100", "num_nodes": 1}, "effects": effects,
            "training": {"global_batch_size": 8, "sequence_length": 8192},
        }  # fmt: skip
        return make_space(wanted, allow=SMALL, **more)

    with pytest.raises(InputError, match="pipeline rank 1 is slow, and layouts of this space have 1 pipeline rank or more"):
        check_slow_ranks([space()])
    check_slow_ranks([space(fix=["pp=2"])])
    check_slow_ranks([space(expand=True)])


def test_layouts_are_ranked_with_the_effects_that_the_scenario_asks_for() -> None:
    """A pipeline rank at half its speed: the best without it is not the best with it, and the gap is of the step with it."""
    wanted = {
        "model": "llama3.1-8b", "cluster": {"hardware": "dgx-h100", "num_nodes": 1},
        "training": {"global_batch_size": 8, "sequence_length": 8192}, "effects": {"slow_ranks": {0: 2.0}},
    }  # fmt: skip
    space = make_space(wanted, allow=SMALL)
    assert has_effects(space.template)
    found = find(space, Wish(keep=3, pool=24))  # of 78; the best lies behind the first four without effects
    told = answer([found])

    def step(result: Result) -> float:
        return result.step_time_s if result.fits else float("inf")

    truth = min(step(simulate(choice.scenario(space.template), detail="stage")) for choice in space.choices())
    assert told.best is not None
    assert told.best.value == pytest.approx(told.best.result.step_time_s)
    assert told.best.value == pytest.approx(truth)
    assert [c.value for c in told.candidates] == sorted(c.value for c in told.candidates) or told.candidates[0].tied
    document = told.to_json()
    assert document["gap_of"] == "the step with the scenario's effects"
    assert document["simulated_with_effects"] >= 8
    gap = document["optimality_gap"]
    assert gap is not None
    assert truth >= told.best.value * (1 - gap) * (1 - 1e-9)
    assert found.best[0].step_time_s < told.best.value


def test_more_layouts_are_simulated_with_effects_until_no_other_can_be_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a pool of one the best with the effects is not in it; the certificate of what is printed holds all the same."""
    wanted = {
        "model": "llama3.1-8b", "cluster": {"hardware": "dgx-h100", "num_nodes": 1},
        "training": {"global_batch_size": 8, "sequence_length": 8192}, "effects": {"slow_ranks": {0: 1.1}},
    }  # fmt: skip
    monkeypatch.setattr("simpar.searching.command.POOL", 1)
    monkeypatch.setattr("simpar.searching.effects.POOL", 0)
    shown: list[Answer] = []
    said: list[str] = []
    outputs = Outputs(show=lambda result, _: shown.append(result), say=said.append)
    assert run(SearchOptions(table=wanted, allow=SMALL, top=1, workers=1, prove=True, outputs=outputs)) == 0
    space = make_space(wanted, allow=SMALL)
    results = [simulate(choice.scenario(space.template), detail="stage") for choice in space.choices()]
    truth = min(result.step_time_s for result in results if outcome_of(result).chance_to_fit >= 0.9)
    assert shown[0].best is not None
    assert shown[0].gap == 0.0
    assert shown[0].best.value == pytest.approx(truth)
    assert len(said) > 1
    assert shown[0].seen > 1


def test_gaps_are_only_claimed_where_effects_only_slow_down() -> None:
    space = make_space({**table("megatron-core"), "plan": {}}, allow=[*SMALL, "tp=2", "pp=1,2"])
    assert not has_effects(space.template)
    found = find(space, Wish(keep=2))
    last = max(s.step_time_s for s in found.best)
    effects = space.template.effects
    slow = effects.model_copy(update={"slow_ranks": {0: 1.5}})
    assert gap_with_effects(found, 2.0 * last, slow) == pytest.approx(0.5)
    assert gap_with_effects(found, 0.5 * last, slow) == 0.0
    for other in ({"slow_ranks": {0: 0.5}}, {"compute_sigma": 0.1}, {"interference": False}):
        changed = effects.model_copy(update=other)
        assert not only_slows(changed)
        assert gap_with_effects(found, last, changed) is None
    assert gap_with_effects(replace(found, finished=False), last, slow) is None


def test_what_cannot_be_launched_is_no_answer() -> None:
    space = make_space({**table("megatron-core"), "plan": {}}, allow=[*SMALL, "tp=2", "pp=1,2"])
    found = find(space, Wish(keep=4))
    first = found.best[0].choice
    told = answer([found], runs=lambda scenario: "no" if scenario.plan == first.scenario(space.template).plan else "")
    assert first not in [c.scored.choice for c in told.candidates]
    assert told.to_json()["rejected"]["their framework cannot launch them"] >= 1


def test_a_framework_without_an_exporter_stops_nothing() -> None:
    assert not not_launched(make_scenario(table("hai-llm")))
    with pytest.raises(InputError):
        export_files("megatron", make_scenario(table("nemo", schedule="dualpipe-v", virtual_stages=2)))
    assert not_launched(make_scenario(table("nemo", schedule="dualpipe-v", virtual_stages=2)))
