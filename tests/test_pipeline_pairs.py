"""Sends are priced by the pair of pipeline ranks they run between."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simpar.costs.pricer import LayoutPricer
from simpar.parallel.keys import Send, pair_of
from simpar.parallel.layout import Layout
from simpar.program.program import OpKind
from simpar.simulate import cost_models, prepare, simulate
from simpar.specs.calibration import uncalibrated
from simpar.specs.scenario import Scenario, make_scenario
from simpar.validation.run_rows import run_of

RUNS = Path(os.environ.get("SIMPAR_SHARED_DATA", Path(__file__).resolve().parents[2] / "shared" / "data")) / "runs" / "runs.jsonl"
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


def test_a_send_inside_the_node_is_priced_there() -> None:
    """tp 4, pp 4 on two nodes: ranks 0-1 and 2-3 share a node, 1-2 and 3-0 do not."""
    found = scenario({"tp": 4, "pp": 4}, 2)
    layout = Layout.of(found, 4)
    assert [pair.num_nodes for pair in layout.pipeline_pairs] == [1, 2, 1, 2]
    assert [layout.like_pair(pair) for pair in (0, 1, 2, -1)] == [0, 1, 0, -1]
    pricer = LayoutPricer(layout, *cost_models(found, layout.hardware))
    seconds = [pricer.price(Send(1, 2, False, pair)).seconds for pair in (0, 1, 2, 3, -1)]
    assert seconds[0] == seconds[2] < seconds[1] == seconds[3] == seconds[4]


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


def test_a_pipeline_that_leaves_the_node_once_is_faster_than_one_that_always_does() -> None:
    """Two replicas of tp 2, pp 4: data-parallel ranks inside leave the node at every second stage, outside once."""
    inside, outside = (
        simulate(scenario({"tp": 2, "pp": 4, "dp": 2, "placement": order}, 2), detail="stage")
        for order in ("tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp")
    )
    assert [p.num_nodes for p in inside.layout.pipeline_pairs] == [1, 2, 1, 2]
    assert [p.num_nodes for p in outside.layout.pipeline_pairs] == [1, 1, 1, 1]
    assert outside.breakdown["pp"] < inside.breakdown["pp"]


def test_llama_pipelines_that_change_pods() -> None:
    """Pods of 3,072 GPUs (arXiv 2407.21783): pipelines of 128 in a row stay in one, every third of 2,048 lies across two."""
    plan = {"tp": 8, "cp": 1, "pp": 16, "dp": 128, "zero_stage": 2, "placement": "tp-cp-ep-pp-dp"}
    layout = Layout.of(scenario(plan, 2048, 2048, hardware="grand-teton-h100-roce"), 16)
    assert {pair.tier for pair in layout.pipeline_pairs} == {"leaf", "pod"}
    plan = {**plan, "cp": 16, "dp": 8}
    layout = Layout.of(scenario(plan, 2048, 2048, hardware="grand-teton-h100-roce"), 16)
    assert [pair.tier for pair in layout.pipeline_pairs].count("core") == 2


@pytest.mark.skipif(not RUNS.is_file(), reason="needs the shared runs")
def test_a_hop_takes_what_was_profiled() -> None:
    """T_comm of arXiv 2401.10241, Table 9: the time of a message down and up a pipeline, per hop, on one and on four nodes."""
    rows = {}
    for line in RUNS.read_text().splitlines():
        row = json.loads(line)
        if "prof_T_comm_ms" in (row.get("extra") or {}):
            rows.setdefault(row["model_name"], row)
    assert len(rows) >= 3
    for row in rows.values():
        found = run_of(row).scenario
        assert found is not None
        with uncalibrated():
            priced = prepare(found, detail="stage")
        keys = enumerate(priced.program.price_keys)
        mean = np.mean([priced.table.seconds[index] for index, key in keys if isinstance(key, Send)])
        assert 1e3 * mean == pytest.approx(row["extra"]["prof_T_comm_ms"], rel=0.08), row["model_name"]
