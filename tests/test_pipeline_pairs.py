"""Sends are priced by the pair of pipeline ranks they run between."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from simpar.costs.pricer import LayoutPricer
from simpar.parallel.keys import Send, pair_of
from simpar.parallel.layout import Layout
from simpar.program.program import OpKind
from simpar.specs.scenario import Scenario, make_scenario
from simpar.step import cost_models, prepare

SENDS = (OpKind.SEND_FORWARD, OpKind.SEND_BACKWARD)


def scenario(plan: dict[str, Any], nodes: int, batch: int = 32, **cluster: Any) -> Scenario:
    """A small model whose pipeline leaves the node at some of its boundaries."""
    return make_scenario({
        "name": "pairs", "model": "llama3.1-8b", "framework": "megatron-core", "framework_version": "2024-06",
        "cluster": {"hardware": "dgx-h100", "num_nodes": nodes, **cluster}, "plan": plan,
        "training": {"sequence_length": 2048, "global_batch_size": batch, "micro_batch_size": 1, "precision": "bf16"},
    })  # fmt: skip


@pytest.mark.parametrize(
    ("rank", "other", "ranks", "pair"),
    [(0, 1, 4, 0), (1, 0, 4, 0), (2, 3, 4, 2), (3, 0, 4, 3), (0, 3, 4, 3), (0, 1, 2, 0), (0, 2, 4, -1), (1, 1, 4, -1)],
)
def test_pairs_are_numbered_by_the_lower_rank(rank: int, other: int, ranks: int, pair: int) -> None:
    assert pair_of(rank, other, ranks) == pair


def test_only_pairs_that_change_pods_pay_for_it() -> None:
    """Llama 3 405B with 16 context ranks: pipelines of 2,048 GPUs in a row over pods of 3,072, 1:7 between them."""
    plan = {"tp": 8, "cp": 16, "pp": 16, "dp": 8, "zero_stage": 2, "placement": "tp-cp-ep-pp-dp"}
    found = scenario(plan, 2048, 2048, hardware="grand-teton-h100-roce")
    layout = Layout.of(found, 16)
    pricer = LayoutPricer(layout, *cost_models(found, layout.hardware))
    seconds = [pricer.price(Send(1, 2, False, pair)).seconds for pair in range(-1, 16)]
    far = [pair for pair in range(16) if layout.pipeline_pairs[pair].tier == "core"]
    assert len(far) == 2
    assert all((seconds[1 + pair] == seconds[0]) == (pair in far) for pair in range(16))
    assert min(seconds) < 0.7 * seconds[0]


def test_a_pair_inside_a_node_counts_as_between_nodes() -> None:
    """tp 4, pp 4 on two nodes: ranks 0-1 and 2-3 share a node, 1-2 and 3-0 do not; on one node all do."""
    assert [pair.num_nodes for pair in Layout.of(scenario({"tp": 4, "pp": 4}, 2), 4).pipeline_pairs] == [2, 2, 2, 2]
    assert [pair.num_nodes for pair in Layout.of(scenario({"tp": 2, "pp": 4}, 1), 4).pipeline_pairs] == [1, 1, 1, 1]


@pytest.mark.parametrize(
    "plan",
    [
        {"schedule": "1f1b"},
        {"virtual_stages": 2, "schedule": "interleaved"},
        {"schedule": "zb-v", "virtual_stages": 2},
        {"schedule": "dualpipe"},
    ],
    ids=lambda plan: plan["schedule"],
)
def test_every_send_names_the_pair_it_runs_between(plan: dict[str, Any]) -> None:
    program = prepare(scenario({"tp": 2, "pp": 8, **plan}, 2)).program
    sends = np.flatnonzero(np.isin(program.kind, [int(kind) for kind in SENDS]))
    found = set()
    for waiting in range(program.num_ops):
        for op in program.dep_ops[program.dep_ptr[waiting] : program.dep_ptr[waiting + 1]]:
            sender, receiver = int(program.role[op]), int(program.role[waiting])
            if op in sends and sender != receiver:
                key = program.price_keys[program.price[op]]
                assert isinstance(key, Send)
                assert key.pair == pair_of(sender, receiver, 8)
                found.add(key.pair)
    assert found == set(range(8 if plan["schedule"] == "interleaved" else 7))


def test_llama_pipelines_that_change_pods() -> None:
    """Pods of 3,072 GPUs (arXiv 2407.21783): pipelines of 128 in a row stay in one, every third of 2,048 lies across two."""
    plan = {"tp": 8, "cp": 1, "pp": 16, "dp": 128, "zero_stage": 2, "placement": "tp-cp-ep-pp-dp"}
    layout = Layout.of(scenario(plan, 2048, 2048, hardware="grand-teton-h100-roce"), 16)
    assert {pair.tier for pair in layout.pipeline_pairs} == {"leaf", "pod"}
    plan = {**plan, "cp": 16, "dp": 8}
    layout = Layout.of(scenario(plan, 2048, 2048, hardware="grand-teton-h100-roce"), 16)
    assert [pair.tier for pair in layout.pipeline_pairs].count("core") == 2
