"""Errors, confusion and ranking figures against values worked out by hand and against scipy."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simpar.ranking import kendall_tau, rank_sweeps, regret, summarize_rankings
from simpar.statistics import Comparison, chances_to_fit, fit_by_chance, fit_confusion, group_by, summarize


def row(measured: float | bool, predicted: float | bool | None, metric: str = "step_time_s", **fields: object) -> Comparison:
    return Comparison("r", metric, measured, predicted, **fields)  # type: ignore[arg-type]


def test_summary_by_hand() -> None:
    s = summarize([row(10.0, 11.0), row(10.0, 8.0), row(10.0, 10.0), row(10.0, None, skipped="why")])
    assert (s.rows, s.skipped) == (3, 1)
    assert s.mape == pytest.approx(0.1)
    assert s.median == pytest.approx(0.1)
    assert s.bias == pytest.approx(-0.1 / 3)
    assert s.max == pytest.approx(0.2)
    assert s.coverage is None


def test_empty_group_has_no_figures() -> None:
    s = summarize([row(1.0, None, skipped="why")])
    assert s.rows == 0
    assert s.mape is None
    assert s.bias is None


def test_coverage_counts_only_rows_with_an_interval() -> None:
    rows = [row(10.0, 11.0, low=9.0, high=12.0), row(10.0, 13.0, low=12.0, high=14.0), row(10.0, 10.0)]
    assert summarize(rows).coverage == pytest.approx(0.5)


def test_shares_are_compared_in_points() -> None:
    assert row(0.10, 0.13, "bubble_fraction").error == pytest.approx(0.03)


@pytest.mark.parametrize(("measured", "error"), [(50.0, 0.0), (40.0, 0.0), (60.0, 0.0), (30.0, 1 / 3), (80.0, -0.25)])
def test_a_band_is_right_inside_and_counts_from_its_edge_outside(measured: float, error: float) -> None:
    assert row(measured, 50.0, "peak_memory_bytes", band=(40.0, 60.0)).error == pytest.approx(error)


def test_confusion() -> None:
    labels = [(True, True), (True, False), (False, False), (False, False), (False, True)]
    c = fit_confusion([row(m, p, "oom") for m, p in labels] + [row(True, None, "oom"), row(1.0, 1.0)])
    assert (c.oom_called_oom, c.oom_called_fits, c.fits_called_fits, c.fits_called_oom) == (1, 1, 2, 1)
    assert c.accuracy == pytest.approx(3 / 5)
    assert fit_confusion([]).accuracy is None


def test_runs_are_counted_by_their_chance_to_fit() -> None:
    """One run counts once, whatever of it was measured; a label outweighs a step that was measured before the failure."""

    def chance(name: str, value: float, metric: str, measured: float | bool) -> Comparison:
        return Comparison(name, metric, measured, None, details={"fit_probability": value})

    rows = [
        chance("a", 1.0, "step_time_s", 1.0), chance("a", 1.0, "oom", False), chance("b", 0.1, "oom", True),
        chance("b", 0.1, "step_time_s", 1.0), chance("c", 0.0999, "step_time_s", 1.0), row(1.0, 1.0),
    ]  # fmt: skip
    assert chances_to_fit(rows) == {"a": (1.0, False), "b": (0.1, True), "c": (0.0999, False)}
    bands = fit_by_chance(chances_to_fit(rows).values())
    assert [(b.low, b.high, b.ran, b.out_of_memory) for b in bands] == [(0.02, 0.1, 1, 0), (0.1, 0.25, 0, 1), (0.98, 1.0, 1, 0)]


def test_grouping_by_key_and_by_function() -> None:
    rows = [row(1.0, 1.0, group={"gpu": gpu}) for gpu in ("A100", "H100", "A100")]
    assert {key: len(part) for key, part in group_by(rows, gpu="gpu").items()} == {("A100",): 2, ("H100",): 1}
    assert len(group_by(rows, any=lambda r: r.metric)) == 1


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=2, max_size=30))
def test_tau_equals_scipy(pairs: list[tuple[int, int]]) -> None:
    stats = pytest.importorskip("scipy.stats")
    first, second = [float(a) for a, _ in pairs], [float(b) for _, b in pairs]
    expected = stats.kendalltau(first, second).statistic
    found = kendall_tau(first, second)
    assert (found is None and math.isnan(expected)) or found == pytest.approx(expected)


@given(st.lists(st.floats(0.1, 10), min_size=2, max_size=20, unique=True))
def test_tau_of_itself_and_its_reverse(values: list[float]) -> None:
    assert kendall_tau(values, values) == pytest.approx(1.0)
    assert kendall_tau(values, [-v for v in values]) == pytest.approx(-1.0)


@given(st.lists(st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)), min_size=1, max_size=20))
def test_regret_is_not_negative_and_falls_with_more_picks(pairs: list[tuple[float, float]]) -> None:
    measured, predicted = [a for a, _ in pairs], [b for _, b in pairs]
    one, five = regret(measured, predicted), regret(measured, predicted, top=5)
    assert one >= five >= 0
    assert regret(measured, measured) == 0


def sweep_row(tp: int, measured: float, predicted: float, model: str = "m") -> Comparison:
    return row(measured, predicted, group={"source": "s", "model_name": model, "tp": tp})


def test_sweeps_hold_layouts_of_one_model_and_repeats_count_once() -> None:
    rows = [sweep_row(1, 3.0, 3.0), sweep_row(2, 2.0, 2.5), sweep_row(4, 1.0, 2.6), sweep_row(4, 1.2, 2.6)]
    rows += [sweep_row(1, 1.0, 1.0, model="other")]
    (sweep,) = rank_sweeps(rows)
    assert sweep.layouts == 3
    assert sweep.tau == pytest.approx(1 / 3)
    assert sweep.regret_1 == pytest.approx(2.0 / 1.1 - 1)
    assert sweep.regret_5 == 0
    assert summarize_rankings([sweep]).mean_tau == sweep.tau
    assert summarize_rankings([]).mean_tau is None
