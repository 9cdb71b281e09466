"""A cluster's own runs: what they teach, what they cannot, and what the site then changes everywhere."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import simpar
from simpar.cli.app import app
from simpar.errors import InputError
from simpar.evidence.predicted import AtSite, predict, predict_at
from simpar.evidence.run_rows import run_of
from simpar.evidence.spread import predict_run
from simpar.model.kind import kind_of
from simpar.parallel.keys import Gather, OptimizerStep
from simpar.readings import simulate_open
from simpar.searching.space import Space
from simpar.site.learned import adapt, as_toml, memory_of_site, shipped_prior
from simpar.site.observed import Observed, evidence_of, observe
from simpar.site.posterior import Evidence, Prior, learn
from simpar.specs.counts import resolved_dp
from simpar.specs.kinds import Kind, Reach, correlation
from simpar.specs.scenario import Scenario, make_scenario
from simpar.specs.site import Site, SiteFact, SiteKind, read_site
from simpar.step import prepare, simulate

MODEL = {
    "kind": "transformer", "num_hidden_layers": 8, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 32000,
}  # fmt: skip


def table(name: str = "run", nodes: int = 2, plan: dict[str, Any] | None = None, **training: Any) -> dict[str, Any]:
    given = {"sequence_length": 8192, "global_batch_size": 64, "micro_batch_size": 1, **training}
    return {"name": name, "model": MODEL, "cluster": {"hardware": "dgx-h100", "num_nodes": nodes}, "plan": plan or {"tp": 2},
            "training": given}  # fmt: skip


TABLES = (
    table("a"), table("b", 1, {"tp": 4}), table("c", 2, {"tp": 1, "pp": 2}), table("d", 4, {"tp": 8}),
    table("e", 1, {"tp": 1, "zero_stage": 3}), table("f", 2, {"tp": 2, "pp": 2}, sequence_length=16384),
)  # fmt: skip
"""Long sequences: layers short enough to wait for the host show little of a slow device."""
TRUE = Site(compute=1.15, memory=1.3, communication=1.6)


def row(scenario: dict[str, Any], factor: float = 1.0, site: Site = TRUE) -> dict[str, Any]:
    seconds = predict_at(site, make_scenario(scenario)).step_time_s
    return {"id": scenario["name"], "scenario": scenario, "step_time_s": seconds * factor}


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    """Runs of a cluster that is slower than published ones in each factor."""
    noise = np.random.default_rng(3).normal(0.0, 0.01, len(TABLES))
    return [row(each, float(np.exp(off))) for each, off in zip(TABLES, noise, strict=True)]


@pytest.fixture(scope="module")
def learned(rows: list[dict[str, Any]]) -> simpar.SiteResult:
    return simpar.adapt(rows[:4])


def test_a_slow_cluster_is_learned_from_four_runs(learned: simpar.SiteResult, rows: list[dict[str, Any]]) -> None:
    before, after = learned.details.errors
    assert before > 0.1
    assert after < 0.02
    for unseen in rows[4:]:
        scenario = make_scenario(unseen["scenario"])
        plain, there = predict(scenario), predict_at(learned.site, scenario)
        off = [abs(math.log(found.step_time_s / unseen["step_time_s"])) for found in (plain, there)]
        assert off[1] < off[0] / 3.0
        assert there.step_low_s < unseen["step_time_s"] < there.step_high_s
        assert there.step_high_s / there.step_low_s < plain.step_high_s / plain.step_low_s


def test_without_runs_nothing_changes() -> None:
    found = adapt([])
    assert found.site == Site()
    assert not found.site.learned
    scenario = make_scenario(TABLES[0])
    assert predict_at(found.site, scenario) == predict(scenario)


def test_runs_of_a_known_kind_leave_predictions_where_they_are() -> None:
    """A cluster like the published ones: its runs narrow the interval and move next to nothing."""
    own = [row(each, float(np.exp(off)), Site()) for each, off in zip(TABLES[:4], (0.02, -0.01, 0.015, -0.02), strict=True)]
    found = simpar.adapt(own)
    unseen = make_scenario(TABLES[5])
    plain, there = predict(unseen), predict_at(found.site, unseen)
    assert abs(math.log(there.step_time_s / plain.step_time_s)) < 0.02
    assert there.step_high_s / there.step_low_s < plain.step_high_s / plain.step_low_s


def test_runs_that_agree_on_being_far_off_are_followed() -> None:
    """A cluster that takes 1.5 times as long in everything: three runs say so, and nothing is shrunk away."""
    slow = Site(compute=1.5, memory=1.5, communication=1.5, host=1.5)
    found = simpar.adapt([row(each, site=slow) for each in TABLES[:3]])
    unseen = make_scenario(TABLES[4])
    assert predict_at(found.site, unseen).step_time_s == pytest.approx(predict_at(slow, unseen).step_time_s, rel=0.06)


def test_a_slow_host_is_told_from_a_slow_network() -> None:
    """Small micro-batches leave the device waiting for launches, large ones do not: their runs tell whose fault it is."""
    slow, small = Site(host=1.6), {**MODEL, "hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 8}
    how: dict[str, Any] = {"nodes": 1, "plan": {"tp": 2}, "sequence_length": 4096}
    tables = [{**table(f"mbs{n}", micro_batch_size=n, **how), "model": small} for n in (1, 4, 16)]
    host = [predict_at(slow, make_scenario(each)).step_time_s / predict(make_scenario(each)).step_time_s for each in tables]
    assert host[0] > 1.4
    assert host[2] < 1.1
    found = simpar.adapt([row(each, site=slow) for each in tables]).site
    assert found.host > 1.2
    assert found.host > found.communication
    unseen = make_scenario({**table("mbs8", micro_batch_size=8, **how), "model": small})
    assert predict_at(found, unseen).step_time_s == pytest.approx(predict_at(slow, unseen).step_time_s, rel=0.08)


@pytest.mark.parametrize(
    ("framework", "key", "plan", "training", "host_s"),
    [
        ("megatron-core", OptimizerStep, {"offload": {"optimizer": True}}, {}, 1.9e-3),
        ("torch-fsdp", OptimizerStep, {}, {"optimizer": "adamw-8bit"}, 4e-3),
        ("nanotron", Gather, {"zero_stage": 1}, {}, 20e-3),
    ],
)
def test_the_host_of_an_update_is_the_sites(
    framework: str, key: type, plan: dict[str, Any], training: dict[str, Any], host_s: float
) -> None:
    """Beside an update on the host, in one tensor by tensor, and in gathers unpacked piece by piece too: `host_s` at least."""
    given = {**table("update", 8, {"tp": 1, **plan}, **training), "framework": framework}

    def seconds(host: float) -> float:
        priced = prepare(make_scenario({**given, "site": Site(host=host)}), detail="stage")
        return float(sum(s for k, s in zip(priced.program.price_keys, priced.table.seconds, strict=True) if isinstance(k, key)))

    found = [seconds(host) for host in (5.0, 10.0, 15.0)]
    assert found[1] - found[0] > 5.0 * host_s
    assert found[2] - found[1] == pytest.approx(found[1] - found[0], rel=1e-6)


def test_one_bad_run_moves_little(rows: list[dict[str, Any]]) -> None:
    sick = [*rows[:4], {**rows[4], "step_time_s": 5.0 * rows[4]["step_time_s"]}]
    found = simpar.adapt(sick)
    good = simpar.adapt(rows[:4])
    unseen = make_scenario(TABLES[5])
    moved = predict_at(found.site, unseen).step_time_s / predict_at(good.site, unseen).step_time_s
    assert abs(math.log(moved)) < 0.06
    assert found.details.doubted == ("e",)


def test_a_factor_that_no_run_shows_stays_as_uncertain_as_it_was() -> None:
    """One GPU never communicates."""
    alone = {**table("alone", 1, {"tp": 1}), "cluster": {"hardware": "dgx-h100", "num_nodes": 1, "num_gpus": 1}}
    lengths = (1024, 2048, 4096, 8192)
    found = simpar.adapt([row({**alone, "training": {**alone["training"], "sequence_length": length}}) for length in lengths])
    spread = np.sqrt(np.diag(found.details.posterior.covariance))
    before = np.sqrt(np.diag(shipped_prior().usual_covariance))
    assert spread[0] < 0.93 * before[0]
    assert spread[2] > 0.98 * before[2]


def test_open_facts_are_marginalised(rows: list[dict[str, Any]]) -> None:
    """A run that does not say whether it recomputed is read as the one that its step time fits."""
    said = table("open", 2, {"tp": 2, "recompute": "full"})
    opened = {**said, "plan": {**said["plan"], "recompute": {"any_of": ["none", "full"]}}}
    unclear = {**row(said), "scenario": opened}
    found = observe(run_of(unclear, "open"))
    assert isinstance(found, Observed)
    assert len(found.lines) == 2
    with_it, without = simpar.adapt([*rows[:4], unclear]), simpar.adapt(rows[:4])
    assert with_it.site.compute == pytest.approx(without.site.compute, rel=0.03)


def test_lines_say_what_the_simulator_says(learned: simpar.SiteResult) -> None:
    run = observe(run_of({"id": "f", "scenario": TABLES[5], "step_time_s": 1.0}, "f"))
    assert isinstance(run, Observed)
    (seconds,), _ = learned.details.posterior.predict(evidence_of([run]))
    assert seconds == pytest.approx(predict_at(learned.site, make_scenario(TABLES[5])).step_time_s, rel=0.01)


def test_the_posterior_of_a_linear_case_is_the_textbooks() -> None:
    """All of a step is compute, many runs agree: the mean of their logarithms, with a normal posterior's spread."""
    reaches = {"reach": 4.0, "layout_reach": 4.0}
    prior = Prior(0.08, 0.08, 0.25, 0.35, 0.25, kind=1.5, **reaches, residual=0.05, residual_spread=0.6)
    generator = np.random.default_rng(0)
    measured = np.exp(0.1 + 0.03 * generator.standard_normal(200))
    runs = Evidence.of([[(1.0, (1.0, 0.0, 0.0, 0.0), 0.0)]] * 200, measured, np.zeros(4))
    found = learn(runs, prior)
    seconds, half = found.predict(runs)
    assert np.log(seconds[0]) == pytest.approx(0.1, abs=0.01)
    of_all = found.covariance[0, 0] + 2.0 * found.covariance[0, 4] + found.covariance[4, 4]
    assert math.sqrt(of_all) == pytest.approx(0.03 / math.sqrt(200), rel=0.3)
    assert float(np.mean(np.abs(np.log(measured / seconds)) < half)) == pytest.approx(0.8, abs=0.08)


def test_what_is_off_in_one_job_is_off_in_jobs_like_it() -> None:
    """Of two jobs one is far off: what is next to it follows, what is next to the other does not."""

    def of(size: float) -> Kind:
        return Kind(parameters=size, sequence_length=4096, gpus=64, global_batch_size=256, precision="bf16")

    def runs(*sizes: float) -> Evidence:
        measured = [1.4 if size > 1e10 else 1.0 for size in sizes]
        return Evidence.of([[(1.0, (1.0, 0.0, 0.0, 0.0), 0.0)]] * len(sizes), measured, np.zeros(4), [of(size) for size in sizes])

    reaches = {"reach": 4.0, "layout_reach": 4.0}
    prior = Prior(0.12, 0.06, 0.2, 0.35, 0.1, kind=2.5, **reaches, residual=0.035, residual_spread=1.0)
    found = learn(runs(1e9, 1e9, 7e10, 7e10), prior)
    seconds, half = found.predict(runs(1e9, 1.1e9, 6.5e10, 7e10))
    assert seconds == pytest.approx([1.0, 1.02, 1.38, 1.4], abs=0.03)
    assert half[1] > half[0]
    assert half[2] > half[3]
    site = Site(kinds=tuple(SiteKind(**k.model_dump(), factor=f) for k, f in ((of(1e9), 1.0), (of(7e10), 1.4))), reach=4.0)
    assert site.of_kind(of(7e10)) == pytest.approx(1.4)
    assert site.of_kind(of(1e9)) < site.of_kind(of(8e9)) < site.of_kind(of(6e10)) < 1.4


def test_what_is_off_in_one_layout_is_off_in_layouts_like_it() -> None:
    """A job that takes 1.3 times as long with pp = 8 and as predicted with pp = 1: pp = 4 follows the one, pp = 2 the other."""

    def of(pp: int) -> Kind:
        return Kind(parameters=7e9, sequence_length=4096, gpus=64, global_batch_size=256, precision="bf16", pp=pp)

    def runs(*pipelines: int) -> Evidence:
        measured = [1.3 if pp == 8 else 1.0 for pp in pipelines]
        return Evidence.of([[(1.0, (1.0, 0.0, 0.0, 0.0), 0.0)]] * len(pipelines), measured, np.zeros(4), list(map(of, pipelines)))

    reaches = {"reach": 9.0, "layout_reach": 2.0}
    prior = Prior(0.12, 0.06, 0.2, 0.35, 0.1, kind=2.5, **reaches, residual=0.02, residual_spread=1.0)
    found = learn(runs(1, 1, 8, 8), prior)
    seconds, half = found.predict(runs(1, 2, 4, 8))
    assert seconds[0] < seconds[1] < 1.15 < seconds[2] < seconds[3]
    assert seconds[[0, 3]] == pytest.approx([1.0, 1.3], abs=0.02)
    assert half[1] > half[0]
    likeness = correlation(
        [of(1)], [of(8), Kind(**{**of(1).model_dump(), "parameters": 14e9, "precision": "fp8"})], Reach(9.0, 2.0)
    )
    assert likeness[0] == pytest.approx([math.exp(-3 / 2), math.exp(-2 / 9)])


def test_layouts_are_compared_by_what_a_site_says_of_their_job() -> None:
    """Two layouts of a job, off by 1.1 and 1.3, are one kind whose factor is their mean; another job stays as it is."""
    job = kind_of(make_scenario(TABLES[0])).job
    kinds = [job.model_copy(update={"pp": 1}), job.model_copy(update={"pp": 8}), job.model_copy(update={"gpus": 512})]
    rows = np.diag([0.01, 0.01, 0.01, 0.01, 0.004, 0.008, 0.002])
    rows[4, 5] = rows[5, 4] = 0.002
    site = Site(
        kinds=tuple(SiteKind(**k.model_dump(), factor=f) for k, f in zip(kinds, (1.1, 1.3, 0.9), strict=True)), other_kind=0.1,
        covariance=tuple(map(tuple, rows.tolist())), residual=0.03, layout_reach=2.0,
    )  # fmt: skip
    found = Space(make_scenario({**TABLES[0], "site": site}), {}).template.learned
    assert found is not None
    assert [kind.factor for kind in found.kinds] == pytest.approx([math.sqrt(1.1 * 1.3), 0.9])
    assert np.array(found.covariance)[4:, 4:] == pytest.approx(np.diag([(0.004 + 0.008 + 2 * 0.002) / 4, 0.002]))
    apart = math.log(1.3 / 1.1) / 2.0
    assert found.residual == pytest.approx(math.hypot(0.03, apart * math.sqrt(2 / 3)))
    assert found.of_kind(kinds[1]) == pytest.approx(math.sqrt(1.1 * 1.3))
    assert found.of_kind(kinds[0].model_copy(update={"tp": 4})) == pytest.approx(math.sqrt(1.1 * 1.3), rel=1e-4)
    assert found.of_jobs == found
    assert Site.model_validate(found.model_dump()) == found


def test_what_is_off_in_one_run_is_off_in_runs_that_take_as_long() -> None:
    """Two runs of one job and layout differ in what a kind does not name; what the simulator makes of it tells them apart."""
    job = kind_of(make_scenario(TABLES[0]))
    fast, slow = (job.model_copy(update={"microbatch_s": seconds}) for seconds in (0.1, 0.4))
    assert correlation([fast], [slow], Reach(9.0, 2.0))[0, 0] == pytest.approx(math.exp(-2 / 2))
    assert kind_of(make_scenario(TABLES[0]), 3.2).microbatch_s == pytest.approx(3.2 / batches(make_scenario(TABLES[0])))


def batches(scenario: Scenario) -> float:
    """Micro-batches of a step on each replica."""
    training = scenario.training
    return training.global_batch_size / training.micro_batch_size / resolved_dp(scenario)


def test_a_step_is_simulated_with_what_its_site_says_of_it() -> None:
    """Of a site whose two kinds take 0.5 and 8 s a micro-batch, a step gets the factor and interval of how long it takes itself;
    so do the shorter steps that a long one is made of."""
    rows = np.diag([1e-4] * 4 + [0.004, 0.008])
    for batch in (16, 4096):
        scenario = make_scenario({**TABLES[0], "training": {**TABLES[0]["training"], "global_batch_size": batch}})
        plain = simulate(scenario).step_time_s
        own = kind_of(scenario, plain)
        kinds = [own.model_copy(update={"microbatch_s": own.microbatch_s * times}) for times in (2.0, 0.25)]
        site = Site(
            kinds=tuple(SiteKind(**k.model_dump(), factor=f) for k, f in zip(kinds, (1.5, 0.8), strict=True)), other_kind=0.1,
            covariance=tuple(map(tuple, rows.tolist())), residual=0.03, reach=9.0, layout_reach=3.0,
        )  # fmt: skip
        there = scenario.model_copy(update={"site": site})
        factor = site.of_kind(own)
        assert 1.02 < factor < 1.4
        for found in (simulate(there).step_time_s, predict_at(site, scenario).step_time_s):
            assert found == pytest.approx(plain * factor, rel=0.02)
        settled = site.settled(own)
        assert settled.kinds == () == settled.settled(own).kinds
        assert settled.factors == pytest.approx(dict.fromkeys(site.factors, factor))
        shares = {"compute": 0.5, "memory": 0.2, "communication": 0.1}
        assert settled.log_half_width(shares, own)[0] == pytest.approx(site.log_half_width(shares, own)[0])
        assert Site.model_validate(settled.model_dump()) == settled


def open_run(measured: float, weights: tuple[float, float] = (0.6, 0.4)) -> Evidence:
    """A run of 1 s, or of 1.3 s if it recomputes, which is not known."""
    lines = [(weight, (seconds, 0.0, 0.0, 0.0), 0.0) for weight, seconds in zip(weights, (1.0, 1.3), strict=True)]
    facts = [("plan.recompute = none",), ("plan.recompute = full",)]
    return Evidence.of([lines] * 3, [measured] * 3, np.zeros(4), facts=[facts] * 3)


def test_an_open_fact_of_a_sites_runs_is_that_of_its_next() -> None:
    for measured, likely, other in ((1.3, "full", "none"), (1.0, "none", "full")):
        found = learn(open_run(measured), shipped_prior())
        assert found.facts[f"plan.recompute = {likely}"] > 1.2
        assert found.facts[f"plan.recompute = {other}"] < 0.5
        assert found.predict(open_run(1.0))[0][0] == pytest.approx(measured, rel=0.03)


def test_a_site_settles_open_facts() -> None:
    """In `simulate`, and in `validate runs --site`; of another framework or GPU not."""
    given = {**TABLES[0], "plan": {"tp": 2, "recompute": {"any_of": ["none", "full"]}}}
    facts = (SiteFact(fact="plan.recompute = full", factor=1.9), SiteFact(fact="plan.recompute = none", factor=0.1))
    ours = Site(facts=facts)
    elsewhere = Site(facts=facts, group="deepspeed on another GPU")

    def recomputes(site: Site | None) -> float:
        _, answer = simulate_open({**given, "site": site} if site else given)
        assert answer is not None
        return {reading.facts: reading.weight for reading in answer.readings}["plan.recompute = full",]

    assert recomputes(None) == recomputes(elsewhere) == pytest.approx(0.5, abs=0.05)
    assert recomputes(ours) == pytest.approx(0.95, abs=0.01)
    run = run_of({"id": "a", "scenario": given, "step_time_s": 1.0}, "a")
    plain, there = (predict_run(run, predictor)[0].step_time_s for predictor in (predict, AtSite(ours)))
    assert there > 1.05 * plain


def test_memory_is_learned_and_shrunk() -> None:
    assert memory_of_site([]) == (0.0, 0.0)
    gib = 2.0**30
    one, _ = memory_of_site([(44 * gib, 40 * gib)])
    many, spread = memory_of_site([(44 * gib, 40 * gib)] * 6 + [(70 * gib, 40 * gib)])
    assert 0.0 < one < many < 4.6 * gib
    assert many > 3.5 * gib
    assert 0.0 < spread < 0.3


def test_a_site_survives_its_file(learned: simpar.SiteResult, tmp_path: Path) -> None:
    again = read_site(learned.save(tmp_path / "site.toml"))
    scenario = make_scenario(TABLES[4])
    assert predict_at(again, scenario).step_high_s == pytest.approx(predict_at(learned.site, scenario).step_high_s, rel=1e-4)
    assert "simpar adapt" in as_toml(again)


def run_cli(*arguments: str, code: int = 0) -> Any:
    found = CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False)
    assert found.exit_code == code, found.output
    return json.loads(found.stdout)


@pytest.fixture(scope="module")
def folder(rows: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs.jsonl, site.toml, scenario.toml that names the site, and plain.toml that does not."""
    found = tmp_path_factory.mktemp("site")
    (found / "runs.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows[:4]))
    (found / "scenario.toml").write_text(
        'site = "site.toml"\nmodel = "llama3.1-8b"\n[cluster]\nhardware = "dgx-h100"\nnum_nodes = 1\n[plan]\ntp = 4\n'
        "[training]\nsequence_length = 8192\nglobal_batch_size = 16\n"
    )
    (found / "plain.toml").write_text((found / "scenario.toml").read_text().replace('site = "site.toml"\n', ""))
    said = run_cli("adapt", str(found / "runs.jsonl"), "--out", str(found / "site.toml"))
    assert said["mean_error"]["after"] < said["mean_error"]["before"]
    assert said["half_width"]["after"] < said["half_width"]["before"]
    return found


def test_runs_of_a_scenario_are_validated_at_the_site(folder: Path) -> None:
    """Rows that name a scenario's file beside them, as `simpar adapt` takes them."""
    step = simpar.simulate(folder / "scenario.toml").step_time_s
    rest = folder / "rest.jsonl"
    rest.write_text(json.dumps({"id": "next", "scenario": "plain.toml", "step_time_s": step}) + "\n")
    (row,) = run_cli("validate", "runs", "--data", str(rest), "--site", str(folder / "site.toml"))["rows"]
    assert row["predicted"] == pytest.approx(step, rel=1e-3)
    assert row["group"]["n_gpus"] == 8
    rest.write_text(json.dumps({"scenario": {"model": [1]}, "step_time_s": 1.0}) + "\n")
    (row,) = run_cli("validate", "runs", "--data", str(rest))["rows"]
    assert "not a valid scenario" in row["skipped"]


def test_every_command_takes_the_site(folder: Path) -> None:
    scenario, site = str(folder / "scenario.toml"), str(folder / "site.toml")
    named = run_cli("simulate", scenario)
    assert named["site"]["factors"]["compute"] > 1.05
    assert any("site 'site', learned from 4 of its runs" in note for note in named["notes"])
    plain = simpar.simulate(scenario, site=None).to_dict()
    assert "site" not in plain
    assert named["step_time_s"] > 1.05 * plain["step_time_s"]
    given = run_cli("simulate", str(folder / "plain.toml"), "--site", site)
    assert given["step_time_s"] == pytest.approx(named["step_time_s"], rel=1e-9)
    assert run_cli("explain", str(folder / "plain.toml"), "--site", site)["step_time_s"] == pytest.approx(named["step_time_s"])
    both = run_cli("compare", str(folder / "plain.toml"), str(folder / "plain.toml"), "--site", site)
    assert json.dumps(both).count("learned from 4 of its runs") >= 2


def test_the_search_ranks_by_the_site(folder: Path) -> None:
    arguments = (
        "search",
        str(folder / "plain.toml"),
        "--fix",
        "pp=1",
        "--fix",
        "cp=1",
        "--allow",
        "micro_batch_size=1",
        "--top",
        "1",
    )
    plain, there = run_cli(*arguments), run_cli(*arguments, "--site", str(folder / "site.toml"))
    assert there["best"][0]["step_time_s"] > 1.05 * plain["best"][0]["step_time_s"]
    assert there["optimality_gap"] == 0.0


def test_a_plan_of_given_speeds_refuses_a_site(folder: Path) -> None:
    plan = folder / "plan.toml"
    plan.write_text(
        'name = "p"\n[cluster]\nnum_nodes = 4\ngpus_per_node = 8\n[[phases]]\ntokens = "1B"\ntokens_per_s_per_gpu = 300\n'
        "sequence_length = 4096\nglobal_batch_size = 64\n"
    )
    found = CliRunner().invoke(app, ["plan", str(plan), "--site", str(folder / "site.toml")])
    assert isinstance(found.exception, InputError)
    assert "a site changes nothing" in str(found.exception)
    plan.write_text('name = "p"\n')
    found = CliRunner().invoke(app, ["plan", str(plan), "--site", str(folder / "site.toml")])
    assert "phases: is required" in str(found.exception)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("compute = -1\n", "compute"),
        ("speed = 2\n", "unknown field"),
        ("covariance = [[1, 2, 0, 0], [2, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]\n", "must be a covariance"),
        ("covariance = [[1, 0, 0], [0, 1, 0], [0, 0, 1]]\n", "must be 4 rows of 4"),
        ("compute = \n", "site.toml"),
    ],
)
def test_a_wrong_site_is_one_clear_message(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "site.toml").write_text(text)
    with pytest.raises(InputError, match=said):
        make_scenario({**TABLES[0], "site": str(tmp_path / "site.toml")})


def test_a_site_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="simpar adapt"):
        make_scenario({**TABLES[0], "site": str(tmp_path / "nowhere.toml")})


def test_runs_that_say_nothing_say_why() -> None:
    rows = [
        {"id": "oom", "scenario": TABLES[0], "oom": True},
        {"id": "wrong", "scenario": {**TABLES[0], "plan": {"tp": 3}}, "step_time_s": 1.0},
        {"id": "gone", "scenario": "no-such-scenario", "step_time_s": 1.0},
        {"id": "silent", "scenario": TABLES[0]},
    ]
    found = simpar.adapt(rows)
    assert {run.id: run.reason.split(":")[0] for run in found.details.unused} == {
        "oom": "ran out of memory", "wrong": "not a valid scenario", "gone": "not a valid scenario", "silent": "nothing measured",
    }  # fmt: skip
    assert not found.site.learned


def test_a_file_without_a_run_is_named(tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    with pytest.raises(InputError, match=r"empty\.jsonl: no run in it"):
        simpar.adapt([empty, {"scenario": TABLES[0], "step_time_s": 1.0}])
