"""Expert-parallel exchanges."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simpar.costs.collective_law import packed
from simpar.costs.collectives import CollectiveModel
from simpar.costs.expert_parallel import Exchange, groups_in_turn, groups_visited
from simpar.costs.pricer import LayoutPricer
from simpar.errors import InputError
from simpar.parallel.blocks import LocalBlock
from simpar.parallel.layout import Layout
from simpar.parallel.work import Collective, ExpertExchange, Gemm, GroupedGemm, LocalOp, MemoryWork
from simpar.specs.hardware import load_hardware
from simpar.specs.model import MoeSpec
from simpar.specs.scenario import make_scenario
from simpar.step import cost_models

MODEL = CollectiveModel(load_hardware("dgx-h100"))


def dispatch(tokens: float, direction: str = "dispatch", **more: Any) -> Exchange:
    return Exchange(direction, tokens, 7168 * 2, 8, 256, **more)


@pytest.mark.parametrize(("groups", "topk", "experts"), [(8, 8, 256), (4, 6, 64), (16, 2, 16), (2, 1, 8)])
def test_visited_groups_match_random_routing(groups: int, topk: int, experts: int) -> None:
    rng = np.random.default_rng(0)
    picks = np.argsort(rng.random((4000, experts)), axis=1)[:, :topk] // (experts // groups)
    counted = np.mean([len(set(row)) for row in picks.tolist()])
    assert groups_visited(groups, topk, experts) == pytest.approx(counted, rel=0.03)


def test_a_token_sent_once_a_domain_beats_one_copy_an_expert() -> None:
    placement = packed(MODEL.hardware, 32, 4)
    copies = MODEL.exchange(dispatch(4096), placement).seconds
    once = MODEL.exchange(dispatch(4096), placement, "deepep").seconds
    assert once < 0.7 * copies


def test_plain_dispatch_is_an_all_to_all_of_the_copies() -> None:
    placement = packed(MODEL.hardware, 16, 2)
    price = MODEL.exchange(dispatch(1024), placement)
    assert price == MODEL.time("all_to_all", 1024 * 8 * 7168 * 2, placement)


def test_limiting_the_nodes_limits_the_traffic() -> None:
    placement = packed(MODEL.hardware, 128, 16)
    free, limited = (MODEL.exchange(dispatch(8192, nodes_limit=limit), placement, "deepep").seconds
                     for limit in (None, 4))  # fmt: skip
    assert limited < 0.7 * free


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 8), st.integers(1, 20000), st.integers(1, 20000))
def test_more_tokens_take_longer(nodes: int, a: int, b: int) -> None:
    placement = packed(MODEL.hardware, 8 * nodes, nodes)
    few, many = (MODEL.exchange(dispatch(t, "combine"), placement, "deepep").seconds for t in sorted((a, b)))
    assert few <= many


@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_more_sms_are_never_slower(nodes: int) -> None:
    placement = packed(MODEL.hardware, 8 * nodes, nodes)
    times = [MODEL.exchange(dispatch(4096, sms=s), placement, "deepep").seconds for s in (4, 8, 16, 24)]
    assert times == sorted(times, reverse=True)


def test_nothing_to_send_costs_nothing() -> None:
    assert MODEL.exchange(dispatch(0), packed(MODEL.hardware, 8, 1), "deepep").seconds == 0
    with pytest.raises(InputError, match="deepep"):
        MODEL.exchange(dispatch(8), packed(MODEL.hardware, 8, 1), "deep")


@pytest.mark.parametrize(
    ("groups", "topk", "experts"), [(8, 8, 128), (64, 8, 256), (64, 4, 128), (32, 8, 384), (8, 6, 64), (4, 5, 12), (1, 8, 64)]
)
def test_experts_dealt_in_turn_lie_side_by_side(groups: int, topk: int, experts: int) -> None:
    tokens = [[(token * topk + i) % experts * groups // experts for i in range(topk)] for token in range(experts)]
    assert groups_in_turn(groups, topk, experts) == pytest.approx(np.mean([len(set(row)) for row in tokens]))


def test_a_token_whose_experts_are_side_by_side_travels_once() -> None:
    placement = packed(MODEL.hardware, 64, 8)
    drawn, dealt = (MODEL.exchange(dispatch(4096, in_turn=turn), placement, "deepep").seconds for turn in (False, True))
    assert dealt < 0.3 * drawn


@pytest.mark.parametrize("framework", ["megatron-core", "torchtitan"])
def test_a_run_says_how_its_balance_is_forced(framework: str) -> None:
    """Megatron-LM's is drawn at random, torchtitan's dealt in turn; a scenario's word goes before either."""
    moe = MoeSpec(num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768)
    seconds = {}
    for stated in (None, True, False):
        chosen = make_scenario({
            "model": "qwen3-30b-a3b", "framework": framework, "cluster": {"hardware": "dgx-h200", "num_nodes": 1},
            "plan": {"ep": 8, "ep_dispatcher": "deepep"},
            "training": {
                "sequence_length": 4096, "global_batch_size": 8, "routing": {"kind": "balanced", "in_turn": stated},
            },
        })  # fmt: skip
        layout = Layout.of(chosen, 1)
        work = ExpertExchange(False, 4096.0, 2048, moe, 2.0, "deepep")
        seconds[stated] = (
            LayoutPricer(layout, *cost_models(chosen, layout.hardware)).op_price(LocalOp("dispatch", "ep", work, ())).seconds
        )
    assert seconds[None] == seconds[framework == "torchtitan"]
    assert seconds[True] < 0.5 * seconds[False]


@pytest.mark.parametrize("load", [1.0, 2.0])
def test_an_all_gather_gives_every_rank_all_tokens_however_loads_are(load: float) -> None:
    """4,096 tokens of 2,048 16-bit values on each of 8 ranks are 134,217,728 bytes, there as gathered, back as summed."""
    layout = Layout.of(make_scenario({
        "model": "qwen3-30b-a3b", "framework": "megatron-core", "cluster": {"hardware": "dgx-h200", "num_nodes": 1},
        "plan": {"ep": 8, "ep_dispatcher": "allgather"}, "training": {"sequence_length": 4096, "global_batch_size": 8},
    }), 1, load_factor=load)  # fmt: skip
    block = next(b for b in layout.stage_blocks[0] if b.expert_parameters)
    whole = 8 * 4096 * 2048 * 2
    for ops, names in ((block.forward, ("all_gather", "reduce_scatter")), (block.backward, ("all_gather", "reduce_scatter"))):
        sent = [op.work for op in ops if isinstance(op.work, Collective) and op.work.dimension == "ep"]
        assert [work.name for work in sent] == list(names)
        assert [work.bytes for work in sent] == pytest.approx([whole, whole])
    assert not [op for op in block.forward if isinstance(op.work, ExpertExchange)]


def _expert_block(framework: str, capacity: float | None, sequences: int = 2, hardware: str = "dgx-h200") -> LocalBlock:
    chosen = make_scenario({
        "model": "qwen3-30b-a3b", "framework": framework, "framework_version": "2026-06",
        "cluster": {"hardware": hardware, "num_nodes": 1}, "plan": {"ep": 8, "zero_stage": 3, "recompute": "none"},
        "training": {
            "sequence_length": 4096, "micro_batch_size": sequences, "global_batch_size": 8 * sequences,
            "routing": {"kind": "balanced", **({} if capacity is None else {"capacity_factor": capacity})},
        },
    })  # fmt: skip
    return Layout.of(chosen, 1).stage_blocks[0][1]


@pytest.mark.parametrize("capacity", [1.25, 2.0])
def test_a_capacity_in_maxtext_is_a_product_with_a_mask(capacity: float) -> None:
    """Of each sequence's 4096 tokens with all places at the experts, 8 x 4096 times the capacity; the mask of the way back has a
    gradient. Others copy rows, and without a capacity so does MaxText."""
    block = _expert_block("maxtext", capacity)
    works = [op.work for op in block.forward if ".one_hot" in op.name]
    assert works == [Gemm(round(2 * 8 * 4096 * capacity), 2048, 4096)] * 2
    assert [op.work for op in block.backward if ".one_hot" in op.name] == works + works[:1]
    for plain in (_expert_block("megatron-core", capacity), _expert_block("maxtext", None)):
        assert not [op for op in (*plain.forward, *plain.backward) if ".one_hot" in op.name]


def test_xla_multiplies_every_row_by_every_expert_on_nvidia() -> None:
    """Each of 8 ranks holds 16 of 128 experts and room for 8 x 2 x 4096 x 8 rows; what is contracted is 16 times as wide, and the
    rows so padded are written first: 2048 to 2 x 768 and 768 to 2048 values. Megatron's products have their own rows alone."""
    rows, block = 8 * 2 * 4096 * 8, _expert_block("maxtext", None)
    found = {op.name: op.work for op in (*block.forward, *block.backward) if op.name.startswith("moe")}
    works = [work for work in found.values() if isinstance(work, Gemm) and work.m > 8192]  # the router has 8192 rows
    assert {(work.direction, work.m, work.n, work.k) for work in works} == {
        ("forward", rows, 1536, 16 * 2048), ("dgrad", rows, 16 * 1536, 2048), ("wgrad", rows, 1536, 16 * 2048),
        ("forward", rows, 2048, 16 * 768), ("dgrad", rows, 16 * 2048, 768), ("wgrad", rows, 2048, 16 * 768),
    }  # fmt: skip
    written = sorted(op.work.bytes_moved / rows / 32 for op in (*block.forward, *block.backward) if ".pad" in op.name)
    assert written == [768, 768, 1536, 2048, 2048, 2048]
    assert not [op for op in _expert_block("maxtext", 1.25).forward if ".pad" in op.name]
    kinds = {type(op.work) for op in _expert_block("megatron-core", None).forward if op.name.startswith("moe_")}
    assert Gemm not in kinds


def test_transformers_runs_every_expert_of_llama_4_on_every_token() -> None:
    """16 experts of width 8192 on each of 2048 tokens of width 5120 (Llama4TextExperts: two torch.bmm); one of them is chosen. What
    is kept of the rows is 16 times as large. Elsewhere, and of another family, rows go to the chosen experts alone."""

    def block(model: str, framework: str) -> LocalBlock:
        chosen = make_scenario({
            "model": model, "framework": framework, "framework_version": "2026-06",
            "cluster": {"hardware": "dgx-h200", "num_nodes": 1}, "plan": {"zero_stage": 3, "recompute": "none"},
            "training": {"sequence_length": 2048, "micro_batch_size": 1, "global_batch_size": 8},
        })  # fmt: skip
        return Layout.of(chosen, 1).stage_blocks[0][1]

    def rows(found: LocalBlock) -> set[float]:
        return {op.work.tokens for op in (*found.forward, *found.backward) if isinstance(op.work, GroupedGemm)}

    for framework in ("trl", "transformers", "deepspeed", "torch-fsdp", "swift"):
        found = block("llama4-scout", framework)
        assert rows(found) == {16 * 2048}
        shapes = {(op.work.n, op.work.k) for op in found.forward if isinstance(op.work, GroupedGemm)}
        assert shapes == {(2 * 8192, 5120), (5120, 8192)}
    for framework in ("torchtitan", "torchtune", "modalities"):
        assert rows(block("llama4-scout", framework)) == {2048}
    assert rows(block("qwen3-30b-a3b", "trl")) == {8 * 2048}
    inputs, middle = 2048 * 5120 * 2.0, 2048 * 8192 * 2.0
    for name, each in (("moe/activation_in", 2 * middle), ("moe/fc1_in", inputs)):
        kept = [dict(block("llama4-scout", framework).saved)[name] for framework in ("transformers", "modalities")]
        assert kept == [16 * each, each]


def test_without_a_capacity_xla_has_room_for_the_rows_of_all_expert_ranks() -> None:
    """Kernels that pass over rows and what is kept of them are eight times as large, products and exchanges are not."""
    found = {}
    for capacity in (None, 1.0):
        block = _expert_block("maxtext", capacity, hardware="mi355x")
        found[capacity] = (
            [op.work for op in block.forward if isinstance(op.work, GroupedGemm)],
            [op.work.tokens for op in block.forward if isinstance(op.work, ExpertExchange)],
            sum(op.work.bytes_moved for op in block.forward if isinstance(op.work, MemoryWork) and op.name.startswith("moe/perm")),
            block.saved_bytes,
        )
    loose, tight = found[None], found[1.0]
    assert loose[:2] == tight[:2]
    assert loose[2] == pytest.approx(8.0 * tight[2], rel=1e-6)
    rows = 2 * 4096 * 8 * (2048 + 2 * 768 + 768) * 2
    assert loose[3] - tight[3] == pytest.approx(7.0 * rows, rel=0.1)
