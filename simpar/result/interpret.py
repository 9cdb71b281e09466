"""What a timeline of a priced program means: a Result."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from simpar.costs.block_price import worst
from simpar.costs.key_price import KeyPrice
from simpar.costs.price import Provenance
from simpar.engine.longest_path import longest_path_batch
from simpar.engine.timeline import Timeline
from simpar.parallel.layout import Layout, recomputed_flops
from simpar.program.lower import optimizer_waits
from simpar.program.program import FloatArray, PriceTable, Program
from simpar.result.accounting import account, bubble_fraction
from simpar.result.memory import memory_over_time
from simpar.result.result import Interval, Result, mean_breakdown
from simpar.schedules import Schedule

HALF_WIDTH = 1.28 / 0.674
"""80 % half-width over the median absolute error of a normal distribution."""


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


def interpret(priced: Priced, timeline: Timeline) -> Result:
    """What a timeline means."""
    layout, program = priced.layout, priced.program
    names = sorted({name for price in priced.prices for name, _ in price.terms})
    column = {name: i for i, name in enumerate(names)}
    terms = np.zeros((len(priced.prices), len(names)))
    for row, price in enumerate(priced.prices):
        for name, amount in price.terms:
            terms[row, column[name]] += amount
    accounting = account(program, timeline, waits=optimizer_waits(layout, priced.schedule))
    seconds = priced.table.seconds[program.price]
    roles = {rank: rank for rank in priced.held}
    if priced.expanded:
        roles = {rank: layout.mesh.rank(pp=rank) for rank in priced.held}
    return Result(
        layout=layout, program=program, timeline=timeline, accounting=accounting,
        memory=memory_over_time(layout, program, timeline, priced.held, roles),
        breakdown=mean_breakdown(terms, names, program, accounting, seconds, timeline.seconds),
        bubble_fraction=bubble_fraction(accounting), step_interval=_interval(priced, accounting.makespan, names),
        provenance=_provenance(priced), communication_s=_communication(priced),
        schedule_name=priced.schedule.name, hardware_flops=layout.model_flops + recomputed_flops(layout),
    )  # fmt: skip


def _interval(priced: Priced, makespan: float, names: list[str]) -> Interval:
    """Push each category to both ends of its interval, replay, and add the changes in quadrature."""
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
    spans = longest_path_batch(priced.program, np.array(variants))
    up = spans[1::2] - spans[0]
    down = spans[0] - spans[2::2]
    high = makespan + float(np.sqrt((np.maximum(up, 0) ** 2).sum()))
    low = makespan - float(np.sqrt((np.maximum(down, 0) ** 2).sum()))
    # What the parts' own intervals do not hold: how far the calibration was off on runs that it had not seen.
    unseen = HALF_WIDTH * priced.layout.calibration.expected_error * makespan
    high, low = makespan + float(np.hypot(high - makespan, unseen)), makespan - float(np.hypot(makespan - low, unseen))
    widths = [(n, float(max(u, d))) for n, u, d in zip(names, up, down, strict=True)]
    widths = sorted([*widths, ("calibration", unseen)], key=lambda x: -x[1])
    return Interval(low, high, tuple(w for w in widths[:5] if w[1] > 0))


def _provenance(priced: Priced) -> dict[str, str]:
    """Category -> the worst provenance among the prices that contribute to it."""
    found: dict[str, list[Provenance]] = {}
    for price in priced.prices:
        for name, _ in price.terms:
            found.setdefault(name, []).append(price.provenance)
    return {name: str(worst(kinds).value) for name, kinds in sorted(found.items())}


def _communication(priced: Priced) -> dict[str, float]:
    """Busy seconds by dimension, hidden or exposed, mean over pipeline ranks."""
    counts = np.bincount(priced.program.price, minlength=len(priced.prices))
    found: dict[str, float] = {}
    for count, price in zip(counts, priced.prices, strict=True):
        pairs = price.communication_s or tuple(t for t in price.terms if t[0] in ("dp", "pp"))
        for name, seconds in pairs:
            found[name] = found.get(name, 0.0) + float(count) * seconds / max(len(priced.held), 1)
    return found
