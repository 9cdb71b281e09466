"""One pipeline stage of a transformer in plain torch, laid out like torchtitan's: dense or expert layers, grouped or latent
attention.

Sizes come from a plan (rank_plan.py) as a dict. Activations are [batch, sequence, width]. Parallelism over tensor ranks is put on
from outside (rank_parallel.py); exchanges of experts and of the sequence are here, as they are torch functions.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from simpar.live.autograd_collectives import Exchange, Group
from simpar.live.rank_context import context_attention
from simpar.live.rank_kernels import attention, norm
from simpar.live.torch_parts import FeedForward, GroupedExperts, Layer, Norm, Routed

Plan = dict[str, Any]


def rotation(tokens: int, width: int, device: Any) -> Any:
    """Complex rotations [tokens, width / 2]."""
    rate = 1.0 / (500000.0 ** (torch.arange(0, width, 2, device=device, dtype=torch.float32) / width))
    angle = torch.outer(torch.arange(tokens, device=device, dtype=torch.float32), rate)
    return torch.polar(torch.ones_like(angle), angle)


def rotate(x: Any, turns: Any) -> Any:
    """Rotary embedding of x [b, s, heads, h] in fp32."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns[None, : x.shape[1], None, :]).flatten(3).type_as(x)


class Attention(nn.Module):
    """Grouped-query attention; `core` is the kernel, put under recomputation from outside where asked for."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        model = plan["model"]
        d, self.h = model["hidden_size"], model["head_dim"]
        wide, narrow = model["num_attention_heads"] * self.h, model["num_key_value_heads"] * self.h
        bias = model["attention_bias"]
        self.wq = nn.Linear(d, wide, bias=bias)
        self.wk, self.wv = (nn.Linear(d, narrow, bias=bias) for _ in range(2))
        self.wo = nn.Linear(wide, d, bias=False)
        self.q_norm: Any = Norm(self.h, norm) if model["qk_norm"] else None
        self.k_norm: Any = Norm(self.h, norm) if model["qk_norm"] else None
        self.core: Any = Core(plan)

    def forward(self, x: Any, turns: Any) -> Any:
        q, k, v = (w(x).unflatten(-1, (-1, self.h)) for w in (self.wq, self.wk, self.wv))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, turns), rotate(k, turns)
        return self.wo(self.core(q, k, v))


class Core(nn.Module):
    """Attention itself: [b, s, heads, h] to [b, s, heads * j], over the context-parallel group where there is one."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.style, self.group = plan["cp_style"], plan["groups"].get("cp")

    def forward(self, q: Any, k: Any, v: Any) -> Any:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = attention(q, k, v) if self.group is None else context_attention(q, k, v, self.group, self.style)
        return out.transpose(1, 2).flatten(2)


class LatentAttention(nn.Module):
    """Multi-head latent attention (DeepSeek-V2/V3)."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        model, mla = plan["model"], plan["model"]["mla"]
        d, n = model["hidden_size"], model["num_attention_heads"]
        self.n, self.nope, self.rope = n, mla["qk_nope_head_dim"], mla["qk_rope_head_dim"]
        self.wide, self.latent, self.q_rank = mla["v_head_dim"], mla["kv_lora_rank"], mla["q_lora_rank"]
        h = self.nope + self.rope
        if self.q_rank:
            self.q_down, self.q_norm = nn.Linear(d, self.q_rank, bias=False), Norm(self.q_rank, norm)
        self.q_up = nn.Linear(self.q_rank or d, n * h, bias=False)
        self.kv_down, self.kv_norm = nn.Linear(d, self.latent + self.rope, bias=False), Norm(self.latent, norm)
        self.kv_up = nn.Linear(self.latent, n * (self.nope + self.wide), bias=False)
        self.wo = nn.Linear(n * self.wide, d, bias=False)
        self.core: Any = Core(plan)

    def forward(self, x: Any, turns: Any) -> Any:
        q = self.q_up(self.q_norm(self.q_down(x)) if self.q_rank else x).unflatten(-1, (self.n, -1))
        plain, turned = q.split([self.nope, self.rope], -1)
        q = torch.cat([plain, rotate(turned, turns)], -1)
        latent, shared = self.kv_down(x).split([self.latent, self.rope], -1)
        shared = rotate(shared.unsqueeze(2), turns)
        plain, v = self.kv_up(self.kv_norm(latent)).unflatten(-1, (self.n, -1)).split([self.nope, self.wide], -1)
        k = torch.cat([plain, shared.expand(-1, -1, self.n, -1)], -1)
        return self.wo(self.core(q, k, v))


def feed_forward(plan: Plan, width: int) -> FeedForward:
    """SwiGLU, or two matrices with a GELU."""
    return FeedForward(plan["model"]["hidden_size"], width, gated=plan["model"]["gated_mlp"])


class Experts(Routed):
    """This rank's experts behind an exchange of rows, and shared experts beside them."""

    def __init__(self, plan: Plan) -> None:
        model, moe, ranks = plan["model"], plan["model"]["moe"], plan["world"]["ep"]
        d, count = model["hidden_size"], moe["num_experts"]
        experts = GroupedExperts(count // ranks, d, moe["moe_intermediate_size"])
        router = nn.Linear(d, count, bias=bool(moe["router_bias"]))
        super().__init__(router, experts, count, moe["num_experts_per_tok"])
        self.ranks = ranks
        handle = plan["groups"].get("ep")
        self.group = None if handle is None else Group(tuple(dist.get_process_group_ranks(handle)), dist.get_rank(), handle)
        shared = moe["shared_expert_intermediate_size"]
        self.shared = feed_forward(plan, shared) if shared else None

    def there(self, rows: Any) -> Any:
        """To the ranks of the experts, and there by expert."""
        if self.group is None:
            return rows
        rows = Exchange.apply(rows, self.group)
        return rows.unflatten(0, (self.ranks, self.count // self.ranks, -1)).transpose(0, 1).reshape(rows.shape)

    def back(self, rows: Any) -> Any:
        """And back to the ranks of the tokens."""
        if self.group is None:
            return rows
        rows = rows.unflatten(0, (self.count // self.ranks, self.ranks, -1)).transpose(0, 1).reshape(rows.shape)
        return Exchange.apply(rows, self.group)

    def beside(self, found: Any, flat: Any) -> Any:
        """The shared experts' result added."""
        return found if self.shared is None else found + self.shared(flat)


def layer_of(plan: Plan, *, moe: bool) -> Layer:
    """A layer of the plan's model."""
    model = plan["model"]
    attention = LatentAttention(plan) if model["mla"] else Attention(plan)
    width = model["intermediate_size"]
    return Layer(model["hidden_size"], attention, Experts(plan) if moe else feed_forward(plan, width), norm)


class Stage(nn.Module):
    """Embedding, layers, norm, output: those of one virtual stage."""

    def __init__(self, plan: Plan, stage: dict[str, Any]) -> None:
        super().__init__()
        model = plan["model"]
        d = model["hidden_size"]
        self.embedding = nn.Embedding(plan["vocab"], d) if stage["embedding"] else None
        self.layers = nn.ModuleDict({str(i): layer_of(plan, moe=moe) for i, moe in enumerate(stage["moe"])})
        self.norm = Norm(d, norm) if stage["head"] else None
        self.output = nn.Linear(d, plan["vocab"], bias=False) if stage["head"] else None
        mla = model["mla"]
        self.width = mla["qk_rope_head_dim"] if mla else model["head_dim"]
        self.tokens = plan["sequence_length"] // plan["world"]["cp"]
        self.register_buffer("turns", torch.empty(self.tokens, self.width // 2, dtype=torch.complex64), persistent=False)

    def forward(self, x: Any) -> Any:
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers.values():
            x = layer(x, self.turns)
        return x if self.norm is None or self.output is None else self.output(self.norm(x))
