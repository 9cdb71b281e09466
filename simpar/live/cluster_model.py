"""The models of a real run: a Llama-style transformer (dense or with experts) and a deep MLP, split as the layout says.

Weights are drawn for the whole model, by name and on the device, one tensor at a time, and every rank keeps its part: all layouts
train the same model, and their losses agree. Weights are fp32; in bf16 and fp8 they are cast where they are used (fully_shard
casts what it gathers). Activations are [sequence, batch, width]; every linear layer that simpar prices as one product is one here.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from simpar.live.autograd_collectives import Copy, Exchange, Gather, Group, Reduce, Scatter, SplitVocabularyLoss
from simpar.live.cluster_attention import attention
from simpar.live.kernels import Scaled
from simpar.live.torch_parts import Layer, Norm

Weights = tuple[int, ...]


@dataclass(frozen=True)
class Groups:
    """The groups of this rank."""

    tp: Group
    cp: Group
    ep: Group
    sequence_parallel: bool
    cp_style: str
    precision: str = "fp32"
    shard: Callable[[Any], Any] = lambda module: module
    """Applied to the embedding, each layer and the head as soon as they are made: full sharding keeps the model's size away."""

    @property
    def dtype(self) -> Any:
        """Of activations."""
        return torch.float32 if self.precision == "fp32" else torch.bfloat16


def linear(x: Any, weight: Any, precision: str, bias: Any = None) -> Any:
    """x times the weight, in the precision of the run; fp8 with one scale a tensor."""
    if precision != "fp8" or bias is not None:
        return functional.linear(x, weight.to(x.dtype), bias if bias is None else bias.to(x.dtype))
    return Scaled.apply(x.flatten(0, -2), weight.to(x.dtype), False).view(*x.shape[:-1], -1)


def drawn(name: str, shape: Weights, scale: float = 0.02) -> Any:
    """Weights of the whole model [shape], the same on every rank and run on devices of one kind."""
    device = torch.get_default_device()
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=generator, device=device) * scale


def rows_of(whole: Any, blocks: Sequence[int], group: Group) -> Any:
    """This rank's rows of each of the stacked `blocks` of rows."""
    parts = [part.chunk(group.size, dim=0)[group.rank] for part in whole.split(list(blocks), dim=0)]
    return torch.cat(parts).contiguous().clone()


def columns_of(whole: Any, group: Group) -> Any:
    """This rank's columns."""
    return whole.chunk(group.size, dim=1)[group.rank].contiguous().clone()


class Entry(nn.Module):
    """What stands before column-parallel weights."""

    pair: Any = (Gather, Copy)
    """With the sequence split over tensor ranks, and without."""

    def __init__(self, groups: Groups) -> None:
        super().__init__()
        self.groups = groups

    def forward(self, x: Any) -> Any:
        if self.groups.tp.size == 1:
            return x
        return self.pair[0 if self.groups.sequence_parallel else 1].apply(x, self.groups.tp)


class Exit(Entry):
    """What stands after row-parallel weights."""

    pair = (Scatter, Reduce)


def rotate(x: Any, angles: tuple[Any, Any]) -> Any:
    """Rotary embedding of [s, b, heads, h]; cosines and sines [s, 1, 1, h]."""
    cosine, sine = angles
    left, right = x.chunk(2, dim=-1)
    return x * cosine.to(x.dtype) + torch.cat([-right, left], dim=-1) * sine.to(x.dtype)


def angles_of(where: Any, head_dim: int) -> tuple[Any, Any]:
    """Cosines and sines of positions `where` [s]."""
    rate = 1.0 / 10000.0 ** (torch.arange(0, head_dim, 2).float() / head_dim)
    angle = (where.float()[:, None].to(rate.device) * rate).repeat(1, 2)[:, None, None, :]
    return angle.cos(), angle.sin()


class Attention(nn.Module):
    """Grouped-query attention with packed q, k, v."""

    def __init__(self, name: str, shape: dict[str, Any], groups: Groups) -> None:
        super().__init__()
        d, h = shape["hidden_size"], shape["head_dim"]
        n, k = shape["num_attention_heads"], shape["num_key_value_heads"]
        self.h, self.n, self.k, self.groups = h, n // groups.tp.size, k // groups.tp.size, groups
        self.qkv = nn.Parameter(rows_of(drawn(f"{name}.qkv", ((n + 2 * k) * h, d)), [n * h, k * h, k * h], groups.tp))
        self.proj = nn.Parameter(columns_of(drawn(f"{name}.proj", (d, n * h)), groups.tp))
        self.entry, self.exit = Entry(groups), Exit(groups)

    def forward(self, x: Any, angles: tuple[Any, Any]) -> Any:
        packed = linear(self.entry(x), self.qkv, self.groups.precision).unflatten(-1, (-1, self.h))
        q, k, v = packed.split([self.n, self.k, self.k], dim=2)
        # Values are copied out: as a view they would keep the whole packed product until the backward.
        q, k, v = rotate(q, angles), rotate(k, angles), v.contiguous()
        q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))
        out = attention(q, k, v, self.groups.cp, self.groups.cp_style)
        return self.exit(linear(out.permute(2, 0, 1, 3).flatten(2), self.proj, self.groups.precision))


class FeedForward(nn.Module):
    """SwiGLU with packed gate and up weights."""

    def __init__(self, name: str, shape: dict[str, Any], groups: Groups) -> None:
        super().__init__()
        d, f = shape["hidden_size"], shape["intermediate_size"]
        self.fc1 = nn.Parameter(rows_of(drawn(f"{name}.fc1", (2 * f, d)), [f, f], groups.tp))
        self.fc2 = nn.Parameter(columns_of(drawn(f"{name}.fc2", (d, f)), groups.tp))
        self.entry, self.exit, self.precision = Entry(groups), Exit(groups), groups.precision

    def forward(self, x: Any) -> Any:
        gate, up = linear(self.entry(x), self.fc1, self.precision).chunk(2, dim=-1)
        return self.exit(linear(functional.silu(gate) * up, self.fc2, self.precision))


class Experts(nn.Module):
    """Top-k experts over the expert-parallel group. Token i goes to experts i k .. i k + k - 1 (modulo), so every rank has as
    many rows; the router's product and its probabilities are real and weigh the results."""

    def __init__(self, name: str, shape: dict[str, Any], groups: Groups) -> None:
        super().__init__()
        moe, d, ep = shape["moe"], shape["hidden_size"], groups.ep
        self.count, self.chosen, self.ep = moe["num_experts"], moe["num_experts_per_tok"], ep
        f, own = moe["moe_intermediate_size"], moe["num_experts"] // ep.size
        self.router = nn.Parameter(drawn(f"{name}.router", (self.count, d)))
        mine = range(ep.rank * own, (ep.rank + 1) * own)
        self.fc1 = nn.Parameter(torch.stack([drawn(f"{name}.{e}.fc1", (2 * f, d)) for e in mine]))
        self.fc2 = nn.Parameter(torch.stack([drawn(f"{name}.{e}.fc2", (d, f)) for e in mine]))

    def forward(self, x: Any) -> Any:
        shape, x = x.shape, x.flatten(0, 1)
        tokens = x.shape[0]
        expert = torch.arange(tokens * self.chosen, device=x.device) % self.count
        share = functional.linear(x, self.router.to(x.dtype)).softmax(dim=-1).gather(-1, expert.view(tokens, -1))
        order = expert.argsort(stable=True)
        rows = x.index_select(0, order // self.chosen)
        rows = Exchange.apply(rows, self.ep) if self.ep.size > 1 else rows
        # [from rank, own expert, rows, d]: each expert sees the rows of all ranks.
        own = self.fc1.shape[0]
        by_expert = rows.view(self.ep.size, own, -1, x.shape[1]).transpose(0, 1).flatten(1, 2)
        gate, up = torch.bmm(by_expert, self.fc1.to(x.dtype).transpose(1, 2)).chunk(2, dim=-1)
        out = torch.bmm(functional.silu(gate) * up, self.fc2.to(x.dtype).transpose(1, 2))
        out = out.unflatten(1, (self.ep.size, -1)).transpose(0, 1).reshape(-1, x.shape[1])
        out = Exchange.apply(out, self.ep) if self.ep.size > 1 else out
        back = torch.empty_like(order).index_put_((order,), torch.arange(order.numel(), device=x.device))
        picked = out.index_select(0, back).view(tokens, self.chosen, -1)
        return (picked * share[..., None]).sum(dim=1).view(shape)


def layer_of(name: str, shape: dict[str, Any], groups: Groups) -> Layer:
    """A layer with this rank's part of each weight."""
    feed_forward = (Experts if shape.get("moe") else FeedForward)(f"{name}.mlp", shape, groups)
    return Layer(shape["hidden_size"], Attention(f"{name}.attention", shape, groups), feed_forward)


class Embedding(nn.Module):
    """Tokens [b, s] to [s, b, d]; the vocabulary is split over tensor ranks."""

    def __init__(self, shape: dict[str, Any], groups: Groups) -> None:
        super().__init__()
        whole = drawn("embedding", (shape["vocab_size"], shape["hidden_size"]))
        self.weight = nn.Parameter(rows_of(whole, [shape["vocab_size"]], groups.tp))
        self.exit, self.tp, self.dtype = Exit(groups), groups.tp, groups.dtype

    def forward(self, tokens: Any) -> Any:
        tokens = tokens.t()
        if self.tp.size == 1:
            return functional.embedding(tokens, self.weight).to(self.dtype)
        local = tokens - self.tp.rank * self.weight.shape[0]
        outside = (local < 0) | (local >= self.weight.shape[0])
        found = functional.embedding(local.masked_fill(outside, 0), self.weight).to(self.dtype)
        return self.exit(found.masked_fill(outside[..., None], 0.0))


class Head(nn.Module):
    """Final norm and logits [s, b, v / tp]."""

    def __init__(self, shape: dict[str, Any], groups: Groups) -> None:
        super().__init__()
        self.norm, self.entry = Norm(shape["hidden_size"]), Entry(groups)
        self.weight = nn.Parameter(rows_of(drawn("head", (shape["vocab_size"], shape["hidden_size"])), [shape["vocab_size"]],
                                           groups.tp))  # fmt: skip

    def forward(self, x: Any) -> Any:
        x = self.entry(self.norm(x))
        return functional.linear(x, self.weight.to(x.dtype))


class Transformer(nn.Module):
    """Layers first .. first + count - 1; a first stage has the embedding, a last one the head."""

    def __init__(
        self, shape: dict[str, Any], groups: Groups, where: Any, layers: range, *, first: bool = True, last: bool = True
    ) -> None:
        super().__init__()
        self.embedding = groups.shard(Embedding(shape, groups)) if first else None
        self.layers = nn.ModuleList([groups.shard(layer_of(f"layers.{i}", shape, groups)) for i in layers])
        self.head = groups.shard(Head(shape, groups)) if last else None
        cosine, sine = angles_of(where, shape["head_dim"])
        self.register_buffer("cosine", cosine, persistent=False)
        self.register_buffer("sine", sine, persistent=False)

    def forward(self, x: Any) -> Any:
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers:
            x = layer(x, (self.cosine, self.sine))
        return x if self.head is None else self.head(x)


def token_loss(logits: Any, target: Any, groups: Groups) -> Any:
    """Mean cross-entropy of logits [s, b, v / tp] and targets [b, s]."""
    logits, target = logits.flatten(0, 1).float(), target.t().flatten()
    if groups.tp.size == 1:
        return functional.cross_entropy(logits, target)
    return SplitVocabularyLoss.apply(logits, target, groups.tp)


class DenseLayer(nn.Module):
    """One layer of the MLP: even ones split by columns, odd ones by rows; ReLU unless it is the last."""

    def __init__(self, index: int, shape: dict[str, Any], groups: Groups) -> None:
        super().__init__()
        width, self.column, self.last = shape["width"], index % 2 == 0, index == shape["depth"] - 1
        whole = drawn(f"mlp.{index}", (width, width), width**-0.5)
        self.weight = nn.Parameter(rows_of(whole, [width], groups.tp) if self.column else columns_of(whole, groups.tp))
        self.bias = nn.Parameter(torch.zeros(width // (groups.tp.size if self.column else 1))) if shape["bias"] else None
        self.tp, self.entry, self.exit, self.precision = groups.tp, Entry(groups), Exit(groups), groups.precision

    def forward(self, x: Any) -> Any:
        if self.column:
            x = linear(self.entry(x), self.weight, self.precision, self.bias)
        else:
            x = self.exit(linear(x, self.weight, self.precision))
            x = x if self.bias is None else x + self.bias.to(x.dtype)
        return x if self.last else functional.relu(x)


class Mlp(nn.Module):
    """Layers first .. first + count - 1 of a deep MLP; inputs [batch, width]."""

    def __init__(self, shape: dict[str, Any], groups: Groups, layers: range) -> None:
        super().__init__()
        self.embedding = self.head = None
        self.layers = nn.ModuleList([groups.shard(DenseLayer(i, shape, groups)) for i in layers])
        self.dtype = groups.dtype

    def forward(self, x: Any) -> Any:
        x = x.to(self.dtype)
        for layer in self.layers:
            x = layer(x)
        return x
