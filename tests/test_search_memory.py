"""The search's memory of a layout is that of `simulate`: what every rank allocates, and what the fullest device uses."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest
from search_random import CASES, random_choice, space_of

from simpar.result.allocations import Known, Replays
from simpar.result.requests import rank_events
from simpar.schedules import build_schedule
from simpar.searching.branch import Branch
from simpar.searching.choice import Choice
from simpar.searching.in_flight import held_by_chunk, in_flight
from simpar.searching.request import make_space
from simpar.step import simulate

LARGEST = 400


@cache
def branch_of(name: str) -> Branch:
    """A branch over a case's space whose activations stay on the device."""
    case = dict(CASES[name])
    return Branch(space_of(**case, fix=("offload_activations=0",)))


def layouts(branch: Branch, count: int, seed: int) -> list[Choice]:
    """Random layouts whose memory does not depend on time."""
    draw = random.Random(seed)
    found: list[Choice] = []
    while len(found) < count:
        choice = random_choice(branch.space, draw)
        if choice is None or branch.design_bounds.allocated(choice) is None:
            continue
        m = branch.space.template.training.global_batch_size // (choice.micro_batch_size * choice.group.dp)
        if m * choice.group.pp * choice.pipeline.virtual_stages <= LARGEST:
            found.append(choice)
    return found


@pytest.mark.parametrize("name", sorted(CASES))
def test_memory_is_that_of_the_simulation(name: str) -> None:
    branch = branch_of(name)
    for choice in layouts(branch, 6, 17):
        result = simulate(choice.scenario(branch.space.template), detail="stage")
        allocated = branch.design_bounds.allocated(choice)
        assert allocated is not None
        assert allocated == pytest.approx(np.array([rank.allocated_bytes for rank in result.memory]), rel=1e-6), str(choice)
        device_bytes = branch.evaluation.device_bytes(choice, allocated)
        assert device_bytes == pytest.approx(result.worst_rank.device_bytes, rel=1e-6), str(choice)


@pytest.mark.parametrize("name", sorted(CASES))
def test_what_a_rank_reserves_does_not_depend_on_what_hides_traffic(name: str) -> None:
    """`Evaluation.device_bytes` is remembered without these switches."""
    branch = branch_of(name)
    for choice in layouts(branch, 3, 29):
        of_mesh = product(branch.space.variants(choice.group), branch.space.states(choice.group))
        every = [replace(choice, variant=variant, state=state) for variant, state in of_mesh]
        found = {}
        for other in (each for each in every if each.requested == choice.requested):
            allocated = branch.design_bounds.allocated(other)
            assert allocated is not None
            branch.evaluation._peaks.clear()  # each is replayed by itself
            found[other] = branch.evaluation._device_bytes(other, allocated)
        assert choice in found
        assert max(found.values()) == pytest.approx(min(found.values()), rel=1e-12), [str(other) for other in found]


@pytest.mark.parametrize("name", sorted(CASES))
def test_ranks_that_run_the_same_ask_for_the_same(name: str) -> None:
    """`Choice.requested`: neither the share that goes to the host, nor where ranks sit, nor what hides traffic moves a request."""
    branch, seen = branch_of(name), 0
    for choice in layouts(branch, 3, 31):
        step = branch.evaluation.step(choice)
        groups = [g for g in branch.space.groups if replace(g, placement="") == choice.requested.group]
        passes = [(phase, s, 0, 1) for s in step.held[0] for phase in "FBFB"]
        others = product(groups, branch.space.variants(choice.group), branch.space.states(choice.group), (0.0, 0.5, 1.0))
        every = [
            replace(choice, group=g, variant=v, state=s, offload=replace(choice.offload, activations=x)) for g, v, s, x in others
        ]
        alike = [each for each in every if each.requested == choice.requested]
        expected = rank_events(branch.pricing.layout(choice), step.held[0], passes)
        for other in alike:
            assert rank_events(branch.pricing.layout(other), step.held[0], passes) == expected, str(other)
        seen += len(alike)
    assert seen >= 9


def test_what_is_known_of_the_allocator_is_of_the_same_passes_and_room() -> None:
    branch = branch_of("dense")
    choice = next(each for each in layouts(branch, 20, 3) if branch.evaluation.microbatches(each) > 1)
    layout, held = branch.pricing.layout(choice), branch.evaluation.step(choice).held
    blocks = len(layout.stage_blocks[held[0][0]])
    forward, backward = (("F", held[0][0], 0, blocks), ("B", held[0][0], 0, blocks))
    known: Known = {}
    found = []
    for passes in ([forward, backward] * 2, [forward, forward, backward, backward]):
        shared, alone = (Replays(layout, held, lambda _, own=passes: own, each) for each in (known, None))  # type: ignore[misc]
        for room in (None, 1.01, None):
            assert shared.peak(0, room) == alone.peak(0, room)
        found.append(shared.peak(0))
    assert found[0].allocated_bytes < found[1].allocated_bytes
    assert len(known) == 4


@pytest.mark.parametrize("name", sorted(CASES))
def test_full_recomputation_keeps_least(name: str) -> None:
    """Memory floors ask only it whether anything fits."""
    pricing, draw = branch_of(name).pricing, random.Random(5)
    for choice in (c for c in (random_choice(pricing.space, draw) for _ in range(6)) if c is not None):
        of = (choice.group, choice.micro_batch_size, choice.variant)
        least = pricing.held(*of, "full")
        for each in pricing.space.selections:
            assert (least <= pricing.held(*of, each)).all(), (str(choice), each)


@pytest.mark.parametrize("framework", [None, "megatron-core"])
def test_pipelines_that_memory_rules_out_fit_under_no_recomputation(framework: str | None) -> None:
    """Half a device: of some pipelines nothing fits, whatever is recomputed, and of others something does."""
    space = space_of("deepseek-v2", nodes=8, batch=64, framework=framework, fix=("offload_activations=0",))
    branch, draw, seen = Branch(space), random.Random(1), set()
    floors, capacity = branch.memory_floors, branch.capacity / 2
    for _ in range(24):
        group, batch, m = draw.choice(branch.space.nodes())
        variant, full = draw.choice(space.variants(group)), floors._fullest_of(group.pp, m)
        if full is None:
            continue
        room = floors._room(group, variant, m, capacity)
        names = [*(["full"] if any(space._full) and not space.merges(variant) else []), *space.selections]
        fits = [full.held @ branch.pricing.held(group, batch, variant, name) <= room for name in names]
        wanted = np.any(fits, axis=0)
        assert (floors.possible(group, batch, m, variant, capacity)[full.pipeline] == wanted).all()
        seen |= {(space.merges(variant), bool(w)) for w in wanted}
    assert {w for _, w in seen} == {False, True}


@pytest.mark.parametrize("name", ["gqa", "mla", "torchtitan", "fsdp-fp8"])
def test_what_blocks_keep_does_not_depend_on_overlap_or_place(name: str) -> None:
    pricing, draw = branch_of(name).pricing, random.Random(3)
    for choice in (c for c in (random_choice(pricing.space, draw) for _ in range(12)) if c is not None):
        args = (choice.group, choice.micro_batch_size, choice.variant, choice.recompute.partition(":")[0]
                if choice.recompute.startswith("full") else choice.recompute)  # fmt: skip
        table = pricing.table(*args)
        table = table.sharded or table
        assert (pricing.held(*args) == table.kept + table.logits).all(), str(choice)


@pytest.mark.parametrize("name", sorted(CASES))
def test_selected_modules_change_what_runs_again_and_nothing_else(name: str) -> None:
    pricing, draw = branch_of(name).pricing, random.Random(7)
    for choice in (c for c in (random_choice(pricing.space, draw) for _ in range(4)) if c is not None):
        of = (choice.group, choice.micro_batch_size, choice.variant)
        state, again = pricing.kinds_of_states(choice.variant)[-1], pricing._selected(*of)
        blocks = pricing.locals(pricing.probe(*of, "none", state))
        for each in pricing.space.selections:
            probed = pricing.probe(*of, each, state)
            for _, options, recomputes in blocks.values():
                kept = replace(options, recompute=again[each])
                assert not recomputes or pricing.kinds.encoders or kept == probed.options, (str(choice), each)
            assert {block for block, _, _ in blocks.values()} >= set(probed.network.layers), (str(choice), each)


@pytest.mark.parametrize(
    ("fix", "model", "nodes", "batch"),
    [
        (("micro_batch_size=4", "virtual_stages=5", "schedule=interleaved", "pp=4", "tp=8"), "llama3.1-70b", 8, 128),
        (("ep=8", "pp=4", "schedule=interleaved"), "mixtral-8x7b", 4, 64),
    ],
    ids=["70b-deep", "mixtral-ep"],
)  # fmt: skip
def test_layouts_that_once_differed(fix: tuple[str, ...], model: str, nodes: int, batch: int) -> None:
    space = space_of(model, nodes=nodes, batch=batch, sequence=4096, fix=(*fix, "offload_activations=0"))
    branch = Branch(space)
    for choice in layouts(branch, 4, 1):
        result = simulate(choice.scenario(space.template), detail="stage")
        allocated = branch.design_bounds.allocated(choice)
        assert allocated is not None
        assert allocated.max() == pytest.approx(max(rank.allocated_bytes for rank in result.memory), rel=1e-6), str(choice)


@pytest.mark.parametrize(("name", "ranks", "count"), [("1f1b", 4, 8), ("gpipe", 4, 8), ("zb-h1", 4, 8), ("1f1b", 8, 3)])
def test_micro_batches_in_flight_of_known_schedules(name: str, ranks: int, count: int) -> None:
    """1F1B holds p - r of them on rank r, GPipe all, ZB-H1 as many as 1F1B."""
    schedule = build_schedule(name, ranks, count)
    found = in_flight(schedule, np.arange(ranks))
    for rank in range(ranks):
        mine = found.rank == rank
        most = int((found.held + found.waiting)[mine].max())
        expected = count if name == "gpipe" else min(ranks - rank, count)
        assert most == expected if name != "zb-h1" else expected <= most <= min(ranks, count)


@pytest.mark.parametrize(
    ("name", "ranks", "count", "chunks"),
    [("gpipe", 4, 6, 1), ("1f1b", 4, 8, 1), ("1f1b", 4, 2, 1), ("interleaved", 4, 16, 3), ("interleaved", 2, 8, 5),
     ("interleaved", 4, 6, 2), ("interleaved", 4, 3, 2), ("interleaved", 8, 8, 2)],
)  # fmt: skip
def test_fullest_moments_by_formula_are_those_of_the_order(name: str, ranks: int, count: int, chunks: int) -> None:
    """Whatever the chunks weigh: the fullest moment of a rank's row."""
    schedule = build_schedule(name, ranks, count, **({"virtual_stages": chunks} if chunks > 1 else {}))
    found, draw = in_flight(schedule, np.arange(ranks * chunks)), np.random.default_rng(0)
    for weights in draw.integers(0, 5, (8, ranks * chunks)):
        for rank in range(ranks):
            formula = held_by_chunk(name, ranks, count, chunks, rank) @ weights[rank::ranks]
            assert formula.max() == (found.held[found.rank == rank] @ weights).max(), rank


@pytest.mark.parametrize(
    ("semantics", "fix"),
    [("internevo", ()), ("torchtitan", ("pp=2", "zero_stage=3")), ("nanotron", ("pp=4",)),
     ("aa-scaling", ()), ("aa-scaling", ("pp=2",)),
     ("torchtitan", ("pp=2", "schedule=1f1b")), ("torchtitan", ("pp=4", "schedule=interleaved")),
     ("torchtitan", ("pp=2", "schedule=dualpipe-v")), ("olmo-core", ("pp=2", "schedule=1f1b"))],
)  # fmt: skip
def test_memory_of_frameworks_is_that_of_the_simulation(semantics: str, fix: tuple[str, ...]) -> None:
    """Updates with tensors of their own, gradients that rest unsharded, hosts that wait: what Megatron's rows do not have."""
    space = space_of("llama3.1-8b", batch=16, sequence=512, semantics=semantics, fix=(*fix, "tp=2", "offload_activations=0"))
    branch = Branch(space)
    for choice in layouts(branch, 3, 5):
        result = simulate(choice.scenario(space.template), detail="stage")
        allocated = branch.design_bounds.allocated(choice)
        assert allocated == pytest.approx(np.array([rank.allocated_bytes for rank in result.memory]), rel=1e-6), str(choice)
        device_bytes = branch.evaluation.device_bytes(choice, allocated)
        assert device_bytes == pytest.approx(result.worst_rank.device_bytes, rel=1e-6), str(choice)


@pytest.mark.parametrize(
    ("semantics", "training"),
    [
        ("torchtitan", {"optimizer": "adamw-8bit-paged"}),
        ("plain", {"trainable": "lora", "lora_modules": "all", "base_weights": "nf4", "lora_adapters": 2}),
        ("torchtitan", {"pure_bf16": True, "optimizer": "lion"}),
        ("transformers", {"cross_entropy": "linear", "fused_kernels": ["norm", "rope"]}),
        ("transformers", {"trainable": "lora", "lora_modules": "all", "lora_dropout": 0.05}),
        ("lit-gpt", {"trainable": "lora", "lora_modules": "qv", "lora_dropout": 0.05}),
    ],
)
def test_memory_of_fine_tunes_is_that_of_the_simulation(semantics: str, training: dict[str, object]) -> None:
    space = space_of("llama3.1-8b", nodes=1, batch=16, sequence=512, semantics=semantics, training=training,
                     fix=("pp=1", "offload_activations=0"))  # fmt: skip
    branch = Branch(space)
    for choice in layouts(branch, 3, 11):
        result = simulate(choice.scenario(space.template), detail="stage")
        allocated = branch.design_bounds.allocated(choice)
        assert allocated == pytest.approx(np.array([rank.allocated_bytes for rank in result.memory]), rel=1e-6), str(choice)


@pytest.mark.parametrize("semantics", ["megatron-core", "torchtitan"])
def test_memory_of_adapters_of_experts_is_that_of_the_simulation(semantics: str) -> None:
    training = {"trainable": "lora", "lora_modules": "all", "lora_rank": 32}
    space = space_of("qwen3-30b-a3b", nodes=1, batch=16, sequence=512, semantics=semantics, training=training,
                     fix=("pp=1", "offload_activations=0", "offload_optimizer=false"))  # fmt: skip
    branch, spread = Branch(space), set()
    for choice in layouts(branch, 6, 11):
        result = simulate(choice.scenario(space.template), detail="stage")
        allocated = branch.design_bounds.allocated(choice)
        assert allocated == pytest.approx(np.array([rank.allocated_bytes for rank in result.memory]), rel=1e-6), str(choice)
        spread.add(choice.group.ep)
    assert max(spread) > 1


def test_memory_of_ddp_buckets_is_that_of_the_simulation() -> None:
    space = space_of("llama3.1-8b", nodes=1, batch=16, sequence=512, semantics="transformers",
                     fix=("pp=1", "tp=1", "zero_stage=0", "offload_activations=0", "offload_optimizer=false"))  # fmt: skip
    branch = Branch(space)
    for choice in layouts(branch, 3, 11):
        result = simulate(choice.scenario(space.template), detail="stage")
        assert dict(result.memory[0].static)["communication_buffers"] > 0.0
        allocated = branch.design_bounds.allocated(choice)
        assert allocated == pytest.approx(np.array([rank.allocated_bytes for rank in result.memory]), rel=1e-6), str(choice)


@pytest.mark.parametrize("training", [{}, {"trainable": "lora", "lora_modules": "all", "lora_rank": 64}])
@pytest.mark.parametrize("nodes", [{"num_nodes": 1}, {"num_nodes": 1, "gpus_per_node": 1}])
@pytest.mark.parametrize("name", ["transformers", "deepspeed"])
def test_memory_of_parameters_on_the_host_is_that_of_the_simulation(
    name: str, nodes: dict[str, int], training: dict[str, object]
) -> None:
    """FSDP takes gradients and states there too, DeepSpeed the parameters alone; one rank gathers from its own host."""
    table = {
        "model": "llama3.1-8b", "framework": name, "framework_version": "2025-06", "cluster": {"hardware": "dgx-h100", **nodes},
        "training": {"sequence_length": 512, "global_batch_size": 16, **training},
    }  # fmt: skip
    fix = ("pp=1", "tp=1", "cp=1", "zero_stage=3", "offload_activations=0", "micro_batch_size=1")
    space = make_space(table, fix=fix, framework=name)
    branch, found = Branch(space), {False: 0.0, True: 0.0}
    for choice in space.choices():
        result = simulate(choice.scenario(space.template), detail="stage")
        allocated = branch.design_bounds.allocated(choice)
        if allocated is not None:
            assert allocated == pytest.approx(np.array([rank.allocated_bytes for rank in result.memory]), rel=1e-6), str(choice)
            found[choice.state.offload_parameters] = max(allocated.max(), found[choice.state.offload_parameters])
    assert 0.0 < found[True] < found[False]


@pytest.mark.parametrize("training", [{}, {"trainable": "lora", "lora_modules": "all", "lora_rank": 64}])
def test_copies_of_autocast_rest_where_nothing_is_recomputed(training: dict[str, object]) -> None:
    """The search prices states once for all that is recomputed; autocast keeps 16-bit copies only without that."""
    table = {
        "model": "llama3.1-8b", "framework": "transformers", "framework_version": "2025-06",
        "cluster": {"hardware": "dgx-h100", "num_nodes": 1},
        "training": {"sequence_length": 512, "global_batch_size": 16, **training},
    }  # fmt: skip
    for recompute in ("none", "full"):
        fix = ("pp=1", "tp=1", "cp=1", "zero_stage=0", "offload_activations=0", "offload_optimizer=false", "micro_batch_size=1")
        space = make_space(table, fix=(*fix, f"recompute={recompute}"))
        branch = Branch(space)
        (choice, *_) = layouts(branch, 1, 11)
        result = simulate(choice.scenario(space.template), detail="stage")
        allocated = branch.design_bounds.allocated(choice)
        assert allocated == pytest.approx(np.array([rank.allocated_bytes for rank in result.memory]), rel=1e-6), str(choice)
