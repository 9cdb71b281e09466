"""Max-min fair rates: closed forms, and the property that defines them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simpar.engine.max_min import max_min_rates


def rates(peak, presses, capacity):
    """`presses`: (flow, link, weight)."""
    flow, link, weight = zip(*presses, strict=True) if presses else ((), (), ())
    return max_min_rates(
        np.array(peak, float),
        np.array(flow, int),
        np.array(link, int),
        np.array(weight, float),
        np.array(capacity, float),
    )


def test_equal_flows_share_equally():
    assert rates([9, 9, 9], [(f, 0, 1) for f in range(3)], [6]).tolist() == [2, 2, 2]


def test_a_flow_that_peaks_early_leaves_the_rest():
    assert rates([1, 9, 9], [(f, 0, 1) for f in range(3)], [6]).tolist() == [1, 2.5, 2.5]


def test_the_classic_chain():
    """Bertsekas and Gallager's line network: one long flow against short ones on unequal links."""
    presses = [(0, 0, 1), (0, 1, 1), (1, 0, 1), (2, 1, 1), (3, 1, 1)]
    assert rates([99] * 4, presses, [10, 9]).tolist() == [3, 7, 3, 3]


def test_a_flow_on_no_link_runs_at_its_peak():
    assert rates([3, 9], [(1, 0, 1)], [2]).tolist() == [3, 2]
    assert rates([3], [], [2]).tolist() == [3]


def test_weights_divide_the_link():
    """A flow that presses twice as hard gets the same rate and twice the bytes."""
    assert rates([9, 9], [(0, 0, 2), (1, 0, 1)], [6]).tolist() == [2, 2]


def test_a_dead_link_stops_its_flows_only():
    assert rates([9, 9], [(0, 0, 1), (1, 1, 1)], [0, 4]).tolist() == [0, 4]


@st.composite
def networks(draw):
    flows, links = draw(st.integers(1, 8)), draw(st.integers(1, 5))
    pairs = draw(st.lists(st.tuples(st.integers(0, flows - 1), st.integers(0, links - 1)), unique=True, max_size=20))
    values = st.one_of(st.floats(0.1, 10.0), st.sampled_from([1.0, 2.0]))
    presses = [(f, link, draw(values)) for f, link in pairs]
    peak = draw(st.lists(values, min_size=flows, max_size=flows))
    capacity = draw(st.lists(st.one_of(values, st.just(0.0)), min_size=links, max_size=links))
    return peak, presses, capacity


@given(networks())
def test_feasible_and_every_flow_has_a_reason_not_to_be_faster(network):
    """Max-min fair: each flow is at its peak, or crosses a full link on which nobody is faster (work conservation)."""
    peak, presses, capacity = network
    found = rates(peak, presses, capacity)
    used = np.zeros(len(capacity))
    for flow, link, weight in presses:
        used[link] += weight * found[flow]
    assert (used <= np.array(capacity) * (1 + 1e-9)).all()
    for flow, limit in enumerate(peak):
        if found[flow] >= limit:
            assert found[flow] == limit
            continue
        mine = [link for f, link, _ in presses if f == flow]
        assert any(
            used[link] == pytest.approx(capacity[link], rel=1e-9)
            and all(found[f] <= found[flow] * (1 + 1e-9) for f, other, _ in presses if other == link)
            for link in mine
        )


@given(networks(), st.randoms())
def test_order_does_not_matter(network, random):
    peak, presses, capacity = network
    shuffled = random.sample(presses, len(presses))
    assert rates(peak, shuffled, capacity) == pytest.approx(rates(peak, presses, capacity), rel=1e-9)
