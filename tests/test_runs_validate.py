"""validate_runs end to end with a predictor that is known exactly, and its reports."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from test_runs_rows import row

from simpar.errors import InputError
from simpar.specs.scenario import Scenario
from simpar.validation.predicted import Prediction, predict, predict_whole, shorter_counts
from simpar.validation.report_runs import print_report, write_html
from simpar.validation.run_rows import read_runs, run_of
from simpar.validation.runs import Report, matches, validate_runs

GIB = 2.0**30


def ten_percent_slow(scenario: Scenario) -> Prediction:
    """5.5 s and 11 to 12 GiB for everything; raises for models of nine layers."""
    if getattr(scenario.model, "num_hidden_layers", 0) == 9:
        raise InputError("cannot run nine layers")
    return Prediction(
        5.5, 5.0, 6.0, 11 * GIB, 12 * GIB, (11 * GIB, 10 * GIB), (12 * GIB, 11 * GIB), 14 * GIB, 3 * GIB, 0.95, 1.05, 0.2, 0.1,
        5.0, 5.0, scenario.plan.tp < 8, {"ideal": 3.0, "rest": 2.5},
    )  # fmt: skip


ROWS = [
    row(id="a", mem_gib=11.5, mem_kind="not stated", bubble_fraction=0.25, oom=False),
    row(id="b", tp=8, dp=2, step_time_s=None, oom=True),
    row(id="c", tp=8, dp=2, step_time_s=5.0, oom=False, mem_gib=11.0, mem_kind="max allocated"),
    row(id="d", gpu="TPU-v5p"),
    row(id="e", exclude="broken run"),
    row(id="f", layers=9, vpp=1),
    row(id="g", tp=1, dp=16, sp=False, step_time_s=4.0, mem_gib=14.0, mem_kind="nvidia-smi"),
]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "runs.jsonl"
    path.write_text("\n".join(json.dumps(r) for r in ROWS))
    return path


@pytest.fixture
def report(data: Path) -> Report:
    return validate_runs(data, workers=1, predictor=ten_percent_slow)


def found(report: Report, name: str, metric: str) -> Any:
    (one,) = [r for r in report.rows if (r.id, r.metric) == (name, metric)]
    return one


def test_every_measured_value_is_a_row_and_nothing_is_dropped(report: Report) -> None:
    assert {(r.id, r.metric) for r in report.rows} == {
        ("a", "step_time_s"), ("a", "peak_memory_bytes"), ("a", "bubble_fraction"), ("a", "oom"), ("b", "oom"),
        ("c", "step_time_s"), ("c", "oom"), ("c", "peak_memory_bytes"), ("d", "step_time_s"), ("f", "step_time_s"),
        ("g", "step_time_s"), ("g", "peak_memory_bytes"),
    }  # fmt: skip
    assert report.excluded == {"broken run": 1}
    assert list(report.skipped) == [
        "TPU runs under XLA are outside the scope of this validation", "InputError: cannot run nine layers",
    ]  # fmt: skip


def test_each_metric_is_compared_with_its_own_prediction(report: Report) -> None:
    assert found(report, "a", "step_time_s").error == pytest.approx(0.1)
    assert found(report, "a", "bubble_fraction").error == pytest.approx(-0.05)
    assert found(report, "a", "peak_memory_bytes").band == (11 * GIB, 12 * GIB)
    assert found(report, "a", "peak_memory_bytes").error == 0
    assert found(report, "c", "peak_memory_bytes").predicted == 11 * GIB
    assert found(report, "g", "peak_memory_bytes").predicted == 14 * GIB
    assert found(report, "b", "oom").predicted is True
    assert found(report, "d", "step_time_s").predicted is None


def test_groups_and_confusion(report: Report) -> None:
    (overall,) = [g for g in report.groups if g.metric == "step_time_s" and not g.by]
    assert (overall.summary.rows, overall.summary.skipped) == (3, 2)
    assert overall.summary.mape == pytest.approx((0.1 + 0.1 + 0.375) / 3)
    assert report.fits.as_json() == {
        "fits_called_fits": 1, "fits_called_oom": 1, "oom_called_oom": 1, "oom_called_fits": 0, "rows": 3,
        "accuracy": pytest.approx(2 / 3),
    }  # fmt: skip
    assert report.ranking.sweeps == 1


def test_workers_do_not_change_the_answer(data: Path, report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("simpar.validation.runs.CHUNK", 2)
    other = validate_runs(data, workers=2, predictor=ten_percent_slow)
    assert other.rows == report.rows


def test_json_is_strict_and_has_the_contract(report: Report, capsys: pytest.CaptureFixture[str]) -> None:
    print_report(report, as_json=True)
    table = json.loads(capsys.readouterr().out, parse_constant=lambda text: pytest.fail(text))
    assert {"rows", "groups"} <= set(table)
    assert set(table["rows"][0]) >= {"id", "metric", "measured", "predicted", "low", "high", "group", "skipped"}
    assert set(table["groups"][0]) >= {"rows", "mape", "median", "p90", "bias", "coverage"}
    skipped = next(r for r in table["rows"] if r["id"] == "d")
    assert skipped["predicted"] is None
    assert "TPU" in skipped["skipped"]


def test_tables_name_every_reason(report: Report, capsys: pytest.CaptureFixture[str]) -> None:
    print_report(report, as_json=False)
    text = capsys.readouterr().out
    assert "TPU runs under XLA" in text
    assert "excluded by the data: 1 x broken run" in text


def test_html_is_one_page_with_plots_and_waterfalls(report: Report, data: Path, tmp_path: Path) -> None:
    path = tmp_path / "out.html"
    write_html(report, path, data, ten_percent_slow)
    text = path.read_text()
    assert text.startswith("<!doctype html>")
    assert "waterfall" in text
    assert "Worst rows" in text
    assert 'src="http' not in text


@pytest.mark.parametrize(
    ("condition", "ids"),
    [
        ("id=a", "a"), ("tp=8", "bc"), ("tp>=2", "abcdef"), ("n_gpus<64", ""), ("oom=true", "b"), ("oom!=true", "acdefg"),
        ("source=SOME", "abcdefg"), ("gpu!=h100", "d"), ("missing=x", ""),
    ],
)  # fmt: skip
def test_conditions(condition: str, ids: str) -> None:
    assert "".join(r["id"] for r in ROWS if matches(r, [condition])) == ids


def test_a_bad_condition_is_a_clear_error() -> None:
    with pytest.raises(InputError, match="key=value"):
        matches(ROWS[0], ["tp"])


def shared_runs() -> Path:
    folder = os.environ.get("SIMPAR_SHARED_DATA") or Path(__file__).resolve().parents[2] / "shared" / "data"
    path = Path(folder) / "runs" / "runs.jsonl"
    if not path.is_file():
        pytest.skip("the measured runs are not here; set SIMPAR_SHARED_DATA")
    return path


def test_nearly_all_measured_runs_can_be_expressed() -> None:
    runs = [run for run in read_runs(shared_runs()) if not run.excluded]
    assert sum(not run.skipped for run in runs) / len(runs) > 0.97
    assert all(run.skipped or run.scenario for run in runs)


WHOLE = [
    {},
    {"vpp": 1},
    {"pp": 1, "vpp": 1, "dp": 32, "global_batch": 512},
    {"vpp": 1, "pp_schedule": "ZB-1p"},
    {"vpp": 1, "pp_schedule": "V-Half"},
    {"tp": 1, "sp": False, "pp": 2, "vpp": 1, "dp": 32, "zero_stage": 3, "fsdp": "fsdp2", "framework": "torchtitan"},
    {"recompute": "full", "pp": 8, "vpp": 2, "dp": 4, "micro_batch": 1},
]


@pytest.mark.parametrize("changes", WHOLE, ids=str)
@pytest.mark.parametrize("rounds", [13, 13.5])
def test_a_long_step_extended_from_two_short_ones_is_the_whole_step(changes: dict[str, Any], rounds: float) -> None:
    table = row(**{**changes, "layers": 16})
    interleaved = table["vpp"] > 1
    count = int((13 if interleaved else rounds) * table["pp"]) + (0 if table["pp"] > 1 else 20)
    table["global_batch"] = count * table["dp"] * table["micro_batch"]
    scenario = run_of(table).scenario
    assert scenario is not None
    assert shorter_counts(scenario) is not None
    short, whole = predict(scenario), predict_whole(scenario)
    assert short.step_time_s == pytest.approx(whole.step_time_s, rel=1e-4)
    assert short.bubble_fraction == pytest.approx(whole.bubble_fraction, abs=1e-4)
    assert short.busiest_bubble_fraction == pytest.approx(whole.busiest_bubble_fraction, abs=1e-4)
    assert short.allocated_bytes == pytest.approx(whole.allocated_bytes, rel=1e-6)
    assert short.step_low_s == pytest.approx(whole.step_low_s, rel=5e-3)
    assert sum(short.waterfall.values()) == pytest.approx(sum(whole.waterfall.values()), rel=1e-3)


def test_a_short_step_is_simulated_whole() -> None:
    scenario = run_of(row()).scenario
    assert scenario is not None
    assert shorter_counts(scenario) is None


def test_a_bubble_of_one_stage_is_compared_with_the_busiest_rank(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    kinds = {"profiled": "computed by the paper from profiled T_F,T_B,T_W", "traced": "measured bubble seconds / step seconds"}
    rows = [row(id=name, bubble_fraction=0.2, bubble_kind=kind) for name, kind in kinds.items()]
    path.write_text("\n".join(json.dumps(r) for r in rows))
    report = validate_runs(path, workers=1, predictor=ten_percent_slow)
    assert found(report, "profiled", "bubble_fraction").predicted == 0.1
    assert found(report, "traced", "bubble_fraction").predicted == 0.2
