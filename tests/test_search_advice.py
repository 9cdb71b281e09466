"""What search and improve recommend can be launched, changes something, and is ranked with the scenario's effects."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from search_layouts import SMALL
from search_random import random_choice, space_of

from simpar.errors import InputError
from simpar.interop.export import export_files, not_launched
from simpar.readings import outcome_of
from simpar.registry import UnknownNameError
from simpar.searching.abilities import ABILITIES, limit_of
from simpar.searching.answer import Answer, answer
from simpar.searching.command import Outputs, SearchOptions, run
from simpar.searching.effects import check_slow_ranks, gap_with_effects, has_effects, leaves_out, only_slows, step_of
from simpar.searching.evaluation import Evaluation
from simpar.searching.find import find
from simpar.searching.improve import improve
from simpar.searching.parts import Wish
from simpar.searching.pricing import Pricing
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
    def space(expand: bool = False, rank: int = 1, **more: list[str]) -> Space:
        effects = {"slow_ranks": {rank: 1.5}, "expand": expand}
        wanted = {
            "model": "llama3.1-8b", "cluster": {"hardware": "dgx-h100", "num_nodes": 1}, "effects": effects,
            "training": {"global_batch_size": 8, "sequence_length": 8192},
        }  # fmt: skip
        return make_space(wanted, allow=SMALL, **more)

    with pytest.raises(InputError, match="pipeline rank 1 is slow, and layouts of this space have 1 pipeline rank or more"):
        check_slow_ranks([space()])
    check_slow_ranks([space(fix=["pp=2"])])
    check_slow_ranks([space(expand=True)])
    with pytest.raises(InputError, match="GPU 8 is slow, and there are 8"):
        check_slow_ranks([space(expand=True, rank=8)])


FAULTY = {"link_faults": [{"link": "gpu:0>nvswitch:0", "factor": 0.2}]}
"""An effect that the search leaves out."""


def with_effects(effects: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A scenario of eight GPUs of which something is slow."""
    training = {"global_batch_size": 8, "sequence_length": 8192}
    cluster = {"hardware": "dgx-h100", "num_nodes": 1}
    return {"model": "llama3.1-8b", "cluster": cluster, "training": training, "effects": effects, **more}


def truth_of(space: Space) -> float:
    """The step time of the fastest layout that is likely enough to fit, by brute force."""
    results = [simulate(choice.scenario(space.template), detail="stage") for choice in space.choices()]
    return min(step_of(result) for result in results if outcome_of(result).chance_to_fit >= 0.9)


def searched(effects: dict[str, Any], **options: Any) -> tuple[Answer, list[str]]:
    """What the command finds, and what it says meanwhile."""
    shown: list[Answer] = []
    said: list[str] = []
    outputs = Outputs(show=lambda result, _: shown.append(result), say=said.append)
    assert run(SearchOptions(table=with_effects(effects), allow=SMALL, workers=1, outputs=outputs, **options)) == 0
    return shown[0], said


@pytest.mark.parametrize("effects", [{"slow_ranks": {0: 2.0}}, {"slow_ranks": {3: 1.4}, "expand": True}])
def test_a_search_knows_slow_ranks_and_ends_by_proof(effects: dict[str, Any]) -> None:
    """Nothing but the designs of the answer is simulated with them again."""
    space = make_space(with_effects(effects), allow=SMALL)
    assert has_effects(space.template)
    assert not leaves_out(space)
    told, said = searched(effects, top=3, prove=True)
    assert told.best is not None
    assert told.best.value == pytest.approx(truth_of(space))
    assert told.best.value == pytest.approx(told.best.result.step_time_s)
    document = told.to_json()
    assert document["effects"] is True
    assert document["optimality_gap"] == 0.0
    assert document["gap_of"] == "the step with the scenario's effects"
    assert document["simulated_with_effects"] == 3
    assert told.runner_up is not None
    assert not said
    plain, _ = searched({}, top=1, prove=True)
    assert plain.best is not None
    assert plain.best.value < told.best.value


@pytest.mark.parametrize("effects", [FAULTY, {**FAULTY, "slow_ranks": {0: 1.3}}])
def test_effects_that_a_search_leaves_out_rank_a_pool_of_its_best(effects: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """With a pool of one the best with the effects is not in it; the certificate of what is printed holds all the same."""
    monkeypatch.setattr("simpar.searching.command.POOL", 1)
    monkeypatch.setattr("simpar.searching.effects.POOL", 0)
    space = make_space(with_effects(effects), allow=SMALL)
    assert leaves_out(space)
    told, said = searched(effects, top=1, prove=True)
    assert told.best is not None
    assert told.gap == 0.0
    assert told.best.value == pytest.approx(truth_of(space))
    assert len(said) > 1
    assert told.seen > 1
    document = told.to_json()
    assert document["gap_of"] == "the step with the scenario's effects"
    assert document["runner_up"] is None


def test_slow_gpus_of_two_replicas_are_left_to_the_simulation_of_both() -> None:
    """The search knows each of their pipelines alone, which is a bound."""
    effects = {"slow_ranks": {0: 1.3, 7: 1.2}, "expand": True}
    space = make_space(with_effects(effects), allow=SMALL)
    assert leaves_out(space)
    told, _ = searched(effects, top=1, prove=True)
    assert told.best is not None
    assert told.gap == 0.0
    assert told.best.value == pytest.approx(truth_of(space))


@pytest.mark.parametrize("effects", [{"slow_ranks": {1: 1.5}}, {"slow_ranks": {5: 1.5}, "expand": True}])
def test_changes_are_of_the_step_with_slow_ranks(effects: dict[str, Any]) -> None:
    plan = {"tp": 1, "pp": 4, "dp": 2, "schedule": "1f1b", "recompute": "full"}
    scenario = make_scenario(with_effects({**effects, "contention": True}, plan=plan, framework="megatron-core"))
    known = scenario.model_copy(update={"effects": scenario.effects.model_copy(update={"contention": False})})
    found = improve(scenario, axes=("tp", "pp", "schedule", "recompute"), keep=3)
    assert found.today.step_time_s == pytest.approx(simulate(known, detail="stage").step_time_s)
    changes = [*found.singles, *found.doubles]
    assert changes
    for change in changes:
        assert change.scored.step_time_s == pytest.approx(
            simulate(change.scored.choice.scenario(known), detail="stage").step_time_s
        )
        assert ("pp" in change.axes) <= known.effects.expand


@pytest.mark.parametrize("drawn", [{"rank_sigma": 0.1}, {"compute_sigma": 0.1, "communication_sigma": 0.1}])
def test_with_drawn_speeds_the_search_bounds_the_mean_of_the_draws(drawn: dict[str, float]) -> None:
    space = make_space(with_effects({**drawn, "repetitions": 100}), allow=[*SMALL, "tp=2", "pp=1,2"])
    evaluation, plain = Evaluation(Pricing(space)), Evaluation(Pricing(make_space(with_effects({}), allow=SMALL)))
    for choice in list(space.choices())[::3]:
        bound, runs = evaluation.longest_path(choice), simulate(choice.scenario(space.template), detail="stage").repetitions
        assert runs is not None
        # A mean of 100 draws is itself off by about 0.5 %.
        assert bound <= 1.02 * runs.mean, str(choice)
        assert bound >= 0.8 * runs.mean, str(choice)
        rises = choice.group.dp * choice.group.tp > 1 and "rank_sigma" in drawn
        assert (bound > 1.05 * plain.longest_path(choice)) is rises, str(choice)


def test_gaps_are_only_claimed_where_effects_only_slow_down() -> None:
    def space(**effects: Any) -> Space:
        return make_space({**table("megatron-core"), "plan": {}, "effects": effects}, allow=[*SMALL, "tp=2", "pp=1,2"])

    assert not has_effects(space().template)
    found = find(space(), Wish(keep=2))
    last = max(s.step_time_s for s in found.best)
    assert gap_with_effects(found, 2.0 * last) == pytest.approx(0.5)
    assert gap_with_effects(found, 0.5 * last) == 0.0
    for other in ({"slow_ranks": {0: 0.5}}, {"interference": False}):
        changed = space(**other)
        assert leaves_out(changed)
        assert not only_slows(changed.template)
        assert gap_with_effects(replace(found, space=changed), last) is None
    assert leaves_out(space(slow_ranks={0: 1.5}), robust=True)
    drawn = space(compute_sigma=0.1)
    assert leaves_out(drawn)
    assert gap_with_effects(replace(found, space=drawn), 2.0 * last) == pytest.approx(0.5)
    assert gap_with_effects(replace(found, finished=False), last) is None


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
