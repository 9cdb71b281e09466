"""Large input: what repeats itself is folded, the rest is refused at once with the field and the limit."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from simpar import step as engine
from simpar.cli import main
from simpar.errors import InputError
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


@pytest.mark.parametrize(
    "plan",
    [
        {"tp": 4},
        {"tp": 2, "pp": 4},
        {"tp": 2, "pp": 2, "virtual_stages": 2},
        {"tp": 2, "pp": 4, "schedule": "gpipe"},
        {"tp": 1, "pp": 2, "schedule": "dualpipe-v"},
        {"tp": 2, "zero_stage": 3},
    ],
    ids=str,
)
def test_a_folded_step_is_the_whole_step(plan: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    given = make_scenario({**TABLE, "plan": plan})
    whole = engine.simulate(given, detail="stage")
    monkeypatch.setattr(engine, "FOLD_OPS", passes_of(given).ops("stage") - 1)
    folded = engine.simulate(given, detail="stage")
    assert any("are simulated and extended" in note for note in folded.notes)
    assert folded.step_time_s == pytest.approx(whole.step_time_s, rel=1e-9)
    assert sum(s for _, s in folded.waterfall()) == pytest.approx(folded.step_time_s, rel=1e-9)
    found = dict(numbers(folded.to_json()))
    for path, value in numbers(whole.to_json()):
        # Reserved memory and intervals are no straight lines in the number of micro-batches.
        loose = "uncertainty" in path or "reserved" in path or "device" in path
        rel = 5e-2 if "dominated_by" in path else 2e-2 if loose else 1e-9
        assert found[path] == pytest.approx(value, rel=rel, abs=1e-12), path


def test_memory_that_grows_with_micro_batches_grows_in_a_folded_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPipe keeps every micro-batch: 256 of them on 4 stages hold 256 sets of activations."""
    given = scenario("plan.tp=2", "plan.pp=4", "plan.schedule=gpipe")
    monkeypatch.setattr(engine, "FOLD_OPS", 1)
    folded = engine.simulate(given, detail="stage").worst_rank.allocated_bytes
    half = engine.simulate(
        scenario("plan.tp=2", "plan.pp=4", "plan.schedule=gpipe", "training.global_batch_size=256"), detail="stage"
    )
    assert folded > 1.9 * half.worst_rank.allocated_bytes


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
        (["model.num_hidden_layers=1000000000"], "model.num_hidden_layers", "2,000"),
        (["cluster.num_nodes=100000000", "training.global_batch_size=800000000"], "cluster.num_nodes", "10,000,000"),
        (["model.hidden_size=4100000000000000000000"], "model.hidden_size", "16,777,216"),
        (["training.sequence_length=1000000000000000000"], "training.sequence_length", "4,294,967,296"),
        (["model.vocab_size=4000000000", "training.sequence_length=4000000000"], "training.sequence_length", "1.15e+18"),
        (["effects.repetitions=1000000000"], "effects.repetitions", "1,000,000"),
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
