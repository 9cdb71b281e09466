"""Figures inferred from runs: the fit finds the one that runs were made with, says how sure it is, keeps what it cannot better."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simpar.errors import InputError
from simpar.specs.framework import framework
from simpar.specs.inferred import FILE, VARIABLE, figures, inferred
from simpar.validation.fit_inferred import FIGURES, Figure, FloatArray, settle, source, text_of

SEND = Figure("made.send_s", "s", "what a send takes", 0.1, 2.0, 0.0, lambda row: True)
TRUE = 0.5
ROWS = [{"source": "made", "model_name": f"m{i % 7}", "base": 4.0 + i, "sends": i % 5} for i in range(60)]


def made(rows: Sequence[dict[str, Any]], value: float) -> FloatArray:
    return np.array([row["base"] + row["sends"] * value for row in rows])


def measured(noise: float) -> FloatArray:
    return np.asarray(made(ROWS, TRUE) * (1.0 + noise * np.random.default_rng(5).standard_normal(len(ROWS))))


def test_the_figure_that_runs_were_made_with_is_found() -> None:
    found = settle(SEND, ROWS, measured(0.03), 1.5, made)
    assert found.value == pytest.approx(TRUE, rel=0.25)
    assert found.low <= TRUE <= found.high
    assert found.rows == sum(row["sends"] > 0 for row in ROWS)
    assert found.error < 0.04 < found.without
    assert found.error <= found.cross_validated < found.without


def test_a_value_that_is_as_good_stays() -> None:
    near = TRUE * 1.03
    assert settle(SEND, ROWS, measured(0.1), near, made).value == near


def test_runs_far_off_for_reasons_of_their_own_do_not_move_it() -> None:
    sick = measured(0.02)
    sick[7:19:4] *= 6.0
    assert settle(SEND, ROWS, sick, 1.5, made).value == pytest.approx(TRUE, rel=0.25)


def test_a_figure_that_no_run_shows_is_an_error() -> None:
    with pytest.raises(InputError, match=r"made.send_s: no run of the data shows it; 60 might"):
        settle(SEND, ROWS, measured(0.0), 1.5, lambda rows, value: made(rows, TRUE))


def test_a_source_and_limits_choose_runs() -> None:
    chosen = source("vTrain", n_gpus=(1, 8))
    assert chosen({"source": "vTrain (MICRO 2024)", "n_gpus": 8})
    assert not chosen({"source": "vTrain (MICRO 2024)", "n_gpus": 16})
    assert not chosen({"source": "another", "n_gpus": 8})


def test_the_file_holds_every_figure_with_what_backs_it() -> None:
    assert list(figures()) == [f.name for f in FIGURES]
    assert FILE.read_text(encoding="utf-8") == text_of(list(figures().values()))
    for found in figures().values():
        assert found.rows >= 6
        assert found.sources
        assert found.error < found.without, found.name


@pytest.mark.parametrize("name", [f.name for f in FIGURES])
def test_every_figure_is_read_somewhere(name: str) -> None:
    package = FILE.parents[1]
    readers = [p for p in package.rglob("*.py") if f'"{name}"' in p.read_text(encoding="utf-8") and p.name != "fit_inferred.py"]
    assert readers


def test_trials_reach_the_framework_rows_of_another_process() -> None:
    code = "from simpar.specs.framework import framework; print(framework('nanotron').far_send_s)"
    environment = {VARIABLE: "nanotron.far_send_s=0.25 vtrain.launch_s=1e-4", "PYTHONPATH": str(Path(__file__).parents[1])}
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True).stdout
    assert float(out) == 0.25
    assert framework("nanotron").far_send_s == inferred("nanotron.far_send_s")
