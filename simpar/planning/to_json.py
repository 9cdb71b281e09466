"""The public JSON object of `simpar plan`; names carry units, quantities their quantiles."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from simpar.output import finite
from simpar.planning.answer import Answer, Quantiles
from simpar.planning.published import Comparison
from simpar.planning.questions import PlanReport
from simpar.planning.study import Point, Study

QUANTITIES = (
    "days", "gpu_hours", "reserved_gpu_hours", "goodput", "effective_training_time_ratio", "cost_usd",
    "usd_per_million_tokens", "energy_kwh", "carbon_kg", "checkpoints", "written_bytes",
)  # fmt: skip
"""Quantities of an answer that have quantiles."""


def report_json(report: PlanReport) -> dict[str, Any]:
    """The whole report as JSON values; what does not exist is null, never infinite."""
    found = _answer(report.answer) | {
        "published": [_comparison(c) for c in report.published],
        "studies": [_study(study) for study in report.studies],
        "sensitivity": asdict(report.tornado) if report.tornado else None,
    }
    return {key: finite(value) for key, value in found.items()}


def _quantiles(quantiles: Quantiles | None) -> dict[str, float] | None:
    return None if quantiles is None else asdict(quantiles)


def _headline(answer: Answer) -> dict[str, Any]:
    table: dict[str, Any] = {"feasible": answer.feasible, "binding": list(answer.binding)}
    return table | {name: _quantiles(getattr(answer, name)) for name in QUANTITIES}


def _answer(answer: Answer) -> dict[str, Any]:
    run, checkpoints = answer.resolved.run, answer.resolved.checkpoints
    return {
        "name": answer.name,
        **_headline(answer),
        "lost_time_s": {cause: _quantiles(q) for cause, q in answer.lost_time_s.items()},
        "failures": {name: _quantiles(q) for name, q in answer.failures.items()},
        "phase_days": {name: _quantiles(q) for name, q in answer.phase_days.items()},
        "deadline_probability": answer.deadline_probability,
        "ideal_days": run.ideal_s / 86400.0 if run else None,
        "gpus": [stage.gpus for stage in run.stages] if run else [],
        "checkpoint": asdict(checkpoints) if checkpoints else None,
        "storage": answer.storage,
        "warnings": list(answer.warnings),
        "closed_forms": answer.closed_forms,
        "steps": [
            {
                "phase": name, "step_time_s": e.step_time_s, "low": e.low_s, "high": e.high_s, "mfu": e.mfu,
                "layout": e.layout, "fits": e.fits, "reasons": list(e.reasons), "provenance": e.provenance,
                "layout_search": e.found,
            }
            for name, e in answer.steps
        ],
        "assumptions": [asdict(assumption) for assumption in answer.assumptions],
        "seed": answer.simulation.seed,
        "repetitions": answer.simulation.repetitions,
    }  # fmt: skip


def _comparison(comparison: Comparison) -> dict[str, Any]:
    return asdict(comparison) | {"error": comparison.error, "holds": comparison.holds}


def _study(study: Study) -> dict[str, Any]:
    return {
        "kind": study.kind,
        "question": study.question,
        "conclusion": study.conclusion,
        "chosen": study.chosen,
        "numbers": study.numbers,
        "points": [_point(point) for point in study.points],
    }


def _point(point: Point) -> dict[str, Any]:
    extra = {"mfu": point.mfu, "layout": point.layout, "note": point.note}
    return {"label": point.label, "values": point.values, **_headline(point.answer), **extra}
