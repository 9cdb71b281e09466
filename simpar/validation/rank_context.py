"""Attention over a context-parallel group: ring, all-gather of keys and values, or all-to-all (Ulysses).

Each keeps its local queries, keys, values, its output and the log-sum-exp, and moves keys and values again in the backward.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from simpar.validation.rank_kernels import attention, raw_backward, raw_forward


def context_attention(q: Any, k: Any, v: Any, group: Any, style: str) -> Any:
    """Attention of this rank's part of the sequence: q [b, n, s / cp, h], k and v with their heads."""
    if style == "ulysses":
        q, k, v = (_Swap.apply(t, group, True) for t in (q, k, v))
        return _Swap.apply(attention(q, k, v), group, False)
    return (_Ring if style == "ring" else _Gathered).apply(q, k, v, group)


def _passed_on(tensors: tuple[Any, ...], group: Any) -> tuple[Any, ...]:
    """What the neighbour sends, in one message."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    out = torch.cat([t.reshape(-1) for t in tensors])
    found = torch.empty_like(out)
    after, before = (dist.get_global_rank(group, (rank + step) % size) for step in (1, -1))
    for work in (dist.isend(out, after, group=group), dist.irecv(found, before, group=group)):
        if work is not None:
            work.wait()
    return tuple(part.view_as(t) for part, t in zip(found.split([t.numel() for t in tensors]), tensors, strict=True))


class _Ring(torch.autograd.Function):
    """Keys and values travel around; after the first step each block meets half of the keys (zigzag order)."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, group: Any) -> Any:
        ctx.group, here = group, (k, v)
        out, lse, more = raw_forward(q, k, v, True)
        for _ in range(dist.get_world_size(group) - 1):
            here = _passed_on(here, group)
            part, _, _ = raw_forward(q, *_half(here), False)
            out = out + part
        ctx.more = more
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = raw_backward(gradient, q, k, v, out, lse, ctx.more, True)
        here = (k, v, dk, dv)
        for _ in range(dist.get_world_size(ctx.group) - 1):
            here = _passed_on(here, ctx.group)
            step, _, _ = raw_backward(gradient, q, *_half(here[:2]), out, lse, ctx.more, False)
            dq = dq + step
        return dq, dk, dv, None


def _half(pair: tuple[Any, ...]) -> tuple[Any, Any]:
    k, v = (t[:, :, : max(t.shape[2] // 2, 1)] for t in pair)
    return k, v


class _Gathered(torch.autograd.Function):
    """Keys and values of all ranks; of head and tail chunks every query meets half."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, group: Any) -> Any:
        ctx.group = group
        out, lse, ctx.more = raw_forward(q, *_half(_gather((k, v), group)), False)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        whole = _gather((k, v), ctx.group)
        dq, *_ = raw_backward(gradient, q, *_half(whole), out, lse, ctx.more, False)
        packed = torch.cat([t.reshape(-1) for t in whole])
        own = torch.empty(packed.numel() // dist.get_world_size(ctx.group), dtype=packed.dtype, device=packed.device)
        dist.reduce_scatter_tensor(own, packed, group=ctx.group)
        dk, dv = (part.view_as(t) for part, t in zip(own.split([k.numel(), v.numel()]), (k, v), strict=True))
        return dq, dk, dv, None


def _gather(pair: tuple[Any, ...], group: Any) -> tuple[Any, ...]:
    """Keys and values [b, k, s, h] of the whole sequence, in one message."""
    size = dist.get_world_size(group)
    own = torch.cat([t.reshape(-1) for t in pair])
    whole = torch.empty(own.numel() * size, dtype=own.dtype, device=own.device)
    dist.all_gather_into_tensor(whole, own, group=group)
    parts = whole.view(size, -1).split([t.numel() for t in pair], 1)
    return tuple(
        part.reshape(size, *t.shape).permute(1, 2, 0, 3, 4).flatten(2, 3) for part, t in zip(parts, pair, strict=True)
    )


class _Swap(torch.autograd.Function):
    """All-to-all from parts of the sequence to parts of the heads (`inward`), or back."""

    @staticmethod
    def forward(ctx: Any, x: Any, group: Any, inward: bool) -> Any:
        ctx.group, ctx.inward = group, inward
        return _swap(x, group, inward)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return _swap(gradient, ctx.group, not ctx.inward), None, None


def _swap(x: Any, group: Any, inward: bool) -> Any:
    size = dist.get_world_size(group)
    parts = x.unflatten(1, (size, -1)).movedim(1, 0) if inward else x.unflatten(2, (size, -1)).movedim(2, 0)
    parts = parts.contiguous()
    found = torch.empty_like(parts)
    dist.all_to_all_single(found, parts, group=group)
    return found.movedim(0, 2).flatten(2, 3) if inward else found.movedim(0, 1).flatten(1, 2)
