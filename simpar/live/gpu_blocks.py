"""Single transformer blocks in plain torch for `gpu_probes`: dense, experts and linear attention; eager, compiled and in fp8."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional

from simpar.live.block_sizes import BLOCKS, CHUNK
from simpar.live.device import Device
from simpar.live.kernels import Scaled
from simpar.live.rank_meter import Meter
from simpar.live.store import Record
from simpar.live.torch_parts import FeedForward, GroupedExperts, Layer, Routed, linear

_TINY: Final = {"d": 64, "f": 96, "heads": 4, "kv": 2, "s": 32, "b": 1, "experts": 4, "chosen": 2}


class _Linear(nn.Module):
    def __init__(self, d: int, n: int, style: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n, d))
        self.style = style

    def forward(self, x: Any) -> Any:
        if not self.style.startswith("fp8"):
            return functional.linear(x, self.weight)
        rows = x.flatten(0, -2)
        return Scaled.apply(rows, self.weight, self.style == "fp8_row").view(*x.shape[:-1], -1)


class _Attention(nn.Module):
    def __init__(self, size: dict[str, int], style: str) -> None:
        super().__init__()
        self.heads, self.kv, self.h = size["heads"], size["kv"], size["d"] // size["heads"]
        self.linear = bool(size.get("linear"))
        self.q, self.k, self.v = (_Linear(size["d"], n * self.h, style) for n in (self.heads, self.kv, self.kv))
        self.out = _Linear(self.heads * self.h, size["d"], style)

    def forward(self, x: Any) -> Any:
        q, k, v = (w(x).unflatten(-1, (-1, self.h)).transpose(1, 2) for w in (self.q, self.k, self.v))
        if self.linear:
            mixed = _linear_attention(q, k, v)
        else:
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.kv)
        return self.out(mixed.transpose(1, 2).flatten(2))


def _linear_attention(q: Any, k: Any, v: Any) -> Any:
    """Causal linear attention in chunks: scores inside a chunk, a running sum of outer products before it."""
    q, k, v = (t.unflatten(2, (-1, min(CHUNK, t.shape[2]))) for t in (q.softmax(-1), k.softmax(-1), v))
    inside = (q @ k.transpose(-1, -2)).tril() @ v
    states = (k.transpose(-1, -2) @ v).cumsum(dim=2)
    before = torch.cat([torch.zeros_like(states[:, :, :1]), states[:, :, :-1]], dim=2)
    return (inside + q @ before).flatten(2, 3)


def block_of(size: dict[str, int], style: str) -> Layer:
    """A residual layer with attention and feed-forward or experts; the experts' products are in bf16 whatever the style."""
    d = size["d"]
    if "experts" not in size:
        return Layer(d, _Attention(size, style), FeedForward(d, size["f"], make=lambda i, o: _Linear(i, o, style)))
    experts = GroupedExperts(size["experts"], d, size["f"])
    routed = Routed(linear(d, size["experts"]), experts, size["experts"], size["chosen"], lambda x: x.softmax(-1))
    return Layer(d, _Attention(size, style), routed)


def block_call(name: str, style: str, device: Device, *, backward: bool, small: bool) -> tuple[Callable[[], object], Record]:
    """The forward of a block, or forward and backward, on random data in bf16; and what it is, for its record."""
    kind, size = BLOCKS[name], dict(BLOCKS[name])
    if small:
        size = {key: _TINY.get(key, value) for key, value in kind.items()}
        size["kv"] = size["heads"] if kind["kv"] == kind["heads"] else size["kv"]
    block, x = _made(size, style, device.tensors)
    # Products in fp8 without fusing their casts are not what anyone trains with.
    run = torch.compile(block) if style != "eager" and device.cuda else block
    gradient = torch.randn_like(x)

    def step() -> None:
        run(x).backward(gradient)
        block.zero_grad(set_to_none=True)
        x.grad = None

    def forward() -> None:
        with torch.no_grad():
            run(x)

    about = {"block": name, "style": style, "sizes": size, "backward": backward}
    return (step if backward else forward), about | {"products": products_of_block(name, style, backward=backward)}


def _made(size: dict[str, int], style: str, device: str) -> tuple[Any, Any]:
    """A block in bf16 and a random input."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        return _random(size, style, device)
    finally:
        torch.set_default_dtype(usual)


def _random(size: dict[str, int], style: str, device: str) -> tuple[Any, Any]:
    with torch.device(device):
        block = block_of(size, style)
        for parameter in block.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
        return block, torch.randn(size["b"], size["s"], size["d"], requires_grad=True)


def products_of_block(name: str, style: str, *, backward: bool) -> list[list[Any]]:
    """Products and attention kernels of a block at its full size, on tensors without storage: [kind, sizes, calls], as
    `rank_meter.Meter` counts them. A compiled block calls the same ones."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    meter = Meter()
    with FakeTensorMode():
        block, x = _made(BLOCKS[name], style, "cpu")
        with meter, nullcontext() if backward else torch.no_grad():
            out = block(x)
            if backward:
                out.backward(torch.empty_like(out))
    return sorted(([*key, calls] for key, calls in meter.products.items()), key=repr)
