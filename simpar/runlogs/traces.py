"""Traces of the ranks of one run: read one after the other, laid beside each other and beside the prediction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

from simpar.errors import InputError, SimparError
from simpar.runlogs.flight_recorder import Recorders, is_recorder, read_recorders
from simpar.runlogs.kineto_rank import read_rank
from simpar.runlogs.nsys import read_nsys
from simpar.runlogs.rank_trace import RankTrace
from simpar.runlogs.waits import Waits, waits_of
from simpar.specs.scenario import Scenario

_MOST_COMPARED: Final = 2**28
"""Bytes of a trace that is compared op by op, packed or not: that takes all of it into memory."""
_SLOWER: Final = 0.03
_MOST_OPS: Final = 20


@dataclass
class TraceReport:
    """What the traces show.

    Attributes:
        step_s: median step of the slowest rank; none where only recorders were given, or nothing says how many steps there are.
        waits: between ranks; none of fewer than two.
        against: the first rank beside the prediction: the difference by cause, op by op.
    """

    ranks: list[RankTrace] = field(default_factory=list)
    recorders: Recorders | None = None
    waits: Waits | None = None
    against: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def step_s(self) -> float | None:
        """As above."""
        return max((median(s.length_s for s in r.steps) for r in self.ranks if r.counted), default=None)

    def slow_ranks(self) -> list[int]:
        """Ranks whose compute takes longer than the median rank's by more than 3 %: slow GPUs or more work."""
        if len(self.ranks) < 3:
            return []
        middle = median(r.mean("compute_s") for r in self.ranks)
        return [r.rank or 0 for r in self.ranks if r.mean("compute_s") > (1 + _SLOWER) * middle]

    def as_json(self) -> dict[str, Any]:
        """The public object."""
        found: dict[str, Any] = {}
        if self.ranks:
            found = {"ranks": [r.as_json() for r in self.ranks], "slow_ranks": self.slow_ranks()}
        if self.waits is not None:
            found |= self.waits.as_json()
        if self.against is not None:
            found["against_prediction"] = self.against
        if self.recorders is not None:
            found["flight_recorder"] = self.recorders.as_json()
        return {**found, "text": self.text()}

    def text(self) -> list[str]:
        """Lines for people."""
        lines = []
        for r in self.ranks[:16]:
            row = r.as_json()
            overlap = "" if row["overlap"] is None else f", {100 * row['overlap']:.0f} % of communication hidden"
            lines.append(
                f"rank {r.rank}: step {row['step_s']:.4g} s: compute {row['compute_s']:.4g}, exposed communication "
                f"{row['exposed_communication_s']:.4g}, idle {row['idle_s']:.4g} s{overlap}"
            )
        if self.waits is not None:
            lines += [
                f"rank {pair['waiting']} waits for rank {pair['late']}: {pair['seconds_per_step']:.4g} s a step"
                for pair in self.waits.as_json(5)["waits"]
            ]
            if self.waits.first_late:
                rank, steps = max(self.waits.first_late.items(), key=lambda item: item[1])
                lines.append(f"late first: rank {rank}, in {steps} of {sum(self.waits.first_late.values())} steps with a wait")
        lines += [
            f"{cause['name']}: predicted {cause['predicted_s']:.4g} s, measured {cause['measured_s']:.4g} s"
            for cause in (self.against or {}).get("causes", [])[:8]
        ]
        return lines + (self.recorders.text() if self.recorders is not None else [])


def read_traces(paths: Sequence[Path], scenario: Scenario) -> TraceReport:
    """The traces at `paths` of a run of `scenario`.

    Raises:
        InputError: a file is no trace; two are of one rank; ranks have no step in common, or there are more than the job has.
    """
    report = TraceReport()
    recorders: list[Path] = []
    for path in paths:
        kind = _kind(path)
        if kind == "recorder":
            recorders.append(path)
        else:
            report.ranks += read_nsys(path) if kind == "nsys" else [read_rank(path)]
    if recorders:
        report.recorders = read_recorders(recorders)
    if report.ranks:
        _together(report, scenario)
    return report


def _kind(path: Path) -> str:
    try:
        with path.open("rb") as file:
            start = file.read(16)
        if start.startswith(b"SQLite format 3"):
            return "nsys"
        return "recorder" if is_recorder(path) else "kineto"
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None


def _together(report: TraceReport, scenario: Scenario) -> None:
    ranks = report.ranks
    for index, trace in enumerate(ranks):
        report.notes += trace.notes
        if trace.rank is None:
            trace.rank = index
            report.notes.append(f"{trace.file}: does not say its rank; taken as {index}")
        if trace.world_size not in (None, scenario.world_size):
            rule = f"is of a job of {trace.world_size} ranks, the scenario has {scenario.world_size}"
            raise InputError(f"{trace.file}: {rule}; give the scenario of this run")
    ranks.sort(key=lambda r: r.rank or 0)
    twice = [n for n, count in Counter(r.rank for r in ranks).items() if count > 1]
    if twice:
        raise InputError(f"{', '.join(r.file for r in ranks if r.rank == twice[0])}: both are of rank {twice[0]}; one trace a rank")
    counted = [r for r in ranks if r.counted]
    if len(counted) > 1:
        common = sorted(set.intersection(*({s.number for s in r.steps} for r in counted)))
        if not common:
            spans = "; ".join(f"rank {r.rank} has {r.steps[0].number}..{r.steps[-1].number}" for r in counted[:6])
            raise InputError(f"traces of different steps: {spans}; trace the same steps on all ranks")
        if all(call.group for r in counted for call in r.calls) or _one_group(scenario):
            report.waits = waits_of(counted, common)
        else:
            report.notes.append("the traces do not say which ranks a collective is of: who waits for whom is not told")
    _beside_prediction(report, ranks[0], scenario)


def _one_group(scenario: Scenario) -> bool:
    """Whether every collective of the job is of all its ranks."""
    plan = scenario.plan
    return plan.tp * plan.pp * plan.cp * plan.ep == 1 and plan.shard_size in (None, scenario.world_size)


def _beside_prediction(report: TraceReport, rank: RankTrace, scenario: Scenario) -> None:
    from simpar.interop.kineto_step import read_steps
    from simpar.live.trace_diff import diff

    path = Path(rank.file)
    if _kind(path) != "kineto":
        return
    if path.stat().st_size > _MOST_COMPARED:
        report.notes.append(f"{path}: too large to be compared op by op; `simpar diff` takes a trace of fewer steps")
        return
    try:
        found = diff(scenario, partial(read_steps, path), (rank.rank or 0) % scenario.world_size)
    except SimparError as error:
        report.notes.append(f"not compared with the prediction: {str(error).splitlines()[0]}")
        return
    whole = found.to_json()
    kept = ("rank", "steps", "predicted_step_time_s", "measured_step_time_s", "difference_by_group_s", "causes")
    by_time = sorted(whole["ops"], key=lambda op: -abs(op["measured_s"] - op["predicted_s"]))
    report.against = {
        **{key: whole[key] for key in kept},
        "ops": by_time[:_MOST_OPS],
        "collectives": whole["collectives"][:_MOST_OPS],
    }
