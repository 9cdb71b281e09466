"""What validation needs of a simulated step, whatever the result object holds beside it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, Literal, Protocol

import numpy as np

from simpar.parallel.keys import Compute, Overlapped
from simpar.parallel.layout import Layout
from simpar.readings import outcome_of
from simpar.result.accounting import account
from simpar.result.memory import RankMemory
from simpar.specs.counts import resolved_dp
from simpar.specs.scenario import Scenario
from simpar.specs.site import Site

if TYPE_CHECKING:
    from simpar.result.result import Result


BubbleOf = Literal["all", "busiest", "one stage"]
"""Whose idling a bubble counts: the mean over ranks; the busiest rank's, of sources that compute it from profiled times; that of
equal stages, of sources whose formula takes one set of times for all, (cost - m(F+B+W)) / cost."""


ASSUMED_ERROR: Final = 0.07
"""Log half-width of a peak's interval where a prediction says none."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """One predicted step.

    Attributes:
        step_time_s, step_low_s, step_high_s: seconds and the 80 % interval.
        allocated_bytes, reserved_bytes: peak over all ranks, as the caching allocator counts.
        allocated_per_rank, reserved_per_rank: by pipeline rank.
        device_bytes: what the process holds on the device in total: reserved, context, communication buffers.
        state_bytes: parameters, gradients and optimizer state at rest, of the fullest pipeline rank.
        first_step_bytes: peak allocated in the job's first step, over all ranks.
        memory_error: half-width of the 80 % interval of a peak, as a logarithm.
        fit_probability: chance that the peak fits.
        bubble_fraction: idle share of the pipeline phase.
        busiest_bubble_fraction: that of `Accounting.busiest_bubble`.
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
    bubble_fraction: float
    busiest_bubble_fraction: float
    fits: bool
    waterfall: Mapping[str, float] = field(default_factory=dict)
    memory_error: float = ASSUMED_ERROR
    fit_probability: float = 1.0
    first_step_bytes: float = 0.0


class Predictor(Protocol):
    """Anything that predicts a scenario; a module-level function, so that workers can import it."""

    def __call__(self, scenario: Scenario) -> Prediction:
        """The prediction of `scenario`."""


STATES: Final = ("parameters", "gradients", "optimizer")


def predict(scenario: Scenario) -> Prediction:
    """`scenario` as simpar simulates it.

    Raises:
        InputError: the plan cannot be run at all.
    """
    from simpar.step import simulate  # late: only here does validation need the whole engine

    return prediction_of(simulate(scenario, detail="stage"))


def predict_at(site: Site, scenario: Scenario) -> Prediction:
    """`scenario` as `predict` has it, at a site with runs of its own."""
    return predict(scenario.model_copy(update={"site": site}))


@dataclass(frozen=True, slots=True)
class AtSite:
    """Predicts as `predict_at`; what the site's runs say of open facts holds too."""

    site: Site

    def __call__(self, scenario: Scenario) -> Prediction:
        return predict_at(self.site, scenario)


def at_batch(found: Prediction, factor: float) -> Prediction:
    """`found` with its times `factor` times as long: those of the same rate over another batch."""
    if factor == 1.0:
        return found
    times = ("step_time_s", "step_low_s", "step_high_s")
    waterfall = {name: seconds * factor for name, seconds in found.waterfall.items()}
    return replace(found, waterfall=waterfall, **{name: getattr(found, name) * factor for name in times})


def first_step_bytes(layout: Layout, found: RankMemory) -> float:
    """Bytes allocated at the peak of a job's first step: torch's optimizers, Apex's and TransformerEngine's make their moments in
    their first update, so that they are not there while the first batch goes through."""
    static, states = dict(found.static), layout.state_bytes
    kept = states.master / states.optimizer if states.optimizer and not layout.states_away else 1.0
    return max(found.allocated_bytes - static.get("optimizer", 0.0) * (1.0 - kept), sum(static.values()))


def prediction_of(result: Result) -> Prediction:
    """What validation compares of a simulated step."""
    site = result.layout.site
    more = 0.0 if site is None else site.peak_memory_bytes  # in `device_bytes` already
    return Prediction(
        step_time_s=result.step_time_s,
        step_low_s=result.step_interval.low,
        step_high_s=result.step_interval.high,
        allocated_bytes=max(rank.allocated_bytes for rank in result.memory) + more,
        reserved_bytes=max(rank.reserved_bytes for rank in result.memory) + more,
        allocated_per_rank=tuple(rank.allocated_bytes + more for rank in result.memory),
        reserved_per_rank=tuple(rank.reserved_bytes + more for rank in result.memory),
        device_bytes=max(rank.device_bytes for rank in result.memory),
        state_bytes=max(sum(dict(rank.static).get(name, 0.0) for name in STATES) for rank in result.memory),
        bubble_fraction=result.bubble_fraction,
        busiest_bubble_fraction=result.accounting.busiest_bubble,
        fits=result.fits,
        waterfall=dict(result.waterfall()),
        memory_error=result.layout.memory_half_width,
        fit_probability=outcome_of(result).chance_to_fit,
        first_step_bytes=max(first_step_bytes(result.layout, rank) for rank in result.memory) + more,
    )


STALL_S: Final = (0.2, 0.8)
"""Seconds per stage pass that a stalled pipeline loses. A fifth of one published sweep with pipelines (80 % of its runs on 256 GPUs
and more) lost about half a second at every blocking send, other runs of the same code none."""
STALLED: Final = 1.5
"""Least measured over predicted time of a stalled run."""


def stage_passes(scenario: Scenario) -> float:
    """Forwards and backwards of a rank's stages in a step."""
    training = scenario.training
    return 2.0 * training.global_batch_size / (training.micro_batch_size * resolved_dp(scenario)) * scenario.plan.virtual_stages


def stalled(found: Prediction, scenario: Scenario, measured_s: float) -> bool:
    """Whether a measured step is that of a pipeline with stalled sends: a state of its cluster that says nothing about others."""
    if scenario.plan.pp == 1:
        return False
    each = (measured_s - found.step_time_s) / stage_passes(scenario)
    return measured_s > STALLED * found.step_time_s and STALL_S[0] <= each <= STALL_S[1]


def bubble_of_equal_stages(scenario: Scenario) -> float:
    """Idle share of a rank's span if every stage took the median stage's times.

    This is what papers compute that profile one set of times T and count (cost - m (T_F + T_B + T_W)) / cost (Qi et al. 2023,
    arXiv 2401.10241, section 5).

    Raises:
        InputError: the plan cannot be run at all.
    """
    from simpar.step import prepare, run  # late, as above

    priced = prepare(scenario, detail="stage")
    seconds, alike = priced.table.seconds.copy(), defaultdict(list)
    for index, key in enumerate(priced.program.price_keys):
        if isinstance(key, Compute | Overlapped):
            alike[key.phase if isinstance(key, Compute) else "pair"].append(index)
    for indices in alike.values():
        seconds[indices] = np.median(seconds[indices])
    timeline = run(replace(priced, table=replace(priced.table, seconds=seconds)), "longest_path")
    return account(priced.program, timeline).busiest_bubble


def bubble_of(found: Prediction, scenario: Scenario, of: BubbleOf) -> float:
    """The predicted idle share that a measured one of this kind is compared with."""
    if of == "one stage":
        return bubble_of_equal_stages(scenario)
    return found.bubble_fraction if of == "all" else found.busiest_bubble_fraction


def memory_of(found: Prediction, kind: str, *, first_rank: bool) -> tuple[float, float, float, tuple[float, float] | None]:
    """(Predicted peak in bytes, ends of its interval, band) that a measured one of this kind is compared with.

    Args:
        kind: allocated, reserved, device or first_step (allocated in the job's first step); another: allocated or reserved, so that
            anything between the two (the band) is right.
        first_rank: the figure is the first pipeline rank's, not the worst's.
    """
    allocated, reserved = found.allocated_bytes, found.reserved_bytes
    if first_rank:
        allocated, reserved = found.allocated_per_rank[0], found.reserved_per_rank[0]
    kinds = {"allocated": allocated, "reserved": reserved, "device": found.device_bytes, "first_step": found.first_step_bytes}
    peak = kinds.get(kind)
    low, high = (allocated, reserved) if peak is None else (peak, peak)
    width = math.exp(found.memory_error)
    return (low + high) / 2, low / width, high * width, (low, high) if peak is None else None
