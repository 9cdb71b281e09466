"""What is published about a scenario beside what is predicted, and whether the constants have seen it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from simpar.result.result import Result

IN_SAMPLE = "fitted on this run: no evidence"


@dataclass(frozen=True, slots=True)
class Comparison:
    """One published figure.

    Attributes:
        predicted, error: None where the step does not tell; error is predicted over published - 1.
        fitted: as in the scenario.
    """

    metric: str
    published: float
    predicted: float | None
    error: float | None
    fitted: bool
    source: str

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


def compare_published(result: Result) -> tuple[Comparison, ...]:
    """The scenario's published figures, each beside its prediction."""
    predicted = {
        "step_time_s": result.step_time_s, "tokens_per_s_per_gpu": result.tokens_per_s_per_gpu, "mfu": result.mfu,
        "model_flops_per_s_per_gpu": result.model_flops_per_s_per_gpu, "bubble_fraction": result.bubble_fraction,
        "world_size": float(result.world_size), "tokens_per_s": result.tokens_per_s,
    }  # fmt: skip
    found = []
    for row in result.layout.scenario.published:
        value = predicted.get(row.metric)
        error = value / row.value - 1.0 if value is not None and row.value else None
        found.append(Comparison(row.metric, row.value, value, error, row.fitted, row.source))
    return tuple(found)


__all__ = ["IN_SAMPLE", "Comparison", "compare_published"]
