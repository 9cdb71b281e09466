"""Attention over a context-parallel group: torch's ring, passing keys and values on or gathering them, or all-to-all (Ulysses).

Each keeps its local queries, keys, values, its output and the log-sum-exp, and moves keys and values again in the backward. The
ring is that of torch's context_parallel (distributed/tensor/experimental, `_templated_ring_attention`): keys and values travel
with as many heads as there are queries (torchtitan repeats them), their gradients in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from simpar.live.rank_kernels import attention, raw_backward, raw_forward


def context_attention(q: Any, k: Any, v: Any, group: Any, style: str) -> Any:
    """Attention of this rank's part of the sequence: q [b, n, s / cp, h], k and v with their heads."""
    if style == "ulysses":
        q, k, v = (_Swap.apply(t, group, True) for t in (q, k, v))
        return _Swap.apply(attention(q, k, v), group, False)
    return _Ring.apply(q, k, v, group, style == "all_gather")


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
    """Keys and values travel around, or are gathered; after the first step each block meets half of the keys (zigzag order)."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, group: Any, gathered: bool) -> Any:
        ctx.group, ctx.gathered = group, gathered
        out, lse, ctx.more = raw_forward(q, k, v, True)
        for here in _visits(_wide(q, k, v), group, gathered):
            part, _, _ = raw_forward(q, *_half(here), False)
            out = out + part
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = raw_backward(gradient, ctx.saved_tensors, ctx.more, True)
        sums = _passed_on(tuple(t.float() for t in _wide(q, dk, dv)), ctx.group)
        for here in _visits(_wide(q, k, v), ctx.group, ctx.gathered):
            step, _, _ = raw_backward(gradient, (q, *_half(here), out, lse), ctx.more, False)
            dq = dq + step
            sums = _passed_on(sums, ctx.group)
        return dq, dk, dv, None, None


def _wide(q: Any, k: Any, v: Any) -> tuple[Any, ...]:
    """Keys and values with as many heads as queries."""
    return tuple(t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))


def _visits(own: tuple[Any, ...], group: Any, gathered: bool) -> Iterator[tuple[Any, ...]]:
    """Keys and values of every other rank in turn."""
    size = dist.get_world_size(group)
    if gathered:
        shapes = [t.shape for t in own]
        packed = torch.cat([t.reshape(-1) for t in own])
        del own  # the gathered tensor is all that stays
        whole = torch.empty(packed.numel() * size, dtype=packed.dtype, device=packed.device)
        dist.all_gather_into_tensor(whole, packed, group=group)
        del packed
        for part in whole.chunk(size)[1:]:
            yield tuple(x.view(s) for x, s in zip(part.split([s.numel() for s in shapes]), shapes, strict=True))
        return
    here = own
    for _ in range(size - 1):
        here = _passed_on(here, group)
        yield here


def _half(pair: tuple[Any, ...]) -> tuple[Any, Any]:
    k, v = (t[:, :, : max(t.shape[2] // 2, 1)] for t in pair)
    return k, v


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
