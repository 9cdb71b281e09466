"""One simulator: what the search sweeps is the program of `simulate`, at the same prices, and the step takes the same time."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest
from search_random import CASES, SLOW, random_choice, space_of

from simpar.engine.discrete_event import Effects, run
from simpar.engine.slowed_paths import makespans
from simpar.parallel.keys import Gather, Offload, Reduce, Send
from simpar.program.lower import lower
from simpar.program.program import Program, Stream
from simpar.searching.choice import Choice
from simpar.searching.evaluation import Evaluation
from simpar.searching.parts import Intervals, unseen_of
from simpar.searching.pricing import Pricing
from simpar.step import prepare, simulate

TALK = Gather | Reduce | Send
EACH = 5
"""Layouts of every case."""


@cache
def evaluation_of(name: str) -> Evaluation:
    """Programs of a case's space."""
    return Evaluation.of(Pricing(space_of(**{**CASES, **SLOW}[name])))


@cache
def drawn(name: str, seed: int) -> tuple[Choice, Program]:
    """A random layout and the program that the search has of it."""
    evaluation, draw = evaluation_of(name), random.Random(seed)
    while True:
        choice = random_choice(evaluation.pricing.space, draw)
        if choice and evaluation.microbatches(choice) * choice.group.pp * choice.pipeline.virtual_stages <= 64:
            return choice, evaluation.step(choice).program


@pytest.mark.parametrize("seed", range(EACH))
@pytest.mark.parametrize("name", sorted(CASES))
def test_a_batch_takes_the_times_of_the_discrete_event_engine(name: str, seed: int) -> None:
    choice, program = drawn(name, seed)
    # Random prices, so that whatever waits for the wrong op shows; more candidates than are swept one by one.
    draw = np.random.default_rng(seed)
    talks = np.array([isinstance(key, TALK) for key in program.price_keys])
    seconds = 0.05 + draw.random((8, len(talks)))
    slows = np.where(talks, draw.random((8, len(talks))) * 0.3, 0.0)
    priced = prepare(choice.scenario(evaluation_of(name).pricing.template), detail=evaluation_of(name).detail(choice))
    assert priced.program.price_keys == program.price_keys
    table = [type(priced.table)(seconds[row], slows[row]) for row in (0, 5)]
    expected = [run(priced.program, each, Effects(interference=True)).makespan for each in table]
    assert makespans(program, seconds, slows)[[0, 5]] == pytest.approx(expected, rel=1e-9), str(choice)
    assert makespans(program, seconds[5:6], slows[5:6]) == pytest.approx(expected[1:], rel=1e-9), str(choice)


@pytest.mark.parametrize("seed", range(EACH))
@pytest.mark.parametrize("name", [*sorted(CASES), *SLOW])
def test_the_search_finds_the_step_time_of_simulate(name: str, seed: int) -> None:
    evaluation, choice = evaluation_of(name), drawn(name, seed)[0]
    result = simulate(choice.scenario(evaluation.pricing.template), detail=evaluation.detail(choice))
    assert evaluation.longest_path(choice) == pytest.approx(result.step_time_s, rel=1e-9), str(choice)


@pytest.mark.parametrize("name", SLOW)
def test_a_slow_gpu_is_the_slow_pipeline_rank_of_its_pipeline(name: str) -> None:
    """One set of streams for each GPU, or one for each pipeline rank of its pipeline; several pipelines need all of them."""
    evaluation, folds = evaluation_of(name), 0
    template = evaluation.pricing.template
    for seed in range(EACH):
        choice = drawn(name, seed)[0]
        own, detail = choice.scenario(template), evaluation.detail(choice)
        folded = evaluation.pricing.slow_ranks.folded(own, choice.group)
        folds += folded is not own
        assert simulate(folded, detail=detail).step_time_s == pytest.approx(simulate(own, detail=detail).step_time_s, rel=1e-9)
        noisy = own.model_copy(update={"effects": own.effects.model_copy(update={"contention": True})})
        assert evaluation.pricing.slow_ranks.folded(noisy, choice.group) is noisy
    assert (folds > 0) is template.effects.expand


@pytest.mark.parametrize("name", ["tiny", "torchtitan", "zero-bubble", "fsdp-moe", "tied"])
def test_layouts_share_a_program_only_where_it_is_the_same(name: str) -> None:
    """All shardings and offloads of one pipeline: whatever the search has for each is what `lower` makes of it."""
    evaluation, draw = evaluation_of(name), random.Random(7)
    space, checked = evaluation.pricing.space, 0
    while checked < 2:
        base = random_choice(space, draw)
        passes = base and evaluation.microbatches(base) * base.group.pp * base.pipeline.virtual_stages
        if not base or not passes or passes > 24 or base.group.dp * base.group.cp == 1 or (base.group.pp > 1) is bool(checked):
            continue
        checked += 1
        for state, offload in product(space.states(base.group), space.offloads):
            choice = replace(base, state=state, offload=offload)
            step, layout = evaluation.step(choice), evaluation.pricing.layout(choice)
            own = lower(layout, step.schedule, evaluation.detail(choice))
            assert step.program.price_keys == own.price_keys, str(choice)
            for column in ("price", "role", "dep_ptr", "dep_ops", "stream_ptr", "stream_ops"):
                assert (getattr(step.program, column) == getattr(own, column)).all(), (column, str(choice))


def test_every_way_to_cut_a_pass_was_drawn() -> None:
    seen: Counter[str] = Counter()
    for name in CASES:
        for seed in range(EACH):
            choice, program = drawn(name, seed)
            kinds = Counter(type(program.price_keys[p]) for p in program.price.tolist())
            stages = choice.group.pp * choice.pipeline.virtual_stages
            seen["gathers"] += kinds[Gather] > 0
            seen["gathers always"] += kinds[Gather] > 4 * stages
            seen["reduces in buckets"] += kinds[Reduce] > stages
            seen["offloads"] += kinds[Offload] > 0
            sends = {op for op, p in enumerate(program.price.tolist()) if isinstance(program.price_keys[p], Send)}
            seen["blocking sends"] += bool(sends & set(program.ops_of(Stream(0, "compute")).tolist()))
            seen["sends beside"] += bool(sends - set(program.ops_of(Stream(0, "compute")).tolist()))
    assert len(seen) == 6, seen
    assert min(seen.values()) > 0, seen


@pytest.mark.parametrize("name", ["dense", "mla", "tiny", "zero-bubble", "deepspeed", "fsdp-fp8"])
def test_upper_ends_are_those_of_the_result(name: str) -> None:
    evaluation = evaluation_of(name)
    unseen, factor = unseen_of(evaluation.pricing.space)
    for seed in range(2):
        choice = drawn(name, seed)[0]
        result = simulate(choice.scenario(evaluation.pricing.template), detail="stage")
        found = Intervals(evaluation, unseen, factor).high(choice, result.step_time_s)
        assert found == pytest.approx(result.step_interval.high, rel=1e-9), str(choice)
        assert found > result.step_time_s


@pytest.mark.parametrize("first", ["1f1b", "dualpipe"])
def test_expert_exchanges_that_dualpipe_hides_have_its_price(first: str) -> None:
    """DualPipe cuts a block's op list its own way: neither schedule takes over what the other was priced at before, and bounds of
    both are below both."""
    fix = ("pp=2", "ep=8", "tp=1", "cp=1", "micro_batch_size=1", "overlap_ep=true", "zero_stage=1", "split=even", "recompute=none",
           "offload_activations=0", "offload_optimizer=false", "placement=tp-cp-ep-dp-pp")  # fmt: skip
    space = space_of("mixtral-8x7b", nodes=2, batch=64, sequence=4096, fix=fix, allow=("schedule=1f1b,dualpipe,zb-h1",))
    found = {choice.pipeline.schedule: choice for choice in space.choices()}
    same = replace(found["1f1b"], pipeline=found[first].pipeline)
    evaluation = Evaluation(Pricing(space))
    evaluation.prices(same)
    for schedule in ("1f1b", "dualpipe", "zb-h1"):
        choice = replace(same, pipeline=found[schedule].pipeline)
        result = simulate(choice.scenario(space.template), detail="stage")
        assert evaluation.longest_path(choice) == pytest.approx(result.step_time_s, rel=1e-9), schedule
        step = evaluation.step(choice)
        pricer, layout = evaluation.pricer(choice, step), evaluation.pricing.layout(choice)
        table = evaluation.pricing.table(choice.group, 1, choice.variant, "none")
        for row, phase in enumerate("FBIW"):
            assert table.seconds[row, 0] <= pricer.block(layout.stage_blocks[0][1], phase).seconds * (1.0 + 1e-12), phase


def test_a_pipeline_that_lets_its_host_run_ahead_has_prices_of_its_own() -> None:
    """Unsharded weights under ZeRO 3: whichever of two pipelines is priced first, the other takes as long as simulated."""
    fix = ("tp=4", "pp=2", "cp=1", "zero_stage=3", "schedule=interleaved", "virtual_stages=2", "micro_batch_size=1",
           "recompute=none", "split=even", "offload_activations=0", "offload_optimizer=false", "sequence_parallel=true",
           "overlap_tp=false", "placement=tp-cp-ep-dp-pp", "overlap_grad_reduce=true", "overlap_param_gather=true")  # fmt: skip
    space = space_of("llama3.1-8b", sequence=3072, batch=64, fix=fix, allow=("overlap_p2p=true,false",))
    both = [choice for choice in space.choices() if choice.state.shard_size is None]
    for order in (both, both[::-1]):
        evaluation = Evaluation.of(Pricing(space))
        for choice in order:
            step_time_s = simulate(choice.scenario(space.template), detail="stage").step_time_s
            assert evaluation.longest_path(choice) == pytest.approx(step_time_s, rel=1e-9), str(choice)
