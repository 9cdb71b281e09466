"""Published figures of a run against what the plan predicts; the figures are never inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType

from simpar.errors import InputError, Violation
from simpar.planning.answer import Answer, Quantiles
from simpar.planning.closed_forms import DAY_S

TOLERANCE = 0.10


@dataclass(frozen=True, slots=True)
class Comparison:
    """One published figure. `at_least` ones hold when the prediction is not below; `error` is relative."""

    metric: str
    published: float
    predicted: float | None
    source: str
    note: str
    at_least: bool = False

    @property
    def error(self) -> float | None:
        """Predicted over published - 1."""
        return None if self.predicted is None or not self.published else self.predicted / self.published - 1.0

    @property
    def holds(self) -> bool:
        """Within the tolerance, or above the bound."""
        if self.predicted is None or self.error is None:
            return False
        return self.predicted >= self.published if self.at_least else abs(self.error) <= TOLERANCE


def _median(quantiles: Quantiles | None) -> float | None:
    return None if quantiles is None else quantiles.p50


def _ideal_s(answer: Answer) -> float | None:
    return answer.resolved.run.ideal_s if answer.resolved.run else None


def _ideal_days(answer: Answer) -> float | None:
    ideal = _ideal_s(answer)
    return None if ideal is None else ideal / DAY_S


def _ideal_gpu_hours(answer: Answer) -> float | None:
    ideal, run = _ideal_s(answer), answer.resolved.run
    return None if ideal is None or run is None else ideal / 3600.0 * run.stages[0].gpus


def _failures_per_day(answer: Answer) -> float | None:
    if not answer.failures or answer.days is None:
        return None
    return sum(q.p50 for q in answer.failures.values()) / answer.days.p50


METRICS: MappingProxyType[str, Callable[[Answer], float | None]] = MappingProxyType(
    {
        "days": lambda a: _median(a.days),
        "gpu_hours": lambda a: _median(a.gpu_hours),
        "goodput": lambda a: _median(a.goodput),
        "goodput_at_least": lambda a: _median(a.goodput),
        "effective_training_time_ratio": lambda a: _median(a.effective_training_time_ratio),
        "effective_training_time_ratio_at_least": lambda a: _median(a.effective_training_time_ratio),
        "cost_usd": lambda a: _median(a.cost_usd),
        "energy_kwh": lambda a: _median(a.energy_kwh),
        "carbon_kg": lambda a: _median(a.carbon_kg),
        "ideal_days": _ideal_days,
        "ideal_gpu_hours": _ideal_gpu_hours,
        "mtti_s": lambda a: a.closed_forms.get("mtti_s"),
        "failures_per_day": _failures_per_day,
    }
)
"""Metric of a published figure -> its prediction. Medians; "_at_least" is a bound."""


def compare_published(answer: Answer) -> tuple[Comparison, ...]:
    """Every published figure of the plan beside its prediction.

    Raises:
        InputError: a metric that is not known.
    """
    plan = answer.resolved.plan
    unknown = [
        Violation(f"published.{i}.metric", figure.metric, "unknown metric", f"one of {', '.join(METRICS)}", plan.file)
        for i, figure in enumerate(plan.published)
        if figure.metric not in METRICS
    ]
    if unknown:
        raise InputError(unknown)
    return tuple(
        Comparison(
            figure.metric, figure.value, METRICS[figure.metric](answer), figure.source, figure.note,
            at_least=figure.metric.endswith("_at_least"),
        )
        for figure in plan.published
    )  # fmt: skip
