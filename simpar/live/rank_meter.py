"""What a rank's ops allocate, compute and send, seen at torch's dispatcher: local tensors only, real or fake.

Memory is counted by storage, each once, rounded up to the allocator's 512 bytes, from the op that makes it until it is freed;
`resize_` (FSDP's way to give gathered weights back) is followed. FLOPs are torch's own formulas of the ops that run.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from typing import Any, Final

import torch
from torch._guards import active_fake_mode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

ROUND: Final = 512
_KINDS: Final = (
    ("reduce_scatter", ("reduce_scatter",)), ("all_to_all", ("all_to_all", "alltoall")),
    ("all_reduce", ("all_reduce", "allreduce")),
    ("all_gather", ("all_gather", "allgather")), ("broadcast", ("broadcast",)), ("send_recv", ("send",)),
    ("receive", ("recv",)),
)  # fmt: skip
_FLASH: Final = "flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention"
_ATTENTION: Final = ("attention", "attention_backward", *_FLASH, *(f"{name}_backward" for name in _FLASH))
"""Ops of attention: of a rank, and of torch without its prefix."""
_CLASSES: Final = (("attention", ("attention",)), ("gemm", ("mm", "linear", "bmm")))


def collective_kind(name: str) -> str:
    """simpar's name of a c10d op, "" for one that sends nothing."""
    return next((kind for kind, parts in _KINDS if any(p in name for p in parts)), "")


def flops_class(name: str) -> str:
    """gemm or attention."""
    return next((kind for kind, parts in _CLASSES if any(p in name for p in parts)), "other")


class Meter(TorchDispatchMode):
    """Counts while it is entered; memory keeps being followed between entries.

    Attributes:
        current, peak: bytes alive.
        flops: class -> FLOPs.
        products: (kind, sizes) of products and attention -> calls, keys as in rank_shapes.
        wire: (collective, ranks, element bytes) -> [calls, bytes of the whole tensor].
    """

    def __init__(self) -> None:
        super().__init__()
        self._boxes: dict[int, list[int]] = {}
        self.current = self.peak = 0
        self.flops: dict[str, int] = defaultdict(int)
        self.products: dict[tuple[Any, ...], int] = defaultdict(int)
        self.wire: dict[tuple[str, int, int], list[int]] = defaultdict(lambda: [0, 0])
        self._resize: Any = None
        self._mode: Any = None

    def reset(self) -> None:
        """Forget all counts but what is alive."""
        self.peak = self.current
        self.flops.clear()
        self.products.clear()
        self.wire.clear()

    def follow(self, *values: Any) -> None:
        """Tensors (and modules' parameters and buffers) made before."""
        for value in tree_leaves(values):
            if isinstance(value, torch.nn.Module):
                self.follow(list(value.parameters()), list(value.buffers()))
            elif isinstance(value, torch.Tensor):
                self._see((value.to_local() if isinstance(value, DTensor) else value).untyped_storage())

    def ignore(self, *values: Any) -> None:
        """Never count these."""
        for value in tree_leaves(values):
            if isinstance(value, torch.nn.Module):
                self.ignore(list(value.parameters()), list(value.buffers()))
            elif isinstance(value, torch.Tensor):
                local = value.to_local() if isinstance(value, DTensor) else value
                self._boxes[local.untyped_storage()._cdata] = [0]

    def __enter__(self) -> Any:
        self._mode = active_fake_mode()
        self._resize = torch.UntypedStorage.resize_
        original = self._resize

        def resize(storage: Any, size: int) -> Any:
            found = original(storage, size)
            if storage._cdata in self._boxes:
                self._changed(storage)
            return found

        torch.UntypedStorage.resize_ = resize
        return super().__enter__()

    def __exit__(self, *args: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize
        super().__exit__(*args)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(t is DTensor for t in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if active_fake_mode() is not self._mode:
            return result  # DTensor works out global shapes in a fake mode of its own
        name = func._overloadpacket._qualified_op_name
        if name.startswith(("_c10d_functional::", "c10d::")):
            self._call(name.split("::")[1], args, result)
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor):
                self._see(leaf.untyped_storage())
        if (key := _product(name.partition("::")[2], args)) is not None:
            self.products[key] += 1
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.flops[flops_class(name)] += int(formula(*args, **(kwargs or {}), out_val=result))
        return result

    def _call(self, name: str, args: Any, result: Any) -> None:
        kind = collective_kind(name)
        if not kind:
            return
        tensors = [t for t in tree_leaves((args, result)) if isinstance(t, torch.Tensor)]
        largest = max(tensors, key=lambda t: t.numel() * t.element_size(), default=None)
        if largest is None:
            return
        row = self.wire[kind, _group_size(args), largest.element_size()]
        row[0] += 1
        row[1] += largest.numel() * largest.element_size()

    def _see(self, storage: Any) -> None:
        key = storage._cdata
        if key in self._boxes:
            return
        box = self._boxes[key] = [0]
        weakref.finalize(storage, self._gone, key, box)
        self._set(box, storage.nbytes())

    def _changed(self, storage: Any) -> None:
        self._set(self._boxes[storage._cdata], storage.nbytes())

    def _set(self, box: list[int], amount: int) -> None:
        rounded = -(-amount // ROUND) * ROUND
        self.current += rounded - box[0]
        box[0] = rounded
        self.peak = max(self.peak, self.current)

    def _gone(self, key: int, box: list[int]) -> None:
        self.current -= box[0]
        self._boxes.pop(key, None)


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
