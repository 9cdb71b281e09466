"""Trials chosen by their worth: fewer than in any fixed order, resumable, by hand or by a command."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from simpar.api.tuning import Tuning, tune
from simpar.cli.app import app
from simpar.errors import InputError
from simpar.evidence.predicted import predict_at
from simpar.site.learned import shipped_prior
from simpar.site.observed import Line
from simpar.site.trials import Candidate, Outcome, believe, next_trial, worth
from simpar.specs.scenario import make_scenario
from simpar.specs.site import Site, read_site

SCENARIO = """
name = "small"
framework = "megatron-core"
[model]
kind = "transformer"
num_hidden_layers = 8
hidden_size = 4096
intermediate_size = 14336
num_attention_heads = 32
num_key_value_heads = 8
head_dim = 128
vocab_size = 32000
[cluster]
hardware = "dgx-h100"
num_nodes = 1
[training]
sequence_length = 4096
global_batch_size = 32
"""
SPACE: dict[str, Any] = {"fix": {"cp": 1, "pp": 1}, "allow": {"micro_batch_size": ["1", "2"], "recompute": ["none"]}}
TRUE = Site(compute=1.1, memory=1.2, communication=2.5)


def candidate(name: str, parts: tuple[float, float, float], **axes: int) -> Candidate:
    return Candidate(name, (Line(1.0, (*parts, 0.0), 0.05),), axes)


def layouts() -> list[Candidate]:
    """Six layouts: the more tensor parallelism, the more communication and the less memory-bound work."""
    return [candidate(f"tp{tp}", (10.0, 6.0 / tp, 0.6 * tp), tp=tp) for tp in (1, 2, 4, 8)] + [
        candidate(f"tp{tp} mbs2", (9.8, 6.2 / tp, 0.62 * tp), tp=tp, mbs=2) for tp in (1, 2)
    ]


def test_what_a_trial_measured_is_believed_and_moves_the_others() -> None:
    found = layouts()
    before = believe(found, [], shipped_prior())
    after = believe(found, [Outcome("tp8", 2.0 * before.seconds[3])], shipped_prior())
    assert after.seconds[3] == pytest.approx(2.0 * before.seconds[3], rel=0.02)
    assert after.seconds[2] > 1.05 * before.seconds[2]
    assert after.covariance[3, 3] < 0.1 * before.covariance[3, 3]
    assert (np.linalg.eigvalsh(after.covariance) > -1e-9).all()


def test_a_trial_is_worth_nothing_twice_and_a_failed_one_is_never_the_best() -> None:
    found = layouts()
    start = believe(found, [], shipped_prior())
    lost = believe(found, [Outcome(found[start.best].name, None)], shipped_prior())
    assert lost.best != start.best
    assert worth(lost)[start.best] == 0.0
    assert (worth(start) > 0.0).any()
    every = believe(found, [Outcome(c.name, 10.0) for c in found], shipped_prior())
    assert next_trial(every) is None


def test_the_best_of_a_slow_network_is_found_in_two_trials() -> None:
    """Where communication takes three times as long, the search's own favourite is wrong; one trial tells."""
    found = layouts()
    truth = {c.name: c.lines[0].parts[0] + c.lines[0].parts[1] + 3.0 * c.lines[0].parts[2] + 0.05 for c in found}
    best, outcomes = min(truth, key=lambda name: truth[name]), []
    assert min(found, key=lambda c: c.lines[0].seconds).name != best
    for _ in range(3):
        chosen = next_trial(believe(found, outcomes, shipped_prior()))
        assert chosen is not None
        outcomes.append(Outcome(found[chosen[0]].name, truth[found[chosen[0]].name]))
        if outcomes[-1].name == best:
            break
    assert outcomes[-1].name == best


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    (tmp_path / "small.toml").write_text(SCENARIO)
    return tmp_path / "small.toml"


def test_by_hand_step_by_step(scenario: Path, tmp_path: Path) -> None:
    """Each call proposes a trial and waits; its row is read at the next; nothing is searched again."""
    folder = tmp_path / "tune"
    for number in range(1, 10):
        state = tune(scenario, folder=folder, budget=3, top=6, **SPACE)
        if state.pending is None:
            break
        home = folder / state.pending.folder
        assert state.pending.number == number
        assert "waits for" in state.why
        assert (home / "launch").is_dir()
        import tomllib

        raw = tomllib.loads((home / "scenario.toml").read_text())
        seconds = predict_at(TRUE, make_scenario(raw)).step_time_s
        (home / "run.json").write_text(json.dumps({"step_time_s": seconds}))
    assert state.pending is None
    assert 1 <= len(state.trials) <= 3
    best = state.to_dict()["best"]
    truth = {c.name: predict_at(TRUE, make_scenario(raw)).step_time_s for c, raw in state.candidates}
    assert best["tried"]
    assert truth[best["layout"]] <= 1.01 * min(truth.values())
    assert read_site(folder / "site.toml").communication > 1.1
    again = Tuning.load(folder)
    assert again.trials == state.trials


def test_a_command_runs_the_trials(scenario: Path, tmp_path: Path) -> None:
    script = tmp_path / "run.py"
    script.write_text(
        "import json, sys\nprint('warming up')\nprint(json.dumps({'step_time_s': 0.5 if 'x' in sys.argv else 0.4}))\n"
    )
    arguments = ["tune", str(scenario), "--budget", "2", "--folder", str(tmp_path / "t"), "--top", "4", "--worth", "0"]
    axes = ["--fix", "cp=1", "--fix", "pp=1", "--allow", "micro_batch_size=1", "--allow", "recompute=none"]
    command = ["--run-command", f"{sys.executable} {script} {{scenario}}"]
    said = CliRunner().invoke(app, [*arguments, *axes, *command, "--json"], catch_exceptions=False)
    assert said.exit_code == 0, said.output
    found = json.loads(said.stdout)
    assert [t["measured_s"] for t in found["trials"]] == [0.4, 0.4]
    assert found["why"] == "the budget of 2 trials is spent"
    shown = CliRunner().invoke(app, [*arguments, *axes], catch_exceptions=False)
    assert "Best so far" in shown.output


def test_a_command_that_fails_is_an_outcome(scenario: Path, tmp_path: Path) -> None:
    state = tune(
        scenario, folder=tmp_path / "t", budget=1, top=3, run_command=f"{sys.executable} -c 'raise SystemExit(3)'", **SPACE
    )
    assert "exit code 3" in state.trials[0].failed
    assert not state.belief.tried.all()
    assert state.belief.failed.sum() == 1


def test_wrong_input_is_one_clear_message(scenario: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="at least one trial"):
        tune(scenario, budget=0, folder=tmp_path / "a")
    with pytest.raises(InputError, match="cannot be read"):
        tune(scenario, budget=1, folder=tmp_path / "b", top=2, run_command="run {nothing}", **SPACE)
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "tune.json").write_text('{"candidates": [{}], "trials": []}')
    with pytest.raises(InputError, match="is damaged"):
        tune(scenario, folder=tmp_path / "c")
    (tmp_path / "b" / "trial-01" / "run.json").write_text("{}")
    with pytest.raises(InputError, match="step_time_s"):
        tune(scenario, budget=1, folder=tmp_path / "b", **SPACE)


def test_a_frameworks_own_log_is_read(scenario: Path, tmp_path: Path) -> None:
    """What Megatron prints is enough; a log without steps is one clear message, and the trial stays open."""
    state = tune(scenario, folder=tmp_path / "t", budget=1, top=3, **SPACE)
    assert state.pending is not None
    log = tmp_path / "t" / "trial-01" / "train.log"
    log.write_text("starting\n")
    with pytest.raises(InputError, match="train"):
        tune(scenario, folder=tmp_path / "t", budget=1, **SPACE)
    line = (
        " [2026-01-01 00:00:{0:02d}] iteration {0:8d}/ 100 | consumed samples: {1:12d} | "
        "elapsed time per iteration (ms): {2:.1f} | learning rate: 1.0E-05 | global batch size:    32 | "
        "lm loss: 1.0E+01 | loss scale: 1.0 |\n"
    )
    log.write_text("".join(line.format(i, 32 * i, 612.0 if i > 1 else 9000.0) for i in range(1, 12)))
    assert tune(scenario, folder=tmp_path / "t", budget=1, **SPACE).trials[0].measured_s == pytest.approx(0.612)


def test_a_tuning_that_is_killed_runs_its_trial_again(scenario: Path, tmp_path: Path) -> None:
    """SIGKILL in the middle of a trial: its command ends too, and nothing of it counts as a measurement."""
    script, began = tmp_path / "slow.py", tmp_path / "began"
    script.write_text(
        f"import os, time\nprint('half a log', flush=True)\nopen({str(began)!r}, 'w').write(str(os.getpid()))\ntime.sleep(60)\n"
    )
    where = ["--budget", "1", "--folder", str(tmp_path / "t"), "--top", "3", "--fix", "cp=1", "--fix", "pp=1"]
    arguments = ["tune", str(scenario), *where, "--allow", "micro_batch_size=1", "--allow", "recompute=none", "--run-command"]
    first = subprocess.Popen([sys.executable, "-m", "simpar", *arguments, f"{sys.executable} {script}"], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120.0
    while not (began.exists() and began.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    first.kill()
    first.wait()
    child = int(began.read_text())
    while Path(f"/proc/{child}/status").exists() and time.monotonic() < deadline:
        if "\nState:\tZ" in Path(f"/proc/{child}/status").read_text():
            break
        time.sleep(0.05)
    else:
        assert not Path(f"/proc/{child}").exists()
    assert not (tmp_path / "t" / "trial-01" / "train.log").exists()
    script.write_text("print('{\"step_time_s\": 0.4}')\n")
    said = CliRunner().invoke(app, [*arguments, f"{sys.executable} {script}", "--json"], catch_exceptions=False)
    assert said.exit_code == 0, said.output
    (trial,) = json.loads(said.stdout)["trials"]
    assert trial["measured_s"] == 0.4
