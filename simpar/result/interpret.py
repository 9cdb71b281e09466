"""What a timeline of a priced program means: a Result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from simpar.costs.block_price import worst_each
from simpar.costs.key_price import KeyPrice
from simpar.engine.effects import engine_effects
from simpar.engine.longest_path import longest_path_batch
from simpar.engine.timeline import Timeline
from simpar.model.kind import group_of
from simpar.parallel.layout import Layout, recomputed_flops
from simpar.program.program import FloatArray, PriceTable, Program
from simpar.program.waits import optimizer_waits
from simpar.result.accounting import account, bubble_fraction, communication_seconds, compute_counts
from simpar.result.allocations import Known
from simpar.result.interval import Interval, Moved
from simpar.result.memory import memory_over_time
from simpar.result.result import Result, mean_breakdown
from simpar.schedules import Schedule
from simpar.specs.calibration import measured_here
from simpar.specs.notes import scenario_notes
from simpar.units import format_seconds


@dataclass(frozen=True, slots=True)
class Priced:
    """A program with its prices, ready for an engine.

    Attributes:
        layout, schedule, program: what runs.
        prices: one per price key; `table` has their seconds and interference as arrays.
        held: pipeline rank -> model stages.
        expanded: one role per rank instead of one per pipeline rank.
    """

    layout: Layout
    schedule: Schedule
    program: Program
    prices: tuple[KeyPrice, ...]
    table: PriceTable
    held: dict[int, list[int]]
    expanded: bool = False

    @property
    def effects(self) -> dict[str, Any]:
        """What its scenario asks for, as fields of `discrete_event.Effects`."""
        return engine_effects(self.layout.scenario, np.array([price.latency_s for price in self.prices]))


def interpret(priced: Priced, timeline: Timeline, known: Known | None = None) -> Result:
    """What a timeline means; `known`: see `Replays`."""
    layout, program = priced.layout, priced.program
    names = sorted({name for price in priced.prices for name, _ in price.terms})
    column = {name: i for i, name in enumerate(names)}
    terms = np.zeros((len(priced.prices), len(names)))
    for row, price in enumerate(priced.prices):
        for name, amount in price.terms:
            terms[row, column[name]] += amount
    accounting = account(program, timeline, waits=optimizer_waits(layout, priced.schedule))
    seconds = priced.table.seconds[program.price]
    breakdown = mean_breakdown(terms, names, program, accounting, seconds, timeline.seconds)
    moved = _moved(priced, names)
    interval = moved.interval(layout, accounting.makespan, breakdown)
    roles = {rank: rank for rank in priced.held}
    if priced.expanded:
        roles = {rank: layout.mesh.rank(pp=rank) for rank in priced.held}
    return Result(
        layout=layout, program=program, timeline=timeline, accounting=accounting,
        memory=memory_over_time(layout, program, timeline, priced.held, roles, known),
        breakdown=breakdown, bubble_fraction=bubble_fraction(accounting), moved=moved, step_interval=interval,
        provenance=_provenance(priced), communication_s=_communication(priced, timeline),
        schedule_name=priced.schedule.name, hardware_flops=layout.model_flops + recomputed_flops(layout),
        notes=(*scenario_notes(layout.scenario), *what_published_runs_add(layout),
               *what_the_site_adds(layout, breakdown, interval, accounting.makespan)),
    )  # fmt: skip


def slowest_replica(kinds: Sequence[Result]) -> Result:
    """The step of a job whose parts hold replicas of unequal speed: that of the slowest, for which the others wait.

    Args:
        kinds: the step of each part's replicas.
    """
    slowest = max(kinds, key=lambda kind: kind.step_time_s)
    notes = []
    for kind in kinds:
        layout = kind.layout
        host, waits = layout.hosts[layout.replica], slowest.step_time_s - kind.step_time_s
        wait = f"wait {format_seconds(waits)} a step" if kind is not slowest else "are waited for"
        full = "" if kind.fits else ", and do not fit in its memory"
        notes.append(
            f"{len(host.replicas)} replica{'s' * (len(host.replicas) > 1)} on {host.hardware.gpu.name}: "
            f"{layout.num_microbatches} micro-batches each, {wait}{full}"
        )
    others = tuple(kind for kind in kinds if kind is not slowest)
    return replace(slowest, others=others, notes=(*slowest.notes, *notes))


def what_published_runs_add(layout: Layout) -> tuple[str, ...]:
    """On a calibrated machine, the constants that are not used there; elsewhere they are in the prices, and nothing is said."""
    found = layout.published_calibration
    if not layout.hardware.calibrated or found == measured_here(found):
        return ()
    parts = ("compute", "memory", "communication")
    factors = ", ".join(f"{name} x {getattr(found, name):.3g}" for name in parts)
    more = f"{factors}, {1e3 * found.step_s:.3g} ms a step"
    return (f"calibrated machine: nothing fitted on published clusters' runs is used; what those add: {more}",)


def _moved(priced: Priced, names: list[str]) -> Moved:
    """The step with each category of prices at both ends of its interval."""
    base = priced.table.seconds
    variants: list[FloatArray] = [base]
    for name in names:
        for sign in (1, -1):
            moved = base.copy()
            for row, price in enumerate(priced.prices):
                for category, up, down in price.spread:
                    if category == name:
                        moved[row] += up if sign > 0 else -down
            variants.append(np.maximum(moved, 0.0))
    return Moved(tuple(names), longest_path_batch(priced.program, np.array(variants)))


def what_the_site_adds(layout: Layout, breakdown: dict[str, float], interval: Interval, makespan: float) -> tuple[str, ...]:
    """Which site was used, and what it changed."""
    site = layout.site
    if site is None:
        other = layout.scenario.learned
        if other is None:
            return ()
        return (f"site {other.name!r} is not used: its runs were {other.group}, this is {group_of(layout.scenario)}",)
    own = site.of_kind(layout.kind)
    factors = ", ".join(f"{name} x {value * own:.3g}" for name, value in site.factors.items())
    shares = site.shares(breakdown, makespan)
    without = makespan * (1.0 - sum(shares[name] * (1.0 - 1.0 / (value * own)) for name, value in site.factors.items()))
    more = f", {site.peak_memory_bytes / 2**30:+.3g} GiB on every device" if site.peak_memory_bytes else ""
    return (
        f"site {site.name!r}, learned from {len(site.runs)} of its runs: {factors}{more}; without it the step would take about "
        f"{format_seconds(without)} instead of {format_seconds(makespan)} "
        f"(80 %: {format_seconds(interval.low)} to {format_seconds(interval.high)})",
    )


def _provenance(priced: Priced) -> dict[str, str]:
    """Category -> the worst provenance among the prices that contribute to it."""
    kinds = worst_each(kind for price in priced.prices for kind in price.provenance)
    return {name: str(kind.value) for name, kind in sorted(kinds)}


def _communication(priced: Priced, timeline: Timeline) -> dict[str, float]:
    """Busy seconds by dimension, hidden or exposed, mean over roles: transfers of their own, and those inside compute ops."""
    found = communication_seconds(priced.program, timeline)
    found.pop("host", None)
    for count, price in zip(compute_counts(priced.program).tolist(), priced.prices, strict=True):
        for name, seconds in price.communication_s:
            found[name] = found.get(name, 0.0) + count * seconds
    return found
