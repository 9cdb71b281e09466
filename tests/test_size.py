"""Large input: what repeats itself is folded, the rest is refused at once with the field and the limit."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from search_random import CASES, random_choice, space_of

from simpar import load
from simpar import step as engine
from simpar.cli import main
from simpar.errors import InputError
from simpar.program.lower import lower
from simpar.result.folded import with_microbatches
from simpar.result.shorter_steps import ShorterSteps
from simpar.schedules import SCHEDULES
from simpar.searching.space import Space
from simpar.specs.scenario import Scenario, apply_override, make_scenario
from simpar.specs.size import LIMITS, passes_of

TABLE: dict[str, Any] = {
    "model": {
        "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8, "num_attention_heads": 16,
        "num_key_value_heads": 16, "head_dim": 64, "vocab_size": 32000,
    },
    "cluster": {"hardware": "dgx-h100", "num_nodes": 1},
    "training": {"sequence_length": 1024, "global_batch_size": 512, "micro_batch_size": 1},
}  # fmt: skip


def scenario(*changes: str) -> Scenario:
    table = {k: dict(v) if isinstance(v, dict) else v for k, v in TABLE.items()}
    for change in changes:
        apply_override(table, change)
    return make_scenario(table)


def numbers(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Every number of a JSON object by its path, but the moment of a peak, which is that of the shorter step."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from numbers(inner, f"{path}.{name}")
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from numbers(inner, f"{path}[{index}]")
    elif isinstance(value, float) and not path.endswith("peak_time_s"):
        yield path, value


@cache
def space(name: str) -> Space:
    return space_of(**CASES[name])


SMALL: dict[str, Any] = {**TABLE, "model": {**TABLE["model"], "num_hidden_layers": 16}}
LATE = ("interleaved_zb", "zb-h1", "zb-h2", "zb-1p", "zb-2p")
"""Never or late in one state: stages of unequal length use up the slack between them over hundreds of micro-batches."""


PERIODIC = (
    ("1f1b", 1), ("gpipe", 1), ("naive", 1), ("interleaved", 2), ("interleaved_bfs", 2), ("interleaved_zb", 2), ("v-half", 2),
    ("v-min", 2), ("zb-v", 2), ("dualpipe", 1), ("dualpipe-v", 2),
)  # fmt: skip


def same_step(given: Scenario, monkeypatch: pytest.MonkeyPatch, waits: float = 1e-12) -> bool:
    """Hold that `given` is the same step folded and whole, whole by a limit out of reach; whether it was folded at all."""
    folded = engine.simulate(given, detail="stage")
    with monkeypatch.context() as patch:
        patch.setattr(engine, "FOLD_MICROBATCHES", 10**9)
        whole = engine.simulate(given, detail="stage")
    if folded.program.num_ops == whole.program.num_ops:
        return False
    assert any("each further round adds the same" in note for note in folded.notes)
    found, said = dict(numbers(folded.to_json())), dict(numbers(whole.to_json()))
    step_s = whole.step_time_s
    for path, value in said.items():
        # A step with other prices need not repeat itself where this one does, and how full the allocator's segments are never does.
        loose = "uncertainty" in path or "reserved" in path or "device" in path
        rel, absolute = (1e-1 if "dominated_by" in path else 3e-2, 0.0) if loose else (1e-11, 1e-11 * step_s)
        assert found[path] == pytest.approx(value, rel=rel, abs=absolute), path
    assert found.keys() == said.keys()
    for cause, waited in whole.accounting.waits.items():
        assert folded.accounting.waits[cause] == pytest.approx(waited, rel=0.0, abs=waits * step_s), cause
    assert folded.accounting.busiest_bubble == pytest.approx(whole.accounting.busiest_bubble, abs=1e-9)
    for one, other in zip(folded.memory, whole.memory, strict=True):
        assert one.allocated_bytes == pytest.approx(other.allocated_bytes, rel=1e-12)
    return True


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
@pytest.mark.parametrize("zero_stage", [1, 3])
def test_a_folded_step_is_the_whole_step(schedule: str, zero_stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    virtual = SCHEDULES[schedule].virtual_stages or (2 if "interleaved" in schedule else 1)
    plan = {"tp": 1, "pp": 4, "schedule": schedule, "virtual_stages": virtual, "zero_stage": zero_stage}
    batch = {**TABLE["training"], "global_batch_size": 336}
    assert same_step(make_scenario({**SMALL, "plan": plan, "training": batch}), monkeypatch) or schedule in LATE


@pytest.mark.parametrize("schedule", ["zb-1p", "zb-2p"])
def test_so_is_one_whose_order_prices_choose_where_that_goes_on(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = {"tp": 1, "pp": 4, "schedule": schedule, "layers_per_stage": [2, 6, 4, 4]}
    given = make_scenario({**SMALL, "plan": plan, "training": {**TABLE["training"], "global_batch_size": 672}})
    assert same_step(given, monkeypatch)
    monkeypatch.setattr(ShorterSteps, "order_goes_on", lambda *orders: False)
    assert not same_step(given, monkeypatch)


@pytest.mark.parametrize("plan", [{"tp": 4}, {"tp": 2, "zero_stage": 3}, {"tp": 4, "offload": {"activations": 0.5}}], ids=str)
def test_so_are_gradients_accumulated_without_a_pipeline(plan: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    batch = {**TABLE["training"], "global_batch_size": 1200}
    assert same_step(make_scenario({**TABLE, "plan": plan, "training": batch}), monkeypatch)


@settings(max_examples=6, suppress_health_check=[HealthCheck.too_slow])
@given(name=st.sampled_from(sorted(CASES)), seed=st.integers(0, 2**32))
@example(name="dense", seed=6)  # Interleaved, breadth first: it takes ten rounds until one adds what the last did.
def test_so_is_a_step_of_any_layout(name: str, seed: int) -> None:
    choice = random_choice(space(name), random.Random(seed))
    if choice is None:
        return
    drawn = choice.scenario(space(name).template)
    group = drawn.plan.microbatch_group_size or drawn.plan.pp
    with pytest.MonkeyPatch.context() as patch:
        try:
            same_step(with_microbatches(drawn, -(-132 // group) * group), patch)
        except InputError:  # A schedule that asks for another number.
            return


UNEVEN = frozenset({1, 3, 5, 6, 9, 11, 13, 14, 17, 19, 20, 23, 25, 28, 30})


@settings(max_examples=8, suppress_health_check=[HealthCheck.too_slow])
@given(
    schedule=st.sampled_from(sorted(SCHEDULES)), chunks=st.sampled_from([2, 4]),
    cuts=st.frozensets(st.integers(1, 31), min_size=15, max_size=15), more=st.integers(0, 40),
)  # fmt: skip
@example(schedule="interleaved_bfs", chunks=2, cuts=frozenset(range(2, 32, 2)), more=2)  # A lead that lasts.
@example(schedule="interleaved_bfs", chunks=4, cuts=UNEVEN, more=7)
@example(schedule="interleaved", chunks=4, cuts=UNEVEN, more=20)
@example(schedule="interleaved_zb", chunks=2, cuts=UNEVEN, more=20)
@example(schedule="zb-v", chunks=2, cuts=UNEVEN, more=40)
@example(schedule="zb-h2", chunks=2, cuts=UNEVEN, more=40)
@example(schedule="gpipe", chunks=2, cuts=UNEVEN, more=40)  # The allocator takes whole segments, more for long stages.
def test_so_is_one_of_any_stages_and_micro_batches(schedule: str, chunks: int, cuts: frozenset[int], more: int) -> None:
    """32 layers dealt out to 4, 8 or 16 stages anyhow."""
    virtual = SCHEDULES[schedule].virtual_stages or (chunks if "interleaved" in schedule else 1)
    ends = sorted(cuts)[4 // virtual - 1 :: 4 // virtual]
    layers = [b - a for a, b in zip([0, *ends], [*ends, 32], strict=True)]
    plan = {"tp": 1, "pp": 4, "schedule": schedule, "virtual_stages": virtual, "layers_per_stage": layers}
    drawn = make_scenario({**SMALL, "model": {**SMALL["model"], "num_hidden_layers": 32}, "plan": plan})
    with pytest.MonkeyPatch.context() as patch:
        same_step(with_microbatches(drawn, 160 + 4 * more), patch, waits=1e-11)


@pytest.mark.parametrize(("schedule", "built", "runs"), [("interleaved", 33_000, 3), ("zb-v", 57_000, 3)])
def test_so_is_one_that_repeats_itself_late(schedule: str, built: int, runs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """126 layers over 32 stages, whose first and last are shorter: rounds come near each other by half under `interleaved`, and
    slack that one rank has is used up after 211 micro-batches under `zb-v`. A first step says how long the next must be."""
    given = load(
        str(Path(__file__).parent.parent / "scenarios" / "llama3.1-405b_h100x16384_tp8pp16.toml"),
        **{"plan.schedule": schedule, "plan.virtual_stages": 2, "plan.embedding_alone": False, "training.global_batch_size": 2**17},
    )
    spent, play = 0, engine._played

    def counting(*args: Any, **options: Any) -> Any:
        nonlocal spent
        program = lower(*args, **options)
        spent += program.num_ops
        return program

    played = []
    with monkeypatch.context() as patch:
        patch.setattr(engine, "_played", lambda priced: played.append(priced.layout.num_microbatches) or play(priced))
        assert engine.simulate(given, detail="stage", lowering=counting).layout.num_microbatches == 1024
    # Of two that are to show it the shorter is not played where the longer's slack is used up behind its end.
    assert spent < built
    assert len(played) == runs
    # What halves from round to round is none below a hundred-billionth of a shorter step, in each further round.
    assert same_step(given, monkeypatch, waits=3e-11)


def test_a_thousand_micro_batches_cost_less_than_twice_what_64_do() -> None:
    """Ops built, of which every second of a step's simulation consists."""
    built = []

    def counting(*args: Any, **options: Any) -> Any:
        program = lower(*args, **options)
        built[-1] += program.num_ops
        return program

    for schedule, virtual in PERIODIC:
        spent = []
        for batch in (64, 1024):
            plan = {"tp": 1, "pp": 8, "schedule": schedule, "virtual_stages": virtual}
            given = make_scenario({**SMALL, "plan": plan, "training": {**TABLE["training"], "global_batch_size": batch}})
            built.append(0)
            assert engine.simulate(given, lowering=counting).layout.num_microbatches == batch
            spent.append(built[-1])
        assert spent[1] <= 2 * spent[0], schedule


@pytest.mark.parametrize("schedule", LATE)
def test_a_step_that_does_not_repeat_itself_is_built_by_whole_passes(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The totals, memory included, are those of the step layer by layer; it costs no more than its passes."""
    plan = {"tp": 1, "pp": 4, "schedule": schedule, "virtual_stages": 2 if "interleaved" in schedule else 1}
    model = {**TABLE["model"], "num_hidden_layers": 16}
    given = make_scenario({**TABLE, "model": model, "plan": plan, "training": {**TABLE["training"], "global_batch_size": 272}})
    coarse = engine.simulate(given)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "FOLD_MICROBATCHES", 10**9)
        whole = engine.simulate(given)
    # Two layers of a stage, four without chunks, become one op; sends stay.
    assert coarse.program.num_ops < 0.65 * whole.program.num_ops
    assert any("never or late" in note for note in coarse.notes)
    found, said = dict(numbers(coarse.to_json())), dict(numbers(whole.to_json()))
    for path, value in said.items():
        if "reserved" not in path and "device" not in path:  # what the allocator's segments leave over hangs on the order of ops
            assert found[path] == pytest.approx(value, rel=1e-9, abs=1e-11 * whole.step_time_s), path


@pytest.mark.parametrize(("schedule", "virtual"), [("v-half", 2), ("gpipe", 1)])
def test_a_step_folded_by_whole_passes_is_that_of_its_layers(schedule: str, virtual: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two shorter steps of more than 64 micro-batches together are not built layer by layer."""
    plan = {"tp": 1, "pp": 8, "schedule": schedule, "virtual_stages": virtual}
    rounds = {"v-half": 168, "gpipe": 256}[schedule]
    given = make_scenario({**SMALL, "plan": plan, "training": {**TABLE["training"], "global_batch_size": rounds}})
    folded = engine.simulate(given)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "FOLD_MICROBATCHES", 10**9)
        whole = engine.simulate(given)
    assert folded.program.num_ops < whole.program.num_ops / 2
    assert any("one op a pass" in note for note in folded.notes) == (schedule == "v-half")
    assert folded.step_time_s == pytest.approx(whole.step_time_s, rel=1e-11)
    assert folded.bubble_fraction == pytest.approx(whole.bubble_fraction, rel=1e-9)
    for one, other in zip(folded.memory, whole.memory, strict=True):
        assert one.allocated_bytes == pytest.approx(other.allocated_bytes, rel=1e-9)


def test_memory_that_grows_with_micro_batches_grows_in_a_folded_step() -> None:
    """GPipe keeps every micro-batch: 256 of them on 4 stages hold 256 sets of activations."""
    given = scenario("plan.tp=2", "plan.pp=4", "plan.schedule=gpipe")
    folded = engine.simulate(given, detail="stage").worst_rank.allocated_bytes
    half = engine.simulate(
        scenario("plan.tp=2", "plan.pp=4", "plan.schedule=gpipe", "training.global_batch_size=256"), detail="stage"
    )
    assert folded > 1.9 * half.worst_rank.allocated_bytes


def test_rules_are_those_of_the_step_that_was_asked_for() -> None:
    """Interleaved over 16 stages: 136 micro-batches are 8 rounds of 17, of which no shorter step is made; 31,250 are no rounds."""
    deep = ("plan.pp=16", "plan.virtual_stages=2", "model.num_hidden_layers=32", "cluster.num_nodes=2")
    result = engine.simulate(scenario(*deep, "training.global_batch_size=136"), detail="stage")
    assert result.layout.num_microbatches == 136
    with pytest.raises(InputError, match=r"num_microbatches = 31250: .* use 31248 or 31264"):
        engine.simulate(scenario(*deep, "training.global_batch_size=31250"))


def test_a_schedule_that_asks_for_whole_rounds_is_answered() -> None:
    """One stage a rank, which others need no whole rounds for."""
    plan = {"tp": 1, "pp": 4, "schedule": "interleaved_zb"}
    given = make_scenario({**SMALL, "plan": plan, "training": {**TABLE["training"], "global_batch_size": 400}})
    assert engine.simulate(given, detail="stage").layout.num_microbatches == 200


def test_thousands_of_equal_layers_are_answered() -> None:
    """A hundred times the layers of any model: each adds the same."""
    given = (scenario("plan.tp=4", "training.global_batch_size=8", f"model.num_hidden_layers={n}") for n in (10_000, 5_000, 2_500))
    started = time.process_time()
    ten, five, half = (engine.simulate(one, detail="stage").step_time_s for one in given)
    assert time.process_time() - started < 20
    assert ten - five == pytest.approx(2 * (five - half), rel=0.02)


def test_millions_of_micro_batches_are_answered() -> None:
    started = time.process_time()
    result = engine.simulate(scenario("plan.tp=4", "training.global_batch_size=4000000"))
    assert time.process_time() - started < 10
    assert result.layout.num_microbatches == 2_000_000
    step = engine.simulate(scenario("plan.tp=4", "training.global_batch_size=2000")).step_time_s
    assert result.step_time_s == pytest.approx(2000 * step, rel=0.01)


@pytest.mark.parametrize(
    ("changes", "field", "limit"),
    [
        (["model.num_hidden_layers=1000000000"], "model.num_hidden_layers", "10,000"),
        (["cluster.num_nodes=100000000", "training.global_batch_size=800000000"], "cluster.num_nodes", "10,000,000"),
        (["cluster.num_nodes=1250001"], "cluster.num_nodes", "--limit ranks=10000008"),
        (["model.hidden_size=4100000000000000000000"], "model.hidden_size", "16777216"),
        (["training.sequence_length=1000000000000000000"], "training.sequence_length", "4294967296"),
        (["model.vocab_size=4000000000", "training.sequence_length=4000000000"], "training.sequence_length", "1.15e+18"),
        (["effects.repetitions=1000000000"], "effects.repetitions", "1000000"),
        (["plan.virtual_stages=100000000"], "plan.virtual_stages", "10,000,000"),
    ],
)
def test_what_no_system_has_is_refused_at_once(changes: list[str], field: str, limit: str) -> None:
    started = time.process_time()
    with pytest.raises(InputError) as caught:
        scenario(*changes)
    assert time.process_time() - started < 1
    (violation,) = caught.value.violations
    assert violation.field == field
    assert limit in f"{violation.rule} {violation.right}"


def test_a_step_that_cannot_be_folded_is_refused_with_the_limit() -> None:
    given = scenario("plan.tp=4", "training.global_batch_size=8000000", "effects.compute_sigma=0.1")
    started = time.process_time()
    with pytest.raises(
        InputError, match=r"4,000,000 micro-batches on 1 stages is about 16,000,000 ops, more than 3,000,000; .*--limit"
    ):
        engine.simulate(given)
    assert time.process_time() - started < 1


@pytest.mark.parametrize(("batch", "effects"), [(400_000, {}), (32_000, {"expand": True})])
def test_an_order_that_prices_choose_is_not_sought_for_too_many(
    batch: int, effects: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = {"tp": 1, "pp": 4, "schedule": "zb-1p", "layers_per_stage": [2, 6, 4, 4]}
    given = make_scenario(
        {**SMALL, "plan": plan, "effects": effects, "training": {**TABLE["training"], "global_batch_size": batch}}
    )
    monkeypatch.setattr(ShorterSteps, "order_goes_on", lambda *orders: True)
    monkeypatch.setenv("SIMPAR_LIMIT", "ops=500_000")
    with pytest.raises(InputError, match=r"micro-batches on 4 stages.* is about"):
        engine.simulate(given)


def test_a_limit_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIMPAR_LIMIT", "layers=3_000")
    assert scenario("model.num_hidden_layers=2500").model.num_hidden_layers == 2500  # type: ignore[union-attr]
    with pytest.raises(InputError, match="more than 3,000 layers"):
        scenario("model.num_hidden_layers=3001")
    for wrong in ("layers", "layers=0", "layers=many", "what=3", "ops=inf"):
        monkeypatch.setenv("SIMPAR_LIMIT", wrong)
        with pytest.raises(InputError, match="is no limit"):
            scenario()


def test_a_finer_detail_than_fits_becomes_a_coarser_one(monkeypatch: pytest.MonkeyPatch) -> None:
    given = scenario("plan.tp=4", "effects.compute_sigma=0.01")
    monkeypatch.setattr(engine, "FOLD_OPS", 1)
    monkeypatch.setenv("SIMPAR_LIMIT", f"ops={passes_of(given).ops('layer')}")
    result = engine.simulate(given, detail="op")
    assert any("simulated at layer detail" in note for note in result.notes)


def test_the_limits_leave_room_for_what_exists() -> None:
    assert LIMITS["ranks"] >= 1_000_000
    assert LIMITS["layers"] >= 1_000


def test_a_plan_of_too_many_incidents_is_refused_at_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = str(Path(__file__).parent.parent / "scenarios" / "plans" / "bloom-176b_a100x384.toml")
    started = time.process_time()
    with pytest.raises(SystemExit) as stop:
        main(["plan", plan, "--repetitions", "100000000"])
    assert stop.value.code == 2
    assert "incidents in each of 100,000,000 repetitions are more than 20,000,000" in capsys.readouterr().err
    assert time.process_time() - started < 5
    monkeypatch.setenv("SIMPAR_LIMIT", "incidents=10")
    with pytest.raises(SystemExit):
        main(["plan", plan, "--repetitions", "5"])
    assert "more than 10;" in capsys.readouterr().err
