"""Causal attention of a real run: on one rank, and split over context-parallel ranks (ring, gathered keys, all-to-all).

Ring and gathered keys give every rank the i-th chunk from the front and from the back of 2 cp chunks, so that causal work is
even; parts are joined by their log-sum-exp, in the backward too (Liu et al. 2023, ring attention). Tensors are [b, heads, s, h].
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from simpar.live.autograd_collectives import Exchange, Group, gather_rows, scatter_rows

Block = tuple[slice, slice, bool]
"""Local queries, visiting keys, causal."""


def positions(sequence: int, group: Group, style: str) -> Any:
    """Positions of this rank's tokens [s / cp]."""
    whole = torch.arange(sequence)
    if group.size == 1:
        return whole
    if style == "ulysses":
        return whole.chunk(group.size)[group.rank]
    chunks = whole.chunk(2 * group.size)
    return torch.cat([chunks[group.rank], chunks[2 * group.size - 1 - group.rank]])


def causal_attention(q: Any, k: Any, v: Any) -> Any:
    """Attention of one rank that has the whole sequence."""
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def _forward(q: Any, k: Any, v: Any, causal: bool) -> tuple[Any, Any, tuple[Any, ...]]:
    """(output, log-sum-exp [b, heads, s], what the backward wants besides)."""
    if q.is_cuda:
        out, lse, *rest = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
        return out, lse[..., : q.shape[2]], tuple(rest[:6])
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    return out, lse, ()


def _backward(grad: Any, saved: tuple[Any, ...], causal: bool, rest: tuple[Any, ...]) -> tuple[Any, ...]:
    """Gradients of q, k and v; `saved`: q, k, v, the output and its log-sum-exp."""
    if grad.is_cuda:
        cum_q, cum_k, max_q, max_k, seed, offset = rest
        return tuple(
            torch.ops.aten._scaled_dot_product_flash_attention_backward(
                grad, *saved, cum_q, cum_k, max_q, max_k, 0.0, causal, seed, offset
            )
        )
    return tuple(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, *saved, 0.0, causal))


def _blocks(rank: int, source: int, length: int) -> Block:
    """Which of `length` local queries meet which keys of rank `source`."""
    half = length // 2
    if source == rank:
        return slice(0, length), slice(0, length), True
    if source < rank:
        return slice(0, length), slice(0, half), False
    return slice(half, length), slice(0, length), False


class _Visits:
    """Keys and values of all ranks in the order in which they come to this one."""

    def __init__(self, own: Any, group: Group, style: str) -> None:
        self.own, self.group, self.style = own, group, style
        self._current = own
        self._all = gather_rows(own[None], group) if style == "all_gather" else None

    def source(self, step: int) -> int:
        return (self.group.rank - step) % self.group.size

    def start(self, step: int) -> Any:
        """Send on what is here; the work to wait for."""
        if self.style != "ring" or step >= self.group.size - 1:
            return None
        return _rotate(self._current, self.group)

    def get(self, step: int) -> Any:
        return self._current if self._all is None else self._all[self.source(step)]

    def arrived(self, work: Any) -> None:
        if work is not None:
            self._current = _arrived(work)


def _rotate(tensor: Any, group: Group) -> tuple[Any, list[Any]]:
    """Start to send to the next rank and to receive from the one before."""
    after, before = (group.ranks[(group.rank + step) % group.size] for step in (1, -1))
    tensor, out = tensor.contiguous(), torch.empty_like(tensor, memory_format=torch.contiguous_format)
    ops = [dist.P2POp(dist.isend, tensor, after, group.handle), dist.P2POp(dist.irecv, out, before, group.handle)]
    return out, dist.batch_isend_irecv(ops)


def _arrived(work: tuple[Any, list[Any]]) -> Any:
    for handle in work[1]:
        handle.wait()
    return work[0]


class SplitAttention(torch.autograd.Function):
    """Attention of this rank's queries with the keys of all ranks of the group, by ring or by gathering."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, group: Group, style: str) -> Any:
        visits, length = _Visits(torch.stack([k, v]), group, style), q.shape[2]
        out, lse = torch.zeros_like(q), q.new_full(q.shape[:3], float("-inf"), dtype=torch.float32)
        ctx.rest = []
        for step in range(group.size):
            work = visits.start(step)
            queries, keys, causal = _blocks(group.rank, visits.source(step), length)
            pair = visits.get(step)
            part, part_lse, rest = _forward(q[:, :, queries], pair[0][:, :, keys], pair[1][:, :, keys], causal)
            ctx.rest.append(rest)
            both = torch.logaddexp(lse[:, :, queries], part_lse)
            old, new = torch.exp(lse[:, :, queries] - both), torch.exp(part_lse - both)
            out[:, :, queries] = (out[:, :, queries] * old[..., None] + part * new[..., None]).to(q.dtype)
            lse[:, :, queries] = both
            visits.arrived(work)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.group, ctx.style = group, style
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        group, length, grad = ctx.group, q.shape[2], grads[0].contiguous()
        visits = _Visits(torch.stack([k, v]), group, ctx.style)
        dq, all_grads = torch.zeros_like(q), {}
        own: Any = None
        travelling: Any = None
        for step in range(group.size):
            source = visits.source(step)
            work = visits.start(step)
            queries, keys, causal = _blocks(group.rank, source, length)
            pair = visits.get(step)
            saved = (
                q[:, :, queries], pair[0][:, :, keys], pair[1][:, :, keys], out[:, :, queries].contiguous(),
                lse[:, :, queries].contiguous(),
            )  # fmt: skip
            parts = _backward(grad[:, :, queries].contiguous(), saved, causal, ctx.rest[step])
            dq[:, :, queries] += parts[0]
            mine = torch.zeros_like(pair)
            mine[0][:, :, keys], mine[1][:, :, keys] = parts[1], parts[2]
            if ctx.style != "ring":
                all_grads[source] = mine
            elif step == 0:
                own = mine
            else:
                # The gradients of a visiting pair collect one rank's share a step and end where the pair came from.
                travelling = mine if travelling is None else _arrived(travelling) + mine
                travelling = _rotate(travelling, group)
            visits.arrived(work)
        if ctx.style == "ring":
            total = own if travelling is None else own + _arrived(travelling)
        else:
            total = scatter_rows(torch.stack([all_grads[i] for i in range(group.size)]), group)[0]
        return dq, total[0], total[1], None, None


def exchanged_attention(q: Any, k: Any, v: Any, group: Group) -> Any:
    """Ulysses: [b, heads, s / cp, h] to [b, heads / cp, s, h], attention, and back."""
    b, heads, local, h = q.shape
    kv = k.shape[1] // group.size
    parts = torch.cat([x.unflatten(1, (group.size, -1)) for x in (q, k, v)], dim=2)
    # [b, cp, heads of one rank (q, k, v), s / cp, h] -> one part for each rank first
    whole = Exchange.apply(parts.transpose(0, 1), group)
    whole = whole.permute(1, 2, 0, 3, 4).flatten(2, 3)
    q, k, v = whole.split([heads // group.size, kv, kv], dim=1)
    out = causal_attention(q, k, v)
    back = Exchange.apply(out.unflatten(2, (group.size, local)).permute(2, 0, 1, 3, 4), group)
    return back.permute(1, 0, 2, 3, 4).reshape(b, heads, local, h)


def attention(q: Any, k: Any, v: Any, group: Group, style: str) -> Any:
    """Attention over the whole sequence, of which this rank holds a part."""
    if group.size == 1:
        return causal_attention(q, k, v)
    if style == "ulysses":
        return exchanged_attention(q, k, v, group)
    if q.shape[1] != k.shape[1]:
        repeat = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(repeat, dim=1) for x in (k, v))
    return SplitAttention.apply(q, k, v, group, style)
