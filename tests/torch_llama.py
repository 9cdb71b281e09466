"""A Llama-style transformer in plain torch, as torchtitan lays it out, and what counts its memory, FLOPs and collectives.

CPU kernels save other tensors than those of GPUs: RMSNorm is composite there and attention has no flash kernel for grouped heads.
Both are stubs that save what the fused GPU kernels save; everything else is torch's own. Values do not matter, shapes do.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from simpar.live.rank_kernels import FusedNorm


@dataclass(frozen=True)
class Shape:
    """Sizes of the model."""

    hidden: int = 256
    layers: int = 4
    heads: int = 8
    kv_heads: int = 4
    ffn: int = 512
    vocab: int = 1024

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.hidden // self.heads

    def table(self) -> dict[str, Any]:
        """The same as a model of a scenario."""
        return {
            "hidden_size": self.hidden, "intermediate_size": self.ffn, "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads, "head_dim": self.head_dim,
            "vocab_size": self.vocab,
        }  # fmt: skip


class FlashAttention(torch.autograd.Function):
    """Saves q, k, v, its output and the log-sum-exp per head and row."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any) -> Any:
        out = torch.zeros_like(q)
        ctx.save_for_backward(q, k, v, out, torch.empty(q.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        q, k, v, _, _ = ctx.saved_tensors
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)


class Norm(nn.Module):
    """RMSNorm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Any) -> Any:
        return FusedNorm.apply(x, self.weight)


class Attention(nn.Module):
    """Grouped-query attention; `kernel` is the stub above or torch's own."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        wide, narrow = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.wq = nn.Linear(shape.hidden, wide, bias=False)
        self.wk, self.wv = (nn.Linear(shape.hidden, narrow, bias=False) for _ in range(2))
        self.wo = nn.Linear(wide, shape.hidden, bias=False)
        self.kernel: Any = FlashAttention.apply

    def forward(self, x: Any, turns: Any) -> Any:
        del turns  # rotations keep nothing
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))
        return self.wo(self.kernel(q, k, v).flatten(-2))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(shape.hidden, shape.ffn, bias=False) for _ in range(2))
        self.w2 = nn.Linear(shape.ffn, shape.hidden, bias=False)

    def forward(self, x: Any) -> Any:
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))


class Layer(nn.Module):
    """Attention, then feed-forward, each behind a norm and with a residual."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = Norm(shape.hidden), Norm(shape.hidden)
        self.attention, self.feed_forward = Attention(shape), FeedForward(shape)

    def forward(self, x: Any) -> Any:
        x = x + self.attention(self.attention_norm(x), None)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    """Embedding, layers, norm, output; a pipeline stage has some of them."""

    def __init__(self, shape: Shape, *, first: bool = True, last: bool = True, layers: int | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocab, shape.hidden) if first else None
        count = shape.layers if layers is None else layers
        self.layers = nn.ModuleDict({str(i): Layer(shape) for i in range(count)})
        self.norm = Norm(shape.hidden) if last else None
        self.output = nn.Linear(shape.hidden, shape.vocab, bias=False) if last else None

    def forward(self, x: Any) -> Any:
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers.values():
            x = layer(x)
        return x if self.norm is None or self.output is None else self.output(self.norm(x))


def build(shape: Shape, dtype: torch.dtype = torch.bfloat16, **stage: Any) -> Llama:
    """The model on the CPU."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return Llama(shape, **stage)
    finally:
        torch.set_default_dtype(before)


def local_elements(module: nn.Module) -> int:
    """Elements of the parameters on this rank."""
    return sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in module.parameters())


@dataclass
class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that ops made in this context and that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(t is DTensor for t in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor):
                self._see(leaf.untyped_storage())
        return result

    def ignore(self, *tensors: Any) -> None:
        """Leave these out: parameters and inputs that an op returned a view of."""
        for tensor in tensors:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            self._sizes[local.untyped_storage()._cdata] = 0

    def _see(self, storage: Any) -> None:
        key = storage._cdata
        if key in self._sizes:
            return
        self._sizes[key] = storage.nbytes()
        weakref.finalize(storage, self._sizes.pop, key, None)

    @property
    def bytes(self) -> int:
        """Alive now."""
        return sum(self._sizes.values())


@dataclass
class Collectives(TorchDispatchMode):
    """(name, bytes of the whole tensor) of every collective on the wire."""

    found: list[tuple[str, int]] = field(default_factory=list)

    def __init__(self) -> None:
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(t is DTensor for t in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        name = func._overloadpacket._qualified_op_name
        if name.startswith(("_c10d_functional::", "c10d::")) and "wait" not in name:
            tensors = [t for t in tree_leaves((args, result)) if isinstance(t, torch.Tensor)]
            self.found.append((_plain(name.split("::")[1]), max((t.numel() * t.element_size() for t in tensors), default=0)))
        return result

    def total(self, name: str) -> int:
        """Bytes of all collectives of one kind."""
        return sum(amount for kind, amount in self.found if kind == name)

    def count(self, name: str) -> int:
        """How many of one kind."""
        return sum(kind == name for kind, _ in self.found)


def _plain(name: str) -> str:
    for kind in ("reduce_scatter", "all_to_all", "all_reduce"):
        if kind in name or kind.replace("_", "") in name:
            return kind
    return "all_gather" if "all_gather" in name or "allgather" in name else name
