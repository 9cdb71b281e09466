"""Collectives with gradients on plain tensors: what the ranks of a real run put between their matmuls.

Rows come first in every tensor (sequence, batch, width), so that gathers and scatters over the sequence need no copies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

# Renamed in torch 2.13.
_gather_tensor: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_tensor: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Group:
    """A process group of a dimension, or none where this rank is alone in it."""

    def __init__(self, ranks: tuple[int, ...], rank: int, handle: Any) -> None:
        self.ranks, self.handle = ranks, handle
        self.size, self.rank = len(ranks), ranks.index(rank)


def all_reduce(x: Any, group: Group, op: Any = dist.ReduceOp.SUM) -> Any:
    """The reduction of `x` over the group; in place."""
    if group.size > 1:
        dist.all_reduce(x, op=op, group=group.handle)
    return x


def gather_rows(x: Any, group: Group) -> Any:
    """Rows [n/g, ...] of all ranks, one after the other: [n, ...]."""
    if group.size == 1:
        return x
    out = x.new_empty(x.shape[0] * group.size, *x.shape[1:])
    _gather_tensor(out, x.contiguous(), group=group.handle)
    return out


def scatter_rows(x: Any, group: Group) -> Any:
    """This rank's rows [n/g, ...] of the sum of all ranks' `x` [n, ...]."""
    if group.size == 1:
        return x
    out = x.new_empty(x.shape[0] // group.size, *x.shape[1:])
    _scatter_tensor(out, x.contiguous(), group=group.handle)
    return out


def exchange_rows(x: Any, group: Group) -> Any:
    """The i-th part of the rows to rank i of the group, equal parts."""
    if group.size == 1:
        return x
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_to_all_single(out, x.contiguous(), group=group.handle)
    return out


Call = Callable[[Any, Group], Any]


def _differentiable(there: Call, back: Call, what: str) -> Any:
    """An autograd function of (x, group) that is `there`, and `back` for its gradient."""

    def forward(ctx: Any, x: Any, group: Group) -> Any:
        ctx.group = group
        return there(x, group)

    def backward(ctx: Any, *grads: Any) -> Any:
        return back(grads[0], ctx.group), None

    fields = {"forward": staticmethod(forward), "backward": staticmethod(backward), "__doc__": what}
    return type(what.split()[0], (torch.autograd.Function,), fields)


def _same(x: Any, group: Group) -> Any:
    del group
    return x.view_as(x)


def _sum(x: Any, group: Group) -> Any:
    return all_reduce(x.contiguous(), group)


Copy = _differentiable(_same, _sum, "Copy whose gradient is summed: before column-parallel weights.")
Reduce = _differentiable(_sum, _same, "Reduce with a sum whose gradient passes: after row-parallel weights.")
Gather = _differentiable(gather_rows, scatter_rows, "Gather rows, sum and scatter gradients: before column-parallel weights.")
Scatter = _differentiable(scatter_rows, gather_rows, "Scatter summed rows, gather gradients: after row-parallel weights.")
Exchange = _differentiable(exchange_rows, exchange_rows, "Exchange rows, all to all; its own gradient.")


class SplitVocabularyLoss(torch.autograd.Function):
    """Mean cross-entropy of logits [rows, v/g] whose vocabulary is split over the group; three all-reduces of a value a row."""

    @staticmethod
    def forward(ctx: Any, logits: Any, target: Any, group: Group) -> Any:
        top = all_reduce(logits.max(dim=-1).values, group, dist.ReduceOp.MAX)
        shifted = logits - top[:, None]
        local = target - group.rank * logits.shape[-1]
        mine = (local >= 0) & (local < logits.shape[-1])
        local = local.clamp(0, logits.shape[-1] - 1)
        wanted = all_reduce(shifted.gather(-1, local[:, None])[:, 0] * mine, group)
        shifted = shifted.exp_()
        total = all_reduce(shifted.sum(dim=-1), group)
        ctx.save_for_backward(shifted.div_(total[:, None]), local, mine)
        return (total.log() - wanted).mean()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        share, local, mine = ctx.saved_tensors
        share = share.clone()
        share.scatter_add_(-1, local[:, None], -mine[:, None].to(share.dtype))
        return share.mul_(grads[0] / share.shape[0]), None, None
