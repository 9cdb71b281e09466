"""`simpar explain --run`: each run of a file beside the scenario's prediction, with the causes of its gap."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from simpar.errors import SimparError
from simpar.evidence.predicted import prediction_of
from simpar.evidence.row_values import read_values
from simpar.evidence.run_rows import measured_of
from simpar.result.result import Result
from simpar.site.causes import Job, Verdict, causes_of, diagnose
from simpar.site.signs import Expected, Signs, signs_of
from simpar.specs.counts import resolved_dp
from simpar.specs.model import TransformerSpec
from simpar.specs.scenario import Scenario
from simpar.step import simulate

Said = tuple[str, Any, Any]
"""(What, the scenario's value, the row's)."""
LEAST: Final = 0.01
"""Other configurations whose step differs by less are no explanation."""


@dataclass(frozen=True, slots=True)
class Explained:
    """One run.

    Attributes:
        id: the row's.
        measured_s, predicted_s: step times.
        signs: what it showed.
        verdicts: causes, the likeliest first.
        differs: what the row says of its own configuration that the scenario says otherwise.
        skipped: why there is nothing to explain.
    """

    id: str
    measured_s: float | None
    predicted_s: float
    signs: Signs
    verdicts: tuple[Verdict, ...]
    differs: tuple[Said, ...] = ()
    skipped: str = ""

    def as_json(self) -> dict[str, Any]:
        """One entry of "runs"."""
        return {
            "id": self.id, "measured_s": self.measured_s, "predicted_s": self.predicted_s, "signs": self.signs,
            "causes": [verdict.as_json() for verdict in self.verdicts],
            "differs": [{"field": name, "scenario": ours, "run": theirs} for name, ours, theirs in self.differs],
            "skipped": self.skipped or None,
        }  # fmt: skip


def explain_run(row: Mapping[str, Any], result: Result, job: Job | None = None, name: str = "run") -> Explained:
    """Why the run of `row` took what it took, beside `result`, the prediction of its scenario.

    Args:
        job: of the scenario, where it is known already (`job_of`).
    """
    name, expected = str(row.get("id") or name), Expected.of(result)
    measured = measured_of(read_values({k: v for k, v in row.items() if k not in ("scenario", "extra")}).row)
    differs = differing(row, result.layout.scenario)
    if measured.step_time_s is None:
        return Explained(name, None, result.step_time_s, {}, (), differs, "the row has no step time")
    if differs:
        rule = "; ".join(f"the run says {field} {theirs}, the scenario {ours}" for field, ours, theirs in differs)
        return Explained(name, measured.step_time_s, result.step_time_s, {}, (), differs, f"another configuration ran: {rule}")
    signs = signs_of(row, expected, measured.peaks(prediction_of(result)))
    found = diagnose(signs, expected, causes_of(expected, job or job_of(result)))
    return Explained(name, measured.step_time_s, result.step_time_s, signs, tuple(found))


def differing(row: Mapping[str, Any], scenario: Scenario) -> tuple[Said, ...]:
    """What the row says of its configuration that the scenario says otherwise."""
    plan, training = scenario.plan, scenario.training
    ours = {
        "n_gpus": scenario.world_size, "tp": plan.tp, "pp": plan.pp, "cp": plan.cp, "ep": plan.ep, "dp": resolved_dp(scenario),
        "seq_len": training.sequence_length, "global_batch": training.global_batch_size, "micro_batch": training.micro_batch_size,
    }  # fmt: skip
    given = ((key, value, row.get(key)) for key, value in ours.items())
    return tuple((key, value, theirs) for key, value, theirs in given if isinstance(theirs, int | float) and theirs != value)


def job_of(result: Result) -> Job:
    """What decides which causes a run of `result`'s scenario can have; simulates a few configurations one setting away."""
    layout, scenario = result.layout, result.layout.scenario
    plan, training = scenario.plan, scenario.training
    passes = 2.0 * layout.num_microbatches * plan.virtual_stages if plan.pp > 1 else 0.0
    parts = result.breakdown
    moe = isinstance(scenario.model, TransformerSpec) and scenario.model.moe is not None and plan.ep > 1
    experts = parts.get("expert_matmul", 0.0) + parts.get("ep", 0.0) if moe else 0.0
    others: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        (f"recompute = {kind}", {"recompute": kind}, {}) for kind in ("none", "selective", "full") if kind != plan.recompute
    ]
    others += [
        (f"micro_batch_size = {size}", {}, {"micro_batch_size": size})
        for size in (training.micro_batch_size * 2, training.micro_batch_size // 2)
        if size and training.global_batch_size % (size * layout.mesh.dp) == 0
    ]
    readings = []
    for what, in_plan, in_training in others:
        changed = scenario.model_copy(
            update={"plan": plan.model_copy(update=in_plan), "training": training.model_copy(update=in_training)}
        )
        try:
            other = simulate(changed, detail="stage")
        except SimparError:
            continue
        ratio = other.worst_rank.reserved_bytes / result.worst_rank.reserved_bytes
        if other.fits and abs(other.step_time_s / result.step_time_s - 1.0) > LEAST:
            readings.append((what, other.step_time_s, ratio))
    return Job(passes, experts, tuple(readings))
