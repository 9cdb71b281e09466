"""Laws of what is printed about a step, over shipped scenarios, profiles, schedules and random layouts."""

from __future__ import annotations

import random
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from search_random import CASES, TINY, random_choice, space_of

from simpar.errors import InputError
from simpar.evidence.cases import load_cases
from simpar.parallel.layout import Layout
from simpar.program.pipelines import Detail
from simpar.report.step_html import step_page
from simpar.report.step_table import show, step_report
from simpar.result.published import IN_SAMPLE
from simpar.result.result import Result
from simpar.schedules import SCHEDULES
from simpar.searching.space import Space
from simpar.specs.calibration import Constant, calibrated_by, constants
from simpar.specs.framework import family_of
from simpar.specs.hardware import profile_names
from simpar.specs.scenario import Scenario, make_scenario, read_scenario
from simpar.step import simulate

SCENARIOS = sorted((Path(__file__).parents[1] / "scenarios").glob("*.toml"))
EPS = 1e-9
SOME = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def hold(r: Result) -> None:
    """Everything that is true of any step."""
    for dimension, exposed in r.exposed_communication_s.items():
        assert -EPS <= exposed <= r.communication_s.get(dimension, 0.0) * (1 + EPS) + 1e-12, dimension
    parts = r.waterfall()
    assert all(seconds >= -EPS for _, seconds in parts), parts
    assert sum(seconds for _, seconds in parts) == pytest.approx(r.step_time_s)
    interval = r.step_interval
    assert r.ideal_s * (1 - EPS) <= interval.low <= r.step_time_s <= interval.high
    assert 0.0 < r.ideal_s <= r.step_time_s
    if r.layout.training.precision in ("bf16", "fp16", "tf32", "fp32"):
        assert r.to_json()["uncertainty"]["mfu"]["high"] <= 1 + EPS
    assert 0.0 <= r.bubble_fraction < 1.0
    assert (r.accounting.phase_bubble <= r.accounting.waits["bubble"] + EPS).all()
    assert min(r.hardware_flops, r.layout.model_flops, r.layout.attention_model_flops, r.tokens_per_s) >= 0.0
    for memory in r.memory:
        assert all(amount >= 0.0 for amount in memory.at_peak.values()), memory.at_peak
        assert 0.0 < memory.allocated_bytes <= memory.reserved_bytes <= memory.device_bytes


@cache
def space(name: str) -> Space:
    return space_of(**CASES[name])


def drawn(name: str, seed: int) -> Scenario | None:
    choice = random_choice(space(name), random.Random(seed))
    return None if choice is None else choice.scenario(space(name).template)


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda p: p.stem)
def test_laws_hold_for_every_shipped_scenario(path: Path) -> None:
    if "200000" in path.stem:
        pytest.skip("a minute of simulation")
    hold(simulate(read_scenario(path), detail="stage"))


@SOME
@given(name=st.sampled_from(sorted(CASES)), seed=st.integers(0, 2**32))
def test_laws_hold_for_random_layouts(name: str, seed: int) -> None:
    if (scenario := drawn(name, seed)) is not None:
        hold(simulate(scenario, detail="stage"))


@settings(SOME, max_examples=10)
@example(name="moe", seed=52)  # DualPipe: at op detail blocks waited for exchanges that lie under the other direction's compute.
@example(name="moe", seed=4)  # 1F1B with expert overlap: the same of those beside another micro-batch's.
@given(name=st.sampled_from(["tiny", "dense", "moe", "torchtitan", "zero-bubble"]), seed=st.integers(0, 2**32))
def test_communication_is_the_same_however_closely_one_looks(name: str, seed: int) -> None:
    scenario = drawn(name, seed)
    if scenario is None:
        return
    stage, layer, op = (simulate(scenario, detail=detail) for detail in ("stage", "layer", "op"))
    hold(op)
    for dimension in {*stage.communication_s, *op.communication_s}:
        seconds = stage.communication_s[dimension]
        assert layer.communication_s[dimension] == pytest.approx(seconds), dimension
        assert op.communication_s[dimension] == pytest.approx(seconds), dimension
        exposed = stage.exposed_communication_s[dimension]
        assert layer.exposed_communication_s[dimension] == pytest.approx(exposed, abs=1e-12), dimension
    # Inside a block nothing else can be earlier: only what is issued across a block's end may be.
    assert op.step_time_s <= layer.step_time_s * (1 + 1e-9)


def table(schedule: str, **plan: Any) -> dict[str, Any]:
    chunks = SCHEDULES[schedule].virtual_stages
    own = {"pp": 2, "tp": 2, "schedule": schedule, "virtual_stages": chunks or (2 if "interleaved" in schedule else 1), **plan}
    return {
        "name": schedule, "model": TINY, "cluster": {"hardware": "dgx-a100-80gb", "num_nodes": 1}, "plan": own,
        "training": {"sequence_length": 2048, "global_batch_size": 32},
    }  # fmt: skip


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
@pytest.mark.parametrize("zero_stage", [0, 1, 2])
@pytest.mark.parametrize("overlap", [False, True])
def test_laws_hold_for_every_schedule(schedule: str, zero_stage: int, overlap: bool) -> None:
    plan = {"zero_stage": zero_stage, "overlap_p2p": overlap, "overlap_grad_reduce": overlap}
    details: list[Detail] = ["stage", "op"]
    found = [simulate(make_scenario(table(schedule, **plan)), detail=detail) for detail in details]
    for result in found:
        hold(result)
    assert found[0].communication_s == pytest.approx(found[1].communication_s)


@pytest.mark.parametrize("hardware", profile_names())
@pytest.mark.parametrize("model", ["llama3.1-8b", "mixtral-8x7b", "deepseek-v2", "mlp-4096x24"])
def test_no_machine_beats_its_peak_within_the_interval(hardware: str, model: str) -> None:
    for precision in ("bf16", "fp16", "fp8", "fp32"):
        wanted = {
            "model": model, "cluster": {"hardware": hardware, "num_nodes": 1, "num_gpus": 1}, "plan": {},
            "training": {"sequence_length": 1024, "global_batch_size": 1, "precision": precision},
        }  # fmt: skip
        try:
            scenario = make_scenario(wanted)
        except InputError:  # A dtype or a size that the machine does not have.
            continue
        hold(simulate(scenario, detail="stage"))


def test_an_interval_without_measurements_stays_physical() -> None:
    """An Ada card that no run was measured on: by differences the lower end was a quarter of the time at peak."""
    wanted = {
        "model": "llama3.1-8b", "cluster": {"hardware": "rtx-4090", "num_nodes": 1, "num_gpus": 1}, "plan": {},
        "training": {"sequence_length": 2048, "global_batch_size": 1},
    }  # fmt: skip
    result = simulate(make_scenario(wanted), detail="stage")
    interval, step_s = result.step_interval, result.step_time_s
    assert result.layout.calibration.expected_error == max(c.value for c in constants() if c.name == "expected_error")
    assert result.ideal_s <= interval.low < step_s
    # An architecture that no run of its framework was measured on has the factor of unfamiliar ones.
    assert step_s / interval.low <= interval.high / step_s < 2.5
    # However wide, it ends at the time at peak.
    with calibrated_by((Constant(name="expected_error", value=0.9),)):
        wide = simulate(make_scenario(wanted), detail="stage")
    assert wide.step_interval.low == pytest.approx(wide.ideal_s)
    assert wide.step_time_s / wide.step_interval.low < wide.step_interval.high / wide.step_time_s


def test_fp8_is_measured_against_the_fp8_peak() -> None:
    """All but attention and the head at twice the rate; the waterfall starts at that, MFU stays what is published: over bf16."""
    result = simulate(read_scenario(next(p for p in SCENARIOS if "fp8" in p.stem)), detail="stage")
    layout, peaks = result.layout, result.layout.hardware.gpu.peak_flops
    flops = layout.model_flops / result.world_size
    at_bf16, at_fp8 = flops / peaks["bf16"].value, flops / peaks["fp8"].value
    assert at_fp8 < result.ideal_s < at_bf16
    head = 3.0 * 2.0 * 128256 * layout.scenario.model.hidden_size * result.tokens_per_step  # type: ignore[union-attr]
    wide = (layout.attention_model_flops + head) / result.world_size
    assert result.ideal_s == pytest.approx(wide / peaks["bf16"].value + (flops - wide) / peaks["fp8"].value, rel=1e-3)
    assert result.mfu == pytest.approx(at_bf16 / result.step_time_s)


# -- what is published ---------------------------------------------------------------------------------------------------


def test_figures_that_the_constants_have_seen_say_so() -> None:
    """Flagged are the step's figures of every scenario that is a row of the fit, or whose source gave rows to its constants."""
    told = {"step_time_s", "tokens_per_s_per_gpu", "mfu", "model_flops_per_s_per_gpu"}
    fitted = {_key(case.scenario) for case in load_cases() if case.use == "fit"}
    for path in SCENARIOS:
        scenario = read_scenario(path)
        layout = Layout.of(scenario, 1)
        framework, architecture = layout.framework, layout.hardware.gpu.architecture
        own = (c for c in constants() if c.holds(family_of(framework.name), architecture))
        sources = " ".join(source for c in own for source in c.sources)
        papers = {number for row in scenario.published for number in re.findall(r"\d{4}\.\d{5}", row.source)}
        seen = _key(scenario) in fitted or any(number in sources for number in papers)
        for row in scenario.published:
            assert row.fitted == (seen and row.metric in told), (path.stem, row.metric)


def _key(scenario: Scenario) -> tuple[object, ...]:
    plan, training = scenario.plan, scenario.training
    name = getattr(scenario.model, "name", "")
    return name, scenario.world_size, plan.tp, plan.pp, plan.cp, plan.ep, training.sequence_length, training.global_batch_size


def test_agreement_in_sample_is_marked_wherever_it_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    path = next(p for p in SCENARIOS if p.stem == "korthikanti-22b_a100x8_tp8pp1")
    result = simulate(read_scenario(path))
    (row,) = result.to_json()["published"]
    assert row["fitted"] is True
    assert row["error"] == pytest.approx(result.step_time_s / 1.1 - 1)
    show(step_report(result))
    assert IN_SAMPLE in " ".join(capsys.readouterr().out.split())
    assert IN_SAMPLE in step_page(result)


def test_a_changed_layout_is_not_the_published_one() -> None:
    path = next(p for p in SCENARIOS if p.stem == "korthikanti-22b_a100x8_tp8pp1")
    assert read_scenario(path, ["plan.recompute=full"]).published == ()
    assert read_scenario(path, ["plan.tp=8", "effects.seed=3", "description=mine"]).published
    choice = random_choice(space("tiny"), random.Random(3))
    assert choice is not None
    published = read_scenario(path).published
    assert choice.scenario(space("tiny").template.model_copy(update={"published": published})).published == ()


def test_offloaded_logits_leave_their_own_category() -> None:
    """Mixtral with everything offloaded and recomputed: logits went to the host as activations, which fell below nothing."""
    wanted = {
        "model": "mixtral-8x7b", "cluster": {"hardware": "dgx-h100", "num_nodes": 1},
        "plan": {
            "pp": 2, "virtual_stages": 4, "schedule": "interleaved_bfs", "tp": 2, "recompute": "full",
            "offload": {"activations": 1.0},
        },
        "training": {"global_batch_size": 32, "sequence_length": 4096},
    }  # fmt: skip
    hold(simulate(make_scenario(wanted), detail="stage"))


@pytest.mark.parametrize("precision", ["fp8", "fp8-rowwise", "fp8-block"])
def test_every_kind_of_fp8_has_the_fp8_peak(precision: str) -> None:
    wanted = {
        "model": "llama3.1-8b", "framework": "torchtitan", "cluster": {"hardware": "dgx-h100", "num_nodes": 1},
        "plan": {"zero_stage": 3}, "training": {"global_batch_size": 8, "sequence_length": 8192, "precision": precision},
    }  # fmt: skip
    result = simulate(make_scenario(wanted), detail="stage")
    at_bf16 = result.layout.model_flops / result.world_size / result.peak_flops_per_s
    assert 0.5 * at_bf16 < result.ideal_s < 0.7 * at_bf16
