"""Scenarios with open facts: enumeration, what cannot have run, the mixture, the fact to look up."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from simpar.errors import InputError
from simpar.readings import Estimate, Outcome, mixture, simulate_open, spread_over
from simpar.specs.open_values import MOST_READINGS, PRIORS, choices, open_fields
from simpar.specs.scenario import make_scenario, read_scenario
from simpar.step import simulate


def table(**plan: Any) -> dict[str, Any]:
    return {
        "name": "open", "model": "llama3.1-8b", "framework": "megatron-core",
        "cluster": {"hardware": "dgx-h100", "num_nodes": 1}, "plan": {"tp": 2, "pp": 2, **plan},
        "training": {"sequence_length": 8192, "global_batch_size": 16},
    }  # fmt: skip


def test_unknown_takes_the_values_of_published_runs() -> None:
    (field,) = open_fields(table(recompute={"unknown": True}))
    assert field.path == "plan.recompute"
    rounded = PRIORS["plan.recompute"]
    assert dict(field.values) == pytest.approx({value: share / sum(rounded.values()) for value, share in rounded.items()})
    (field,) = open_fields(table(overlap_tp={"unknown": True}))
    assert dict(field.values) == {True: 0.5, False: 0.5}
    (field,) = open_fields(table(cp_style={"unknown": True}))
    assert dict(field.values) == pytest.approx({"ring": 1 / 3, "all_gather": 1 / 3, "ulysses": 1 / 3})
    (field,) = open_fields(table(pp={"any_of": [1, 2, 4], "weights": [1, 2, 1]}))
    assert dict(field.values) == {1: 0.25, 2: 0.5, 4: 0.25}


def test_combinations_and_their_weights() -> None:
    raw = table(recompute={"any_of": ["none", "full"]}, virtual_stages={"any_of": [1, 2, 4], "weights": [2, 1, 1]})
    found = choices(raw, open_fields(raw))
    assert len(found) == 6
    assert sum(c.weight for c in found) == pytest.approx(1.0)
    assert found[0].weight == pytest.approx(0.25)
    assert found[0].table["plan"]["virtual_stages"] == 1
    assert raw["plan"]["virtual_stages"]["any_of"] == [1, 2, 4]
    many = table(tp={"any_of": list(range(1, 20))}, pp={"any_of": list(range(1, 20))})
    with pytest.raises(InputError, match=f"at most {MOST_READINGS}"):
        choices(many, open_fields(many))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"unknown": False}, "no way to leave"), ({"unknown": True, "any_of": [1]}, "no way to leave"),
        ({"any_of": []}, "list of values"), ({"any_of": [1, 2], "weights": [1]}, "one positive number"),
        ({"any_of": [1], "weights": [-1]}, "one positive number"), ({"any_of": [1], "weight": [1]}, "no way to leave"),
        ({"any_of": [1, "x"]}, "must be a whole number"), ({"any_of": [1, 0]}, "must be greater than"),
    ],
)  # fmt: skip
def test_bad_sets_are_one_clear_message(value: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        open_fields(table(virtual_stages=value), "my.toml")
    assert "my.toml: plan.virtual_stages" in str(caught.value)


def test_a_number_whose_values_nobody_can_list() -> None:
    raw = table()
    raw["training"]["sequence_length"] = {"unknown": True}
    with pytest.raises(InputError, match="any_of"):
        open_fields(raw)


def test_an_unknown_field_without_a_value_is_no_field_all_the_same() -> None:
    with pytest.raises(InputError, match="unknown field; did you mean 'virtual_stages'"):
        open_fields(table(virtual_stage={"unknown": True}))


def test_what_is_wrong_with_every_reading_is_said_without_the_readings() -> None:
    with pytest.raises(InputError, match=r"^plan\.tp = 7: must divide"):
        simulate_open(table(recompute={"any_of": ["none", "full"]}, tp=7))


def test_commands_that_do_not_answer_open_facts_say_so() -> None:
    with pytest.raises(InputError, match="left open"):
        make_scenario(table(recompute={"unknown": True}))


def test_readings_equal_their_own_simulations_and_those_that_cannot_run_are_dropped() -> None:
    raw = table(recompute={"any_of": ["none", "full"]}, virtual_stages={"any_of": [1, 2, 17]})
    result, answer = simulate_open(raw)
    assert answer is not None
    assert len(answer.readings) == 4
    assert sum(r.weight for r in answer.readings) == pytest.approx(1.0)
    for reading in answer.readings:
        values = dict(reading.values)
        alone = simulate(make_scenario(table(recompute=values["plan.recompute"], virtual_stages=values["plan.virtual_stages"])))
        assert reading.seconds == alone.step_time_s
    assert [dict(values)["plan.virtual_stages"] for values, _ in answer.dropped] == [17, 17]
    assert result.step_time_s == answer.readings[0].seconds
    times = [r.seconds for r in answer.readings]
    assert min(times) <= answer.step.seconds <= max(times)
    assert answer.step.low < min(times)
    assert answer.step.high > max(times)
    # Recomputation moves the step by a third, virtual stages by little: that is the fact to look up.
    assert answer.look_up[0][0] == "plan.recompute"
    assert answer.look_up[0][1] < answer.step.high / answer.step.low


def test_what_does_not_fit_cannot_have_run() -> None:
    raw = table(recompute={"any_of": ["none", "full"]})
    raw["training"] |= {"micro_batch_size": 4, "sequence_length": 16384}
    _, answer = simulate_open(raw)
    assert answer is not None
    assert [dict(r.values)["plan.recompute"] for r in answer.readings] == ["full"]
    assert "GiB" in answer.dropped[0][1]
    raw["plan"]["recompute"] = {"any_of": ["none"]}
    with pytest.raises(InputError, match="no reading"):
        simulate_open(raw)


def test_a_measured_memory_tells_readings_apart() -> None:
    raw = table(recompute={"any_of": ["none", "full"]})
    fields = open_fields(raw)

    def outcome(choice: Any, scenario: Any) -> Outcome:
        full = scenario.plan.recompute == "full"
        return Outcome(4.0 if full else 3.0, 3.6 if full else 2.7, 4.4 if full else 3.3, 20e9 if full else 60e9, 80e9)

    plain = spread_over(choices(raw, fields), fields, outcome)
    seen = spread_over(
        choices(raw, fields), fields, outcome, likelihood=lambda choice: 0.01 if "none" in dict(choice.values).values() else 1.0
    )
    assert plain.step.seconds < seen.step.seconds
    assert dict(seen.readings[0].values)["plan.recompute"] == "full"
    assert seen.step.high / seen.step.low < plain.step.high / plain.step.low


@given(
    st.lists(
        st.tuples(st.floats(0.05, 1.0), st.floats(0.1, 10.0), st.floats(0.5, 0.99), st.floats(1.01, 2.0)), min_size=1, max_size=4
    )
)
@settings(max_examples=40, deadline=None)
def test_a_mixture_has_the_quantiles_of_its_draws(parts: list[tuple[float, float, float, float]]) -> None:
    found = mixture([Estimate(w, s, s * low, s * high) for w, s, low, high in parts])
    assert found.low <= found.seconds <= found.high
    generator = np.random.default_rng(0)
    draws = []
    for w, s, low, high in parts:
        z = generator.standard_normal(int(40_000 * w) + 1)
        draws.append(s * np.exp(np.where(z < 0, -z * math.log(low), z * math.log(high)) / 1.2816))
    sample = np.concatenate(draws)
    assert np.mean(sample < found.low) == pytest.approx(0.1, abs=0.03)
    assert np.mean(sample < found.seconds) == pytest.approx(0.5, abs=0.03)
    assert np.mean(sample < found.high) == pytest.approx(0.9, abs=0.03)


def test_one_reading_is_its_own_interval() -> None:
    found = mixture([Estimate(1.0, 2.0, 1.8, 2.5)])
    assert (found.low, found.seconds, found.high) == pytest.approx((1.8, 2.0, 2.5), rel=1e-4)


def test_simulate_prints_readings_and_json(tmp_path: Path) -> None:
    from simpar.cli.app import app

    file = tmp_path / "open.toml"
    file.write_text(
        'model = "llama3.1-8b"\n[cluster]\nhardware = "dgx-h100"\nnum_nodes = 1\n[plan]\ntp = 2\n'
        "recompute = { unknown = true }\n[training]\nsequence_length = 4096\nglobal_batch_size = 8\n"
    )
    shown = CliRunner().invoke(app, ["simulate", str(file)])
    assert shown.exit_code == 0, shown.output
    assert "Look up plan.recompute" in shown.output
    found = json.loads(CliRunner().invoke(app, ["simulate", str(file), "--json"]).output)
    assert found["step_time_s"] == found["readings"]["step_time_s"]["median"]
    assert found["uncertainty"]["step_time_s"]["low"] == found["readings"]["step_time_s"]["low"]
    assert found["tokens_per_s"] == pytest.approx(8 * 4096 / found["step_time_s"])
    assert {r["values"]["plan.recompute"] for r in found["readings"]["readings"]} == {"none", "full", "selective"}
    closed = json.loads(CliRunner().invoke(app, ["simulate", str(file), "--set", "plan.recompute=full", "--json"]).output)
    assert "readings" not in closed
    assert read_scenario(file, ["plan.recompute=full"]).plan.recompute == "full"


def test_stalled_runs_are_counted_apart() -> None:
    from simpar.evidence.runs import STALLED, report_of
    from simpar.statistics import Comparison

    rows = [
        Comparison("a", "step_time_s", 10.0, 9.0, group={"source": "s"}),
        Comparison("b", "step_time_s", 90.0, 9.0, group={"source": "s", "state": STALLED}),
    ]
    groups = report_of(Path(), rows, ["a", "b"], {}, {}, 0.0).groups
    overall = {tuple(group.by.items()): group.summary for group in groups}
    assert overall[()].rows == 1
    assert overall[()].mape == pytest.approx(0.1)
    assert overall[(("state", STALLED),)].mape == pytest.approx(0.9)


def test_a_value_may_be_a_table() -> None:
    selective = {"granularity": "selective", "modules": ["core_attn"]}
    result, answer = simulate_open(table(recompute={"any_of": ["full", selective]}))
    assert answer is not None
    assert len(answer.readings) == 2
    assert result.step_time_s == answer.readings[0].seconds
