"""What the torch transformers of real runs share: of a rank (rank_model), a layout (cluster_model), a single block (gpu_blocks).

Norm, residual layer, SwiGLU of single products, experts with even routing. Parallelism, packed products and attention are each
model's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from simpar.live.kernels import rms_norm
from simpar.live.rank_kernels import is_fake


def linear(d: int, n: int) -> nn.Module:
    """A linear layer without bias."""
    return nn.Linear(d, n, bias=False)


class Norm(nn.Module):
    """RMSNorm.

    Args:
        kernel: what computes it from (x, weight).
    """

    def __init__(self, width: int, kernel: Callable[[Any, Any], Any] = rms_norm) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.kernel = kernel

    def forward(self, x: Any) -> Any:
        return self.kernel(x, self.weight.to(x.dtype))


class FeedForward(nn.Module):
    """SwiGLU by three products, or two matrices with a GELU.

    Args:
        make: builds a linear layer of (inputs, outputs).
    """

    def __init__(self, d: int, width: int, *, gated: bool = True, make: Callable[[int, int], nn.Module] = linear) -> None:
        super().__init__()
        self.w1 = make(d, width)
        if gated:
            self.w3 = make(d, width)
        self.w2, self.gated = make(width, d), gated

    def forward(self, x: Any) -> Any:
        if self.gated:
            return self.w2(functional.silu(self.w1(x)) * self.w3(x))
        return self.w2(functional.gelu(self.w1(x)))


class GroupedExperts(nn.Module):
    """Experts, each on as many rows: x [rows, d] sorted by expert."""

    def __init__(self, count: int, d: int, width: int) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Parameter(torch.empty(count, d, width)) for _ in range(2))
        self.w2 = nn.Parameter(torch.empty(count, width, d))

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


class Routed(nn.Module):
    """Router, experts, combine: every expert gets as many tokens, whatever the scores say.

    Args:
        experts: on rows sorted by expert. count: of them on all ranks. chosen: by each token.
        scores: of the router's logits in fp32.
    """

    def __init__(
        self, router: nn.Module, experts: nn.Module, count: int, chosen: int, scores: Callable[[Any], Any] = torch.sigmoid
    ) -> None:
        super().__init__()
        self.router, self.experts = router, experts
        self.count, self.chosen, self.scores = count, chosen, scores

    def forward(self, x: Any) -> Any:
        flat = x.flatten(0, 1)
        tokens = flat.shape[0]
        share = self.scores(self.router(flat).float())
        expert = (torch.arange(tokens * self.chosen, device=x.device) % self.count).view(tokens, self.chosen)
        weight = share.gather(1, expert).flatten()
        order = expert.flatten().argsort(stable=True)
        rows = flat[order // self.chosen]
        out = self.back(self.experts(self.there(rows)))
        # In fp32, as torchtitan weighs them.
        out = (out.float() * weight[order][:, None]).to(out.dtype)
        found = torch.zeros_like(flat).scatter_add(0, (order // self.chosen)[:, None].expand_as(out), out)
        return self.beside(found, flat).view_as(x)

    def there(self, rows: Any) -> Any:
        """Rows to where their experts are."""
        return rows

    def back(self, rows: Any) -> Any:
        """And back."""
        return rows

    def beside(self, found: Any, flat: Any) -> Any:
        """What is added to the experts' result for the tokens `flat`."""
        del flat
        return found


class Layer(nn.Module):
    """Attention, then feed-forward or experts, each behind a norm and with a residual."""

    def __init__(
        self, width: int, attention: nn.Module, feed_forward: nn.Module, kernel: Callable[[Any, Any], Any] = rms_norm
    ) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = Norm(width, kernel), Norm(width, kernel)
        self.attention, self.feed_forward = attention, feed_forward

    def forward(self, x: Any, *positions: Any) -> Any:
        x = x + self.attention(self.attention_norm(x), *positions)
        return x + self.feed_forward(self.ffn_norm(x))
