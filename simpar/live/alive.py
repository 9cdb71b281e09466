"""Bytes of the tensors alive and the collectives issued, seen at torch's dispatcher: local tensors only, real or fake.

A storage counts once, from the op that makes it until it is freed; `resize_`, by which FSDP gives gathered weights back, is
followed too.
"""

from __future__ import annotations

import weakref
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_KINDS: Final = (
    ("reduce_scatter", ("reduce_scatter",)), ("all_to_all", ("all_to_all", "alltoall")),
    ("all_reduce", ("all_reduce", "allreduce")),
    ("all_gather", ("all_gather", "allgather")), ("broadcast", ("broadcast",)), ("send_recv", ("send",)),
    ("receive", ("recv",)),
)  # fmt: skip


def collective_kind(name: str) -> str:
    """simpar's name of a c10d op, "receive" for the other end of a send, "" for one that sends nothing (waits, barriers)."""
    return next((kind for kind, parts in _KINDS if any(p in name for p in parts)), "")


class Alive(TorchDispatchMode):
    """Follows storages while it is entered; they are counted off between entries too.

    Args:
        unit: bytes that sizes are rounded up to.

    Attributes:
        current, peak: bytes alive.
    """

    def __init__(self, unit: int = 1) -> None:
        super().__init__()
        self.current = self.peak = 0
        self._unit = unit
        self._boxes: dict[int, list[int]] = {}
        self._resize: Any = None

    def follow(self, *values: Any) -> None:
        """Tensors (and modules' parameters and buffers) made before."""
        for storage in _storages(values):
            self._see(storage)

    def ignore(self, *values: Any) -> None:
        """Never count these."""
        for storage in _storages(values):
            self._boxes[storage._cdata] = [0]

    def __enter__(self) -> Any:
        self._resize = original = torch.UntypedStorage.resize_

        def resize(storage: Any, size: int) -> Any:
            found = original(storage, size)
            if storage._cdata in self._boxes:
                self._set(self._boxes[storage._cdata], storage.nbytes())
            return found

        torch.UntypedStorage.resize_ = resize
        return super().__enter__()

    def __exit__(self, *error: Any) -> Any:
        torch.UntypedStorage.resize_ = self._resize
        return super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any("DTensor" in t.__name__ for t in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        self.ran(func, args, kwargs or {}, result)
        return result

    def ran(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Count an op that has run."""
        name = func._overloadpacket._qualified_op_name
        if name.startswith(("_c10d_functional::", "c10d::")) and (kind := collective_kind(name.split("::")[1])):
            tensors = [t for t in tree_leaves((args, kwargs, result)) if isinstance(t, torch.Tensor)]
            self.called(kind, max(tensors, key=lambda t: t.numel() * t.element_size(), default=None), (args, kwargs))
        self.follow(result)

    def called(self, kind: str, largest: Any, arguments: Any) -> None:
        """Count a collective by its largest tensor, the whole that nccl-tests count."""

    def _see(self, storage: Any) -> None:
        key = storage._cdata
        if key not in self._boxes:
            box = self._boxes[key] = [0]
            weakref.finalize(storage, self._gone, key, box)
            self._set(box, storage.nbytes())

    def _set(self, box: list[int], amount: int) -> None:
        rounded = -(-amount // self._unit) * self._unit
        self.current += rounded - box[0]
        box[0] = rounded
        self.peak = max(self.peak, self.current)

    def _gone(self, key: int, box: list[int]) -> None:
        self.current -= box[0]
        self._boxes.pop(key, None)


def _storages(values: Any) -> list[Any]:
    """Storages of tensors, and of modules' parameters and buffers, on this rank."""
    found = []
    for value in tree_leaves(values):
        if isinstance(value, torch.nn.Module):
            found += _storages([*value.parameters(), *value.buffers()])
        elif isinstance(local := getattr(value, "_local_tensor", value), torch.Tensor) and not local.is_meta:
            found.append(local.untyped_storage())
    return found
