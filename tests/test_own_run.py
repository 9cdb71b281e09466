"""A log dropped on a scenario: measured against predicted, causes, and the site that it teaches."""

from __future__ import annotations

import json
from typing import Any

import pytest

import simpar
from simpar.errors import InputError

JOB: dict[str, Any] = {
    "model": "qwen3-0.6b", "framework": "megatron-core", "cluster": {"hardware": "dgx-h100", "num_nodes": 1},
    "plan": {"zero_stage": 1}, "training": {"sequence_length": 2048, "global_batch_size": 32},
}  # fmt: skip
LINE = (
    " [2026-01-01 00:00:{0:02d}] iteration {0:8d}/ 100 | consumed samples: {1:12d} | "
    "elapsed time per iteration (ms): {2:.1f} | learning rate: 1.0E-05 | global batch size:    32 | "
    "lm loss: 1.0E+01 | loss scale: 1.0 |\n"
)


def log(seconds: float, batch: int = 32) -> str:
    text = "".join(LINE.format(i, batch * i, 1e3 * seconds if i > 1 else 9000.0) for i in range(1, 12))
    return text.replace("global batch size:    32", f"global batch size:    {batch}")


@pytest.fixture(scope="module")
def predicted() -> float:
    return float(simpar.simulate(JOB, detail="stage").step_time_s)


def test_a_dropped_log_moves_the_answer(predicted: float) -> None:
    found = simpar.own_run(log(1.3 * predicted), JOB, name="monday.log")
    (run,) = found.to_dict()["runs"]
    assert run["id"] == "monday.log"
    assert run["measured_s"] == pytest.approx(1.3 * predicted, rel=1e-3)
    assert run["predicted_s"] == pytest.approx(predicted, rel=1e-6)
    assert run["error"] == pytest.approx(1 / 1.3 - 1, abs=2e-3)
    assert abs(run["with_site_error"]) < abs(run["error"])
    assert run["with_site_low_s"] < run["with_site_s"] < run["with_site_high_s"]
    assert sum(cause["probability"] for cause in run["causes"]) == pytest.approx(1.0)
    assert simpar.simulate(JOB, detail="stage", site=found.site).step_time_s == pytest.approx(run["with_site_s"], rel=1e-6)
    # As a page keeps it: plain data there and back.
    kept = json.loads(json.dumps(found.site.model_dump(mode="json")))
    assert simpar.simulate({**JOB, "site": kept}, detail="stage").step_time_s == pytest.approx(run["with_site_s"], rel=1e-6)


def test_further_logs_add_up(predicted: float) -> None:
    first = simpar.own_run(log(1.3 * predicted), JOB, name="a")
    both = simpar.own_run(json.dumps({"step_time_s": 1.32 * predicted, "mem_gib": 30.0}), JOB, earlier=first.rows, name="b")
    assert [run["id"] for run in both.runs] == ["a", "b"]
    assert len(both.site.runs) == 2
    assert first.runs[0]["with_site_s"] < both.runs[0]["with_site_s"] == both.runs[1]["with_site_s"] < 1.32 * predicted
    assert both.runs[1]["memory"]["measured_bytes"] == 30.0 * 2**30
    again = simpar.own_run(log(1.4 * predicted), JOB, earlier=both.rows, name="a")
    assert [run["id"] for run in again.runs] == ["b", "a"], "a log dropped again replaces its run"


def test_a_row_of_another_configuration_teaches_nothing(predicted: float) -> None:
    found = simpar.own_run(json.dumps({"step_time_s": predicted, "micro_batch": 4}), JOB)
    assert "another configuration ran" in found.runs[0]["skipped"]
    assert not found.site.runs
    assert found.runs[0]["with_site_s"] is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "log"),
        ("hello\n", "log"),
        (log(0.5, batch=64), "batch"),
        ('{"step_time_s": 1}\n{"step_time_s": \n', "line 2: is no JSON"),
        ('{"step_time_s": 1}\n{"loss": 1}\n', "line 2: a run has one of"),
        ("\x00\x01\x02", "not a text file"),
    ],
)
def test_a_wrong_text_is_one_clear_message(text: str, said: str) -> None:
    with pytest.raises(InputError, match=said) as caught:
        simpar.own_run(text, JOB, name="dropped.log")
    assert "/tmp" not in str(caught.value)
