"""What validation needs of a simulated step, whatever the result object holds beside it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, Literal, Protocol

import numpy as np

from simpar.parallel.keys import Compute, Overlapped
from simpar.program.program import OpKind
from simpar.readings import outcome_of
from simpar.result.folded import shorter_counts, wants_times, with_microbatches
from simpar.specs.framework import framework
from simpar.specs.scenario import Scenario
from simpar.specs.site import Site

if TYPE_CHECKING:
    from simpar.engine.timeline import Timeline
    from simpar.program.program import Program
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
        memory_error: half-width of the 80 % interval of a peak, as a logarithm.
        fit_probability: chance that the peak fits.
        bubble_fraction: idle share of the pipeline phase.
        busiest_bubble_fraction: idle share of the longest span of a rank, from its own first op of that phase to its own last,
            beside the busiest rank's busy time: a schedule whose ranks start and end in steps (ZB-H2) has spans shorter than the
            phase.
        pipeline_s: length of the pipeline phase, first forward to last backward.
        longest_span_s: that longest span.
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
    pipeline_s: float
    longest_span_s: float
    fits: bool
    waterfall: Mapping[str, float] = field(default_factory=dict)
    memory_error: float = ASSUMED_ERROR
    fit_probability: float = 1.0


class Predictor(Protocol):
    """Anything that predicts a scenario; a module-level function, so that workers can import it."""

    def __call__(self, scenario: Scenario) -> Prediction:
        """The prediction of `scenario`."""


STATES: Final = ("parameters", "gradients", "optimizer")


def predict(scenario: Scenario) -> Prediction:
    """`scenario` as simpar simulates it, long steps from two shorter ones.

    A pipeline repeats itself: past its warm-up every further round of micro-batches adds the same time. A step of many
    rounds is therefore simulated twice with few, and extended along the straight line through the two (`extended`); its
    memory is that of the longer one. The tests compare with the whole step.

    Raises:
        InputError: the plan cannot be run at all.
    """
    from simpar.step import settled  # late: only here does validation need the whole engine

    scenario = settled(scenario)
    counts = shorter_counts(scenario)
    if counts is None:
        return predict_whole(scenario)
    few, more, all_of_them = counts
    first, second = (predict_whole(with_microbatches(scenario, count)) for count in (few, more))
    # An automatic schedule is made anew for every length, within a bound on memory that does not depend on it.
    return extended(first, second, (all_of_them - few) / (more - few), memory_grows=not wants_times(scenario))


def predict_at(site: Site, scenario: Scenario) -> Prediction:
    """`scenario` as `predict` has it, at a site with runs of its own."""
    return predict(scenario.model_copy(update={"site": site}))


@dataclass(frozen=True, slots=True)
class AtSite:
    """Predicts as `predict_at`; what the site's runs say of open facts holds too."""

    site: Site

    def __call__(self, scenario: Scenario) -> Prediction:
        return predict_at(self.site, scenario)


def predict_whole(scenario: Scenario) -> Prediction:
    """`scenario` with every micro-batch simulated.

    Raises:
        InputError: the plan cannot be run at all.
    """
    from simpar.step import simulate  # late: only here does validation need the whole engine

    return prediction_of(simulate(scenario, detail="stage"))


def extended(first: Prediction, second: Prediction, times: float, *, memory_grows: bool = True) -> Prediction:
    """The prediction `times` as far along as `second` is from `first`: every time grows along a straight line.

    So does memory, where something is held for every micro-batch (receive buffers, outputs); else both are the same.

    Args:
        memory_grows: not where both differ for other reasons; then it is that of `second`.
    """

    def along(a: float, b: float) -> float:
        return a + (b - a) * times

    step = along(first.step_time_s, second.step_time_s)
    window = along(first.pipeline_s, second.pipeline_s)
    span = along(first.longest_span_s, second.longest_span_s)
    busiest = along(
        (1.0 - first.busiest_bubble_fraction) * first.longest_span_s,
        (1.0 - second.busiest_bubble_fraction) * second.longest_span_s,
    )
    busy = along((1.0 - first.bubble_fraction) * first.pipeline_s, (1.0 - second.bubble_fraction) * second.pipeline_s)

    def along_ranks(a: tuple[float, ...], b: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(max(along(x, y), y) for x, y in zip(a, b, strict=True))

    names = dict.fromkeys([*first.waterfall, *second.waterfall])
    shorter = first if memory_grows else second
    allocated = along_ranks(shorter.allocated_per_rank, second.allocated_per_rank)
    reserved = along_ranks(shorter.reserved_per_rank, second.reserved_per_rank)
    return replace(
        second,
        step_time_s=step,
        step_low_s=along(first.step_low_s, second.step_low_s),
        step_high_s=along(first.step_high_s, second.step_high_s),
        allocated_bytes=max(allocated),
        reserved_bytes=max(reserved),
        allocated_per_rank=allocated,
        reserved_per_rank=reserved,
        device_bytes=max(along(shorter.device_bytes, second.device_bytes), second.device_bytes),
        bubble_fraction=1.0 - busy / window if window else 0.0,
        busiest_bubble_fraction=1.0 - busiest / span if span else 0.0,
        pipeline_s=window,
        longest_span_s=span,
        waterfall={name: along(first.waterfall.get(name, 0.0), second.waterfall.get(name, 0.0)) for name in names},
    )


def at_batch(found: Prediction, factor: float) -> Prediction:
    """`found` with its times `factor` times as long: those of the same rate over another batch."""
    if factor == 1.0:
        return found
    times = ("step_time_s", "step_low_s", "step_high_s", "pipeline_s", "longest_span_s")
    waterfall = {name: seconds * factor for name, seconds in found.waterfall.items()}
    return replace(found, waterfall=waterfall, **{name: getattr(found, name) * factor for name in times})


def prediction_of(result: Result) -> Prediction:
    """What validation compares of a simulated step."""
    site = result.layout.site
    more = 0.0 if site is None else site.peak_memory_bytes  # in `device_bytes` already
    span, busiest = _spans(result.program, result.timeline)
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
        busiest_bubble_fraction=1.0 - busiest / span if span else 0.0,
        longest_span_s=span,
        pipeline_s=result.accounting.pipeline_s,
        fits=result.fits,
        waterfall=dict(result.waterfall()),
        memory_error=result.layout.memory_half_width,
        fit_probability=outcome_of(result).chance_to_fit,
    )


STALL_S: Final = (0.2, 0.8)
"""Seconds per stage pass that a stalled pipeline loses. A fifth of one published sweep with pipelines (80 % of its runs on 256 GPUs
and more) lost about half a second at every blocking send, other runs of the same code none."""
STALLED: Final = 1.5
"""Least measured over predicted time of a stalled run."""


def stalled(found: Prediction, scenario: Scenario, measured_s: float) -> bool:
    """Whether a measured step is that of a pipeline with stalled sends: a state of its cluster that says nothing about others."""
    plan, training = scenario.plan, scenario.training
    if plan.pp == 1 or not framework(scenario.framework, scenario.framework_version).pipeline.p2p_blocking:
        return False
    dp = plan.dp or scenario.world_size // (plan.tp * plan.cp * plan.pp)
    passes = 2.0 * training.global_batch_size / (training.micro_batch_size * dp) * plan.virtual_stages
    each = (measured_s - found.step_time_s) / passes
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
    span, busy = _spans(priced.program, timeline)
    return 1.0 - busy / span if span else 0.0


def bubble_of(found: Prediction, scenario: Scenario, of: BubbleOf) -> float:
    """The predicted idle share that a measured one of this kind is compared with."""
    if of == "one stage":
        return bubble_of_equal_stages(scenario)
    return found.bubble_fraction if of == "all" else found.busiest_bubble_fraction


def memory_of(found: Prediction, kind: str, *, first_rank: bool) -> tuple[float, float, float, tuple[float, float] | None]:
    """(Predicted peak in bytes, ends of its interval, band) that a measured one of this kind is compared with.

    Args:
        kind: allocated, reserved or device; another: allocated or reserved, so that anything between the two (the band) is right.
        first_rank: the figure is the first pipeline rank's, not the worst's.
    """
    allocated, reserved = found.allocated_bytes, found.reserved_bytes
    if first_rank:
        allocated, reserved = found.allocated_per_rank[0], found.reserved_per_rank[0]
    peak = {"allocated": allocated, "reserved": reserved, "device": found.device_bytes}.get(kind)
    low, high = (allocated, reserved) if peak is None else (peak, peak)
    width = math.exp(found.memory_error)
    return (low + high) / 2, low / width, high * width, (low, high) if peak is None else None


def _spans(program: Program, timeline: Timeline) -> tuple[float, float]:
    """The longest span of one rank in the pipeline phase, and the busy seconds of the busiest rank."""
    kinds = (OpKind.FORWARD, OpKind.BACKWARD, OpKind.INPUT_GRADIENT, OpKind.WEIGHT_GRADIENT, OpKind.OVERLAPPED)
    phase = np.isin(program.kind, [int(kind) for kind in kinds])
    if not phase.any():
        return 0.0, 0.0
    start, finish, role = timeline.start[phase], timeline.finish[phase], program.role[phase]
    busy = np.bincount(role, weights=finish - start)
    first, last = np.full(busy.size, np.inf), np.zeros(busy.size)
    np.minimum.at(first, role, start)
    np.maximum.at(last, role, finish)
    return float((last - first).max()), float(busy.max())
