"""The search's own graphs against the reference: the ops that `program.lower` makes, and SimPy's time under any prices."""

from __future__ import annotations

import random
from collections import Counter
from functools import cache

import numpy as np
import pytest
from search_random import CASES, random_choice, space_of

from simpar.engine.discrete_event import run
from simpar.parallel.keys import Gather, Reduce, Send
from simpar.program.lower import lower
from simpar.program.program import PriceTable, Program
from simpar.searching.choice import Choice
from simpar.searching.graph import Graph
from simpar.searching.intervals import Intervals
from simpar.searching.parts import unseen_of
from simpar.searching.pricing import Pricing
from simpar.searching.replay import makespans
from simpar.searching.tiers import Tiers
from simpar.step import simulate

TALK = Gather | Reduce | Send
EACH = 5
"""Layouts of every case."""


@cache
def tiers_of(name: str) -> Tiers:
    """Programs of a case's space."""
    return Tiers(Pricing(space_of(**CASES[name])))


def drawn(name: str, seed: int) -> tuple[Choice, Graph, Program]:
    """A random layout, its graph and the program of `lower`."""
    tiers, draw = tiers_of(name), random.Random(seed)
    while True:
        choice = random_choice(tiers.pricing.space, draw)
        if choice and tiers.microbatches(choice) * choice.group.pp * choice.pipeline.virtual_stages <= 64:
            break
    step, layout = tiers.step(choice), tiers.pricing.layout(choice)
    return choice, step.graph, lower(layout, step.schedule, tiers.detail(choice))


def ops(keys: tuple[object, ...], price: list[int], role: list[int]) -> Counter[tuple[object, int]]:
    """How often each rank has an op of each price."""
    return Counter((keys[p], r) for p, r in zip(price, role, strict=True))


@pytest.mark.parametrize("seed", range(EACH))
@pytest.mark.parametrize("name", sorted(CASES))
def test_graphs_are_those_of_the_lowering(name: str, seed: int) -> None:
    choice, graph, program = drawn(name, seed)
    assert ops(graph.price_keys, graph.price, graph.role) == ops(
        program.price_keys, program.price.tolist(), program.role.tolist()
    ), str(choice)
    # Random prices, so that whatever waits for the wrong op shows.
    draw = np.random.default_rng(seed)
    slows = {key: draw.random() * 0.3 for key in program.price_keys if isinstance(key, TALK)}
    seconds = {key: 0.05 + draw.random() for key in program.price_keys}

    def table(keys: tuple[object, ...]) -> PriceTable:
        return PriceTable(np.array([seconds[k] for k in keys]), np.array([slows.get(k, 0.0) for k in keys]))

    own = table(graph.price_keys)
    found = makespans(graph, own.seconds[None], own.interference[None])[0]
    timeline = run(program, table(program.price_keys), interference=True)
    assert found == pytest.approx(timeline.makespan, rel=1e-9), str(choice)


def test_every_way_to_cut_a_pass_was_drawn() -> None:
    seen: Counter[str] = Counter()
    for name in CASES:
        for seed in range(EACH):
            choice = drawn(name, seed)[0]
            flow = tiers_of(name)._flow(choice, tiers_of(name).pricing.layout(choice))
            for what in ("gathers_always", "reduces_always", "offloads", "gathers_at_start", "overlaps_reduction", "blocking"):
                seen[what] += bool(getattr(flow, what))
    assert min(seen[w] for w in ("gathers_always", "reduces_always", "offloads", "gathers_at_start", "blocking")) > 0, seen


@pytest.mark.parametrize("name", ["dense", "mla", "tiny", "zero-bubble", "deepspeed", "fsdp-fp8"])
def test_upper_ends_are_those_of_the_result(name: str) -> None:
    tiers = tiers_of(name)
    unseen, factor = unseen_of(tiers.pricing.space)
    for seed in range(2):
        choice = drawn(name, seed)[0]
        result = simulate(choice.scenario(tiers.pricing.template), detail="stage")
        found = Intervals(tiers, unseen, factor).high(choice, result.step_time_s)
        assert found == pytest.approx(result.step_interval.high, rel=1e-9), str(choice)
        assert found > result.step_time_s
