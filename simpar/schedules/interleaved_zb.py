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

from simpar.schedules.action import Action, Phase
from simpar.schedules.family import Order, ScheduleFamily
from simpar.schedules.interleaved import equal_rounds, round_size, visits
from simpar.schedules.schedule import Schedule, loop_placement


def delayed_weights(forwards: list[Action], input_gradients: list[Action], warmup: int, delay: int) -> tuple[Action, ...]:
    """`warmup` forwards, then F and I in turn, each weight gradient `delay` input gradients after its own."""
    row = forwards[:warmup]
    weights = [Action(action.stage, Phase.W, action.microbatch) for action in input_gradients]
    for position, gradient in enumerate(input_gradients):
        if position + warmup < len(forwards):
            row.append(forwards[position + warmup])
        row.append(gradient)
        if position >= delay:
            row.append(weights[position - delay])
    return (*row, *weights[max(0, len(weights) - delay) :])


def _one_stage_each(name: str, apart: int) -> Order:
    """One stage per rank; the first of two neighbours has `apart` forwards more before its first input gradient, and delays its
    weight gradients by so many less."""

    def order(num_ranks: int, num_microbatches: int, virtual_stages: int) -> Schedule:
        rows = []
        for rank in range(num_ranks):
            forwards, gradients = ([Action(rank, phase, m) for m in range(num_microbatches)] for phase in (Phase.F, Phase.I))
            warmup = min(apart * (num_ranks - rank - 1), num_microbatches)
            rows.append(delayed_weights(forwards, gradients, warmup, delay=apart * rank))
        return Schedule(name, num_ranks, num_microbatches, loop_placement(num_ranks, virtual_stages), tuple(rows))

    return order


def _order(num_ranks: int, num_microbatches: int, virtual_stages: int) -> Schedule:
    group = round_size(num_ranks, num_microbatches)
    visited = visits(num_microbatches, virtual_stages, group)
    rows = []
    for rank in range(num_ranks):
        warmup = num_ranks - rank - 1 + (virtual_stages - 1) * group
        forwards = [Action(local * num_ranks + rank, Phase.F, m) for local, m in visited]
        gradients = [Action((virtual_stages - 1 - local) * num_ranks + rank, Phase.I, m) for local, m in visited]
        rows.append(delayed_weights(forwards, gradients, min(warmup, len(visited)), delay=rank))
    placement = loop_placement(num_ranks, virtual_stages)
    return Schedule("interleaved_zb", num_ranks, num_microbatches, placement, tuple(rows))


INTERLEAVED_ZB = ScheduleFamily(
    name="interleaved_zb",
    summary="interleaved 1F1B with split backwards: bubble (p-1)(F+B-2W)/v at 1F1B's memory on every rank",
    source="Qi et al. 2023, arXiv 2401.10241; torch ScheduleInterleavedZeroBubble",
    order=_order,
    rules=equal_rounds,
    splits_backward=True,
    torch_class="ScheduleInterleavedZeroBubble",
)
ZB_H1 = ScheduleFamily(
    name="zb-h1",
    summary="1F1B with split backwards: bubble (p-1)(F+B-2W), p microbatches held on every rank",
    source="Qi et al. 2023, arXiv 2401.10241, section 2.1; torch ScheduleInterleavedZeroBubble with one stage",
    order=_one_stage_each("zb-h1", apart=1),
    virtual_stages=1,
    splits_backward=True,
    torch_class="ScheduleInterleavedZeroBubble",
)
ZB_H2 = ScheduleFamily(
    name="zb-h2",
    summary="split backwards and a longer warm-up: no bubble if F = I = W; 2p - 1 microbatches on every rank",
    source="Qi et al. 2023, arXiv 2401.10241, section 2.2; the order is derived here",
    order=_one_stage_each("zb-h2", apart=2),
    virtual_stages=1,
    splits_backward=True,
)
