"""Casts of TransformerEngine: traffic by format, what a norm writes, sequence parallelism. What NVIDIA's runs leave unsaid."""

from __future__ import annotations

from typing import Any

import pytest

from simpar.evidence.row_plan import plan_of
from simpar.graph.casts import QUANTIZE as KERNEL
from simpar.graph.casts import engine_casts
from simpar.graph.kernel_types import KernelPlan
from simpar.graph.types import Layer
from simpar.model.layered import token_network
from simpar.parallel.blocks import split_block
from simpar.parallel.degrees import Degrees
from simpar.parallel.expert import sorts
from simpar.parallel.layout import Layout
from simpar.parallel.split_options import SplitOptions
from simpar.parallel.work import LocalOp, MemoryWork
from simpar.specs.framework import framework
from simpar.specs.model import TransformerSpec
from simpar.specs.models_io import load_model
from simpar.specs.scenario import make_scenario

TOKENS = 4096
H, F, QKV, HEADS = 8192, 28672, 10240, 8192
"""Llama 3.1 70B: hidden, feed-forward, packed queries, keys and values, attention output."""


def _block(model: str, name: str) -> Layer:
    spec = load_model(model)
    assert isinstance(spec, TransformerSpec)
    network = token_network(spec, 1, TOKENS)
    return next(b for b in network.layers if b.name == name)


def _casts(ops: tuple[LocalOp, ...], kernel: str = KERNEL) -> dict[str, float]:
    found = {}
    for op in ops:
        if isinstance(op.work, MemoryWork) and op.work.kernel == kernel:
            found[op.name] = op.work.bytes_moved / TOKENS
    return found


@pytest.mark.parametrize(
    ("precision", "architecture", "scaling", "each", "scale"),
    [("fp8", "hopper", "delayed", 4.0, 0.0), ("fp8", "blackwell", "delayed", 3.0, 0.0), ("fp8", "hopper", "current", 4.0, 2.0),
     ("mxfp8", "blackwell", "current", 4.0, 0.0), ("fp8-block", "hopper", "delayed", 4.0, 0.0),
     ("nvfp4", "blackwell", "delayed", 3.0, 2.0)],
)  # fmt: skip
def test_bytes_of_a_dense_layer(precision: str, architecture: str, scaling: str, each: float, scale: float) -> None:
    casts = engine_casts(precision, architecture, scaling)
    assert casts is not None
    local = split_block(_block("llama3.1-70b", "full_mlp"), SplitOptions(Degrees(), KernelPlan(), engine_casts=casts))
    forward = {"attention/proj.cast": HEADS, "mlp/fc2.cast": F}
    if scale:
        forward |= {"attention/qkv.cast": H, "mlp/fc1.cast": H}
    backward = {"mlp/fc2.cast.backward": H, "mlp/fc1.cast.backward": 2 * F, "attention/proj.cast.backward": H,
                "attention/qkv.cast.backward": QKV}  # fmt: skip
    assert _casts(local.forward) == pytest.approx({name: each * width for name, width in forward.items()})
    assert _casts(local.backward) == pytest.approx({name: each * width for name, width in backward.items()})
    passes = {name.replace(".cast", ".scale"): scale * width for name, width in (forward | backward).items()} if scale else {}
    assert _casts((*local.forward, *local.backward), "amax") == pytest.approx(passes)


@pytest.mark.parametrize("alone", [False, True])
def test_narrow_copies_are_kept_beside_what_attention_keeps_and_by_each_linear_that_is_apart(alone: bool) -> None:
    """Attention keeps its output in 16 bits, the product behind it its own copy in 8; queries, keys and values, gate and up read
    one copy where they are one linear, one each where they are three and two."""
    plan = KernelPlan(linear_input_bytes=1.0, linears_alone=alone)
    saved = dict(split_block(_block("llama3.1-70b", "full_mlp"), SplitOptions(Degrees(), plan)).saved)
    names = ("attention/qkv_cast_in", "mlp/fc1_cast_in") if alone else ("input_norm_out", "mlp_norm_out")
    assert saved["attention/out"] == 2 * HEADS * TOKENS
    assert saved["attention/proj_cast_in"] == HEADS * TOKENS
    assert [saved[name] for name in names] == [3 * H * TOKENS, 2 * H * TOKENS] if alone else [H * TOKENS, H * TOKENS]
    assert saved["mlp/fc2_in"] == F * TOKENS


def test_no_casts_in_16_bits_or_elsewhere() -> None:
    assert engine_casts("bf16", "hopper", "delayed") is None
    assert engine_casts("fp8", "hopper", "") is None


def test_frozen_weights_need_one_layout_only() -> None:
    casts = engine_casts("fp8", "hopper", "delayed")
    block = _block("llama3.1-70b", "full_mlp")
    trained = split_block(block, SplitOptions(Degrees(), KernelPlan(), engine_casts=casts))
    frozen = split_block(block, SplitOptions(Degrees(), KernelPlan(), engine_casts=casts, lora_rank=16))
    assert sum(_casts(frozen.backward).values()) == pytest.approx(0.75 * sum(_casts(trained.backward).values()))


def test_sequence_parallel_ranks_cast_their_part() -> None:
    casts = engine_casts("fp8", "hopper", "delayed")
    block = _block("llama3.1-70b", "full_mlp")
    whole = _casts(split_block(block, SplitOptions(Degrees(tp=4), KernelPlan(), engine_casts=casts)).backward)
    part = _casts(
        split_block(block, SplitOptions(Degrees(tp=4, sequence_parallel=True), KernelPlan(), engine_casts=casts)).backward
    )
    assert part["mlp/fc2.cast.backward"] == pytest.approx(whole["mlp/fc2.cast.backward"] / 4)
    assert part["mlp/fc1.cast.backward"] == pytest.approx(whole["mlp/fc1.cast.backward"])


def test_experts_cast_every_row_and_the_router_none() -> None:
    casts = engine_casts("mxfp8", "blackwell", "current")
    model = load_model("qwen3-30b-a3b")
    assert isinstance(model, TransformerSpec)
    options = SplitOptions(Degrees(), KernelPlan(), moe=model.moe, engine_casts=casts)
    local = split_block(_block("qwen3-30b-a3b", "full_experts"), options)
    forward = _casts(local.forward)
    assert forward["moe/fc1.cast"] == pytest.approx(4.0 * 8 * 2048)
    assert forward["moe/fc2.cast"] == pytest.approx(4.0 * 8 * 768)
    assert not any(name.startswith("moe/router") for name in forward)


@pytest.mark.parametrize(
    ("precision", "architecture", "scaling", "scale", "cast"),
    [("fp8", "hopper", "current", (24, 24), 8), ("fp8", "hopper", "delayed", (0, 0), 1), ("fp8", "blackwell", "delayed", (0, 0), 8),
     ("mxfp8", "blackwell", "current", (0, 0), 8), ("nvfp4", "blackwell", "current", (24, 24), 8)],
)  # fmt: skip
def test_rows_of_each_expert_are_a_tensor(
    precision: str, architecture: str, scaling: str, scale: tuple[int, int], cast: int
) -> None:
    """Of 128 experts on 16 ranks 8 are local: a scale takes three kernels of each, a cast one; delayed scales with both layouts one
    of all. The products are one kernel for each expert."""
    model = load_model("qwen3-30b-a3b")
    assert isinstance(model, TransformerSpec)
    casts = engine_casts(precision, architecture, scaling)
    options = SplitOptions(Degrees(ep=16), KernelPlan(), dtype=precision, moe=model.moe, engine_casts=casts)
    local = split_block(_block("qwen3-30b-a3b", "full_experts"), options)
    for ops, suffix in ((local.forward, ""), (local.backward, ".backward")):
        found = {op.name: (op.work.launches, op.kernels) for op in ops if isinstance(op.work, MemoryWork)}
        for product in ("moe/fc1", "moe/fc2"):
            assert found.get(f"{product}.scale{suffix}", (0, 0)) == scale
            assert found[f"{product}.cast{suffix}"] == (cast, cast)
    assert {op.name: op.kernels for op in local.forward}["moe/fc1"] == 8


@pytest.mark.parametrize(
    ("plan", "training", "pads"),
    [({}, {}, True), ({"ep_dispatcher": "allgather"}, {}, True), ({"ep_dispatcher": "deepep"}, {}, False),
     ({"ep_dispatcher": "hybridep"}, {}, False), ({}, {"routing": {"kind": "balanced", "capacity_factor": 1.0}}, False),
     ({}, {"precision": "bf16"}, False), ({}, {"cuda_graphs": True}, False),
     ({}, {"cuda_graphs": True, "cuda_graph_scope": "attention"}, True)],
)  # fmt: skip
def test_rows_of_narrow_experts_are_padded_where_the_host_counts_them(
    plan: dict[str, Any], training: dict[str, Any], pads: bool
) -> None:
    """A copy before the experts and one behind them, in both passes, beside those that put rows in order: half of what is moved."""
    scenario = make_scenario({
        "model": "qwen3-30b-a3b", "framework": "megatron-core", "framework_version": "2025-11",
        "cluster": {"hardware": "dgx-b200", "num_nodes": 1}, "plan": {"ep": 8, "ep_dispatcher": "alltoall", **plan},
        "training": {"sequence_length": 4096, "global_batch_size": 8, "precision": "mxfp8", **training},
    })  # fmt: skip
    options = Layout.of(scenario, 1).options
    found = [sorts(options, back, backward) for back in (False, True) for backward in (False, True)]
    order = (("copy", 2.0),) if options.degrees.dispatcher == "alltoall" else ()
    assert found == 4 * [order + (("copy", 2.0),) * pads]


@pytest.mark.parametrize(("layers", "pp", "stages"), [(56, 8, 7), (24, 4, 3), (32, 8, 2), (48, 4, 4), (30, 8, 1)])
def test_virtual_stages_of_experts_follow_the_advice(layers: int, pp: int, stages: int) -> None:
    row = {"tp": 1, "pp": pp, "dp": 1, "n_gpus": pp, "layers": layers, "hidden": 4096, "moe_experts": 8}
    plan, notes = plan_of(row, framework("megatron-core", "0.11"))
    assert plan["virtual_stages"] == stages
    assert any("virtual stages not stated" in note for note in notes)
    assert plan_of({**row, "moe_experts": None}, framework("megatron-core", "0.11"))[0]["virtual_stages"] == 1
    assert plan_of(row, framework("megatron-core", "2023-01"))[0]["virtual_stages"] == 1


@pytest.mark.parametrize(
    ("task", "cp_type", "version", "style"),
    [("lora (rank 16)", "TE ring/p2p or a2a (NeMo default)", "2025-06", "ulysses"), ("lora", "", "2025-06", "ulysses"),
     ("lora", "p2p", "2025-06", "ring"), ("lora", "", "2024-06", "ring"), ("pretrain", "TE ring/p2p or a2a", "2025-06", "ring")],
)  # fmt: skip
def test_adapters_exchange_heads_unless_a_run_says_otherwise(task: str, cp_type: str, version: str, style: str) -> None:
    row = {"tp": 1, "pp": 1, "cp": 8, "dp": 1, "n_gpus": 8, "layers": 80, "hidden": 8192, "task": task, "cp_type": cp_type}
    assert plan_of(row, framework("nemo", version))[0]["cp_style"] == style
