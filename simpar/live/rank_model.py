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
from torch.nn import functional

from simpar.live.rank_context import context_attention
from simpar.live.rank_kernels import attention, is_fake, norm

Plan = dict[str, Any]


class Norm(nn.Module):
    """RMSNorm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Any) -> Any:
        return norm(x, self.weight)


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
        self.q_norm: Any = Norm(self.h) if model["qk_norm"] else None
        self.k_norm: Any = Norm(self.h) if model["qk_norm"] else None
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
            self.q_down, self.q_norm = nn.Linear(d, self.q_rank, bias=False), Norm(self.q_rank)
        self.q_up = nn.Linear(self.q_rank or d, n * h, bias=False)
        self.kv_down, self.kv_norm = nn.Linear(d, self.latent + self.rope, bias=False), Norm(self.latent)
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


class FeedForward(nn.Module):
    """SwiGLU, or two matrices with a GELU."""

    def __init__(self, plan: Plan, width: int) -> None:
        super().__init__()
        d, self.gated = plan["model"]["hidden_size"], plan["model"]["gated_mlp"]
        self.w1 = nn.Linear(d, width, bias=False)
        if self.gated:
            self.w3 = nn.Linear(d, width, bias=False)
        self.w2 = nn.Linear(width, d, bias=False)

    def forward(self, x: Any) -> Any:
        if self.gated:
            return self.w2(functional.silu(self.w1(x)) * self.w3(x))
        return self.w2(functional.gelu(self.w1(x)))


class _Exchange(torch.autograd.Function):
    """All-to-all of as many rows to every rank; its gradient goes back the same way."""

    @staticmethod
    def forward(ctx: Any, x: Any, group: Any) -> Any:
        ctx.group = group
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        out = torch.empty_like(gradient)
        dist.all_to_all_single(out, gradient.contiguous(), group=ctx.group)
        return out, None


class GroupedExperts(nn.Module):
    """This rank's experts, each on as many rows: x [rows, d] sorted by expert."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        moe, d = plan["model"]["moe"], plan["model"]["hidden_size"]
        own, f = moe["num_experts"] // plan["world"]["ep"], moe["moe_intermediate_size"]
        self.w1, self.w3 = (nn.Parameter(torch.empty(own, d, f)) for _ in range(2))
        self.w2 = nn.Parameter(torch.empty(own, f, d))

    def forward(self, x: Any) -> Any:
        if not is_fake(x):
            groups = self.w1.shape[0]
            ends = torch.arange(1, groups + 1, device=x.device, dtype=torch.int32) * (x.shape[0] // groups)
            hidden = functional.silu(torch._grouped_mm(x, self.w1, offs=ends)) * torch._grouped_mm(x, self.w3, offs=ends)
            return torch._grouped_mm(hidden, self.w2, offs=ends)
        # Equal counts make the grouped product a batched one, whose FLOPs torch counts.
        rows = x.unflatten(0, (self.w1.shape[0], -1))
        hidden = functional.silu(torch.bmm(rows, self.w1)) * torch.bmm(rows, self.w3)
        return torch.bmm(hidden, self.w2).flatten(0, 1)


class Experts(nn.Module):
    """Router, dispatch, experts, combine, shared experts. Every expert gets as many tokens, whatever the scores say."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        model, moe = plan["model"], plan["model"]["moe"]
        self.count, self.chosen = moe["num_experts"], moe["num_experts_per_tok"]
        self.ranks, self.group = plan["world"]["ep"], plan["groups"].get("ep")
        self.router = nn.Linear(model["hidden_size"], self.count, bias=bool(moe["router_bias"]))
        self.experts = GroupedExperts(plan)
        shared = moe["shared_expert_intermediate_size"]
        self.shared = FeedForward(plan, shared) if shared else None

    def forward(self, x: Any) -> Any:
        flat = x.flatten(0, 1)
        tokens = flat.shape[0]
        share = torch.sigmoid(self.router(flat).float())
        expert = (torch.arange(tokens * self.chosen, device=x.device) % self.count).view(tokens, self.chosen)
        weight = share.gather(1, expert).flatten()
        order = expert.flatten().argsort(stable=True)
        rows = flat[order // self.chosen]
        out = self._back(self.experts(self._there(rows)))
        # In fp32, as torchtitan weighs them.
        out = (out.float() * weight[order][:, None]).to(out.dtype)
        found = torch.zeros_like(flat).scatter_add(0, (order // self.chosen)[:, None].expand_as(out), out)
        if self.shared is not None:
            found = found + self.shared(flat)
        return found.view_as(x)

    def _there(self, rows: Any) -> Any:
        """To the ranks of the experts, and there by expert."""
        if self.group is None:
            return rows
        rows = _Exchange.apply(rows, self.group)
        return rows.unflatten(0, (self.ranks, self.count // self.ranks, -1)).transpose(0, 1).reshape(rows.shape)

    def _back(self, rows: Any) -> Any:
        if self.group is None:
            return rows
        rows = rows.unflatten(0, (self.count // self.ranks, self.ranks, -1)).transpose(0, 1).reshape(rows.shape)
        return _Exchange.apply(rows, self.group)


class Layer(nn.Module):
    """Attention, then feed-forward or experts, each behind a norm and with a residual."""

    def __init__(self, plan: Plan, *, moe: bool) -> None:
        super().__init__()
        model = plan["model"]
        self.attention_norm, self.ffn_norm = Norm(model["hidden_size"]), Norm(model["hidden_size"])
        self.attention = LatentAttention(plan) if model["mla"] else Attention(plan)
        self.feed_forward: nn.Module = Experts(plan) if moe else FeedForward(plan, model["intermediate_size"])

    def forward(self, x: Any, turns: Any) -> Any:
        x = x + self.attention(self.attention_norm(x), turns)
        return x + self.feed_forward(self.ffn_norm(x))


class Stage(nn.Module):
    """Embedding, layers, norm, output: those of one virtual stage."""

    def __init__(self, plan: Plan, stage: dict[str, Any]) -> None:
        super().__init__()
        model = plan["model"]
        d = model["hidden_size"]
        self.embedding = nn.Embedding(plan["vocab"], d) if stage["embedding"] else None
        self.layers = nn.ModuleDict({str(i): Layer(plan, moe=moe) for i, moe in enumerate(stage["moe"])})
        self.norm = Norm(d) if stage["head"] else None
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
