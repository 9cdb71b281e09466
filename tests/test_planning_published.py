"""Shipped plans against published figures: within 10 % of each, from inputs that are not the figure itself."""

from __future__ import annotations

import csv
import os
import re
from functools import cache
from pathlib import Path

import pytest

from simpar.planning.answer import Answer, Simulation, answer
from simpar.planning.closed_forms import mtti_s
from simpar.planning.published import compare_published
from simpar.planning.simulated_steps import SimulatedSteps
from simpar.planning.store import run_key
from simpar.specs.planfile import make_plan, read_plan_table

ROOT = Path(__file__).resolve().parent.parent
PLANS = sorted(p for p in (ROOT / "scenarios" / "plans").glob("*.toml") if not p.stem.startswith("what-if"))
SHARED = Path(os.environ.get("SIMPAR_SHARED_DATA", Path(__file__).parent / "data" / "measured"))


@cache
def answered(path: Path) -> Answer:
    return answer(make_plan(read_plan_table(path)), SimulatedSteps(), Simulation(20), record=False)


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_published_figures_come_out_within_ten_percent(path: Path) -> None:
    found = answered(path)
    assert found.feasible, found.binding
    comparisons = compare_published(found)
    assert comparisons, "a shipped plan compares itself with something published"
    for comparison in comparisons:
        assert comparison.source
        assert comparison.holds, (comparison.metric, comparison.published, comparison.predicted, comparison.error)


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_the_documentation_tells_them(path: Path) -> None:
    """Medians of 200 repetitions there, of 20 here."""
    page = (ROOT / "docs" / "planning.md").read_text(encoding="utf-8").partition("**From simulated steps.**")[0]
    told = {
        metric.split()[0]: figure for metric, figure in re.findall(rf"\| `{path.stem}` \| ([^|]+) \| [^|]+ \| ([^|]+) \|", page)
    }
    found = {c.metric.removesuffix("_at_least"): c.predicted for c in compare_published(answered(path))}
    assert {name: float(figure.replace(",", "")) for name, figure in told.items()} == pytest.approx(found, rel=0.02)


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_published_figures_are_no_inputs(path: Path) -> None:
    """Changing every published figure changes nothing but the comparison."""
    table = read_plan_table(path)
    plan = answered(path).resolved
    table["published"] = [{**figure, "value": figure["value"] * 7} for figure in table["published"]]
    from simpar.planning.resolve import resolve

    changed = resolve(make_plan(table), SimulatedSteps())
    assert plan.run is not None
    assert changed.run is not None
    assert run_key(changed.run) == run_key(plan.run)
    assert changed.economics == plan.economics


def test_what_the_task_names_is_there() -> None:
    metrics = {(path.stem.split("_")[0], figure["metric"]) for path in PLANS for figure in read_plan_table(path)["published"]}
    for wanted in (
        ("llama3.1-405b", "gpu_hours"),
        ("llama3.1-405b", "effective_training_time_ratio_at_least"),
        ("llama3.1-405b", "failures_per_day"),
        ("deepseek-v3", "gpu_hours"),
        ("deepseek-v3", "cost_usd"),
        ("opt-175b", "ideal_gpu_hours"),
        ("bloom-176b", "gpu_hours"),
        ("bloom-176b", "energy_kwh"),
        ("gpt3-175b", "days"),
        ("gpt3-175b", "energy_kwh"),
        ("megascale-175b", "days"),
        ("megascale-production", "effective_training_time_ratio_at_least"),
        ("meta-rsc", "mtti_s"),
    ):
        assert wanted in metrics


def test_llama_causes_sum_to_the_unexpected_interruptions() -> None:
    run = answered(ROOT / "scenarios/plans/llama3.1-405b_h100x16384.toml").resolved.run
    assert run is not None
    count = sum(source.rate_per_node_s for source in run.sources) * 86400 * 2048 * 54
    assert count == pytest.approx(419, rel=0.01)
    hardware = sum(s.rate_per_node_s for s in run.sources if s.nodes_hit and s.name != "host maintenance")
    assert hardware / sum(s.rate_per_node_s for s in run.sources) == pytest.approx(0.78, abs=0.01)


def test_projected_failure_times_follow_from_rates() -> None:
    with (SHARED / "collectives" / "failures.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    rate = next(float(r["value"]) for r in rows if r["kind"] == "node_failure_rate" and r["system"] == "Meta RSC-1")
    projected = [r for r in rows if r["kind"] == "job_mttf_projected"]
    assert len(projected) == 2
    for row in projected:
        predicted_h = mtti_s(int(row["gpus"]) // 8, rate / 1000.0) / 3600.0
        assert predicted_h == pytest.approx(float(row["value"]), rel=0.10)


def test_llama_run_of_the_model_card_by_hand() -> None:
    """15.6T tokens at 400 TFLOP/s without losses, and the goodput the card implies."""
    ideal_hours = 6 * 405e9 * 15.6e12 / 400e12 / 3600
    assert ideal_hours / 30.84e6 == pytest.approx(0.856, abs=0.003)
    found = answered(ROOT / "scenarios/plans/llama3.1-405b_h100x16384.toml")
    assert found.gpu_hours is not None
    assert found.gpu_hours.p50 > ideal_hours
