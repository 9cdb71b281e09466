"""The ledger of parameters against the weights of the workload's ops: two independent counts of every preset."""

from __future__ import annotations

from typing import Any

import pytest
from parameter_ledger import mtp_parameters, parameters, total, total_parameters

from simpar.graph.kernel_types import Kernel, KernelPlan
from simpar.graph.kernels import kernels
from simpar.model.layered import token_network
from simpar.model.network import simple_network
from simpar.parallel.layout import Layout
from simpar.parallel.work import LocalOp, MemoryWork
from simpar.specs.framework import framework
from simpar.specs.framework_policies import Kernels
from simpar.specs.model import TransformerSpec
from simpar.specs.models_io import load_model, table_names
from simpar.specs.scenario import make_scenario

SMALL = ("embedding/relative", "final/norm", "mtp.final_norm")
"""Terms that the ops may leave out: relative position biases, final norms of encoders and prediction modules."""


@pytest.mark.parametrize("name", table_names())
def test_ops_hold_the_parameters_of_the_ledger(name: str) -> None:
    model = load_model(name)
    if isinstance(model, TransformerSpec):
        network = token_network(model, 1, 16)
        left_out = sum(n for path, n in (*parameters(model), *mtp_parameters(model)) if path in SMALL)
    else:
        network, left_out = simple_network(model, 1, 1), 0
    ledger = total_parameters(model) + total(mtp_parameters(model))
    assert ledger - left_out <= network.parameters <= ledger


def _moved(kernel: Kernel, *, backward: bool) -> float:
    """Bytes per element of a pass, what other kernels move beside included."""
    return sum(each for _, each in (kernel.backward if backward else kernel.forward)) + sum(k[2 + backward] for k in kernel.beside)


def test_biases_and_clamps_of_experts_are_kernels_of_their_own_unless_fused() -> None:
    plain = load_model("qwen3-30b-a3b")
    assert isinstance(plain, TransformerSpec)
    clamped = plain.model_copy(update={"mlp_bias": True, "swiglu_limit": 7.0})

    def expert_ops(model: TransformerSpec, *, fused: bool) -> dict[str, tuple[float, float]]:
        layer = next(layer for layer in token_network(model, 1, 128).layers if layer.name == "full_experts")
        found = kernels(layer, KernelPlan(Kernels(fused_expert_bias=fused)))
        return {k.node.name: (_moved(k, backward=False), _moved(k, backward=True)) for k in found if k.node.name.startswith("moe/")}

    more = expert_ops(clamped, fused=False)
    assert expert_ops(clamped, fused=True).keys() == expert_ops(plain, fused=False).keys()
    assert {name: more[name] for name in more.keys() - expert_ops(plain, fused=False).keys()} == {
        "moe/clamp": (8, 15),
        "moe/fc2_bias": (28, 40),
    }


@pytest.mark.parametrize(("bytes_each", "copied"), [(4.0, (14.0, 16.0)), (2.0, (10.0, 4.0))])
def test_expert_biases_and_clamps_move_what_torch_counts(bytes_each: float, copied: tuple[float, float]) -> None:
    """Megatron-Core's experts.py (`_apply_bias`) and fused_bias_geglu.py on fake rows, kernel by kernel."""
    torch = pytest.importorskip("torch")
    from torch_traffic import traffic

    rows, width, experts = 1024, 512, 4
    sizes = [rows // experts] * experts
    bias = [torch.zeros(width, dtype=torch.bfloat16, requires_grad=True) for _ in sizes]
    probs = torch.ones(rows, 1, dtype=torch.float32 if bytes_each == 4.0 else torch.bfloat16, requires_grad=True)

    def biased(x: Any) -> Any:
        parts = zip(torch.split(x, sizes), bias, torch.split(probs, sizes), strict=True)
        return torch.cat([t + b * p for t, b, p in parts]).to(x.dtype)

    def clamped(x: Any) -> Any:
        gate, linear = x.chunk(2, -1)
        return torch.cat((gate.clamp(min=None, max=7.0), linear.clamp(min=-7.0, max=7.0)), -1)

    plain = load_model("qwen3-30b-a3b")
    assert isinstance(plain, TransformerSpec)
    model = plain.model_copy(update={"mlp_bias": True, "swiglu_limit": 7.0})
    layer = next(layer for layer in token_network(model, 1, 128).layers if layer.name == "full_experts")
    found = {k.node.name: k for k in kernels(layer, KernelPlan(row_probability_bytes=bytes_each))}
    assert [(kind, *each) for kind, _, *each in found["moe/fc2_bias"].beside] == [("copy", *copied)]
    for name, function in (("moe/fc2_bias", biased), ("moe/clamp", clamped)):
        kernel = found[name]
        counted = traffic(function, rows, width)
        assert _moved(kernel, backward=False) == pytest.approx(counted[0], rel=0.01)
        # What makes the gradient in the test moves 4 bytes more.
        assert _moved(kernel, backward=True) == pytest.approx(counted[1] - 4.0, rel=0.01)


def test_a_clamp_is_part_of_a_compiled_activation() -> None:
    plain = load_model("qwen3-30b-a3b")
    assert isinstance(plain, TransformerSpec)
    model = plain.model_copy(update={"mlp_bias": True, "swiglu_limit": 7.0})
    layer = next(layer for layer in token_network(model, 1, 128).layers if layer.name == "full_experts")
    apart, inside = ({k.node.name for k in kernels(layer, KernelPlan(Kernels(fused_clamp=fused)))} for fused in (False, True))
    assert apart - inside == {"moe/clamp"}
    assert "moe/fc2_bias" in inside


@pytest.mark.torch
def test_the_glue_of_latent_attention_moves_what_torch_counts() -> None:
    """torchtitan models/deepseek_v3 Attention between its products and attention itself."""
    torch = pytest.importorskip("torch")
    from torch_traffic import _Counter

    tokens, heads, nope, rope, value = 256, 16, 128, 64, 128
    q = torch.randn(1, tokens, heads, nope + rope, dtype=torch.bfloat16, requires_grad=True)
    kv = torch.randn(1, tokens, heads, nope + value, dtype=torch.bfloat16, requires_grad=True)
    shared = torch.randn(1, tokens, 1, rope, dtype=torch.bfloat16, requires_grad=True)
    turns = torch.polar(torch.ones(tokens, rope // 2), torch.ones(tokens, rope // 2)).view(1, tokens, 1, rope // 2)

    def turned(x: Any) -> Any:
        wide = torch.view_as_complex(x.float().view(*x.shape[:-1], -1, 2))
        return torch.view_as_real(wide * turns).flatten(3).to(x.dtype)

    with _Counter() as forward:
        plain, part = q.split([nope, rope], -1)
        queries = torch.cat([plain, turned(part)], -1)
        plain, values = kv.split([nope, value], -1)
        keys = torch.cat([plain, turned(shared).expand(-1, -1, heads, -1)], -1)
    gradients = [torch.ones_like(t) for t in (queries, keys, values)]
    with _Counter() as backward:
        torch.autograd.backward((queries, keys, values), gradients)
    model = load_model("deepseek-v3")
    assert isinstance(model, TransformerSpec)
    layer = token_network(model.model_copy(update={"num_attention_heads": heads}), 1, tokens).layers[1]
    kernel = next(k for k in kernels(layer, KernelPlan(Kernels(fused_rope=False))) if k.node.name == "attention/rope")

    def moved(part: Any) -> float:
        return float(sum(layer.volume(axes) * each for axes, each in part))

    assert moved(kernel.forward) == pytest.approx(forward.moved, rel=0.08)
    assert moved(kernel.backward) == pytest.approx(backward.moved, rel=0.12)


@pytest.mark.torch
@pytest.mark.parametrize(
    ("name", "autocast"), [("gelu_new", False), ("gelu_new", True), ("gelu_fast", False), ("quick_gelu", True)]
)
def test_gelus_that_transformers_writes_out_move_and_keep_what_torch_counts(name: str, autocast: bool) -> None:
    """transformers activations.py; CUDA's autocast computes torch.pow in fp32 (torch aten/src/ATen/autocast_mode.h)."""
    torch = pytest.importorskip("torch")
    from torch_traffic import traffic

    def gelu(x: Any) -> Any:
        if name == "quick_gelu":
            return x * torch.sigmoid(1.702 * x)
        if name == "gelu_fast":
            return 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))
        power = torch.pow(x.float() if autocast else x, 3.0)
        return (0.5 * x * (1.0 + torch.tanh(0.7978845608 * (x + 0.044715 * power)))).to(x.dtype)

    tokens, width = 64, 128
    x, saved = torch.randn(tokens, width, dtype=torch.bfloat16, requires_grad=True), dict[int, int]()

    def pack(t: Any) -> Any:
        saved[t.data_ptr()] = t.nbytes
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        gelu(x)
    model = load_model("gpt3-175b")
    assert isinstance(model, TransformerSpec)
    layer = token_network(model.model_copy(update={"activation": name}), 1, 16).layers[1]

    def kernel(**library: bool) -> Kernel:
        plan = KernelPlan(Kernels(**{"fused_activation": False, **library}), autocast_powers=autocast)
        return next(k for k in kernels(layer, plan) if k.node.name == "mlp/activation")

    found, counted = kernel(), traffic(gelu, tokens, width)
    assert sum(each for _, each in found.forward) == counted[0]
    assert sum(each for _, each in found.backward) == counted[1] - 4.0  # what makes the gradient in the test
    assert sum(t.bytes for t in found.keeps) == sum(saved.values()) / x.numel()
    assert kernel(fused_activation=True).launches == 1


@pytest.mark.parametrize(
    ("name", "moved"), [("plain", (36.0, 56.0, 8)), ("torch-fsdp", (36.0, 56.0, 8)), ("megatron-core", (4.0, 6.0, 1))]
)
def test_gelus_that_models_write_out_are_chains_wherever_they_are_not_fused(name: str, moved: tuple[float, float, int]) -> None:
    """Power, two products, a sum, tanh, a sum, two products: 8 kernels; torch's own GELU reads and writes once."""
    model = load_model("gpt3-175b")
    assert isinstance(model, TransformerSpec)

    def found(activation: str) -> tuple[float, float, int]:
        layer = token_network(model.model_copy(update={"activation": activation}), 1, 16).layers[1]
        plan = KernelPlan(framework(name, "2024-01").kernels)
        kernel = next(k for k in kernels(layer, plan) if k.node.name == "mlp/activation")
        return sum(each for _, each in kernel.forward), sum(each for _, each in kernel.backward), kernel.launches

    assert found("gelu_new") == moved
    assert found("gelu_pytorch_tanh") == (4.0, 6.0, 1)


@pytest.mark.torch
def test_norms_of_queries_and_keys_are_chains_where_norms_are() -> None:
    """RMSNorm over heads of 128 as transformers writes it, of queries and of keys; one kernel each where norms are one."""
    torch = pytest.importorskip("torch")
    from torch_traffic import _Counter

    weight = torch.ones(128, dtype=torch.bfloat16, requires_grad=True)
    x = torch.randn(4096, 128, dtype=torch.bfloat16, requires_grad=True)
    with _Counter(frozenset()) as forward:
        wide = x.float()
        y = weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
    gradient = torch.ones_like(y)
    with _Counter(frozenset()) as backward:
        y.backward(gradient)
    model = load_model("qwen3-32b")
    assert isinstance(model, TransformerSpec)
    layer = token_network(model, 1, 16).layers[1]

    def found(*, fused: bool) -> Kernel:
        plan = KernelPlan(Kernels(fused_norm=fused))
        return next(k for k in kernels(layer, plan) if k.node.name == "attention/qk_norm")

    chain = found(fused=False)
    assert (chain.price, chain.launches) == ("composite", 16)
    assert [each for _, each in chain.forward] == pytest.approx([forward.moved / x.numel()] * 2, rel=0.01)
    assert [each for _, each in chain.backward] == pytest.approx([backward.moved / x.numel()] * 2, rel=0.03)
    one = found(fused=True)
    assert (one.price, one.launches, [each for _, each in one.forward]) == ("norm", 2, [4.0, 4.0])


@pytest.mark.torch
def test_rotary_embeddings_by_halves_may_be_in_fp32() -> None:
    """torchtitan's apply_rotary_emb_cos_sin, as its dispatcher sees it, of Qwen3's queries and keys; not in a compiled graph."""
    torch = pytest.importorskip("torch")
    from torch_traffic import _Counter

    cosine = torch.ones(256, 1, 128)
    x = torch.randn(256, 40, 128, dtype=torch.bfloat16, requires_grad=True)
    with _Counter() as forward:
        wide = x.float()
        y = ((wide * cosine) + (torch.cat((-wide[..., 64:], wide[..., :64]), -1) * cosine)).type_as(x)
    gradient = torch.ones_like(y)
    with _Counter() as backward:
        y.backward(gradient)
    model = load_model("qwen3-32b")
    assert isinstance(model, TransformerSpec)
    layer = token_network(model, 1, 16).layers[1]

    def found(*, fused: bool) -> Kernel:
        plan = KernelPlan(Kernels(fused_rope=fused, wide_rope=True))
        return next(k for k in kernels(layer, plan) if k.node.name == "attention/rope")

    chain = found(fused=False)
    assert (chain.price, chain.launches) == ("composite", 14)
    assert [each for _, each in chain.forward] == pytest.approx([forward.moved / x.numel()] * 2, rel=0.01)
    assert [each for _, each in chain.backward] == pytest.approx([backward.moved / x.numel()] * 2, rel=0.01)
    assert found(fused=True).price == "rope"


@pytest.mark.torch
def test_a_stream_of_fp32_moves_what_torch_counts() -> None:
    """Norm, rotary embedding and residual sum of transformers' Llama with fp32 weights under autocast."""
    torch = pytest.importorskip("torch")
    from torch_traffic import _Counter

    tokens, width = 1024, 256
    weight = torch.ones(width, requires_grad=True)
    cosine = torch.ones(1, width)
    branch = torch.zeros(tokens, width, dtype=torch.bfloat16, requires_grad=True)

    def norm(x: Any) -> Any:
        wide = x.float()
        return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)

    def rope(x: Any) -> Any:
        first, second = x[..., : width // 2], x[..., width // 2 :]
        return (x * cosine + torch.cat((-second, first), -1) * cosine).to(torch.bfloat16)

    def counted(function: Any, x: Any) -> tuple[float, float]:
        with _Counter() as forward:
            y = function(x)
        gradient = torch.ones_like(y)
        with _Counter() as backward:
            torch.autograd.grad(y, [x, weight, branch], gradient, allow_unused=True)
        return forward.moved / x.numel(), backward.moved / x.numel()

    model = load_model("llama3.1-8b")
    assert isinstance(model, TransformerSpec)
    layer = token_network(model, 1, 16).layers[1]
    library = Kernels(fused_norm=False, fused_rope=False, fused_residual=True)
    found = {k.node.name: k for k in kernels(layer, KernelPlan(library, autocast="own"))}

    def stream(dtype: Any) -> Any:
        return torch.randn(tokens, width, dtype=dtype, requires_grad=True)

    for name, moved in (
        ("input_norm", counted(norm, stream(torch.float32))),
        ("attention/rope", counted(rope, stream(torch.bfloat16))),
    ):
        kernel = found[name]
        assert (kernel.forward[0][1], kernel.backward[0][1]) == pytest.approx(moved, rel=0.01)
    forward, cast = counted(lambda x: x + branch, stream(torch.float32))
    both = 12.0  # autograd adds the gradients of what reads the sum
    assert (found["mlp_residual"].forward[0][1], found["mlp_residual"].backward[0][1]) == (forward, cast + both)


def gpt_oss(framework: str, ep: int = 8, model: str = "gpt-oss-20b", **plan: Any) -> dict[str, LocalOp]:
    """Ops of one of its layers with experts, by name; + = of the backward."""
    scenario = make_scenario(
        {
            "model": model,
            "framework": framework,
            "framework_version": "2026-04",
            "cluster": {"hardware": "dgx-b200", "num_nodes": 1},
            "plan": {"dp": 8, "ep": ep, "ep_dispatcher": "hybridep", **plan},
            "training": {"sequence_length": 4096, "global_batch_size": 8, "micro_batch_size": 1, "precision": "bf16"},
        }
    )
    block = next(b for b in Layout.of(scenario, 1).stage_blocks[0] if "experts" in b.name or "moe" in b.name)
    return {op.name: op for op in block.forward} | {f"{op.name}+": op for op in block.backward}


@pytest.mark.parametrize("ep", [2, 8])
def test_kernels_of_expert_biases_grow_with_the_experts_of_a_rank(ep: int) -> None:
    """Two forward and six backward for each expert, two and four beside (rows concatenated, cast, split)."""
    ops = gpt_oss("megatron-bridge", ep)
    found = ops["moe/fc2_bias"].kernels, ops["moe/fc2_bias.backward+"].kernels
    assert found == (2 + 2 * 32 // ep, 4 + 6 * 32 // ep)


def test_a_recomputed_activation_of_experts_is_clamped_again() -> None:
    again = gpt_oss("megatron-bridge", recompute={"granularity": "selective", "modules": ["moe_act"]})
    assert {"moe/clamp+", "moe/clamp.copy+", "moe/activation+"} <= again.keys()
    assert "moe/clamp+" not in gpt_oss("megatron-bridge")


def test_yarn_has_no_rotary_kernel_under_megatron() -> None:
    """21 bytes an element of queries and keys as a chain; Qwen3, without a factor, 4 as one kernel."""
    elements = 4096 * 64 * (64 + 8)
    rope = gpt_oss("megatron-bridge")["attention/rope"].work
    assert rope == MemoryWork("composite", 21.0 * elements, 8, "tuned")
    plain = gpt_oss("megatron-bridge", model="qwen3-30b-a3b")["attention/rope"].work
    assert plain == MemoryWork("rope", 4.0 * 4096 * 128 * (32 + 4), 2, "tuned")
