"""The registry of fitted numbers: lookup by group, a fit that recovers, a gate that only what pays passes, the shipped file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from simpar.cli.app import app
from simpar.evidence.constants_md import constants_text
from simpar.evidence.fit_constants import (
    Data,
    Sample,
    by_source,
    errors,
    expected_errors,
    fit,
    held_out,
    sample_of,
    select,
    unseen_errors,
)
from simpar.evidence.predicted import predict, stalled
from simpar.specs.base import data_dir
from simpar.specs.calibration import (
    BOUNDS,
    FACTORS,
    SECONDS,
    Constant,
    calibrated_by,
    calibration_for,
    constants,
    uncalibrated,
    unseen,
)
from simpar.specs.scenario import read_scenario

SCENARIOS = Path(__file__).resolve().parent.parent / "scenarios"
TRUE = {"compute": 1.2, "memory": 1.0, "communication": 1.0, "pass_s": 0.0, "step_s": 0.0}


def runs(sources: int, rows: int = 6, true: dict[str, float] | None = None, noise: float = 0.02, **group: str) -> list[Sample]:
    """Made-up runs: every source has its own bias, as real ones do."""
    generator = np.random.default_rng(abs(hash((sources, tuple(group.items())))) % 2**31 if group else sources)
    values = np.array([{**TRUE, **(true or {})}[name] for name in (*FACTORS, *SECONDS)])
    found = []
    for source in range(sources):
        bias = noise * generator.standard_normal()
        for _ in range(rows):
            parts = generator.uniform(0.2, 1.0, 5) * np.array([10.0, 2.0, 2.0, 100.0, 0.0]) + np.array([0, 0, 0, 0, 1.0])
            measured = (parts @ values + 0.1) * float(np.exp(bias + noise * generator.standard_normal()))
            where = {"family": "f", "architecture": "a", "gpu": "g", **group}
            found.append(Sample(**where, source=f"{where['family']}{where['architecture']}{source}", model="m", parts=tuple(parts),
                                rest=0.1, measured=measured))  # fmt: skip
    return found


def test_nested_groups_multiply_and_the_narrowest_error_wins() -> None:
    entries = (
        Constant(name="compute", value=1.2),
        Constant(name="compute", family="torchtitan", value=1.1),
        Constant(name="compute", family="torchtitan", architecture="hopper", value=0.9),
        Constant(name="step_s", architecture="hopper", value=0.02),
        Constant(name="step_s", value=0.01),
        Constant(name="expected_error", value=0.2),
        Constant(name="expected_error", family="torchtitan", architecture="hopper", value=0.1),
        Constant(name="expected_error", family="torchtitan", value=0.15),
    )
    with calibrated_by(entries):
        own = calibration_for("torchtitan", "hopper", "H100 SXM")
        other = calibration_for("deepspeed", "ampere", "A100")
    assert own.compute == pytest.approx(1.2 * 1.1 * 0.9)
    assert own.step_s == pytest.approx(0.03)
    assert own.expected_error == 0.1
    assert (other.compute, other.step_s, other.expected_error, other.memory) == (1.2, 0.01, 0.2, 1.0)
    with uncalibrated():
        assert calibration_for("torchtitan", "hopper").compute == 1.0


def test_a_constant_holds_only_on_architectures_that_sources_ran_on() -> None:
    entries = (
        Constant(name="compute", value=1.2, architectures=("hopper", "ampere")),
        Constant(name="expected_error", value=0.1, architectures=("hopper", "ampere")),
        Constant(name="expected_error", family="torchtitan", value=0.2, architectures=("hopper",)),
    )
    with calibrated_by(entries):
        assert calibration_for("deepspeed", "hopper").compute == 1.2
        unseen_chip = calibration_for("deepspeed", "cdna3", "MI300X")
    assert unseen_chip.compute == 1.0
    assert unseen_chip.expected_error == 0.2
    with uncalibrated():
        assert calibration_for("deepspeed", "cdna3").expected_error == 0.0


def test_combined_factors_stay_within_their_bounds() -> None:
    entries = tuple(Constant(name="compute", value=1.5, **group) for group in ({}, {"architecture": "hopper"}))
    with calibrated_by(entries):
        assert calibration_for("deepspeed", "hopper").compute == BOUNDS["compute"][1]


def test_a_fit_recovers_and_shrugs_off_sick_runs() -> None:
    data = Data.of(runs(12, true={"compute": 1.3}, noise=0.01))
    (found,) = fit(data, [Constant(name="compute", value=1.0)])
    assert found.value == pytest.approx(1.3, rel=0.03)
    sick = Data.of([replace(s, measured=10.0 * s.measured) if i % 5 == 0 else s for i, s in enumerate(data.samples)])
    (found,) = fit(sick, [Constant(name="compute", value=1.0)])
    assert found.value == pytest.approx(1.3, rel=0.1)


def test_held_out_errors_never_see_their_source() -> None:
    """One source is twice as slow as all others: left out it is met as badly as without its rows, never better."""
    odd = [replace(s, source="odd", measured=2.0 * s.measured) for s in runs(1, rows=40)]
    data = Data.of([*runs(6), *odd])
    entry = Constant(name="compute", value=1.0)
    crossed = held_out(data, [entry])
    index = data.sources.index("odd")
    alone = by_source(Data.of(odd), errors(Data.of(odd), fit(Data.of(runs(6)), [entry])))
    assert len(data.sources) == 7  # fewer than folds: each is left out alone
    assert crossed[index] == pytest.approx(alone[0])
    assert crossed[index] > 0.4
    many = Data.of([*runs(20), *odd])
    for others, inside in many.folds:
        assert not set(others.sources) & set(inside.sources)
    assert sorted(source for _, inside in many.folds for source in inside.sources) == many.sources


def constant_pace(factor: float, source: str) -> Sample:
    """A run of compute alone, so many times as slow as its parts."""
    return Sample("f", "a", "g", source, "m", (10.0, 0.0, 0.0, 0.0, 1.0), 0.0, 10.0 * factor)


def test_a_source_weighs_by_the_root_of_its_runs() -> None:
    """100 runs of one source say 1.1 and weigh 10; single runs of six sources say 1.4 and weigh 6: the large source wins. By the
    number of sources alone it would lose, by runs alone twenty single ones would too."""
    many = [constant_pace(1.1, "large") for _ in range(100)]

    def compute(singles: int) -> float:
        data = Data.of([*many, *(constant_pace(1.4, f"s{i}") for i in range(singles))])
        return fit(data, [Constant(name="compute", value=1.0)])[0].value

    assert compute(6) == pytest.approx(1.1, abs=0.08)
    assert compute(20) == pytest.approx(1.4, abs=0.08)


def test_the_gate_keeps_what_carries_over_and_nothing_else() -> None:
    """A factor of all runs stays; one that a single source needs does not, however much it would gain there."""
    strange = [replace(s, source="strange", gpu="new", measured=1.8 * s.measured) for s in runs(1, rows=30)]
    found = select(Data.of([*runs(14), *strange]))
    assert [(e.name, e.group) for e in found] == [("compute", "all")]
    assert found[0].value == pytest.approx(1.2, rel=0.05)
    assert found[0].gain > found[0].gain_se > 0
    assert len(found[0].sources) == 15
    neutral = select(Data.of(runs(14, true={"compute": 1.0}, noise=0.05)))
    assert neutral == ()


def test_a_family_that_differs_in_every_source_gets_its_own() -> None:
    slow = runs(8, true={"compute": 1.5}, family="slow")
    found = {(e.name, e.group): e for e in select(Data.of([*runs(8, true={"compute": 1.0}), *slow]))}
    assert any("family=slow" in group or group == "all" for _, group in found)
    data = Data.of(slow)
    assert np.median(np.abs(errors(data, tuple(found.values())))) < 0.06


def test_errors_on_unseen_sources_repeat_the_choice() -> None:
    data = Data.of(runs(7, rows=3))
    found = unseen_errors(data, workers=1)
    assert np.median(np.abs(found)) < 0.08
    entries = expected_errors(data, found)
    assert entries[0].group == "all"
    assert all(e.status == "interval" and 0.0 < e.value < 0.2 for e in entries)


def test_a_run_is_split_around_the_constants_in_force() -> None:
    """Under those constants the split gives the simulated step back, overlap and bubble included; from none it comes near."""
    scenario = read_scenario(SCENARIOS / "korthikanti-175b_a100x64_tp8pp8.toml")
    values = {"compute": 1.2, "memory": 1.4, "communication": 1.6, "pass_s": 2e-4, "step_s": 0.05}
    entries = tuple(Constant(name=name, value=value) for name, value in values.items())
    with calibrated_by(entries):
        step = predict(scenario).step_time_s
    for start, tolerance in ((entries, 1e-9), ((), 0.05)):
        split = sample_of(scenario, "source", "model", step, start)
        assert split is not None
        assert errors(Data.of([split]), entries)[0] == pytest.approx(0.0, abs=tolerance)


def test_stalled_pipelines_are_recognised_by_half_a_second_a_pass() -> None:
    scenario = read_scenario(SCENARIOS / "korthikanti-175b_a100x64_tp8pp8.toml", ["framework=nanotron", "plan.recompute=none"])
    found = predict(scenario)
    passes = 2 * scenario.training.global_batch_size // scenario.training.micro_batch_size * scenario.plan.virtual_stages
    assert stalled(found, scenario, found.step_time_s + 0.5 * passes)
    assert not stalled(found, scenario, found.step_time_s + 0.05 * passes)
    assert not stalled(found, scenario, found.step_time_s + 3.0 * passes)
    assert not stalled(found, scenario, 1.2 * found.step_time_s)


def test_the_shipped_registry_is_small_bounded_and_pays() -> None:
    entries = constants()
    assert len(entries) <= 40
    assert len({(e.name, e.group) for e in entries}) == len(entries)
    for entry in entries:
        low, high = BOUNDS[entry.name]
        assert low <= entry.value <= high
        assert entry.rows >= 1
        assert entry.sources
        assert json.loads(json.dumps(entry.as_json()))["group"] == entry.group
        if entry.status == "kept":
            assert entry.gain > entry.gain_se
            assert len(entry.sources) >= 3
    assert [e.group for e in entries if e.name == "expected_error"].count("all") == 1


def test_the_page_of_constants_is_that_of_the_shipped_file() -> None:
    assert (data_dir("validation") / "CONSTANTS.md").read_text() == constants_text(constants(), unseen())
    entry = Constant(name="compute", family="f", value=1.25, rows=7, sources=("s", "t"), gain=0.02, gain_se=0.01)
    cells = [cell.strip() for cell in constants_text([entry]).splitlines()[-1].strip("|").split("|")]
    assert cells == ["compute", "family=f", "1.25", "7", "2", "2.00%", "1.00%", "kept"]


def test_the_command_prints_the_registry() -> None:
    found = json.loads(CliRunner().invoke(app, ["constants", "--json"]).output)
    assert found["count"] == len(found["constants"]) == len(constants())
    keys = {"name", "group", "value", "neutral", "rows", "sources", "gain", "gain_se", "status"}
    assert all(keys <= set(entry) for entry in found["constants"])
    shown = CliRunner().invoke(app, ["constants"])
    assert shown.exit_code == 0
    assert "expected_error" in shown.output


@given(st.sampled_from(FACTORS), st.floats(0.8, 1.6))
@settings(max_examples=20, deadline=None)
def test_a_constant_of_another_group_changes_nothing(name: str, value: float) -> None:
    with calibrated_by((Constant(name=name, family="torchtitan", value=value),)):
        assert getattr(calibration_for("megatron-core", "hopper"), name) == 1.0
        assert getattr(calibration_for("torchtitan", "hopper"), name) == value
