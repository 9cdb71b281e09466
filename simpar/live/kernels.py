"""Kernels that eager torch has on a GPU and not on a CPU, and linear layers in fp8."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional


class _FusedNorm(torch.autograd.Function):
    """RMSNorm that keeps its input and a statistic of each row, as a GPU's kernel does; a CPU's own keeps their product too."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, eps: float) -> Any:
        scale = torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, scale)
        return x * scale * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight, scale = ctx.saved_tensors
        normed, inner = x * scale, gradients[0] * weight
        of_weight = (gradients[0] * normed).flatten(0, -2).sum(dim=0)
        return scale * (inner - normed * (inner * normed).mean(dim=-1, keepdim=True)), of_weight, None


def rms_norm(x: Any, weight: Any, eps: float = 1e-5) -> Any:
    """RMSNorm over the last axis."""
    if x.is_cuda:
        return functional.rms_norm(x, weight.shape, weight, eps)
    return _FusedNorm.apply(x, weight, eps)


def rms_norm_chain(x: Any, weight: Any, eps: float = 1e-5) -> Any:
    """RMSNorm as eager torch runs it without a kernel of its own (before 2.9): in fp32 and back, one elementary kernel a step."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + eps)).type_as(x)


class Scaled(torch.autograd.Function):
    """x [rows, depth] times weight [columns, depth] transposed, and both gradients, in fp8; the result is in bf16.

    Operands are cast on the way, with one scale a tensor or one a row.
    """

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, by_row: bool) -> Any:
        ctx.save_for_backward(x, weight)
        ctx.by_row = by_row
        return _scaled_mm(x, weight, by_row)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        of_x = _scaled_mm(gradient, weight.t().contiguous(), ctx.by_row)
        return of_x, _scaled_mm(gradient.t().contiguous(), x.t().contiguous(), ctx.by_row), None


def _cast(x: Any, by_row: bool) -> tuple[Any, Any]:
    """x in fp8 and what multiplies it back."""
    most = torch.finfo(torch.float8_e4m3fn).max
    top = x.abs().amax(dim=-1, keepdim=True).float() if by_row else x.abs().amax().float()
    scale = (top / most).clamp(min=1e-12)
    return (x.float() / scale).clamp(-most, most).to(torch.float8_e4m3fn), scale


def _scaled_mm(a: Any, b: Any, by_row: bool) -> Any:
    """a [rows, depth] times b [columns, depth] transposed."""
    (left, left_scale), (right, right_scale) = _cast(a, by_row), _cast(b, by_row)
    scale_b = right_scale.t() if by_row else right_scale
    return torch._scaled_mm(left, right.t(), scale_a=left_scale, scale_b=scale_b, out_dtype=torch.bfloat16)
