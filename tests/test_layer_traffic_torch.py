"""A whole layer of plain torch modules, eager and compiled: what its kernels beside products and attention read and write.

Eager kernels are counted where torch dispatches them, compiled ones as Inductor schedules them. Products and a stand-in for flash
attention do not count. Bytes are per token and hidden unit, of a layer with the proportions of Llama 3 8B.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("the torch extra is not installed", allow_module_level=True)

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch._inductor import config, metrics
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.compile_fx import inductor_metrics_log
from torch_traffic import _Counter

from simpar.graph.kernel_types import KernelPlan
from simpar.model.layered import token_network
from simpar.parallel.blocks import split_block
from simpar.parallel.degrees import Degrees
from simpar.parallel.libraries import library_of
from simpar.parallel.split_options import SplitOptions
from simpar.parallel.work import MemoryWork
from simpar.specs.framework import framework
from simpar.specs.model import TransformerSpec
from simpar.specs.models_io import load_model
from simpar.specs.training import TrainingSpec

pytestmark = pytest.mark.torch
BATCH, SEQUENCE, HIDDEN, HEADS, KV, DIM, FFN = 2, 256, 512, 8, 2, 64, 1792
PRODUCTS = frozenset({"aten::mm", "simpar::core", "simpar::core_backward"})


@torch.library.custom_op("simpar::core", mutates_args=())
def core(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """An attention that computes nothing; flash attention writes tokens before heads, whatever it reads."""
    return _tokens_first(q)


@torch.library.custom_op("simpar::core_backward", mutates_args=())
def core_backward(
    g: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Its backward."""
    return _tokens_first(q), _tokens_first(k), _tokens_first(v)


def _tokens_first(like: torch.Tensor) -> torch.Tensor:
    batch, heads, tokens, width = like.shape
    return like.new_zeros(batch, tokens, heads, width).transpose(1, 2)


core.register_fake(lambda q, k, v: _tokens_first(q))
core_backward.register_fake(lambda g, q, k, v: tuple(_tokens_first(t) for t in (q, k, v)))
core.register_autograd(
    lambda ctx, g: core_backward(g, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def by_complex_numbers(x: Any, turns: Any) -> Any:
    """As torchtitan's Llama."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns).flatten(3).type_as(x)


def by_halves(x: Any, turns: Any) -> Any:
    """As transformers' Llama."""
    cosine, sine = turns
    first, second = x[..., : DIM // 2], x[..., DIM // 2 :]
    return x * cosine + torch.cat((-second, first), -1) * sine


class Layer(nn.Module):
    """Grouped-query attention and SwiGLU with a linear for each of queries, keys, values, gate and up."""

    def __init__(
        self, rotary: Callable[[Any, Any], Any], norm: type[nn.Module], *, repeats: bool, heads_first: bool = False
    ) -> None:
        super().__init__()
        self.rotary, self.repeats, self.heads_first = rotary, repeats, heads_first
        self.norms = nn.ModuleList(norm(HIDDEN) for _ in range(2))
        self.q, self.k, self.v = (nn.Linear(HIDDEN, n * DIM, bias=False) for n in (HEADS, KV, KV))
        self.out, self.down = nn.Linear(HEADS * DIM, HIDDEN, bias=False), nn.Linear(FFN, HIDDEN, bias=False)
        self.gate, self.up = (nn.Linear(HIDDEN, FFN, bias=False) for _ in range(2))

    def forward(self, x: Any, turns: Any) -> Any:
        y = self.norms[0](x)
        q, k, v = (linear(y).unflatten(-1, (-1, DIM)) for linear in (self.q, self.k, self.v))
        if self.heads_first:
            q, k, v = (t.transpose(1, 2).contiguous() for t in (q, k, v))
            turns = [turn.transpose(1, 2) for turn in turns]
        q, k = self.rotary(q, turns), self.rotary(k, turns)
        if self.repeats:
            k, v = (t.unsqueeze(3).expand(-1, -1, -1, HEADS // KV, -1).reshape(*t.shape[:2], HEADS, DIM) for t in (k, v))
        read = (q, k, v) if self.heads_first else (t.transpose(1, 2) for t in (q, k, v))
        x = x + self.out(core(*read).transpose(1, 2).flatten(2))
        y = self.norms[1](x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def tensors(rotary: Callable[[Any, Any], Any]) -> tuple[Any, Any, Any]:
    """The stream, its gradient, and the angles as `rotary` reads them."""
    x = torch.randn(BATCH, SEQUENCE, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    angles = torch.randn(1, SEQUENCE, 1, DIM // 2)
    turns: Any = torch.polar(torch.ones_like(angles), angles)
    if rotary is by_halves:
        turns = [torch.cat((part, part), -1).to(x.dtype) for part in (turns.real, turns.imag)]
    return x, torch.ones_like(x), turns


def eager(layer: Layer) -> tuple[float, float]:
    """Bytes per token and hidden unit, forward and backward."""
    x, gradient, turns = tensors(layer.rotary)
    with _Counter(PRODUCTS) as forward:
        y = layer(x, turns)
    with _Counter(PRODUCTS) as backward:
        y.backward(gradient)
    return forward.moved / x.numel(), backward.moved / x.numel()


def compiled(layer: Layer) -> Iterator[float]:
    """The same under torch.compile: what Inductor's scheduler says of its own kernels, and of eager ones that it calls.

    Products and attention are left out, and what only looks at a tensor as complex or real.
    """
    x, gradient, turns = tensors(layer.rotary)
    compile_layer = torch.compile(layer, fullgraph=True)
    metrics.reset()
    y = compile_layer(x, turns)
    yield _scheduled() / x.numel()
    metrics.reset()
    y.backward(gradient)
    yield _scheduled() / x.numel()


def _scheduled() -> float:
    return sum(4.0 * count for node, count in metrics.nodes_num_elem if _moves(node))


def _moves(node: Any) -> bool:
    called = str(getattr(getattr(node, "node", None), "python_kernel_name", None) or "")
    return not any(name in called for name in ("mm", "simpar", "view_as"))


def predicted(name: str, version: str, norm: str, *, compile: bool = False) -> tuple[float, float]:
    """What simpar counts of the same layer in a framework."""
    llama = load_model("llama3.1-8b")
    assert isinstance(llama, TransformerSpec)
    sizes = {
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV,
        "head_dim": DIM,
        "intermediate_size": FFN,
    }
    spec = llama.model_copy(update={**sizes, "norm": norm})
    training = TrainingSpec(sequence_length=SEQUENCE, global_batch_size=BATCH, micro_batch_size=BATCH, compile=compile)
    plan = KernelPlan(library_of(framework(name, version).kernels, training, compiled=compile, tp=1, math_attention=False))
    local = split_block(token_network(spec, BATCH, SEQUENCE).layers[-1], SplitOptions(Degrees(), plan))
    moved = (sum(op.work.bytes_moved for op in ops if isinstance(op.work, MemoryWork)) for ops in (local.forward, local.backward))
    forward, backward = (each / (BATCH * SEQUENCE * HIDDEN) for each in moved)
    return forward, backward


@pytest.mark.parametrize(
    ("name", "version", "rotary", "repeats"),
    [("torchtitan", "2025-12", by_complex_numbers, True), ("torchtitan", "2026-03", by_complex_numbers, False),
     ("modalities", "2024-12", by_halves, False)],
)  # fmt: skip
def test_an_eager_layer_moves_what_torch_dispatches(name: str, version: str, rotary: Any, repeats: bool) -> None:
    """Left: statistics of norms and the table of angles, and what slices leave of a halved rotary embedding's gradient.

    RMSNorm is a chain on CPUs, so the layer has torch's LayerNorm, one kernel as RMSNorm is on GPUs from torch 2.9 on.
    """
    copies = framework(name, version).kernels.heads_first
    counted = eager(Layer(rotary, nn.LayerNorm, repeats=repeats, heads_first=copies).to(torch.bfloat16))
    assert predicted(name, version, "layernorm") == pytest.approx(counted, rel=0.025)


def test_a_compiled_layer_moves_what_inductor_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor falls back to eager kernels for complex numbers. Left: the sum after attention, which it does not write but adds up
    again (2 bytes), the cast back of keys, which repeats them too (1), the table of angles.

    Gradients of norms' weights (14 bytes here) are a pass of their own, which the rate of a norm's backward holds.
    """
    monkeypatch.setattr(config, "force_disable_caches", True)
    # Values do not matter: no kernel is built.
    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", lambda self, arguments, source: lambda *given: None)
    monkeypatch.setattr(inductor_metrics_log, "isEnabledFor", lambda level: True)
    layer = Layer(by_complex_numbers, nn.RMSNorm, repeats=True).to(torch.bfloat16)
    layer.norms.requires_grad_(False)
    counted = tuple(compiled(layer))
    assert predicted("torchtitan", "2025-12", "rmsnorm", compile=True) == pytest.approx(counted, rel=0.04)
