"""Transfers that share links, on networks small enough to know the answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pytest
from engine_programs import prices, programs, send, table, transfer_program
from hypothesis import given, settings
from hypothesis import strategies as st
from test_engine_equal import counted

from simpar.engine import pressure
from simpar.engine.contention import Contention, LinkLoads, LinkSchedule, merged_loads
from simpar.engine.discrete_event import Effects, run
from simpar.engine.longest_path import longest_path
from simpar.errors import InputError
from simpar.program.program import Transfer


@dataclass(frozen=True, slots=True, eq=False)
class TableNetwork:
    """A network written down by hand: capacities, and the bytes per link of each group per transferred byte.

    Attributes:
        capacity_bytes_per_s: float array [links].
        routes: group of ranks -> {link: bytes on it per byte of the transfer}.
    """

    capacity_bytes_per_s: np.ndarray
    routes: Mapping[tuple[int, ...], Mapping[int, float]] = field(default_factory=dict)

    def loads(self, transfer: Transfer) -> LinkLoads:
        """Sum over the groups of the transfer."""
        routes = [self.routes[group] for group in transfer.groups]
        return merged_loads([(np.array(list(r), dtype=np.int64), transfer.bytes * np.array(list(r.values()))) for r in routes])

    def describe(self, link: int) -> str:
        """The index: there is no better name."""
        return f"link {link}"


def network(capacity, **routes):
    """`routes`: r01={0: 1} is the group (0, 1) on link 0."""
    groups = {tuple(int(c) for c in name[1:]): links for name, links in routes.items()}
    return TableNetwork(np.array(capacity, float), groups)


def finishes(transfers, net, seconds, latency=None, schedules=()):
    program = transfer_program([(i, t, ()) for i, t in enumerate(transfers)])
    contention = Contention(net, None if latency is None else np.array(latency, float), schedules)
    return run(program, table(seconds), Effects(contention=contention)).finish


def test_alone_a_transfer_takes_exactly_its_price():
    net = network([10.0], r01={0: 1})
    assert finishes([send(0, 1, size=10.0)], net, [1.1]).tolist() == [1.1]


def test_two_flows_on_one_link_take_twice_as_long():
    net = network([10.0], r01={0: 1}, r23={0: 1})
    assert finishes([send(0, 1, size=10.0), send(2, 3, size=10.0)], net, [1.0, 1.0]).tolist() == [2.0, 2.0]


def test_the_latency_part_does_not_stretch():
    net = network([10.0], r01={0: 1}, r23={0: 1})
    found = finishes([send(0, 1, size=10.0), send(2, 3, size=10.0)], net, [1.5, 1.5], latency=[0.5, 0.5])
    assert found.tolist() == pytest.approx([2.5, 2.5], rel=1e-14)


def test_flows_that_fit_together_do_not_slow_each_other():
    net = network([10.0], r01={0: 1}, r23={0: 1})
    assert finishes([send(0, 1, size=5.0), send(2, 3, size=5.0)], net, [1.0, 1.0]).tolist() == [1.0, 1.0]


def test_the_second_speeds_up_when_the_first_ends():
    """10 and 30 bytes on a link of 10/s: both at 5/s for 2 s, then 20 bytes at 10/s."""
    net = network([10.0], r01={0: 1}, r23={0: 1})
    assert finishes([send(0, 1, size=10.0), send(2, 3, size=30.0)], net, [1.0, 3.0]).tolist() == [2.0, 4.0]


def test_disjoint_links_do_not_meet():
    net = network([10.0, 10.0], r01={0: 1}, r23={1: 1})
    assert finishes([send(0, 1, size=10.0), send(2, 3, size=10.0)], net, [1.0, 1.0]).tolist() == [1.0, 1.0]


def test_a_later_flow_takes_its_share_of_what_is_left():
    """The second starts at 1 s: the first has 1 s of its 2 s left, shares until 3 s, then the second runs alone."""
    net = network([10.0], r01={0: 1}, r23={0: 1}, r45={})
    program = transfer_program(
        [("a", send(0, 1, size=20.0), ()), ("wait", send(4, 5), ()), ("b", send(2, 3, size=20.0), ("wait",))]
    )
    timeline = run(program, table([2.0, 1.0, 2.0]), Effects(contention=Contention(net)))
    assert timeline.finish.tolist() == [3.0, 1.0, 4.0]


@pytest.mark.parametrize("k", [2, 4, 7])
def test_ring_across_oversubscribed_uplinks_slows_by_the_ratio(k):
    """k rings, each with its own NIC at both leaves; the uplink of a leaf carries one NIC's worth: k times slower.

    A ring of 4 ranks, two under each leaf: 4 hops, each of 2 (n-1)/n S bytes, one up and one down per leaf.
    """
    ranks = 4
    hop = 2 * (ranks - 1) / ranks
    nics = 4 * k
    routes = {}
    for ring in range(k):
        group = tuple(ring * ranks + i for i in range(ranks))
        routes[group] = {ring * 4 + i: hop for i in range(4)} | {nics: hop, nics + 1: hop}
    rings = [Transfer("all_reduce", 100.0, (group,)) for group in routes]
    capacity = np.full(nics + 2, 50.0)
    seconds = hop * 100.0 / 50.0
    full = TableNetwork(np.concatenate([capacity[:nics], [50.0 * k] * 2]), routes)
    assert finishes(rings, full, [seconds] * k).tolist() == [seconds] * k
    tight = TableNetwork(capacity, routes)
    assert finishes(rings, tight, [seconds] * k) == pytest.approx([k * seconds] * k, rel=1e-12)
    folded = [Transfer("all_reduce", 100.0, tuple(routes))]
    assert finishes(folded, tight, [seconds]) == pytest.approx([k * seconds], rel=1e-12)
    assert finishes(folded, full, [seconds]).tolist() == [seconds]


def test_a_price_that_already_assumes_sharing_is_not_charged_twice():
    """Two groups on one NIC, each priced at half the NIC: they fit."""
    net = network([10.0], r01={0: 1}, r23={0: 1})
    assert finishes([send(0, 1, size=10.0), send(2, 3, size=10.0)], net, [2.0, 2.0]).tolist() == [2.0, 2.0]


def test_a_price_faster_than_the_wire_holds_alone():
    """In-network reduction moves fewer bytes than the ring the loads assume; alone, the price is the truth."""
    net = network([10.0], r01={0: 1}, r23={0: 1})
    assert finishes([send(0, 1, size=10.0)], net, [0.5]).tolist() == [0.5]
    assert finishes([send(0, 1, size=10.0), send(2, 3, size=10.0)], net, [0.5, 0.5]).tolist() == [1.0, 1.0]


def test_one_nic_for_two_gpus():
    """GPUs 0 and 1 behind NIC link 0, GPUs 2 and 3 with NICs of their own (links 1, 2)."""
    net = network([5.0, 5.0, 5.0], r04={0: 1}, r15={0: 1}, r26={1: 1}, r37={2: 1})
    found = finishes([send(0, 4, size=5.0), send(1, 5, size=5.0), send(2, 6, size=5.0), send(3, 7, size=5.0)], net, [1.0] * 4)
    assert found.tolist() == [2.0, 2.0, 1.0, 1.0]


def test_fairness_is_measured_on_the_narrowest_link():
    """A hierarchical all-reduce moves 8 times more over NVLink than over its NIC; on the NIC it still gets half."""
    net = network([400.0, 50.0], r01={0: 8, 1: 1}, r23={1: 1})
    found = finishes([Transfer("all_reduce", 50.0, ((0, 1),)), send(2, 3, size=50.0)], net, [1.0, 1.0])
    assert found == pytest.approx([2.0, 2.0], rel=1e-12)


def test_a_slow_link_slows_what_crosses_it():
    net = network([10.0, 10.0], r01={0: 1}, r23={1: 1})
    both = [send(0, 1, size=10.0), send(2, 3, size=10.0)]
    assert finishes(both, net, [1.0, 1.0], schedules=[LinkSchedule(0, (0.0,), (0.25,))]).tolist() == [4.0, 1.0]


def test_capacity_over_time():
    """10 bytes/s until 1 s, nothing until 3 s, then half: 30 bytes need 1 s + 2 s idle + 4 s."""
    net = network([10.0], r01={0: 1})
    schedule = LinkSchedule(0, (1.0, 3.0), (0.0, 0.5))
    assert finishes([send(0, 1, size=30.0)], net, [3.0], schedules=[schedule]).tolist() == pytest.approx([7.0])


def test_a_flapping_link_gives_its_share_of_the_time():
    net = network([10.0], r01={0: 1})
    found = finishes([send(0, 1, size=100.0)], net, [10.0], schedules=[LinkSchedule(0, (0.0, 0.25), (0.0, 1.0), period_s=1.0)])
    assert found == pytest.approx([10.0 / 0.75], abs=0.25)


def test_a_dead_link_is_an_error_with_its_name():
    net = network([10.0], r01={0: 1})
    with pytest.raises(InputError, match=r"link 0.*waits for ever"):
        finishes([send(0, 1, size=10.0)], net, [1.0], schedules=[LinkSchedule(0, (0.0,), (0.0,))])


def test_two_schedules_of_one_link_are_refused():
    with pytest.raises(InputError, match="has two schedules"):
        Contention(network([1.0]), schedules=[LinkSchedule(0, (0.0,), (0.5,))] * 2)


# -- properties over random programs and networks --------------------------------------------------------------------


@st.composite
def contended(draw, latency: bool = True):
    """A random program, some of whose ops are transfers over a random network."""
    program = draw(programs(acyclic=True, max_ops=24))
    price_table = draw(prices(program))
    links = draw(st.integers(1, 4))
    pairs = [(a, b) for a in range(4) for b in range(4) if a != b]
    loads = st.dictionaries(st.integers(0, links - 1), st.sampled_from([0.5, 1.0, 2.0]), min_size=1, max_size=links)
    routes = {pair: draw(loads) for pair in pairs}
    capacity = draw(st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=links, max_size=links))
    for op in range(program.num_ops):
        if draw(st.booleans()):
            groups = tuple(draw(st.lists(st.sampled_from(pairs), min_size=1, max_size=2, unique=True)))
            program.transfers[op] = Transfer("send_recv", draw(st.sampled_from([0.1, 1.0, 5.0])), groups)
    fractions = draw(st.lists(st.sampled_from([0.0, 0.3, 1.0]), min_size=links, max_size=links))
    part = price_table.seconds * draw(st.sampled_from([0.0, 0.5, 1.0])) if latency and fractions else None
    return program, price_table, Contention(TableNetwork(np.array(capacity), routes), part)


@settings(max_examples=50)
@given(contended())
def test_no_transfer_is_faster_than_its_price(case):
    program, price_table, contention = case
    timeline = run(program, price_table, Effects(contention=contention))
    tolerance = 1e-9 * max(1.0, timeline.makespan)
    assert (timeline.seconds >= price_table.seconds[program.price] - tolerance).all()
    fixed = [op for op in range(program.num_ops) if op not in program.transfers]
    assert timeline.seconds[fixed] == pytest.approx(price_table.seconds[program.price][fixed], abs=tolerance)


@settings(max_examples=50)
@given(contended())
def test_contention_never_speeds_a_program_up(case):
    program, price_table, contention = case
    timeline = run(program, price_table, Effects(contention=contention))
    tolerance = 1e-9 * max(1.0, timeline.makespan)
    assert (timeline.finish >= longest_path(program, price_table).finish - tolerance).all()


@settings(max_examples=50)
@given(contended())
def test_ample_links_change_nothing_at_all(case):
    program, price_table, contention = case
    roomy = TableNetwork(contention.network.capacity_bytes_per_s + 1e12, contention.network.routes)
    found = run(program, price_table, Effects(contention=Contention(roomy)))
    if (price_table.seconds[list(program.price[list(program.transfers)])] > 1e-9).all():
        assert found.finish.tobytes() == longest_path(program, price_table).finish.tobytes()


@settings(max_examples=50)
@given(contended(latency=False), st.sampled_from([0.5, 4.0]))
def test_scaling_every_link_and_price_scales_time(case, factor):
    """A network and prices k times slower: everything happens k times later."""
    program, price_table, contention = case
    slower = TableNetwork(contention.network.capacity_bytes_per_s / factor, contention.network.routes)
    base = run(program, price_table, Effects(contention=contention))
    scaled = run(program, table(price_table.seconds * factor), Effects(contention=Contention(slower)))
    assert scaled.finish == pytest.approx(factor * base.finish, rel=1e-9, abs=1e-9)


@settings(max_examples=50)
@given(contended())
def test_wider_links_in_series_change_nothing(case):
    program, price_table, contention = case
    capacity, routes = contention.network.capacity_bytes_per_s, contention.network.routes
    count = len(capacity)
    twice = {group: {**links, **{count + k: v for k, v in links.items()}} for group, links in routes.items()}
    longer = TableNetwork(np.concatenate([capacity, 1.5 * capacity]), twice)
    base = run(program, price_table, Effects(contention=contention))
    found = run(program, price_table, Effects(contention=Contention(longer, contention.latency_s)))
    assert found.finish == pytest.approx(base.finish, rel=1e-9, abs=1e-9)


@settings(max_examples=50)
@given(contended())
def test_leaving_links_out_is_exact(case):
    """The same run with every link kept, whether or not it can decide anything."""
    program, price_table, contention = case
    base = run(program, price_table, Effects(contention=contention))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pressure, "_contested", lambda program, loads, seconds, nominal: nominal > 0.0)
        patch.setattr(pressure, "_narrowest_of_alike", lambda loads, contested, nominal, varying: nominal > 0.0)
        found = run(program, price_table, Effects(contention=contention))
    assert found.finish == pytest.approx(base.finish, rel=1e-9, abs=1e-9)


@given(st.lists(st.floats(0.5, 20.0), min_size=1, max_size=8))
def test_work_is_conserved_on_a_saturated_link(sizes):
    """However many start together, the last ends when the link has carried all their bytes: it never idles."""
    net = TableNetwork(np.array([2.0]), {(0, i): {0: 1.0} for i in range(1, len(sizes) + 1)})
    transfers = [send(0, i + 1, size=size) for i, size in enumerate(sizes)]
    found = finishes(transfers, net, [size / 2.0 for size in sizes])
    assert found.max() == pytest.approx(sum(sizes) / 2.0, rel=1e-9)
    # Max-min fairness on one link: the time of each is what processor sharing gives.
    ordered = np.sort(sizes)
    shares = np.cumsum(np.diff(ordered, prepend=0.0) * np.arange(len(sizes), 0, -1)) / 2.0
    assert np.sort(found) == pytest.approx(shares, rel=1e-9)


@settings(max_examples=50)
@given(contended(), st.booleans())
def test_events_per_op_stay_bounded(case, interference):
    """At most three per op on average: its own, a settling, a second look, each at most once per start and end."""
    program, price_table, contention = case
    _, events = counted(program, price_table, contention=contention, interference=interference)
    transfers = len(program.transfers)
    assert events <= 3 * program.num_ops + 4 * transfers * transfers
