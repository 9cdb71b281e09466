"""Automatic zero-bubble schedules: published bubbles, memory limits, never worse than what they are built to beat."""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simpar.errors import InputError
from simpar.schedules import Phase, Schedule, automatic_board, build_schedule
from simpar.schedules.automatic import _handcrafted
from simpar.schedules.automatic_board import Board, StageTimes
from simpar.schedules.automatic_wave import Choices, Wave, play, waves
from simpar.schedules.order import goes_on

# Qi et al. 2023 (arXiv 2401.10241): stage times in ms that the authors profiled (arXiv Table 9) and the bubbles that they
# computed from them (Table 5). (p, m, heads * sequence / hidden, F, B, W, send, 1F1B, ZB-H1, ZB-H2, ZB-2p); ZB-1p = ZB-H1.
PUBLISHED = (
    (8, 24, 24 * 1024 / 2304, 18.522, 18.086, 9.337, 0.601, 0.2431, 0.1585, 0.1083, 0.0433),
    (8, 32, 24 * 1024 / 2304, 18.513, 18.086, 9.331, 0.626, 0.1985, 0.1242, 0.0837, 0.0039),
    (8, 24, 8.0, 29.718, 29.444, 19.927, 0.527, 0.2347, 0.1323, 0.0698, 0.0029),
    (8, 64, 8.0, 29.935, 29.621, 19.388, 0.535, 0.1091, 0.0554, 0.0294, 0.0010),
    (32, 96, 8.0, 10.419, 10.207, 7.715, 0.408, 0.2646, 0.1421, 0.0641, 0.0038),
)


def played(schedule: Schedule, f: object, i: object, w: object, send: float) -> tuple[float, float]:
    """(longest time of a rank from its first pass to its last, makespan) with sends, by an independent longest path."""
    order = schedule.as_arrays()
    p = schedule.num_ranks
    f, i, w = (np.broadcast_to(np.asarray(x, float), (p,)) for x in (f, i, w))
    cost = np.array([f, i + w, i, w])[order.phase, order.rank]
    start, finish = np.zeros(len(cost)), np.zeros(len(cost))
    for _ in range(len(cost)):
        late = finish[order.prerequisites] + send * (order.rank[order.prerequisites] != order.rank[:, None])
        begin = np.where(order.prerequisites >= 0, late, 0.0).max(axis=1)
        for a, b in pairwise(order.rank_start):
            own, free = begin[a:b].copy(), 0.0
            for k in range(b - a):
                own[k] = max(own[k], free)
                free = own[k] + cost[a + k]
            begin[a:b] = own
        if np.array_equal(begin, start) and np.array_equal(begin + cost, finish):
            break
        start, finish = begin, begin + cost
    spans = [finish[a:b].max() - start[a:b].min() for a, b in pairwise(order.rank_start)]
    return max(spans), float(finish.max())


def memory(schedule: Schedule, kept: float) -> list[float]:
    """Peak per rank in activations: 1 from F, `kept` from I, 0 from W."""
    order = schedule.as_arrays()
    change = np.array([1.0, -1.0, kept - 1.0, -kept])[order.phase]
    return [float(np.cumsum(change[a:b]).max()) for a, b in pairwise(order.rank_start)]


@pytest.mark.parametrize(
    ("p", "m", "scores", "f", "i", "w", "send", "plain", "h1", "h2", "twice"), PUBLISHED,
    ids=[f"p{row[0]}-m{row[1]}-w{row[5]}" for row in PUBLISHED],
)  # fmt: skip
def test_published_bubbles(
    p: int, m: int, scores: float, f: float, i: float, w: float, send: float, plain: float, h1: float, h2: float, twice: float
) -> None:
    """From the published stage times follow the published bubbles, (cost - m(F+B+W)) / cost."""
    kept = 32 / (34 + 5 * scores)  # bytes per token that weight gradients need, of those that the layer saves
    options = {"f": f, "i": i, "w": w, "send": send, "kept": kept}
    work = m * (f + i + w)
    for name, expected, chosen in (
        ("1f1b", plain, {}), ("zb-h1", h1, {}), ("zb-h2", h2, {}), ("zb-1p", h1, options), ("zb-2p", twice, options),
    ):  # fmt: skip
        schedule = build_schedule(name, p, m, **chosen)
        span, makespan = played(schedule, f, i, w, send)
        cost = makespan if name == "1f1b" else span
        assert 1 - work / cost == pytest.approx(expected, abs=6e-4 if name == "zb-h2" else 6e-5), name


duration = st.floats(0.2, 3.0)


@settings(deadline=None, max_examples=40)
@given(st.data(), st.integers(1, 6), st.integers(1, 20), st.sampled_from(["zb-1p", "zb-2p"]))
def test_never_worse_than_what_fits_the_same_memory(data: st.DataObject, p: int, m: int, name: str) -> None:
    f, i, w = (tuple(data.draw(st.lists(duration, min_size=p, max_size=p))) for _ in "fiw")
    send, kept = data.draw(st.floats(0.0, 0.5)), data.draw(st.floats(0.0, 1.0))
    flush = data.draw(st.booleans())
    schedule = build_schedule(name, p, m, f=f, i=i, w=w, send=send, kept=kept, flush=flush)
    schedule.check()
    limit = p * (2 if name == "zb-2p" else 1)
    assert max(memory(schedule, kept)) <= limit + 1e-6
    span, makespan = played(schedule, f, i, w, send)
    assert makespan >= max(m * (a + b + c) for a, b, c in zip(f, i, w, strict=True)) - 1e-9
    for other in ("zb-h1", "zb-h2", "1f1b"):
        rival = build_schedule(other, p, m)
        if max(memory(rival, kept)) > limit:
            continue
        # 1F1B with each backward in two parts, run one after the other: the input gradient leaves earlier than B would.
        their_span, their_makespan = played(rival, f, i, w, send)
        if flush:
            assert makespan <= their_makespan * (1 + 1e-6)
        else:
            assert span <= their_span * (1 + 1e-6)


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 6), st.integers(1, 16), st.floats(1.0, 14.0), st.floats(0.0, 1.0))
def test_any_memory_limit_can_be_met(p: int, m: int, limit: float, kept: float) -> None:
    schedule = build_schedule("zb-1p", p, m, memory_limit=limit, kept=kept, send=0.1)
    schedule.check()
    assert max(memory(schedule, kept)) <= limit + 1e-6


def test_more_memory_never_hurts_the_published_models() -> None:
    for p, m, scores, f, i, w, send, *_ in PUBLISHED[:3]:
        options = {"f": f, "i": i, "w": w, "send": send, "kept": 32 / (34 + 5 * scores)}
        spans = [
            played(build_schedule("zb-1p", p, m, memory_limit=limit, **options), f, i, w, send)[0]
            for limit in (p / 2, p, 1.5 * p, 2 * p)
        ]
        assert spans == sorted(spans, reverse=True)


def test_only_the_ratio_of_times_matters() -> None:
    options = {"f": 1.0, "i": 1.1, "w": 0.7, "send": 0.05, "kept": 0.4}
    scaled = {k: v * (1e-3 if k in ("f", "i", "w", "send") else 1.0) for k, v in options.items()}
    assert build_schedule("zb-2p", 5, 17, **options).rows == build_schedule("zb-2p", 5, 17, **scaled).rows


def test_left_out_options_are_unit_times() -> None:
    assert build_schedule("zb-1p", 4, 9).rows == build_schedule("zb-1p", 4, 9, f=1, i=1.0, w=(1, 1, 1, 1), kept=1).rows
    assert build_schedule("zb-2p", 4, 12).unit_bubble(flush=False) == 0


def test_weight_gradients_run_in_the_order_of_their_input_gradients() -> None:
    schedule = build_schedule("zb-2p", 4, 12, w=0.4, kept=0.5)
    for row in schedule.rows:
        for phase in (Phase.F, Phase.I, Phase.W):
            assert [a.microbatch for a in row if a.phase is phase] == list(range(12))


def test_wrong_options_are_all_named() -> None:
    with pytest.raises(InputError) as caught:
        build_schedule("zb-1p", 4, 8, f=0.0, i=(1.0, 2.0), memory_limit=0.5, kept=2.0, send=-1.0)
    assert {v.field for v in caught.value.violations} == {"f", "i", "memory_limit", "kept", "send"}


@pytest.mark.parametrize("name", ["zb-1p", "zb-2p"])
@pytest.mark.parametrize("flush", [False, True])
def test_ranks_never_wait_in_a_circle_where_clocks_tie(name: str, flush: bool) -> None:
    """Free sends and durations that divide each other: two ranks could each be placed before the other's result."""
    times = {"f": (1.0, 2.0, 0.5, 1.0), "i": (1.0,) * 4, "w": (1.0, 1.0, 1.0, 3.0), "send": 0.0, "kept": 0.0}
    build_schedule(name, 4, 3, flush=flush, **times).check()


@given(data=st.data(), p=st.integers(1, 6), m=st.integers(1, 24))
def test_a_choice_that_never_mattered_is_not_played_again(data: st.DataObject, p: int, m: int) -> None:
    """Each of the eight is what it is when played alone."""
    seconds = st.lists(st.sampled_from([0.5, 0.8, 1.0, 1.1, 1.3]), min_size=p, max_size=p).map(tuple)
    limit = data.draw(st.lists(st.sampled_from([1.0, 2.0, 0.5 * p + 1.0, 2.0 * p]), min_size=p, max_size=p).map(tuple))
    f, i, w = (data.draw(seconds) for _ in range(3))
    times = StageTimes(f, i, w, data.draw(st.sampled_from([0.0, 0.1, 0.6])), limit, (0.6,) * p)
    alone = [Wave(times, m, Choices(*answers)).run() for answers in product((False, True), repeat=3)]
    assert [board.rows for board in waves(times, m)] == [board.rows for board in alone]


def test_an_order_goes_on_where_each_round_is_run_again() -> None:
    few, more, every = (build_schedule("zb-1p", 4, m, send=0.1).rows for m in (12, 16, 40))
    assert goes_on(few, more, every)
    assert not goes_on(few, more, build_schedule("zb-1p", 4, 42, send=0.1).rows)
    assert not goes_on(few, more, build_schedule("1f1b", 4, 40).rows)
    for rank, at, orders in product(range(4), (3, 20, -20, -1), (1, 2)):
        rows = [list(row) for row in (few, more, every)[orders]]
        row = rows[rank]
        other = next(i for i in range(at - 1, -40, -1) if row[i].phase is not row[at].phase)
        row[at], row[other] = row[other], row[at]
        changed = [few, more, every]
        changed[orders] = tuple(map(tuple, rows))
        assert not goes_on(*changed)


PER_RANK = st.lists(st.sampled_from((0.5, 1.0, 1.01, 1.3, 2.0)), min_size=5, max_size=5).map(tuple)


@settings(max_examples=15, deadline=None)
@given(
    f=PER_RANK, i=PER_RANK, w=PER_RANK, send=st.sampled_from((0.0, 0.05, 1.0)), kept=st.sampled_from((0.0, 0.3, 1.0)),
    limits=st.lists(st.sampled_from((2.0, 3.5, 5.0, 10.0)), min_size=5, max_size=5), count=st.sampled_from((100, 173, 260)),
)  # fmt: skip
def test_waves_left_out_are_those_that_would_be_played(
    f: tuple[float, ...],
    i: tuple[float, ...],
    w: tuple[float, ...],
    send: float,
    kept: float,
    limits: list[float],
    count: int,
) -> None:
    """Ranks of unequal speed: slack and idle time change from wave to wave until something is decided otherwise."""
    times = StageTimes(f, i, w, send, tuple(limits), (kept,) * 5)
    given = list(_handcrafted(5, count))

    def boards() -> list[Board]:
        return [*waves(times, count), *(play(times, count, rows) for rows in given)]

    found = boards()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(automatic_board, "_WORTHWHILE", 10**9)
        whole = boards()
    for one, other in zip(found, whole, strict=True):
        assert one.rows == other.rows
        assert (one.sound, one.count) == (other.sound, other.count)
        assert (*one.clock, *one.idle, *one.peak) == pytest.approx((*other.clock, *other.idle, *other.peak), rel=1e-11, abs=1e-9)


def test_waves_that_repeat_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand waves of equal ranks are those of the warm-up, of a period seen three times and of the end."""
    played = []
    monkeypatch.setattr(Wave, "gradients", lambda wave, plain=Wave.gradients: (played.append(1), plain(wave)))
    times = StageTimes((1.0,) * 4, (1.0,) * 4, (1.0,) * 4, 0.1, (4.0,) * 4, (1.0,) * 4)
    board = Wave(times, 1000, Choices(late_start=True, skip=True, fill=True)).run()
    assert len(played) < 60
    assert [row.count("F") for row in board.rows] == [1000] * 4
