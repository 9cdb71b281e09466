"""A layer as a graph: sizes of packed axes, edges, ledgers of parameters and FLOPs against torch and by hand."""

from __future__ import annotations

import pytest

from simpar.graph.build import LayerBuilder
from simpar.graph.ledger import SCANS, node_flops, parameters
from simpar.graph.masks import BIDIRECTIONAL, Mask
from simpar.graph.types import Axis, Layer


def flops_of(layer: Layer, *, halved: bool = False) -> dict[str, float]:
    """Forward FLOPs by node, of those that have any."""
    found = {node.name: node_flops(layer, node, halved=halved) for node in layer.nodes}
    return {name: flops for name, flops in found.items() if flops}


def attention_layer(mask: Mask | None = None, batch: int = 2, sequence: int = 64) -> Layer:
    """Norm, packed queries, keys and values, attention, projection."""
    axes = [Axis("batch", batch), Axis("sequence", sequence, "sequence"), Axis("hidden", 32), Axis("heads", 8, "tensor"),
            Axis("kv_heads", 2, "groups"), Axis("head_dim", 4), Axis("value_dim", 6)]  # fmt: skip
    layer = LayerBuilder("layer", axes)
    layer.axis("qkv", parts=("heads head_dim", "kv_heads head_dim", "kv_heads value_dim"))
    x = layer.norm("norm", layer.input("hidden", "batch sequence hidden"))
    qkv = layer.linear("qkv", x, "batch sequence qkv", bias=True)
    out = layer.attention("core", [qkv], "batch sequence heads value_dim", **({"mask": mask} if mask else {}))
    return layer.done(layer.linear("proj", out, "batch sequence hidden"))


def test_a_packed_axis_is_the_sum_of_its_parts() -> None:
    assert attention_layer().size("qkv") == 8 * 4 + 2 * 4 + 2 * 6


def test_parameters_are_named_by_their_node() -> None:
    assert dict(parameters(attention_layer())) == {
        "norm.weight": 32, "qkv.weight": 32 * 52, "qkv.bias": 52, "proj.weight": 8 * 6 * 32,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("mask", "pairs"),
    [(None, 64 * 65 / 2), (BIDIRECTIONAL, 64 * 64), (Mask("window", 8), 8 * 9 / 2 + 56 * 8), (Mask("chunk", 16), 4 * 136)],
)
def test_flops_of_attention_follow_the_mask(mask: Mask | None, pairs: float) -> None:
    flops = flops_of(attention_layer(mask))
    assert flops["core"] == 2 * 2 * 8 * (4 + 6) * pairs
    assert flops["qkv"] == 2 * 2 * 64 * 32 * 52


def test_halved_causal_attention_is_half_the_matrix() -> None:
    assert flops_of(attention_layer(), halved=True)["core"] == 2 * 2 * 8 * 10 * 64 * 64 / 2


def test_experts_group_a_product() -> None:
    axes = [Axis("rows", 12, "rows"), Axis("hidden", 8), Axis("experts", 4, "experts"), Axis("width", 6, "expert_tensor")]
    layer = LayerBuilder("experts", axes)
    done = layer.done(layer.grouped("experts", layer.linear("fc1", layer.input("x", "rows hidden"), "rows width", bias=True)))
    assert flops_of(done) == {"fc1": 2 * 12 * 8 * 6}
    assert dict(parameters(done)) == {"fc1.weight": 4 * 8 * 6, "fc1.bias": 4 * 6}


def test_a_scan_counts_its_chunks() -> None:
    axes = [Axis("batch", 2), Axis("sequence", 128, "sequence"), Axis("heads", 4, "tensor"), Axis("state", 16), Axis("head_dim", 8),
            Axis("groups", 1, "groups")]  # fmt: skip
    layer = LayerBuilder("mamba", axes)
    x = layer.input("x", "batch sequence heads head_dim")
    done = layer.done(layer.scan("ssd", [x], "batch sequence heads head_dim", groups="groups", chunk=32))
    per_token = 2 * 32 * 16 + 2 * 32 * 4 * 8 + 4 * 4 * 16 * 8
    assert flops_of(done) == {"ssd": 2 * 128 * per_token}
    assert SCANS["delta"](1, 2, 3, 1, 6) == 6 * 6 * 2 + 4 * 6 * 3 + 6 * 2 * 3 + 36 / 3


def test_a_graph_with_a_wrong_edge_is_refused() -> None:
    layer = LayerBuilder("wrong", [Axis("hidden", 8)])
    layer.tensor("later", "hidden")
    layer.elementwise("add", [layer.input("x", "hidden"), "later"], "residual")
    with pytest.raises(ValueError, match="reads 'later' before it is made"):
        layer.done()
