"""Collectives with gradients on plain tensors: what the ranks of a real run put between their matmuls.

Rows come first in every tensor (sequence, batch, width), so that gathers and scatters over the sequence need no copies.
"""

from __future__ import annotations

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


class Copy(torch.autograd.Function):
    """Identity whose gradient is summed: before column-parallel weights."""

    @staticmethod
    def forward(ctx: Any, x: Any, group: Group) -> Any:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return all_reduce(grads[0].contiguous(), ctx.group), None


class Reduce(torch.autograd.Function):
    """Sum whose gradient passes: after row-parallel weights."""

    @staticmethod
    def forward(ctx: Any, x: Any, group: Group) -> Any:
        return all_reduce(x.contiguous(), group)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


class Gather(torch.autograd.Function):
    """Rows gathered, gradients summed and scattered: sequence parallelism before column-parallel weights."""

    @staticmethod
    def forward(ctx: Any, x: Any, group: Group) -> Any:
        ctx.group = group
        return gather_rows(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return scatter_rows(grads[0], ctx.group), None


class Scatter(torch.autograd.Function):
    """Rows summed and scattered, gradients gathered: sequence parallelism after row-parallel weights."""

    @staticmethod
    def forward(ctx: Any, x: Any, group: Group) -> Any:
        ctx.group = group
        return scatter_rows(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return gather_rows(grads[0], ctx.group), None


class Exchange(torch.autograd.Function):
    """All-to-all of rows; its own gradient."""

    @staticmethod
    def forward(ctx: Any, x: Any, group: Group) -> Any:
        ctx.group = group
        return exchange_rows(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return exchange_rows(grads[0], ctx.group), None


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
