"""One list of kernels: what a rank's prediction prices, what its calibration measures, and what its torch model runs."""

from __future__ import annotations

import importlib.util
import json
from collections import Counter
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("the torch extra is not installed", allow_module_level=True)

from test_validate_rank_grid import CELLS, LAYERS, scenario

from simpar.live.bench_gemm import sizes
from simpar.live.bench_shapes import cases
from simpar.live.bench_shapes import key_of as name_of
from simpar.live.block_predict import block_shapes
from simpar.live.rank_layouts import Entry, read_layouts
from simpar.live.rank_plan import RankPlan, rank_plan
from simpar.live.rank_shapes import counted, executed, kernel_key, ops_of, shapes_of, unpacked_s
from simpar.live.rank_worker import measure
from simpar.parallel.work import MemoryWork
from simpar.result.interpret import Priced
from simpar.specs.scenario import make_scenario
from simpar.step import prepare

pytestmark = pytest.mark.torch
REPEATS = {"8b-fsdp8-op"}
"""Layouts of which torch repeats more products than simpar: kernels are compared, not how often each runs."""


def key_of(shape: dict[str, Any]) -> tuple[Any, ...] | None:
    """Of a calibrated shape, as `rank_shapes.kernel_key`."""
    if shape["op"] == "attention":
        return ("attention" if shape["direction"] == "forward" else "attention_backward", *shape["shape"])
    if shape["op"] not in ("gemm", "grouped_gemm"):
        return None
    groups, *size = shape["shape"] if shape["op"] == "grouped_gemm" else (0, *shape["shape"])
    rows, columns, depth = sizes((size[0] // max(groups, 1), *size[1:]), shape["direction"])
    kind = ("grouped_gemm", groups) if groups else ("gemm",)
    return (*kind, min(rows, columns), max(rows, columns), depth)


def products_of(priced: Priced, role: int) -> dict[tuple[Any, ...], int]:
    """What the role's step runs: (kind, sizes) of every product and attention kernel -> calls, as `rank_meter.Meter` counts."""
    found: Counter[tuple[Any, ...]] = Counter()
    for key, count in counted(priced, role):
        for op, block, _ in ops_of(priced, key):
            for part in executed(op, block):
                found[kernel_key(part)] += count
    return dict(found)


def check(plan: RankPlan, *, counts: bool = True) -> None:
    """All three lists of one rank."""
    measured = json.loads(json.dumps(measure(json.loads(json.dumps(plan.table)), "fake")))
    run = {tuple(key): calls for *key, calls in measured["products"]}
    priced = prepare(plan.scenario, detail="op")
    expected = products_of(priced, plan.pipeline_rank)
    assert set(run) == set(expected)
    assert not counts or run == expected
    calibrated = {key for shape in shapes_of([(priced, plan.pipeline_rank)]) if (key := key_of(shape))}
    assert calibrated == set(expected)


@pytest.mark.parametrize("name", [n for n in CELLS if n != "fsdp, selective"])
def test_small_layouts(name: str) -> None:
    model, degrees, rank = CELLS[name]
    check(rank_plan(scenario(model, degrees), rank, layers=None if "pp" in degrees else LAYERS))


@pytest.mark.slow
@pytest.mark.parametrize("entry", read_layouts(), ids=lambda e: str(e.spec.name))
def test_shipped_layouts(entry: Entry) -> None:
    check(entry.plan(layers=1), counts=entry.spec.name not in REPEATS)


def test_packed_products_are_priced_apart() -> None:
    """Three products of queries, keys and values launch more and fill the chip less than one."""
    plan = read_layouts(only=["70b-tp8-fsdp64"])[0].plan(layers=1)
    assert unpacked_s(prepare(plan.scenario, detail="op"), 0) > 0.0


def test_every_shape_is_one_that_calibrate_runs() -> None:
    plans = [entry.plan(layers=1) for entry in read_layouts(only=["8b-tp8-fsdp8", "deepseek-v3-ep64-pp16-stage8"])]
    shapes = shapes_of([(prepare(p.scenario, detail="op"), p.pipeline_rank) for p in plans])
    assert {s["op"] for s in shapes} == {"gemm", "grouped_gemm", "attention", "memory"}
    for case in cases(shapes, "cpu", small=True):
        case.build()()


def test_chains_and_backward_classes_are_measured_as_what_they_are() -> None:
    """Before torch 2.9 a norm is a chain; every class and size that is priced has a shape, and repeated forwards stay forwards."""
    model = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 1, "num_attention_heads": 8,
             "num_key_value_heads": 4, "head_dim": 32, "vocab_size": 512}  # fmt: skip
    for version, norm in (("2025-06", ("composite", "norm")), ("2025-10", ("norm_backward", None))):
        priced = prepare(make_scenario({
            "name": version, "framework": "torchtitan", "framework_version": version, "model": model,
            "cluster": {"hardware": "dgx-h100", "num_nodes": 1}, "plan": {"dp": 8, "zero_stage": 3, "recompute": "full"},
            "training": {"sequence_length": 256, "global_batch_size": 8},
        }), detail="op")  # fmt: skip
        shapes = [s for s in shapes_of([(priced, 0)]) if s["op"] == "memory"]
        ops = [op.work for key, _ in counted(priced, 0) for op, _, _ in ops_of(priced, key)]
        asked = {(w.kernel, round(w.bytes_moved)) for w in ops if isinstance(w, MemoryWork)}
        assert asked <= {(s["kernel"], s["shape"][0]) for s in shapes}
        assert norm in {(s["kernel"], s.get("chain")) for s in shapes if s.get("direction") == "backward"}
        chains = {(s["chain"], s["direction"]): s for s in shapes if s["kernel"] in ("composite", "stream")}
        assert {"rope", "activation"} <= {chain for chain, _ in chains}
        assert all(s["dims"]["complex"] for (chain, _), s in chains.items() if chain == "rope")
        assert all(s["dims"]["gated"] == 2 for (chain, _), s in chains.items() if chain == "activation")
        assert not [s for s in shapes if s["kernel"] == "norm" and s.get("direction") == "backward"]
        assert len({name_of(s) for s in shapes}) == len(shapes)
        for case in cases(shapes, "cpu", small=True):
            case.build()()


def test_compiled_gates_are_measured_as_gates() -> None:
    """The product of two halves, one of them through its non-linearity."""
    gates = [s for s in block_shapes("dgx-h100") if s.get("kernel") == "activation"]
    assert {s["dims"]["gated"] for s in gates} == {2}
