"""Interleaved zero bubble, ZB-H1 and ZB-H2: 1F1B whose weight gradients fill the bubble.

A rank runs input gradients as early as 1F1B runs backwards, and holds back its weight gradients by as many
backwards as there are ranks before it. The delay costs memory that 1F1B leaves free on the later ranks: every
rank then holds what 1F1B's first one does.

ZB-H1, also called ZB1P, is that with one stage per rank. ZB-H2 has no bubble inside the pipeline, for about twice
1F1B's memory: rank r warms up with 2(p - r) - 1 forwards, as many as fit into the time until the first gradient
reaches it. To end without a gap as well, the last ranks must have given their gradients away early: rank r holds
back 2r weight gradients, which it runs at the end. With F = I = W the ranks' rows form a parallelogram without a hole.
"""

from __future__ import annotations

from typing import TypeVar

from simpar.schedules.action import Action, Phase
from simpar.schedules.family import Order, ScheduleFamily
from simpar.schedules.interleaved import Row, equal_rounds, looped, round_size
from simpar.schedules.schedule import Schedule

T = TypeVar("T")


def delayed_weights(forwards: list[T], input_gradients: list[T], weights: list[T], warmup: int, delay: int) -> tuple[T, ...]:
    """`warmup` forwards (or all), then F and I in turn, each weight gradient `delay` input gradients after its own."""
    warmup = min(warmup, len(forwards))
    row = forwards[:warmup]
    for position, gradient in enumerate(input_gradients):
        if position + warmup < len(forwards):
            row.append(forwards[position + warmup])
        row.append(gradient)
        if position >= delay:
            row.append(weights[position - delay])
    return (*row, *weights[max(0, len(weights) - delay) :])


def _delayed(name: str, apart: int = 1) -> Order:
    """The first of two neighbours has `apart` forwards more before its first input gradient, and delays its weight gradients by so
    many less."""

    def order(num_ranks: int, num_microbatches: int, virtual_stages: int) -> Schedule:
        group = round_size(num_ranks, num_microbatches)

        def row(rank: int, forwards: list[Action], gradients: list[Action]) -> Row:
            warmup = apart * (num_ranks - rank - 1) + (virtual_stages - 1) * group
            weights = [Action(action.stage, Phase.W, action.microbatch) for action in gradients]
            return delayed_weights(forwards, gradients, weights, warmup, delay=apart * rank)

        return looped(name, (num_ranks, num_microbatches, virtual_stages), group, Phase.I, row)

    return order


INTERLEAVED_ZB = ScheduleFamily(
    name="interleaved_zb",
    summary="interleaved 1F1B with split backwards: bubble (p-1)(F+B-2W)/v at 1F1B's memory on every rank",
    source="Qi et al. 2023, arXiv 2401.10241; torch ScheduleInterleavedZeroBubble",
    order=_delayed("interleaved_zb"),
    rules=equal_rounds,
    splits_backward=True,
    torch_class="ScheduleInterleavedZeroBubble",
)
ZB_H1 = ScheduleFamily(
    name="zb-h1",
    summary="1F1B with split backwards: bubble (p-1)(F+B-2W), p microbatches held on every rank",
    source="Qi et al. 2023, arXiv 2401.10241, section 2.1; torch ScheduleInterleavedZeroBubble with one stage",
    order=_delayed("zb-h1"),
    virtual_stages=1,
    splits_backward=True,
    torch_class="ScheduleInterleavedZeroBubble",
)
ZB_H2 = ScheduleFamily(
    name="zb-h2",
    summary="split backwards and a longer warm-up: no bubble if F = I = W; 2p - 1 microbatches on every rank",
    source="Qi et al. 2023, arXiv 2401.10241, section 2.2; the order is derived here",
    order=_delayed("zb-h2", apart=2),
    virtual_stages=1,
    splits_backward=True,
)
