"""Designs instead of rows, chances to fit and to be best, the few worth a trial; memory as a bound on recomputation."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from search_random import space_of

from simpar.errors import InputError
from simpar.searching import parts
from simpar.searching.answer import answer
from simpar.searching.branch import Branch
from simpar.searching.choice import Choice
from simpar.searching.command import SearchOptions, run
from simpar.searching.decision import OWN_ERROR, SETTLED, Rival, decide
from simpar.searching.design_bounds import DesignBounds
from simpar.searching.designs import design_key, design_name, layout_name
from simpar.searching.find import find
from simpar.searching.incumbents import Incumbents
from simpar.searching.open_layouts import Design
from simpar.searching.parts import Wish, fitting, largest_share, pricing_of
from simpar.searching.settings import FREE, estimate, free_choices
from simpar.searching.space import Space

PLAIN = (
    "overlap_tp=false", "sequence_parallel=true", "cp=1", "overlap_p2p=true", "offload_activations=0", "offload_optimizer=false",
    "shard_size=none",
)  # fmt: skip
ALLOWED = ("micro_batch_size=1,2", "recompute=none,selective:mlp,full:4,full", "schedule=1f1b,interleaved", "virtual_stages=1,2",
           "tp=2,4", "pp=1,2,4", "zero_stage=1", "split=even", "placement=tp-cp-ep-dp-pp",
           "overlap_grad_reduce=true")  # fmt: skip


@pytest.fixture(scope="module")
def space() -> Space:
    return space_of("llama3.1-8b", nodes=1, batch=16, sequence=8192, fix=PLAIN, allow=ALLOWED, framework="megatron-core")


def test_the_best_layout_of_every_design_is_that_of_all_layouts(space: Space) -> None:
    """Folding leaves out no design and takes the best of each."""
    every = find(space, Wish(keep=10_000)).best
    best: dict[object, str] = {}
    for scored in every:
        best.setdefault(design_key(scored.choice), str(scored.choice))
    folded = find(space, Wish(keep=len(best), fold=True)).best
    assert [str(s.choice) for s in folded] == list(best.values())
    assert len(best) > 10
    few = find(space, Wish(keep=5, fold=True)).best
    assert few == folded[:5]
    near = find(space, Wish(keep=50, fold=True, reach=1.1)).best
    assert near == [s for s in folded if s.value <= 1.1 * folded[0].value]


def test_what_a_quick_search_leaves_out_is_in_its_gap(space: Space) -> None:
    found = []
    for more in ({}, {"reach": 1.02, "tolerance": 0.01}):
        # Each with prices and paths of its own, as its counts are of a search that knows none.
        parts._MEMO.pricing = None
        found.append(find(space, replace(Wish(keep=10, fold=True), **more)))
    exact, quick = found
    assert exact.gap == 0.0
    assert quick.gap is not None
    assert 0.0 <= quick.gap <= 0.01
    assert exact.best[0].value >= quick.best[0].value * (1.0 - quick.gap) * (1.0 - 1e-9)
    assert quick.account.evaluated["longest_path"] < exact.account.evaluated["longest_path"]
    assert quick.account.kept + sum(quick.account.rejected.values()) == quick.size


def test_a_setting_is_skipped_where_bounds_of_its_kind_promise_too_little(space: Space) -> None:
    """Of a design that was tried, and never what may beat the best of all by more than the tolerance."""
    best, other = find(space, Wish(keep=2, fold=True)).best
    known = Incumbents(2, fold=True, reach=1.2, tolerance=0.01)
    for scored, value in ((best, 1.0), (other, 1.1)):
        known.add(replace(scored, value=value))
    assert not known.unpromising(1.08, other.choice), "nothing of this design was timed"
    known.timed(other.choice, 1.0, 1.03)
    known.timed(other.choice, 1.0, 1.05)
    assert known.unpromising(1.07, other.choice), "1.07 x 1.03 gains less than 1 % on 1.1"
    assert known.skipped == 1.07
    assert not known.unpromising(1.05, other.choice), "1.05 x 1.03 gains more"
    known.timed(best.choice, 1.0, 1.03)
    assert not known.unpromising(0.985, best.choice), "it may beat the best of all by more than 1 %"
    assert known.unpromising(0.995, best.choice)


def test_memory_floors_never_exceed_what_the_layouts_of_a_pipeline_need(space: Space) -> None:
    """With less and less memory: no layout of a pipeline is faster than its bound with the recomputation that memory asks for."""
    asked = impossible = 0
    for scale in (0.25, 0.35, 0.5, 0.8):
        cluster = space.template.cluster.model_copy(update={"memory_scale": scale})
        small = Space(space.template.model_copy(update={"cluster": cluster}), space.restrictions, space.framework)
        branch, free = Branch(small), Incumbents()
        for group, batch, m in branch.space.nodes():
            for variant in small.variants(group):
                more = branch.memory_floors.seconds(group, batch, m, variant, branch.capacity)
                if more is None:
                    continue
                bound = branch.set_bounds.pipeline_seconds(group, batch, m, variant) + more
                possible = branch.memory_floors.possible(group, batch, m, variant, branch.capacity).tolist()
                for pipeline, least, may_fit in zip(small.pipelines(group.pp, m), bound.tolist(), possible, strict=True):
                    table = branch.design_bounds.open_layouts(Design(group, batch, m, variant, pipeline), free)
                    fastest = float(table.time_s[table.alive].min()) if table.alive.any() else math.inf
                    assert least <= fastest * (1 + 1e-9)
                    assert may_fit or not table.alive.any()
                    asked += math.isfinite(fastest) and least > 0.0
                    impossible += not may_fit
    assert asked > 10
    assert impossible >= 10


def test_a_chance_to_fit_is_a_share_of_the_memory(space: Space) -> None:
    memory = space.template.hardware.gpu.memory.value
    share = largest_share(space, 0.9)
    assert share < 1.0
    assert fitting(space, 0.9, memory)(0.999 * share * memory, 0.0)
    assert not fitting(space, 0.9, memory)(1.001 * share * memory, 0.0)
    assert not fitting(space, 0.9, 0.5 * memory)(0.999 * share * memory, 0.0), "a limit on the bytes holds as well"
    assert fitting(space, None, memory)(memory, 0.0)
    for chance in (0.5, 0.9, 0.999):
        wish = Wish(keep=30, fold=True, fit_probability=chance)
        told = answer([find(space, wish)])
        assert min(c.fit_probability for c in told.candidates) >= chance - 1e-6
    with pytest.raises(InputError, match="fit-probability"):
        run(SearchOptions(model="llama3.1-8b", fit_probability=1.5))


def test_names_say_what_designs_differ_in(space: Space) -> None:
    choices = list(space.choices())
    names = {}
    for choice in choices:
        names.setdefault(design_name(choice), set()).add(design_key(choice))
    assert all(len(keys) == 1 for keys in names.values())
    assert len(names) == len({design_key(c) for c in choices})


def test_a_name_says_how_much_is_recomputed(space: Space) -> None:
    names = {choice.recompute: layout_name(choice) for choice in space.choices() if choice.group.tp == 4 and choice.group.dp == 2}
    assert names["none"] == "tp4 dp2, micro-batch 2, ZeRO 1"
    assert names["full"] == "tp4 dp2, micro-batch 2, full recomputation, ZeRO 1"
    assert names["full:4"] == "tp4 dp2, micro-batch 2, full recomputation of 4 layers a stage, ZeRO 1"
    assert names["selective:mlp"] == "tp4 dp2, micro-batch 2, selective recomputation of mlp, ZeRO 1"


def test_free_choices_change_less_than_can_be_told(space: Space) -> None:
    best = find(space, Wish(keep=1)).best[0].choice
    pricing, capacity = pricing_of(space), space.template.hardware.gpu.memory.value
    design_bounds, m = DesignBounds(space, pricing, capacity), 16 // (best.micro_batch_size * best.group.dp)
    free = free_choices(design_bounds, best)
    own = estimate(design_bounds, best, m)
    assert own is not None
    assert free
    for axis, values in free.items():
        assert values[0] == best.flat()[axis]
        assert len(values) == len(set(values)) > 1
        for value in values[1:]:
            other = Choice.from_flat({**best.flat(), axis: value})
            near = estimate(design_bounds, other, m)
            assert design_key(other) == design_key(best)
            assert near is not None
            assert near[0] <= own[0] * (1 + FREE)


# -- chances -----------------------------------------------------------------------------------------------------------------


def test_chances_add_up_and_follow_the_distance() -> None:
    alike = decide([Rival(0.0, {})] * 4)
    assert alike.best_probability == pytest.approx([0.25] * 4, abs=0.02)
    assert len(alike.try_these) > 1
    apart = decide([Rival(0.0, {}), Rival(1.0, {}), Rival(2.0, {})])
    assert apart.best_probability == pytest.approx([1.0, 0.0, 0.0], abs=1e-3)
    assert apart.try_these == (0,)
    assert apart.optimism == pytest.approx(0.0, abs=1e-3)
    # Two rivals whose difference has a standard deviation of sqrt(2) x OWN_ERROR.
    one = decide([Rival(0.0, {}, "a mesh"), Rival(OWN_ERROR, {}, "a mesh")])
    assert one.best_probability[0] == pytest.approx(0.5 * (1 + math.erf(0.5)), abs=0.01)
    chances = decide([Rival(0.01 * i, {}) for i in range(6)])
    assert 1 < len(chances.try_these) < 6
    assert len(set(chances.try_these)) == len(chances.try_these)
    far = decide([Rival(0.0, {}, 1), Rival(0.0, {}, 2), Rival(0.5, {}, 3)])
    assert set(far.try_these) == {0, 1}
    assert far.best_probability[:2].min() < SETTLED


def test_what_is_as_good_as_the_best_need_not_be_tried() -> None:
    """Two rivals that share all but a little of their errors: one will do."""
    twins = [Rival(0.0, {"matmul": 0.1}, "a mesh"), Rival(0.5, {}, "another")]
    assert decide(twins).try_these == (0,)
    one, two = (decide([Rival(0.0, {}, "a mesh") for _ in range(n)]).try_these for n in (2, 8))
    assert len(one) < 2 + 1
    assert len(two) < 8


def test_errors_that_rivals_share_cancel() -> None:
    """What both have of a category decides nothing; what one has more of does."""
    alone = decide([Rival(0.0, {}), Rival(0.02, {})]).best_probability[0]
    shared = decide([Rival(0.0, {"matmul": 0.2}), Rival(0.02, {"matmul": 0.2})]).best_probability[0]
    other = decide([Rival(0.0, {"matmul": 0.2}), Rival(0.02, {"tp": 0.2})]).best_probability[0]
    assert shared == pytest.approx(alone, abs=0.01)
    assert other < shared - 0.1


def test_the_least_of_many_is_too_good() -> None:
    few, many = (decide([Rival(0.0, {})] * n).optimism for n in (2, 10))
    assert decide([Rival(0.0, {}, n) for n in range(10)]).optimism > many, "meshes have errors of their own"
    # The mean of the least of n normal numbers: 0.564 and 1.539 standard deviations below theirs.
    assert few == pytest.approx(0.564 * OWN_ERROR, rel=0.05)
    assert many == pytest.approx(1.539 * OWN_ERROR, rel=0.05)


def test_what_may_not_fit_wins_less_often() -> None:
    tight = decide([Rival(0.0, {}, 1, 0.5), Rival(0.0, {}, 2, 1.0)])
    assert tight.best_probability == pytest.approx([0.25, 0.75], abs=0.02)
    assert np.isclose(decide([Rival(0.0, {}, 1, 0.0), Rival(5.0, {}, 2, 1.0)]).best_probability[1], 1.0)


def test_a_single_design_is_certain() -> None:
    assert decide([Rival(0.0, {})]).try_these == (0,)
    assert replace(Wish(), fold=True).fold
