"""A search cut into parts that any process can do: what is wanted, one part's work, its result as plain data."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, inf
from statistics import NormalDist

import numpy as np

from simpar.engine.longest_path import longest_path_batch
from simpar.model.kind import kind_of, site_of
from simpar.readings import TENTH, fit_probability
from simpar.result.interval import HALF_WIDTH, together
from simpar.searching.account import Account
from simpar.searching.branch import Branch
from simpar.searching.choice import Choice
from simpar.searching.evaluation import Evaluation
from simpar.searching.incumbents import NO_LIMITS, Followers, Incumbents, Limits, Scored
from simpar.searching.mixed_branch import MixedBranch
from simpar.searching.mixed_pricing import MixedEvaluation, MixedPricing
from simpar.searching.mixed_space import MixedSpace
from simpar.searching.nodes import Node
from simpar.searching.objective import MEMORY, OBJECTIVES, SIMPLE, Constraint, Measure
from simpar.searching.pricing import Pricing
from simpar.searching.space import Space
from simpar.specs.architecture import has_experts
from simpar.specs.calibration import RunCalibration, calibration_on
from simpar.specs.framework import framework

AnyPricing = Pricing | MixedPricing
AnyBranch = Branch | MixedBranch

GLIMPSES = 400
"""Designs of a part that are kept for pages."""


@dataclass(frozen=True)
class Wish:
    """What is wanted of a space.

    Attributes:
        objective: a name in OBJECTIVES.
        keep: layouts to return.
        constraints: limits.
        robust: rank, and hold against limits, the upper end of the step time's 80 % interval (its 90th percentile).
        front: two or three metrics; then the answer is every layout that no other beats in them.
        within: of a front: layouts this close, relatively, are not told apart.
        usd_per_gpu_hour, pue: for cost and energy.
        pool: layouts to find at least, where they are simulated again with effects.
        fold: return the best layout of each design (see `designs`) instead of the best layouts.
        reach: layouts that take more than this times the best are not looked for.
        tolerance: of a design that is known other settings are only looked at where they may gain more than this, relatively.
        fit_probability: chance that a layout must have to fit the memory; none = the predicted bytes must fit.
    """

    objective: str = "step_time"
    keep: int = 10
    constraints: tuple[Constraint, ...] = ()
    robust: bool = False
    front: tuple[str, ...] = ()
    within: float = 0.01
    usd_per_gpu_hour: float = 2.0
    pue: float = 1.25
    pool: int = 0
    fold: bool = False
    reach: float = inf
    tolerance: float = 0.0
    fit_probability: float | None = None

    @property
    def metric(self) -> str:
        """The metric that the objective ranks by."""
        return OBJECTIVES[self.objective]

    @property
    def by_memory(self) -> bool:
        """Whether memory alone decides within one cluster: everything else a simple metric hangs on is the step time."""
        named = self.front or (self.metric,)
        return any(n in MEMORY for n in named) and all(n in MEMORY or n.startswith("num_") for n in named)

    @property
    def both(self) -> bool:
        """Whether time and memory both decide: the search keeps a front of the two."""
        return any(n in MEMORY for n in self.front) and not self.by_memory


@dataclass(frozen=True)
class PartResult:
    """What one part found.

    Attributes:
        part: its number.
        best: simulated layouts that were among its best.
        account: of its layouts.
    """

    part: int
    best: tuple[Scored, ...]
    account: Account


def parts_of(branch: AnyBranch, count: int) -> list[list[Node]]:
    """The nodes of a space in `count` parts; nodes that share prices stay together."""
    experts = branch.pricing.has_experts

    def family(node: Node) -> tuple[int, ...]:
        group, batch, _ = node
        return (group.tp, group.cp, batch) if experts else (group.tp, group.cp, group.pp, batch)

    families: dict[tuple[int, ...], list[Node]] = {}
    for node in branch.space.nodes():
        families.setdefault(family(node), []).append(node)
    # Neighbours cost alike: dealt out in turn, every part gets its share of the hard ones.
    ordered = [families[key] for key in sorted(families)]
    count = min(count, max(len(ordered), 1))
    return [[node for nodes in ordered[k::count] for node in nodes] for k in range(count)]


def measure_of(space: Space, wish: Wish, pricing: AnyPricing) -> Measure:
    """The metrics of a space's cluster."""
    flops = pricing.model_flops if space.groups else 0.0
    return Measure.of(space.template, space.hardware, flops, wish.usd_per_gpu_hour, wish.pue)


def widest(space: Space) -> float:
    """How much of every step time its 80 % interval reaches up at least, as a factor.

    The calibration's own error on unseen runs is one of the parts that `simpar.result.interpret` adds in quadrature, and it is
    the same share of every step on one framework and GPU: step time x this factor never exceeds the interval's upper end.
    """
    unseen, factor = unseen_of(space)
    return float((1.0 + unseen) ** factor)


def unseen_of(space: Space) -> tuple[float, float]:
    """(What the calibration alone leaves open, as a share of every step time; the factor on the upper half of the interval)."""
    template = space.template
    found = max(_calibrations(space), key=lambda known: known.expected_error)
    site = site_of(template)
    if site is not None:
        found = site.applied(found, kind_of(template))
    return HALF_WIDTH * found.expected_error, found.interval_up


def examiner(
    space: Space, wish: Wish, measure: Measure, evaluation: Evaluation | MixedEvaluation
) -> Callable[[Choice, float, float], float | None] | None:
    """How a simulated layout is valued where time and memory alone do not say; None where they do.

    With `robust` the value is the upper end of the interval over `widest`: in the unit of a step time, never below it (so that
    bounds of the step time bound the value), and in the order of the upper ends.
    """
    others = [c for c in wish.constraints if c.metric not in SIMPLE]
    simple = [c for c in wish.constraints if c.metric in SIMPLE]
    if not (others or simple or wish.robust):
        return None
    factor = widest(space)

    def examine(choice: Choice, time_s: float, device_bytes: float) -> float | None:
        value = device_bytes + min(time_s, 1e6) * 1e-9 if wish.by_memory else time_s
        if not wish.robust and not all(c.holds(measure.metrics(time_s, device_bytes)) for c in simple):
            return None
        if others or wish.robust:
            result = evaluation.result(choice)
            found = result.to_json()
            if not all(c.holds(found) for c in others):
                return None
            if wish.robust:
                high = max(result.step_interval.high, time_s * factor)
                if not all(c.holds(measure.metrics(high, device_bytes)) for c in simple):
                    return None
                value = high / factor
        return value

    return examine


def largest_share(space: Space, fit_probability: float) -> float:
    """Share of the memory that a predicted peak may fill at most, so that it fits with this chance."""
    return exp(-NormalDist().inv_cdf(fit_probability) * _memory_half_width(space) / TENTH)


def _memory_half_width(space: Space) -> float:
    experts = has_experts(space.template.model)
    return max(known.memory_half_width(experts=experts) for known in _calibrations(space))


def _calibrations(space: Space) -> list[RunCalibration]:
    """What is known of runs of the framework on each kind of machine."""
    spec = framework(space.template.framework, space.template.framework_version)
    return [calibration_on(spec, machine) for machine in space.machines]


def fitting(space: Space, wanted: float | None, most_bytes: float) -> Callable[[float, float], bool]:
    """Whether a device that needs so many bytes, some of them cached without a tensor, fits with the chance that is wanted.

    Args:
        wanted: chance to fit; none = the bytes decide.
        most_bytes: that may be needed in any case.
    """
    if wanted is None:
        return lambda need, _: need <= most_bytes
    memory, width = space.hardware.gpu.memory.value, _memory_half_width(space)
    least = wanted * (1.0 - 1e-9)
    return lambda need, cached: need <= most_bytes and fit_probability(need, cached, memory, width) >= least


def branch_for(
    space: Space,
    wish: Wish,
    pricing: AnyPricing | None = None,
    shared: Callable[[], Limits] = lambda: NO_LIMITS,
    followers: Followers = Followers(),
) -> AnyBranch:
    """A branch and bound that looks for what is wanted."""
    pricing = pricing or pricing_for(space)
    measure = measure_of(space, wish, pricing)
    longest, headroom = measure.limits(wish.constraints)
    fits = fitting(space, wish.fit_probability, measure.memory_bytes - headroom)
    if wish.fit_probability is not None:
        headroom = max(headroom, measure.memory_bytes * (1.0 - largest_share(space, wish.fit_probability)))
    named = not (wish.front or wish.by_memory)
    incumbents = Incumbents(
        max(wish.keep, wish.pool), largest_s=longest / (widest(space) if wish.robust else 1.0), by_memory=wish.by_memory,
        front=wish.both, within=wish.within if wish.both else 0.0, shared=shared, fold=wish.fold and not wish.front,
        reach=wish.reach if named else inf, tolerance=wish.tolerance if named else 0.0,
    )  # fmt: skip
    if isinstance(space, MixedSpace):
        assert isinstance(pricing, MixedPricing)
        share = 1.0 if wish.fit_probability is None else largest_share(space, wish.fit_probability)
        examine = examiner(space, wish, measure, pricing.evaluation)
        return MixedBranch(
            space,
            pricing=pricing,
            incumbents=incumbents,
            examine=examine,
            fit_probability=wish.fit_probability,
            share=share,
            followers=followers,
        )
    assert isinstance(pricing, Pricing)
    branch = Branch(space, pricing=pricing, incumbents=incumbents, least_headroom=headroom, fits=fits, followers=followers)
    branch.examine = examiner(space, wish, measure, branch.evaluation)
    if wish.robust:
        factor = widest(space)
        intervals = Intervals(branch.evaluation, *unseen_of(space))
        branch.tighten = lambda choice, time_s: intervals.high(choice, time_s) / factor
    return branch


class Intervals:
    """Upper ends of intervals.

    Args:
        unseen: half-width that the calibration alone gives, as a share of the step time.
        factor: on the upper half, in logarithms (specs/calibration.py, `interval_up`).
    """

    def __init__(self, evaluation: Evaluation, unseen: float, factor: float) -> None:
        self.evaluation, self.unseen, self.factor = evaluation, unseen, factor

    def high(self, choice: Choice, time_s: float) -> float:
        """The upper end for a layout that takes `time_s`, or a lower bound of it where that is one of its time.

        Each category of seconds goes to its own upper end, all else staying; the changes of the longest path's logarithm, without
        interference, add up in quadrature with what the calibration leaves open.
        """
        step, seconds = self.evaluation.raised(choice)
        spans = longest_path_batch(step.program, seconds)
        return float(time_s * together(np.maximum(spans[1:], spans[0]) / spans[0], self.unseen) ** self.factor)


class _Memo(threading.local):
    """The last space's prices. A worker may have several threads, and memos are not made for sharing."""

    key: object = None
    pricing: AnyPricing | None = None


_MEMO = _Memo()


def pricing_for(space: Space) -> AnyPricing:
    """New prices of a space."""
    return MixedPricing(space) if isinstance(space, MixedSpace) else Pricing(space)


def pricing_of(space: Space) -> AnyPricing:
    """Prices of a space, kept from one part to the next."""
    key = (type(space), space.template.model_dump_json(), repr(sorted(space.restrictions.items())), space.framework)
    if _MEMO.pricing is None or _MEMO.key != key:
        _MEMO.key, _MEMO.pricing = key, pricing_for(space)
    return _MEMO.pricing


def survey_part(space: Space, wish: Wish, nodes: Sequence[Node]) -> float:
    """What nothing in a part ranks before, as far as is seen at a glance."""
    return branch_for(space, wish, pricing_of(space)).survey(nodes)


def solve_part(
    space: Space,
    wish: Wish,
    part: int,
    nodes: Sequence[Node],
    known: Sequence[Scored] = (),
    shared: Callable[[], Limits] = lambda: NO_LIMITS,
    followers: Followers = Followers(),
) -> PartResult:
    """Search one part, knowing the best found elsewhere.

    The same part under the same knowledge gives the same result in any process; more knowledge only leaves out what cannot win.
    """
    branch = branch_for(space, wish, pricing_of(space), shared, followers)
    for scored in known:
        branch.incumbents.add(scored)
    branch.run(nodes)
    account = branch.account
    account.skipped = branch.incumbents.skipped
    account.glimpses = sorted(branch.glimpses.values(), key=lambda g: g.bound_s)[:GLIMPSES]
    return PartResult(part, tuple(branch.best), account)


__all__ = [
    "AnyBranch", "AnyPricing", "Intervals", "PartResult", "Wish", "branch_for", "fitting", "largest_share", "measure_of",
    "parts_of", "pricing_of", "solve_part", "survey_part", "widest",
]  # fmt: skip
