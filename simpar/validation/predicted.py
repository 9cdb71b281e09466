"""What validation needs of a simulated step, whatever the result object holds beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

from simpar.specs.scenario import Scenario

if TYPE_CHECKING:
    from simpar.result.result import Result


@dataclass(frozen=True, slots=True)
class Prediction:
    """One predicted step.

    Attributes:
        step_time_s, step_low_s, step_high_s: seconds and the 80 % interval.
        allocated_bytes, reserved_bytes: peak over all ranks, as the caching allocator counts.
        allocated_per_rank, reserved_per_rank: by pipeline rank.
        device_bytes: what the process holds on the device in total: reserved, context, communication buffers.
        state_bytes: parameters, gradients and optimizer state at rest, of the fullest pipeline rank.
        memory_low, memory_high: 80 % interval of the peak as factors of it.
        bubble_fraction: idle share of the compute streams.
        fits: whether the peak stays under the capacity.
        waterfall: name -> seconds, from ideal to predicted.
    """

    step_time_s: float
    step_low_s: float
    step_high_s: float
    allocated_bytes: float
    reserved_bytes: float
    allocated_per_rank: tuple[float, ...]
    reserved_per_rank: tuple[float, ...]
    device_bytes: float
    state_bytes: float
    memory_low: float
    memory_high: float
    bubble_fraction: float
    fits: bool
    waterfall: Mapping[str, float] = field(default_factory=dict)


class Predictor(Protocol):
    """Anything that predicts a scenario; a module-level function, so that workers can import it."""

    def __call__(self, scenario: Scenario) -> Prediction:
        """The prediction of `scenario`."""


STATES: Final = ("parameters", "gradients", "optimizer")
MEMORY_INTERVAL: Final = (0.94, 1.08)
"""80 % interval of a predicted peak as factors (assumed; the allocator and workspaces differ between versions)."""


def predict(scenario: Scenario) -> Prediction:
    """`scenario` as simpar simulates it.

    Raises:
        InputError: the plan cannot be run at all.
    """
    from simpar.simulate import simulate  # late: only here does validation need the whole engine

    return prediction_of(simulate(scenario))


def prediction_of(result: Result) -> Prediction:
    """What validation compares of a simulated step."""
    low, high = MEMORY_INTERVAL
    return Prediction(
        step_time_s=result.step_time_s,
        step_low_s=result.step_interval.low,
        step_high_s=result.step_interval.high,
        allocated_bytes=max(rank.allocated_bytes for rank in result.memory),
        reserved_bytes=max(rank.reserved_bytes for rank in result.memory),
        allocated_per_rank=tuple(rank.allocated_bytes for rank in result.memory),
        reserved_per_rank=tuple(rank.reserved_bytes for rank in result.memory),
        device_bytes=max(rank.device_bytes for rank in result.memory),
        state_bytes=max(sum(dict(rank.static).get(name, 0.0) for name in STATES) for rank in result.memory),
        memory_low=low,
        memory_high=high,
        bubble_fraction=result.bubble_fraction,
        fits=result.fits,
        waterfall=dict(result.waterfall()),
    )
