"""Automatic zero-bubble schedules: an order sought for given stage times, send time and memory limit.

ZB-1p and ZB-2p are the same search under once and twice 1F1B's memory. Times only choose the order: what comes out is an
ordinary `Schedule`. Without times it assumes F = I = W, free sends and that a weight gradient needs the whole activation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from itertools import count
from math import inf, isfinite

from simpar.errors import Violation
from simpar.schedules.action import Action, Phase
from simpar.schedules.automatic_board import Board, StageTimes
from simpar.schedules.automatic_wave import play, waves
from simpar.schedules.family import ScheduleFamily
from simpar.schedules.interleaved_zb import delayed_weights
from simpar.schedules.schedule import Schedule, loop_placement

Amount = float | Sequence[float]
"""One value for every rank, or one per rank."""

_SHORTEST = 1e-300
"""Any positive duration."""

_OPTIONS = ("f", "i", "w", "send", "memory_limit", "kept", "size", "flush")


def _each(value: Amount, num_ranks: int) -> tuple[float, ...]:
    return (float(value),) * num_ranks if isinstance(value, int | float) else tuple(float(v) for v in value)


def _stage_times(num_ranks: int, limit: float, **options: object) -> StageTimes:
    def each(name: str, default: float) -> tuple[float, ...]:
        return _each(options.get(name, default), num_ranks)  # type: ignore[arg-type]

    send = float(options.get("send", 0.0))  # type: ignore[arg-type]
    # As in the authors' runtime the first two ranks' activations are the unit. A rank with larger ones (the head's logits) holds
    # fewer; one with smaller ones does not hold more, as their published bubbles show.
    sizes = each("size", 1.0)
    typical = max(sizes[:2])
    limits = tuple(max(most * min(typical / size, 1.0), 1.0) for most, size in zip(each("memory_limit", limit), sizes, strict=True))
    return StageTimes(each("f", 1.0), each("i", 1.0), each("w", 1.0), send, limits, each("kept", 1.0))


def _handcrafted(num_ranks: int, num_microbatches: int) -> Iterator[list[str]]:
    """ZB-H1, ZB-H2 and 1F1B with each weight gradient right after its input gradient, as phases per rank."""
    forwards, gradients, weights = ([phase] * num_microbatches for phase in "FIW")
    for ahead, delay in ((1, 1), (2, 2), (1, 0)):
        rows = (delayed_weights(forwards, gradients, weights, ahead * (num_ranks - r - 1), delay * r) for r in range(num_ranks))
        yield list(map("".join, rows))


def _schedule(name: str, num_microbatches: int, phases: Sequence[str]) -> Schedule:
    """The schedule with these phases per rank, each rank's one stage taking the microbatches in turn."""
    rows = []
    for rank, row in enumerate(phases):
        turn = {phase.value: map(partial(Action, rank, phase), count()) for phase in (Phase.F, Phase.I, Phase.W)}
        rows.append(tuple([next(turn[phase]) for phase in row]))
    return Schedule(name, len(rows), num_microbatches, loop_placement(len(rows), 1), tuple(rows))


@lru_cache(maxsize=128)
def _best(name: str, times: StageTimes, num_microbatches: int, flush: bool) -> Schedule:
    """The best order found; of equal ones the first."""
    boards = waves(times, num_microbatches)
    for rows in _handcrafted(times.ranks, num_microbatches):
        board = play(times, num_microbatches, rows)
        if all(peak <= limit + 1e-9 for peak, limit in zip(board.peak, times.limit, strict=True)):
            boards.append(board)
    # Rounding keeps the choice the same where times differ by noise only.
    scale = sum(times.f) + sum(times.i) + sum(times.w)

    def score(board: Board) -> tuple[float, float]:
        span, makespan = round(board.span / scale, 9), round(board.makespan / scale, 9)
        return (makespan, span) if flush else (span, makespan)

    # On clocks that tie, two ranks may each be placed first where only the other's result lets them start.
    found = ((board, _schedule(name, num_microbatches, board.rows)) for board in sorted(boards, key=score))
    return next(schedule for board, schedule in found if board.sound or not schedule.replay().blocked)


def _order(num_ranks: int, num_microbatches: int, virtual_stages: int, *, name: str, times: float, **options: object) -> Schedule:
    stage_times = _stage_times(num_ranks, times * num_ranks, **options)
    return _best(name, stage_times, num_microbatches, bool(options.get("flush", False)))


def _rules(num_ranks: int, num_microbatches: int, virtual_stages: int, **options: object) -> Iterator[Violation]:
    for name, least, most, rule in (
        ("f", _SHORTEST, inf, "durations are positive"),
        ("i", _SHORTEST, inf, "durations are positive"),
        ("w", _SHORTEST, inf, "durations are positive"),
        ("size", _SHORTEST, inf, "activations take some memory"),
        ("memory_limit", 1.0, inf, "a rank holds at least one activation"),
        ("kept", 0.0, 1.0, "a fraction of the activation, from 0 to 1"),
    ):
        value = options.get(name)
        if value is None:
            continue
        values = _each(value, num_ranks)  # type: ignore[arg-type]
        if len(values) != num_ranks:
            yield Violation(name, value, "one value, or one per rank", f"{num_ranks} values")
        if not all(isfinite(v) and least <= v <= most for v in values):
            yield Violation(name, value, rule)
    send = options.get("send", 0.0)
    if not (isinstance(send, int | float) and isfinite(send) and send >= 0):
        yield Violation("send", send, "a send takes no negative time", "0 or more")


def _family(name: str, times: float, memory: str) -> ScheduleFamily:
    return ScheduleFamily(
        name=name,
        summary=f"split backwards in an order sought for the stage times, within {memory} 1F1B's activation memory",
        source="Qi et al. 2023, arXiv 2401.10241, section 3 (automatic scheduling); sail-sg/zero-bubble-pipeline-parallelism",
        order=partial(_order, name=name, times=times),
        rules=_rules,
        virtual_stages=1,
        splits_backward=True,
        options=_OPTIONS,
        wants_times=True,
    )


ZB_1P = _family("zb-1p", 1.0, "once")
ZB_2P = _family("zb-2p", 2.0, "twice")
