"""Questions about a plan: solvers, sweeps, comparisons, sensitivity, and what comes out as JSON, table and HTML."""

from __future__ import annotations

import io
import json
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from report_results import decompressed
from rich.console import Console
from serve_browser import CHROMIUM, TEXTS, Browser

from simpar.api.layout_search import LayoutSearch
from simpar.errors import InputError
from simpar.output import offline
from simpar.planning import answer as answer_module
from simpar.planning.answer import Simulation, answer, repetitions
from simpar.planning.changes import parse_sweep, scaled_field, with_value
from simpar.planning.compare import compare_hardware, marginal, sweep
from simpar.planning.questions import PlanOptions, ask
from simpar.planning.resolve import resolve
from simpar.planning.sensitivity import sensitivity
from simpar.planning.simulated_steps import SimulatedSteps
from simpar.planning.solve import Solver, node_counts, solve_checkpoint_interval, solve_nodes, solve_spares
from simpar.planning.speeds import phase_scenario
from simpar.planning.steps import StepEstimate, infeasible
from simpar.report.plan_view import run
from simpar.specs.planfile import make_plan
from simpar.specs.scenario import Scenario

DAY = 86400.0
QUICK = Simulation(8)
GIVEN = """
name = "given"
deadline = "60 d"
[[phases]]
tokens = "1T"
tokens_per_s_per_gpu = 300
[cluster]
num_nodes = 128
gpus_per_node = 8
spares = 16
[checkpoints]
parameters = "70B"
write_bandwidth = "200 GB/s"
[prices.rent]
usd_per_gpu_hour = 2.0
"""


class Linear:
    """A step model without a simulator: fixed throughput per GPU, at least `smallest` GPUs."""

    def __init__(self, per_gpu: float = 150.0, smallest: int = 0) -> None:
        self.per_gpu, self.smallest, self.asked = per_gpu, smallest, 0

    def estimate(self, scenario: Scenario) -> StepEstimate:
        self.asked += 1
        gpus = scenario.world_size
        if gpus < self.smallest:
            return infeasible("memory: too few GPUs")
        tokens = scenario.training.global_batch_size * scenario.training.sequence_length
        speed = self.per_gpu * gpus * scenario.hardware.peak_flops_per_s("bf16") / 989e12
        if scenario.hardware.fabric.oversubscription > 1:
            speed /= scenario.hardware.fabric.oversubscription
        step = tokens / speed
        return StepEstimate(step, step, step, 70e9, mfu=0.4, utilisation={"compute": 0.8}, layout="tp 8")

    def best_layout(self, scenario: Scenario) -> StepEstimate:
        return self.estimate(scenario)


@pytest.fixture
def given_plan(tmp_path: Path) -> Path:
    path = tmp_path / "given.toml"
    path.write_text(GIVEN, encoding="utf-8")
    return path


def table(**changes: Any) -> dict[str, Any]:
    return {
        "name": "simulated",
        "file": "simulated.toml",
        "phases": [{"tokens": "2T", "scenario": "llama3.1-405b_h100x16384_tp8pp16.toml", "layout": "search"}],
        "cluster": {"num_nodes": 2048, "spares": 64},
        "prices": {"rent": {"usd_per_gpu_hour": 2.0}},
    } | changes


# -- changes -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("a.b=128..2048x2", [128, 256, 512, 1024, 2048]),
        ("a=1,2,4,7", [1, 2, 4, 7]),
        ("a=0..10+2.5", [0, 2.5, 5, 7.5, 10]),
        ("a=3..5", [3, 4, 5]),
        ("a=1 min,5 min", ["1 min", "5 min"]),
        ("a=1e-3,2e-3", [1e-3, 2e-3]),
        ("a=blocking,asynchronous", ["blocking", "asynchronous"]),
    ],
)
def test_sweeps(text: str, values: list[object]) -> None:
    assert parse_sweep(text)[1] == values


@pytest.mark.parametrize("text", ["a", "a=", "=1,2", "a=8..1", "a=1..8x1", "a=0..8x2", "a=1..9+0", "a=1..1e9+1"])
def test_bad_sweeps(text: str) -> None:
    with pytest.raises(InputError, match="--sweep"):
        parse_sweep(text)


def test_a_value_is_set_without_touching_the_original() -> None:
    before = table()
    after = with_value(before, "phases.0.tokens", "3T")
    assert (before["phases"][0]["tokens"], after["phases"][0]["tokens"]) == ("2T", "3T")
    assert with_value(before, "power.pue", 1.1)["power"] == {"pue": 1.1}
    with pytest.raises(InputError, match="not an index"):
        with_value(before, "phases.4.tokens", 1)
    with pytest.raises(InputError, match="not a table"):
        with_value(before, "name.x", 1)


def test_quantities_are_scaled_in_their_unit() -> None:
    raw = table(reliability={"detection": "2 min"}, checkpoints={"write_bandwidth": "2 TB/s"})
    plan = make_plan(raw)
    changed = scaled_field(plan, raw, "reliability.detection", 0.5)
    assert changed is not None
    assert make_plan(changed).reliability.detection == 60.0
    changed = scaled_field(plan, raw, "checkpoints.write_bandwidth", 2.0)
    assert changed is not None
    assert make_plan(changed).checkpoints.write_bandwidth == 4e12
    assert scaled_field(plan, raw, "checkpoints.save_time", 2.0) is None


# -- solvers -----------------------------------------------------------------------------------------------------------
def solver(raw: dict[str, Any], steps: Any = None) -> Solver:
    return Solver(raw, steps or Linear(), QUICK)


def test_solved_nodes_meet_the_deadline_and_one_size_less_does_not(given_plan: Path) -> None:
    report = ask(given_plan, PlanOptions(solve="nodes", repetitions=20), Linear())
    study = report.studies[0]
    assert study.chosen is not None
    nodes = int(study.numbers["num_nodes"])
    ideal = 1e12 / (300 * 8) / (60 * DAY)
    assert ideal < nodes < 1.1 * ideal
    assert study.points[study.chosen].answer.deadline_probability >= 0.9  # type: ignore[operator]
    fewer = ask(given_plan, PlanOptions(overrides=(f"cluster.num_nodes={nodes - 1}",), repetitions=20), Linear())
    assert fewer.answer.deadline_probability is not None
    assert fewer.answer.deadline_probability < 0.9
    assert (report.exit_code, fewer.exit_code) == (0, 1)


def test_solved_nodes_keep_the_layout_divisible() -> None:
    steps = Linear(smallest=4096)
    raw = table(deadline="20 d")
    raw["phases"][0]["layout"] = "fixed"
    counts = node_counts(make_plan(raw))
    assert 2048 in counts
    assert all(count * 8 % 128 == 0 for count in counts)
    study = solve_nodes(solver(raw, steps))
    assert study.chosen is not None
    chosen = study.points[study.chosen]
    smaller = [p for p in study.points if p.values["cluster.num_nodes"] < chosen.values["cluster.num_nodes"]]  # type: ignore[operator]
    assert all(not point.answer.feasible for point in smaller)


def test_a_deadline_no_cluster_meets_is_a_result_that_says_what_binds() -> None:
    raw = table(deadline="1 h", cluster={"num_nodes": 2048, "spares": 64})
    raw["phases"][0]["layout"] = "fixed"
    study = solve_nodes(solver(raw))
    assert study.chosen is None
    assert "no number of nodes meets it" in study.conclusion
    assert "binds" in study.conclusion


def test_solving_for_nodes_needs_a_deadline() -> None:
    with pytest.raises(InputError, match="--deadline 60d"):
        solve_nodes(solver(table()))


def test_solved_interval_is_near_the_closed_form() -> None:
    raw = table(checkpoints={"parameters": "70B", "mode": "blocking", "save_time": "60 s", "load_time": "60 s"})
    study = solve_checkpoint_interval(solver(raw))
    assert study.chosen is not None
    exact = study.numbers["exact_interval_s"]
    assert 0.25 * exact <= study.numbers["checkpoint_interval_s"] <= 4 * exact
    quiet = solve_checkpoint_interval(solver(table(reliability={"failures": []})))
    assert "not needed" in quiet.conclusion


def test_solved_spares_follow_the_poisson_tail_and_cut_the_waiting() -> None:
    raw = table(reliability={"failures": [{"component": "gpu", "rate_per_node_day": 2e-3}]})
    study = solve_spares(solver(raw))
    assert study.chosen is not None
    waits = [p.answer.lost_time_s["waiting_for_spare"].p50 for p in study.points if p.answer.lost_time_s]
    assert waits == sorted(waits, reverse=True)
    assert study.numbers["mean_in_repair"] == pytest.approx(2048 * 2e-3)


# -- comparisons -------------------------------------------------------------------------------------------------------
def test_sweep_of_the_fabric_reaches_the_step_model() -> None:
    study = sweep(solver(table()), "cluster.fabric.oversubscription=1,2,4")
    days = [point.answer.days.p50 for point in study.points if point.answer.days]
    assert days[0] < days[1] < days[2]
    assert study.chosen == 0


def test_sweep_of_nodes_marks_what_cannot_run() -> None:
    study = sweep(solver(table(), Linear(smallest=8192)), "cluster.num_nodes=512..2048x2")
    assert [point.answer.feasible for point in study.points] == [False, True, True]
    assert "too few GPUs" in study.points[0].answer.binding[0]


def test_an_unknown_field_is_refused() -> None:
    with pytest.raises(InputError, match="did you mean 'num_nodes'"):
        sweep(solver(table()), "cluster.num_node=1,2")


def test_comparison_keeps_the_number_of_gpus() -> None:
    study = compare_hardware(solver(table()), ["dgx-h100", "dgx-b200", "gb200-nvl72"])
    gpus = {point.label: point.answer.resolved.run.stages[0].gpus for point in study.points if point.answer.resolved.run}
    assert set(gpus.values()) == {16384}
    assert study.points[1].answer.days.p50 < study.points[0].answer.days.p50  # type: ignore[union-attr]
    assert "no price for dgx-b200" in study.points[1].note


def test_comparison_needs_simulated_speeds(given_plan: Path) -> None:
    with pytest.raises(InputError, match="holds for its own hardware only"):
        ask(given_plan, PlanOptions(compare="dgx-h100,dgx-h200", repetitions=2), Linear())
    with pytest.raises(InputError, match="unknown hardware profile 'dgx-h1000'"):
        compare_hardware(solver(table()), ["dgx-h1000"])


def test_marginal_values_cover_what_planners_buy() -> None:
    study = marginal(solver(table()))
    labels = " ".join(point.label for point in study.points)
    for words in ("more nodes", "NIC", "HBM", "faster links", "spare"):
        assert words in labels
    base, more = study.points[0].answer.days, study.points[1].answer.days
    assert base is not None
    assert more is not None
    assert more.p50 < base.p50


# -- sensitivity -------------------------------------------------------------------------------------------------------
def test_the_tornado_is_sorted_and_moves_the_right_way() -> None:
    raw = table(reliability={"failures": [{"component": "gpu", "rate_per_node_day": 4e-3}]})
    found = sensitivity(make_plan(raw), Linear(), Simulation(4))
    spans = [swing.span_days for swing in found.swings]
    assert spans == sorted(spans, reverse=True)
    by_name = {swing.name: swing for swing in found.swings}
    assert {"step time", "failure rate", "restart time", "rent", "PUE"} <= set(by_name)
    assert "capital" not in by_name
    for name in ("step time", "failure rate", "restart time"):
        low, high = by_name[name].days
        assert low is not None
        assert high is not None
        assert low < found.base_days < high  # type: ignore[operator]
    assert by_name["rent"].cost_usd[1] == pytest.approx(by_name["rent"].cost_usd[0] * 1.25 / 0.75)  # type: ignore[operator]


# -- seeds, stores -----------------------------------------------------------------------------------------------------
def test_an_interrupted_run_resumes_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_model = resolve(make_plan(table()), Linear()).run
    assert run_model is not None
    store = tmp_path / "runs.sqlite"
    straight = repetitions(run_model, Simulation(6, seed=3))
    made: list[int] = []
    real = answer_module.simulate_run

    def stops_after_four(model: Any, seed: int, repetition: int) -> Any:
        if len(made) == 4:
            raise KeyboardInterrupt
        made.append(repetition)
        return real(model, seed, repetition)

    monkeypatch.setattr(answer_module, "simulate_run", stops_after_four)
    with pytest.raises(KeyboardInterrupt):
        repetitions(run_model, Simulation(6, seed=3, store=store))
    made.clear()
    resumed = repetitions(run_model, Simulation(6, seed=3, store=store, resume=True))
    assert made == [4, 5]
    assert resumed == straight
    other = repetitions(replace(run_model, hot_spares=1), Simulation(2, seed=3, store=store, resume=True))
    assert other != straight[:2]
    with sqlite3.connect(store) as db:
        assert db.execute("select count(*) from checked_repetitions").fetchone() == (8,)


def test_a_store_that_is_no_database_is_refused(tmp_path: Path, given_plan: Path) -> None:
    bad = tmp_path / "bad.sqlite"
    bad.write_text("this is a text file, long enough to be looked at" * 40)
    with pytest.raises(InputError, match="--store"):
        ask(given_plan, PlanOptions(store=bad, repetitions=2), Linear())
    with pytest.raises(InputError, match="--resume needs --store"):
        ask(given_plan, PlanOptions(resume=True), Linear())


def test_an_altered_repetition_is_refused(tmp_path: Path) -> None:
    run_model = resolve(make_plan(table()), Linear()).run
    assert run_model is not None
    store = tmp_path / "runs.sqlite"
    repetitions(run_model, Simulation(2, seed=3, store=store))
    with sqlite3.connect(store) as db:
        db.execute("update checked_repetitions set outcome = '{}'")
    with pytest.raises(InputError, match="an entry is damaged: its checksum is wrong"):
        repetitions(run_model, Simulation(2, seed=3, store=store, resume=True))


def test_the_seed_decides() -> None:
    plan = make_plan(table())
    first, again, other = (answer(plan, Linear(), Simulation(5, seed)).days for seed in (1, 1, 2))
    assert first == again
    assert first != other


# -- output ------------------------------------------------------------------------------------------------------------
def printed(path: Path, options: PlanOptions) -> tuple[int, str]:
    out = io.StringIO()
    code = run(path, options, Linear(), Console(file=out, width=150))
    return code, out.getvalue()


def test_json_has_what_is_promised(given_plan: Path) -> None:
    options = PlanOptions(json=True, repetitions=5, sweep=("cluster.num_nodes=64,128",), sensitivity=True)
    code, text = printed(given_plan, options)
    found = json.loads(text)
    assert code == 0
    for name in ("days", "gpu_hours", "goodput", "cost_usd", "energy_kwh", "carbon_kg"):
        assert found[name]["p10"] <= found[name]["p50"] <= found[name]["p90"]
    for cause in (
        "checkpoint_stall", "lost_work", "detection", "restart", "waiting_for_spare", "slow_node", "maintenance",
        "initialisation",
    ):  # fmt: skip
        assert set(found["lost_time_s"][cause]) == {"p10", "p50", "p90"}
    assert found["assumptions"]
    assert len(found["studies"][0]["points"]) == 2
    assert found["sensitivity"]["swings"]
    assert printed(given_plan, options)[1] == text


def test_an_impossible_plan_prints_null_and_why(given_plan: Path) -> None:
    options = PlanOptions(json=True, repetitions=2, overrides=("reliability.restart=1000 d",))
    code, text = printed(given_plan, options)
    found = json.loads(text)
    assert code == 1
    assert found["days"] is None
    assert "recovery besides loading binds" in found["binding"][0]
    assert "NOT FEASIBLE" in printed(given_plan, replace(options, json=False))[1]


def test_the_table_shows_numbers_losses_and_assumptions(given_plan: Path) -> None:
    _, text = printed(given_plan, PlanOptions(repetitions=5, solve="spares"))
    for words in ("days", "goodput", "Lost time", "lost work", "Closed forms", "What this rests on", "solve spares", "->"):
        assert words in text


def test_html_is_one_page_that_needs_no_network(given_plan: Path, tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    options = PlanOptions(repetitions=5, html=page, sensitivity=True, sweep=("cluster.num_nodes=64..256x2",), deadline="90 d")
    with offline():
        printed(given_plan, options)
    text = page.read_text(encoding="utf-8")
    head, data = text.split('<script type="application/gzip" id=data>')
    text = head + json.dumps(decompressed(data.partition("</script>")[0])) + data.partition("</script>")[2]
    for words in (
        "Timeline of one run", "Incident by incident", "checkpoint", "Lost time by cause", "Progress of the same run",
        "How long it may take", "What it may cost", "Which assumption", "every point", "What this rests on",
    ):  # fmt: skip
        assert words in text
    assert "<script src" not in text
    assert "cdn.plot.ly" not in text.split("</script>")[-1]
    with pytest.raises(InputError, match="--html"):
        printed(given_plan, PlanOptions(repetitions=2, html=page / "below-a-file.html"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (PlanOptions(solve="node"), "did you mean 'nodes'"),
        (PlanOptions(repetitions=0), "at least 1"),
        (PlanOptions(seed=-1), "must not be negative"),
        (PlanOptions(compare=" , "), "name hardware profiles"),
        (PlanOptions(deadline="sixty", repetitions=1), "deadline"),
    ],
)
def test_bad_options(given_plan: Path, options: PlanOptions, words: str) -> None:
    with pytest.raises(InputError, match=words):
        ask(given_plan, options, Linear())


# -- the simulator behind it -------------------------------------------------------------------------------------------
def test_the_simulated_step_of_a_scenario_drives_the_plan() -> None:
    raw = table()
    raw["phases"][0]["layout"] = "fixed"
    found = answer(make_plan(raw), SimulatedSteps(), Simulation(4))
    assert found.days is not None
    (name, estimate), *_ = found.steps
    assert "2048 nodes" in name
    tokens_per_s = 2048 * 8192 / estimate.step_time_s
    assert found.resolved.run is not None
    assert found.resolved.run.ideal_s == pytest.approx(2e12 / tokens_per_s)
    assert found.resolved.checkpoints is not None
    assert found.resolved.checkpoints.bytes == pytest.approx(14 * 405.85e9, rel=1e-3)


def test_searched_layouts_come_from_the_search_and_are_kept(tmp_path: Path) -> None:
    said: list[str] = []

    def search() -> LayoutSearch:
        return LayoutSearch(store=tmp_path / "layouts.sqlite", say=lambda text, last: said.append(text) if last else None)

    raw = table(cluster={"num_nodes": 2, "hardware": "dgx-h100"})
    raw["phases"] = [{"tokens": "1B", "scenario": "llama3.1-70b_h100x64_tp4cp2pp4", "layout": "search", "global_batch_size": 16}]
    first = answer(make_plan(raw), SimulatedSteps(search()), Simulation(4))
    (_, estimate), *_ = first.steps
    assert estimate.fits
    assert estimate.found.startswith("proven best of ")
    assert "mbs" in estimate.layout
    assert len(said) == 1
    # Not slower than the layout as written, where that one fits.
    again = answer(make_plan(raw), SimulatedSteps(search()), Simulation(4))
    assert said[-1].endswith("layouts.sqlite")
    assert again.days == first.days
    assert again.steps == first.steps


def test_a_cluster_too_small_for_the_model_says_what_rejects_its_layouts() -> None:
    raw = table(cluster={"num_nodes": 1, "hardware": "dgx-h100"})
    raw["phases"] = [{"tokens": "1B", "scenario": "llama3.1-405b_h100x16384_tp8pp16", "layout": "search", "global_batch_size": 8}]
    found = answer(make_plan(raw), SimulatedSteps(LayoutSearch()), Simulation(4))
    assert not found.feasible
    assert any("memory" in reason for reason in found.binding)


def test_comparisons_search_the_layout_again_unless_told_to_keep_it(tmp_path: Path) -> None:
    path = tmp_path / "simulated.toml"
    scenario = 'scenario = "llama3.1-405b_h100x16384_tp8pp16.toml"'
    path.write_text(f'[[phases]]\ntokens = "2T"\n{scenario}\n[cluster]\nnum_nodes = 2048\nspares = 64\n', encoding="utf-8")

    class Counting(Linear):
        searched = 0

        def best_layout(self, scenario: Scenario) -> StepEstimate:
            self.searched += 1
            return self.estimate(scenario)

    for keep, expected in ((False, 2), (True, 0)):
        steps = Counting()
        options = PlanOptions(repetitions=2, sweep=("cluster.fabric.oversubscription=1,2",), keep_layout=keep)
        report = ask(path, options, steps)
        assert steps.searched == expected
        assert len(report.studies[0].points) == 2
    for solve, keep, wanted in (("nodes", False, True), ("nodes", True, False), ("spares", False, False)):
        steps = Counting()
        ask(path, PlanOptions(repetitions=2, solve=solve, deadline="60d", keep_layout=keep), steps)
        assert (steps.searched > 0) == wanted


def test_a_hopeless_plan_is_not_simulated_to_the_last_repetition(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    real = answer_module.simulate_run

    def counted(model: Any, seed: int, repetition: int, **options: Any) -> Any:
        calls.append(repetition)
        return real(model, seed, repetition, **options)

    monkeypatch.setattr(answer_module, "simulate_run", counted)
    raw = table(cluster={"num_nodes": 2048, "spares": 0}, reliability={"repair": "5 d"})
    found = answer(make_plan(raw), Linear(), Simulation(50))
    assert not found.feasible
    assert len(calls) < 10


def test_what_if_scales_reach_the_hardware() -> None:
    raw = table()
    before = phase_scenario(make_plan(raw), make_plan(raw).phases[0]).hardware
    cluster = {"num_nodes": 2048, "memory_scale": 1.25, "nic_bandwidth_scale": 2.0, "scale_up_bandwidth_scale": 0.5}
    plan = make_plan(table(cluster=cluster | {"fabric": {"nics_per_node": 9}}))
    after = phase_scenario(plan, plan.phases[0]).hardware
    assert after.gpu.memory.value == 1.25 * before.gpu.memory.value
    assert after.nic.bandwidth.value == 2.0 * before.nic.bandwidth.value
    assert after.scale_up.bandwidth.value == 0.5 * before.scale_up.bandwidth.value
    assert after.nic.count == 9
    assert after.gpu.memory.kind == "assumed"


def test_the_plan_of_the_guide_runs() -> None:
    import tomllib

    text = (Path(__file__).resolve().parent.parent / "docs" / "planning.md").read_text(encoding="utf-8")
    raw = tomllib.loads(text.split("```toml\n")[1].split("```")[0])
    found = answer(make_plan({**raw, "file": "docs/planning.md"}), Linear(per_gpu=2000.0), Simulation(3))
    assert found.days is not None
    assert found.resolved.run is not None
    assert [stage.nodes for stage in found.resolved.run.stages] == [64, 128]


def test_an_interrupted_question_says_how_to_go_on(
    given_plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real, store = answer_module.simulate_run, tmp_path / "runs.sqlite"

    def stopped(model: Any, seed: int, repetition: int, **options: Any) -> Any:
        if repetition == 7:
            raise KeyboardInterrupt
        return real(model, seed, repetition, **options)

    monkeypatch.setattr(answer_module, "simulate_run", stopped)
    code, _ = printed(given_plan, PlanOptions(repetitions=12, json=True, store=store))
    assert code == 130
    assert f"--store {store} --resume goes on" in capsys.readouterr().err
    monkeypatch.setattr(answer_module, "simulate_run", real)
    resumed = printed(given_plan, PlanOptions(repetitions=12, json=True, store=store, resume=True))
    assert resumed == printed(given_plan, PlanOptions(repetitions=12, json=True))


@pytest.mark.skipif(CHROMIUM is None, reason="headless Chromium is not installed (Debian package chromium)")
def test_nothing_on_the_page_overlaps_or_is_cut_off(given_plan: Path, tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    options = PlanOptions(repetitions=5, html=page, sensitivity=True, solve="spares", marginal=True, deadline="90 d")
    with offline():
        printed(given_plan, options)
    with Browser(1280, 900) as browser:
        browser.open(page.as_uri())
        for width in (1280, 1920):
            browser.resize(width, 900)
            browser.wait("document.querySelectorAll('.js-plotly-plot .main-svg').length > 6")
            browser.js("new Promise(done => setTimeout(done, 700))")
            assert browser.js("document.documentElement.scrollWidth") <= width
            assert browser.js(TEXTS) == []
        assert browser.console == []
        assert not browser.js("document.body.dataset.errors")


def test_a_changed_plan_is_not_compared_with_what_was_published() -> None:
    """384 GPUs were published; 768 were not. A price changes nothing that was measured."""
    name = "bloom-176b_a100x384"
    for change, compared in (((), True), (("prices.rent.usd_per_gpu_hour=2",), True), (("cluster.num_nodes=96",), False)):
        report = ask(name, PlanOptions(overrides=change, repetitions=1), SimulatedSteps())
        assert bool(report.published) is compared, change
