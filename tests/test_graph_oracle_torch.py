"""Node by node against torch on a CPU: FLOPs by its counter, kept bytes by autograd's hooks, partial sums by DTensor."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("the torch extra is not installed", allow_module_level=True)

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.flop_counter import FlopCounterMode

from simpar.graph.build import LayerBuilder
from simpar.graph.differentiate import kept
from simpar.graph.kernel_types import Kept, KernelPlan
from simpar.graph.ledger import node_flops
from simpar.graph.masks import BIDIRECTIONAL
from simpar.graph.shard import Placement, Shards
from simpar.graph.types import Axis, Layer
from simpar.specs.framework import framework
from simpar.specs.framework_policies import Kernels

pytestmark = pytest.mark.torch
EAGER = KernelPlan(Kernels(fused_activation=False), element=4.0, linear_input_bytes=4.0)
"""fp32 on a CPU, every operation a kernel."""
B, S, H, N, D = 2, 16, 24, 4, 8


def kept_bytes(function: Callable[..., Any], *inputs: Any) -> float:
    """Bytes that autograd keeps of a function's inputs and results, weights left out."""
    found: dict[int, int] = {}

    def pack(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in {w.untyped_storage().data_ptr() for w in WEIGHTS}:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = function(*inputs)
    del out
    return float(sum(found.values()))


def flops(function: Callable[..., Any], *inputs: Any) -> tuple[int, int]:
    """(forward, backward) FLOPs that torch counts."""
    with FlopCounterMode(display=False) as forward:
        out = function(*inputs)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()


def expected_kept(layer: Layer, plan: KernelPlan = EAGER) -> float:
    """Bytes that the pass says are kept."""
    return sum(layer.volume(t.axes) * (4.0 if t.bytes == 2.0 else t.bytes) * t.part for t in kept(layer, plan).values())


def axes() -> list[Axis]:
    """Axes of the small layers below."""
    return [Axis("batch", B), Axis("sequence", S, "sequence"), Axis("hidden", H), Axis("heads", N, "tensor"),
            Axis("kv_heads", N, "groups"), Axis("head_dim", D), Axis("value_dim", D), Axis("ffn", 40, "tensor")]  # fmt: skip


def tensor(*shape: int) -> Any:
    return torch.randn(*shape, requires_grad=True)


WEIGHTS: list[Any] = []


def weight(*shape: int) -> Any:
    WEIGHTS.append(torch.nn.Parameter(torch.randn(*shape)))
    return WEIGHTS[-1]


def test_a_product_keeps_its_input_and_its_backward_is_two_of_it() -> None:
    layer = LayerBuilder("product", axes())
    done = layer.done(layer.linear("fc", layer.input("x", "batch sequence hidden"), "batch sequence ffn", bias=True))
    x, w, b = tensor(B, S, H), weight(40, H), weight(40)
    assert flops(F.linear, x, w, b) == (node_flops(done, done.nodes[0]), 2 * node_flops(done, done.nodes[0]))
    assert kept_bytes(F.linear, x, w, b) == expected_kept(done)


def test_a_frozen_weight_keeps_nothing() -> None:
    layer = LayerBuilder("frozen", axes())
    done = layer.done(layer.linear("fc", layer.input("x", "batch sequence hidden"), "batch sequence ffn"))
    done = replace(done, tensors=tuple(replace(t, trained=False) for t in done.tensors))
    w = weight(40, H).requires_grad_(False)
    assert kept_bytes(F.linear, tensor(B, S, H), w) == expected_kept(done) == 0.0


def test_experts_multiply_each_row_once() -> None:
    layer = LayerBuilder("experts", [Axis("rows", 12, "rows"), Axis("hidden", H), Axis("experts", 3, "experts"), Axis("width", 6)])
    done = layer.done(layer.grouped("experts", layer.linear("fc1", layer.input("x", "rows hidden"), "rows width")))
    w = weight(3, H, 6)

    def grouped(x: Any) -> Any:
        return torch.cat([part @ w[i] for i, part in enumerate(x.split(4))])

    x = tensor(12, H)
    assert flops(grouped, x) == (node_flops(done, done.nodes[0]), 2 * node_flops(done, done.nodes[0]))
    assert kept_bytes(grouped, x) == expected_kept(done)


def test_a_convolution_counts_taps_and_keeps_its_input() -> None:
    sizes = [Axis("batch", B), Axis("inputs", 3 * 8 * 8), Axis("taps", 3 * 9), Axis("positions", 36), Axis("filters", 5, "tensor")]
    layer = LayerBuilder("convolution", sizes)
    x = layer.input("x", "batch inputs")
    done = layer.done(layer.convolution("conv", x, "batch positions filters", ("taps", "filters")))
    image, w = tensor(B, 3, 8, 8), weight(5, 3, 3, 3)
    assert flops(F.conv2d, image, w)[0] == node_flops(done, done.nodes[0])
    assert kept_bytes(F.conv2d, image, w) == expected_kept(done)


def test_a_short_convolution_channel_by_channel() -> None:
    layer = LayerBuilder(
        "short", [Axis("batch", B), Axis("sequence", S, "sequence"), Axis("channels", 6, "tensor"), Axis("taps", 4)]
    )
    x = layer.input("x", "batch sequence channels")
    done = layer.done(layer.convolution("conv", x, "batch sequence channels", ("taps", "channels")))

    def causal(x: Any, w: Any) -> Any:
        return F.conv1d(x, w, padding=3, groups=6)[..., :S]

    signal, w = tensor(B, 6, S), weight(6, 1, 4)
    counted = flops(causal, signal, w)[0]
    assert counted * S / (S + 3) == node_flops(done, done.nodes[0])
    assert kept_bytes(causal, signal, w) == expected_kept(done)


def test_attention_keeps_its_operands_output_and_one_number_a_row() -> None:
    layer = LayerBuilder("attention", axes())
    qkv = [layer.input(name, "batch sequence heads head_dim") for name in "qkv"]
    done = layer.done(layer.attention("attention/core", qkv, "batch sequence heads value_dim", mask=BIDIRECTIONAL))
    q, k, v = (tensor(B, N, S, D) for _ in range(3))
    assert kept_bytes(F.scaled_dot_product_attention, q, k, v) == expected_kept(done)


def test_keys_and_values_repeated_for_each_query_head_are_kept_so() -> None:
    layer = LayerBuilder("attention", [axis if axis.name != "kv_heads" else Axis("kv_heads", N // 2, "groups") for axis in axes()])
    names = {"q": "heads head_dim", "k": "kv_heads head_dim", "v": "kv_heads value_dim"}
    qkv = [layer.input(name, f"batch sequence {rest}") for name, rest in names.items()]
    done = layer.done(layer.attention("attention/core", qkv, "batch sequence heads value_dim", mask=BIDIRECTIONAL))

    def attention(q: Any, k: Any, v: Any) -> Any:
        k, v = (x[:, :, None].expand(B, N // 2, 2, S, D).reshape(B, N, S, D) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v)

    expected = expected_kept(done, replace(EAGER, library=replace(EAGER.library, repeats_keys=True)))
    assert kept_bytes(attention, tensor(B, N, S, D), tensor(B, N // 2, S, D), tensor(B, N // 2, S, D)) == expected
    assert expected > expected_kept(done)


def test_unfused_attention_keeps_the_scores() -> None:
    layer = LayerBuilder("attention", axes())
    qkv = [layer.input(name, "batch sequence heads head_dim") for name in "qkv"]
    done = layer.done(layer.attention("attention/core", qkv, "batch sequence heads value_dim", mask=BIDIRECTIONAL))
    plan = KernelPlan(element=4.0, wide_heads=((D - 1, "unfused"),))

    def scores(q: Any, k: Any, v: Any) -> Any:
        return torch.softmax(q @ k.transpose(-1, -2), -1) @ v

    q, k, v = (tensor(B, N, S, D) for _ in range(3))
    assert flops(scores, q, k, v) == (node_flops(done, done.nodes[0]), 2 * node_flops(done, done.nodes[0]))
    # The output is kept by what reads it.
    assert kept_bytes(scores, q, k, v) == expected_kept(done, plan) - 4.0 * B * S * N * D


def test_torchs_own_attention_keeps_16_bit_inputs_in_fp32() -> None:
    """The math backend of torch 2.5 and later; keys and values once for each query head."""
    layer = LayerBuilder("attention", [axis if axis.name != "kv_heads" else Axis("kv_heads", N // 2, "groups") for axis in axes()])
    names = {"q": "heads head_dim", "k": "kv_heads head_dim", "v": "kv_heads value_dim"}
    qkv = [layer.input(name, f"batch sequence {rest}") for name, rest in names.items()]
    done = layer.done(layer.attention("attention/core", qkv, "batch sequence heads value_dim", mask=BIDIRECTIONAL))
    plan = KernelPlan(framework("plain", "2024-10").kernels, wide_heads=((0, "unfused"),))

    def attention(q: Any, k: Any, v: Any) -> Any:
        with sdpa_kernel([SDPBackend.MATH]):
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    q, k, v = (torch.randn(B, heads, S, D, dtype=torch.bfloat16, requires_grad=True) for heads in (N, N // 2, N // 2))
    expected = sum(layer_bytes(done, t) for t in kept(done, plan).values() if t.name != done.outputs[0])
    assert kept_bytes(attention, q, k, v) == expected
    before = KernelPlan(framework("plain", "2024-09").kernels, wide_heads=((0, "unfused"),))
    assert sum(layer_bytes(done, t) for t in kept(done, before).values() if t.name.endswith("softmax")) == 2.0 * B * N * S * S


def layer_bytes(layer: Layer, tensor: Kept) -> float:
    """Bytes of a kept tensor."""
    return layer.volume(tensor.axes) * tensor.bytes * tensor.part


@pytest.mark.parametrize("kind", ["layernorm"])
def test_a_norm_keeps_its_input_and_its_statistics(kind: Any) -> None:
    layer = LayerBuilder("norm", axes())
    done = layer.done(layer.norm("norm", layer.input("x", "batch sequence hidden"), kind=kind))
    w, b = weight(H), weight(H)
    assert kept_bytes(lambda x: F.layer_norm(x, (H,), w, b), tensor(B, S, H)) == expected_kept(done)


def root_mean_square(x: Any) -> Any:
    """RMSNorm of the fp32 tensor `x` before its weight, as models write it out."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


CHAINS: dict[str, tuple[float, Callable[[Any, Any], Any]]] = {
    "transformers LlamaRMSNorm": (2.0, lambda x, w: w * root_mean_square(x.to(torch.float32)).to(x.dtype)),
    "torchtitan's own, nn.RMSNorm to torch 2.6": (2.0, lambda x, w: root_mean_square(x.float()).type_as(x) * w),
    "litgpt": (4.0, lambda x, w: (root_mean_square(x.float()) * w.float()).to(x.dtype)),
    "nn.RMSNorm from torch 2.7": (4.0, lambda x, w: F.rms_norm(x, (H,), w)),
}
"""Norm -> (bytes per element of what its weight multiplies, the norm)."""


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("name", CHAINS)
def test_a_norm_as_a_chain_keeps_its_input_in_fp32_alone(name: str, trained: bool) -> None:
    """No 16-bit input, and what the weight multiplies only where the weight is trained."""
    normed, chain = CHAINS[name]
    layer = LayerBuilder("norm", axes())
    done = layer.done(layer.norm("norm", layer.input("x", "batch sequence hidden")))
    saved = kept(done, KernelPlan(Kernels(fused_norm=False, normed_bytes=normed)), frozenset() if trained else frozenset({"norm"}))
    w = weight(H).data.to(torch.bfloat16).requires_grad_(trained)
    WEIGHTS.append(w)
    x = torch.randn(B, S, H, dtype=torch.bfloat16, requires_grad=True)
    cast = 4.0 * H * (name == "litgpt")  # the weight in fp32, which belongs to no token
    assert kept_bytes(chain, x, w) - cast == sum(done.volume(t.axes) * t.bytes for t in saved.values())


def test_a_gated_unit_in_elementary_operations_keeps_three_tensors() -> None:
    layer = LayerBuilder("gate", axes())
    layer.axis("both", parts=("ffn", "ffn"))
    x = layer.input("x", "batch sequence both")
    done = layer.done(layer.elementwise("activation", [x], "activation", out="batch sequence ffn"))
    assert kept_bytes(lambda gate, up: F.silu(gate) * up, tensor(B, S, 40), tensor(B, S, 40)) == expected_kept(done)


@pytest.mark.parametrize(
    ("op", "function", "inputs"),
    [("multiply", torch.mul, 2), ("residual", torch.add, 2), ("tanh", torch.tanh, 1)],
)
def test_an_elementwise_function_keeps_what_its_derivative_needs(op: str, function: Any, inputs: int) -> None:
    layer = LayerBuilder("elementwise", axes())
    names = [layer.input(f"x{i}", "batch sequence hidden") for i in range(inputs)]
    done = layer.done(layer.elementwise("f", names, op))
    assert kept_bytes(function, *(tensor(B, S, H) for _ in names)) == expected_kept(done)


def test_relu_keeps_what_it_makes_inside_a_layer() -> None:
    """At a layer's end that is the next layer's input, which keeps it."""
    layer = LayerBuilder("relu", axes())
    made = layer.elementwise("relu", [layer.input("x", "batch sequence hidden")], "relu")
    done = layer.done(layer.elementwise("more", [made], "residual"))
    assert kept_bytes(lambda x: F.relu(x) + 1.0, tensor(B, S, H)) == expected_kept(done)


def test_a_lookup_keeps_its_indices() -> None:
    layer = LayerBuilder("lookup", [*axes(), Axis("vocab", 50, "tensor")])
    ids = layer.input("ids", "batch sequence", data=True, format="int64")
    done = layer.done(layer.lookup("word", ids, "vocab hidden", "batch sequence hidden"))
    table, indices = weight(50, H), torch.zeros(B, S, dtype=torch.long)
    assert kept_bytes(F.embedding, indices, table) == expected_kept(done)


def scan_flops(kind: str, heads: int, key: int, value: int, groups: int, chunk: int) -> int:
    """What torch counts of the products of one chunk, as the recurrences are written down, on tensors without data."""
    c, e = chunk, torch.einsum

    def of(*shape: int) -> Any:
        return torch.empty(*shape, device="meta")

    q, k, v, state, scores = of(heads, c, key), of(heads, c, key), of(heads, c, value), of(heads, key, value), of(heads, c, c)
    with FlopCounterMode(display=False) as counter:
        if kind == "ssd":
            e("gcn,gdn->gcd", of(groups, c, key), of(groups, c, key))
            e("hcd,hdp->hcp", scores, v)
            e("hcn,hcp->hnp", k, v)
            e("hcn,hnp->hcp", q, state)
        if kind in ("linear", "delta"):
            e("hcn,hdn->hcd", q, k)
            e("hcd,hdp->hcp", scores, v)
            e("hcn,hcp->hnp", k, v)
            e("hcn,hnp->hcp", q, state)
        if kind == "delta":
            e("hcn,hdn->hcd", k, k)
            e("hcd,hdn->hcn", scores, k)
            e("hcd,hdp->hcp", scores, v)
            e("hcn,hnp->hcp", k, state)
    return counter.get_total_flops()


@pytest.mark.parametrize("kind", ["ssd", "linear", "delta"])
def test_a_scan_counts_the_products_of_its_chunks(kind: str) -> None:
    sizes = [Axis("batch", 1), Axis("sequence", 64, "sequence"), Axis("heads", 6, "tensor"), Axis("state", 10), Axis("head_dim", 8),
             Axis("groups", 2, "groups")]  # fmt: skip
    layer = LayerBuilder("scan", sizes)
    x = layer.input("x", "batch sequence heads head_dim")
    done = layer.done(layer.scan("scan", [x], "batch sequence heads head_dim", kind=kind, groups="groups", chunk=16))
    inverse = 64 * 6 * 16 * 16 / 3 if kind == "delta" else 0.0
    assert node_flops(done, done.nodes[0]) - inverse == pytest.approx(4 * scan_flops(kind, 6, 10, 8, 2, 16))


@pytest.fixture
def mesh() -> Iterator[Any]:
    """Two ranks of which this process is the first; collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    dist.destroy_process_group()


def partial_of(out: DTensor) -> bool:
    """Whether a DTensor holds partial sums."""
    return bool(out.placements[0].is_partial())


def test_partial_sums_are_where_dtensor_has_them(mesh: Any) -> None:
    """A product whose weight is split along what is summed, a lookup in a split table; not a product that makes a split axis."""
    layer = LayerBuilder("split", [*axes(), Axis("vocab", 50, "tensor")])
    ids = layer.input("ids", "batch sequence", data=True, format="int64")
    x = layer.lookup("word", ids, "vocab hidden", "batch sequence hidden")
    y = layer.linear("column", x, "batch sequence ffn")
    done = layer.done(layer.linear("row", y, "batch sequence hidden"))
    shards = Shards(done, Placement(tensor=2))
    table = distribute_tensor(torch.randn(50, H), mesh, [Shard(0)])
    whole = distribute_tensor(torch.randn(B, S, H), mesh, [Replicate()])
    column = torch.matmul(whole, distribute_tensor(torch.randn(H, 40), mesh, [Shard(1)]))
    row = torch.matmul(column, distribute_tensor(torch.randn(40, H), mesh, [Shard(0)]))
    found = F.embedding(distribute_tensor(torch.zeros(B, S, dtype=torch.long), mesh, [Replicate()]), table)
    assert [bool(shards.layouts.partial(node)) for node in done.nodes] == [partial_of(t) for t in (found, column, row)]
    assert shards.local(("batch", "sequence", "ffn")) == column.to_local().numel()
    assert [shards.weight(f"{n}.weight") for n in ("word", "column", "row")] == [25 * H, H * 20, 20 * H]
