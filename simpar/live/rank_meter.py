"""What a rank's ops allocate, compute and send. FLOPs are torch's own formulas of the ops that run."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, Final

import torch
from torch._guards import active_fake_mode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from simpar.live.alive import Alive

ROUND: Final = 512
"""Of the allocator, bytes."""
_FLASH: Final = "flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention"
_ATTENTION: Final = ("attention", "attention_backward", *_FLASH, *(f"{name}_backward" for name in _FLASH))
"""Ops of attention: of a rank, and of torch without its prefix."""
_CLASSES: Final = (("attention", ("attention",)), ("gemm", ("mm", "linear", "bmm")))


def flops_class(name: str) -> str:
    """gemm or attention."""
    return next((kind for kind, parts in _CLASSES if any(p in name for p in parts)), "other")


class Meter(Alive):
    """Counts while it is entered; memory keeps being followed between entries, in the allocator's units.

    Attributes:
        flops: class -> FLOPs.
        products: (kind, sizes) of products and attention -> calls, keys as in rank_shapes.
        wire: (collective, ranks, element bytes) -> [calls, bytes of the whole tensor].
    """

    def __init__(self) -> None:
        super().__init__(ROUND)
        self.flops: dict[str, int] = defaultdict(int)
        self.products: dict[tuple[Any, ...], int] = defaultdict(int)
        self.wire: dict[tuple[str, int, int], list[int]] = defaultdict(lambda: [0, 0])
        self._mode: Any = None

    def __enter__(self) -> Any:
        self._mode = active_fake_mode()
        return super().__enter__()

    def ran(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """As the base, and the op's FLOPs."""
        if active_fake_mode() is not self._mode:
            return  # DTensor works out global shapes in a fake mode of its own
        super().ran(func, args, kwargs, result)
        name = func._overloadpacket._qualified_op_name
        if (key := _product(name.partition("::")[2], args)) is not None:
            self.products[key] += 1
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.flops[flops_class(name)] += int(formula(*args, **kwargs, out_val=result))

    def called(self, kind: str, largest: Any, arguments: Any) -> None:
        """As the base."""
        if largest is not None:
            row = self.wire[kind, _group_size(arguments), largest.element_size()]
            row[0] += 1
            row[1] += largest.numel() * largest.element_size()


def _product(name: str, args: Any) -> tuple[Any, ...] | None:
    """The key of a product or attention kernel; none for other ops."""
    if (kind := name.removeprefix("_scaled_dot_product_")) in _ATTENTION:
        backward = "backward" in kind
        q, k = (t.shape for t in args[backward:][:2])
        return ("attention_backward" if backward else "attention", q[0], q[2], k[2], q[1], k[1], q[3])
    if name == "_grouped_mm":
        return _grouped(args[0].shape, args[1].shape, args[2].shape[0])
    if name not in ("mm", "addmm", "bmm", "_scaled_mm"):
        return None
    a, b = (t.shape for t in args[name == "addmm" :][:2])
    sides = min(a[-2], b[-1]), max(a[-2], b[-1])
    return ("grouped_gemm", a[0], *sides, a[-1]) if name == "bmm" else ("gemm", *sides, a[-1])


def _grouped(a: Any, b: Any, groups: int) -> tuple[Any, ...]:
    """The key of a product by expert: rows [groups m, k] and a matrix each, or the rows of two tensors for a weight's gradient."""
    rows, columns, depth = (a[0] // groups, b[-1], a[1]) if len(b) == 3 else (a[0], b[1], a[1] // groups)
    return ("grouped_gemm", groups, min(rows, columns), max(rows, columns), depth)


def _group_size(args: Any) -> int:
    """Ranks of the group that a c10d op names, 0 where it does not."""
    for value in tree_leaves(args):
        if isinstance(value, str):
            try:
                return int(torch._C._distributed_c10d._resolve_process_group(value).size())
            except (RuntimeError, ValueError, LookupError):
                continue  # another text among the arguments, such as the reduction's name
        if isinstance(value, torch.ScriptObject):
            try:
                return int(torch.distributed.ProcessGroup.unbox(value).size())
            except (RuntimeError, TypeError):
                continue  # another object, such as the reduction
    return 0
