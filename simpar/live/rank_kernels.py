"""Attention and norm of a rank: torch's own on real tensors, on fake ones stand-ins that save and count what a GPU's do.

The CPU's own kernels keep other tensors than a GPU's: RMSNorm is composite there, and attention has no flash kernel for
grouped heads. The stand-ins give zeros of the right shape.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn import functional
from torch.utils.flop_counter import register_flop_formula

from simpar.live.kernels import rms_norm


@torch.library.custom_op("simpar_rank::attention", mutates_args=())
def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(output [b, n, s, j], log-sum-exp [b, n, s] fp32) of q [b, n, s, h], k [b, k, t, h], v [b, k, t, j].

    As flash kernels do, the output lies in memory as [b, s, n, j].
    """
    b, n, s, _ = q.shape
    return q.new_zeros((b, s, n, v.shape[-1])).transpose(1, 2), q.new_zeros((b, n, s), dtype=torch.float32)


@_attention.register_fake
def _(q: Any, k: Any, v: Any) -> Any:
    b, n, s, _ = q.shape
    return q.new_empty((b, s, n, v.shape[-1])).transpose(1, 2), q.new_empty((b, n, s), dtype=torch.float32)


@torch.library.custom_op("simpar_rank::attention_backward", mutates_args=())
def _attention_backward(
    gradient: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k, v."""
    return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)


@_attention_backward.register_fake
def _(gradient: Any, q: Any, k: Any, v: Any, out: Any, lse: Any) -> Any:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs, *output)


def _differentiate(ctx: Any, gradient: Any, _: Any) -> Any:
    return _attention_backward(gradient, *ctx.saved_tensors)


_attention.register_autograd(_differentiate, setup_context=_keep)


def _products(q: Any, k: Any, v: Any) -> int:
    """FLOPs of the two products of the forward, the whole score matrix counted as torch does."""
    b, n, s, h = q
    return 2 * b * n * s * k[2] * (h + v[3])


@register_flop_formula(torch.ops.simpar_rank.attention)
def _forward_flops(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    return _products(q, k, v)


@register_flop_formula(torch.ops.simpar_rank.attention_backward)
def _backward_flops(gradient: Any, q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    # Without the recomputation of the scores that a flash kernel adds: model FLOPs, twice the forward's.
    return 2 * _products(q, k, v)


def raw_forward(q: Any, k: Any, v: Any, causal: bool) -> Any:
    """(output, log-sum-exp, what else the backward needs), no autograd."""
    if q.is_cuda and not is_fake(q):
        found = torch.ops.aten._scaled_dot_product_flash_attention(q, _expanded(q, k), _expanded(q, v), 0.0, causal)
        return found[0], found[1], found[6:8]
    out, lse = _attention(q, k, v)
    return out, lse, ()


def raw_backward(gradient: Any, saved: tuple[Any, ...], more: Any, causal: bool) -> Any:
    """Gradients of q, k, v, no autograd; `saved`: those, the output and its log-sum-exp."""
    q, k, v, out, lse = saved
    if q.is_cuda and not is_fake(q):
        s, t = q.shape[2], k.shape[2]
        wide = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            gradient, q, _expanded(q, k), _expanded(q, v), out, lse, None, None, s, t, 0.0, causal, *more
        )
        dq, dk, dv = wide
        return dq, *(g.unflatten(1, (k.shape[1], -1)).sum(2) for g in (dk, dv))
    return _attention_backward(gradient, q, k, v, out, lse)


def _expanded(q: Any, k: Any) -> Any:
    """Keys or values repeated for the queries' heads."""
    return k if k.shape[1] == q.shape[1] else k.repeat_interleave(q.shape[1] // k.shape[1], 1)


def is_fake(x: Any) -> bool:
    """Whether a tensor has no storage."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(x, FakeTensor)


def attention(q: Any, k: Any, v: Any) -> Any:
    """Causal attention of q [b, n, s, h], k [b, k, t, h], v [b, k, t, j]."""
    if is_fake(q):
        return _attention(q, k, v)[0]
    grouped = q.shape[1] != k.shape[1]
    if q.shape[-1] == v.shape[-1]:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    # Kernels for values narrower than keys exist only in some versions: padded, then cut.
    wide = functional.pad(v, (0, q.shape[-1] - v.shape[-1]))
    return functional.scaled_dot_product_attention(q, k, wide, is_causal=True, enable_gqa=grouped)[..., : v.shape[-1]]


class FusedNorm(torch.autograd.Function):
    """Saves its input, its weight and one fp32 statistic per row, as the fused kernel does."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any) -> Any:
        ctx.save_for_backward(x, weight, torch.empty_like(x[..., :1], dtype=torch.float32))
        return torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        x, weight, _ = ctx.saved_tensors
        return torch.zeros_like(x), torch.zeros_like(weight)


def norm(x: Any, weight: Any) -> Any:
    """RMSNorm over the last axis; of a sequence-parallel shard where `x` is a distributed tensor."""
    if isinstance(x, DTensor):
        held = x.placements
        shared = [Replicate() if p.is_replicate() else Partial() for p in held]
        local = weight.to_local(grad_placements=shared) if isinstance(weight, DTensor) else weight
        return DTensor.from_local(norm(x.to_local(), local), x.device_mesh, held, run_check=False)
    if not is_fake(x):
        return rms_norm(x, weight)
    return FusedNorm.apply(x, weight)
