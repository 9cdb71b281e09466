"""validate_runs end to end with a predictor that is known exactly, and its reports."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from report_results import decompressed
from test_runs_rows import row

from simpar.cli.validate import validate_runs as validate
from simpar.errors import InputError
from simpar.evidence.predicted import Prediction
from simpar.evidence.report_runs import print_report
from simpar.evidence.run_rows import read_runs, run_of
from simpar.evidence.runs import Report, matches, validate_runs
from simpar.output import offline
from simpar.report.runs_view import runs_page, worst_rows
from simpar.specs.scenario import Scenario

GIB = 2.0**30


def ten_percent_slow(scenario: Scenario) -> Prediction:
    """5.5 s and 11 to 12 GiB for everything; raises for models of nine layers."""
    if getattr(scenario.model, "num_hidden_layers", 0) == 9:
        raise InputError("cannot run nine layers")
    return Prediction(
        5.5, 5.0, 6.0, 11 * GIB, 12 * GIB, (11 * GIB, 10 * GIB), (12 * GIB, 11 * GIB), 14 * GIB, 3 * GIB, 0.2, 0.1,
        scenario.plan.tp < 8, {"ideal": 3.0, "rest": 2.5}, fit_probability=1.0 if scenario.plan.tp < 8 else 0.1,
    )  # fmt: skip


ROWS = [
    row(id="a", mem_gib=11.5, mem_kind="not stated", bubble_fraction=0.25, oom=False),
    row(id="b", tp=8, dp=2, step_time_s=None, oom=True),
    row(id="c", tp=8, dp=2, step_time_s=5.0, oom=False, mem_gib=11.0, mem_kind="max allocated"),
    row(id="d", gpu="Gaudi-3"),
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
    assert report.excluded == {"broken run": ["e"]}
    assert report.not_expressed == {
        "no hardware profile for GPU 'Gaudi-3'": ["d"], "InputError: cannot run nine layers": ["f"],
    }  # fmt: skip
    assert report.runs == 6


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
    monkeypatch.setattr("simpar.evidence.runs.CHUNK", 2)
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
    assert "Gaudi-3" in skipped["skipped"]
    assert table["skipped"] == {reason: len(ids) for reason, ids in table["not_expressed"].items()}
    assert sorted(name for ids in table["not_expressed"].values() for name in ids) == ["d", "f"]
    assert table["oom"]["by_chance"] == [
        {"low": 0.1, "high": 0.25, "ran": 1, "out_of_memory": 1}, {"low": 0.98, "high": 1.0, "ran": 2, "out_of_memory": 0},
    ]  # fmt: skip


def test_tables_name_every_reason(report: Report, capsys: pytest.CaptureFixture[str]) -> None:
    print_report(report, as_json=False)
    text = capsys.readouterr().out
    assert "no hardware profile" in text
    assert "excluded by the data: 1 x broken run: e" in text
    assert "not expressed: 1 x InputError: cannot run nine layers: f" in text
    assert "by their chance to fit: 10% to 25%: 1 of 2; 98% to 100%: 2 of 2" in " ".join(text.split())


def test_html_is_one_page_with_plots_and_waterfalls(report: Report) -> None:
    with offline():
        text = runs_page(report)
    assert text.startswith("<!doctype html>")
    assert "Worst rows" in text
    assert 'src="http' not in text
    assert "cannot run nine layers" in text
    assert "by memory kind (3)" in text
    figures = decompressed(text.split("id=data>")[1].split("<")[0])["figures"]
    kinds = [figure["variants"][0]["data"][0]["type"] for figure in figures]
    assert kinds.count("waterfall") == len(worst_rows(report)) == 3
    assert kinds.count("scatter") == kinds.count("histogram") == 3  # step time, memory, bubble
    assert len({figure["id"] for figure in figures}) == len(figures)


def test_the_worst_rows_are_in_order_and_of_several_sources(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    rows = [row(id=f"s{i}", step_time_s=1.0 + i, source="one") for i in range(4)] + [row(id="t", step_time_s=5.0, source="two")]
    path.write_text("\n".join(json.dumps(r) for r in rows))
    report = validate_runs(path, workers=1, predictor=ten_percent_slow)
    assert [r.id for r in worst_rows(report)] == ["s0", "s1", "s2", "t"]
    assert worst_rows(report)[0].details["waterfall_s"] == {"ideal": 3.0, "rest": 2.5}


def groups_by(report: Report, metric: str, key: str) -> dict[str, int]:
    return {g.by[key]: g.summary.rows for g in report.groups if g.metric == metric and key in g.by}


def test_groups_say_what_words_mean(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    rows = [
        row(id="a", framework="NVIDIA NeMo Framework Release 25.04", precision="BF16 mixed", n_params_b=7.0),
        row(id="b", framework="NeMo / Megatron-Core", precision="bf16", n_params_b=8.0, source="another"),
        row(id="c", mem_gib=11.0, mem_kind="max allocated"),
        row(id="d", mem_gib=11.0, mem_kind="max reserved"),
    ]
    path.write_text("\n".join(json.dumps(r) for r in rows))
    report = validate_runs(path, workers=1, predictor=ten_percent_slow)
    assert groups_by(report, "step_time_s", "framework")["nemo"] == 2
    assert groups_by(report, "step_time_s", "precision") == {"bf16": 4}
    assert groups_by(report, "step_time_s", "model_size")["up to 8 billion parameters"] == 2
    assert groups_by(report, "peak_memory_bytes", "memory_kind") == {"allocated": 1, "reserved": 1}
    assert not groups_by(report, "step_time_s", "memory_kind")


BAD_FIGURES: list[tuple[dict[str, Any], str]] = [
    ({"step_time_s": "fast"}, "a column has an unexpected value: step_time_s: 'fast' is not a number"),
    ({"step_time_s": float("nan")}, "a column has an unexpected value: step_time_s: nan is not a finite number"),
    ({"mem_gib": -3}, "a column has an unexpected value: mem_gib: -3 is negative"),
    ({"mem_gib": [70]}, "a column has an unexpected value: mem_gib: [70] is not a number"),
    ({"bubble_fraction": "some"}, "a column has an unexpected value: bubble_fraction: 'some' is not a number"),
    ({"oom": "maybe"}, "a column has an unexpected value: oom: 'maybe' is neither true nor false"),
    ({"n_gpus": "eight"}, "a column has an unexpected value: n_gpus: 'eight' is not a number"),
    ({"n_gpus": None, "tp": None}, "the number of GPUs is not stated"),
    ({"seq_len": None}, "sequence length not stated"),
]


@pytest.mark.parametrize(("changes", "reason"), BAD_FIGURES, ids=str)
def test_a_bad_figure_is_named_and_the_others_go_on(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_text("\n".join(json.dumps(r) for r in (row(id="bad", **changes), row(id="good"))))
    report = validate_runs(path, workers=1, predictor=ten_percent_slow)
    assert report.not_expressed == {reason: ["bad"]}
    assert found(report, "good", "step_time_s").predicted == 5.5


def test_rows_without_an_id_go_by_their_line_and_repeated_ids_all_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "runs.jsonl"
    unnamed = {key: value for key, value in row().items() if key != "id"}
    path.write_text("\ufeff" + "\n".join(json.dumps(r) for r in (row(id="twice"), unnamed, row(id="twice"))), encoding="utf-8")
    report = validate_runs(path, workers=1, predictor=ten_percent_slow)
    assert [r.id for r in report.rows if r.metric == "step_time_s"] == ["twice", "runs.jsonl:2", "twice"]
    assert report.repeated == ("twice",)
    print_report(report, as_json=False)
    assert "several runs each: 1 x have one id: twice" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "where", "message"),
    [
        (b"", [], "holds no runs"),
        (b"\n \n", [], "holds no runs"),
        (b'{"id": "a"}\n{"id": \n', [], "runs.jsonl:2: not JSON"),
        (b'{"id": "a"}\n[1]\n', [], "runs.jsonl:2: a JSON object is needed"),
        (b"\x1f\x8b\x08", [], "damaged gzip file"),
        (b'{"gpu": "H100"}', ["gpus=H100"], "no row has a key 'gpus'; there are gpu"),
        (b'{"gpu": "H100"}', ["gpu=H100", "gpu=A100"], "none of its 1 rows meets --where gpu=H100 --where gpu=A100"),
        (b'{"gpu": "H100"}', ["gpu"], "write it as key=value"),
    ],
)  # fmt: skip
def test_wrong_input_is_one_message(tmp_path: Path, content: bytes, where: list[str], message: str) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_bytes(content)
    with pytest.raises(InputError) as error:
        validate_runs(path, where, workers=1, predictor=ten_percent_slow)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_page_that_cannot_be_written_is_told_before_the_work(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("simpar.evidence.runs.validate_runs", lambda *_, **__: pytest.fail("simulated first"))
    (tmp_path / "file").write_text("")
    for place, message in ((tmp_path, "is a folder"), (tmp_path / "file" / "out.html", "is a file, not a folder")):
        with pytest.raises(InputError, match=message):
            validate(data, html=place)


def test_progress_goes_to_standard_error_also_beside_json(data: Path, monkeypatch: pytest.MonkeyPatch,
                                                          capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    monkeypatch.setattr("simpar.evidence.run_workers.EVERY_S", -1.0)
    validate(data, as_json=True, where=["gpu=Gaudi"])
    shown = capsys.readouterr()
    assert json.loads(shown.out)["runs"] == 1
    assert "1 of 1 runs" in shown.err


def slow(_: Scenario) -> Prediction:
    """A prediction that takes far longer than anybody waits."""
    time.sleep(600)
    raise AssertionError


def interrupted(data: Path) -> None:
    """What Ctrl-C does once the workers are there (a shell lets what it starts in the background ignore it)."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    try:
        validate_runs(data, workers=2, predictor=slow)
    except KeyboardInterrupt:
        os._exit(0 if not multiprocessing.active_children() else 3)
    os._exit(4)


def test_ctrl_c_ends_the_workers_at_once(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("simpar.evidence.runs.CHUNK", 1)
    process = multiprocessing.get_context("fork").Process(target=interrupted, args=(data,))
    start = time.monotonic()
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert time.monotonic() - start < 30


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
    folder = os.environ.get("SIMPAR_SHARED_DATA") or Path(__file__).parent / "data" / "measured"
    return Path(folder) / "runs" / "runs.jsonl"


def test_nearly_all_measured_runs_can_be_expressed() -> None:
    runs = [run for run in read_runs(shared_runs()) if not run.excluded]
    assert sum(not run.skipped for run in runs) / len(runs) > 0.97
    assert all(run.skipped or run.scenario for run in runs)


def test_a_bubble_of_one_stage_is_that_of_equal_stages(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    kinds = {"profiled": "computed by the paper from profiled T_F,T_B,T_W", "traced": "measured bubble seconds / step seconds",
             "computed": "computed from profiled times"}  # fmt: skip
    rows = [row(id=name, bubble_fraction=0.2, bubble_kind=kind) for name, kind in kinds.items()]
    path.write_text("\n".join(json.dumps(r) for r in rows))
    report = validate_runs(path, workers=1, predictor=ten_percent_slow)
    scenario = run_of(rows[0]).scenario
    assert scenario is not None
    plan, training = scenario.plan, scenario.training
    every = training.global_batch_size // (training.micro_batch_size * (plan.dp or 0))
    # (p - 1) / v of m + (p - 1) / v passes, and the sends between them.
    ideal = (plan.pp - 1) / plan.virtual_stages / (every + (plan.pp - 1) / plan.virtual_stages)
    assert found(report, "profiled", "bubble_fraction").predicted == pytest.approx(ideal, abs=0.02)
    assert found(report, "traced", "bubble_fraction").predicted == 0.2
    assert found(report, "computed", "bubble_fraction").predicted == 0.1


def test_sequence_parallelism_makes_another_layout_and_repeats_do_not(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    layouts: list[dict[str, Any]] = [{"sp": True}, {"sp": True, "step_time_s": 5.2}, {"sp": False}, {"tp": 8, "dp": 2}]
    path.write_text("\n".join(json.dumps(row(id=f"r{i}", **changes)) for i, changes in enumerate(layouts)))
    (sweep,) = validate_runs(path, workers=1, predictor=ten_percent_slow).sweeps
    assert sweep.layouts == 3


def test_another_exchange_of_tokens_is_another_layout_and_overlap_is_not(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    moe: dict[str, Any] = {
        "arch": "moe",
        "moe_experts": 8,
        "moe_topk": 2,
        "moe_ffn": 1024,
        "ep": 4,
        "moe_routing": "force-balanced",
    }
    layouts: list[dict[str, Any]] = [{}, {"moe_routing": "force-balanced, DeepEP"}, {"tp": 8, "dp": 2}]
    layouts += [{"overlap_grad_reduce": False}, {"overlap_grad_reduce": True}]
    path.write_text("\n".join(json.dumps(row(id=f"r{i}", **moe | changes)) for i, changes in enumerate(layouts)))
    (sweep,) = validate_runs(path, workers=1, predictor=ten_percent_slow).sweeps
    assert sweep.layouts == 3


@pytest.mark.parametrize("other", [{"heads": 96, "kv_heads": 96, "head_dim": 64}, {"layers": 48}, {"task": "lora"}], ids=str)
def test_another_model_of_the_same_name_is_another_sweep(tmp_path: Path, other: dict[str, Any]) -> None:
    path = tmp_path / "runs.jsonl"
    layouts: list[dict[str, Any]] = [{"tp": 4, "dp": 4}, {"tp": 8, "dp": 2}, {"tp": 2, "dp": 8}]
    rows = [row(id=f"{i}{bool(extra)}", **changes, **extra) for extra in ({}, other) for i, changes in enumerate(layouts)]
    path.write_text("\n".join(map(json.dumps, rows)))
    sweeps = validate_runs(path, workers=1, predictor=ten_percent_slow).sweeps
    assert [sweep.layouts for sweep in sweeps] == [3, 3]
    assert len({sweep.key["workload"] for sweep in sweeps}) == 2
