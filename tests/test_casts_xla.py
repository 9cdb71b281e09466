"""Casts to fp8 with scales of earlier steps (flax under XLA): one kernel a tensor, layouts by GPU, experts and masks too."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import pytest

from simpar.graph.casts import GATHERED, recipe_of
from simpar.parallel.layout import Layout
from simpar.parallel.work import Gemm, GroupedGemm, LocalOp, MemoryWork
from simpar.specs.framework import framework
from simpar.specs.scenario import Scenario, make_scenario
from simpar.step import prepare

TOKENS, H, F, QKV = 4096, 4096, 14336, 6144
"""Llama 3.1 8B: hidden, feed-forward, packed queries, keys and values."""
PRODUCTS = {"attention/qkv": (3, H, QKV), "attention/proj": (1, H, H), "mlp/fc1": (2, H, 2 * F), "mlp/fc2": (1, F, H)}
"""Linears that a product is, the width that it reads, and that it makes."""
EXPERTS, CHOSEN, WIDTH, CAPACITY = 8, 2, 14336, 2.0
PLACES = CHOSEN * CAPACITY * TOKENS
"""Mixtral 8x7B: places of all experts for one sequence."""


def scenario(model: str = "llama3.1-8b", hardware: str = "dgx-b200", **changes: Any) -> Scenario:
    plan = {"zero_stage": 3, **changes.pop("plan", {})}
    training = {"sequence_length": TOKENS, "global_batch_size": 8, "micro_batch_size": 1, "precision": "fp8"}
    return make_scenario({
        "name": "casts", "model": model, "framework": "maxtext", "cluster": {"hardware": hardware, "num_nodes": 1},
        "plan": plan, "training": {**training, **changes.pop("training", {})}, **changes,
    })  # fmt: skip


def layout_of(given: Scenario) -> Layout:
    return prepare(given).layout


def cast_bytes(ops: Iterable[LocalOp]) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for op in ops:
        if isinstance(op.work, MemoryWork) and ".cast" in op.name:
            found[op.name.replace(".backward", "")] += op.work.bytes_moved
    return dict(found)


@pytest.mark.parametrize(
    ("dtype", "architecture", "gathered", "delayed", "name"),
    [("fp8", "blackwell", False, True, "fp8_delayed"), ("fp8", "hopper", False, True, "fp8_delayed_turned"),
     ("fp8", "blackwell", True, True, "fp8_delayed_gathered"), ("fp8", "cdna4", True, True, "fp8_delayed_gathered_turned"),
     ("fp8", "hopper", True, False, GATHERED), ("fp8", "hopper", False, False, "fp8"), ("mxfp8", "blackwell", True, True, "mxfp8")],
)  # fmt: skip
def test_which_casts(dtype: str, architecture: str, gathered: bool, delayed: bool, name: str) -> None:
    assert recipe_of(dtype, architecture, gathered=gathered, delayed=delayed) == name


@pytest.mark.parametrize(("hardware", "turned"), [("dgx-b200", 0.0), ("dgx-h100", 2.0)])
@pytest.mark.parametrize("zero", [0, 3])
def test_bytes_of_a_dense_layer(hardware: str, turned: float, zero: int) -> None:
    """Each tensor once for each linear that reads it, 3 bytes an element; Hopper turns 8-bit copies, 2 more. Weights that are
    gathered come in 8 bits."""
    block = layout_of(scenario(hardware=hardware, plan={"zero_stage": zero})).stage_blocks[0][1]
    forward, backward = cast_bytes(block.forward), cast_bytes(block.backward)
    for name, (linears, read, made) in PRODUCTS.items():
        weights, inputs = read * made, linears * TOKENS * read
        assert forward[f"{name}.cast"] == pytest.approx(3.0 * inputs + (3.0 * weights if zero == 0 else 0.0))
        assert backward[f"{name}.cast"] == pytest.approx((3.0 + turned) * TOKENS * made + turned * (inputs + weights))


def test_experts_and_masks_are_products_like_others() -> None:
    """On expert ranks the weights of whole experts come in 16 bits; a mask has a row for each token, a column for each place."""
    layout = layout_of(scenario("mixtral-8x7b", plan={"ep": 8}, training={"routing": {"capacity_factor": CAPACITY}}))
    block = layout.stage_blocks[0][1]
    forward, backward = cast_bytes(block.forward), cast_bytes(block.backward)
    rows, weights = PLACES, H * 2 * WIDTH  # this rank's expert has its places in the sequences of eight ranks
    assert forward["moe/fc1.cast"] == pytest.approx(3.0 * (2 * rows * H + weights))
    assert backward["moe/fc1.cast"] == pytest.approx(3.0 * rows * 2 * WIDTH)
    masks = {name: moved for name, moved in forward.items() if "one_hot" in name}
    assert sorted(masks.values()) == pytest.approx([3.0 * (PLACES * TOKENS + TOKENS * H), 3.0 * (PLACES * TOKENS + PLACES * H)])
    masks = {name: moved for name, moved in backward.items() if "one_hot" in name}
    assert sorted(masks.values()) == pytest.approx([3.0 * TOKENS * H, 3.0 * PLACES * H])
    works = [op.work for op in block.forward if isinstance(op.work, Gemm | GroupedGemm) and op.name.startswith("moe")]
    assert {work.dtype for work in works if not isinstance(work, Gemm) or work.m == PLACES} == {"fp8"}


def test_what_expert_ranks_gather() -> None:
    """MaxText gathers the weights of experts in the width that they rest in before their casts; others come in 8 bits."""
    routing = {"training": {"routing": {"capacity_factor": CAPACITY}}}
    assert layout_of(scenario("mixtral-8x7b", plan={"ep": 8}, **routing))._gather_bytes == 2.0
    assert layout_of(scenario("mixtral-8x7b", **routing))._gather_bytes == 1.0
    assert layout_of(scenario())._gather_bytes == 1.0


def test_sixteen_bits_and_transformer_engine_have_none_of_these() -> None:
    block = layout_of(scenario(training={"precision": "bf16"})).stage_blocks[0][1]
    assert not cast_bytes(block.forward)
    assert (framework("pax", "2024-06").kernels.separate_casts, framework("pax", "2023-06").kernels.separate_casts) == (
        False,
        "delayed",
    )
