"""The published cases: every file is valid and stands on its own; the runner, its bounds and RESULTS.md."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from test_runs_validate import ten_percent_slow

from simpar.errors import InputError
from simpar.evidence.cases import Case, CaseReport, load_cases, load_file, merged, run_cases
from simpar.evidence.predicted import Prediction
from simpar.evidence.results_md import bounds_text, check_bounds, load_bounds, results_text, write_results
from simpar.specs.base import data_dir

FILES = sorted((data_dir("validation") / "cases").glob("*.toml"))


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return load_cases()


def test_there_are_enough_and_they_are_spread(cases: list[Case]) -> None:
    assert len(cases) >= 60
    assert {case.use for case in cases} == {"fit", "test"}
    assert {case.scenario.hardware.gpu.architecture for case in cases} >= {"ampere", "hopper", "blackwell"}
    used = {d for c in cases for d in ("tp", "pp", "cp", "ep") if getattr(c.scenario.plan, d) > 1}
    assert used == {"tp", "pp", "cp", "ep"}
    assert {c.scenario.plan.zero_stage for c in cases} >= {0, 1, 2, 3}
    assert max(c.scenario.world_size for c in cases) >= 16384
    assert min(c.scenario.world_size for c in cases) <= 2
    assert {c.scenario.plan.schedule for c in cases} >= {"1f1b", "interleaved", "zb-1p", "zb-2p", "zb-v", "dualpipe"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_file_names_its_source(path: Path) -> None:
    for case in load_file(path):
        assert case.url.startswith("https://")
        assert case.source
        assert case.where
        assert 0 < case.tolerance <= 0.5


def test_merging_tables() -> None:
    base = {"model": "a", "plan": {"tp": 1, "pp": 2}}
    assert merged(base, {"plan": {"tp": 4}}) == {"model": "a", "plan": {"tp": 4, "pp": 2}}
    assert merged(base, {"model": {"hidden_size": 1}})["model"] == {"hidden_size": 1}
    assert base == {"model": "a", "plan": {"tp": 1, "pp": 2}}


TEXT = """
source = "A paper"
url = "https://example.org"
group = "A"
tolerance = 0.05
[scenario]
model = "llama3.1-8b"
cluster = {{ hardware = "dgx-h100", num_nodes = 1 }}
training = {{ sequence_length = 4096, global_batch_size = 64 }}
[[case]]
name = "one"
where = "Table 1"
{measured}
"""


def write(tmp_path: Path, measured: str) -> Path:
    path = tmp_path / "a.toml"
    path.write_text(TEXT.format(measured=measured))
    return path


@pytest.mark.parametrize(
    ("measured", "message"),
    [
        ("measured = {}", "measures nothing"),
        ('measured = { step_time = "5" }', "the unit is missing"),
        ('measured = { step_tim = "5 s" }', "did you mean 'step_time'"),
        ('measured = { step_time = "5 s" }\nscenario = { plan = { tp = 16 } }', "needs more ranks"),
    ],
)
def test_a_wrong_case_is_a_clear_error(tmp_path: Path, measured: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_file(write(tmp_path, measured))


def test_two_cases_of_one_name_are_an_error(tmp_path: Path) -> None:
    first = write(tmp_path, 'measured = { step_time = "5 s" }')
    (tmp_path / "b.toml").write_text(first.read_text())
    with pytest.raises(InputError, match="two cases are called A/one"):
        load_cases(tmp_path)


@pytest.fixture
def report(tmp_path: Path) -> CaseReport:
    figures = 'step_time = "5 s", peak_memory = "12 GiB", memory_kind = "reserved", state_memory = "3 GiB", fits = false'
    text = f"measured = {{ {figures} }}"
    return run_cases(load_file(write(tmp_path, text)), predictor=ten_percent_slow)


def test_each_figure_is_compared(report: CaseReport) -> None:
    errors = {row.metric: row.error for row in report.rows}
    assert errors["step_time_s"] == pytest.approx(0.1)
    assert errors["peak_memory_bytes"] == pytest.approx(0)
    assert errors["state_memory_bytes"] == pytest.approx(0)
    assert errors["oom"] == 1.0
    assert {row.metric for row in report.outside} == {"step_time_s", "oom"}


def test_the_first_rank_can_be_meant(tmp_path: Path) -> None:
    def ranks(scenario: object) -> Prediction:
        return replace(ten_percent_slow(scenario), reserved_per_rank=(6 * 2.0**30, 12 * 2.0**30))  # type: ignore[arg-type]

    text = 'measured = { peak_memory = "6 GiB", memory_kind = "reserved", memory_rank = "first" }'
    (row,) = run_cases(load_file(write(tmp_path, text)), predictor=ranks).rows
    assert row.error == pytest.approx(0)


def test_memory_of_a_kind_that_is_not_stated_is_right_between_allocated_and_reserved(tmp_path: Path) -> None:
    for measured, error in ((10, 0.1), (11, 0.0), (11.5, 0.0), (12, 0.0), (16, -0.25)):
        text = f'measured = {{ peak_memory = "{measured} GiB", memory_kind = "unstated" }}'
        (row,) = run_cases(load_file(write(tmp_path, text)), predictor=ten_percent_slow).rows
        assert row.error == pytest.approx(error)


def test_workers_and_their_number_do_not_matter(tmp_path: Path) -> None:
    cases = load_file(write(tmp_path, 'measured = { step_time = "5 s" }')) * 20
    alone, together = (run_cases(cases, workers, ten_percent_slow) for workers in (1, 2))
    assert alone.rows == together.rows
    assert len(alone.rows) == 20


def test_bounds_catch_what_got_worse_and_only_that(report: CaseReport, tmp_path: Path) -> None:
    path = tmp_path / "bounds.toml"
    path.write_text(bounds_text(report))
    bounds = load_bounds(path)
    assert bounds["A", "step_time_s"] == pytest.approx(0.11)
    assert check_bounds(report, bounds) == []
    bounds["A", "step_time_s"] = 0.09
    (sentence,) = check_bounds(report, bounds)
    assert "step time error 10.00% is above its bound 9.00%" in sentence


def test_recording_lowers_bounds_and_never_raises_one(report: CaseReport, tmp_path: Path) -> None:
    path = tmp_path / "bounds.toml"
    for before, after in ((0.05, 0.05), (0.5, 0.11)):
        path.write_text(bounds_text(report, {("A", "step_time_s"): before}))
        assert load_bounds(path)["A", "step_time_s"] == pytest.approx(after)


def test_results_have_every_case(report: CaseReport, tmp_path: Path) -> None:
    text = results_text(report)
    assert "| A/one | Table 1 | test | step time | 5 s | 5.5 s | 5 s to 6 s | +10.0% |" in text
    assert "out of memory | fits" in text
    assert "## Outside their tolerance" in text
    write_results(report, tmp_path / "RESULTS.md")
    assert (tmp_path / "RESULTS.md").read_text() == text


def test_every_group_has_a_bound_for_each_of_its_metrics_and_no_bound_is_left_without_cases(cases: list[Case]) -> None:
    metrics = {"step_time": "step_time_s", "peak_memory": "peak_memory_bytes", "state_memory": "state_memory_bytes",
               "bubble_fraction": "bubble_fraction", "fits": "oom"}  # fmt: skip
    measured = {(c.group, metrics[name]) for c in cases for name in metrics if getattr(c.measured, name) is not None}
    assert set(load_bounds()) == measured


def test_no_group_is_worse_than_its_recorded_bound(cases: list[Case]) -> None:
    bounds = load_bounds()
    if not bounds:
        pytest.skip("no bounds are recorded")
    assert check_bounds(run_cases(cases), bounds) == []
