"""What a chain of elementary torch kernels reads and writes, counted where torch dispatches them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Counter(TorchDispatchMode):  # type: ignore[misc]  # torch has no types for it
    """Sums the bytes of all tensors that ops which launch a kernel take and return; a broadcast dimension is read once.

    `but`: names of ops that do not count.
    """

    def __init__(self, but: frozenset[str] = frozenset()) -> None:
        super().__init__()
        self.moved, self._but = 0, but

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        made = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        views = {x.untyped_storage().data_ptr() for x in given}
        if func._schema.name in self._but:
            return out
        if any(x.untyped_storage().data_ptr() not in views for x in made) or func._schema.name.endswith("_"):
            self.moved += sum(_bytes(x) for x in (*given, *made))
        return out


def _bytes(x: torch.Tensor) -> int:
    count = int(x.element_size())
    for size, stride in zip(x.shape, x.stride(), strict=True):
        count *= size if stride else 1
    return count


def traffic(function: Callable[[torch.Tensor], torch.Tensor], tokens: int, width: int) -> tuple[float, float]:
    """Bytes per element of a [tokens, width] bf16 input: forward, backward."""
    x = torch.randn(tokens, width, dtype=torch.bfloat16, requires_grad=True)
    with _Counter() as forward:
        y = function(x)
    with _Counter() as backward:
        y.backward(torch.ones_like(y))
    return forward.moved / x.numel(), backward.moved / x.numel()
