"""Stragglers, jitter and uneven experts: what they do to a step, and that their draws follow the stated laws."""

from __future__ import annotations

import numpy as np
import pytest
from engine_programs import chain, prices, programs, table
from hypothesis import given, settings
from hypothesis import strategies as st

from simpar.engine.discrete_event import Effects, run
from simpar.engine.imbalance import Imbalance, Routing
from simpar.engine.jitter import Noise
from simpar.engine.longest_path import longest_path
from simpar.engine.repeat import repeat
from simpar.engine.timeline import Timeline
from simpar.program.builder import Place, ProgramBuilder
from simpar.program.program import OpKind, Stream

NOISE = Noise(0.1, 0.2, 0.05)


def two_ranks():
    """Both compute, then meet in a collective that holds a stream of each."""
    return chain(
        "meet",
        [("a", [(0, "compute")], []), ("b", [(1, "compute")], []), ("all", [(0, "dp"), (1, "dp")], ["a", "b"])],
    ).build()


def test_a_straggler_delays_everyone_it_meets_but_not_the_collective():
    timeline = run(two_ranks(), table([1.0, 1.0, 0.5]), Effects(slow_factors={1: 1.3}))
    assert timeline.finish.tolist() == [1.0, 1.3, 1.8]


@given(st.data())
def test_slow_factors_above_one_never_help(data):
    program = data.draw(programs(acyclic=True))
    table_ = data.draw(prices(program))
    slow = {role: data.draw(st.floats(1.0, 3.0)) for role in program.role_streams}
    assert (run(program, table_, Effects(slow_factors=slow)).finish >= run(program, table_).finish).all()


@settings(max_examples=30)
@given(st.data())
def test_batched_repetitions_are_the_engine_s_bit_by_bit(data):
    program = data.draw(programs(acyclic=True))
    table_ = data.draw(prices(program))
    found = repeat(program, table_, 3, Effects(noise=NOISE, seed=5))
    single = [run(program, table_, Effects(noise=NOISE, seed=5), repetition=r).makespan for r in range(3)]
    assert found.makespans_s.tolist() == single
    assert longest_path(program, table_, noise=NOISE, seed=5, repetition=2).makespan == single[2]


def test_same_seed_same_runs_other_seed_others():
    program, table_ = two_ranks(), table([1.0, 1.0, 0.5])
    one, again, other = (repeat(program, table_, 8, Effects(noise=NOISE, seed=s)).makespans_s for s in (1, 1, 2))
    assert (one == again).all()
    assert (one != other).all()
    assert len(set(one.tolist())) == 8


def test_noise_has_mean_one_and_the_stated_spread():
    program = chain("wide", [(i, [(i, "compute" if i % 2 else "dp")], []) for i in range(4000)]).build()
    factors = Noise(compute_sigma=0.1, communication_sigma=0.3).op_factors(program, seed=0)
    for part, sigma in ((factors[1::2], 0.1), (factors[::2], 0.3)):
        assert part.mean() == pytest.approx(1.0, abs=5 * sigma / 2000**0.5)
        assert np.log(part).std() == pytest.approx(sigma, rel=0.1)


def test_a_role_of_many_ranks_is_as_slow_as_its_slowest():
    """The maximum of n normal draws: for n = 1,000, a mean of 3.24 standard deviations."""
    builder = ProgramBuilder("many")
    for role in range(400):
        streams = (Stream(role, "compute"),)
        builder.add(role, kind=OpKind.FORWARD, role=role, streams=streams, price="f")
    many, one = builder.build((1000,) * 400), builder.build((1,) * 400)
    noise = Noise(rank_sigma=0.01)
    assert (np.log(noise.op_factors(many, 0)).mean() + 0.00005) / 0.01 == pytest.approx(3.241, abs=0.06)
    assert abs(np.log(noise.op_factors(one, 0)).mean()) < 0.002


def test_quantiles():
    program, table_ = two_ranks(), table([1.0, 1.0, 0.5])
    found = repeat(program, table_, 500, Effects(noise=NOISE))
    assert 1.5 < found.p50 < found.p90 < found.p99
    assert found.p90 == np.quantile(found.makespans_s, 0.9)
    # The maximum of two ranks with mean 1 lies above 1: variation costs time on average.
    assert found.mean > 1.5


def test_repetitions_with_interference_use_the_reference_engine():
    program = chain("beside", [("f", [(0, "compute")], []), ("c", [(0, "dp")], [])]).build()
    table_ = table([4.0, 2.0], [0.0, 0.5])
    found = repeat(program, table_, 3, Effects(noise=NOISE, interference=True))
    single = [run(program, table_, Effects(noise=NOISE, interference=True), repetition=r).makespan for r in range(3)]
    assert found.makespans_s.tolist() == single
    assert (found.makespans_s > repeat(program, table_, 3, Effects(noise=NOISE)).makespans_s).all()


@pytest.mark.parametrize("interference", [False, True])
def test_a_repetition_that_has_run_is_not_run_again(interference):
    program = chain("beside", [("f", [(0, "compute")], []), ("c", [(0, "dp")], [])]).build()
    table_ = table([4.0, 2.0], [0.0, 0.5])
    options = {"noise": NOISE, "interference": interference, "seed": 3}
    first = run(program, table_, Effects(**options))
    fresh, found = (repeat(program, table_, 3, Effects(**options), first=given).makespans_s.tolist() for given in (None, first))
    assert found == fresh
    marked = Timeline(program, first.start, first.finish + 1.0)
    assert repeat(program, table_, 3, Effects(**options), first=marked).makespans_s.tolist() == [fresh[0] + 1.0, *fresh[1:]]


# -- experts ---------------------------------------------------------------------------------------------------------


@given(st.integers(1, 64), st.data())
def test_inclusion_is_a_probability_of_top_k(experts, data):
    top_k = data.draw(st.integers(1, experts))
    for routing in (
        Routing(experts, top_k),
        Routing(experts, top_k, "zipf", data.draw(st.floats(0.0, 4.0))),
        Routing(
            experts,
            top_k,
            "counts",
            counts=tuple(data.draw(st.lists(st.floats(0.1, 9.0), min_size=experts, max_size=experts))),
        ),
    ):
        chances = routing.inclusion()
        assert chances.sum() == pytest.approx(top_k)
        assert ((chances >= 0.0) & (chances <= 1.0 + 1e-12)).all()


@given(st.sampled_from([(8, 2), (16, 3), (4, 4), (64, 8)]), st.floats(0.0, 3.0), st.integers(1, 500))
def test_dropless_routing_loses_no_token(shape, exponent, tokens):
    experts, top_k = shape
    loads = Routing(experts, top_k, "zipf", exponent).rank_tokens(tokens, experts, 2, 3, (0,))
    assert (loads.sum(axis=2) == tokens * top_k).all()
    assert (loads <= tokens).all()


def test_uniform_routing_is_nearly_even_and_zipf_is_not():
    """Chance alone: the fullest of 8 ranks holds about 1 + 1.42 standard deviations; Zipf with exponent 1 far more."""
    tokens, ep = 8192, 8
    even = Routing(64, 4).load_factors(tokens, ep, 50, 20, (0,))
    deviation = ((1 - 1 / ep) / (tokens * 4 / ep)) ** 0.5
    assert even.mean() == pytest.approx(1 + 1.42 * deviation, abs=0.2 * deviation)
    assert Routing(64, 4, "zipf", 1.0).load_factors(tokens, ep, 50, 20, (0,)).mean() > 1.5


def test_measured_counts_keep_their_places():
    loads = Routing(4, 1, "counts", counts=(6.0, 2.0, 1.0, 1.0)).rank_tokens(100_000, 2, 1, 10, (0,))
    assert loads.mean(axis=(0, 1)) == pytest.approx([80_000, 20_000], rel=0.01)


def test_a_capacity_factor_bounds_the_load():
    routing = Routing(8, 2, "zipf", 1.5, capacity_factor=1.25)
    factors = routing.load_factors(1000, 8, 5, 5, (0,))
    assert factors.max() <= 313 / 250
    assert routing.rank_tokens(1000, 8, 5, 5, (0,)).sum() < 2000 * 25


def moe_program():
    builder = ProgramBuilder("moe")
    for microbatch in range(3):
        for phase in (OpKind.FORWARD, OpKind.BACKWARD):
            for layer in range(2):
                key, streams = (phase, layer, microbatch), (Stream(0, "compute"),)
                builder.add(key, kind=phase, role=0, streams=streams, price=(phase, layer),
                            place=Place(0, microbatch, layer))  # fmt: skip
    builder.add("optimizer", kind=OpKind.OPTIMIZER, role=0, streams=(Stream(0, "compute"),), price="o")
    return builder.build()


def test_imbalance_scales_the_expert_part_of_prices():
    """Layer 0 is dense (the same at every load), layer 1's price doubles at load factor 2."""
    program = moe_program()
    balanced = table([1.0, 1.0, 2.0, 2.0, 5.0])
    imbalance = Imbalance(Routing(8, 2, "zipf", 1.0), 100, 8, table([1.0, 2.0, 2.0, 4.0, 5.0]))
    loads = imbalance.op_loads(program, seed=0)
    assert loads[-1] == 1.0
    assert (loads[:-1] > 1.0).all()
    forward, backward = program.kind == OpKind.FORWARD, program.kind == OpKind.BACKWARD
    assert (loads[forward] == loads[backward]).all()
    timeline = run(program, balanced, Effects(imbalance=imbalance))
    expert = program.layer == 1
    price = balanced.seconds[program.price]
    assert timeline.seconds[expert] == pytest.approx((loads * price)[expert])
    assert timeline.seconds[~expert] == pytest.approx(price[~expert])
    found = repeat(program, balanced, 5, Effects(imbalance=imbalance))
    assert found.makespans_s[0] == timeline.makespan
    assert len(set(found.makespans_s.tolist())) == 5


@pytest.mark.parametrize(
    ("spread", "experts", "ep", "load"),
    [(0.3, 128, 8, 1.11), (0.3, 128, 16, 1.19), (0.19, 256, 64, 1.22), (0.43, 128, 64, 1.71), (0.08, 256, 64, 1.07)],
)
def test_a_lognormal_spread_fills_the_fullest_rank_as_independent_placement_says(
    spread: float, experts: int, ep: int, load: float
) -> None:
    """1 + z spread / sqrt(experts of a rank), z = 1.42, 1.77, 2.35 for 8, 16, 64 ranks; single experts' tails add to that."""
    routing = Routing(experts, 8, "lognormal", spread=spread)
    chances = routing.inclusion()
    assert chances.std() / chances.mean() == pytest.approx(spread, rel=0.02)
    found = routing.load_factors(8192 * ep, ep, 30, 2, (1,)).mean()
    assert 0.99 * load <= found <= load + 0.5 * (load - 1.0)
