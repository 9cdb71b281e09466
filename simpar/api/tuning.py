"""`tune`: search, propose the trial worth most, write its launch files, read what it measured, learn, and go on.

Everything stands in a folder, so that it can be done by hand step by step and taken up again: `tune.json` is the state, and each
trial has a folder with its scenario, its launch files, and afterwards `train.log` or `run.json` with what it measured.
"""

from __future__ import annotations

import json
import math
import shlex
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from simpar.api.scenarios import Source, raw_table
from simpar.boundary import read_json, read_text
from simpar.errors import InputError, Violation
from simpar.evidence.run_rows import run_of
from simpar.interop.export import export_files, launcher, write_files
from simpar.interop.scenario_text import scenario_table, table_text
from simpar.model.kind import kind_of
from simpar.output import write_file
from simpar.runlogs.read import read_run
from simpar.site.learned import adapt, shipped_prior, write_site
from simpar.site.observed import Line, lines_of
from simpar.site.trials import Belief, Candidate, Outcome, believe, next_trial
from simpar.specs.calibration import SITE_FACTORS
from simpar.specs.counts import resolved_dp
from simpar.specs.kinds import Kind
from simpar.specs.scenario import Scenario, make_scenario

WORTH: Final = 0.003
"""A trial is not worth its time below this share of the step."""
TOP: Final = 24
"""Layouts of the search that trials are chosen from."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A layout that was proposed.

    Attributes:
        number: from 1; its folder is trial-01.
        layout: name of the candidate.
        worth: what it was expected to be worth, as a share of the step.
        expected_s: its step, as expected then.
        measured_s: its step as measured; None while it was not run, or where it failed.
        failed: why it failed, "" where it did not.
    """

    number: int
    layout: str
    worth: float
    expected_s: float
    measured_s: float | None = None
    failed: str = ""

    @property
    def folder(self) -> str:
        """Beside tune.json."""
        return f"trial-{self.number:02d}"

    def as_json(self) -> dict[str, Any]:
        """One entry of "trials"."""
        return {"number": self.number, "folder": self.folder, "layout": self.layout, "worth": self.worth,
                "expected_s": self.expected_s, "measured_s": self.measured_s, "failed": self.failed or None}  # fmt: skip


@dataclass(slots=True)
class Tuning:
    """The state of a tuning, as tune.json holds it.

    Attributes:
        candidates: layouts to choose from, in the order of the search, with the raw table of each.
        trials: proposed so far.
        why: it stopped, or waits for.
    """

    folder: Path
    candidates: list[tuple[Candidate, dict[str, Any]]]
    trials: list[Trial] = field(default_factory=list)
    why: str = ""

    @property
    def belief(self) -> Belief:
        """What is known of every candidate after the trials."""
        done = [Outcome(t.layout, t.measured_s) for t in self.trials if t.measured_s or t.failed]
        return believe([candidate for candidate, _ in self.candidates], done, shipped_prior())

    @property
    def pending(self) -> Trial | None:
        """The trial that was proposed and not run."""
        return next((t for t in self.trials if t.measured_s is None and not t.failed), None)

    def to_dict(self) -> dict[str, Any]:
        """The object of `simpar tune --json`."""
        belief = self.belief
        half = 1.2816 * np.sqrt(np.maximum(np.diag(belief.covariance), 0.0))
        best = belief.best
        rows = [
            {"layout": c.name, "step_time_s": float(s), "low": float(s * math.exp(-h)), "high": float(s * math.exp(h)),
             "tried": bool(t)} for (c, _), s, h, t in zip(self.candidates, belief.seconds, half, belief.tried, strict=True)
        ]  # fmt: skip
        pending, ordered = self.pending, sorted(rows, key=lambda row: float(str(row["step_time_s"])))
        return {
            "best": rows[best], "trials": [t.as_json() for t in self.trials], "candidates": ordered,
            "next": None if pending is None else pending.as_json(), "why": self.why, "folder": str(self.folder),
        }  # fmt: skip

    def save(self) -> None:
        """Write tune.json.

        Raises:
            InputError: the folder cannot be written.
        """
        table = {
            "candidates": [
                {"name": c.name, "axes": dict(c.axes), "kind": c.kind.model_dump(), "scenario": raw,
                 "lines": [[line.weight, list(line.parts), line.rest] for line in c.lines]} for c, raw in self.candidates
            ],
            "trials": [t.as_json() for t in self.trials], "why": self.why,
        }  # fmt: skip
        write_file(self.folder / "tune.json", json.dumps(table, indent=1).encode(), "--folder")

    @classmethod
    def load(cls, folder: Path) -> Tuning:
        """The state in a folder.

        Raises:
            InputError: tune.json is damaged.
        """
        file = folder / "tune.json"
        table = read_json(file, "the state of a tuning")
        try:
            candidates = [
                (Candidate(c["name"], tuple(Line(w, _parts(p), rest) for w, p, rest in c["lines"]), c["axes"], Kind(**c["kind"])),
                 c["scenario"]) for c in table["candidates"]
            ]  # fmt: skip
            keep = ("number", "layout", "worth", "expected_s", "measured_s")
            trials = [Trial(**{key: t[key] for key in keep}, failed=t["failed"] or "") for t in table["trials"]]
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise InputError(f"{file}: is damaged ({error!r}); delete it to begin anew, the trials' folders stay") from None
        return cls(folder, candidates, trials)


def _parts(given: list[float]) -> tuple[float, ...]:
    """Seconds that each factor of a site scales."""
    if len(given) != len(SITE_FACTORS):
        raise ValueError("a tuning of an earlier simpar")
    return tuple(map(float, given))


def tune(
    source: Source, /, *, budget: int = 6, folder: str | Path = "tune", run_command: str = "",
    worth: float = WORTH, top: int = TOP, say: Callable[[str], None] = lambda _: None, **settings: Any,
) -> Tuning:  # fmt: skip
    """Go on with a tuning as far as it goes without a person: until a trial waits to be run, or no further trial is worth its time.

    Args:
        budget: trials at most.
        folder: of the state and the trials.
        run_command: runs a trial: a command with {folder}, {scenario} and {launch} in it, which prints a log, or a JSON line with
            step_time_s; without it a person runs the trials.
        worth: a trial is not proposed below this share of the step.
        top: layouts of the search to choose from.
        settings: of the search, such as fix, allow, where, and framework: whose semantics and launch files.

    Raises:
        InputError: scenario, settings or folder are wrong.
    """
    if budget < 1:
        raise InputError([Violation("--budget", budget, "at least one trial is needed", "such as 6")])
    home = Path(folder)
    if (home / "tune.json").exists():
        state = Tuning.load(home)
        say(f"going on from {home / 'tune.json'}: {len(state.trials)} of {budget} trials")
    else:
        state = Tuning(home, _candidates(source, top, settings, say))
        state.save()
    while True:
        if (trial := state.pending) is not None:
            if run_command and not _measured(home / trial.folder):
                say(f"{trial.folder}: {trial.layout}")
                _run(run_command, home / trial.folder)
            answered = _outcome(trial, state, home)
            if answered is None:
                state.why = f"waits for {home / trial.folder}: run it, put its log there as train.log, and call tune again"
                break
            state.trials[trial.number - 1] = answered
            say(f"{trial.folder}: " + (answered.failed or f"{answered.measured_s:.4g} s, expected {answered.expected_s:.4g} s"))
            state.save()
            continue
        if len(state.trials) >= budget:
            state.why = f"the budget of {budget} trials is spent"
            break
        if not _propose(state, worth):
            break
        state.save()
    _learn(state)
    state.save()
    return state


def _candidates(
    source: Source, top: int, settings: dict[str, Any], say: Callable[[str], None]
) -> list[tuple[Candidate, dict[str, Any]]]:
    """The best layouts of the search, as straight lines in the site's factors."""
    from simpar.api.searches import search

    table, file = raw_table(source)
    if settings.get("framework") is None:
        settings.pop("framework", None)
    found = search({**table, "file": file}, top=top, **settings)
    if not found.results:
        raise InputError("no layout of this scenario fits; `simpar search` says why")
    say(f"{len(found.results)} layouts to choose from, of {found.space_size:,}")
    candidates = []
    for result in found.results:
        scenario = result.scenario
        axes = axes_of(scenario)
        name = " ".join(f"{axis} {value}" for axis, value in axes.items() if value != 1 or axis in ("tp", "pp", "dp"))
        lines = lines_of(scenario)
        kind = kind_of(scenario, sum(line.weight * line.seconds for line in lines))
        candidates.append((Candidate(name, lines, axes, kind), scenario_table(scenario)))
    return list({candidate.name: (candidate, raw) for candidate, raw in candidates}.values())


def axes_of(scenario: Scenario) -> dict[str, Any]:
    """What tells layouts apart."""
    plan = scenario.plan
    recompute = plan.recompute if isinstance(plan.recompute, str) else plan.recompute.granularity
    modules = () if isinstance(plan.recompute, str) else plan.recompute.modules
    used = {
        "tp": plan.tp, "cp": plan.cp, "pp": plan.pp, "ep": plan.ep, "dp": resolved_dp(scenario), "zero_stage": plan.zero_stage,
        "micro_batch_size": scenario.training.micro_batch_size, "virtual_stages": plan.virtual_stages,
        "schedule": plan.schedule if plan.pp > 1 else "none", "recompute": recompute + "".join(f"+{m}" for m in modules),
        "sequence_parallel": plan.sequence_parallel and plan.tp > 1, "shard_size": plan.shard_size, "overlap_tp": plan.overlap_tp,
        "overlap_ep": plan.overlap_ep, "cp_style": plan.cp_style if plan.cp > 1 else "none",
        "dispatcher": plan.ep_dispatcher if plan.ep > 1 else "none", "placement": plan.placement,
        "offload": f"{plan.offload.activations:g}" if plan.offload.activations else "none",
        "overlap_grad_reduce": plan.overlap_grad_reduce, "overlap_param_gather": plan.overlap_param_gather,
        "overlap_p2p": plan.overlap_p2p, "split": str(plan.layers_per_stage or "none"),
    }  # fmt: skip
    return {axis: value for axis, value in used.items() if value not in ("none", False, None, "tp-cp-ep-dp-pp")}


def _propose(state: Tuning, worth: float) -> bool:
    """Add the trial worth most; false, with the reason, where none is worth its time."""
    belief = state.belief
    found = next_trial(belief)
    if found is None:
        state.why = "every layout was run"
        return False
    index, value = found
    if state.trials and value < worth:
        state.why = f"the next trial is worth {value:.2%} of a step, below {worth:.2%}"
        return False
    candidate, raw = state.candidates[index]
    trial = Trial(len(state.trials) + 1, candidate.name, value, float(belief.seconds[index]))
    home = state.folder / trial.folder
    write_file(home / "scenario.toml", table_text(raw).encode(), "--folder")
    if name := launcher(str(raw.get("framework", ""))):
        write_files(export_files(name, make_scenario(raw)), home / "launch", "--folder")
    state.trials.append(trial)
    return True


def _run(command: str, home: Path) -> None:
    """Run a trial's command, its output in train.log once it has ended; a failure is its outcome.

    Killed on the way, it leaves no log, so that the trial is run again; the command ends with this process (Linux).
    """
    from simpar.live.cluster_worker import die_with_parent

    words = {"folder": str(home), "scenario": str(home / "scenario.toml"), "launch": str(home / "launch")}
    try:
        given = [part.format(**words) for part in shlex.split(command)]
    except (KeyError, IndexError, ValueError) as error:
        rule = f"cannot be read: {error}"
        raise InputError(
            [Violation("--run-command", command, rule, "{folder}, {scenario} and {launch} stand for the trial's")]
        ) from None
    start, part = time.monotonic(), home / "train.log.part"
    try:
        with part.open("wb") as log:
            done = subprocess.run(given, stdout=log, stderr=subprocess.STDOUT, check=False, preexec_fn=die_with_parent)
    except (OSError, subprocess.SubprocessError) as error:
        part.unlink(missing_ok=True)
        raise InputError([Violation("--run-command", command, f"cannot be started: {error}")]) from None
    part.replace(home / "train.log")
    if done.returncode:
        seconds = time.monotonic() - start
        note = {"failed": f"exit code {done.returncode} after {seconds:.0f} s; its output is in {home / 'train.log'}"}
        write_file(home / "run.json", json.dumps(note).encode(), "--folder")


def _measured(home: Path) -> bool:
    return any((home / name).exists() for name in ("run.json", "train.log"))


def _outcome(trial: Trial, state: Tuning, home: Path) -> Trial | None:
    """The trial with what its folder says; none while it says nothing."""
    folder = home / trial.folder
    if not _measured(folder):
        return None
    raw = next(table for candidate, table in state.candidates if candidate.name == trial.layout)
    row = row_of(folder, make_scenario(raw))
    common = (trial.number, trial.layout, trial.worth, trial.expected_s)
    if row.get("failed") or row.get("oom"):
        return Trial(*common, failed=str(row.get("failed") or "out of memory"))
    seconds = run_of({**row, "scenario": raw, "id": trial.folder}, trial.folder).measured.step_time_s
    if not seconds:
        raise InputError(f"{folder}: run.json does not say how long a step took; a JSON line with step_time_s will do")
    return Trial(*common, measured_s=float(seconds))


def row_of(folder: Path, scenario: Scenario) -> dict[str, Any]:
    """What a trial's folder says it measured: run.json, the last JSON line of train.log with step_time_s, or the steps of that log.

    Raises:
        InputError: neither can be read.
    """
    if (folder / "run.json").exists():
        found = read_json(folder / "run.json", "a run's row")
        if not isinstance(found, dict):
            raise InputError(f"{folder / 'run.json'}: is not one JSON object with step_time_s")
        return found
    log = folder / "train.log"
    for text in reversed(read_text(log).splitlines()):
        if text.startswith("{") and "step_time_s" in text:
            with suppress(ValueError):
                return dict(json.loads(text))
    return read_run(scenario, [log]).row


def _learn(state: Tuning) -> None:
    """The site of the trials so far, for every other command."""
    tables = {candidate.name: raw for candidate, raw in state.candidates}
    rows = [{"id": t.folder, "scenario": tables[t.layout], "step_time_s": t.measured_s} for t in state.trials if t.measured_s]
    if rows:
        write_site(adapt([run_of(row, str(row["id"])) for row in rows], name=state.folder.name).site, state.folder / "site.toml")
