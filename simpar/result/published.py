"""What is published about a scenario beside what is predicted, and whether the constants have seen it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from simpar.specs.scenario_spec import Published

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


METRICS: Final = (
    "step_time_s", "tokens_per_s_per_gpu", "mfu", "model_flops_per_s_per_gpu", "bubble_fraction", "world_size", "tokens_per_s",
)  # fmt: skip
"""Figures that a simulated step has, by their names in a scenario's [[published]]."""


def compare_published(rows: Sequence[Published], predicted: Mapping[str, float]) -> tuple[Comparison, ...]:
    """A scenario's published figures, each beside its prediction."""
    found = []
    for row in rows:
        value = predicted.get(row.metric)
        error = value / row.value - 1.0 if value is not None and row.value else None
        found.append(Comparison(row.metric, row.value, value, error, row.fitted, row.source))
    return tuple(found)
