"""A faster link, kernel or host never makes a step slower, in both engines."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import accumulate, pairwise
from operator import add
from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from search_random import CASES, TINY, random_choice, space_of

from simpar.costs import host as host_law
from simpar.costs.block_price import BlockPrice, merges, price_list, price_pair, segments
from simpar.costs.host import launch_gaps
from simpar.costs.kernels import KernelModel
from simpar.costs.key_price import scaled
from simpar.costs.price import Price, Provenance
from simpar.costs.pricer import LayoutPricer
from simpar.parallel.keys import Compute
from simpar.parallel.layout import Layout
from simpar.parallel.work import AttentionWork, Collective, ExpertExchange, Gemm, GroupedGemm, LocalOp, MemoryWork, OpList
from simpar.searching.space import Space
from simpar.specs.scenario import Scenario, make_scenario
from simpar.step import Engine, prepare, pricer_of, run

ENGINES = get_args(Engine)
FEW = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
KINDS: dict[str, tuple[type, ...]] = {
    "products": (Gemm, GroupedGemm), "attention": (AttentionWork,), "memory": (MemoryWork,),
    "collectives": (Collective, ExpertExchange), "host": (),
}  # fmt: skip


@contextmanager
def faster(factors: dict[str, float]) -> Iterator[None]:
    """Prices of each kind times its factor."""
    work, launch = LayoutPricer._work, host_law.launch_seconds

    def scaled_work(self: LayoutPricer, wanted: object) -> Price:
        name = next((n for n, kinds in KINDS.items() if isinstance(wanted, kinds)), "")
        return scaled(work(self, wanted), factors.get(name, 1.0))

    def scaled_launch(layout: Layout, price: BlockPrice, phase: str) -> float:
        return launch(layout, price, phase) * factors.get("host", 1.0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LayoutPricer, "_work", scaled_work)
        patch.setattr(KernelModel, "in_steps", lambda self, calibration: {})  # no prices from before
        patch.setattr(host_law, "launch_seconds", scaled_launch)
        yield


@cache
def space(name: str) -> Space:
    return space_of(**CASES[name])


def drawn(name: str, seed: int) -> Scenario | None:
    choice = random_choice(space(name), random.Random(seed))
    return None if choice is None else choice.scenario(space(name).template)


def makespans(scenario: Scenario) -> list[float]:
    priced = prepare(scenario, detail="stage")
    return [run(priced, engine).makespan for engine in ENGINES]


@pytest.mark.parametrize("kind", ["products", "attention", "memory", "collectives"])
def test_faster_parts_are_faster(kind: str) -> None:
    """Or the laws below would hold whatever the step does."""
    scenario = drawn("dense", 3)
    assert scenario is not None
    usual = makespans(scenario)
    with faster({kind: 0.1}):
        assert all(quick < slow for quick, slow in zip(makespans(scenario), usual, strict=True))


names = st.sampled_from(sorted(CASES))
seeds = st.integers(0, 2**32)
parts = st.sampled_from([0.3, 1.0, 3.0])


@FEW
@given(
    name=names, seed=seeds, kind=st.sampled_from([k for k in KINDS if k != "host"]), base=st.lists(parts, min_size=4, max_size=4)
)
def test_a_faster_kernel_or_collective_never_makes_a_step_slower(name: str, seed: int, kind: str, base: list[float]) -> None:
    scenario = drawn(name, seed)
    if scenario is None:
        return
    given_factors = {**dict(zip([k for k in KINDS if k != "host"], base, strict=True)), "host": 0.0}
    last = [float("inf")] * len(ENGINES)
    for factor in (1.0, 0.8, 0.3):
        with faster({**given_factors, kind: given_factors[kind] * factor}):
            now = makespans(scenario)
        assert all(a <= b * (1 + 1e-9) for a, b in zip(now, last, strict=True)), (kind, factor)
        last = now


@FEW
@given(name=names, seed=seeds, base=st.lists(parts, min_size=5, max_size=5), kind=st.sampled_from(sorted(KINDS)))
def test_neither_does_it_where_the_host_is_slow(name: str, seed: int, base: list[float], kind: str) -> None:
    scenario = drawn(name, seed)
    if scenario is None:
        return
    slow = dict(zip(KINDS, base, strict=True))
    last = [float("inf")] * len(ENGINES)
    for factor in (1.0, 0.5, 0.1):
        with faster({**slow, kind: slow[kind] * factor}):
            now = makespans(scenario)
        # What collectives take from compute is one mean for all stages (docs/semantics.md).
        slack = 1e-5 if kind == "host" else 1e-9
        assert all(a <= b * (1 + slack) for a, b in zip(now, last, strict=True)), (kind, factor)
        last = now


@FEW
@given(name=names, seed=seeds, link=st.sampled_from(["scale_up_bandwidth_scale", "nic_bandwidth_scale"]))
def test_a_faster_link_never_makes_a_step_slower(name: str, seed: int, link: str) -> None:
    scenario = drawn(name, seed)
    if scenario is None:
        return
    last = [float("inf")] * len(ENGINES)
    for scale in (1.0, 1.5, 4.0, 16.0):
        cluster = scenario.cluster.model_copy(update={link: scale})
        now = makespans(scenario.model_copy(update={"cluster": cluster}))
        assert all(a <= b * (1 + 1e-9) for a, b in zip(now, last, strict=True)), (link, scale)
        last = now


@pytest.mark.parametrize(
    ("device", "host", "ends"),
    [
        ([1.0, 4.0], [3.0, 3.0], [3.0, 7.0]),  # the second block's kernels come as it runs
        ([1.0, 1.0], [3.0, 3.0], [3.0, 6.0]),  # a faster second block does not move the end of the first
        ([9.0, 1.0], [3.0, 3.0], [9.0, 10.0]),  # the host is ahead and stays so
        ([4.0, 1.0, 1.0], [1.0, 1.0, 5.0], [4.0, 5.0, 7.0]),  # what it gained is lost again
    ],
)
def test_a_block_ends_with_the_device_and_the_launches_whichever_is_later(
    device: list[float], host: list[float], ends: list[float]
) -> None:
    gaps = launch_gaps(device, host)
    assert list(accumulate(map(add, device, gaps))) == pytest.approx(ends)


@settings(deadline=None)
@given(times=st.lists(st.tuples(st.floats(0, 9), st.floats(0, 9), st.floats(0, 1), st.floats(0, 1)), max_size=6))
def test_no_block_ends_later_for_shorter_times(times: list[tuple[float, float, float, float]]) -> None:
    device, host = [t[0] for t in times], [t[1] for t in times]
    quick, soon = [t[0] * t[2] for t in times], [t[1] * t[3] for t in times]
    ends = list(accumulate(map(add, device, launch_gaps(device, host))))
    for d, h in ((quick, host), (device, soon), (quick, soon)):
        assert all(a <= b + 1e-9 for a, b in zip(accumulate(map(add, d, launch_gaps(d, h))), ends, strict=True))
    if ends:
        assert ends[-1] >= max(sum(device), sum(host)) - 1e-9


@pytest.mark.parametrize(("zero_stage", "ends"), [(0, [3.0, 7.0, 10.0]), (3, [3.0, 7.0, 11.0])])
def test_what_the_host_gains_counts_within_a_pass_that_is_not_cut(zero_stage: int, ends: list[float]) -> None:
    """Device 1, 4 and 1 s, host 3, 3 and 4 s: a gain of 1 s in the second block is lost in the third, or not."""
    scenario = make_scenario({
        "model": TINY, "framework": "torchtitan", "cluster": {"hardware": "dgx-h100", "num_nodes": 1},
        "plan": {"zero_stage": zero_stage}, "training": {"sequence_length": 1024, "global_batch_size": 8},
    })  # fmt: skip
    priced = prepare(scenario, detail="layer")
    forwards = [key for key in priced.program.price_keys if isinstance(key, Compute) and key.phase == "F"]
    assert {key.cut for key in forwards} == {zero_stage == 3}
    pricer, device, host = pricer_of(priced.layout), [1.0, 4.0, 1.0], [3.0, 3.0, 4.0]
    assert isinstance(pricer, LayoutPricer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pricer, "_device_and_host", lambda stage, phase: (device, host))
        gaps = [pricer._gap(0, block, "F", cut=zero_stage == 3) for block in range(3)]
    gaps[-1] -= priced.layout.calibration.pass_s
    assert list(accumulate(map(add, device, gaps))) == pytest.approx(ends)


@pytest.mark.parametrize("schedule", ["dualpipe", "dualpipe-v"])
@pytest.mark.parametrize("model", ["llama3.1-8b", "mixtral-8x7b"])
def test_nvlink_and_the_paired_passes_of_dualpipe(schedule: str, model: str) -> None:
    """Pairs that followed from the prices, and two hosts for two passes at once, made four DGX H100 slower with faster NVLink."""
    plan: dict[str, Any] = {"tp": 2, "pp": 2, "schedule": schedule, "virtual_stages": 2 if schedule.endswith("v") else 1}
    if model == "mixtral-8x7b":
        plan |= {"ep": 2, "etp": 1}
    wanted = {
        "model": model, "plan": plan, "training": {"sequence_length": 2048, "global_batch_size": 64},
        "cluster": {"hardware": "dgx-h100", "num_nodes": 4},
    }  # fmt: skip
    scales = (1.0, 1.5, 2.0, 4.0, 8.0, 16.0)
    found = []
    for scale in scales:
        wanted["cluster"] = {"hardware": "dgx-h100", "num_nodes": 4, "scale_up_bandwidth_scale": scale}
        found.append(makespans(make_scenario(wanted)))
    for engine in range(len(ENGINES)):
        steps = [spans[engine] for spans in found]
        assert all(b <= a * (1 + 1e-9) for a, b in pairwise(steps)), (ENGINES[engine], steps)
    assert found[-1] < found[0]


# -- one pair of passes ----------------------------------------------------------------------------------------------


@st.composite
def op_lists(draw: st.DrawFn) -> tuple[LocalOp, ...]:
    ops = OpList()
    for number in range(draw(st.integers(1, 8))):
        kind = draw(st.sampled_from(["compute", "compute", "blocking", "start"]))
        stream = draw(st.sampled_from(["tp", "ep"]))
        if kind == "compute":
            ops.compute(f"c{number}", MemoryWork("copy", float(draw(st.integers(1, 9)))))
        elif kind == "blocking":
            ops.blocking(f"b{number}", Collective("all_reduce", float(draw(st.integers(1, 9))), "tp"), stream)
        else:
            ops.start(f"s{number}", Collective("all_reduce", float(draw(st.integers(1, 9))), "ep"), stream)
    return ops.done()


def price_of(links: float = 1.0, kernels: float = 1.0) -> Any:
    def price(op: LocalOp) -> Price:
        assert isinstance(op.work, MemoryWork | Collective)
        seconds = op.work.bytes_moved * kernels if isinstance(op.work, MemoryWork) else op.work.bytes * links
        return Price(seconds, 0.9 * seconds, 1.2 * seconds, Provenance.MODEL)

    return price


@settings(deadline=None)
@given(
    forward=op_lists(), backward=op_lists(), factor=st.floats(0.01, 1.0), links=st.booleans(),
    slowed=st.sampled_from([0.0, 0.2, 1.0]),
)  # fmt: skip
def test_a_pair_is_monotone_and_no_longer_than_one_after_the_other(
    forward: tuple[LocalOp, ...], backward: tuple[LocalOp, ...], factor: float, links: bool, slowed: float
) -> None:
    slow = price_pair(forward, backward, price_of(), slowed)
    quick = price_pair(forward, backward, price_of(links=factor) if links else price_of(kernels=factor), slowed)
    assert quick.seconds <= slow.seconds * (1 + 1e-9)
    alone = [price_list(ops, price_of(), backward=second) for ops, second in ((forward, False), (backward, True))]
    lost = slowed * dict(slow.communication_s).get("ep", 0.0)
    assert slow.seconds <= (sum(price.seconds for price in alone) + lost) * (1 + 1e-9)
    assert slow.seconds == pytest.approx(sum(seconds for _, seconds in slow.terms))
    busy = dict(slow.communication_s)
    assert all(seconds <= busy[name] * (1 + 1e-9) for name, seconds in slow.terms if name in busy)
    assert slow.kernels == sum(price.kernels for price in alone)
    assert slow.collectives == sum(price.collectives for price in alone)


def test_a_pair_by_hand() -> None:
    """Compute 4, a collective of 3 that the next op waits for, compute 2; the other way round 1, 5, 1: each hides the other's."""
    first, second = OpList(), OpList()
    first.compute("a", MemoryWork("copy", 4.0))
    first.blocking("x", Collective("all_reduce", 3.0, "tp"), "tp")
    first.compute("b", MemoryWork("copy", 2.0))
    second.compute("c", MemoryWork("copy", 1.0))
    second.blocking("y", Collective("all_reduce", 5.0, "tp"), "tp")
    second.compute("d", MemoryWork("copy", 1.0))
    forward, backward = first.done(), second.done()
    assert segments(forward, 0) == [[0, 1], [2]]
    assert segments(backward, 3) == [[3, 4], [5]]
    assert merges([[0, 1], [2]], [[3, 4], [5]]) == [[0, 1, 3, 4, 2, 5], [0, 1, 2, 3, 4, 5]]
    pair = price_pair(forward, backward, price_of())
    # c 0-1, y 1-6, a 1-5, x 6-9 (one stream), d 6-7, wait for x 7-9, b 9-11.
    assert pair.seconds == pytest.approx(11.0)
    assert dict(pair.terms) == {"memory_bound": 6.0, "recompute": 2.0, "tp": 3.0}
    assert dict(pair.communication_s) == {"tp": 8.0}


def test_a_wait_belongs_to_the_collective_that_runs_in_it() -> None:
    """An exchange of 2 on one stream holds up an all-reduce of 3 that the next op waits for: 2 seconds of ep, 3 of tp."""
    ops = OpList()
    ops.compute("a", MemoryWork("copy", 1.0))
    first = ops.start("x", Collective("all_to_all", 2.0, "ep"), "ep")
    ops.wait(first)
    ops.blocking("y", Collective("all_reduce", 3.0, "tp"), "tp")
    ops.compute("b", MemoryWork("copy", 1.0))
    price = price_list(ops.done(), price_of(), backward=False)
    assert dict(price.terms) == {"memory_bound": 2.0, "ep": 2.0, "tp": 3.0}
    assert price.seconds == 7.0
