"""Closed forms of checkpointing and spares: published values, limits, and each other."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simpar.planning.checkpoints import CheckpointTimes, choose_interval, doubts, storage_load
from simpar.planning.closed_forms import (
    daly_interval_s,
    exact_interval_s,
    expected_ettr,
    goodput_exact,
    goodput_first_order,
    mtti_s,
    poisson_tail,
    spares_for,
    spares_needed,
    young_interval_s,
)
from simpar.specs.planfile import CheckpointPlan

HOUR = 3600.0
stalls = st.floats(0.1, 500.0)
mttis = st.floats(600.0, 1e6)


@pytest.mark.parametrize(("stall", "recovery", "goodput"), [(5, 300, 0.943), (10, 600, 0.904), (30, 600, 0.873), (60, 1200, 0.788)])
def test_goodput_at_3_hours_between_interrupts(stall: float, recovery: float, goodput: float) -> None:
    mtti = 3.09 * HOUR
    found = goodput_first_order(young_interval_s(stall, mtti), stall, recovery, mtti)
    assert found == pytest.approx(goodput, abs=6e-4)


def test_young_interval_of_a_ten_second_stall() -> None:
    assert young_interval_s(10, 3.09 * HOUR) == pytest.approx(472, abs=0.5)


def test_mean_time_to_interrupt_is_one_over_n_r() -> None:
    assert mtti_s(2048, 6.5e-3) / HOUR == pytest.approx(1.80, abs=0.005)
    assert mtti_s(16384, 6.5e-3) / HOUR == pytest.approx(0.23, abs=0.006)
    assert mtti_s(100, 0.0) == math.inf


@given(stalls, mttis)
def test_exact_interval_beats_its_neighbours(stall: float, mtti: float) -> None:
    best = exact_interval_s(stall, mtti)
    here = goodput_exact(best, stall, 0.0, mtti)
    for factor in (0.5, 0.9, 1.1, 2.0):
        assert here >= goodput_exact(best * factor, stall, 0.0, mtti) - 1e-12


@given(st.floats(0.1, 10.0), st.floats(1e5, 1e7))
def test_daly_is_closer_to_the_exact_optimum_than_young(stall: float, mtti: float) -> None:
    exact = exact_interval_s(stall, mtti)
    assert abs(daly_interval_s(stall, mtti) - exact) <= abs(young_interval_s(stall, mtti) - exact) + 1e-6 * exact


def test_daly_is_the_time_between_interrupts_for_long_stalls() -> None:
    assert daly_interval_s(200.0, 100.0) == 100.0


@given(st.floats(1.0, 20.0), st.floats(1.0, 300.0), st.floats(1e6, 1e8))
def test_first_order_meets_exact_form_where_interrupts_are_rare(stall: float, recovery: float, mtti: float) -> None:
    interval = young_interval_s(stall, mtti)
    first, exact = goodput_first_order(interval, stall, recovery, mtti), goodput_exact(interval, stall, recovery, mtti)
    assert first == pytest.approx(exact, abs=5e-5)


def test_without_interrupts_only_the_stall_is_lost() -> None:
    assert goodput_exact(90.0, 10.0, 600.0, math.inf) == pytest.approx(0.9)
    assert exact_interval_s(10.0, math.inf) == math.inf
    assert goodput_exact(math.inf, 10.0, 600.0, math.inf) == 1.0


def test_exact_goodput_of_a_hopeless_run_is_zero_not_an_overflow() -> None:
    assert goodput_exact(1e6, 1e6, 10.0, 10.0) == 0.0


def test_ettr_of_meta_agrees_with_the_first_order_goodput_for_short_writes() -> None:
    nodes, rate, restart, interval, write = 2048, 6.5e-3, 300.0, 600.0, 5.0
    first = goodput_first_order(interval, write, restart, mtti_s(nodes, rate))
    assert expected_ettr(nodes, rate, restart, interval, write) == pytest.approx(first, abs=2e-3)
    assert expected_ettr(10**6, 1.0, restart, interval, write) == 0.0


@given(st.integers(0, 60), st.floats(0.01, 40.0))
def test_poisson_tail_is_one_minus_the_distribution(spares: int, mean: float) -> None:
    terms, term = [], math.exp(-mean)
    for k in range(spares + 1):
        terms.append(term)
        term *= mean / (k + 1)
    assert poisson_tail(spares, mean) == pytest.approx(1.0 - math.fsum(terms), abs=1e-12)


def test_poisson_tail_keeps_its_digits_far_out() -> None:
    # P(X > 40) for mean 2: the leading term 2^41 e^-2 / 41! and a little more.
    leading = 2.0**41 * math.exp(-2.0) / math.factorial(41)
    assert leading < poisson_tail(40, 2.0) < 1.1 * leading
    assert poisson_tail(3, 0.0) == 0.0


def test_spares_needed_is_the_smallest_that_suffices() -> None:
    nodes, rate, repair, confidence = 2048, 3.789e-3, 86400.0, 0.95
    spares = spares_needed(nodes, rate, repair, confidence)
    mean = nodes * rate
    assert poisson_tail(spares, mean) <= 0.05 < poisson_tail(spares - 1, mean)
    draws = np.random.default_rng(0).poisson(mean, 20_000)
    assert (draws > spares).mean() == pytest.approx(poisson_tail(spares, mean), abs=0.005)


@settings(deadline=None, max_examples=40)
@given(st.floats(0.0, 2e4), st.sampled_from([0.5, 0.9, 0.999]))
def test_spares_for_is_the_smallest_that_suffices_at_any_scale(mean: float, confidence: float) -> None:
    spares = spares_for(mean, confidence)
    assert poisson_tail(spares, mean) <= 1.0 - confidence
    assert spares == 0 or poisson_tail(spares - 1, mean) > 1.0 - confidence


# -- what operators do -------------------------------------------------------------------------------------------------


def saves(stall_s: float = 0.02, save_s: float = 3.0) -> CheckpointTimes:
    return CheckpointTimes(5.68e12, stall_s, save_s, 3.0, ())


@given(
    stall=st.floats(1e-3, 100.0), mtti=mttis, rule=st.sampled_from(["optimal", "young", "daly"]), step=st.sampled_from([0.0, 6.3])
)  # fmt: skip
def test_no_rule_saves_more_often_than_operators_do(stall: float, mtti: float, rule: Any, step: float) -> None:
    plan = CheckpointPlan(parameters="405B", interval=rule)
    assert choose_interval(plan, saves(stall, 100.0 + stall), mtti, step) >= 300.0
    free = CheckpointPlan(parameters="405B", interval=rule, least_interval="1 s")
    assert choose_interval(free, saves(stall, stall), mtti, step) >= 1.0


def test_a_given_interval_is_followed_but_doubted() -> None:
    plan = CheckpointPlan(parameters="405B", interval="20 s")
    assert choose_interval(plan, saves(), 3 * HOUR) == 20.0
    assert "every 20 s" in doubts(saves(), 20.0, 3 * HOUR)[0]
    assert "every 5 steps" in doubts(saves(), 100.0, 3 * HOUR, 20.0)[0]
    assert "writes 97% of the time" in doubts(saves(save_s=97.0), 99.98, 3 * HOUR)[0]
    assert "stands still 9% of the time" in doubts(saves(stall_s=10.0), 100.0, 3 * HOUR)[0]
    assert "a failure every 1 h" in doubts(saves(), 2 * HOUR, HOUR)[0]
    assert doubts(saves(), 300.0, 3 * HOUR, 6.3) == ()


def test_what_the_storage_takes_by_hand() -> None:
    plan = CheckpointPlan(parameters="405B", keep=3)
    assert storage_load(plan, saves(stall_s=2.0, save_s=4.0), 98.0) == pytest.approx({
        "checkpoint_bytes": 5.68e12, "kept_bytes": 17.04e12, "write_bandwidth_bytes_per_s": 1.42e12,
        "mean_write_bandwidth_bytes_per_s": 5.68e10, "busy_fraction": 0.04,
    })  # fmt: skip
    assert storage_load(plan, saves(), math.inf) == {}
