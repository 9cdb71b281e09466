"""A tied matrix is one parameter where one rank holds both ends of the model, and two copies where two ranks do."""

from __future__ import annotations

from typing import Any

import pytest
from search_random import TINY

from simpar.parallel.keys import Gather, Reduce
from simpar.parallel.layout import Layout
from simpar.parallel.traffic import state_collectives
from simpar.result.memory import static_state
from simpar.specs.scenario import Scenario, make_scenario
from simpar.step import simulate

VOCABULARY = 65536
MATRIX = VOCABULARY * 512
"""Elements of the shared matrix."""


def scenario(*, tied: bool, **plan: Any) -> Scenario:
    model = {**TINY, "vocab_size": VOCABULARY, "tie_word_embeddings": tied}
    table = {"name": "tied", "model": model, "cluster": {"hardware": "dgx-h100", "num_nodes": 1}, "plan": plan,
             "training": {"sequence_length": 1024, "global_batch_size": 32}}  # fmt: skip
    return make_scenario(table)


def layout(*, tied: bool, stages: int = 1, ends_meet: bool = False, **plan: Any) -> Layout:
    return Layout.of(scenario(tied=tied, **plan), stages, ends_meet=ends_meet)


def moved(found: Layout, *, gather: bool = False) -> float:
    """Bytes of all stages' gradients (or weights)."""
    keys = [(Gather if gather else Reduce)(s, 0, len(found.stage_blocks[s])) for s in range(found.num_stages)]
    return sum(c.bytes * c.repeat for key in keys for c in state_collectives(found, key))


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_one_rank_reduces_and_gathers_it_once(zero: int) -> None:
    tied, apart = (layout(tied=t, zero_stage=zero, dp=8) for t in (True, False))
    assert moved(apart) - moved(tied) == pytest.approx(MATRIX * tied.state_bytes.reduce)
    if zero:
        assert moved(apart, gather=True) - moved(tied, gather=True) == pytest.approx(MATRIX * tied.state_bytes.gather)


def test_two_ranks_reduce_a_copy_each() -> None:
    tied, apart = (layout(tied=t, stages=2, pp=2, dp=4) for t in (True, False))
    assert moved(tied) == pytest.approx(moved(apart))


def test_a_v_placement_holds_it_once() -> None:
    tied, apart = (layout(tied=t, stages=4, ends_meet=True, pp=2, dp=4, schedule="zb-v") for t in (True, False))
    assert moved(apart) - moved(tied) == pytest.approx(MATRIX * tied.state_bytes.reduce)
    rest, more = (dict(static_state(found, [0, 3]))["parameters"] for found in (tied, apart))
    assert more - rest == pytest.approx(2.0 * MATRIX)


ONE_RANK = ({"dp": 8}, {"pp": 2, "dp": 4, "schedule": "zb-v"})


@pytest.mark.parametrize(("plan", "shared"), [*((p, True) for p in ONE_RANK), ({"pp": 2, "dp": 4}, False)])
def test_its_update_takes_time_once(plan: dict[str, Any], shared: bool) -> None:
    tied, apart = (dict(simulate(scenario(tied=t, zero_stage=0, **plan)).waterfall())["optimizer"] for t in (True, False))
    if shared:
        # Adam reads and writes some 28 bytes per weight, at 3.35 TB/s at best, on one of at most two ranks.
        assert apart - tied > 28.0 * MATRIX / 3.35e12 / 2.0
    else:
        assert tied == pytest.approx(apart, rel=1e-6)
